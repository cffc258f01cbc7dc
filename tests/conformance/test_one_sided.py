"""READ and WRITE."""

from __future__ import annotations

import asyncio
import zlib

import numpy as np
import pytest

from aiordma import ConnParam, MemoryRegion
from tests.conformance.support import GUARD, Guarded, offer, pair, pattern

#: Around every limit an implementation may have: words, MTUs, bounce and segment sizes, powers of two.
SIZES = [
    1,
    2,
    3,
    7,
    8,
    9,
    63,
    64,
    65,
    1023,
    1460,
    4096,
    4097,
    8191,
    8192,
    8193,
    65_517,
    65_518,
    65_535,
    65_536,
    65_537,
]
LARGE = [(1 << 20) - 1, (1 << 20) + 1, 5_000_011, 64 << 20]


def guarded_sink(region: MemoryRegion, length: int) -> memoryview:
    """Fill a region with guard bytes; gives the view behind the first `length` bytes."""
    region.view[:] = bytes((GUARD,)) * len(region)
    return region.view[length:]


async def test_read_into_slice() -> None:
    """A READ into a slice changes that slice, and nothing around it."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4096)
        local = ends.client.alloc(4096)
        local.view[:] = bytes((GUARD,)) * 4096
        assert await ends.client.read(remote[100:300], into=local[1000:1200]) is None
        assert local.view[1000:1200] == pattern(4096)[100:300]
        assert set(local.view[:1000]) == {GUARD} == set(local.view[1200:])


async def test_read_without_into() -> None:
    """A READ without `into` gives exactly the remote slice as bytes."""
    async with pair() as ends:
        _, remote = offer(ends.server, 10_000)
        data = await ends.client.read(remote[17:9001])
        assert type(data) is bytes
        assert data == pattern(10_000)[17:9001]


async def test_read_scatter() -> None:
    """A READ into a list fills its pieces in order, whatever their sizes and places."""
    async with pair(client_param=ConnParam(max_sge=8)) as ends:
        _, remote = offer(ends.server, 20_000)
        first, second = ends.client.alloc(10_000), ends.client.alloc(20_000)
        pieces = [second[15_000:15_001], first[3:9003], second[0:0], second[7:7007], first[9990:9993]]
        await ends.client.read(remote[1000:], into=pieces)
        assert b"".join(piece.view.tobytes() for piece in pieces) == pattern(20_000)[1000 : 1000 + 16_004]


async def test_write_gather() -> None:
    """A WRITE of a list writes its pieces one behind the other."""
    async with pair() as ends:
        region, remote = offer(ends.server, 20_000)
        local = ends.client.alloc(20_000)
        local.view[:] = pattern(20_000, 5)
        pieces = [local[9000:18_001], local[:0], local[1:2], local[4:4000]]
        await ends.client.write(remote[5:], pieces)
        await ends.client.barrier()
        written = b"".join(piece.view.tobytes() for piece in pieces)
        assert region.view[5 : 5 + len(written)] == written
        assert region.view[5 + len(written) :] == pattern(20_000)[5 + len(written) :]


async def test_send_gather() -> None:
    """A message of a list arrives as its pieces one behind the other."""
    async with pair() as ends:
        local = ends.client.alloc(100)
        local.view[:] = pattern(100)
        await ends.client.send([local[50:], local[:50]])
        assert await ends.server.recv() == pattern(100)[50:] + pattern(100)[:50]


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_too_many_pieces(operation: str) -> None:
    """A list longer than the queue pair takes is a ValueError that names the parameter."""
    async with pair(client_param=ConnParam(max_sge=2)) as ends:
        _, remote = offer(ends.server, 64)
        local = ends.client.alloc(64)
        pieces = [local[:8], local[8:16], local[16:24]]
        with pytest.raises(ValueError, match="max_sge"):
            ends.client.read(remote, into=pieces) if operation == "read" else ends.client.write(remote, pieces)
        assert await ends.client.read(remote) == pattern(64)


async def test_unregistered_pieces() -> None:
    """A list of anything but registered memory is a TypeError."""
    async with pair() as ends:
        _, remote = offer(ends.server, 64)
        with pytest.raises(TypeError, match="registered"):
            ends.client.write(remote, [b"ab", b"cd"])


@pytest.mark.parametrize("size", SIZES)
async def test_sizes(size: int) -> None:
    """WRITE, then READ of every size brings the same bytes to the same place, and no byte more."""
    async with pair() as ends:
        guarded = Guarded(ends.server, size + 20)
        local = ends.client.alloc(size + 20)
        source = pattern(size, 9)
        local.view[3 : 3 + size] = source
        ends.client.write(guarded.remote[7 : 7 + size], local[3 : 3 + size])
        behind = guarded_sink(sink := ends.client.alloc(size + 32), size + 1)
        await ends.client.read(guarded.remote[7 : 7 + size], into=sink[1 : 1 + size])
        assert sink.view[1 : 1 + size] == source
        assert sink.view[0] == GUARD
        assert set(behind) == {GUARD}
        old = pattern(size + 20)
        guarded.check(old[:7] + source + old[7 + size :])


@pytest.mark.parametrize("size", LARGE)
async def test_large(size: int) -> None:
    """Large transfers arrive with their checksum, both ways."""
    async with pair() as ends:
        region, remote = offer(ends.server, size)
        want = zlib.crc32(region.view)
        local = ends.client.alloc(size)
        await ends.client.read(remote, into=local)
        assert zlib.crc32(local.view) == want
        region.view[:] = bytes(size)
        await ends.client.write(remote, local)
        await ends.client.barrier()
        assert zlib.crc32(region.view) == want


async def test_alignments() -> None:
    """Every combination of local and remote misalignment works."""
    async with pair(client_param=ConnParam(max_send_wr=64)) as ends:
        region, remote = offer(ends.server, 16 * 64)
        local, sink = ends.client.alloc(1024), ends.client.alloc(16 * 64)
        local.view[:] = pattern(1024, 3)
        reads = []
        for near in range(8):
            for far in range(8):
                at = (near * 8 + far) * 16
                ends.client.write(remote[at + far : at + far + 8], local[near * 9 : near * 9 + 8])
                reads.append(ends.client.read(remote[at + far : at + far + 8], into=sink[at + near : at + near + 8]))
        await asyncio.gather(*reads)
        for near in range(8):
            for far in range(8):
                at = (near * 8 + far) * 16
                want = pattern(1024, 3)[near * 9 : near * 9 + 8]
                assert region.view[at + far : at + far + 8] == want == sink.view[at + near : at + near + 8]


async def test_zero_length_operations() -> None:
    """READ and WRITE of nothing succeed, in every form, and change nothing."""
    async with pair() as ends:
        region, remote = offer(ends.server, 16)
        client = ends.client
        local = client.alloc(16)
        local.view[:] = pattern(16, 2)
        assert await client.read(remote[5:5]) == b""
        await client.read(remote[5:5], into=local[3:3])
        await client.read(remote, into=[])
        await client.read(remote, into=[local[:0], local[4:4]])
        await client.write(remote[:0], b"")
        await client.write(remote, bytearray())
        await client.write(remote, local[16:])
        await client.write(remote, [])
        await client.barrier()
        assert region.view == pattern(16)
        assert local.view == pattern(16, 2)


async def test_zero_length_regions() -> None:
    """Regions of no bytes are allocated, registered, sent from and read into."""
    async with pair() as ends:
        nothing, remote = offer(ends.server, 0)
        assert len(nothing) == 0
        local = ends.client.alloc(0)
        registered = ends.client.register(bytearray())
        await ends.client.read(remote, into=local)
        await ends.client.write(remote, registered)
        await ends.client.barrier()
        assert await ends.client.read(remote) == b""


async def test_remote_longer() -> None:
    """A remote region longer than the local memory is fine: the local length counts."""
    async with pair() as ends:
        region, remote = offer(ends.server, 100)
        local = ends.client.alloc(10)
        await ends.client.read(remote, into=local)
        assert local.view == pattern(100)[:10]
        await ends.client.write(remote, b"12345")
        await ends.client.barrier()
        assert region.view == b"12345" + pattern(100)[5:]


async def test_remote_shorter() -> None:
    """Local memory longer than the remote region by one is a ValueError, and nothing is posted."""
    async with pair() as ends:
        region, remote = offer(ends.server, 100)
        local = ends.client.alloc(11)
        with pytest.raises(ValueError, match="11 bytes"):
            ends.client.read(remote[:10], into=local)
        with pytest.raises(ValueError, match="11 bytes"):
            ends.client.read(remote[:10], into=[local[:5], local[5:]])
        with pytest.raises(ValueError, match="11 bytes"):
            ends.client.write(remote[:10], local)
        with pytest.raises(ValueError, match="5 bytes"):
            ends.client.write(remote[:4], b"12345")
        await ends.client.barrier()
        assert region.view == pattern(100)


@pytest.mark.parametrize("size", [0, 1, 8, 5000, 65_536, 65_537, 300_000])
async def test_write_sources(size: int) -> None:
    """Every kind of unregistered buffer is written, small and large."""
    data = pattern(size, 4)
    sources = [
        data,
        bytearray(data),
        memoryview(data),
        memoryview(bytearray(data)),
        np.frombuffer(data, np.uint8),
    ]
    async with pair() as ends:
        region, remote = offer(ends.server, size)
        for source in sources:
            region.view[:] = bytes(size)
            await ends.client.write(remote, source)
            await ends.client.barrier()
            assert region.view == data


async def test_small_source_is_copied() -> None:
    """An unregistered buffer up to the bounce size is the caller's again right after the call."""
    async with pair() as ends:
        region, remote = offer(ends.server, 4096)
        source = bytearray(pattern(4096, 8))
        ends.client.write(remote, source)
        source[:] = bytes(4096)
        await ends.client.barrier()
        assert region.view == pattern(4096, 8)


