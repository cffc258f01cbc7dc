"""What waits at a listener: requests without an answer, within the backlog; and whose context the device keeps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import pytest

import aiordma
from aiordma import ConnectError, Connection, ConnectRequest, Listener
from tests.faults import raw_peer
from tests.faults.raw_peer import RawListener, RawPeer
from tests.faults.support import dial, until

T = TypeVar("T")


def _fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def _turns() -> None:
    """Give what shouldn't happen the time to happen."""
    for _ in range(50):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def _asked(count: int, *, backlog: int) -> AsyncIterator[tuple[Listener, list[RawPeer]]]:
    """A listener that so many peers have sent their Request to, one after the other."""
    with contextlib.ExitStack() as stack:
        async with asyncio.timeout(20), aiordma.listen("127.0.0.1", backlog=backlog) as listener:
            peers = []
            for number in range(count):
                peers.append(stack.enter_context(await RawPeer.connect(listener.port)))
                await peers[-1].send(raw_peer.request(private_data=bytes([number])))
            yield listener, peers


@contextlib.asynccontextmanager
async def _waiting() -> AsyncIterator[tuple[ConnectRequest, RawPeer]]:
    """A request that has no answer yet, and its peer."""
    async with _asked(1, backlog=4) as (listener, [peer]):
        request = await listener.get_request()
        yield request, peer
        request.abandon()


def _close(peer: RawPeer) -> None:
    peer.close()


def _reset(peer: RawPeer) -> None:
    peer.reset()


# -- the backlog ------------------------------------------------------------------------------------------------------


async def _accept(request: ConnectRequest) -> Connection:
    return await request.accept()


async def _reject(request: ConnectRequest) -> None:
    await request.reject()


async def _abandon(request: ConnectRequest) -> None:
    request.abandon()


@pytest.mark.parametrize("answer", [_accept, _reject, _abandon])
async def test_unanswered_requests(answer: Callable[[ConnectRequest], Awaitable[Connection | None]]) -> None:
    """No more requests than the backlog are taken; each answer lets one more in, and none is lost."""
    async with _asked(6, backlog=3) as (listener, _):
        queue = listener._queue
        accepted = []
        await until(lambda: queue.qsize() == 3)
        await _turns()
        assert queue.qsize() == 3
        for number in range(6):
            request = await listener.get_request()
            await _turns()
            assert queue.qsize() == min(2, 5 - number)  # taken is not answered
            assert request.private_data == bytes([number])
            accepted.append(await answer(request))
            await until(lambda number=number: queue.qsize() == min(3, 5 - number))  # type: ignore[misc]
        for conn in filter(None, accepted):
            conn.abort()
            await conn.close()


async def test_requests_of_peers_that_left() -> None:
    """A request whose peer left counts until it is answered: peers that come and go don't fill the memory."""
    async with _asked(2, backlog=2) as (listener, peers):
        await until(lambda: listener._queue.qsize() == 2)
        for peer in peers:
            peer.close()
        with await RawPeer.connect(listener.port) as third:
            await third.send(raw_peer.request(private_data=b"third"))
            await _turns()
            assert listener._queue.qsize() == 2
            for _ in range(2):
                with pytest.raises(ConnectError):
                    await (await listener.get_request()).accept()
            request = await listener.get_request()
            assert request.private_data == b"third"
            await request.reject()


async def test_silent_and_asking_peers_share_the_backlog() -> None:
    """A connection without a Request takes the place that a request could; when it goes, the next one comes in."""
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1", backlog=1) as listener:
        with await RawPeer.connect(listener.port) as silent, await RawPeer.connect(listener.port) as asking:
            await asking.send(raw_peer.request())
            await _turns()
            assert listener._queue.empty()
            silent.close()
            await (await listener.get_request()).reject()


# -- peers that leave -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [_close, _reset])
async def test_leaves_while_it_waits(leave: Callable[[RawPeer], None]) -> None:
    """A peer that leaves before its answer is noticed, and its descriptor is free; accept() says that it left."""
    async with _waiting() as (request, peer):
        before = _fds()
        leave(peer)
        await until(lambda: _fds() == before - 2)
        with pytest.raises(ConnectError, match="left before it was accepted"):
            await request.accept()


