"""Servers whose handlers raise, hang, resist and are slow; a listener out of descriptors; many clients at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiordma
from aiordma import Access, BrokenError, ConnectError, Connection, ConnectRequest, FlushedError, RejectedError, Server
from aiordma.testing import connected_pair
from tests.conftest import LoopErrors
from tests.faults.support import until


async def _echo(conn: Connection) -> None:
    async for message in conn:
        await conn.send(message)


async def _asked(conn: Connection) -> None:
    """A handler that does what its client asks for."""
    async for message in conn:
        if message == b"raise":
            raise ValueError("asked for")
        if message == b"hang":
            await asyncio.get_running_loop().create_future()
        if message == b"return":
            return
        if message == b"close":
            await conn.close()
            return
        await conn.send(message)


async def _connect(server: Server) -> Connection:
    return await aiordma.connect("127.0.0.1", server.port)


async def _served(conn: Connection) -> None:
    async with asyncio.timeout(20):
        await conn.send(b"ping")
        assert await conn.recv() == b"ping"


async def test_handler_raises(loop_errors: LoopErrors) -> None:
    """A handler's exception reaches the loop's handler once, with what it needs, and closes its connection only."""
    async with aiordma.serve(_asked, "127.0.0.1") as server:
        good, bad = await _connect(server), await _connect(server)
        await _served(good)
        await bad.send(b"raise")
        async with asyncio.timeout(20):
            with pytest.raises(BrokenError) as caught:
                await bad.recv()
        assert caught.value.orderly
        await bad.close()
        await _served(good)
        async with await _connect(server) as another:
            await _served(another)
        await good.close()
    (context,) = loop_errors
    assert str(context["exception"]) == "asked for"
    assert "handler of <Connection to" in context["message"]
    loop_errors.clear()


async def test_a_hundred_handlers_raise(loop_errors: LoopErrors) -> None:
    """Each of a hundred handlers that raise is reported, once."""
    async with aiordma.serve(_asked, "127.0.0.1") as server:
        conns = [await _connect(server) for _ in range(100)]
        for conn in conns:
            conn.send(b"raise")
        await asyncio.gather(*[conn.close() for conn in conns])
        await until(lambda: not server.connections)
    assert [str(context["exception"]) for context in loop_errors] == ["asked for"] * 100
    loop_errors.clear()


async def test_handler_is_not_a_coroutine_function(loop_errors: LoopErrors) -> None:
    """A handler that raises before it is a coroutine is reported like any other."""

    def handler(conn: Connection) -> asyncio.Future[None]:
        raise TypeError("at once")

    async with aiordma.serve(handler, "127.0.0.1") as server, await _connect(server) as conn:
        async with asyncio.timeout(20):
            with pytest.raises(BrokenError):
                await conn.recv()
    assert [str(context["exception"]) for context in loop_errors] == ["at once"]
    loop_errors.clear()


async def test_private_data_raises(loop_errors: LoopErrors) -> None:
    """A function for private data that raises rejects that peer, and is reported; the next one is served."""
    calls = 0

    def private_data(request: ConnectRequest) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise LookupError("no data")
        return b"x" * 509 if calls == 2 else b"fine"

    async with aiordma.serve(_echo, "127.0.0.1", private_data=private_data) as server, asyncio.timeout(20):
        for _ in range(2):
            with pytest.raises(RejectedError):
                await _connect(server)
        async with await _connect(server) as conn:
            assert conn.peer_private_data == b"fine"
            await _served(conn)
    assert [type(context["exception"]) for context in loop_errors] == [LookupError, ValueError]
    loop_errors.clear()


async def test_handler_returns() -> None:
    """A handler's return closes its connection in order; having closed it itself is no fault."""
    async with aiordma.serve(_asked, "127.0.0.1") as server:
        for ask in (b"return", b"close"):
            async with await _connect(server) as conn, asyncio.timeout(20):
                await conn.send(ask)
                assert [message async for message in conn] == []


async def test_handler_hangs() -> None:
    """A handler that hangs holds up nobody else, and ends when the server closes."""
    async with aiordma.serve(_asked, "127.0.0.1") as server:
        stuck, good = await _connect(server), await _connect(server)
        await stuck.send(b"hang")
        await stuck.send(b"unanswered")
        await _served(good)
        await good.close()
        async with asyncio.timeout(20):
            await server.close()
            with pytest.raises(BrokenError):
                await stuck.recv()
        await stuck.close()


async def test_client_of_a_hanging_handler_leaves() -> None:
    """A peer that leaves while its handler hangs: the handler goes on, and gets BrokenError from what it does next."""
    outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    left = asyncio.Event()

    async def handler(conn: Connection) -> None:
        await left.wait()
        try:
            while True:
                await conn.send(b"too late")
                await asyncio.sleep(0)
        except (BrokenError, FlushedError) as error:
            outcome.set_result(error)

    async with aiordma.serve(handler, "127.0.0.1") as server:
        conn = await _connect(server)
        await conn.close()
        left.set()
        async with asyncio.timeout(20):
            assert isinstance(await outcome, (BrokenError, FlushedError))


