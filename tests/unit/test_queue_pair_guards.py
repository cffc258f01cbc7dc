"""What a queue pair withstands: functions and drivers that raise, waiters that leave, other threads."""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aiordma.enums import Opcode, QPState, SendFlags, WCStatus
from aiordma.errors import BrokenError, FlushedError
from aiordma.types import SendWR
from tests.unit.fake_driver import Rig, rig, state


def _raise() -> None:
    raise MemoryError("no room for the value")


async def test_a_value_that_cannot_be_made() -> None:
    """Where finish() raises, its future gets that; other completions of the same poll are handed out."""
    async with rig() as r:
        other = r.create_qp()
        before, theirs = r.post(), other.post_send(Opcode.SEND, ())
        bad = r.qp.post_send(Opcode.RDMA_READ, (), finish=_raise)
        behind = r.post()
        r.device.complete(3)
        r.fake.qps[1].complete()
        r.cq.ring()
        assert [state(future) for future in (before, bad, behind, theirs)] == ["done", "MemoryError", "done", "done"]
        assert r.qp.in_flight == 0
        assert r.qp.failure is None
        other.close()


async def test_a_value_of_an_unsignalled_request_that_cannot_be_made() -> None:
    """The same where a request is retired by a later one's completion."""
    async with rig() as r:
        bad = r.qp.post_send(Opcode.RDMA_READ, (), send_flags=0, finish=_raise)
        good = r.post()
        r.complete(2)
        assert [state(bad), state(good)] == ["MemoryError", "done"]


# -- a driver that raises what it shouldn't ------------------------------------------------------------------------


def _single(r: Rig) -> asyncio.Future[Any]:
    return r.post()


def _batch(r: Rig) -> asyncio.Future[Any]:
    r.batch(2)
    return r.last


@pytest.mark.parametrize("half_posted", [False, True])
@pytest.mark.parametrize("post", [_single, _batch])
async def test_a_driver_that_raises(post: Callable[[Rig], asyncio.Future[Any]], half_posted: bool) -> None:
    """Whatever a driver raises ends the queue pair, and everything in flight; others on its queue are unharmed."""
    async with rig() as r:
        other = r.create_qp()
        theirs = other.post_send(Opcode.SEND, ())
        earlier, receive = r.post(), r.qp.post_recv(())

        def fail(wrs: Sequence[SendWR]) -> bool:
            if half_posted:
                r.device.sends.extend(wrs)
            raise struct.error("doesn't fit")

        r.qp._post_send = fail
        future = post(r)
        assert state(future) == "error"
        r.fake.qps[1].complete()
        r.cq.ring()
        assert r.device.state is QPState.ERR
        assert isinstance(r.qp.failure, BrokenError)
        assert "doesn't fit" in str(r.qp.failure)
        for flushed in (earlier, receive):
            error = flushed.exception()
            assert isinstance(error, FlushedError)
            assert error.__cause__ is r.qp.failure
        assert state(theirs) == "done"
        assert r.qp.in_flight == 0
        with pytest.raises(BrokenError):
            r.post()
        other.close()


async def test_a_queue_pair_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue pair that the device refuses leaves its room in the completion queue to others."""
    async with rig(max_send_wr=8, recv_depth=8, max_cqe=32) as r:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOMEM, "no queue pair left")

        with monkeypatch.context() as patch:
            patch.setattr(r.fake, "create_qp", refuse)
            for _ in range(5):
                with pytest.raises(OSError, match="no queue pair left"):
                    r.create_qp()
        r.create_qp().close()
        assert len(r.fake.cqs) == 1


# -- the last one is unsignalled -----------------------------------------------------------------------------------


_WAITS: dict[str, Callable[[Rig, Any], Awaitable[object]]] = {
    "idle": lambda _, memory: memory.idle(),
    "settled": lambda r, _: r.qp.settled(),
    "flushed": lambda r, _: r.qp.flushed(),
}


@pytest.mark.parametrize("name", _WAITS)
@pytest.mark.parametrize("immediate", [False, True])
async def test_waiting_for_unsignalled_requests(name: str, immediate: bool) -> None:
    """Unsignalled requests at the queue's end are retired when somebody waits for them."""
    async with rig() as r:
        memory = r.memory()
        r.device.immediate = immediate
        futures = [r.post(memory, flags=0) for _ in range(2)]
        waiting = asyncio.ensure_future(_WAITS[name](r, memory))
        await asyncio.sleep(0)
        r.complete(len(r.device.sends))
        await asyncio.wait_for(waiting, 5)
        assert [state(future) for future in futures] == ["done"] * 2
        assert r.qp.in_flight == 0
        assert sum(r.device.posts) == 3


