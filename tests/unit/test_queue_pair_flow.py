"""Flow control of a queue pair: what waits is counted, and drain() bounds it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from aiordma.completion import CompletionQueue
from aiordma.device import Context
from aiordma.enums import Opcode, WCStatus
from aiordma.errors import BrokenError, ClosedError
from aiordma.types import ConnParam
from tests.unit.fake_driver import FakeContext, rig, state


async def started(qp_drain: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start to drain, and let it get as far as it can."""
    task = asyncio.create_task(qp_drain)
    await asyncio.sleep(0)
    return task


async def test_bytes_that_wait() -> None:
    """Requests that wait count with their bytes, inline or in memory; posted ones don't."""
    async with rig(max_send_wr=1) as r:
        r.post(r.memory(1000))
        assert r.qp.get_write_buffer_size() == 0
        r.post(r.memory(100))
        r.qp.post_send(Opcode.SEND, (), inline_data=b"x" * 30)
        r.qp.post_send(Opcode.RDMA_READ, (r.memory(8), r.memory(4)))
        assert r.qp.get_write_buffer_size() == 142
        sizes = []
        for _ in range(4):
            r.complete()
            sizes.append(r.qp.get_write_buffer_size())
        assert sizes == [42, 12, 0, 0]


async def test_drain_returns_at_once_below_the_limit() -> None:
    """drain() doesn't wait while no more than the high limit waits."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(high=100, low=50)
        r.post()
        r.post(r.memory(100))
        await asyncio.wait_for(r.qp.drain(), 5)
        r.complete(1)
        r.complete(1)


async def test_drain_waits_from_high_to_low() -> None:
    """Above the high limit drain() waits until the low one is reached."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(high=100, low=50)
        for _ in range(4):
            r.post(r.memory(40))
        draining = await started(r.qp.drain())
        for _ in range(2):
            await asyncio.sleep(0)
            assert not draining.done()
            r.complete()
        await asyncio.wait_for(draining, 5)
        assert r.qp.get_write_buffer_size() == 40
        r.complete()
        r.complete()


async def test_drain_counts_requests_too() -> None:
    """Empty requests count too: as many as the queue has places may wait, more hold drain() up."""
    async with rig(max_send_wr=3) as r:
        for _ in range(6):
            r.post()
        await asyncio.wait_for(r.qp.drain(), 5)
        r.post()
        draining = await started(r.qp.drain())
        assert not draining.done()
        r.complete()
        await asyncio.wait_for(draining, 5)
        while r.qp.in_flight:
            r.complete()


async def test_all_drainers_wake() -> None:
    """Several tasks can wait; a cancelled one doesn't disturb the others."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(high=0)
        r.post()
        r.post(r.memory(1))
        tasks = [await started(r.qp.drain()) for _ in range(3)]
        tasks[1].cancel()
        r.complete()
        await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 5)
        r.complete()


@pytest.mark.parametrize("how", ["fails", "closes"])
async def test_drain_raises_at_the_end(how: str) -> None:
    """drain() raises the connection's error when that ends while it waits, and from then on."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(high=0)
        futures = [r.post(), r.post(r.memory(1))]
        draining = await started(r.qp.drain())
        if how == "fails":
            r.complete(1, WCStatus.RETRY_EXC_ERR)
        else:
            r.qp.close()
        expected = BrokenError if how == "fails" else ClosedError
        for _ in range(2):
            with pytest.raises(expected):
                await asyncio.wait_for(draining, 5)
            draining = await started(r.qp.drain())
        with pytest.raises(expected):
            await draining
        assert "pending" not in [state(f) for f in futures]


