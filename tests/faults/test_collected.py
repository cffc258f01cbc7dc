"""Open objects that are garbage collected, and a loop that is closed under them: a warning, and everything freed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import CMID, Access, BrokenError, ConnectError, ConnParam, FlushedError, Listener, QPState, RejectedError
from aiordma.device import driver_of, loop_state
from aiordma.testing import connected_pair
from tests.conftest import LOOPS
from tests.faults.support import REMOTE, both, dial, opened, until


def _collect(caught: list[warnings.WarningMessage]) -> list[str]:
    """Collect all garbage, and give the text of every warning, which must be a ResourceWarning."""
    texts: list[str] = []
    gc.collect()
    while caught:
        assert all(warning.category is ResourceWarning for warning in caught)
        texts += [str(warning.message) for warning in caught]
        caught.clear()  # a warning holds the object that it is about
        gc.collect()
    return texts


@contextlib.contextmanager
def _warned(*texts: str) -> Iterator[None]:
    """Expect a ResourceWarning with each of these in it, by the end of the block, and no other warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        found = _collect(caught)
    assert len(found) == len(texts), found
    for text in texts:
        assert any(text in message for message in found), found


def _sockets() -> int:
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            count += str(fd.readlink()).startswith("socket:")
    return count


async def test_connection() -> None:
    """A connection dropped open: a warning that names it; its peer sees the end, and nothing is left of it."""
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1") as listener:
        client, server = await both(listener)
        await asyncio.sleep(0)  # the call that woke this task holds what it waited for
        seen = weakref.ref(client)
        with _warned("unclosed <Connection to"):
            del client
        assert seen() is None
        with pytest.raises(BrokenError):
            await server.recv()
        await server.close()
    assert opened() == (0, 0)


async def test_connection_with_requests_in_flight() -> None:
    """A connection dropped with requests in flight: their futures end as flushed."""
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1") as listener:
        client, server = await both(listener)
        await asyncio.sleep(0)
        futures = [client.read(REMOTE[:8]) for _ in range(10)]
        with _warned("unclosed <Connection to"):
            del client
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, (FlushedError, aiordma.RemoteError)) for result in results)
        await server.close()
    assert opened() == (0, 0)


async def test_broken_connection() -> None:
    """A connection that ended by itself is still to be closed: dropped, it warns."""
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1") as listener:
        client, server = await both(listener)
        await asyncio.sleep(0)  # the call that woke this task holds what it waited for
        await server.close()
        with pytest.raises(BrokenError):
            await client.recv()
        with _warned("unclosed <Connection to"):
            del client
        await until(lambda: opened() == (1, 0))


async def test_listener() -> None:
    """A listener dropped open: a warning that names it, and nothing listens any more."""
    listener = await aiordma.listen("127.0.0.1")
    port = listener.port
    with _warned("unclosed <Listener"):
        del listener
    await until(lambda: opened() == (0, 0))
    with pytest.raises(ConnectError, match="nothing listens"):
        await aiordma.connect("127.0.0.1", port)


async def _requested(listener: Listener) -> None:
    await until(lambda: not listener._queue.empty())


async def test_listener_with_requests() -> None:
    """A listener dropped with requests that nobody took: the peers are told."""
    listener = await aiordma.listen("127.0.0.1")
    connecting = asyncio.create_task(dial(listener.port))
    await _requested(listener)
    with _warned("unclosed <Listener"):
        del listener
    async with asyncio.timeout(20):
        with pytest.raises(ConnectError):
            await connecting
    assert opened() == (0, 0)


async def test_request() -> None:
    """A request dropped without an answer: a warning that names it; the peer is told."""
    async with aiordma.listen("127.0.0.1") as listener:
        connecting = asyncio.create_task(dial(listener.port))
        request = await listener.get_request()
        await asyncio.sleep(0)
        with _warned("<ConnectRequest from"):
            del request
        async with asyncio.timeout(20):
            with pytest.raises(RejectedError) as caught:
                await connecting
        assert caught.value.status == 28
    assert opened() == (0, 0)


async def test_region_with_remote_rights() -> None:
    """A region with remote rights dropped open: a warning, and its key is no good any more."""
    async with connected_pair() as pair:
        region = pair.server.pd.register(bytearray(64), access=Access.REMOTE_READ)
        remote = region.remote()
        assert await pair.client.read(remote) == bytes(64)
        with _warned("a peer may still use its key"):
            del region
        with pytest.raises(aiordma.RemoteError, match="invalid STag"):
            await pair.client.read(remote)


async def test_local_region() -> None:
    """A region without remote rights may be dropped: no warning, and its buffer is free again."""
    async with connected_pair() as pair:
        buffer = bytearray(64)
        region = pair.server.register(buffer)
        with pytest.raises(BufferError):
            buffer.append(1)
        with _warned():
            del region
        buffer.append(1)


def _make_and_close(kind: str, make: Callable[[], Any]) -> Any:
    """Run a coroutine on a loop that is closed when it returns; give its result, and what went to its handler."""
    loop = LOOPS[kind]()
    errors: list[str] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["message"]))
    try:
        result = loop.run_until_complete(make())
    finally:
        loop.close()
    return result, errors


async def _open_connection() -> list[Any]:
    listener = await aiordma.listen("127.0.0.1")
    client, server = await both(listener)
    await listener.close()
    return [client, server]


async def _open_with_requests() -> list[Any]:
    client, server = await _open_connection()
    remote = server.alloc(4096, access=Access.REMOTE_READ).remote()
    return [client, server, client.read(remote), server.send(b"x")]


