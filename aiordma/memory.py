"""Registered memory: regions, their slices, and the pool that small ones come from."""

from __future__ import annotations

import ctypes
import functools
import mmap
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

from aiordma.drivers.base import DriverMR
from aiordma.enums import Access
from aiordma.errors import ClosedError
from aiordma.types import SGE, Buffer, RemoteRegion

if TYPE_CHECKING:
    from aiordma.domain import ProtectionDomain

__all__ = ["MemoryPool", "MemoryRegion", "MemorySlice"]

REMOTE: Final = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the stable ABI: the one way to the address of a read-only export."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview) -> int:
    """Give the address of a contiguous export."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


_PyBUF_WRITE: Final = 0x200
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_content = ctypes.pythonapi.PyBytes_AsString
_content.restype = ctypes.c_void_p
_content.argtypes = [ctypes.py_object]
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def blank_bytes(length: int) -> tuple[bytes, memoryview]:
    """Make a bytes object of undefined content, and a view to fill it by, before anybody else sees it.

    This is what the C API has for it (PyBytes_FromStringAndSize with NULL). The view doesn't keep the object alive.
    """
    data: bytes = _new_bytes(None, length)
    view: memoryview = _view_of(_content(data), length, _PyBUF_WRITE)
    return data, view.cast("B")


class _Sliceable(SGE):
    """What regions and slices share: slicing, the view, and the key for the peer."""

    __slots__ = ()

    @property
    def region(self) -> MemoryRegion:
        """The region this memory lies in."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: slice) -> MemorySlice:
        try:
            start, stop, step = index.indices(self.length)
        except AttributeError:
            raise TypeError(f"registered memory takes a slice, not {type(index).__name__}") from None
        if step != 1:
            raise ValueError("registered memory is contiguous: no step in a slice")
        return MemorySlice(self.region, self.addr + start, stop - start if stop > start else 0)

    @property
    def view(self) -> memoryview:
        """The memory itself, as a memoryview of bytes."""
        region = self.region
        start = self.addr - region.addr
        return region.whole[start : start + self.length]

    def __buffer__(self, flags: int, /) -> memoryview:
        """Export to `memoryview()` and everything that takes a buffer, from Python 3.12 on (PEP 688)."""
        return self.view

    def remote(self) -> RemoteRegion:
        """Give address, length and rkey, to be sent to a peer.

        It is of use to the peer as far as the region was registered with REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC.
        """
        return RemoteRegion(self.addr, self.length, self.region.rkey)

    async def idle(self) -> None:
        """Wait until no posted request names this memory.

        Await it after a cancelled or timed-out operation, before the memory is used again: the request itself can't
        be recalled, and the device may write until it completes or flushes. Requests that wait in this side's own
        queue and were cancelled don't count: they are never posted.

        Cancellation: safe at any time.
        """
        await self.region.pd.idle(self)


class MemorySlice(_Sliceable):
    """A piece of a memory region, made by slicing it. Keeps the region's memory alive."""

    __slots__ = ("_region", "writable")

    def __init__(self, region: MemoryRegion, addr: int, length: int) -> None:
        self._region = region
        self.writable = region.writable
        self.addr = addr
        self.length = length
        self.lkey = region.lkey

    @property
    def region(self) -> MemoryRegion:
        """The region this is a slice of."""
        return self._region

    def __repr__(self) -> str:
        start = self.addr - self._region.addr
        return f"<MemorySlice [{start}:{start + self.length}] of {self._region!r}>"


