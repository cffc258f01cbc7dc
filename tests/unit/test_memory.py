"""Registered memory on a device that only takes notes: what is registered, slices, references, the pool."""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import mmap
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.device import Context, ProtectionDomain
from aiordma.enums import Access
from aiordma.errors import ClosedError
from aiordma.memory import MemoryPool, MemoryRegion, anonymous, exported
from aiordma.types import SGE
from tests.unit.fake_driver import FakeContext, FakeMR, FakePD

LOCAL = Access.LOCAL_WRITE


class Domain:
    """A protection domain, and what its device was told."""

    def __init__(self) -> None:
        # Nothing here waits: no loop is needed.
        self.context = Context(FakeContext(), cast("asyncio.AbstractEventLoop", None))
        self.pd = ProtectionDomain(self.context)

    @property
    def regions(self) -> list[FakeMR]:
        assert isinstance(self.pd.driver, FakePD)
        return self.pd.driver.regions


@pytest.fixture
def domain() -> Iterator[Domain]:
    """A protection domain; at the end it is closed."""
    made = Domain()
    yield made
    made.pd.close()
    made.context.close()


def _address(buffer: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# -- what can be registered ----------------------------------------------------------------------------------

BUFFERS: dict[str, Any] = {
    "bytearray": lambda: bytearray(b"\0" * 16),
    "array": lambda: array.array("I", [0] * 4),
    "mmap": lambda: mmap.mmap(-1, 16),
    "memoryview": lambda: memoryview(bytearray(32))[8:24],
    "numpy": lambda: np.zeros((2, 2), dtype=np.float32),
    "numpy column": lambda: np.zeros(16, dtype=np.uint8).reshape(4, 4),
    "ctypes": ctypes.c_uint16 * 8,
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_register(domain: Domain, kind: str) -> None:
    """Anything contiguous and writable is registered as its bytes, where they lie, with LOCAL_WRITE only."""
    buffer = BUFFERS[kind]()
    region = domain.pd.register(buffer)
    (mr,) = domain.regions
    assert (mr.addr, mr.length, mr.access) == (region.addr, 16, LOCAL)
    assert (region.length, len(region), region.lkey, region.rkey) == (16, 16, mr.lkey, mr.rkey)
    region.view[3] = 7
    assert memoryview(buffer).cast("B")[3] == 7
    assert ctypes.string_at(region.addr, 16) == bytes(memoryview(buffer).cast("B"))
    region.deregister()
    assert not domain.regions


def test_address(domain: Domain) -> None:
    """The address is that of the buffer's first byte, read-only buffers included."""
    buffer = bytearray(b"content")
    region = domain.pd.register(buffer)
    assert region.addr == _address(buffer)
    data = b"read-only content"
    other = domain.pd.register(data)
    assert ctypes.string_at(other.addr, len(data)) == data
    part = domain.pd.register(memoryview(data)[5:9])
    assert part.addr == other.addr + 5


def test_read_only(domain: Domain) -> None:
    """A read-only buffer is registered without a right; it may be offered for reading, never for writing."""
    assert domain.pd.register(b"x").access == 0
    offered = domain.pd.register(b"x", access=Access.REMOTE_READ)
    assert offered.access == Access.REMOTE_READ
    offered.deregister()
    for access in (LOCAL, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC, LOCAL | Access.REMOTE_READ):
        with pytest.raises(ValueError, match="read-only"):
            domain.pd.register(b"x", access=access)
    assert not domain.regions


@pytest.mark.parametrize(
    ("asked", "given_"),
    [
        (Access.REMOTE_READ, Access.REMOTE_READ),
        (Access.REMOTE_WRITE, Access.REMOTE_WRITE | LOCAL),
        (Access.REMOTE_ATOMIC, Access.REMOTE_ATOMIC | LOCAL),
        (Access(0), Access(0)),
    ],
)
def test_rights(domain: Domain, asked: Access, given_: Access) -> None:
    """Remote rights are given by name only; those that write bring LOCAL_WRITE, as verbs demand."""
    region = domain.pd.register(bytearray(8), access=asked)
    assert domain.regions[0].access == region.access == given_
    region.deregister()


@pytest.mark.parametrize("wrong", [5, "text", None, object(), [1, 2], memoryview(bytearray(8))[::2], np.zeros(8)[::2]])
def test_not_registrable(domain: Domain, wrong: Any) -> None:
    """What isn't a buffer, or isn't contiguous, is a TypeError that names its type."""
    with pytest.raises(TypeError):
        domain.pd.register(wrong)
    with pytest.raises(TypeError, match=type(wrong).__name__):
        exported(wrong, LOCAL)


def test_a_registered_buffer_keeps_its_size(domain: Domain) -> None:
    """The export is held until the region is gone: a bytearray can't be resized meanwhile."""
    buffer = bytearray(16)
    region = domain.pd.register(buffer)
    with pytest.raises(BufferError):
        buffer.append(1)
    region.deregister()
    del region
    gc.collect()
    buffer.append(1)


@pytest.mark.parametrize("empty", [bytearray(), b"", np.zeros(0), array.array("d"), memoryview(b"")])
def test_nothing(domain: Domain, empty: Any) -> None:
    """A buffer of nothing can be registered."""
    region = domain.pd.register(empty)
    assert len(region) == 0
    assert bytes(region.view) == b""
    assert bool(region)


def test_a_refused_registration(domain: Domain) -> None:
    """A device that refuses leaves the buffer as it was, and nothing complains when the rest is collected."""
    assert isinstance(domain.pd.driver, FakePD)
    domain.pd.driver.error = OSError(12, "no memory")
    buffer = bytearray(4)
    with pytest.raises(OSError, match="no memory"):
        domain.pd.register(buffer, access=Access.REMOTE_WRITE)
    domain.pd.driver.error = None  # its traceback refers to the buffer
    gc.collect()
    buffer.append(1)


# -- slices --------------------------------------------------------------------------------------------------


@given(
    start=st.one_of(st.none(), st.integers(-20, 20)),
    stop=st.one_of(st.none(), st.integers(-20, 20)),
    again=st.tuples(st.integers(-5, 20), st.integers(-5, 20)),
)
def test_slices(start: int | None, stop: int | None, again: tuple[int, int]) -> None:
    """A slice of registered memory is what the same slice of a memoryview is, a slice of a slice too."""
    domain = Domain()
    buffer = bytearray(range(16))
    region = domain.pd.register(buffer)
    part = region[start:stop]
    expected = memoryview(buffer)[start:stop]
    assert len(part) == part.length == len(expected)
    assert bytes(part.view) == bytes(expected)
    assert bytes(part[again[0] : again[1]].view) == bytes(expected[again[0] : again[1]])
    assert part.lkey == region.lkey
    assert part.region is region
    remote = part.remote()
    assert (remote.addr, remote.length, remote.rkey) == (part.addr, part.length, region.rkey)
    assert region.addr <= part.addr <= region.addr + 16


def test_a_slice_is_an_sge(domain: Domain) -> None:
    """A region and its slices go into gather lists as they are."""
    region = domain.pd.register(bytearray(8))
    for memory in (region, region[2:4]):
        assert isinstance(memory, SGE)
        assert len(memory.view) == memory.length


@pytest.mark.parametrize("index", [slice(None, None, 2), slice(None, None, -1)])
def test_no_step(domain: Domain, index: slice) -> None:
    """A step is refused."""
    with pytest.raises(ValueError, match="no step"):
        domain.pd.register(bytearray(8))[index]


def test_an_empty_slice_is_true(domain: Domain) -> None:
    """`if memory:` asks whether there is some, not how long it is."""
    assert domain.pd.register(bytearray(8))[3:3]


def test_a_slice_keeps_its_region(domain: Domain) -> None:
    """A slice keeps the registration, and the last one that goes ends it."""
    part = domain.pd.register(bytearray(8))[2:4]
    gc.collect()
    assert len(domain.regions) == 1
    del part
    gc.collect()
    assert not domain.regions


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the buffer protocol for Python classes came with 3.12")
def test_buffer_protocol(domain: Domain) -> None:
    """memoryview() of registered memory is its view."""
    region = domain.pd.register(bytearray(b"abcdef"))
    exporter: Any = region[1:3]
    assert bytes(memoryview(exporter)) == b"bc"


def test_repr(domain: Domain) -> None:
    """What is shown tells where memory is, and never a key."""
    region = domain.pd.register(bytearray(8))
    assert repr(region) == f"<MemoryRegion 8 bytes at {region.addr:#x}>"
    assert repr(region[2:5]) == f"<MemorySlice [2:5] of {region!r}>"
    region.deregister()
    assert repr(region).endswith("closed>")


# -- the end of a region -------------------------------------------------------------------------------------


def test_forgotten_with_remote_rights(domain: Domain) -> None:
    """A region that a peer may use, and that is collected open, complains, and is deregistered."""
    regions = [domain.pd.register(bytearray(8), access=Access.REMOTE_READ)]
    with pytest.warns(ResourceWarning, match="a peer may still use its key"):
        regions.clear()
    assert not domain.regions


def test_forgotten_without(domain: Domain) -> None:
    """A region for local use is deregistered when it is collected, without a word."""
    region = domain.pd.register(bytearray(8))
    del region
    gc.collect()
    assert not domain.regions


async def test_close() -> None:
    """close() deregisters once, entered or not; the buffer is free then."""
    made = Domain()
    buffer = bytearray(8)
    async with made.pd.register(buffer, access=Access.REMOTE_WRITE) as region:
        assert not region.closed
    assert region.closed
    await region.close()
    assert not made.regions
    buffer.append(1)


def test_a_closed_domain(domain: Domain) -> None:
    """Nothing can be registered or allocated in a closed domain; closing twice is nothing."""
    domain.pd.close()
    domain.pd.close()
    with pytest.raises(ClosedError):
        domain.pd.register(bytearray(1))
    with pytest.raises(ClosedError):
        domain.pd.alloc(1)


def test_closing_a_domain_ends_its_regions(domain: Domain) -> None:
    """Closing a domain deregisters what is registered with it; regions that are gone or closed are no hindrance."""
    kept = [domain.pd.register(bytearray(8), access=Access.REMOTE_WRITE) for _ in range(3)]
    kept.pop().deregister()
    domain.pd.alloc(8, access=LOCAL | Access.REMOTE_READ).deregister()
    domain.pd.close()
    assert not domain.regions
    assert all(region.closed for region in kept)


# -- the pool ------------------------------------------------------------------------------------------------


def test_pool(domain: Domain) -> None:
    """Allocations are separate pieces of one registration, aligned, of just the length asked for."""
    lengths = [0, 1, 63, 64, 65, 1000, 4096, 5000]
    allocations = [domain.pd.alloc(length) for length in lengths]
    assert len(domain.regions) == 1
    assert [len(a) for a in allocations] == [len(a.view) for a in allocations] == lengths
    spans = sorted((a.addr, a.addr + len(a)) for a in allocations)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(a.addr % 64 == 0 for a in allocations)
    assert all(a.access == LOCAL and a.lkey == domain.regions[0].lkey for a in allocations)


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=60))
def test_pool_never_gives_the_same_twice(steps: list[tuple[int, bool]]) -> None:
    """However allocations come and go, those alive never overlap, and what one writes another doesn't see."""
    domain = Domain()
    alive: list[tuple[MemoryRegion, bytes]] = []
    for index, (length, drop) in enumerate(steps):
        if drop and alive:
            alive.pop(index % len(alive))
            continue
        allocation = domain.pd.alloc(length)
        content = bytes((index,)) * length
        allocation.view[:] = content
        alive.append((allocation, content))
        assert all(bytes(a.view) == c for a, c in alive)
    assert len(domain.regions) <= 1


