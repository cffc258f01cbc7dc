"""Cancelling connect, accept and the listener's awaitables, before, during and after; nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest

import aiordma
from aiordma import Access, BrokenError, ClosedError, ConnectError, Connection, ConnectRequest
from aiordma.device import loop_state
from tests.faults import raw_peer
from tests.faults.raw_peer import RawListener
from tests.faults.support import dial, opened, until


async def _handle_for_ever(conn: Connection) -> None:
    with contextlib.suppress(BrokenError):
        await conn.recv()


async def _ended(task: asyncio.Task[object]) -> None:
    """Cancel a task, and see that it ends as cancelled."""
    task.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([task])
    assert task.cancelled()


async def test_connect_cancelled_before_it_starts() -> None:
    """A connect cancelled before its first step does nothing."""
    with RawListener() as listener:
        task = asyncio.create_task(dial(listener.port))
        await _ended(task)
        with pytest.raises(BlockingIOError):
            listener.sock.accept()
        assert opened() == (0, 0)


async def test_connect_cancelled_after_any_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connect cancelled after n turns of the loop, for every n up to its end, leaves nothing behind."""

    async def resolve(host: str, port: int) -> list[tuple[str, int]]:  # a thread's turns can't be counted
        return [(host, port)]

    monkeypatch.setattr("aiordma.connector.resolve_host", resolve)
    async with aiordma.serve(_handle_for_ever, "127.0.0.1") as server:
        done, turns = False, 0
        while not done:
            task = asyncio.create_task(dial(server.port))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await task.result().close()
            turns += 1
        assert turns > 3
    assert opened() == (0, 0)


async def test_connect_cancelled_while_the_name_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connect cancelled while its host's name is being looked up ends at once."""
    asked = asyncio.Event()

    async def never(*_args: object, **_kwargs: object) -> list[object]:
        asked.set()
        await asyncio.get_running_loop().create_future()
        return []

    monkeypatch.setattr("aiordma.connector.resolve_host", never)
    task = asyncio.create_task(dial(1, "somewhere"))
    await asked.wait()
    await _ended(task)
    assert opened() == (0, 0)


async def test_connect_cancelled_during_tcpdial() -> None:
    """A connect cancelled while TCP waits for the peer's host closes its socket."""
    with RawListener(backlog=0) as listener:
        # Fill the queue of a listener that doesn't accept: Linux then drops further SYNs.
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", listener.port))
        task = asyncio.create_task(dial(listener.port))
        for _ in range(10):
            await asyncio.sleep(0.001)  # the look-up of the host takes a thread
        (cm_id,) = loop_state()._channels["soft"].ids  # type: ignore[attr-defined]
        assert cm_id._sock is not None
        assert cm_id._timer is None  # it would run if TCP were connected
        await _ended(task)
        assert opened() == (0, 0)
        for filler in fillers:
            filler.close()


async def test_connect_cancelled_before_the_reply() -> None:
    """A connect cancelled after its Request went out: the server sees the end."""
    with RawListener() as listener:
        task = asyncio.create_task(dial(listener.port))
        with await listener.accept() as peer:
            await peer.frame()
            await _ended(task)
            assert opened() == (0, 0)
            async with asyncio.timeout(20):
                await peer.ended()


async def test_connect_cancelled_in_the_turn_of_its_success() -> None:
    """A connect whose Reply came in the same turn as the cancel: cancelled, and closed; or there, and usable."""
    for turns in range(6):
        with RawListener() as listener:
            task = asyncio.create_task(dial(listener.port))
            with await listener.respond() as peer:
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    async with asyncio.timeout(20):
                        await peer.ended()
                else:
                    await peer.send(raw_peer.send(1, b"there"))
                    assert await task.result().recv() == b"there"
                    peer.close()
                    await task.result().close()
            assert opened() == (0, 0)


