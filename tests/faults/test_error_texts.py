"""What exceptions say: the object, what happened to it, and the next step."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

import aiordma
from aiordma import (
    CMID,
    Access,
    AddressError,
    BrokenError,
    BusyError,
    ClosedError,
    Connection,
    ConnParam,
    DeviceError,
    FlushedError,
    LocalError,
    RejectedError,
    RemoteError,
    RemoteRegion,
    UnsupportedError,
)
from aiordma.device import driver_of, loop_state
from aiordma.testing import connected_pair


def _says(error: BaseException, *parts: object) -> None:
    text = str(error)
    for part in parts:
        assert str(part) in text, f"{part!r} isn't in {text!r}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_refused() -> None:
    """A refused connect: who, what, and what to look at."""
    port = _free_port()
    with pytest.raises(RejectedError) as caught:
        await aiordma.connect("127.0.0.1", port)
    _says(caught.value, "127.0.0.1", port, "Connection refused", "nothing listens", "is the server running")
    assert caught.value.status == 8
    assert isinstance(caught.value, ConnectionError)


async def test_rejected() -> None:
    """A rejected connect: who said no."""
    async with aiordma.listen("127.0.0.1") as listener:

        async def dial() -> Connection:
            return await aiordma.connect("127.0.0.1", listener.port)

        connecting = asyncio.create_task(dial())
        await (await listener.get_request()).reject(b"why")
        with pytest.raises(RejectedError) as caught:
            await connecting
        _says(caught.value, listener.port, "the peer's program rejected")
        assert caught.value.private_data == b"why"


async def test_name_that_does_not_resolve() -> None:
    """A name without an address: the name, and what the resolver says."""
    for act in (aiordma.connect("no.such.host.invalid", 1), aiordma.listen("no.such.host.invalid")):
        with pytest.raises(AddressError) as caught:
            await act
        _says(caught.value, "no.such.host.invalid", "doesn't resolve")
        assert isinstance(caught.value.__cause__, OSError)


async def test_unknown_device() -> None:
    """A device that isn't here: its name, those that are, and the command that says more."""
    with pytest.raises(DeviceError) as caught:
        await aiordma.connect("127.0.0.1", 1, device="mlx5_0")
    _says(caught.value, "mlx5_0", "soft", "aiordma devices")
    assert caught.value.errno == 19
    assert caught.value.hint


async def test_no_rdma_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No RDMA device where one is demanded: the same, in other words."""
    monkeypatch.setattr("aiordma.device._kernel_has_devices", lambda: False)
    with pytest.raises(DeviceError) as caught:
        await aiordma.listen("127.0.0.1", device="rdma")
    _says(caught.value, "no RDMA device is usable", "aiordma devices")


async def test_address_in_use() -> None:
    """A port that is taken: which, and what to do."""
    async with aiordma.listen("127.0.0.1") as listener:
        with pytest.raises(DeviceError) as caught:
            await aiordma.listen("127.0.0.1", listener.port)
        _says(caught.value, "127.0.0.1", listener.port, "in use", "take another port")
        assert caught.value.verb
        assert isinstance(caught.value, OSError)


async def test_foreign_address() -> None:
    """An address that isn't this machine's: which, and that."""
    with pytest.raises(DeviceError) as caught:
        await aiordma.listen("192.0.2.1", 7471)
    _says(caught.value, "192.0.2.1", 7471, "isn't one of this machine's")


async def test_remote_error() -> None:
    """A refused READ: operation, queue pair, peer, status, the peer's reason, the next step."""
    async with connected_pair() as pair:
        remote = pair.server.alloc(8, access=Access.REMOTE_WRITE).remote()
        with pytest.raises(RemoteError) as caught:
            await pair.client.read(remote)
        error = caught.value
        peer = pair.client.peer_addr
        _says(error, "RDMA_READ", f"QP {pair.client.qp.qp_num}", peer[1], "REM_ACCESS_ERR", "access", "check that key")
        assert error.reason
        assert error.vendor_err