async def test_withdrawn_requests_release_drain() -> None:
    """Cancelling what waits counts as progress as soon as the device makes any."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(high=10)
        r.post()
        waiting = [r.post(r.memory(20)) for _ in range(5)]
        draining = await started(r.qp.drain())
        for future in waiting:
            future.cancel()
        r.complete()
        await asyncio.wait_for(draining, 5)
        assert not r.device.sends


@pytest.mark.parametrize(
    ("given", "high", "low"),
    [
        ((None, None), 65536, 16384),
        ((100, None), 100, 25),
        ((None, 100), 400, 100),
        ((0, None), 0, 0),
        ((7, 7), 7, 7),
    ],
)
async def test_limits(given: tuple[int | None, int | None], high: int, low: int) -> None:
    """Limits default to each other as asyncio's do."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(*given)
        assert r.qp.get_write_buffer_limits() == (low, high)


@pytest.mark.parametrize("given", [(1, 2), (-1, None), (5, -1)])
async def test_wrong_limits(given: tuple[int, int | None]) -> None:
    """Low above high, or below 0, is refused, and changes nothing."""
    async with rig(max_send_wr=1) as r:
        with pytest.raises(ValueError, match="must be at least"):
            r.qp.set_write_buffer_limits(*given)
        assert r.qp.get_write_buffer_limits()[1] == 65536


async def test_raised_limits_release_drain() -> None:
    """Raising the limits over what waits wakes drain()."""
    async with rig(max_send_wr=1) as r:
        r.qp.set_write_buffer_limits(high=0)
        r.post()
        r.post(r.memory(10))
        draining = await started(r.qp.drain())
        r.qp.set_write_buffer_limits(high=100, low=10)
        await asyncio.wait_for(draining, 5)
        r.complete()
        r.complete()


# -- the completion queue ------------------------------------------------------------------------------------


async def test_arm_then_poll() -> None:
    """The channel's event arms the queue anew before it polls: what comes in between rings again."""
    fake = FakeContext()
    queue = CompletionQueue(fake, asyncio.get_running_loop(), 10)
    (driver,) = fake.cqs
    assert driver.armed
    armed_at_poll: list[bool] = []
    original = driver.poll

    def poll(limit: int) -> list[Any]:
        armed_at_poll.append(driver.armed)
        return original(limit)

    driver.poll = poll  # type: ignore[method-assign]
    driver.pending.append((1, 0, 0, 0, 99, 0, 0, 0))
    driver.ring()
    assert armed_at_poll == [True]
    queue.close()
    assert driver.closed


async def test_budget_of_a_callback() -> None:
    """A callback takes so many completions, the rest after other callbacks had their turn."""
    async with rig(max_send_wr=1000) as r:
        futures = [r.post() for _ in range(1000)]
        r.device.complete(1000)
        r.cq.ring()
        done = sum(f.done() for f in futures)
        assert 0 < done < 1000
        turns: list[int] = []
        r.loop.call_soon(turns.append, 1)
        await asyncio.sleep(0)
        assert turns
        await asyncio.wait_for(futures[-1], 5)


async def test_capacity() -> None:
    """A completion queue has room for every request; when it is full a further one is opened."""
    async with rig(max_send_wr=6, recv_depth=4, max_cqe=25) as r:
        others = [r.create_qp() for _ in range(4)]
        assert [cq.cqe for cq in r.fake.cqs] == [25, 25, 25]
        assert len({id(qp.cq) for qp in (r.qp, *others)}) == 3
        for qp in others:
            qp.close()


async def test_a_queue_pair_larger_than_the_default() -> None:
    """A queue pair with more entries than a completion queue usually has gets one that is large enough."""
    async with rig(max_send_wr=100, recv_depth=100, max_cqe=50) as r:
        assert r.cq.cqe == 200


async def test_limits_of_the_device() -> None:
    """The device's limits cap what the parameters ask for."""
    fake = FakeContext(max_send_wr=7, max_recv_wr=5)
    context = Context(fake, asyncio.get_running_loop())
    qp = context.pd.create_qp(ConnParam(max_send_wr=100, recv_depth=50))
    assert (fake.qps[0].max_send_wr, fake.qps[0].max_recv_wr) == (7, 5)
    assert qp.max_send_wr == 7
    qp.close()
    context.close()
