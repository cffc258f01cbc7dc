"""READs that a queue pair collects in a turn of the loop and posts as runs."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.enums import Opcode, WCStatus
from tests.unit.fake_driver import rig, state


async def test_alike_reads_are_collected() -> None:
    """The first READ of a turn goes at once, those behind it as one run, each with its future."""
    async with rig(max_send_wr=40) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[8 * n : 8 * n + 8], 100 + n, 7) for n in range(6)]
        assert r.device.posts == [1]
        await asyncio.sleep(0)
        assert r.device.posts == [1, 5]
        assert [wr.remote_addr for wr in r.device.sends] == list(range(100, 106))
        assert [wr.sg_list[0].addr for wr in r.device.sends] == [memory.addr + 8 * n for n in range(6)]
        r.complete(6)
        assert [state(f) for f in futures] == ["done"] * 6
        assert r.qp.in_flight == 0


async def test_order_of_collected_reads() -> None:
    """What is posted behind collected READs reaches the device behind them."""
    async with rig(max_send_wr=40) as r:
        memory = r.memory()
        for n in range(4):
            r.qp.post_read(memory[:8], n, 7)
        r.post(memory[:1])
        r.qp.post_read(memory[:8], 9, 7)
        r.qp.post_read(memory[:8], 10, 7)
        r.batch(1)
        opcodes = [wr.opcode for wr in r.device.sends]
        assert opcodes == [Opcode.RDMA_READ] * 4 + [Opcode.SEND] + [Opcode.RDMA_READ] * 2 + [Opcode.RDMA_WRITE]
        r.complete(8)


async def test_unlike_reads_are_not_one_run() -> None:
    """READs of another size or key begin another run; the order stays, and each future gets its own."""
    async with rig(max_send_wr=40) as r:
        memory, other = r.memory(), r.memory()
        pieces = [memory[:8]] * 4 + [memory[:4]] * 4 + [other[:4]] * 4 + [memory[:8]]
        futures = [r.qp.post_read(piece, n, n // 9) for n, piece in enumerate(pieces)]
        await asyncio.sleep(0)
        assert [wr.sg_list[0].length for wr in r.device.sends] == [len(piece) for piece in pieces]
        assert [wr.remote_addr for wr in r.device.sends] == list(range(13))
        assert [wr.rkey for wr in r.device.sends] == [n // 9 for n in range(13)]
        for done in range(13):
            r.complete()
            assert state(futures[done]) in ("done", "pending")
        assert [state(f) for f in futures] == ["done"] * 13


async def test_more_reads_than_places() -> None:
    """Collected READs keep within the queue's places; the others wait, and all are done in the end."""
    async with rig(max_send_wr=8) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[:8], n, 7) for n in range(50)]
        order = []
        for _ in range(200):
            await asyncio.sleep(0)
            if r.device.sends:
                order.append(r.device.sends[0].remote_addr)
                r.complete()
        assert order == list(range(50))
        assert [state(f) for f in futures] == ["done"] * 50


async def test_a_run_that_fails() -> None:
    """The READ of a run that failed has its error, those before it succeeded, those behind it are flushed."""
    async with rig(max_send_wr=40) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[:8], n, 7) for n in range(8)]
        await asyncio.sleep(0)
        r.complete(4, WCStatus.REM_ACCESS_ERR)
        assert [state(f) for f in futures] == ["done"] * 3 + ["RemoteError"] + ["FlushedError"] * 4
        assert r.qp.in_flight == 0


@pytest.mark.parametrize("index", [0, 1, 2, 4])
async def test_a_run_that_is_refused_in_part(index: int) -> None:
    """Of a run that the device takes in part, the part taken goes on and the rest has the reason."""
    async with rig(max_send_wr=8) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[:8], n, 7) for n in range(6)]
        r.device.refuse.append(index)
        await asyncio.sleep(0)
        while r.device.sends:
            r.complete(len(r.device.sends))
        assert [state(f) for f in futures] == ["done"] * (1 + index) + ["PostError"] * (5 - index)
        assert r.qp.in_flight == 0
        r.device.posts.clear()
        for _ in range(8):
            r.post()
        assert r.device.posts == [1] * 8
        r.complete(8)


async def test_looking_posts_nothing() -> None:
    """Looking at a queue pair in a debugger doesn't change what it does."""
    async with rig(max_send_wr=40) as r:
        memory = r.memory()
        for n in range(4):
            r.qp.post_read(memory[:8], n, 7)
        assert "in flight 2" in repr(r.qp)  # the first, and the run that is collected
        assert r.device.posts == [1]
        await asyncio.sleep(0)
        r.complete(4)


async def test_idle_counts_collected_reads() -> None:
    """Memory of a READ that is collected is named, until that is done."""
    async with rig(max_send_wr=40) as r:
        memory = r.memory()
        for n in range(4):
            r.qp.post_read(memory[8 * n : 8 * n + 8], n, 7)
        idle = asyncio.ensure_future(memory[24:32].idle())
        await asyncio.sleep(0)
        r.complete(3)
        await asyncio.sleep(0)
        assert not idle.done()
        r.complete()
        await asyncio.wait_for(idle, 5)
