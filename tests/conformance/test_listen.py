"""listen(): its forms, requests, and its end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

import aiordma
from aiordma import BrokenError, ClosedError, ConnectError, Connection, DeviceError
from aiordma.cm import CMID
from tests.conformance.support import DEVICE, HOST, accept_one


async def _connect(port: int) -> Connection:
    return await aiordma.connect(HOST, port, device=DEVICE)


async def test_awaited() -> None:
    """`await listen(...)` gives an open listener that its user closes; closing twice is fine."""
    listener = await aiordma.listen(HOST, 0, device=DEVICE)
    assert listener.port > 0
    assert listener.endpoints[0][:2] == (HOST, listener.port)
    await listener.close()
    await listener.close()


async def test_port_zero() -> None:
    """Port 0 gives a free one, each time another."""
    async with (
        aiordma.listen(HOST, 0, device=DEVICE) as first,
        aiordma.listen(HOST, 0, device=DEVICE) as second,
    ):
        assert 0 < first.port != second.port > 0


async def test_port_again() -> None:
    """A port is free again when its listener closed, though its connections are still open."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        port = listener.port
        accepting = asyncio.create_task(accept_one(listener))
        client = await _connect(port)
        server = await accepting
    async with client, server, aiordma.listen(HOST, port, device=DEVICE) as listener:
        assert listener.port == port
        connecting = asyncio.ensure_future(_connect(port))
        async with await accept_one(listener) as second, await connecting:
            await second.barrier()
        await client.barrier()


async def test_address_in_use() -> None:
    """A port that is taken, by us or by another program, is a DeviceError that says the next step."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        for _ in range(2):
            with pytest.raises(DeviceError, match="another port") as caught:
                await aiordma.listen(HOST, listener.port, device=DEVICE)
            assert caught.value.errno == errno.EADDRINUSE
            assert str(listener.port) in str(caught.value)
            assert HOST in str(caught.value)
        connecting = asyncio.ensure_future(_connect(listener.port))
        async with await accept_one(listener), await connecting as client:
            await client.barrier()


async def test_port_of_a_socket() -> None:
    """On devices that share TCP's ports, one that a plain socket has is in use."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        sock.listen()
        if aiordma.open_device(DEVICE).capabilities.transport == "iwarp":
            with pytest.raises(DeviceError) as caught:
                await aiordma.listen(HOST, sock.getsockname()[1], device=DEVICE)
            assert caught.value.errno == errno.EADDRINUSE


async def test_address_of_another_host() -> None:
    """An address that isn't this machine's is an error that says so."""
    with pytest.raises((DeviceError, aiordma.AddressError)) as caught:
        await aiordma.listen("192.0.2.1", 0, device=DEVICE)
    assert "192.0.2.1" in str(caught.value)


async def test_iteration() -> None:
    """`async for` gives requests in order, and ends when the listener is closed."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:

        async def serve() -> list[Connection]:
            return [await request.accept() async for request in listener]

        serving = asyncio.create_task(serve())
        clients = [await _connect(listener.port) for _ in range(5)]
        await listener.close()
        servers = await serving
        assert [server.peer_addr for server in servers] == [client.local_addr for client in clients]
        await asyncio.gather(*[end.close() for end in (*clients, *servers)])


async def test_close_ends_a_waiting_get_request() -> None:
    """close() ends a get_request of another task, and every later one."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        waiting = [asyncio.create_task(listener.get_request()) for _ in range(2)]
        await asyncio.sleep(0)
        await listener.close()
        for task in waiting:
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await listener.get_request()


async def test_close_with_pending_requests() -> None:
    """Clients that nobody answered are refused when the listener closes: none waits for its time-out."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = [asyncio.ensure_future(_connect(listener.port)) for _ in range(20)]
        taken = await listener.get_request()
        await listener.close()
        await taken.reject()
        for outcome in await asyncio.gather(*connecting, return_exceptions=True):
            assert isinstance(outcome, ConnectError)


async def test_request_outlives_the_listener() -> None:
    """A request that was taken can be accepted after the listener closed, and connections go on."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = [asyncio.ensure_future(_connect(listener.port)) for _ in range(2)]
        requests = [await listener.get_request() for _ in range(2)]
        async with await requests[0].accept() as early:
            await listener.close()
            async with await requests[1].accept() as late:
                clients = await asyncio.gather(*connecting)
                for server in (early, late):
                    await server.send(b"x")
                assert [await client.recv() for client in clients] == [b"x", b"x"]
                await asyncio.gather(*[client.close() for client in clients])