async def test_get_request_cancelled() -> None:
    """A cancelled get_request loses no request, also when both come in one turn."""
    async with aiordma.listen("127.0.0.1") as listener:
        waiting = asyncio.create_task(listener.get_request())
        await asyncio.sleep(0)
        await _ended(waiting)
        waiting = asyncio.create_task(listener.get_request())
        await asyncio.sleep(0)
        connecting = asyncio.create_task(dial(listener.port))
        async with asyncio.timeout(20):
            await until(lambda: not listener._queue.empty())
            # The request is there, and the waiter is woken but hasn't run.
            waiting.cancel()
            await asyncio.wait([waiting])
            request = waiting.result() if not waiting.cancelled() else await listener.get_request()
            server = await request.accept()
            await (await connecting).close()
        await server.close()


async def _request(listener: aiordma.Listener) -> tuple[ConnectRequest, asyncio.Task[Connection]]:
    connecting = asyncio.create_task(dial(listener.port))
    return await listener.get_request(), connecting


async def test_accept_cancelled() -> None:
    """An accept cancelled during its wait: the peer is disconnected; the listener goes on, and so does its memory."""
    async with aiordma.listen("127.0.0.1") as listener:
        request, connecting = await _request(listener)
        request.alloc(4096, access=Access.REMOTE_READ)
        accepting = asyncio.create_task(request.accept())
        await asyncio.sleep(0)
        await _ended(accepting)
        async with asyncio.timeout(20):
            try:
                client = await connecting
            except ConnectError:
                pass
            else:
                with pytest.raises(BrokenError):
                    await client.recv()
                await client.close()
            with pytest.raises(ClosedError):
                await request.accept()
            request, connecting = await _request(listener)
            server = await request.accept()
            await (await connecting).close()
            await server.close()


async def test_accept_cancelled_before_it_starts() -> None:
    """An accept cancelled before its first step leaves the request unanswered: it can still be accepted."""
    async with aiordma.listen("127.0.0.1") as listener:
        request, connecting = await _request(listener)
        await _ended(asyncio.create_task(request.accept()))
        server = await request.accept()
        client = await connecting
        await client.send(b"x")
        assert await server.recv() == b"x"
        await client.close()
        await server.close()


async def test_listener_close_cancelled() -> None:
    """A listener's cancelled close has closed it: who waits is woken, requests nobody took are rejected."""
    listener = await aiordma.listen("127.0.0.1")
    connecting = asyncio.create_task(dial(listener.port))
    async with asyncio.timeout(20):
        await until(lambda: not listener._queue.empty())
        closing = asyncio.create_task(listener.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        with pytest.raises(ConnectError):
            await connecting
        with pytest.raises(ClosedError):
            await listener.get_request()
        await listener.close()
    assert opened() == (0, 0)


async def test_listener_closed_while_waited_for() -> None:
    """Closing a listener wakes every task that waits for its requests."""
    listener = await aiordma.listen("127.0.0.1")
    waiting = [asyncio.create_task(listener.get_request()) for _ in range(3)]

    async def iterate() -> int:
        return len([request async for request in listener])

    iterating = asyncio.create_task(iterate())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await listener.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ClosedError] * 3
        assert await iterating == 0


async def _resist(conn: Connection) -> None:
    """A handler that takes its time when it is cancelled."""
    try:
        await conn.recv()
    finally:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("handler", [_handle_for_ever, _resist])
async def test_serve_close_cancelled(handler: Callable[[Connection], object]) -> None:
    """A server's close cancelled after n turns, for several n: it closes all the same; another close waits for it."""
    for turns in (0, 1, 2, 5):
        server = await aiordma.serve(handler, "127.0.0.1")  # type: ignore[arg-type]
        client = await dial(server.port)
        async with asyncio.timeout(20):
            await until(lambda: bool(server.connections))  # noqa: B023 - called here only
            closing = asyncio.create_task(server.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            if not turns:
                await server.close()  # the first was cancelled before it began
            with pytest.raises(BrokenError):
                await client.recv()
            await client.close()
            await server.close()
            await server.wait_closed()
        assert not server.connections
        assert not server._tasks
        assert opened() == (0, 0)


async def test_serve_forever_cancelled() -> None:
    """Cancelling serve_forever closes the server with its connections."""
    server = await aiordma.serve(_handle_for_ever, "127.0.0.1")
    serving = asyncio.create_task(server.serve_forever())
    client = await dial(server.port)
    await _ended(serving)
    assert not server.is_serving()
    with pytest.raises(BrokenError):
        await client.recv()
    await client.close()
    assert opened() == (0, 0)
