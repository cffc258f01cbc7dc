"""FETCH_ADD and CMP_AND_SWP."""

from __future__ import annotations

import asyncio
import struct
import sys

import pytest

import aiordma
from aiordma import ConnParam, MemoryRegion
from tests.conformance.support import DEVICE, HOST, Guarded, capabilities, offer, pair, pattern

MAX = (1 << 64) - 1


def value(region: MemoryRegion, at: int = 0) -> int:
    """Take a number out of a region."""
    return int.from_bytes(region.view[at : at + 8], sys.byteorder)


def put(region: MemoryRegion, number: int, at: int = 0) -> None:
    """Put a number into a region."""
    region.view[at : at + 8] = number.to_bytes(8, sys.byteorder)


@pytest.fixture(autouse=True)
def _device_has_atomics() -> None:
    """Say so where the device has none; what happens then is test_device's claim."""

    async def ask() -> bool:
        return capabilities().atomics

    if not asyncio.run(ask()):
        pytest.skip(f"device {DEVICE} has no atomics (Capabilities.atomics)")


@pytest.mark.parametrize(
    ("before", "add", "after"),
    [
        (0, 1, 1), (5, 0, 5), (MAX, 1, 0), (MAX, MAX, MAX - 1), (0, -1, MAX), (10, -3, 7),
        (1 << 63, 1 << 63, 0), (0xFFFFFFFF, 1, 1 << 32), (0, 1 << 64, 0), (3, -(1 << 64) - 1, 2),
    ],
)  # fmt: skip
async def test_fetch_add(before: int, add: int, after: int) -> None:
    """FETCH_ADD gives the value before, and the sum wraps at 2**64; a negative addend subtracts."""
    async with pair() as ends:
        region, remote = offer(ends.server, 24)
        put(region, before, 8)
        assert await ends.client.fetch_add(remote[8:16], add) == before
        assert value(region, 8) == after
        assert region.view[:8] == pattern(24)[:8]
        assert region.view[16:] == pattern(24)[16:]


async def test_compare_swap_hit() -> None:
    """CMP_AND_SWP replaces a value that equals the one compared, and gives it."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8)
        put(region, MAX)
        assert await ends.client.compare_swap(remote, -1, 1 << 40) == MAX
        assert value(region) == 1 << 40


async def test_compare_swap_miss() -> None:
    """CMP_AND_SWP leaves a value that differs in one bit, and gives it."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8)
        put(region, 1 << 63 | 1)
        assert await ends.client.compare_swap(remote, 1, 5) == 1 << 63 | 1
        assert value(region) == 1 << 63 | 1


async def test_operands_are_not_kept() -> None:
    """An operand of one atomic doesn't come back in a later one that has 0."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8)
        put(region, 0)
        client = ends.client
        assert await client.fetch_add(remote, 5) == 0
        assert await client.fetch_add(remote, 0) == 5
        assert await client.fetch_add(remote, 0) == 5
        assert await client.compare_swap(remote, 5, 9) == 5
        assert await client.compare_swap(remote, 0, 0) == 9
        assert await client.fetch_add(remote, 0) == 9


async def test_remote_longer_than_eight() -> None:
    """An atomic works on the first 8 bytes of a longer remote region."""
    async with pair() as ends:
        region, remote = offer(ends.server, 64)
        put(region, 1)
        assert await ends.client.fetch_add(remote, 1) == 1
        assert value(region) == 2
        assert region.view[8:] == pattern(64)[8:]


async def test_remote_shorter_than_eight() -> None:
    """An atomic on fewer than 8 bytes is a ValueError, and the connection works on."""
    async with pair() as ends:
        _, remote = offer(ends.server, 16)
        with pytest.raises(ValueError, match="8 bytes"):
            ends.client.fetch_add(remote[8:15], 1)
        with pytest.raises(ValueError, match="8 bytes"):
            ends.client.compare_swap(remote[:0], 1, 2)
        assert await ends.client.read(remote) == pattern(16)


async def test_unaligned() -> None:
    """An atomic at an address that isn't a multiple of 8 is refused at the call; the connection goes on."""
    async with pair() as ends:
        guarded = Guarded(ends.server, 16)
        with pytest.raises(ValueError, match="multiple of 8"):
            ends.client.fetch_add(guarded.remote[4:12], 1)
        with pytest.raises(ValueError, match="multiple of 8"):
            ends.client.compare_swap(guarded.remote[1:9], 1, 2)
        await ends.client.barrier()
        guarded.check(pattern(16))


async def test_many_in_flight() -> None:
    """A hundred atomics posted at once are executed one after the other: each sees the sum so far."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8)
        put(region, 0)
        assert await asyncio.gather(*[ends.client.fetch_add(remote, 3) for _ in range(100)]) == list(range(0, 300, 3))
        assert value(region) == 300


async def test_two_clients_add_up() -> None:
    """Tickets that two clients draw at once are all different, and the counter has their sum."""
    async with (
        aiordma.serve(lambda _: asyncio.Event().wait(), HOST, 0, device=DEVICE) as server,
        server.pd.alloc(8, access=aiordma.Access.REMOTE_ATOMIC) as counter,
        aiordma.connect(HOST, server.port, device=DEVICE) as first,
        aiordma.connect(HOST, server.port, device=DEVICE) as second,
    ):
        remote = counter.remote()
        tickets = []

        async def draw(client: aiordma.Connection) -> None:
            for _ in range(200):
                tickets.append(await client.fetch_add(remote, 1))  # noqa: PERF401

        await asyncio.gather(draw(first), draw(second))
        assert sorted(tickets) == list(range(400))
        assert value(counter) == 400


async def test_compare_swap_is_a_lock() -> None:
    """Of two clients that try CMP_AND_SWP at once, one wins each round."""
    async with (
        aiordma.serve(lambda _: asyncio.Event().wait(), HOST, 0, device=DEVICE) as server,
        server.pd.alloc(8, access=aiordma.Access.REMOTE_ATOMIC) as lock,
        aiordma.connect(HOST, server.port, device=DEVICE) as first,
        aiordma.connect(HOST, server.port, device=DEVICE) as second,
    ):
        for turn in range(50):
            before = await asyncio.gather(
                first.compare_swap(lock.remote(), turn, turn + 1),
                second.compare_swap(lock.remote(), turn, turn + 1),
            )
            assert sorted(before) == [turn, turn + 1]


async def test_mixed_with_reads_and_writes() -> None:
    """Atomics and READs of one connection keep their order: each READ sees the additions before it."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8)
        put(region, 0)
        futures: list[asyncio.Future[bytes]] = []
        for step in range(20):
            ends.client.fetch_add(remote, 1 << step)
            futures.append(ends.client.read(remote))
        results = [struct.unpack("=Q", data)[0] for data in await asyncio.gather(*futures)]
        assert results == [(1 << step + 1) - 1 for step in range(20)]


async def test_depth_of_one() -> None:
    """Atomics beyond the initiator depth wait in order."""
    async with pair(client_param=ConnParam(initiator_depth=1)) as ends:
        region, remote = offer(ends.server, 8)
        put(region, 7)
        assert await asyncio.gather(*[ends.client.fetch_add(remote, 1) for _ in range(50)]) == list(range(7, 57))
