"""What a queue pair does when posts are refused, requests fail, and everything is flushed or closed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aiordma.drivers.base import PostError
from aiordma.enums import AsyncEventType, Opcode, QPState, SendFlags, WCStatus
from aiordma.errors import BrokenError, ClosedError, FlushedError, LocalError, RemoteError
from aiordma.slots import RecvSlot
from tests.conftest import LoopErrors
from tests.unit.fake_driver import rig, state

# -- a post that is refused ----------------------------------------------------------------------------------


async def test_a_refused_post() -> None:
    """A post that the device refuses fails its future with the device's error; its place is free again."""
    async with rig(max_send_wr=1) as r:
        for _ in range(5):
            r.device.refuse.append(0)
            future = r.post()
            with pytest.raises(PostError, match="the queue is full"):
                await future
        good = r.post()
        r.complete()
        assert state(good) == "done"
        assert r.qp.failure is None


@pytest.mark.parametrize("bad", range(4))
async def test_bad_wr(bad: int) -> None:
    """What is before bad_wr is retired by a signalled empty WRITE; the rest fails with the errno."""
    async with rig(max_send_wr=4) as r:
        r.device.refuse.append(bad)
        slots, failures = r.batch(4, own_futures=True)
        own = [slot.future for slot in slots]
        futures = [future for future in own if future is not None] or [r.last]
        if bad:
            retiring = r.device.sends[-1]
            assert (retiring.opcode, list(retiring.sg_list)) == (Opcode.RDMA_WRITE, [])
            assert retiring.send_flags == SendFlags.SIGNALED
            assert len(r.device.sends) == bad + 1
        assert len(failures) == 4 - bad
        assert all(isinstance(error, PostError) for error in failures)
        r.complete(len(r.device.sends))
        assert r.qp.in_flight == 0
        assert state(r.last) == "PostError"
        assert "pending" not in [state(future) for future in futures]
        again = [r.post() for _ in range(4)]
        assert len(r.device.sends) == 4
        r.complete(4)
        assert [state(f) for f in again] == ["done"] * 4


async def test_futures_before_bad_wr() -> None:
    """A request before bad_wr that has a future of its own gets its value when it is retired."""
    async with rig() as r:
        slots = [r.qp.slot(Opcode.RDMA_READ, (), 0, 0, None, 0) for _ in range(3)]
        future = slots[0].future = r.loop.create_future()
        also = slots[1].future = r.loop.create_future()
        r.device.refuse.append(2)
        last = r.qp.post_list(slots, [])
        assert [state(f) for f in (future, also, last)] == ["pending", "pending", "PostError"]
        r.complete(3)
        assert [state(f) for f in (future, also)] == ["done", "done"]


async def test_bad_wr_while_pumping() -> None:
    """A list of requests that waited and is refused in part is treated as one that was posted at once."""
    async with rig(max_send_wr=3) as r:
        first = [r.post() for _ in range(3)]
        waiting = [r.post(flags=0) for _ in range(3)]
        r.device.refuse.append(1)
        r.complete(3)
        assert [state(f) for f in waiting] == ["pending", "PostError", "PostError"]
        r.complete(2)
        assert state(waiting[0]) == "done"
        assert [state(f) for f in first] == ["done"] * 3


async def test_bad_wr_while_closing() -> None:
    """A list refused in part when the queue pair takes no further posts is retired all the same."""
    async with rig(max_send_wr=2) as r:
        r.post()
        r.post()
        waiting = [r.post(flags=0), r.post()]
        r.qp.refuse(ClosedError("closing"))
        r.device.refuse.append(1)
        r.complete(2)
        assert [state(f) for f in waiting] == ["pending", "PostError"]
        r.complete(2)
        assert state(waiting[0]) == "done"
        await asyncio.wait_for(r.qp.settled(), 5)


async def test_a_device_that_takes_nothing_more() -> None:
    """If what would retire the requests in flight is refused too, the queue pair goes to error."""
    async with rig() as r:
        r.device.refuse.extend([2, 0, 0, 0, 0])
        slots, failures = r.batch(4, own_futures=True)
        first = slots[0].future
        r.cq.ring()
        assert r.device.state is QPState.ERR
        assert isinstance(r.qp.failure, BrokenError)
        assert "takes no more" in str(r.qp.failure)
        assert state(first or r.last) != "pending"
        assert r.qp.in_flight == 0
        with pytest.raises(BrokenError):
            r.post()
        assert len(failures) == 4


