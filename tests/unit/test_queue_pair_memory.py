"""Receives of a queue pair, and the references it keeps to memory."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

import pytest

from aiordma.enums import Opcode, QPState, WCOpcode
from aiordma.errors import DeviceError
from aiordma.slots import RecvSlot
from tests.unit.fake_driver import rig, state

# -- receives ------------------------------------------------------------------------------------------------


async def test_receives_complete_in_order() -> None:
    """A receive's future gives its completion, in the order of the posts."""
    async with rig() as r:
        first, second = r.qp.post_recv(()), r.qp.post_recv(())
        r.device.receive(5, imm_data=9)
        r.cq.ring()
        completion = await first
        assert (completion[2], completion[3], completion[5]) == (WCOpcode.RECV, 5, 9)
        assert state(second) == "pending"


async def test_slots_of_receives() -> None:
    """Receives without futures are handed to on_receive, and can be posted again."""
    async with rig() as r:
        got: list[tuple[RecvSlot, int]] = []
        r.qp.on_receive = lambda slot, completion: got.append((slot, completion[3]))
        slot = RecvSlot(())
        for size in (1, 2, 3):
            r.qp.post_recv_slots((slot,))
            r.device.receive(size)
            r.cq.ring()
        assert got == [(slot, 1), (slot, 2), (slot, 3)]


async def test_a_cancelled_receive_stays() -> None:
    """A cancelled receive stays posted, takes its message, and the next one takes the next."""
    async with rig() as r:
        first, second = r.qp.post_recv(()), r.qp.post_recv(())
        first.cancel()
        for size in (1, 2):
            r.device.receive(size)
        r.cq.ring()
        assert (await second)[3] == 2


@pytest.mark.parametrize("taken", [0, 1, 2])
async def test_a_refused_receive(taken: int) -> None:
    """A list of receives refused in part raises; those that were taken complete as ever."""
    async with rig() as r:
        got: list[RecvSlot] = []
        r.qp.on_receive = lambda slot, _: got.append(slot)
        slots = [RecvSlot(()) for _ in range(3)]
        r.device.refuse_recv.append(taken)
        with pytest.raises(DeviceError, match="ibv_post_recv"):
            r.qp.post_recv_slots(slots)
        late = RecvSlot(())
        r.qp.post_recv_slots((late,))
        while r.device.recvs:
            r.device.receive()
        r.cq.ring()
        assert got == [*slots[:taken], late]


async def test_messages_that_waited_come_with_the_next_turn() -> None:
    """A message that waited for its receive is handed over in the loop's next turn, not within the post."""
    async with rig() as r:
        got: list[int] = []
        r.qp.on_receive = lambda _, completion: got.append(completion[3])
        r.device.state = QPState.ERR
        r.device.reason = "the link broke"
        r.qp.post_recv_slots((RecvSlot(()),))
        assert not got
        await asyncio.sleep(0)
        assert got == [0]


# -- references ----------------------------------------------------------------------------------------------


async def test_memory_is_kept_until_completion() -> None:
    """A request's memory is referenced until it completes, though nobody else has it, and not beyond."""
    async with rig() as r:
        memory = r.memory()
        ref = weakref.ref(memory)
        for future in (r.post(memory), r.qp.post_recv((memory,))):
            future.cancel()
            del future
        del memory
        gc.collect()
        assert ref() is not None
        r.complete()
        gc.collect()
        assert ref() is not None
        r.device.receive()
        r.cq.ring()
        await asyncio.sleep(0)
        gc.collect()
        assert ref() is None


@pytest.mark.parametrize("how", ["batch", "waiting", "refused", "withdrawn", "run", "flushed", "closed"])
async def test_nothing_refers_to_memory_afterwards(how: str) -> None:
    """However a request ends, nothing keeps its memory or its data."""
    async with rig(max_send_wr=2) as r:
        memory = r.memory()
        ref = weakref.ref(memory)
        data = b"data" * 10
        before = sys.getrefcount(data)
        others = [r.post(), r.post()] if how in ("waiting", "withdrawn") else []
        if how == "refused":
            r.device.refuse.append(0)
        if how == "run":
            futures = [r.qp.post_read(memory[:8], n, 7) for n in range(2)]
        elif how == "batch":
            slots = [r.qp.slot(Opcode.RDMA_WRITE, (memory,), 0, 0, data, 0) for _ in range(2)]
            futures = [r.qp.post_list(slots, [])]
            del slots
        else:
            futures = [r.qp.post_send(Opcode.RDMA_WRITE, (memory,), inline_data=data)]
        await asyncio.sleep(0)
        if how == "withdrawn":
            futures[0].cancel()
        if how == "flushed":
            r.device.reason = "the link broke"
            r.device.to_error()
            r.cq.ring()
        elif how == "closed":
            r.device.flush_now = False
            r.qp.close()
        while r.device.sends:
            r.complete(len(r.device.sends))
        for future in (*futures, *others):
            assert state(future) != "pending"
        del memory, futures, others, future
        await asyncio.sleep(0)
        gc.collect()
        assert ref() is None
        assert sys.getrefcount(data) == before


async def test_used_slots_are_used_again() -> None:
    """A steady load makes no new slot objects."""
    async with rig(max_send_wr=4) as r:
        seen = set()
        for _ in range(50):
            r.post()
            seen.add(id(r.device.sends[0]))
            r.complete()
        assert len(seen) == 1