async def _open_broken() -> list[Any]:
    client, server = await _open_connection()
    await server.close()
    return [client]


async def _open_draining() -> list[Any]:
    """A connection that ended, with more messages than there are receives."""
    listener = await aiordma.listen("127.0.0.1", param=ConnParam(recv_depth=1))
    client, server = await both(listener)
    for _ in range(5):
        await client.send(b"unreceived")
    await client.close()
    await listener.close()
    await until(lambda: server.qp.state is QPState.ERR)
    return [server]


async def _open_listener() -> list[Any]:
    return [await aiordma.listen("127.0.0.1")]


async def _open_request() -> list[Any]:
    listener = await aiordma.listen("127.0.0.1")
    connecting = asyncio.create_task(dial(listener.port))
    request = await listener.get_request()
    connecting.cancel()
    await asyncio.wait([connecting])
    await listener.close()
    return [request]


async def _open_unrequested() -> list[Any]:
    """A listener with a request that nobody took, and with a connection that has said nothing."""
    listener = await aiordma.listen("127.0.0.1")
    connecting = asyncio.create_task(dial(listener.port))
    await until(lambda: not listener._queue.empty())
    connecting.cancel()
    await asyncio.wait([connecting])
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    await until(lambda: bool(listener._bound[0].cm_id.driver._arriving))  # type: ignore[attr-defined]
    writer.close()
    await writer.wait_closed()
    return [listener]


_OPEN = {
    "connections": (_open_connection, 2),
    "with requests": (_open_with_requests, 2),
    "broken": (_open_broken, 1),
    "draining": (_open_draining, 1),
    "listener": (_open_listener, 1),
    "request": (_open_request, 1),
    "unrequested": (_open_unrequested, 1),
}


@pytest.mark.parametrize("kind", list(LOOPS))
@pytest.mark.parametrize("name", list(_OPEN))
def test_loop_closed_under_it(kind: str, name: str) -> None:
    """Open objects on a closed loop warn when they are collected, use the loop no more, and free their sockets."""
    make, count = _OPEN[name]
    gc.collect()
    before = _sockets()
    opened, errors = _make_and_close(kind, make)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened.clear()
        messages = _collect(caught)
    assert len(messages) == count, messages
    assert _sockets() == before
    assert not errors


@pytest.mark.parametrize("kind", list(LOOPS))
def test_closed_by_hand_after_its_loop(kind: str) -> None:
    """abort() of a connection whose loop is closed frees it without a word."""
    gc.collect()
    before = _sockets()
    opened, errors = _make_and_close(kind, _open_with_requests)
    client, server, *_ = opened
    client.abort()
    server.abort()
    assert _sockets() == before
    opened.clear()
    del client, server, _
    with _warned():
        pass
    assert not errors


async def _open_with_tasks() -> list[Any]:
    listener = await aiordma.listen("127.0.0.1")
    client, server = await both(listener)
    remote = server.alloc(8, access=Access.REMOTE_READ).remote()

    async def wait() -> None:
        await client.read(remote)

    tasks = [asyncio.create_task(work) for work in (client.recv(), server.recv(), wait())]
    await listener.close()
    return [client, server, *tasks]


@pytest.mark.parametrize("kind", list(LOOPS))
def test_loop_closed_under_tasks(kind: str) -> None:
    """abort() of connections whose loop was closed with tasks that wait for them frees everything, and wakes nobody."""
    gc.collect()
    before = _sockets()
    opened, errors = _make_and_close(kind, _open_with_tasks)
    opened[0].abort()
    opened[1].abort()
    assert _sockets() == before
    with _warned():
        opened.clear()
    # asyncio's own complaint, for each of them.
    assert set(errors) <= {"Task was destroyed but it is pending!"}


@pytest.mark.parametrize("kind", list(LOOPS))
def test_identifier_of_a_closed_loop(kind: str) -> None:
    """Destroying an identifier whose loop was closed under a task that waits for it wakes nobody."""

    async def wait() -> list[Any]:
        cm_id = CMID(loop_state(), driver_of("soft"))
        cm_id.bind_addr(("127.0.0.1", 0))
        cm_id.listen(1)
        waiting = asyncio.create_task(cm_id.get_request())
        await asyncio.sleep(0)
        return [cm_id, waiting]

    gc.collect()
    before = _sockets()
    opened, errors = _make_and_close(kind, wait)
    opened[0].destroy()
    assert _sockets() == before
    opened.clear()
    gc.collect()
    assert set(errors) <= {"Task was destroyed but it is pending!"}


@pytest.mark.parametrize("kind", list(LOOPS))
def test_runner_cancels_what_is_under_way(kind: str) -> None:
    """asyncio.run that ends with everything open and a task in each awaitable: nothing hangs, and all is freed."""
    gc.collect()
    before = _sockets()

    async def main() -> None:
        server = await aiordma.serve(lambda conn: conn.recv(), "127.0.0.1")
        client = await dial(server.port)
        listener = await aiordma.listen("127.0.0.1")
        tasks = [
            asyncio.create_task(client.recv()),
            asyncio.create_task(listener.get_request()),
            asyncio.create_task(server.serve_forever()),
            asyncio.create_task(dial(listener.port)),
            asyncio.create_task(client.alloc(8).idle()),
        ]
        client.barrier()
        for _ in range(3):
            await asyncio.sleep(0)
        keep.extend(tasks)

    keep: list[asyncio.Task[Any]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
            runner.run(main())
        keep.clear()
        _collect(caught)
    assert _sockets() == before
