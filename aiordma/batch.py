"""Batches: many operations posted as one linked list, the last one signalled, awaited as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from aiordma.enums import Opcode
from aiordma.errors import ClosedError, CompletionError, FlushedError, RDMAError
from aiordma.slots import RUN_LENGTH, RunSlot, SendSlot
from aiordma.types import Buffer, RemoteRegion, bounds

if TYPE_CHECKING:
    from aiordma.connection import Connection
    from aiordma.local_memory import Memory

__all__ = ["Batch"]

_READ: Final = Opcode.RDMA_READ
_WRITE: Final = Opcode.RDMA_WRITE


class Batch:
    """Operations collected in the body of `async with conn.batch() as b`, posted at its end, and awaited.

    They are executed in order, as if called one by one. An exception in the body posts nothing. More operations than
    the send queue has room for go in parts. After the block all are done: one failure is raised, several as an
    ExceptionGroup.

    Ownership: memory given to it is the device's until the block ends; if that is cancelled, until `idle()`.
    Cancellation: of the block's end drops the waiter, not the requests.
    """

    def __init__(self, connection: Connection) -> None:
        self._memory = connection.memory
        self._qp = connection.qp
        self._max_msg_size = connection.capabilities.max_msg_size
        self._ended = False
        self._slots: list[SendSlot | RunSlot] = []

    def _add(self, slot: SendSlot | RunSlot) -> None:
        if self._ended:
            self._drop([slot])
            raise ClosedError("the batch was posted: begin another one")
        self._slots.append(slot)

    def __len__(self) -> int:
        return sum(slot.count for slot in self._slots)

    def read(self, remote: RemoteRegion, into: Memory) -> None:
        """Add a READ; see `Connection.read`."""
        if into.length > min(remote.length, self._max_msg_size) or not into.writable:
            raise self._memory.unreadable(into, remote)
        self._add(self._qp.slot(_READ, (into,), remote.addr, remote.rkey, None, 0))

    def write(self, remote: RemoteRegion, data: Memory | Buffer | Sequence[Memory]) -> None:
        """Add a WRITE; see `Connection.write`."""
        sg_list, inline, length = self._memory.source(data)
        if length > remote.length:
            raise ValueError(f"{length} bytes to write, but the remote region has {remote.length}")
        self._add(self._qp.slot(_WRITE, sg_list, remote.addr, remote.rkey, inline, 0))

    def send(self, data: Memory | Buffer | Sequence[Memory]) -> None:
        """Add a SEND; see `Connection.send`."""
        sg_list, inline, _ = self._memory.source(data)
        self._add(self._qp.slot(Opcode.SEND, sg_list, 0, 0, inline, 0))

    def fetch_add(self, remote: RemoteRegion, value: int) -> asyncio.Future[int]:
        """Add a FETCH_ADD; see `Connection.fetch_add`. The future is done when the block has ended."""
        return self._atomic(Opcode.ATOMIC_FETCH_AND_ADD, remote, value, 0)

    def compare_swap(self, remote: RemoteRegion, compare: int, swap: int) -> asyncio.Future[int]:
        """Add a CMP_AND_SWP; see `Connection.compare_swap`. The future is done when the block has ended."""
        return self._atomic(Opcode.ATOMIC_CMP_AND_SWP, remote, compare, swap)

    def _atomic(self, opcode: Opcode, remote: RemoteRegion, compare_add: int, swap: int) -> asyncio.Future[int]:
        landing = self._memory.landing(remote)
        slot = self._qp.slot(opcode, landing.memory, remote.addr, remote.rkey, None, 0)
        slot.compare_add = compare_add & 0xFFFFFFFFFFFFFFFF
        slot.swap = swap & 0xFFFFFFFFFFFFFFFF
        slot.finish = landing.take
        slot.future = future = asyncio.get_running_loop().create_future()
        self._add(slot)
        return future

    def read_many(self, remote: RemoteRegion, offsets: Sequence[int], size: int, *, into: Memory) -> None:
        """Add a READ of `size` bytes at each of `offsets` in `remote`; the pieces lie one behind the other in `into`.

        Args:
            remote: the region the offsets count from.
            offsets: a sequence or an array of integers.
            size: bytes of each piece.
            into: at least `len(offsets) * size` bytes.

        Raises:
            ValueError: an offset is out of bounds, or `into` is too short. Nothing was added.
        """
        self._many(_READ, remote, offsets, size, into)

    def write_many(self, remote: RemoteRegion, offsets: Sequence[int], size: int, *, data: Memory) -> None:
        """Add a WRITE of `size` bytes to each of `offsets` in `remote`; as `read_many` in everything else."""
        self._many(_WRITE, remote, offsets, size, data)

    def _many(self, opcode: Opcode, remote: RemoteRegion, offsets: Sequence[int], size: int, memory: Memory) -> None:
        count = len(offsets)
        if opcode == _READ and not memory.writable:
            raise self._memory.unreadable(memory, remote)
        if size > self._max_msg_size:
            raise ValueError(f"{size} bytes are more than one request of this device carries")
        if size < 0 or count * size > memory.length:
            raise ValueError(f"{count} pieces of {size} bytes, but the local memory has {memory.length}")
        base = remote.addr
        if isinstance(offsets, range):
            remote_addrs: Sequence[int] = range(base + offsets.start, base + offsets.stop, offsets.step)
        else:
            remote_addrs = [base + offset for offset in map(int, offsets)]  # NumPy's integers would wrap
        if count:
            low, high = bounds(remote_addrs)
            if low < base or high + size > base + remote.length:
                raise ValueError(f"an offset is out of bounds: the remote region has {remote.length} bytes")
        step = min(RUN_LENGTH, self._qp.max_send_wr)
        for start in range(0, count, step):
            end = min(start + step, count)
            # An empty piece is at the same place as its neighbours.
            first = memory.addr + start * size
            local_addrs = range(first, first + (end - start) * size, size) if size else [first] * (end - start)
            run = RunSlot(opcode, size, memory.lkey, remote.rkey, local_addrs, remote_addrs[start:end])
            run.sg_list = (memory,)
            self._add(run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        slots, self._slots = self._slots, []
        self._ended = True
        if exc is not None:
            self._drop(slots)
        elif slots:
            await self._post(slots)

    def _drop(self, slots: list[SendSlot | RunSlot]) -> None:
        """Let go of slots that are not posted; nobody shall wait for their futures."""
        for slot in slots:
            if slot.future is not None:
                slot.future.cancel()
        self._qp.give_back(slots)

    async def _post(self, slots: list[SendSlot | RunSlot]) -> None:
        failures: list[BaseException] = []
        if slots[-1].future is not None:
            # An atomic's, which its owner may cancel: the block's end needs one of its own.
            slots.append(self._qp.slot(_WRITE, (), 0, 0, b"", 0))
        try:
            last = self._qp.post_list(slots, failures)
        except RDMAError:
            self._drop(slots)
            raise
        with contextlib.suppress(RDMAError, OSError):  # its outcome is among the failures
            await last
        if failures:
            raise _one(failures)


def _one(failures: list[BaseException]) -> BaseException:
    """Give one exception for a batch: a flush only says that something before it failed."""
    real: list[Any] = [error for error in failures if not isinstance(error, FlushedError)]
    if not real:
        return failures[0]
    if len(real) == 1:
        return real[0]  # type: ignore[no-any-return]
    operations = {error.opcode for error in real if isinstance(error, CompletionError)}
    return ExceptionGroup(f"{len(real)} requests of a batch failed ({len(operations)} kinds)", real)