def test_memory_is_used_again(domain: Domain) -> None:
    """An allocation that is gone makes room for the next of its size."""
    first = domain.pd.alloc(100)
    addr = first.addr
    del first
    gc.collect()
    second = domain.pd.alloc(128)
    assert second.addr == addr
    assert domain.pd.alloc(65).addr != addr
    second.deregister()
    second.deregister()
    assert domain.pd.alloc(65).addr != addr
    del second
    gc.collect()
    assert domain.pd.alloc(65).addr == addr


@pytest.mark.parametrize("take", [lambda view: view, lambda view: view[3:5], np.asarray, lambda view: view.cast("B")])
def test_a_view_keeps_an_allocation(domain: Domain, take: Callable[[memoryview], object]) -> None:
    """Memory isn't given out again while anything still shows it, though its allocation is gone."""
    allocation = domain.pd.alloc(100)
    addr = allocation.addr
    shown = take(allocation.view)
    allocation.deregister()
    del allocation
    gc.collect()
    assert domain.pd.alloc(100).addr != addr
    del shown
    gc.collect()
    assert addr in [other.addr for other in [domain.pd.alloc(100) for _ in range(2)]]


def test_a_slice_keeps_an_allocation(domain: Domain) -> None:
    """Memory isn't given out again while a slice of it is alive."""
    part = domain.pd.alloc(100)[10:20]
    gc.collect()
    assert domain.pd.alloc(100)[10:20].addr != part.addr