async def test_cancelled_get_request_loses_nothing() -> None:
    """A get_request that is cancelled, or timed out, loses no request."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = []
        accepted = []
        for turn in range(20):
            waiting = asyncio.create_task(listener.get_request())
            await asyncio.sleep(0)
            connecting.append(asyncio.ensure_future(_connect(listener.port)))
            for _ in range(turn):
                await asyncio.sleep(0)
            waiting.cancel()
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(outcome, aiordma.ConnectRequest):
                accepted.append(await outcome.accept())
        while len(accepted) < 20:
            accepted.append(await accept_one(listener))
        clients = await asyncio.gather(*connecting)
        assert {client.local_addr for client in clients} == {server.peer_addr for server in accepted}
        await asyncio.gather(*[end.close() for end in (*clients, *accepted)])


async def test_two_acceptors() -> None:
    """Several tasks may take requests from one listener; each request goes to one."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        accepting = [asyncio.create_task(accept_one(listener)) for _ in range(6)]
        clients = await asyncio.gather(*[_connect(listener.port) for _ in range(6)])
        servers = await asyncio.gather(*accepting)
        assert {client.local_addr for client in clients} == {server.peer_addr for server in servers}
        await asyncio.gather(*[end.close() for end in (*clients, *servers)])


async def test_forgotten_request_warns() -> None:
    """A request that is collected without an answer is a ResourceWarning; its client isn't left waiting."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        request = await listener.get_request()
        with pytest.warns(ResourceWarning, match="neither accepted nor rejected"):
            del request
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await listener.close()
        with pytest.raises(ConnectError):
            await connecting


async def test_parameters_of_the_listener() -> None:
    """param= of listen is for the connections to be; accept may take another."""
    async with aiordma.listen(HOST, 0, device=DEVICE, param=aiordma.ConnParam(recv_size=8)) as listener:
        for param, size in ((None, 8), (aiordma.ConnParam(recv_size=16), 16)):
            connecting = asyncio.ensure_future(_connect(listener.port))
            request = await listener.get_request()
            async with await request.accept(param=param) as server, await connecting as client:
                await client.send(bytes(size))
                assert await server.recv() == bytes(size)
                await asyncio.gather(client.send(bytes(size + 1)), return_exceptions=True)
                with pytest.raises(BrokenError, match="recv_size"):
                    await server.recv()
                with pytest.raises(BrokenError):
                    await client.recv()


def _without(monkeypatch: pytest.MonkeyPatch, number: int, *, families: str) -> None:
    """Let binding to an address of these families fail, as in a kernel that doesn't have them."""
    bind_addr = CMID.bind_addr

    def bind(self: CMID, addr: Any, *, interface: str = "") -> None:
        if families == "all" or ":" in addr[0]:
            raise OSError(number, os.strerror(number))
        bind_addr(self, addr, interface=interface)

    monkeypatch.setattr(CMID, "bind_addr", bind)


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
async def test_every_address_without_ipv6(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Listening at every address passes over a family that the kernel doesn't have."""
    _without(monkeypatch, number, families="IPv6")
    async with aiordma.listen(None, 0, device=DEVICE) as listener:
        assert [":" in endpoint[0] for endpoint in listener.endpoints] == [False]
        connecting = asyncio.ensure_future(_connect(listener.port))
        async with await accept_one(listener), await connecting as client:
            await client.barrier()


async def test_every_address_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no family is left, or the one asked for isn't there, it is an error; nothing is left open."""
    _without(monkeypatch, errno.EAFNOSUPPORT, families="all")
    for host in (None, HOST):
        with pytest.raises(DeviceError) as caught:
            await aiordma.listen(host, 0, device=DEVICE)
        assert caught.value.errno == errno.EAFNOSUPPORT
