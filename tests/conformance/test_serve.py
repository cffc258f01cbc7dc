"""serve(): what the return, the exception and the cancellation of a handler do."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import aiordma
from aiordma import BrokenError, ConnectError, Connection, ConnectRequest, ConnParam, DeviceError, RejectedError
from tests.conformance.support import DEVICE, HOST, capabilities, pattern, refusal_reported, until
from tests.conftest import LoopErrors


async def echo(conn: Connection) -> None:
    """Send back every message."""
    async for message in conn:
        await conn.send(message)


async def _connect(port: int) -> Connection:
    return await aiordma.connect(HOST, port, device=DEVICE)


async def test_entered() -> None:
    """`async with serve(...)` serves within the block; behind it all is closed."""
    async with aiordma.serve(echo, HOST, 0, device=DEVICE) as server:
        assert server.is_serving()
        client = await _connect(server.port)
        await client.send(b"x")
        assert await client.recv() == b"x"
        assert len(server.connections) == 1
    assert not server.is_serving()
    assert not server.connections
    with pytest.raises(BrokenError) as caught:
        await client.recv()
    assert caught.value.orderly
    await client.close()
    with pytest.raises(RejectedError):
        await _connect(server.port)


async def test_awaited() -> None:
    """`await serve(...)` serves until close(), which is idempotent; wait_closed returns then."""
    server = await aiordma.serve(echo, HOST, 0, device=DEVICE)
    waiting = asyncio.create_task(server.wait_closed())
    async with await _connect(server.port) as client:
        await client.send(b"x")
        assert await client.recv() == b"x"
    assert not waiting.done()
    await asyncio.gather(server.close(), server.close())
    await server.close()
    await waiting


async def test_serve_forever() -> None:
    """serve_forever runs until it is cancelled, and closes then."""
    server = await aiordma.serve(echo, HOST, 0, device=DEVICE)
    serving = asyncio.create_task(server.serve_forever())
    client = await _connect(server.port)
    await client.send(b"x")
    assert await client.recv() == b"x"
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not server.is_serving()
    with pytest.raises(BrokenError):
        await client.recv()
    await client.close()


async def test_handler_returns() -> None:
    """A handler's return closes its connection in order: what it sent arrives first."""

    async def handle(conn: Connection) -> None:
        for number in range(50):
            conn.send(b"%d" % number)  # not awaited: closing lets posted work finish

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server:
        for _ in range(3):
            roomy = ConnParam(recv_depth=64)  # for devices on which a SEND waits for no receive
            async with aiordma.connect(HOST, server.port, device=DEVICE, param=roomy) as client:
                assert [message async for message in client] == [b"%d" % number for number in range(50)]
        await until(lambda: not server.connections)


async def test_handler_raises(loop_errors: LoopErrors) -> None:
    """A handler's exception goes to the loop's exception handler, and closes only its connection."""

    async def handle(conn: Connection) -> None:
        async for message in conn:
            if message == b"fail":
                raise KeyError("the handler's own")
            await conn.send(message)

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server:
        async with await _connect(server.port) as witness, await _connect(server.port) as client:
            await client.send(b"fail")
            with pytest.raises(BrokenError):
                await client.recv()
            await witness.send(b"goes on")
            assert await witness.recv() == b"goes on"
            async with await _connect(server.port) as another:
                await another.send(b"too")
                assert await another.recv() == b"too"
        context = loop_errors.pop()
        assert isinstance(context["exception"], KeyError)
        assert "handler" in context["message"]
        assert str(client.local_addr[1]) in context["message"]


async def test_handler_sees_broken(loop_errors: LoopErrors) -> None:
    """A client's fault is an exception in its handler, and reported if that lets it pass.

    Where no event tells the server of it, all that it need see is the client's end.
    """
    async with aiordma.serve(echo, HOST, 0, device=DEVICE) as server, await _connect(server.port) as client:
        await asyncio.gather(client.write(aiordma.RemoteRegion(0, 8, 0), bytes(8)), return_exceptions=True)
        await until(lambda: not server.connections)
        if capabilities().qp_fault_events:
            await until(lambda: loop_errors)
        assert all(isinstance(context["exception"], BrokenError) for context in loop_errors)
        loop_errors.clear()
        with refusal_reported():
            await client.close()