class MemoryRegion(_Sliceable):
    """Memory registered with a protection domain (ibv_reg_mr). Sliced like a memoryview.

    The buffer's export is held until `close()`: a registered bytearray can't be resized. The memory is the user's all
    the time; while a posted request names it the device reads or writes it too.

    Attributes:
        addr: the address of its first byte.
        length: in bytes.
        lkey: local key.
        rkey: remote key.
        access: the rights it was registered with.
        writable: whether it has LOCAL_WRITE, as the target of a READ or a receive must.
        pd: its protection domain.
        whole: all of it, as a memoryview of bytes.
    """

    __slots__ = ("__weakref__", "_mr", "access", "pd", "rkey", "whole", "writable")

    def __init__(self, pd: ProtectionDomain, view: memoryview, access: Access) -> None:
        self._mr: DriverMR | None = None
        self.pd = pd
        self.whole = view
        self.access = access
        self.writable = bool(access & Access.LOCAL_WRITE)
        mr = pd.driver.reg_mr(view, addr := _address(view), len(view), int(access))
        self._mr = mr
        self.rkey = mr.rkey
        super().__init__(addr, len(view), mr.lkey)

    @property
    def region(self) -> MemoryRegion:
        """Itself."""
        return self

    @property
    def closed(self) -> bool:
        """Whether it is deregistered."""
        return self._mr is None

    def deregister(self) -> None:
        """Deregister at once (ibv_dereg_mr). Use `close()`, unless nothing can be in flight."""
        mr, self._mr = self._mr, None
        if mr is not None:
            mr.close()

    async def close(self) -> None:
        """Wait until no posted request of this side names the region, then deregister it (ibv_dereg_mr).

        From then on a peer that uses its key gets a remote access error, and the buffer's export is over: `view` can't
        be taken any more. Idempotent.
        """
        if self._mr is not None:
            await self.idle()
            self.deregister()
        self.whole.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._mr is not None:
            if self.access & REMOTE and not self.pd.closed:
                # The peer that was given its key can't be told.
                warnings.warn(
                    f"unclosed {self!r}: a peer may still use its key", ResourceWarning, stacklevel=2, source=self
                )
            self.deregister()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<{type(self).__name__} {self.length} bytes at {self.addr:#x}{state}>"


class _Allocation(MemoryRegion):
    """Memory from a pool: a region of its own to the user, a piece of a slab to the device."""

    __slots__ = ()

    def __init__(self, slab: MemoryRegion, whole: memoryview, start: int) -> None:
        # Not registered by itself: the slab's registration serves it.
        self._mr = slab._mr  # noqa: SLF001
        self.pd = slab.pd
        self.access = slab.access
        self.writable = slab.writable
        self.whole = whole
        self.rkey = slab.rkey
        SGE.__init__(self, slab.addr + start, len(whole), slab.lkey)

    @property
    def closed(self) -> bool:
        """Whether it is deregistered, by itself or with its pool."""
        return self._mr is None or self.pd.closed

    def deregister(self) -> None:
        """Invalidate it; its place goes back to the pool when nothing refers to it any more."""
        self._mr = None
        self.lkey = self.rkey = 0


class BytesRegion(MemoryRegion):
    """A bytes object that is filled by READs and seen by nobody before: no copy is made of what arrives.

    Attributes:
        data: the object; to be looked at when the READs are done.
    """

    __slots__ = ("data",)

    def __init__(self, pd: ProtectionDomain, length: int) -> None:
        self._mr = None  # if there isn't so much memory
        self.data, view = blank_bytes(length)
        super().__init__(pd, view, Access.LOCAL_WRITE)


class _Exporter(weakref.ref["ctypes.Array[ctypes.c_ubyte]"]):
    """A reference to what an allocation's views are exported by, with the place that is free when it is gone."""

    __slots__ = ("place",)

    place: tuple[int, MemoryRegion, int]


@functools.cache
def _array(size_class: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Give the array type of a size class: ctypes takes 30 us to make one."""
    return ctypes.c_ubyte * size_class


class MemoryPool:
    """Registered memory for local use, in powers of two, cut from slabs that are registered once.

    A place is free again when its allocation, every slice and view of it, and every posted request that names it are
    gone. The content of an allocation is undefined. Larger ones than a slab get a registration of their own.
    """

    #: 1 MiB: registration of a slab is amortised over many buffers, and an idle pool costs little.
    SLAB_SIZE = 1 << 20
    _SMALLEST = 64

    def __init__(self, pd: ProtectionDomain) -> None:
        self._pd = pd
        self._classes: dict[int, list[tuple[MemoryRegion, int]]] = {}
        #: What each allocation's views are exported by, by the reference's identity: arrays have no hash.
        self._exporters: dict[int, _Exporter] = {}
        self._slab: MemoryRegion | None = None
        self._used = 0
        self._closed = False
        self._slabs: list[MemoryRegion] = []

    def alloc(self, length: int) -> MemoryRegion:
        """Allocate `length` bytes with LOCAL_WRITE, and no remote right."""
        if self._closed:
            raise self._pd.unusable() if self._pd.closed else ClosedError("the memory pool is closed")
        if length > self.SLAB_SIZE:
            return self._pd.register(anonymous(length), access=Access.LOCAL_WRITE)
        size_class = max(self._SMALLEST, 1 << (length - 1).bit_length()) if length else self._SMALLEST
        free = self._classes.setdefault(size_class, [])
        if free:
            slab, start = free.pop()
        else:
            if self._slab is None or self._used + size_class > self.SLAB_SIZE:
                self._slab = self._pd.register(anonymous(self.SLAB_SIZE), access=Access.LOCAL_WRITE)
                self._slabs.append(self._slab)
                self._used = 0
            slab, start = self._slab, self._used
            self._used += size_class
        # Every view is a view of this array, and keeps it: it dies with the last one.
        exporter = _array(size_class).from_buffer(slab.whole, start)
        reference = _Exporter(exporter, self._exporter_gone)
        reference.place = (size_class, slab, start)
        self._exporters[id(reference)] = reference
        return _Allocation(slab, memoryview(exporter).cast("B")[:length], start)

    def _exporter_gone(self, reference: _Exporter) -> None:
        # The collector may call this in any thread: both steps are atomic.
        del self._exporters[id(reference)]
        size_class, slab, start = reference.place
        if not self._closed:
            self._classes[size_class].append((slab, start))

    def close(self) -> None:
        """Deregister every slab. Allocations still in use keep their memory, without the registration."""
        self._closed = True
        self._classes.clear()
        for slab in self._slabs:
            slab.deregister()
        self._slabs.clear()
        self._slab = None


def anonymous(length: int) -> Buffer:
    """Make `length` bytes of zeroed, page-aligned memory."""
    return mmap.mmap(-1, length) if length else bytearray()


def exported(buffer: Buffer, access: Access) -> memoryview:
    """Take the export of what shall be registered, as contiguous bytes.

    Raises:
        TypeError: no buffer, or not contiguous.
        ValueError: read-only, where `access` writes.
    """
    try:
        view = memoryview(buffer)
        flat = view if view.format == "B" and view.ndim == 1 and view.c_contiguous else _flat(view)
    except TypeError as error:
        raise TypeError(f"only contiguous buffers can be registered, not {type(buffer).__name__}: {error}") from None
    if access and flat.readonly and access & ~Access.REMOTE_READ:
        raise ValueError(f"{type(buffer).__name__} is read-only: it can be sent from, but not written ({access!r})")
    return flat


def _flat(view: memoryview) -> memoryview:
    if not view.c_contiguous:
        raise TypeError("not contiguous")
    # cast() refuses shapes with a zero in them.
    return view.cast("B") if view.nbytes else memoryview(bytearray() if not view.readonly else b"")


def as_bytes(data: Any) -> memoryview:
    """Take any contiguous buffer as bytes, for sending."""
    return exported(data, Access(0))