def test_a_closed_allocation_has_no_key(domain: Domain) -> None:
    """What is posted with a closed allocation, or a slice of it, names no memory of the device's."""
    allocation = domain.pd.alloc(100)
    allocation.deregister()
    assert allocation.closed
    assert {allocation.lkey, allocation.rkey, allocation[10:20].lkey, allocation[10:20].remote().rkey} == {0}
    assert [mr.length for mr in domain.regions] == [MemoryPool.SLAB_SIZE]  # others' memory is registered by it too


def test_allocations_of_many_lengths(domain: Domain) -> None:
    """Allocations of one size class share one array type, which is kept: to make one costs more than all else."""
    types = {weakref.ref(type(domain.pd.alloc(length).view.obj)) for length in range(65, 129)}
    gc.collect()
    assert [ref() is not None for ref in types] == [True]


def test_slabs(domain: Domain) -> None:
    """When a slab is used up another one is registered; what is larger gets a registration of its own."""
    half = MemoryPool.SLAB_SIZE // 2
    kept = [domain.pd.alloc(half) for _ in range(3)]
    assert [mr.length for mr in domain.regions] == [MemoryPool.SLAB_SIZE] * 2
    large = domain.pd.alloc(MemoryPool.SLAB_SIZE + 1)
    assert domain.regions[-1].length == MemoryPool.SLAB_SIZE + 1
    large.deregister()
    assert len(domain.regions) == 2
    assert len(kept) == 3


