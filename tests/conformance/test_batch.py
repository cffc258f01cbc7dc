"""Batches."""

from __future__ import annotations

import array
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aiordma import (
    Access,
    BrokenError,
    ClosedError,
    CompletionError,
    ConnParam,
    FlushedError,
    RemoteError,
    RemoteRegion,
)
from tests.conformance.support import Guarded, offer, pair, pattern

OFFSETS: list[Any] = [
    [0, 8, 999, 24, 8], (0, 8, 999, 24, 8), range(0, 1000, 16), range(992, -1, -16), [],
    array.array("Q", [0, 8, 999, 24, 8]), array.array("i", [5]), np.array([0, 8, 999, 24, 8]),
    np.array([0, 8, 200, 24, 8], dtype=np.uint8), np.arange(0, 1000, 8, dtype=np.int32)[::3],
    np.array([], dtype=np.int64), memoryview(array.array("H", [1, 2, 3])),
]  # fmt: skip


async def test_everything_at_once() -> None:
    """READs, WRITEs, messages and atomics of a batch are executed in order, and done after the block."""
    async with pair() as ends:
        region, remote = offer(ends.server, 4096)
        client = ends.client
        sink, source = client.alloc(4096), client.register(pattern(4096, 5))
        async with client.batch() as batch:
            batch.read(remote[:1000], into=sink[:1000])
            batch.write(remote[1000:2000], source[:1000])
            batch.read(remote[1000:2000], into=sink[1000:2000])
            batch.write(remote[2000:2010], b"0123456789")
            batch.write(remote[2100:2200], [source[:50], source[100:150]])
            batch.send(b"hello")
            batch.read(remote[2000:2010], into=sink[2000:2010])
            assert len(batch) == 7
        assert sink.view[:1000] == pattern(4096)[:1000]
        assert sink.view[1000:2000] == pattern(4096, 5)[:1000]
        assert bytes(sink.view[2000:2010]) == b"0123456789" == bytes(region.view[2000:2010])
        assert region.view[2100:2200] == pattern(4096, 5)[:50] + pattern(4096, 5)[100:150]
        assert await ends.server.recv() == b"hello"


async def test_nothing() -> None:
    """An empty batch does nothing, and succeeds."""
    async with pair() as ends:
        async with ends.client.batch():
            pass
        await ends.client.barrier()


async def test_one_read() -> None:
    """A batch of one."""
    async with pair() as ends:
        _, remote = offer(ends.server, 10)
        sink = ends.client.alloc(10)
        async with ends.client.batch() as batch:
            batch.read(remote, into=sink)
        assert sink.view == pattern(10)


@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda value: f"{type(value).__name__}-{len(value)}")
async def test_read_many(offsets: Sequence[int]) -> None:
    """read_many takes any sequence of integers, and puts the pieces one behind the other."""
    size = 300
    async with pair() as ends:
        _, remote = offer(ends.server, 2000)
        sink = ends.client.alloc(size * len(offsets) + 1)
        async with ends.client.batch() as batch:
            batch.read_many(remote[1:], offsets, size, into=sink)
        content = pattern(2000)[1:]
        assert sink.view[:-1] == b"".join(content[int(at) : int(at) + size] for at in offsets)


@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda value: f"{type(value).__name__}-{len(value)}")
async def test_write_many(offsets: Sequence[int]) -> None:
    """write_many writes piece by piece, in order, and nowhere else."""
    size = 300
    async with pair() as ends:
        guarded = Guarded(ends.server, 1400)
        source = ends.client.register(pattern(size * len(offsets), 3))
        async with ends.client.batch() as batch:
            batch.write_many(guarded.remote[1:], offsets, size, data=source)
        await ends.client.barrier()
        expected = bytearray(pattern(1400))
        for number, at in enumerate(offsets):
            expected[1 + int(at) : 1 + int(at) + size] = source.view[number * size : (number + 1) * size]
        guarded.check(bytes(expected))


async def test_many_of_no_bytes() -> None:
    """Pieces of no bytes are fine, at the very end of the region too."""
    async with pair() as ends:
        _, remote = offer(ends.server, 100)
        async with ends.client.batch() as batch:
            batch.read_many(remote, [0, 100, 50], 0, into=ends.client.alloc(0))
            batch.write_many(remote, [100], 0, data=ends.client.alloc(0))
            assert len(batch) == 4


@pytest.mark.parametrize(
    ("offsets", "size", "local"),
    [
        ([0, 93], 8, 16), ([-1], 8, 8), ([0, 8], 8, 15), ([0], -1, 8), ([101], 0, 8), ([1 << 64], 8, 8),
        (np.array([np.iinfo(np.int32).max], dtype=np.int32), 8, 8), (np.array([250], dtype=np.uint8), 8, 8),
        (range(0, 100, 8), 8, 200),
    ],
)  # fmt: skip
async def test_many_out_of_bounds(offsets: Sequence[int], size: int, local: int) -> None:
    """Offsets out of bounds by one, or by overflow, and too little local memory: ValueError."""
    async with pair() as ends:
        region, remote = offer(ends.server, 100)
        memory = ends.client.alloc(local)
        async with ends.client.batch() as batch:
            with pytest.raises(ValueError, match="bytes"):
                batch.read_many(remote, offsets, size, into=memory)
            with pytest.raises(ValueError, match="bytes"):
                batch.write_many(remote, offsets, size, data=memory)
            assert len(batch) == 0
        assert region.view == pattern(100)