@pytest.mark.parametrize("leave", [_close, _reset])
async def test_leaves_with_its_request(leave: Callable[[RawPeer], None]) -> None:
    """The same where the end comes right behind the Request, and is there when that is read."""
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1") as listener:
        before = _fds()
        with await RawPeer.connect(listener.port) as peer:
            peer.sock.send(raw_peer.request())
            leave(peer)
        request = await listener.get_request()
        await until(lambda: _fds() == before)
        with pytest.raises(ConnectError, match="left before it was accepted"):
            await request.accept()


async def test_left_and_rejected() -> None:
    """A peer that left may be rejected like any other."""
    async with _waiting() as (request, peer):
        before = _fds()
        peer.close()
        await until(lambda: _fds() == before - 2)
        await request.reject(b"no")


async def test_early_data_and_the_end() -> None:
    """A reset in one with data that came too early is noticed behind them."""
    async with _waiting() as (_, peer):
        before = _fds()
        peer.sock.send(raw_peer.send(1, b"early"))
        peer.reset()
        await until(lambda: _fds() == before - 2)


async def test_early_data() -> None:
    """FPDUs that come before the answer, against the rules, are executed once it is given, in their order."""
    async with _waiting() as (request, peer):
        for msn in range(1, 11):
            await peer.send(raw_peer.send(msn, bytes([msn]) * 100))
            await _turns()
        conn = await request.accept()
        await peer.send(raw_peer.send(11, b"in time"))
        for msn in range(1, 11):
            assert await conn.recv() == bytes([msn]) * 100
        assert await conn.recv() == b"in time"
        conn.abort()
        await conn.close()


async def test_too_much_early_data() -> None:
    """A peer that sends on and on before its answer is dropped, and accept() says why."""
    async with _waiting() as (request, peer):
        before = _fds()
        with contextlib.suppress(ConnectionError):
            await peer.send(bytes(100_000))
        await until(lambda: _fds() == before - 1)
        with pytest.raises(ConnectError, match="sent data before it was accepted"):
            await request.accept()


# -- contexts ---------------------------------------------------------------------------------------------------------


class _Kept:
    """Something large that a program keeps in a context variable."""


_variable: ContextVar[_Kept] = ContextVar("_variable")


async def _in_a_context(make: Callable[[], Awaitable[T]]) -> tuple[T, weakref.ref[_Kept]]:
    """Make something in a task whose context holds an object; gives that too, weakly, when the task has ended."""

    async def task() -> tuple[T, weakref.ref[_Kept]]:
        kept = _Kept()
        _variable.set(kept)
        return await make(), weakref.ref(kept)

    return await asyncio.create_task(task())


async def _collected(kept: weakref.ref[_Kept]) -> None:
    """Wait until it is: the turn in which its task ends still refers to the task."""
    for _ in range(20):
        gc.collect()
        if kept() is None:
            return
        await asyncio.sleep(0)
    raise AssertionError("the context of a task that ended is kept")


async def _listen() -> Listener:
    return await aiordma.listen("127.0.0.1")


async def test_context_of_who_listens() -> None:
    """A listener doesn't keep the context it was opened in."""
    listener, kept = await _in_a_context(_listen)
    await _collected(kept)
    await listener.close()


async def test_context_of_who_connects() -> None:
    """A connection doesn't keep the context that connected it, nor that which accepted it."""
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1") as listener:
        connecting = asyncio.create_task(_in_a_context(lambda: dial(listener.port)))
        request = await listener.get_request()
        server, servers = await _in_a_context(request.accept)
        client, clients = await connecting
        del connecting
        await client.send(b"in use")
        assert await server.recv() == b"in use"
        await _collected(clients)
        await _collected(servers)
        await client.close()
        await server.close()


async def test_context_of_a_connect_given_up() -> None:
    """A connect that was cancelled while it waited for its answer leaves no timer that keeps its context."""
    contexts: list[weakref.ref[_Kept]] = []
    with RawListener() as listener:

        async def connect() -> None:
            kept = _Kept()
            _variable.set(kept)
            contexts.append(weakref.ref(kept))
            del kept
            await aiordma.connect("127.0.0.1", listener.port)

        connecting = asyncio.create_task(connect())
        async with asyncio.timeout(20):
            with await listener.accept() as peer:
                await peer.frame()
                connecting.cancel()
                await asyncio.wait([connecting])
        del connecting
        await _collected(contexts[0])