async def test_a_refused_batch_that_goes_in_parts() -> None:
    """A part that is refused fails its requests; the parts behind it are posted, and the batch ends."""
    async with rig(max_send_wr=2) as r:
        r.device.refuse.append(0)
        _, failures = r.batch(5)
        for _ in range(5):
            if r.device.sends:
                r.complete(len(r.device.sends))
        assert state(r.last) == "done"
        assert len(failures) == 2
        assert r.qp.in_flight == 0


# -- failures and flushes ------------------------------------------------------------------------------------


async def test_first_failure_and_flushes() -> None:
    """One request fails with its status; those behind it are flushed, with that cause."""
    async with rig(max_send_wr=3) as r:
        r.qp.peer = ("10.0.0.5", 7471)
        futures = [r.post() for _ in range(3)]
        waiting = [r.post() for _ in range(2)]
        receive = r.qp.post_recv(())
        r.complete(2, WCStatus.REM_ACCESS_ERR, vendor_err=77)
        assert state(futures[0]) == "done"
        error = futures[1].exception()
        assert isinstance(error, RemoteError)
        assert (error.status, error.opcode, error.vendor_err) == (WCStatus.REM_ACCESS_ERR, Opcode.SEND, 77)
        assert (error.qp_num, error.peer, error.reason) == (r.qp.qp_num, r.qp.peer, "reason 77")
        flushed = [future.exception() for future in (futures[2], *waiting, receive)]
        assert all(isinstance(flush, FlushedError) for flush in flushed)
        assert len({id(flush) for flush in flushed}) == 4
        assert all(flush is not None and flush.__cause__ is error for flush in flushed)
        assert r.qp.failure is error


async def test_only_the_first_failure_is_loud(loop_errors: LoopErrors) -> None:
    """Of a thousand requests in flight on a queue pair that breaks, one is logged."""
    async with rig(max_send_wr=1000) as r:
        futures = [r.post() for _ in range(1200)]
        r.complete(1, WCStatus.RETRY_EXC_ERR)
        while r.cq.pending:
            r.cq.ring()
            await asyncio.sleep(0)
        del futures
        gc.collect()
    assert len(loop_errors) == 1
    assert "RETRY_EXC_ERR" in str(loop_errors.pop()["exception"])


async def test_a_flush_without_a_failure() -> None:
    """If everything is flushed and nothing failed, the device's reason is the first failure."""
    async with rig() as r:
        future = r.post()
        r.device.reason = "the peer closed the connection"
        r.device.disconnected = True
        r.device.to_error()
        r.cq.ring()
        error = future.exception()
        assert isinstance(error, FlushedError)
        assert isinstance(error.__cause__, BrokenError)
        assert str(error.__cause__) == "the peer closed the connection"
        assert error.__cause__.orderly


async def test_what_is_raised_afterwards() -> None:
    """After a failure posts and drain() raise BrokenError, each a new one, caused by the failure."""
    async with rig() as r:
        future = r.post()
        r.complete(1, WCStatus.REM_OP_ERR)
        failure = future.exception()
        raised = []
        for attempt in (r.post, lambda: r.batch(1), lambda: r.qp.post_read(r.memory(), 0, 0)):
            with pytest.raises(BrokenError) as caught:
                attempt()
            raised.append(caught.value)
        with pytest.raises(BrokenError) as caught:
            await r.qp.drain()
        raised.append(caught.value)
        assert len({id(error) for error in raised}) == 4
        assert all(error.__cause__ is failure for error in raised)
        assert all("REM_OP_ERR" in str(error) for error in raised)


async def test_a_failed_receive() -> None:
    """A receive that fails ends the queue pair with its own status."""
    async with rig() as r:
        future, send = r.qp.post_recv(()), r.post()
        r.device.receive(status=WCStatus.LOC_LEN_ERR)
        r.cq.ring()
        error = future.exception()
        assert isinstance(error, LocalError)
        assert error.opcode is None
        assert state(send) == "FlushedError"
        assert r.qp.failure is error


