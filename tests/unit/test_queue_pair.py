"""The ledger of a queue pair on a device that the test scripts: order, credits, waiting, batches."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.enums import Opcode, SendFlags, WCStatus
from tests.unit.fake_driver import FakeQP, rig, state


def _posted(device: FakeQP) -> list[int]:
    return [wr.wr_id for wr in device.sends]


# -- posting and completing ----------------------------------------------------------------------------------


async def test_a_completion_resolves_its_request() -> None:
    """Each future is done when its own request completed, in the order of the posts."""
    async with rig() as r:
        futures = [r.post() for _ in range(3)]
        for index in range(3):
            assert [state(f) for f in futures] == ["done"] * index + ["pending"] * (3 - index)
            r.complete()
        assert await futures[2] is None


async def test_the_value_is_made_at_completion() -> None:
    """What a request gives is made when it completed, not before; without waiters it isn't made."""
    async with rig() as r:
        made: list[int] = []

        def finish() -> int:
            made.append(len(made))
            return made[-1]

        first = r.qp.post_send(Opcode.RDMA_READ, (), finish=finish)
        second = r.qp.post_send(Opcode.RDMA_READ, (), finish=finish)
        second.cancel()
        assert not made
        r.complete(2)
        assert await first == 0
        assert made == [0]


async def test_fields_of_a_request() -> None:
    """The device gets what was asked for, field by field."""
    async with rig() as r:
        memory = r.memory()
        r.qp.post_send(
            Opcode.ATOMIC_CMP_AND_SWP, (memory,), 0x1234, 0x99, None, SendFlags.FENCE | SendFlags.SIGNALED,
            imm_data=1, compare_add=2, swap=3,
        )  # fmt: skip
        (wr,) = r.device.sends
        assert (wr.opcode, wr.remote_addr, wr.rkey) == (Opcode.ATOMIC_CMP_AND_SWP, 0x1234, 0x99)
        assert list(wr.sg_list) == [memory]
        assert wr.send_flags == SendFlags.FENCE | SendFlags.SIGNALED
        assert (wr.imm_data, wr.compare_add, wr.swap) == (1, 2, 3)
        r.complete()


async def test_a_used_slot_keeps_nothing() -> None:
    """A request made from a used slot has no operand of the one before: an addition of 0 adds nothing."""
    async with rig() as r:
        r.qp.post_send(Opcode.ATOMIC_FETCH_AND_ADD, (), imm_data=7, compare_add=5, swap=9, inline_data=b"x")
        r.complete()
        r.qp.post_send(Opcode.ATOMIC_FETCH_AND_ADD, ())
        (wr,) = r.device.sends
        assert (wr.imm_data, wr.compare_add, wr.swap, wr.inline_data) == (0, 0, 0, None)
        r.complete()
        (slot,) = r.batch(1)[0]
        assert (slot.imm_data, slot.compare_add, slot.swap) == (0, 0, 0)
        r.complete()


async def test_numbers_are_never_used_twice() -> None:
    """No two requests share a wr_id, sends and receives included."""
    async with rig() as r:
        seen = []
        for _ in range(10):
            r.post()
            r.batch(2)
            r.qp.post_recv(())
            seen += _posted(r.device) + [wr.wr_id for wr in r.device.recvs]
            r.complete(3)
            r.device.receive()
            r.cq.ring()
        assert len(set(seen)) == len(seen) == 40


async def test_unsignalled_requests_are_retired() -> None:
    """A completion retires the unsignalled requests before it, as successful, and their places."""
    async with rig() as r:
        futures = [r.post(flags=0), r.post(flags=0), r.post()]
        r.complete(2)
        assert [state(f) for f in futures] == ["pending"] * 3
        r.complete()
        assert [state(f) for f in futures] == ["done"] * 3
        assert r.qp.in_flight == 0
        later = [r.post() for _ in range(4)]
        assert r.device.posts[-4:] == [1] * 4
        r.complete(4)
        assert [state(f) for f in later] == ["done"] * 4


async def test_a_failure_retires_those_before_it_as_successful() -> None:
    """An unsuccessful completion, too, says that the unsignalled requests before it succeeded."""
    async with rig() as r:
        futures = [r.post(flags=0), r.post()]
        r.complete(2, WCStatus.REM_ACCESS_ERR)
        assert [state(f) for f in futures] == ["done", "RemoteError"]


async def test_completed_within_the_post() -> None:
    """A request that completed within its post is done when the post returns."""
    async with rig() as r:
        r.device.immediate = True
        assert state(r.post()) == "done"


async def test_budget_of_a_turn() -> None:
    """Only so many requests resolve within their posts before the loop gets its turn; none is lost."""
    async with rig() as r:
        r.device.immediate = True
        states = [state(r.post()) for _ in range(50)]
        assert states[0] == "done"
        assert states[-1] == "pending"
        last = r.post()
        await asyncio.wait_for(last, 5)


async def test_a_tight_loop_lets_others_run() -> None:
    """A loop that awaits requests that complete at once doesn't keep another task from running."""
    async with rig() as r:
        r.device.immediate = True
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(1000):
            await r.post()
        task.cancel()
        assert turns > 10


# -- a full queue --------------------------------------------------------------------------------------------


async def test_a_full_queue_waits_in_order() -> None:
    """What the queue has no place for waits, and is posted in the order of the calls as places come back."""
    async with rig(max_send_wr=2) as r:
        pieces = [r.memory(8) for _ in range(7)]
        futures = [r.post(piece) for piece in pieces]
        order = []
        for _ in range(7):
            order.append(r.device.sends[0].sg_list[0])
            assert len(r.device.sends) <= 2
            r.complete()
        assert order == pieces
        assert [state(f) for f in futures] == ["done"] * 7


