"""The memory of a connection on this side: what its requests read from and write to, and what it keeps for its peer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from aiordma.domain import ProtectionDomain
from aiordma.enums import Access
from aiordma.memory import REMOTE, MemoryRegion, MemorySlice, as_bytes
from aiordma.types import Buffer, RemoteRegion

__all__ = ["LOCAL", "LocalMemory", "Memory"]

#: Registered memory of this side.
Memory: TypeAlias = MemoryRegion | MemorySlice
#: The same for `isinstance`, which is faster with a tuple.
LOCAL: Final = (MemorySlice, MemoryRegion)

#: Unregistered data up to this is copied at the call, above it is registered for the one operation.
_BOUNCE_SIZE: Final = 64 * 1024
_NATIVE_U64: Final = struct.Struct("=Q")


class _Landing:
    """Eight bytes that an atomic's old value comes back to; used again once it was taken."""

    __slots__ = ("_free", "memory", "view")

    def __init__(self, free: list[_Landing], memory: Memory) -> None:
        self._free = free
        self.memory = (memory,)
        self.view = memory.view

    def take(self) -> int:
        value: int = _NATIVE_U64.unpack_from(self.view)[0]
        self._free.append(self)
        return value


class LocalMemory:
    """Gather lists and landing places for the requests of one connection, and the regions it deregisters at its end."""

    def __init__(self, pd: ProtectionDomain, max_sge: int) -> None:
        self._pd = pd
        self._max_sge = max_sge
        self._max_inline = pd.context.capabilities.max_inline_data
        self._max_msg_size = pd.context.capabilities.max_msg_size
        self._landings: list[_Landing] = []
        self._regions: list[MemoryRegion] = []
        self._sweep_at = 16

    def keep(self, region: MemoryRegion) -> MemoryRegion:
        """Keep a region registered until `close()` if it has remote rights; gives it back."""
        if region.access & REMOTE:
            if len(self._regions) >= self._sweep_at:
                self._regions[:] = [known for known in self._regions if not known.closed]
                self._sweep_at = 2 * len(self._regions) + 16
            self._regions.append(region)
        return region

    def source(self, data: Memory | Buffer | Sequence[Memory]) -> tuple[Sequence[Memory], bytes | None, int]:
        """Give what is to be sent as a gather list or inline, and its length."""
        if type(data) is bytes and len(data) <= self._max_inline:
            return (), data, len(data)
        sg_list: Sequence[Memory]
        if isinstance(data, LOCAL):
            sg_list = (data,)
        elif isinstance(data, (list, tuple)):
            sg_list = self.pieces(data)
        else:
            view = as_bytes(data)
            length = len(view)
            if length <= self._max_inline:
                return (), bytes(view), length
            if length <= _BOUNCE_SIZE:
                bounce = self._pd.alloc(length)
                bounce.view[:] = view
                sg_list = (bounce,)
            else:
                sg_list = (self._pd.register(view, access=Access(0)),)
        total = sum([memory.length for memory in sg_list])
        if total > self._max_msg_size:
            raise ValueError(f"{total} bytes are more than one request of this device carries: send them in parts")
        return sg_list, None, total

    def pieces(self, pieces: Sequence[Memory]) -> Sequence[Memory]:
        """Check that these can be the gather or scatter list of one request."""
        for piece in pieces:
            if not isinstance(piece, LOCAL):
                raise TypeError(f"pieces must be registered memory, not {type(piece).__name__}: see register()")
        if len(pieces) > self._max_sge:
            raise ValueError(f"{len(pieces)} pieces, the queue pair takes {self._max_sge}: ConnParam(max_sge=)")
        return tuple(pieces)

    @staticmethod
    def unreadable(into: Memory, remote: RemoteRegion) -> ValueError:
        """Make the exception that says why a READ can't go into this memory."""
        if not into.writable:
            return ValueError(f"{into!r} can't be read into: it is registered without LOCAL_WRITE")
        if into.length <= remote.length:
            return ValueError(f"{into.length} bytes are more than one request of this device carries: read in parts")
        return ValueError(f"{into.length} bytes to read, but the remote region has {remote.length}")

    def landing(self, remote: RemoteRegion) -> _Landing:
        """Give eight bytes that an atomic's old value can come back to."""
        self._pd.context.require("atomics", "atomics")
        if remote.length < 8:
            raise ValueError(f"an atomic works on 8 bytes, the remote region has {remote.length}")
        if remote.addr & 7:  # some devices refuse it at the post, others ask the peer's
            raise ValueError(f"an atomic's address is a multiple of 8, not {remote.addr:#x}")
        return self._landings.pop() if self._landings else _Landing(self._landings, self._pd.alloc(8))

    def close(self) -> None:
        """Deregister what was kept. Idempotent."""
        self._landings.clear()
        for region in self._regions:
            region.deregister()
        self._regions.clear()
