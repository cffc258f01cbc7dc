"""Completion queues that are polled in the loop's turns, on the soft device."""

from __future__ import annotations

import asyncio
import os

import pytest

import aiordma
from aiordma import Access, BusyError, RemoteRegion
from aiordma.spinning import CompletionMode, SpinningQueue
from aiordma.testing import connected_pair

MODES: list[CompletionMode] = ["event", "busy", "adaptive"]


@pytest.mark.parametrize("mode", MODES)
async def test_operations(mode: CompletionMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """READs, WRITEs and messages complete in each mode, one by one and many at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    aiordma.open_device("soft").completion_mode = mode
    async with connected_pair(device="soft") as pair:
        assert isinstance(pair.client.qp.cq, SpinningQueue) == (mode != "event")
        target = pair.server.alloc(64, access=Access.REMOTE_READ | Access.REMOTE_WRITE)
        remote = RemoteRegion.from_bytes(target.remote().to_bytes())
        local = pair.client.alloc(64)
        for number in range(20):
            await pair.client.write(remote[:1], bytes([number]))
            await pair.client.read(remote[:1], into=local[:1])
            assert local.view[0] == number
        await asyncio.gather(*(pair.client.read(remote[:8], into=local[:8]) for _ in range(100)))
        await pair.client.send(b"x")
        assert await pair.server.recv() == b"x"


@pytest.mark.parametrize("mode", MODES)
async def test_idle_costs_nothing(mode: CompletionMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in flight but posted receives, no callback runs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    context = aiordma.open_device("soft")
    context.completion_mode = mode
    async with connected_pair(device="soft") as pair:
        await pair.client.barrier()
        queue = pair.client.qp.cq
        async with asyncio.timeout(10):
            while isinstance(queue, SpinningQueue) and queue.spinning:  # noqa: ASYNC110 - it needs no event of its own
                await asyncio.sleep(0.001)
        polls = 0
        poll = queue.driver.poll

        def counted(limit: int) -> list[tuple[int, int, int, int, int, int, int, int]]:
            nonlocal polls
            polls += 1
            return poll(limit)

        monkeypatch.setattr(type(queue.driver), "poll", lambda _, limit: counted(limit))
        for _ in range(100):
            await asyncio.sleep(0)
        monkeypatch.undo()
        assert polls == 0


async def test_set_before_queue_pairs() -> None:
    """The mode can't be changed under the feet of queue pairs, and must be one that there is."""
    context = aiordma.open_device("soft")
    with pytest.raises(ValueError, match="one of"):
        context.completion_mode = "sometimes"  # type: ignore[assignment]
    async with connected_pair(device="soft"):
        with pytest.raises(BusyError, match="before the first"):
            context.completion_mode = "busy"
        assert context.completion_mode == "event"


async def test_adaptive_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may use one core only, polling would keep the peer from it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    context = aiordma.open_device("soft")
    mode: CompletionMode = "adaptive"
    context.completion_mode = mode
    mode = context.completion_mode
    assert mode == "event"
