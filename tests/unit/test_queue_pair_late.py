"""Requests that a device forgets since it had flushed before, and the question whether the peer's host is there."""

from __future__ import annotations

import asyncio

from aiordma import BrokenError, FlushedError, Opcode, QPState
from aiordma.drivers.base import Completion
from aiordma.slots import RecvSlot
from tests.unit.fake_driver import rig


async def test_late_requests_are_ended_here() -> None:
    """Where the device doesn't flush what came too late, sends and receives end all the same, also later ones."""
    async with rig(late_requests_flush=False) as r:
        ended: list[Completion] = []
        r.qp.on_receive = lambda _, completion: ended.append(completion)
        r.device.flush_now = False
        r.qp.post_recv_slots((RecvSlot(()),))
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