async def test_not_contiguous() -> None:
    """A buffer with gaps is a TypeError, and nothing is posted."""
    async with pair() as ends:
        _, remote = offer(ends.server, 64)
        with pytest.raises(TypeError, match="contiguous"):
            ends.client.write(remote, np.arange(64, dtype=np.uint8)[::2])
        with pytest.raises(TypeError):
            ends.client.write(remote, "text")


async def test_both_directions_at_once() -> None:
    """Both ends read and write each other's memory at the same time."""
    size = 300_000
    async with pair() as ends:
        at_server, to_server = offer(ends.server, 2 * size, seed=1)
        at_client, to_client = offer(ends.client, 2 * size, seed=2)
        pattern_of_server, pattern_of_client = at_server.view.tobytes(), at_client.view.tobytes()
        got_by_client, got_by_server = ends.client.alloc(size), ends.server.alloc(size)
        await asyncio.gather(
            ends.client.read(to_server[:size], into=got_by_client),
            ends.server.read(to_client[:size], into=got_by_server),
            ends.client.write(to_server[size:], at_client[:size]),
            ends.server.write(to_client[size:], at_server[:size]),
        )
        await asyncio.gather(ends.client.barrier(), ends.server.barrier())
        assert got_by_client.view == pattern_of_server[:size] == at_client.view[size:]
        assert got_by_server.view == pattern_of_client[:size] == at_server.view[size:]


async def test_many_reads_gathered() -> None:
    """A thousand READs posted at once each get their own bytes."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8000)
        results = await asyncio.gather(*[ends.client.read(remote[8 * index : 8 * index + 8]) for index in range(1000)])
        assert b"".join(results) == pattern(8000)


async def test_operations_on_same_region() -> None:
    """A peer's region serves its own end too: registered memory is memory."""
    async with pair() as ends:
        mine, remote = offer(ends.client, 64)
        theirs, _ = offer(ends.server, 64, seed=7)
        await ends.server.write(remote[:32], theirs[32:])
        await ends.server.barrier()
        assert mine.view == pattern(64, 7)[32:] + pattern(64)[32:]
