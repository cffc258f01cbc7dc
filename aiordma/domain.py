"""Protection domains: memory and queue pairs that may be used together."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from aiordma.drivers.base import DriverPD
from aiordma.enums import Access
from aiordma.errors import ClosedError, RDMAError
from aiordma.memory import BytesRegion, MemoryPool, MemoryRegion, anonymous, exported
from aiordma.queue_pair import QueuePair
from aiordma.types import SGE, Buffer, ConnParam

if TYPE_CHECKING:
    from aiordma.device import Context

__all__ = ["ProtectionDomain"]


class ProtectionDomain:
    """A protection domain (ibv_pd): memory and queue pairs of one may be used together, and only they."""

    def __init__(self, context: Context) -> None:
        context.check_open()
        self.context = context
        self.driver: DriverPD = context.driver.alloc_pd()
        self.pool = MemoryPool(self)
        self.closed = False
        self._qps: weakref.WeakSet[QueuePair] = weakref.WeakSet()
        self._regions: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()
        context.own(self)

    def unusable(self) -> RDMAError:
        """Make the exception that says why it can't be used any more."""
        return self.context.unusable() if self.context.closed else ClosedError("the protection domain is closed")

    def check_open(self) -> None:
        """Raise if it can't be used any more.

        Raises:
            BrokenError: the device is gone.
            ClosedError: it was closed.
        """
        if self.closed:
            raise self.unusable()

    def register(self, buffer: Buffer, *, access: Access | None = None) -> MemoryRegion:
        """Register a buffer (ibv_reg_mr): bytearray, mmap, array, NumPy array, anything contiguous.

        Args:
            buffer: its export is held until the region is closed.
            access: LOCAL_WRITE by default, or nothing for a read-only buffer, which can then only be sent from.
                Remote access is given only by name.

        Raises:
            ValueError: the buffer is read-only, and `access` writes.
            TypeError: it isn't contiguous.
        """
        self.check_open()
        if access is None:
            access = Access(0) if memoryview(buffer).readonly else Access.LOCAL_WRITE
        elif access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC):
            access |= Access.LOCAL_WRITE  # verbs demand it (ibv_reg_mr)
        region = MemoryRegion(self, exported(buffer, access), access)
        self._regions.add(region)
        return region

    def alloc(self, length: int, *, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Allocate registered memory: from the pool for local use, else a zeroed region with a key of its own."""
        if length < 0:
            raise ValueError(f"length is {length}")
        if access == Access.LOCAL_WRITE:
            return self.pool.alloc(length)
        return self.register(anonymous(length), access=access)

    def alloc_bytes(self, length: int) -> BytesRegion:
        """Allocate a bytes object that READs fill, registered until `deregister()`."""
        self.check_open()
        region = BytesRegion(self, length)
        self._regions.add(region)
        return region

    def create_qp(self, param: ConnParam | None = None) -> QueuePair:
        """Create a queue pair (ibv_create_qp) whose completions resolve futures of this loop."""
        self.check_open()
        param = param or ConnParam()
        qp = QueuePair(self.context.driver, self.driver, self.context.cq_for, self.context.loop, param)
        self._qps.add(qp)
        return qp

    async def idle(self, memory: SGE) -> None:
        """Wait until no posted request of this domain names any of `memory`."""
        for qp in list(self._qps):
            await qp.idle(memory)

    def close(self) -> None:
        """Free the domain and its pool (ibv_dealloc_pd); its queue pairs end first, its regions with it. Idempotent."""
        if not self.closed:
            self.closed = True
            for qp in [qp for qp in self._qps if not qp.closed]:
                qp.refuse(ClosedError("the protection domain was closed"))
                qp.close()
            self.pool.close()
            for region in list(self._regions):
                region.deregister()
            self.driver.close()