@pytest.mark.parametrize("count", [15, 16, 17, 32, 33, 1000])
async def test_longer_than_the_send_queue(count: int) -> None:
    """A batch longer than the send queue goes in parts, in order, with nothing left out."""
    async with pair(client_param=ConnParam(max_send_wr=16)) as ends:
        region, remote = offer(ends.server, 8 * count)
        source, sink = ends.client.register(pattern(8 * count, 2)), ends.client.alloc(8 * count)
        async with ends.client.batch() as batch:
            batch.write_many(remote, range(0, 8 * count, 8), 8, data=source)
            batch.read_many(remote, range(0, 8 * count, 8), 8, into=sink)
        assert region.view == pattern(8 * count, 2) == sink.view


async def test_behind_single_operations() -> None:
    """A batch keeps its place behind operations that wait for room, and those after it keep theirs."""
    async with pair(client_param=ConnParam(max_send_wr=4)) as ends:
        _, remote = offer(ends.server, 4)
        client = ends.client
        sink = client.alloc(40)
        for number in range(20):
            client.write(remote, number.to_bytes(4, "big"))
        async with client.batch() as batch:
            for number in range(10):
                batch.read(remote, into=sink[4 * number : 4 * number + 4])
                batch.write(remote, (100 + number).to_bytes(4, "big"))
            after = client.read(remote)
        values = [int.from_bytes(sink.view[at : at + 4], "big") for at in range(0, 40, 4)]
        assert values == [19, *range(100, 109)]
        assert int.from_bytes(await after, "big") == 19  # posted within the block, before the batch


async def test_two_at_once() -> None:
    """Batches of two tasks don't mix their outcomes."""
    async with pair(client_param=ConnParam(max_send_wr=8)) as ends:
        _, remote = offer(ends.server, 8000)
        sinks = [ends.client.alloc(8000) for _ in range(4)]

        async def run(number: int) -> None:
            async with ends.client.batch() as batch:
                batch.read_many(remote, range(0, 8000, 80), 80, into=sinks[number])

        await asyncio.gather(*[run(number) for number in range(4)])
        assert all(sink.view == pattern(8000) for sink in sinks)


async def test_exception_in_the_body() -> None:
    """An exception in the body passes through, and nothing was posted; atomics of the batch are cancelled."""
    async with pair() as ends:
        region, remote = offer(ends.server, 64)
        future: asyncio.Future[int] | None = None

        async def fail() -> None:
            nonlocal future
            async with ends.client.batch() as batch:
                batch.write(remote[:8], b"12345678")
                batch.send(b"never")
                if ends.client.capabilities.atomics:
                    future = batch.fetch_add(remote[8:], 1)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await fail()
        assert future is None or future.cancelled()
        await ends.client.barrier()
        assert region.view == pattern(64)
        await ends.client.send(b"only this")
        assert await ends.server.recv() == b"only this"


async def test_bounds_are_checked_at_the_call() -> None:
    """An operation longer than its remote region raises in the body."""
    async with pair() as ends:
        region, remote = offer(ends.server, 64)
        with pytest.raises(ValueError, match="65 bytes"):
            async with ends.client.batch() as batch:
                batch.write(remote, bytes(65))
        with pytest.raises(ValueError, match="65 bytes"):
            async with ends.client.batch() as batch:
                batch.read(remote, into=ends.client.alloc(65))
        assert region.view == pattern(64)


async def test_atomics() -> None:
    """Atomics of a batch give their values after the block."""
    async with pair() as ends:
        if not ends.client.capabilities.atomics:
            return  # test_device asserts what happens then
        region, remote = offer(ends.server, 8)
        region.view[:] = bytes(8)
        async with ends.client.batch() as batch:
            futures = [batch.fetch_add(remote, 5) for _ in range(20)]
            futures.append(batch.compare_swap(remote, 100, 7))
            futures.append(batch.compare_swap(remote, 100, 8))
            assert not any(future.done() for future in futures)
        assert [future.result() for future in futures] == [*range(0, 100, 5), 100, 7]


@pytest.mark.parametrize("max_send_wr", [4, 256])
async def test_one_failure(max_send_wr: int) -> None:
    """One refused READ among many is the one exception; those before it are done, those behind it are not."""
    async with pair(client_param=ConnParam(max_send_wr=max_send_wr)) as ends:
        _, remote = offer(ends.server, 80)
        sink = ends.client.alloc(160)
        sink.view[:] = bytes(160)

        async def run() -> None:
            async with ends.client.batch() as batch:
                batch.read_many(remote, range(0, 80, 8), 8, into=sink[:80])
                batch.read(RemoteRegion(remote.addr, 8, remote.rkey ^ 1), into=sink[80:88])
                batch.read_many(remote, range(0, 72, 8), 8, into=sink[88:])

        with pytest.raises((RemoteError, FlushedError)) as caught:
            await run()
        assert isinstance(caught.value, RemoteError) or not ends.client.capabilities.remote_fault_known
        assert not sink.view[80:].tobytes().strip(b"\0")
        if isinstance(caught.value, RemoteError):
            assert sink.view[:80] == pattern(80)


