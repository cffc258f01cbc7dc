"""Requests that a device forgets since it had flushed before, and the question whether the peer's host is there."""

from __future__ import annotations

import asyncio

from aiordma import BrokenError, FlushedError, Opcode, QPState
from aiordma.drivers.base import Completion
from aiordma.slots import RecvSlot
from tests.unit.fake_driver import Rig, rig


def _receive(r: Rig) -> list[Completion]:
    """Post a receive on a device that doesn't flush by itself; gives what completions will come of receives."""
    ended: list[Completion] = []
    r.qp.on_receive = lambda _, completion: ended.append(completion)
    r.device.flush_now = False
    r.qp.post_recv_slots((RecvSlot(()),))
    return ended


async def test_late_requests_are_ended_here() -> None:
    """Where the device doesn't flush what came too late, sends and receives end all the same, also later ones."""
    async with rig(late_requests_flush=False) as r:
        ended = _receive(r)
        sending = r.post()
        r.device.state = QPState.ERR  # by itself
        failure = BrokenError("the peer disconnected")
        r.qp.fail(failure)
        error = (await asyncio.gather(sending, return_exceptions=True))[0]
        assert isinstance(error, FlushedError)
        assert error.__cause__ is failure
        assert [completion[1] for completion in ended] == [5]
        r.device.sends.clear()  # forgotten
        r.device.recvs.clear()
        r.qp.post_recv_slots((RecvSlot(()),))
        await asyncio.sleep(0)
        assert [completion[1] for completion in ended] == [5, 5]


async def test_probe_of_an_idle_connection() -> None:
    """A WRITE of nothing is posted if nothing was posted since the last time and nothing is in flight, else nothing."""
    async with rig() as r:
        r.qp.probe()
        assert [wr.opcode for wr in r.device.sends] == [Opcode.RDMA_WRITE]
        r.qp.probe()
        r.qp.probe()
        assert len(r.device.sends) == 1  # it is in flight
        r.complete()
        sending = r.post()
        r.complete()
        await sending
        r.qp.probe()
        assert not r.device.sends  # that one has told
        r.qp.probe()
        assert len(r.device.sends) == 1
        r.complete()


async def test_a_flush_that_comes_late() -> None:
    """The device's own flush of what was ended here is nobody's, also when something was posted since."""
    async with rig(late_requests_flush=False) as r:
        ended = _receive(r)
        (posted,) = r.device.recvs
        r.device.state = QPState.ERR
        r.qp.fail(BrokenError("the peer disconnected"))
        await asyncio.sleep(0)
        assert len(ended) == 1
        r.qp.post_recv_slots((RecvSlot(()),))
        r.cq.pending[:] = [(posted.wr_id, 5, 0, 0, r.qp.qp_num, 0, 0, 0)]
        r.cq.ring()
        assert len(ended) == 1
        await asyncio.sleep(0)
        assert len(ended) == 2


async def test_flushes_in_order_when_the_cause_comes_between_them() -> None:
    """What was kept for want of a cause is handed out before what comes when there is one."""
    async with rig() as r:
        ended: list[int] = []
        r.qp.on_receive = lambda _, completion: ended.append(completion[0])
        r.device.flush_now = False
        r.qp.post_recv_slots([RecvSlot(()) for _ in range(3)])
        ids = [wr.wr_id for wr in r.device.recvs]
        r.device.state = QPState.ERR
        flushes = [(wr_id, 5, 0, 0, r.qp.qp_num, 0, 0, 0) for wr_id in ids]
        r.cq.pending[:] = flushes[:2]
        r.cq.ring()
        assert ended == []
        r.device.disconnected = True
        r.cq.pending[:] = flushes[2:]
        r.cq.ring()
        assert ended == ids
        r.device.recvs.clear()
