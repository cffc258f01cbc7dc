"""Registered memory as the soft device sees it: steering tags, and the check of each access. No I/O.

On iWARP one STag is local and remote key at once (RFC 5040 section 1.2), so `lkey == rkey` here. It is 32 random
bits: a peer that wasn't given a key can't guess one, and a key is as good as never used again.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, Protocol

from aiordma.drivers.soft.ddp import (
    ACCESS,
    BAD_STAG,
    BOUNDS,
    CANNOT_INVALIDATE,
    COMPARE_SWAP,
    DDP_TAGGED,
    DDP_TO_WRAP,
    FETCH_ADD,
    FOREIGN_STAG,
    MASK64,
    NATIVE_U64,
    RDMAP_OPERATION,
    RDMAP_PROTECTION,
    TO_WRAP,
    fault,
)
from aiordma.enums import Access, WCStatus
from aiordma.types import SGE, Buffer, bounds

_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
_REMOTE_WRITE: Final = int(Access.REMOTE_WRITE)
_REMOTE_READ: Final = int(Access.REMOTE_READ)
_REMOTE_ATOMIC: Final = int(Access.REMOTE_ATOMIC)
_REMOTE: Final = _REMOTE_READ | _REMOTE_WRITE | _REMOTE_ATOMIC

#: No memory, but writable: an empty message is placed like any other.
_NOTHING: Final = memoryview(bytearray())


class LocalFault(Exception):  # noqa: N818 - never leaves the driver: it becomes an unsuccessful completion
    """What this side posted can't be executed."""

    def __init__(self, status: WCStatus) -> None:
        super().__init__(status)
        self.status = status


class Borrower(Protocol):
    """What holds a region's memory for a peer across turns of the loop, by a key that was checked once."""

    def revoke(self) -> None:
        """The region is deregistered: let go of its memory now."""


class Region:
    """A registered memory region (DriverMR).

    Attributes:
        borrowers: what holds its memory for a peer; nothing small does.
    """

    __slots__ = ("access", "addr", "borrowers", "length", "lkey", "pd", "rkey", "table", "whole")

    def __init__(self, table: StagTable, pd: object, buffer: Buffer, addr: int, length: int, access: int) -> None:
        self.table = table
        self.pd = pd
        self.whole = memoryview(buffer).cast("B") if length else _NOTHING
        self.addr = addr
        self.length = length
        self.access = access
        self.borrowers: set[Borrower] = set()
        self.lkey = self.rkey = table.add(self)

    @property
    def registered(self) -> bool:
        """Whether the key is still good."""
        return self.table.regions.get(self.rkey) is self

    def close(self) -> None:
        """Deregister: the key is unknown at once, and what peers had begun by it ends.

        Memory is let go when nothing posted names it.
        """
        if self.registered:
            del self.table.regions[self.rkey]
            borrowers, self.borrowers = self.borrowers, set()
            for borrower in borrowers:
                borrower.revoke()


