"""In which order requests are executed, complete and show; fence and barrier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma import Access, BrokenError, ClosedError, ConnParam, FlushedError, RDMAError
from tests.conformance.support import DEVICE, capabilities, offer, pair, pattern

LARGE = 8 << 20


@pytest.mark.parametrize("size", [1, 8192, 8193, 1 << 20])
async def test_send_behind_write(size: int) -> None:
    """When a message is received, the WRITEs before it are placed."""
    async with pair() as ends:
        region, remote = offer(ends.server, size)
        for seed in range(5):
            ends.client.write(remote, ends.client.register(pattern(size, seed)))
            ends.client.send(b"look")
            await ends.server.recv()
            assert region.view == pattern(size, seed)


async def test_read_behind_write() -> None:
    """A READ gives what the WRITE before it wrote."""
    async with pair() as ends:
        _, remote = offer(ends.server, 100_000)
        for size in (1, 100, 8192, 8193, 100_000):
            ends.client.write(remote[:size], pattern(size, size))
            assert await ends.client.read(remote[:size]) == pattern(size, size)


async def test_last_write_wins() -> None:
    """WRITEs of one connection to one place are placed in order."""
    async with pair() as ends:
        region, remote = offer(ends.server, 20_000)
        for seed in range(100):
            size = 20_000 if seed % 3 else 64
            ends.client.write(remote[:size], pattern(size, seed))
        ends.client.write(remote[:10], b"0123456789")
        await ends.client.barrier()
        assert region.view == b"0123456789" + pattern(64, 99)[10:] + pattern(20_000, 98)[64:]


async def test_completions_in_order() -> None:
    """Requests of all kinds complete in the order of their posts."""
    async with pair(client_param=ConnParam(max_send_wr=16)) as ends:
        _, remote = offer(ends.server, LARGE)
        client = ends.client
        sink, source = client.alloc(LARGE), client.register(pattern(100_000))
        done: list[int] = []
        futures: list[asyncio.Future[Any]] = []
        for _ in range(10):
            futures += [
                client.read(remote[:100_000], into=sink[:100_000]), client.write(remote[:8], b"12345678"),
                client.write(remote[:100_000], source), client.read(remote[:8], into=sink[:8]),
                client.send(b"x"), client.barrier(),
            ]  # fmt: skip
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
        receiving = asyncio.gather(*futures)
        for _ in range(10):
            await ends.server.recv()
        await receiving
        await asyncio.sleep(0)
        assert done == list(range(60))


@pytest.mark.parametrize("size", [8, 100_000])
async def test_fenced_write(size: int) -> None:
    """A fenced WRITE is placed after the READ before it has its data."""
    async with pair() as ends:
        _, remote = offer(ends.server, LARGE)
        sink = ends.client.alloc(LARGE)
        ends.client.write(remote[-size:], pattern(size, 3))
        reading = ends.client.read(remote, into=sink)
        writing = ends.client.write(remote[-size:], pattern(size, 4), fence=True)
        await asyncio.gather(reading, writing)
        assert sink.view[-size:] == pattern(size, 3)
        assert await ends.client.read(remote[-size:]) == pattern(size, 4)


async def test_fenced_write_of_what_is_read() -> None:
    """A fenced WRITE may send what the READ before it brings."""
    async with pair() as ends:
        region, remote = offer(ends.server, 2 * 300_000)
        buffer = ends.client.alloc(300_000)
        ends.client.read(remote[:300_000], into=buffer)
        await ends.client.write(remote[300_000:], buffer, fence=True)
        await ends.client.barrier()
        assert region.view[300_000:] == region.view[:300_000]


async def test_fenced_send() -> None:
    """A fenced message arrives when the READs before it are done."""
    async with pair() as ends:
        _, remote = offer(ends.server, LARGE)
        sink = ends.client.alloc(LARGE)
        reading = ends.client.read(remote, into=sink)
        ends.client.send(b"taken", fence=True)
        assert await ends.server.recv() == b"taken"
        assert sink.view == pattern(LARGE)
        await reading


async def test_fence_with_nothing_before() -> None:
    """A fence on an idle connection changes nothing, on any operation."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        client = ends.client
        await client.write(remote, bytes(8), fence=True)
        assert await client.read(remote, fence=True) == bytes(8)
        if client.capabilities.atomics:
            assert await client.fetch_add(remote, 1, fence=True) == 0
            assert await client.compare_swap(remote, 1, 2, fence=True) == 1
        await client.send(b"x", fence=True)
        assert await ends.server.recv() == b"x"


async def test_fenced_chain() -> None:
    """Alternate READs and fenced WRITEs of one place: each READ sees exactly the WRITEs before it."""
    async with pair(client_param=ConnParam(initiator_depth=4)) as ends:
        _, remote = offer(ends.server, 4)
        reads = []
        for number in range(100):
            ends.client.write(remote, number.to_bytes(4, "big"), fence=True)
            reads.append(ends.client.read(remote))
        results = [int.from_bytes(data, "big") for data in await asyncio.gather(*reads)]
        assert results == list(range(100))


async def test_barrier_proves_placement() -> None:
    """When the barrier is done, every WRITE before it is in the peer's memory."""
    async with pair() as ends:
        region, remote = offer(ends.server, LARGE)
        source = ends.client.register(pattern(LARGE, 2))
        for start in range(0, LARGE, LARGE // 8):
            ends.client.write(remote[start : start + LARGE // 8], source[start : start + LARGE // 8])
        await ends.client.barrier()
        assert region.view == pattern(LARGE, 2)


async def test_barrier_from_both_sides() -> None:
    """The accepting side has barriers too, and one with nothing before it succeeds."""
    if capabilities().empty_read_waits:
        pytest.skip(f"{DEVICE} may answer a barrier wrong while it sends itself (Capabilities.empty_read_waits)")
    async with pair() as ends:
        await asyncio.gather(*[end.barrier() for end in (ends.client, ends.server) for _ in range(10)])


async def test_barrier_after_a_refused_write() -> None:
    """A barrier behind a refused WRITE fails: it never says that something is placed that isn't."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8, access=Access.REMOTE_READ)
        writing = ends.client.write(remote, b"12345678")
        with pytest.raises((FlushedError, BrokenError)) as caught:
            await ends.client.barrier()
        assert isinstance(caught.value.__cause__, RDMAError)
        if ends.client.capabilities.remote_fault_known and ends.client.capabilities.transport == "iwarp":
            assert "access rights" in str(caught.value.__cause__)
        await asyncio.gather(writing, return_exceptions=True)
        assert region.view == pattern(8)


async def test_barrier_when_closed() -> None:
    """On a closed connection it raises."""
    async with pair() as ends:
        await ends.client.close()
        with pytest.raises(ClosedError):
            ends.client.barrier()
