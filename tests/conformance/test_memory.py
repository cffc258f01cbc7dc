"""Regions, slices, the pool and remote keys."""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import Access, ClosedError, ConnParam, LocalError, RemoteRegion, WCStatus
from tests.conformance.support import ALL, offer, pair, pair_of_domains, pattern

SIZE = 240


def _mmap() -> mmap.mmap:
    return mmap.mmap(-1, SIZE)


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(SIZE),
    "mmap": _mmap,
    "array": lambda: array.array("d", bytes(SIZE)),
    "numpy": lambda: np.zeros(SIZE // 8),
    "numpy of two dimensions": lambda: np.zeros((SIZE // 8, 4), dtype=np.uint16),
    "memoryview": lambda: memoryview(bytearray(SIZE + 9))[5:-4],
    "memoryview of numbers": lambda: memoryview(array.array("i", bytes(SIZE))),
    "ctypes": (ctypes.c_uint32 * (SIZE // 4)),
}


@pytest.mark.parametrize("kind", BUFFERS)
async def test_register(kind: str) -> None:
    """The buffer itself is registered: the peer's WRITE shows in it, and its content in the peer's READ."""
    async with pair() as ends:
        buffer = BUFFERS[kind]()
        region = ends.server.register(buffer, access=ALL)
        assert len(region) == SIZE == region.length
        await ends.client.write(region.remote(), pattern(SIZE))
        await ends.client.barrier()
        assert memoryview(buffer).cast("B") == pattern(SIZE)
        memoryview(buffer).cast("B")[:] = pattern(SIZE, 2)
        assert await ends.client.read(region.remote()) == pattern(SIZE, 2)


@pytest.mark.parametrize("kind", BUFFERS)
async def test_register_as_sink(kind: str) -> None:
    """READs, atomics and received messages go into any registered buffer."""
    async with pair() as ends:
        _, remote = offer(ends.server, SIZE)
        buffer = BUFFERS[kind]()
        region = ends.client.register(buffer)
        await ends.client.read(remote, into=region)
        assert memoryview(buffer).cast("B") == pattern(SIZE)
        await ends.server.send(b"message")
        assert await ends.client.recv_into(region[10:]) == 7
        assert bytes(memoryview(buffer).cast("B")[10:17]) == b"message"


async def test_read_only_source() -> None:
    """A read-only buffer is registered for sending: messages, WRITEs, and the peer's READs."""
    data = pattern(SIZE)
    readable = mmap.mmap(-1, SIZE, prot=mmap.PROT_READ)
    async with pair() as ends:
        target, remote = offer(ends.server, SIZE, seed=5)
        buffers: list[Any] = [
            data, memoryview(bytearray(data)).toreadonly(), np.frombuffer(data, np.int32), readable,
        ]  # fmt: skip
        for buffer in buffers:
            region = ends.client.register(buffer)
            assert region.access == Access(0)
            assert region.view.readonly
            await ends.client.write(remote, region)
            await ends.client.barrier()
            assert target.view == memoryview(buffer).cast("B")
            await ends.client.send([region[:100], region[100:]])
            assert await ends.server.recv() == memoryview(buffer).cast("B")
        exposed = ends.client.register(data, access=Access.REMOTE_READ)
        assert await ends.server.read(exposed.remote()) == data


@pytest.mark.parametrize("access", [Access.LOCAL_WRITE, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC, ALL])
async def test_read_only_target(access: Access) -> None:
    """A read-only buffer can't be registered with a right that writes: ValueError."""
    async with pair() as ends:
        with pytest.raises(ValueError, match="read-only"):
            ends.client.register(bytes(8), access=access)


async def test_read_into_read_only() -> None:
    """A READ into memory registered read-only never changes it."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        data = bytes(bytearray(8))
        region = ends.client.register(data)
        with pytest.raises((ValueError, LocalError)):
            await ends.client.read(remote, into=region)
        assert data == bytes(8)


@pytest.mark.parametrize(
    "what", [np.zeros(16)[::2], np.zeros((4, 4)).T, memoryview(bytearray(9))[::2], "text", 5, None]
)
async def test_not_a_contiguous_buffer(what: Any) -> None:
    """What has no buffer, or one with gaps, is a TypeError."""
    async with pair() as ends:
        with pytest.raises(TypeError):
            ends.client.register(what)
        with pytest.raises(TypeError):
            ends.client.register(what, access=ALL)


async def test_export_is_held() -> None:
    """A registered bytearray can't be resized; after close() it can, though the region is still there."""
    async with pair() as ends:
        buffer = bytearray(64)
        region = ends.client.register(buffer, access=ALL)
        resizes: list[Callable[[], None]] = [
            lambda: buffer.append(1),
            lambda: buffer.extend(b"12"),
            buffer.clear,
        ]
        for resize in resizes:
            with pytest.raises(BufferError):
                resize()
        await region.close()
        buffer.append(1)
        assert len(buffer) == 65


async def test_slices() -> None:
    """Slices of regions and keys follow the rules of memoryview."""
    async with pair() as ends:
        region, remote = offer(ends.server, 100)
        whole = memoryview(pattern(100))
        for start in (None, 0, 1, 50, 99, 100, 101, -1, -50, -100, -200):
            for stop in (None, 0, 1, 50, 99, 100, 500, -1, -50, -100, -200):
                want = whole[start:stop]
                piece, key = region[start:stop], remote[start:stop]
                assert piece.view == want
                assert len(piece) == len(want) == len(key)
                assert piece[1:-1].view == want[1:-1]
                assert (piece.remote().addr, piece.remote().length) == (key.addr, key.length)
        assert bool(region[5:5])
        assert bool(remote[5:5])


async def test_slice_of_slice() -> None:
    """A slice of a slice counts from the slice, and can't leave it."""
    async with pair() as ends:
        region, remote = offer(ends.server, 100)
        assert region[10:20][5:50].view == pattern(100)[15:20]
        assert await ends.client.read(remote[10:20][5:50]) == pattern(100)[15:20]
        assert region[10:20].region is region
        assert region.region is region


async def test_no_step_no_index() -> None:
    """A step is a ValueError, an index a TypeError."""
    async with pair() as ends:
        region, remote = offer(ends.server, 100)
        for what in (region, region[:50], remote):
            with pytest.raises(ValueError, match="step"):
                what[::2]
            with pytest.raises(TypeError, match="slice"):
                what[5]  # type: ignore[index]


async def test_view() -> None:
    """`view` is the live memory as writable bytes, of slices too."""
    async with pair() as ends:
        region = ends.client.register(array.array("i", [0] * 4))
        view = region[4:12].view
        assert (view.format, view.nbytes, view.readonly) == ("B", 8, False)
        view[:] = b"12345678"
        assert region.view == bytes(4) + b"12345678" + bytes(4)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes export buffers from Python 3.12 on (PEP 688)")
async def test_buffer_protocol() -> None:
    """memoryview(region) and whatever takes a buffer work on regions and slices."""
    async with pair() as ends:
        region = ends.client.register(bytearray(b"0123456789"))
        exporter: Any = region
        assert bytes(exporter) == b"0123456789"
        memoryview(exporter)[0:1] = b"x"
        assert bytes(exporter[:4]) == b"x123"
        assert np.frombuffer(exporter[4:], np.uint8).tolist() == list(b"456789")


async def test_alloc() -> None:
    """Allocations don't overlap, of whatever size, before and after others were freed."""
    async with pair() as ends:
        held: list[tuple[aiordma.MemoryRegion, bytes]] = []
        for number in range(400):
            size = (number * 7919) % 5000
            region = ends.client.alloc(size)
            assert len(region) == size
            region.view[:] = pattern(size, number)
            held.append((region, pattern(size, number)))
            if number % 3 == 0:
                held.pop(number * 31 % len(held))
        big = ends.client.alloc(3 << 20)
        big.view[:] = bytes(len(big))
        assert all(region.view == content for region, content in held)


async def test_alloc_with_rights() -> None:
    """Memory allocated with remote rights is zeroed, and has a key of its own."""
    async with pair() as ends:
        first, second = (
            ends.client.alloc(5000, access=ALL),
            ends.client.alloc(5000, access=Access.REMOTE_READ),
        )
        assert first.view == bytes(5000) == second.view
        assert first.rkey != second.rkey
        assert first.access & ALL == ALL


async def test_alloc_negative() -> None:
    """A negative length is a ValueError."""
    async with pair() as ends:
        with pytest.raises(ValueError, match="-1"):
            ends.client.alloc(-1)


async def test_remote_region_encoding() -> None:
    """A key is 20 bytes on the wire, decoded from the front of what may be padded; fewer are a ValueError."""
    async with pair() as ends:
        _, remote = offer(ends.server, 100)
        data = remote.to_bytes()
        assert len(data) == RemoteRegion.WIRE_SIZE == 20
        assert data == remote.addr.to_bytes(8, "big") + remote.length.to_bytes(8, "big") + remote.rkey.to_bytes(
            4, "big"
        )
        for encoded in (data, data + bytes(36), bytearray(data), memoryview(data + b"more")):
            decoded = RemoteRegion.from_bytes(encoded)
            assert decoded == remote
            assert await ends.client.read(decoded) == pattern(100)
        with pytest.raises(ValueError, match="20 bytes"):
            RemoteRegion.from_bytes(data[:19])


async def test_key_is_not_shown() -> None:
    """A key is a capability: it isn't in the repr."""
    async with pair() as ends:
        _, remote = offer(ends.server, 100)
        assert str(remote.rkey) not in repr(remote)
        assert f"{remote.rkey:x}" not in repr(remote)


async def test_unreferenced_sink() -> None:
    """Memory named in a posted request lives until its completion, whoever else lets go of it."""
    async with pair() as ends:
        _, remote = offer(ends.server, 1 << 20)
        futures = [ends.client.read(remote, into=ends.client.alloc(1 << 20)) for _ in range(4)]
        source = [ends.client.write(remote[:100_000], bytearray(pattern(100_000, 3))) for _ in range(4)]
        gc.collect()
        await asyncio.gather(*futures, *source)
        assert await ends.client.read(remote[:100_000]) == pattern(100_000, 3)


async def test_slice_keeps_region() -> None:
    """A slice keeps its region's memory registered."""
    async with pair() as ends:
        _, remote = offer(ends.server, 100)
        piece = ends.client.alloc(200)[50:150]
        other = ends.client.register(bytearray(200))[50:150]
        gc.collect()
        await ends.client.read(remote, into=piece)
        await ends.client.read(remote, into=other)
        assert piece.view == pattern(100) == other.view


async def test_idle_with_nothing() -> None:
    """idle() returns at once where nothing is in flight, of a slice and of nothing too."""
    async with pair() as ends:
        region = ends.client.alloc(100)
        await region.idle()
        await region[10:20].idle()
        await region[10:10].idle()


async def test_idle_after_cancel() -> None:
    """After a cancelled READ, idle() returns when the memory is the caller's again: nothing changes it."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4 << 20)
        sink = ends.client.alloc(4 << 20)
        for _ in range(5):
            sink.view[-10:] = bytes(10)
            reading = ends.client.read(remote, into=sink)
            reading.cancel()
            await sink.idle()
            assert sink.view[-10:] == pattern(4 << 20)[-10:]
            sink.view[-10:] = b"0123456789"
            await ends.client.barrier()
            assert sink.view[-10:].tobytes() == b"0123456789"


async def test_idle_of_a_slice() -> None:
    """idle() of one slice doesn't wait for another one of the same region."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4 << 20)
        sink = ends.client.alloc(8 << 20)
        reading = ends.client.read(remote, into=sink[: 4 << 20])
        await sink[4 << 20 :].idle()
        assert not reading.done()
        await sink[(4 << 20) - 1 :].idle()
        assert reading.done()


async def test_idle_of_withdrawn() -> None:
    """A request cancelled while it waited in this side's own queue is never posted, and names no memory."""
    async with pair(client_param=ConnParam(max_send_wr=1)) as ends:
        _, remote = offer(ends.server, 4 << 20)
        sink, other = ends.client.alloc(4 << 20), ends.client.alloc(8)
        other.view[:] = bytes(8)
        reading = ends.client.read(remote, into=sink)
        waiting = ends.client.read(remote[:8], into=other)
        waiting.cancel()
        await other.idle()
        assert not reading.done()
        await reading
        await ends.client.barrier()
        assert other.view == bytes(8)


async def test_close_waits() -> None:
    """Closing a region waits until no posted request names it."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4 << 20)
        sink = bytearray(4 << 20)
        region = ends.client.register(sink)
        reading = ends.client.read(remote, into=region)
        await region.close()
        assert reading.done()
        await reading
        assert sink == pattern(4 << 20)


async def test_close_twice() -> None:
    """close() is idempotent; leaving the block closes."""
    async with pair() as ends:
        async with ends.client.register(bytearray(8), access=ALL) as region:
            assert not region.closed
        assert region.closed
        await region.close()
        region.deregister()


async def test_use_after_close() -> None:
    """A closed region isn't read into: the request fails, and the memory stays."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        buffer = bytearray(8)
        region = ends.client.register(buffer)
        await region.close()
        with pytest.raises(LocalError) as caught:
            await ends.client.read(remote, into=region)
        assert caught.value.status == WCStatus.LOC_PROT_ERR
        assert buffer == bytes(8)


async def test_memory_of_another_domain() -> None:
    """Local memory of another protection domain is a LocalError at the request."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        domain = aiordma.ProtectionDomain(ends.client.context)
        region = domain.register(bytearray(8))
        with pytest.raises(LocalError) as caught:
            await ends.client.read(remote, into=region)
        assert caught.value.status == WCStatus.LOC_PROT_ERR
        assert region.view == bytes(8)
        domain.close()


async def test_own_domains() -> None:
    """Two ends with protection domains of their own work with their own memory."""
    async with pair() as ends:
        context = ends.client.context
    first, second = aiordma.ProtectionDomain(context), aiordma.ProtectionDomain(context)
    async with pair_of_domains(first, second) as own:
        assert own.client.pd is first
        assert own.server.pd is second
        _, remote = offer(own.server, 64)
        assert await own.client.read(remote) == pattern(64)
    first.close()
    second.close()


async def test_closed_domain() -> None:
    """Nothing is registered or allocated in a closed domain; closing twice is fine."""
    async with pair() as ends:
        domain = aiordma.ProtectionDomain(ends.client.context)
        domain.close()
        domain.close()
        with pytest.raises(ClosedError):
            domain.register(bytearray(8))
        with pytest.raises(ClosedError):
            domain.alloc(8)


async def test_one_region_many_connections() -> None:
    """A region serves every connection of its domain."""
    async with pair() as first, pair() as second:
        assert first.server.pd is second.server.pd
        _, remote = offer(first.server, 64)
        assert await first.client.read(remote) == pattern(64) == await second.client.read(remote)


async def test_connection_owns_its_regions() -> None:
    """Closing a connection deregisters what it made with remote rights; memory and views stay the user's."""
    async with pair() as ends:
        region, _ = offer(ends.server, 64)
        local = ends.server.alloc(64)
        local.view[:] = pattern(64)
        await ends.server.close()
        assert region.closed
        assert region.view == pattern(64)
        assert local.view == pattern(64)


async def test_unclosed_region_warns() -> None:
    """A region with remote rights that is collected open is a ResourceWarning; local memory isn't."""
    async with pair() as ends:
        domain = ends.client.pd
        domain.register(bytearray(8))
        domain.alloc(8)
        gc.collect()
        with pytest.warns(ResourceWarning, match="peer"):
            domain.register(bytearray(8), access=Access.REMOTE_READ)