async def test_slow_to_accept() -> None:
    """A server that takes its time before it accepts: the client waits, and what it sent at once is there then."""
    async with aiordma.listen("127.0.0.1") as listener:

        async def dial() -> Connection:
            return await aiordma.connect("127.0.0.1", listener.port)

        connecting = [asyncio.create_task(dial()) for _ in range(5)]
        async with asyncio.timeout(20):
            await until(lambda: listener._queue.qsize() == 5)
            assert not any(task.done() for task in connecting)
            for _ in range(5):
                server = await (await listener.get_request()).accept()
                server.send(b"at last")
                (done,), pending = await asyncio.wait(connecting, return_when=asyncio.FIRST_COMPLETED)
                connecting = list(pending)
                assert await done.result().recv() == b"at last"
                await done.result().close()
                await server.close()


async def test_client_gives_up_on_a_slow_server() -> None:
    """Clients that gave up before they were accepted cost the server one accept each, and no more."""
    async with aiordma.listen("127.0.0.1") as listener:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await aiordma.connect("127.0.0.1", listener.port)
        async with asyncio.timeout(20):
            for _ in range(3):
                request = await listener.get_request()
                with contextlib.suppress(ConnectError):
                    conn = await request.accept()
                    with pytest.raises(BrokenError):
                        await conn.recv()
                    await conn.close()


async def test_200_clients_at_once() -> None:
    """200 clients that connect at once are all served."""
    async with aiordma.serve(_echo, "127.0.0.1") as server:

        async def use(number: int) -> bytes:
            async with await _connect(server) as conn:
                await conn.send(str(number).encode())
                return await conn.recv()

        async with asyncio.timeout(50):
            got = await asyncio.gather(*[use(number) for number in range(200)])
        assert got == [str(number).encode() for number in range(200)]


async def test_1000_connections() -> None:
    """A thousand connections to one server, all open at once, work."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], max(limit[0], 4096)), limit[1]))
    try:
        async with aiordma.serve(_echo, "127.0.0.1") as server, asyncio.timeout(50):
            region = server.pd.alloc(8, access=Access.REMOTE_ATOMIC)
            conns: list[Connection] = []
            for _ in range(10):
                conns += await asyncio.gather(*[_connect(server) for _ in range(100)])
            assert len(server.connections) == 1000
            counts = await asyncio.gather(*[conn.fetch_add(region.remote(), 1) for conn in conns])
            assert sorted(counts) == list(range(1000))
            await asyncio.gather(*[conn.close() for conn in conns])
            await region.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    gc.collect()


# -- out of descriptors ---------------------------------------------------------------------------------------------

_OUT_OF_DESCRIPTORS = """
import asyncio, os, resource
import aiordma

async def echo(conn):
    async for message in conn:
        await conn.send(message)

async def main():
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with aiordma.serve(echo, "127.0.0.1") as server:
        async with aiordma.connect("127.0.0.1", server.port) as conn:
            await conn.send(b"1")
            assert await conn.recv() == b"1"
            # One is left, for the socket that connects.
            before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            spare = os.dup(0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))
            os.close(spare)
            connecting = asyncio.create_task(dial(server.port))
            while not reported:
                await asyncio.sleep(0.01)
            assert len(reported) == 1, reported
            assert "can't accept" in reported[0]["message"], reported
            assert reported[0]["exception"].errno == 24
            # It goes on with those it has.
            await conn.send(b"2")
            assert await conn.recv() == b"2"
            # And a connect says what is wrong.
            try:
                await aiordma.connect("127.0.0.1", server.port)
            except aiordma.ConnectError as error:
                assert "Too many open files" in str(error), error
            else:
                raise AssertionError("connected without a descriptor")
            assert not connecting.done()
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            waited = await connecting
            await waited.send(b"3")
            assert await waited.recv() == b"3"
            await waited.close()

async def dial(port):
    return await aiordma.connect("127.0.0.1", port)

asyncio.run(main())
"""


def test_out_of_descriptors() -> None:
    """Without a free descriptor the listener reports it once, serves who is connected, accepts again when it can."""
    command = [sys.executable, "-X", "dev", "-c", _OUT_OF_DESCRIPTORS]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=40, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@contextlib.contextmanager
def _accept_fails(monkeypatch: pytest.MonkeyPatch, times: int) -> Iterator[None]:
    """Let accept() fail as it does without a free descriptor, so many times."""
    left = times

    class Failing(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal left
            if left:
                left -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    with monkeypatch.context() as patch:
        patch.setattr("aiordma.drivers.soft.cm.socket.socket", Failing)
        yield


async def test_full_backlog_after_a_failed_accept(monkeypatch: pytest.MonkeyPatch, loop_errors: LoopErrors) -> None:
    """A listener that once couldn't accept goes on when its backlog was full later, and has room again."""
    monkeypatch.setattr("aiordma.drivers.soft.cm.REQUEST_TIMEOUT", 0.1)
    with _accept_fails(monkeypatch, 1):
        async with aiordma.serve(_echo, "127.0.0.1", backlog=2) as server, asyncio.timeout(20):
            async with await _connect(server) as conn:
                await _served(conn)
            assert len(loop_errors) == 1
            loop_errors.clear()
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
            async with await _connect(server) as conn:
                await _served(conn)
            for _, writer in silent:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def test_pair_that_fails_to_accept() -> None:
    """The tests' own pair leaves nothing when its block raises."""
    with pytest.raises(LookupError):
        async with connected_pair():
            raise LookupError