async def test_places_come_back() -> None:
    """After any number of requests, batches and failures of posts, all places are free again."""
    async with rig(max_send_wr=4) as r:
        for _ in range(5):
            for future in [r.post() for _ in range(6)]:
                while not future.done():
                    r.complete()
            r.device.refuse.append(0)
            assert state(r.post()) == "PostError"
            r.batch(7)
            while r.qp.in_flight:
                r.complete(len(r.device.sends))
        start = len(r.device.posts)
        for _ in range(5):
            r.post()
        assert r.device.posts[start:] == [1] * 4
        r.complete(4)
        r.complete()


async def test_a_request_that_waits_is_withdrawn_by_cancelling() -> None:
    """A cancelled request that waited is never posted, and its memory is named no more."""
    async with rig(max_send_wr=1) as r:
        memory = r.memory()
        first, second, third = r.post(), r.post(memory), r.post()
        second.cancel()
        await asyncio.wait_for(memory.idle(), 5)
        r.complete()
        assert [wr.sg_list for wr in r.device.sends] == [()]
        r.complete()
        assert [state(f) for f in (first, second, third)] == ["done", "cancelled", "done"]
        assert r.qp.get_write_buffer_size() == 0


async def test_a_posted_request_is_not_withdrawn() -> None:
    """Cancelling a posted request drops the waiter; the device keeps the request, and memory waits for it."""
    async with rig() as r:
        memory = r.memory()
        future = r.post(memory)
        future.cancel()
        idle = asyncio.ensure_future(memory.idle())
        await asyncio.sleep(0)
        assert len(r.device.sends) == 1
        assert not idle.done()
        r.complete()
        await asyncio.wait_for(idle, 5)
        assert state(future) == "cancelled"


async def test_completed_and_cancelled_in_one_turn() -> None:
    """A future that is cancelled in the turn its request completes in is no error; places come back."""
    async with rig(max_send_wr=1) as r:
        future = r.post()
        r.device.complete()
        future.cancel()
        r.cq.ring()
        assert state(future) == "cancelled"
        again = r.post()
        r.complete()
        await again


async def test_a_full_queue_of_unsignalled_requests_goes_on() -> None:
    """Unsignalled requests that fill the queue don't block it: one of them always says that it is done."""
    async with rig(max_send_wr=4) as r:
        for _ in range(10):
            r.post(flags=0)
        last = r.post()
        for _ in range(20):
            if r.device.sends:
                r.complete(len(r.device.sends))
        assert state(last) == "done"


# -- batches -------------------------------------------------------------------------------------------------


async def test_a_batch_is_one_list() -> None:
    """A batch is posted in one call, in order, the last one signalled."""
    async with rig() as r:
        slots, failures = r.batch(3)
        assert r.device.posts == [3]
        assert list(r.device.sends) == slots
        assert [bool(wr.send_flags & SendFlags.SIGNALED) for wr in r.device.sends] == [False, False, True]
        r.complete(3)
        assert state(r.last) == "done"
        assert not failures


@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize("before", [0, 1, 4, 6])
async def test_a_long_batch_goes_in_parts(before: int, immediate: bool) -> None:
    """A batch longer than the queue goes in parts; its last future says when all is done."""
    async with rig(max_send_wr=4) as r:
        for _ in range(before):
            r.post()
        r.device.immediate = immediate
        slots, failures = r.batch(11)
        order = []
        for _ in range(100):
            order += [wr for wr in r.device.sends if wr in slots and wr not in order]
            if r.device.sends:
                r.complete()
            await asyncio.sleep(0)
        assert state(r.last) == "done"
        assert r.qp.in_flight == 0
        assert immediate or order == slots
        assert not failures


async def test_a_batch_waits_behind_others() -> None:
    """A batch is posted behind the requests that wait, though some of it would fit."""
    async with rig(max_send_wr=2) as r:
        single = [r.post() for _ in range(3)]
        slots, _ = r.batch(2)
        r.complete()
        assert list(r.device.sends)[-1] not in slots
        r.complete(2)
        assert list(r.device.sends) == slots
        r.complete(2)
        assert [state(f) for f in (*single, r.last)] == ["done"] * 4


async def test_futures_in_a_batch() -> None:
    """Requests of a batch with futures of their own get their values, also if retired by another one."""
    async with rig() as r:
        slots, _ = r.batch(3, own_futures=True)
        futures = [slot.future for slot in slots]
        assert r.last is futures[2]
        r.complete(3)
        assert [state(f) for f in futures] == ["done"] * 3


async def test_a_cancelled_batch_goes_on() -> None:
    """Cancelling a batch's future neither withdraws its requests nor frees their memory."""
    async with rig(max_send_wr=2) as r:
        memory = r.memory()
        slots = [r.qp.slot(Opcode.RDMA_WRITE, (memory,), 0, 0, None, 0) for _ in range(5)]
        last = r.qp.post_list(slots, [])
        last.cancel()
        r.complete(2)
        r.complete(2)
        idle = asyncio.ensure_future(memory.idle())
        await asyncio.sleep(0)
        assert len(r.device.sends) == 1
        assert not idle.done()
        r.complete()
        await asyncio.wait_for(idle, 5)


async def test_a_cancelled_batch_that_waits_keeps_its_memory() -> None:
    """The last request of a cancelled batch is still posted: until it is done its memory is named."""
    async with rig(max_send_wr=1) as r:
        memory = r.memory()
        first = r.post()
        last = r.qp.post_list([r.qp.slot(Opcode.RDMA_WRITE, (memory,), 0, 0, None, 0)], [])
        last.cancel()
        idle = asyncio.ensure_future(memory.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        r.complete()
        await first
        assert len(r.device.sends) == 1
        r.complete()
        await asyncio.wait_for(idle, 5)