async def test_terminated() -> None:
    """A refused WRITE shows in the next call: the peer, and the reason it gave."""
    async with connected_pair() as pair, asyncio.timeout(20):
        remote = pair.server.alloc(8, access=Access.REMOTE_READ).remote()
        pair.client.write(remote, b"8 bytes!")
        with pytest.raises(BrokenError) as caught:
            await pair.client.recv()
        _says(caught.value, pair.client.peer_addr[1], "the peer's device ended the connection", "access")
        with pytest.raises(BrokenError) as caught:
            await pair.server.recv()
        _says(caught.value, pair.server.peer_addr[1], "this side ended the connection", "access")


async def test_local_error() -> None:
    """A request that names freed memory: operation, status, and what is wrong with the buffer."""
    async with connected_pair() as pair:
        remote = pair.server.alloc(8, access=Access.REMOTE_READ).remote()
        local = pair.client.register(bytearray(8))
        local.deregister()
        with pytest.raises(LocalError) as caught:
            await pair.client.read(remote, into=local)
        _says(caught.value, "RDMA_READ", f"QP {pair.client.qp.qp_num}", "LOC_PROT_ERR", "isn't registered")


async def test_message_too_long() -> None:
    """A message longer than recv_size: both ends are told, the receiver with the parameter to raise."""
    async with connected_pair(server_param=ConnParam(recv_size=16)) as pair, asyncio.timeout(20):
        await pair.client.send(bytes(17))
        with pytest.raises(BrokenError) as caught:
            await pair.server.recv()
        _says(caught.value, pair.server.peer_addr[1], "LOC_LEN_ERR", "recv_size", "ConnParam")
        with pytest.raises(BrokenError) as caught:
            await pair.client.recv()
        _says(caught.value, pair.client.peer_addr[1], "message too long for the posted receive")


async def test_flushed() -> None:
    """A request behind a failure: its own operation, and the failure as the cause."""
    async with connected_pair() as pair:
        remote = pair.server.alloc(8, access=Access.REMOTE_WRITE).remote()
        first, second = pair.client.read(remote), pair.client.fetch_add(remote, 1)
        with pytest.raises(RemoteError) as cause:
            await first
        with pytest.raises(FlushedError) as caught:
            await second
        _says(caught.value, "ATOMIC_FETCH_AND_ADD", f"QP {pair.client.qp.qp_num}", "WR_FLUSH_ERR", "see the cause")
        assert caught.value.__cause__ is cause.value
        with pytest.raises(BrokenError) as broken:
            pair.client.barrier()
        _says(broken.value, pair.client.peer_addr[1], cause.value)
        assert broken.value.__cause__ is cause.value


async def test_closed() -> None:
    """Use of what was closed: which object."""
    async with connected_pair() as pair:
        await pair.client.close()
        with pytest.raises(ClosedError) as caught:
            pair.client.send(b"x")
        _says(caught.value, "Connection to", pair.client.peer_addr[1], "closed")
        pair.server.abort()
        with pytest.raises(ClosedError) as caught:
            await pair.server.recv()
        _says(caught.value, "Connection to", "aborted")


async def test_answered_twice() -> None:
    """A request that is answered twice: which."""
    async with aiordma.listen("127.0.0.1") as listener:

        async def dial() -> Connection:
            return await aiordma.connect("127.0.0.1", listener.port)

        connecting = asyncio.create_task(dial())
        request = await listener.get_request()
        server = await request.accept()
        for answer in (request.accept, request.reject):
            with pytest.raises(ClosedError) as caught:
                await answer()
            _says(caught.value, "ConnectRequest from", request.peer_addr[1], "answered before")
        await (await connecting).close()
        await server.close()


_RECEIVERS: list[Callable[[Connection], Awaitable[object]]] = [
    lambda conn: conn.recv(),
    lambda conn: conn.recv_message(),
    lambda conn: conn.recv_into(bytearray(8)),
    anext,
]