async def test_handler_is_cancelled() -> None:
    """Leaving serve cancels the handlers, waits for their clean-up, and closes their connections after it."""
    cleaned = []

    async def handle(conn: Connection) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await conn.send(b"good bye")
            await asyncio.sleep(0)
            cleaned.append(conn)

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server:
        clients = [await _connect(server.port) for _ in range(5)]
        await until(lambda: len(server.connections) == 5)
    assert len(cleaned) == 5
    for client in clients:
        assert [message async for message in client] == [b"good bye"]
        await client.close()


async def test_handler_that_closes_itself() -> None:
    """A handler may close its connection, or abort it."""

    async def handle(conn: Connection) -> None:
        if await conn.recv() == b"close":
            await conn.close()
        else:
            conn.abort()

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server:
        for how in (b"close", b"abort"):
            async with await _connect(server.port) as client:
                await client.send(how)
                with pytest.raises(BrokenError):
                    await client.recv()


async def test_handler_that_closes_the_server() -> None:
    """A handler may close its server: no deadlock."""

    async def handle(conn: Connection) -> None:
        await conn.recv()
        await server.close()

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server, await _connect(server.port) as client:
        await client.send(b"close")
        await server.wait_closed()


async def test_slow_handler() -> None:
    """A handler that doesn't receive holds up nobody else."""
    release = asyncio.Event()

    async def handle(conn: Connection) -> None:
        if await conn.recv() == b"slow":
            await release.wait()
        await conn.send(b"done")

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server, await _connect(server.port) as slow:
        await slow.send(b"slow")
        for _ in range(10):
            async with await _connect(server.port) as quick:
                await quick.send(b"quick")
                assert await quick.recv() == b"done"
        release.set()
        assert await slow.recv() == b"done"


async def test_private_data() -> None:
    """Private data is fixed, or made for each request."""
    async with aiordma.serve(echo, HOST, 0, device=DEVICE, private_data=b"fixed") as server:
        client = await _connect(server.port)
        assert client.peer_private_data[:5] == b"fixed"
        await client.close()
    async with (
        aiordma.serve(
            echo, HOST, 0, device=DEVICE, private_data=lambda request: request.private_data[:3][::-1]
        ) as server,
        aiordma.connect(HOST, server.port, device=DEVICE, private_data=b"abc") as client,
    ):
        assert client.peer_private_data[:3] == b"cba"


async def test_private_data_fails(loop_errors: LoopErrors) -> None:
    """A function for private data that raises is reported, refuses its client, and the server goes on."""
    broken = True

    def make(_: ConnectRequest) -> bytes:
        if broken:
            raise KeyError("the function's own")
        return b"fine"

    async with aiordma.serve(echo, HOST, 0, device=DEVICE, private_data=make) as server:
        with pytest.raises(ConnectError):
            await _connect(server.port)
        broken = False
        async with await _connect(server.port) as client:
            assert client.peer_private_data[:4] == b"fine"
    assert {type(context["exception"]) for context in loop_errors} == {KeyError}
    loop_errors.clear()


async def test_shared_region() -> None:
    """A region of the server's domain serves every client."""
    async with (
        aiordma.serve(echo, HOST, 0, device=DEVICE) as server,
        server.pd.register(bytearray(pattern(64)), access=aiordma.Access.REMOTE_READ) as region,
        await _connect(server.port) as first,
        await _connect(server.port) as second,
    ):
        assert await first.read(region.remote()) == pattern(64) == await second.read(region.remote())


async def test_client_leaves_while_accepted() -> None:
    """Clients that give up before, while or right after they are accepted: their handler sees an end."""

    async def handle(conn: Connection) -> None:
        with contextlib.suppress(BrokenError):
            await echo(conn)

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server:
        for turn in range(20):
            connecting = asyncio.ensure_future(_connect(server.port))
            for _ in range(turn):
                await asyncio.sleep(0)
            connecting.cancel()
            outcome = (await asyncio.gather(connecting, return_exceptions=True))[0]
            if isinstance(outcome, Connection):
                await outcome.close()
        async with await _connect(server.port) as client:
            await client.send(b"x")
            assert await client.recv() == b"x"
        await until(lambda: not server.connections)


async def test_cannot_listen() -> None:
    """What listen raises, serve raises."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        with pytest.raises(DeviceError):
            await aiordma.serve(echo, HOST, listener.port, device=DEVICE)