async def test_atomics_of_a_failed_batch() -> None:
    """Atomics in a batch that fails end too, each with its own exception."""
    async with pair() as ends:
        if not ends.client.capabilities.atomics:
            return  # test_device asserts what happens then
        _, remote = offer(ends.server, 8, access=Access.REMOTE_READ)
        with pytest.raises((RemoteError, FlushedError)):
            async with ends.client.batch() as batch:
                first, second = batch.fetch_add(remote, 1), batch.fetch_add(remote, 1)
        assert isinstance(first.exception(), CompletionError)
        assert isinstance(second.exception(), FlushedError)


async def test_closed_connection() -> None:
    """A batch on a closed connection raises, and its atomics don't stay pending."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        sink = ends.client.alloc(8)
        await ends.client.close()
        future: asyncio.Future[int] | None = None

        async def run() -> None:
            nonlocal future
            async with ends.client.batch() as batch:
                batch.read(remote, into=sink)
                if ends.client.capabilities.atomics:
                    future = batch.fetch_add(remote, 1)

        with pytest.raises(ClosedError):
            await run()
        assert future is None or future.done()


async def test_broken_connection() -> None:
    """A batch on a connection that the peer closed raises BrokenError."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        sink = ends.client.alloc(8)
        await ends.server.close()
        with pytest.raises(BrokenError):
            await ends.client.recv()
        with pytest.raises(BrokenError):
            async with ends.client.batch() as batch:
                batch.read(remote, into=sink)


async def test_cancelled_at_the_end() -> None:
    """Cancelling the block's end drops the waiter, not the requests: idle() returns when they are done."""
    async with pair() as ends:
        _, remote = offer(ends.server, 1 << 20)
        sink = ends.client.alloc(1 << 20)

        async def run() -> None:
            async with ends.client.batch() as batch:
                batch.read_many(remote, range(0, 1 << 20, 1 << 16), 1 << 16, into=sink)

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sink.idle()
        assert sink.view == pattern(1 << 20)


@pytest.mark.parametrize("count", [1, 100])
async def test_last_one_is_an_atomic_that_is_cancelled(count: int) -> None:
    """Cancelling the future of an atomic at a batch's end doesn't end the block before all is done."""
    async with pair() as ends:
        client = ends.client
        if not client.capabilities.atomics:
            return
        region, remote = offer(ends.server, 4096)
        region.view[:8] = bytes(8)
        sink = client.alloc(4096)
        async with client.batch() as batch:
            for _ in range(count):
                batch.read(remote, into=sink)
            counted = batch.fetch_add(remote, 7)
            asyncio.get_running_loop().call_soon(counted.cancel)
        assert counted.cancelled() or counted.result() == 0  # a single one may be done by then
        assert client.qp.in_flight == 0
        assert int.from_bytes(region.view[:8], sys.byteorder) == 7
        await sink.idle()


async def test_last_one_is_an_atomic() -> None:
    """A batch that ends in an atomic has its value when the block has ended, and nothing else in flight."""
    async with pair() as ends:
        client = ends.client
        if not client.capabilities.atomics:
            return
        region, remote = offer(ends.server, 8)
        region.view[:] = (5).to_bytes(8, sys.byteorder)
        async with client.batch() as batch:
            batch.fetch_add(remote, 1)
            last = batch.compare_swap(remote, 6, 9)
        assert last.result() == 6
        assert client.qp.in_flight == 0
        assert bytes(region.view) == (9).to_bytes(8, sys.byteorder)


@pytest.mark.parametrize("how", ["posted", "left by an exception", "empty"])
async def test_batch_that_has_ended(how: str) -> None:
    """What is added to a batch that has ended is refused: nothing would ever post it."""
    async with pair() as ends:
        client = ends.client
        _, remote = offer(ends.server, 64)
        sink = client.alloc(64)
        batch = client.batch()
        with contextlib.suppress(KeyError):
            async with batch:
                if how != "empty":
                    batch.write(remote[:1], b"x")
                if how == "left by an exception":
                    raise KeyError
        calls: list[Any] = [
            lambda: batch.read(remote, into=sink),
            lambda: batch.write(remote, b"x"),
            lambda: batch.write(remote, sink),
            lambda: batch.send(b"x"),
            lambda: batch.read_many(remote, [0, 8], 8, into=sink),
            lambda: batch.write_many(remote, [0, 8], 8, data=sink),
        ]
        if client.capabilities.atomics:
            calls += [lambda: batch.fetch_add(remote, 1), lambda: batch.compare_swap(remote, 1, 2)]
        for call in calls:
            with pytest.raises(ClosedError, match="begin another"):
                call()
        assert len(batch) == 0
        await client.barrier()