class StagTable:
    """All regions of a device, by STag, and every check of DDP and RDMAP on an access."""

    __slots__ = ("regions",)

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}

    def add(self, region: Region) -> int:
        """Give a region its STag."""
        # 0 is never a key, so that zeroed memory isn't one by accident.
        while not (stag := secrets.randbits(32)) or stag in self.regions:
            pass
        self.regions[stag] = region
        return stag

    def clear(self) -> None:
        """Deregister everything."""
        for region in list(self.regions.values()):
            region.close()

    def local(self, pd: object, sge: SGE, right: int = 0) -> memoryview:
        """Give the memory of a gather or scatter element of this side's own.

        Raises:
            LocalFault: LOC_PROT_ERR: key, domain, bounds or right don't fit.
        """
        region = self.regions.get(sge.lkey)
        if region is None or region.pd is not pd or region.access & right != right:
            if not sge.length:
                return _NOTHING
            raise LocalFault(WCStatus.LOC_PROT_ERR)
        start = sge.addr - region.addr
        end = start + sge.length
        if start < 0 or end > region.length:
            raise LocalFault(WCStatus.LOC_PROT_ERR)
        return region.whole[start:end]

    def find(self, pd: object, stag: int, addrs: Sequence[int], length: int, right: int) -> Region | None:
        """Give the region that has `length` bytes at each of the addresses, if it has them all and the right."""
        region = self.regions.get(stag)
        if region is None or region.pd is not pd or region.access & right != right:
            return None
        low, high = bounds(addrs)
        if low < region.addr or high + length > region.addr + region.length:
            return None
        return region

    def write_target(self, pd: object, stag: int, to: int, length: int) -> memoryview:
        """Give the memory of a tagged segment from the peer (RFC 5041 section 7.1)."""
        region = self.regions.get(stag)
        if region is None:
            raise fault(DDP_TAGGED, BAD_STAG)
        if region.pd is not pd:
            raise fault(DDP_TAGGED, 2)
        if not region.access & _REMOTE_WRITE:
            raise fault(RDMAP_PROTECTION, ACCESS)
        start = to - region.addr
        end = start + length
        if start < 0 or end > region.length:
            raise fault(DDP_TAGGED, DDP_TO_WRAP if to + length > MASK64 + 1 else BOUNDS)
        return region.whole[start:end]

    def read_source(self, pd: object, stag: int, to: int, length: int) -> tuple[Region, memoryview]:
        """Give region and memory that a Read Request names (RFC 5040 section 7.2)."""
        region = self.regions.get(stag)
        if region is None or region.pd is not pd or not region.access & _REMOTE_READ:
            region = self._checked(pd, stag, _REMOTE_READ)
        start = to - region.addr
        end = start + length
        if start < 0 or end > region.length:
            raise fault(RDMAP_PROTECTION, TO_WRAP if to + length > MASK64 + 1 else BOUNDS)
        return region, region.whole[start:end]

    def atomic(
        self, pd: object, opcode: int, stag: int, to: int, data: int, mask: int, compare: int, compare_mask: int
    ) -> int:
        """Execute an Atomic Request (RFC 7306 section 5), and give the value before it."""
        region = self._checked(pd, stag, _REMOTE_ATOMIC)
        start = to - region.addr
        if start < 0 or start + 8 > region.length:
            raise fault(RDMAP_PROTECTION, TO_WRAP if to + 8 > MASK64 + 1 else BOUNDS)
        if to % 8:
            raise fault(RDMAP_OPERATION, 7)
        (old,) = NATIVE_U64.unpack_from(region.whole, start)
        if opcode == FETCH_ADD:
            # A set bit of the mask is the top bit of a field, whose carry is dropped: add without the top bits,
            # then put them right by exclusive or.
            new = ((old & ~mask) + (data & ~mask) ^ (old ^ data) & mask) & MASK64
        elif opcode == COMPARE_SWAP:
            new = old & ~mask & MASK64 | data & mask if not (compare ^ old) & compare_mask else old
        else:
            raise fault(RDMAP_OPERATION, 6)
        if new != old:
            NATIVE_U64.pack_into(region.whole, start, new)
        return int(old)

    def invalidate(self, pd: object, stag: int) -> None:
        """Execute the invalidate of a delivered Send (RFC 5040 section 5.3)."""
        region = self.regions.get(stag)
        # Memory without remote rights isn't the peer's to revoke, though it may know the key: READs name their sink.
        if region is None or region.pd is not pd or not region.access & _REMOTE:
            raise fault(RDMAP_PROTECTION, CANNOT_INVALIDATE)
        region.close()

    def _checked(self, pd: object, stag: int, right: int) -> Region:
        region = self.regions.get(stag)
        if region is None:
            raise fault(RDMAP_PROTECTION, BAD_STAG)
        if region.pd is not pd:
            raise fault(RDMAP_PROTECTION, FOREIGN_STAG)
        if not region.access & right:
            raise fault(RDMAP_PROTECTION, ACCESS)
        return region