async def test_on_failure_is_called_once() -> None:
    """Whoever watches a queue pair is told of the first failure, and only of that."""
    async with rig() as r:
        seen: list[BaseException] = []
        r.qp.on_failure = seen.append
        future, other = r.post(), r.post()
        r.complete(1, WCStatus.REM_OP_ERR)
        r.qp.close()
        assert seen == [future.exception()]
        assert state(other) == "FlushedError"


async def test_failures_of_a_batch() -> None:
    """A batch's failures are collected; its future doesn't log them again."""
    async with rig() as r:
        _, failures = r.batch(4)
        r.complete(2, WCStatus.REM_INV_REQ_ERR)
        assert [type(error).__name__ for error in failures] == ["RemoteError", "FlushedError", "FlushedError"]
        gc.collect()


@pytest.mark.parametrize("immediate", [False, True])
async def test_a_batch_in_parts_that_fails_early(immediate: bool) -> None:
    """If the first part of a batch fails, the parts that were never posted end too."""
    async with rig(max_send_wr=2) as r:
        if immediate:
            original = r.device.post_send

            def fail(wrs: Any) -> bool:
                original(wrs)
                if r.device.state is QPState.RTS:
                    r.device.complete(1, WCStatus.LOC_PROT_ERR)
                return True

            r.qp._post_send = fail
        _, failures = r.batch(7)
        if not immediate:
            r.complete(1, WCStatus.LOC_PROT_ERR)
        for _ in range(5):
            await asyncio.sleep(0)
        assert state(r.last) == "FlushedError"
        assert len(failures) == 7
        assert r.qp.in_flight == 0


async def test_an_asynchronous_event() -> None:
    """A fault that the device reports ends the queue pair with its reason; another queue pair goes on."""
    async with rig() as r:
        other = r.create_qp()
        future, unharmed = r.post(), other.post_send(Opcode.SEND, ())
        assert r.fake.handler is not None
        r.fake.handler(AsyncEventType.COMM_EST, r.qp.qp_num, "")
        assert r.qp.failure is None
        r.fake.handler(AsyncEventType.QP_FATAL, r.qp.qp_num, "the reason")
        r.cq.ring()
        error = future.exception()
        assert isinstance(error, FlushedError)
        assert str(error.__cause__) == "the reason"
        assert state(unharmed) == "pending"
        r.fake.qps[1].complete()
        r.cq.ring()
        assert state(unharmed) == "done"
        other.close()


async def test_an_event_behind_a_completion() -> None:
    """A completion that is there when the event comes says more, and is the failure."""
    async with rig() as r:
        future = r.post()
        r.device.complete(1, WCStatus.REM_ACCESS_ERR)
        assert r.fake.handler is not None
        r.fake.handler(AsyncEventType.QP_ACCESS_ERR, r.qp.qp_num, "less")
        assert state(future) == "RemoteError"
        assert isinstance(r.qp.failure, RemoteError)


async def test_completions_of_two_queue_pairs() -> None:
    """Interleaved completions of queue pairs that share a queue all arrive, and what waits goes on."""
    async with rig(max_send_wr=2) as r:
        other = r.create_qp()
        devices = r.fake.qps
        futures = [qp.post_send(Opcode.SEND, ()) for _ in range(10) for qp in (r.qp, other)]
        devices[0].complete()
        devices[1].complete()
        devices[0].complete()
        devices[1].complete()
        for device in devices:
            device.immediate = True
        r.cq.ring()
        for _ in range(50):
            await asyncio.sleep(0)
            r.cq.ring()
        assert [state(f) for f in futures] == ["done"] * 20
        other.close()


async def test_completions_of_a_closed_queue_pair() -> None:
    """A completion that comes when its queue pair is closed is dropped; others are unharmed."""
    async with rig() as r:
        other = r.create_qp()
        future = other.post_send(Opcode.SEND, ())
        number = r.qp.qp_num
        r.qp.close()
        r.cq.pending.append((2, 0, 0, 0, number, 0, 0, 0))
        r.fake.qps[1].complete()
        r.cq.ring()
        assert state(future) == "done"
        other.close()