def test_remote_memory_is_not_from_the_pool(domain: Domain) -> None:
    """Memory with a remote right has a key of its own: a peer that may read it may read nothing else."""
    local = domain.pd.alloc(8)
    remote = domain.pd.alloc(8, access=Access.REMOTE_READ)
    assert remote.rkey != local.rkey
    assert [mr.length for mr in domain.regions] == [MemoryPool.SLAB_SIZE, 8]
    assert bytes(remote.view) == bytes(8)
    remote.deregister()


def test_negative_lengths(domain: Domain) -> None:
    """A negative length is refused."""
    with pytest.raises(ValueError, match="-1"):
        domain.pd.alloc(-1)


def test_closing_the_pool(domain: Domain) -> None:
    """Closing deregisters every slab; allocations still in use keep their memory, and go without a word."""
    allocation = domain.pd.alloc(100)
    allocation.view[:3] = b"abc"
    domain.pd.close()
    assert not domain.regions
    assert bytes(allocation.view[:3]) == b"abc"
    ref = weakref.ref(allocation)
    del allocation
    gc.collect()
    assert ref() is None


def test_anonymous() -> None:
    """Anonymous memory is zeroed, of any length, and page-aligned."""
    for length in (0, 1, 5000):
        assert bytes(memoryview(anonymous(length))) == bytes(length)
    memory = anonymous(10)
    assert isinstance(memory, mmap.mmap)
    assert _address(memory) % mmap.PAGESIZE == 0
