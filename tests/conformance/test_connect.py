"""connect(): addresses, names, failures, and the two forms."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import (
    AddressError,
    BrokenError,
    ClosedError,
    ConnectError,
    ConnParam,
    RejectedError,
    RejectReason,
)
from aiordma.opening import Opening
from tests.conformance.support import DEVICE, HOST, HOST6, accept_one, offer, pair, pattern, require_ipv6


@contextlib.asynccontextmanager
async def connected(
    connecting: Opening[aiordma.Connection], listener: aiordma.Listener
) -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Connect and accept."""
    accepting = asyncio.create_task(accept_one(listener))
    async with connecting as client, await accepting as server:
        yield client, server


async def test_awaited() -> None:
    """`await connect(...)` gives an open connection that its user closes."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        accepting = asyncio.create_task(accept_one(listener))
        client = await aiordma.connect(HOST, listener.port, device=DEVICE)
        server = await accepting
        await client.send(b"x")
        assert await server.recv() == b"x"
        await asyncio.gather(client.close(), server.close())


async def test_entered() -> None:
    """`async with connect(...)` closes at the end of the block."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        accepting = asyncio.create_task(accept_one(listener))
        async with aiordma.connect(HOST, listener.port, device=DEVICE) as client:
            server = await accepting
            await client.send(b"x")
            assert await server.recv() == b"x"
        with pytest.raises(ClosedError):
            client.send(b"y")
        with pytest.raises(BrokenError):
            await server.recv()
        await server.close()


async def test_addresses() -> None:
    """Each side knows its own and the other's address."""
    async with pair() as ends:
        assert ends.client.peer_addr[:2] == (HOST, ends.listener.port) == ends.server.local_addr[:2]
        assert ends.client.local_addr == ends.server.peer_addr


async def test_ipv6() -> None:
    """Everything works over IPv6."""
    require_ipv6()
    async with pair(host=HOST6) as ends:
        _, remote = offer(ends.server, 20_000)
        assert ends.client.peer_addr[0] == HOST6
        assert await ends.client.read(remote) == pattern(20_000)
        await ends.server.send(b"x")
        assert await ends.client.recv() == b"x"


@pytest.mark.parametrize("host", [None, ""])
async def test_wildcard(host: str | None) -> None:
    """A wildcard listener is reached by IPv4 and IPv6, at one port, and says where."""
    require_ipv6()
    async with aiordma.listen(host, 0, device=DEVICE) as listener:
        assert {endpoint[1] for endpoint in listener.endpoints} == {listener.port}
        assert {endpoint[0] for endpoint in listener.endpoints} >= {"0.0.0.0", "::"}
        for address in (HOST, HOST6, HOST):
            async with connected(aiordma.connect(address, listener.port, device=DEVICE), listener) as (
                client,
                server,
            ):
                await client.send(b"x")
                assert await server.recv() == b"x"
                assert server.local_addr[0] == address


async def test_wildcard_of_one_family() -> None:
    """0.0.0.0 is IPv4 only, :: is IPv6 only: both may be bound beside each other."""
    require_ipv6()
    async with (
        aiordma.listen("0.0.0.0", 0, device=DEVICE) as four,
        aiordma.listen("::", four.port, device=DEVICE) as six,
    ):
        assert four.port == six.port
        for listener, address in ((four, HOST), (six, HOST6)):
            async with connected(aiordma.connect(address, listener.port, device=DEVICE), listener) as (
                client,
                _,
            ):
                await client.barrier()


async def test_host_name() -> None:
    """A name is resolved; where it has several addresses, one that answers is taken."""
    if not HOST.startswith("127."):
        pytest.skip("localhost isn't an address of the device under test")
    async with (
        aiordma.listen("127.0.0.1", 0, device=DEVICE) as listener,
        connected(aiordma.connect("localhost", listener.port, device=DEVICE), listener) as (client, server),
    ):
        await server.send(b"x")
        assert await client.recv() == b"x"


async def test_source_address() -> None:
    """local_addr is where the connection comes from."""
    source = "127.0.0.2" if HOST == "127.0.0.1" else HOST
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = aiordma.connect(HOST, listener.port, device=DEVICE, local_addr=(source, 0))
        async with connected(connecting, listener) as (client, server):
            assert client.local_addr[0] == source == server.peer_addr[0]
            assert client.local_addr[1] == server.peer_addr[1] != 0


async def test_source_address_of_another_host() -> None:
    """A source address that isn't this machine's is a ConnectError, at once."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        with pytest.raises(ConnectError):
            await aiordma.connect(HOST, listener.port, device=DEVICE, local_addr=("192.0.2.1", 0))


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 70 + ".invalid", "..", "300.1.2.3.4"])
async def test_unresolvable(name: str) -> None:
    """A name that doesn't resolve is an AddressError with the name in it, for connect and listen."""
    with pytest.raises(AddressError) as caught:
        await aiordma.connect(name, 7471, device=DEVICE)
    assert name in str(caught.value)
    with pytest.raises(AddressError):
        await aiordma.listen(name, 0, device=DEVICE)