@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(4))
async def test_two_tasks_receive(first: int, second: int) -> None:
    """Two tasks that receive from one connection: the second is told so; the first gets its message."""
    async with connected_pair() as pair, asyncio.timeout(20):

        async def receive() -> object:
            return await _RECEIVERS[first](pair.server)

        receiving = asyncio.create_task(receive())
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="another task is receiving"):
            await _RECEIVERS[second](pair.server)
        await pair.client.send(b"for one")
        got = await receiving
        assert got in (b"for one", 7) or bytes(got.data) == b"for one"  # type: ignore[attr-defined]
        if first == 1:
            got.release()  # type: ignore[attr-defined]


async def test_two_tasks_use_an_identifier() -> None:
    """Two steps of one identifier at a time: the second is told so."""
    cm_id = CMID(loop_state(), driver_of("soft"))
    cm_id.bind_addr(("127.0.0.1", 0))
    cm_id.listen(1)
    waiting = asyncio.create_task(cm_id.get_request())
    resolving = asyncio.create_task(cm_id.resolve_addr(("127.0.0.1", 1)))
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="wait for this listener's requests"):
        await cm_id.get_request()
    with pytest.raises(BusyError, match="a step is under way"):
        await cm_id.resolve_route()
    await resolving
    cm_id.destroy()
    with pytest.raises(ClosedError, match="CMID"):
        await waiting
    with pytest.raises(ClosedError, match="CMID"):
        await cm_id.resolve_route()


async def test_too_much_private_data() -> None:
    """Private data over the limit: how much it is, and how much it may be; nothing was sent."""
    with pytest.raises(ValueError, match="509 bytes, this device carries 508"):
        await aiordma.connect("127.0.0.1", 1, private_data=bytes(509))


async def test_no_crc(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRC asked for on a machine that can't: both calls say what to install, and the listener goes on."""
    monkeypatch.setattr("aiordma.drivers.soft.handshake.CRC32C_AVAILABLE", False)
    param = ConnParam(crc=True)
    async with aiordma.listen("127.0.0.1") as listener, asyncio.timeout(20):
        with pytest.raises(UnsupportedError, match=r"pip install 'aiordma\[crc\]'"):
            await aiordma.connect("127.0.0.1", listener.port, param=param)

        async def dial() -> Connection:
            return await aiordma.connect("127.0.0.1", listener.port)

        connecting = asyncio.create_task(dial())
        with pytest.raises(UnsupportedError, match=r"pip install 'aiordma\[crc\]'"):
            await (await listener.get_request()).accept(param=param)
        with pytest.raises(RejectedError):
            await connecting
        connecting = asyncio.create_task(dial())
        server = await (await listener.get_request()).accept()
        await (await connecting).close()
        await server.close()


async def test_arguments() -> None:
    """Arguments that can't be right are named with their values, and harm nothing."""
    async with connected_pair() as pair:
        conn, local = pair.client, pair.client.alloc(16)
        remote = pair.server.alloc(8, access=Access.REMOTE_READ | Access.REMOTE_WRITE).remote()
        with pytest.raises(ValueError, match="16 bytes to read, but the remote region has 8"):
            conn.read(remote, into=local)
        with pytest.raises(ValueError, match="9 bytes to write, but the remote region has 8"):
            conn.write(remote, bytes(9))
        with pytest.raises(ValueError, match="imm is 32 bits, not 4294967296"):
            conn.write(remote, b"x", imm=1 << 32)
        with pytest.raises(ValueError, match="an atomic works on 8 bytes, the remote region has 4"):
            conn.fetch_add(remote[:4], 1)
        with pytest.raises(ValueError, match="5 pieces, the queue pair takes 4"):
            conn.send([local[:1]] * 5)
        with pytest.raises(TypeError, match="not bytes: see register"):
            conn.send([b"x"])
        with pytest.raises(UnsupportedError, match="device soft can't do send with immediate; write"):
            conn.send(b"x", imm=1)
        with pytest.raises(ValueError, match="got 19"):
            RemoteRegion.from_bytes(bytes(19))
        await pair.server.send(b"long message")
        with pytest.raises(ValueError, match="the message has 12 bytes, the buffer 4"):
            await conn.recv_into(local[:4])
        assert await conn.recv() == b"long message"
        await conn.barrier()