# -- closing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flush_now", [True, False])
async def test_close(flush_now: bool) -> None:
    """Closing ends everything as flushed by the close, whether the device flushes or not."""
    async with rig(max_send_wr=2) as r:
        r.device.flush_now = flush_now
        futures = [r.post() for _ in range(4)]
        _, failures = r.batch(2)
        futures.append(r.last)
        reads = r.qp.post_read(r.memory()[:8], 0, 0)
        receive = r.qp.post_recv(())
        r.qp.close()
        r.qp.close()
        assert r.device.closed
        for future in (*futures, reads, receive):
            error = future.exception()
            assert isinstance(error, FlushedError)
            assert isinstance(error.__cause__, ClosedError)
        assert len(failures) == 2
        assert r.qp.in_flight == 0
        with pytest.raises(ClosedError):
            r.post()
        with pytest.raises(ClosedError):
            r.qp.post_recv_slots((RecvSlot(()),))


async def test_close_with_more_in_flight_than_a_poll_takes() -> None:
    """Whoever takes receives without futures is told of their end, also behind more flushes than one poll takes."""
    async with rig(max_send_wr=300) as r:
        ended: list[int] = []
        r.qp.on_receive = lambda _, completion: ended.append(completion[1])
        sends = [r.post() for _ in range(300)]
        r.qp.post_recv_slots([RecvSlot(()), RecvSlot(())])
        r.qp.close()
        assert ended == [WCStatus.WR_FLUSH_ERR] * 2
        assert {state(future) for future in sends} == {"FlushedError"}


async def test_close_of_collected_reads() -> None:
    """READs collected in the turn of the close end too."""
    async with rig(max_send_wr=8) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[:8], n, 0) for n in range(6)]
        r.qp.close()
        await asyncio.sleep(0)
        assert [state(f) for f in futures] == ["FlushedError"] * 6


async def test_failure_of_collected_reads() -> None:
    """READs collected when the queue pair fails end too."""
    async with rig(max_send_wr=8) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[:8], n, 0) for n in range(6)]
        r.complete(1, WCStatus.REM_ACCESS_ERR)
        await asyncio.sleep(0)
        r.cq.ring()
        assert [state(f) for f in futures] == ["RemoteError"] + ["FlushedError"] * 5
        assert r.qp.in_flight == 0


async def test_closing_gives_its_room_back() -> None:
    """A closed queue pair's entries of the completion queue are free for another."""
    async with rig(max_send_wr=10, recv_depth=10, max_cqe=20) as r:
        assert len(r.fake.cqs) == 1
        r.qp.close()
        second = r.create_qp()
        assert len(r.fake.cqs) == 1
        third = r.create_qp()
        assert len(r.fake.cqs) == 2
        second.close()
        third.close()


async def test_waiting_for_the_end() -> None:
    """flushed() waits until the device has no request of the queue pair any more, settled() for the sends."""
    async with rig() as r:
        r.post()
        r.qp.post_recv(())
        settled, flushed = asyncio.ensure_future(r.qp.settled()), asyncio.ensure_future(r.qp.flushed())
        await asyncio.sleep(0)
        assert not settled.done()
        r.complete()
        await asyncio.wait_for(settled, 5)
        await asyncio.sleep(0)
        assert not flushed.done()
        r.qp.to_error()
        await asyncio.wait_for(flushed, 5)


async def test_closing_ends_the_waiting() -> None:
    """Whoever waits for completions is woken by the close."""
    async with rig() as r:
        memory = r.memory()
        r.device.flush_now = False
        r.post(memory)
        waiters = [asyncio.ensure_future(w) for w in (r.qp.settled(), r.qp.flushed(), memory.idle())]
        await asyncio.sleep(0)
        r.qp.close()
        await asyncio.wait_for(asyncio.gather(*waiters), 5)


async def test_refuse() -> None:
    """A queue pair that takes no further posts still completes what is posted and what waits."""
    async with rig(max_send_wr=1) as r:
        posted, waiting = r.post(), r.post()
        r.qp.refuse(ClosedError("closing"))
        with pytest.raises(ClosedError, match="closing"):
            r.post()
        r.complete()
        r.complete()
        assert [state(f) for f in (posted, waiting)] == ["done", "done"]