async def test_refused() -> None:
    """Where nothing listens: RejectedError for no such service, that asks whether the server runs."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        port = listener.port
    for _ in range(3):
        with pytest.raises(RejectedError, match="server running") as caught:
            await aiordma.connect(HOST, port, device=DEVICE)
        assert caught.value.status == RejectReason.INVALID_SERVICE_ID
        assert str(port) in str(caught.value)


async def test_refused_on_every_address() -> None:
    """A name with several addresses that all refuse gives one error."""
    if not HOST.startswith("127."):
        pytest.skip("localhost isn't an address of the device under test")
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        port = listener.port
    with pytest.raises(RejectedError):
        await aiordma.connect("localhost", port, device=DEVICE)


@pytest.mark.parametrize("port", [-1, 65_536, 1 << 40])
async def test_impossible_port(port: int) -> None:
    """A port that can't be is a clear error, and leaves nothing open."""
    with pytest.raises((ValueError, OverflowError, ConnectError)):
        await aiordma.connect(HOST, port, device=DEVICE)


async def test_time_out() -> None:
    """A server that doesn't accept: asyncio.timeout ends the attempt; the next one works."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        limit = asyncio.timeout(None)

        async def attempt() -> None:
            async with limit:
                await aiordma.connect(HOST, listener.port, device=DEVICE)

        attempting = asyncio.create_task(attempt())
        gone = await listener.get_request()
        limit.reschedule(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            await attempting
        await gone.reject()
        async with connected(aiordma.connect(HOST, listener.port, device=DEVICE), listener) as (client, _):
            await client.barrier()


async def test_accepting_who_has_left() -> None:
    """Accepting a client that gave up fails, at the accept or right behind it."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        request = await listener.get_request()
        connecting.cancel()
        await asyncio.wait([connecting])
        with pytest.raises((ConnectError, BrokenError)):
            async with await request.accept() as server:
                await server.recv()


async def _connect(port: int) -> aiordma.Connection:
    return await aiordma.connect(HOST, port, device=DEVICE)


async def test_not_an_rdma_server() -> None:
    """A plain TCP server that answers with something else is a ConnectError, never a hang."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        sock.listen()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        connecting = asyncio.ensure_future(_connect(sock.getsockname()[1]))
        accepting = asyncio.ensure_future(loop.sock_accept(sock))
        await asyncio.wait([accepting, connecting], return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            peer, _ = accepting.result()
            # Zeros where an MPA reply has the length of its private data, at 18: siw in Linux 6.12 has a kernel fault
            # (it copies from a null pointer) over a reply with more than 512 there, as that of a web server.
            await loop.sock_sendall(peer, b"220 mail.example\r\n" + bytes(600))
            with pytest.raises(ConnectError):
                await connecting
            peer.close()
        else:
            accepting.cancel()
            with pytest.raises(ConnectError):
                connecting.result()


async def test_close_twice() -> None:
    """close() is idempotent, from several tasks at once, and so is leaving the block."""
    async with pair() as ends:
        await asyncio.gather(*[ends.client.close() for _ in range(3)], ends.server.close())
        await ends.client.close()


async def test_abort() -> None:
    """abort() ends at once what is in flight; closing after it, and a second abort, do nothing."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4 << 20)
        reading = ends.client.read(remote)
        ends.client.abort()
        with pytest.raises(aiordma.FlushedError):
            await reading
        ends.client.abort()
        await ends.client.close()
        with pytest.raises(BrokenError):
            await ends.server.recv()


async def test_abort_during_close() -> None:
    """abort() while a close waits ends that too."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4 << 20)
        reading = ends.client.read(remote)
        closing = asyncio.create_task(ends.client.close())
        await asyncio.sleep(0)
        ends.client.abort()
        await closing
        with pytest.raises(aiordma.FlushedError):
            await reading


async def test_close_finishes_what_is_posted() -> None:
    """close() lets posted work finish first: everything sent arrives, and every READ has its data."""
    async with pair(client_param=ConnParam(max_send_wr=4)) as ends:
        _, remote = offer(ends.server, 100_000)
        reads = [ends.client.read(remote) for _ in range(10)]
        for number in range(50):
            ends.client.send(b"%d" % number)
        await asyncio.gather(ends.client.close(), received := asyncio.ensure_future(_all(ends.server)))
        assert received.result() == [b"%d" % number for number in range(50)]
        assert all(data == pattern(100_000) for data in await asyncio.gather(*reads))


async def _all(end: aiordma.Connection) -> list[bytes]:
    return [message async for message in end]


async def test_unclosed_connection_warns() -> None:
    """A connection that is collected open is a ResourceWarning, and frees what it held."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        accepting = asyncio.create_task(accept_one(listener))
        client = await aiordma.connect(HOST, listener.port, device=DEVICE)
        async with await accepting as server:
            with pytest.warns(ResourceWarning, match="unclosed <Connection"):
                del client
            with pytest.raises(BrokenError):
                await server.recv()