async def test_waiting_for_signalled_requests_posts_nothing() -> None:
    """Where the last request completes by itself nothing is posted behind it."""
    async with rig() as r:
        r.post(flags=0)
        r.post(flags=SendFlags.SIGNALED)
        waiting = asyncio.ensure_future(r.qp.settled())
        await asyncio.sleep(0)
        assert sum(r.device.posts) == 2
        r.complete(2)
        await asyncio.wait_for(waiting, 5)


async def test_unsignalled_requests_of_a_broken_queue_pair() -> None:
    """Waiting for unsignalled requests posts nothing where the queue pair failed, and ends with the flush."""
    async with rig() as r:
        r.device.flush_now = False
        future = r.post(flags=0)
        r.qp.fault("broken")
        waiting = asyncio.ensure_future(r.qp.settled())
        await asyncio.sleep(0)
        assert sum(r.device.posts) == 1
        r.device.flush_now = True
        r.device.to_error()
        r.cq.ring()
        await asyncio.wait_for(waiting, 5)
        assert state(future) == "FlushedError"


# -- waiters that leave --------------------------------------------------------------------------------------------


async def _cancelled(wait: Callable[[], Awaitable[object]], times: int = 50) -> None:
    """Wait so many times, and be cancelled each time."""
    for _ in range(times):
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("name", _WAITS)
async def test_cancelled_waits_leave_nothing(name: str) -> None:
    """Waits for completions that time out again and again don't pile up while nothing completes."""
    async with rig() as r:
        memory = r.memory()
        future = r.post(memory)
        await _cancelled(lambda: _WAITS[name](r, memory))
        assert not r.qp._watchers
        r.complete()
        assert state(future) == "done"
        await asyncio.wait_for(memory.idle(), 5)


async def test_cancelled_drains_leave_nothing() -> None:
    """drain() that times out again and again doesn't pile up while nothing completes."""
    async with rig(max_send_wr=1) as r:
        futures = [r.post() for _ in range(4)]
        await _cancelled(r.qp.drain)
        assert not r.qp._waiting._drainers
        for _ in futures:
            r.complete()
            await asyncio.sleep(0)
        assert [state(future) for future in futures] == ["done"] * 4


async def test_two_waits_one_of_which_is_cancelled() -> None:
    """A wait that is cancelled in the turn of its completion takes nothing from the others."""
    async with rig() as r:
        memory = r.memory()
        r.post(memory)
        leaving, staying = (asyncio.ensure_future(memory.idle()) for _ in range(2))
        await asyncio.sleep(0)
        r.complete()
        leaving.cancel()
        await asyncio.wait_for(staying, 5)
        assert leaving.cancelled() or leaving.done()


# -- other threads -------------------------------------------------------------------------------------------------


_POSTS: dict[str, Callable[[Rig], object]] = {
    "post_send": lambda r: r.post(),
    "post_read": lambda r: r.qp.post_read(r.memory(), 0, 0),
    "post_list": lambda r: r.batch(1),
}


@pytest.mark.parametrize("name", _POSTS)
async def test_another_thread(name: str) -> None:
    """In debug mode posting from another thread raises, and posts nothing; in the loop all is as ever."""
    loop = asyncio.get_running_loop()
    debug = loop.get_debug()
    loop.set_debug(True)
    try:
        async with rig() as r:
            with pytest.raises(RuntimeError, match=name):
                await asyncio.to_thread(_POSTS[name], r)
            assert not r.device.posts
            _POSTS[name](r)
            r.complete()
            assert r.qp.in_flight == 0
    finally:
        loop.set_debug(debug)


async def test_another_loop() -> None:
    """In debug mode posting from another thread's loop raises too."""
    loop = asyncio.get_running_loop()
    debug = loop.get_debug()
    loop.set_debug(True)
    try:
        async with rig() as r:

            async def post() -> None:
                r.post()

            with pytest.raises(RuntimeError, match="another loop or thread"):
                await asyncio.to_thread(asyncio.run, post())
            assert not r.device.posts
    finally:
        loop.set_debug(debug)


async def test_a_completion_of_nothing() -> None:
    """A completion that no request belongs to is dropped, and those behind it are handed out."""
    async with rig() as r:
        other = r.create_qp()
        theirs = other.post_send(Opcode.SEND, ())
        r.cq.pending.append((2, int(WCStatus.WR_FLUSH_ERR), 0, 0, r.qp.qp_num, 0, 0, 0))
        r.fake.qps[1].complete()
        r.cq.ring()
        assert state(theirs) == "done"
        other.close()
