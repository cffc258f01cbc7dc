"""Requests that wait for room in a send queue, counted against asyncio's write buffer limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from aiordma.slots import RunSlot, SendSlot, withdrawn

__all__ = ["WriteBuffer"]


class WriteBuffer:
    """A FIFO of slots that the device has no room for yet.

    Too much waits above `high` bytes, or with more requests than the send queue has places: then `drain()` waits until
    it is no more than `low` bytes, as asyncio's transports do.

    Attributes:
        size: bytes of the requests that wait.
        high: the limits, in bytes.
        low: see `high`.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._slots: deque[SendSlot | RunSlot] = deque()
        self._drainers: list[asyncio.Future[None]] = []
        self.size = 0
        self.high = 64 * 1024
        self.low = 16 * 1024

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[SendSlot | RunSlot]:
        return iter(self._slots)

    @property
    def watched(self) -> bool:
        """Whether it wants to be looked at after completions."""
        return bool(self._slots or self._drainers)

    def add(self, slot: SendSlot | RunSlot) -> None:
        """Let a slot wait behind the others."""
        if isinstance(slot, RunSlot):
            slot.nbytes = slot.count * slot.size
        elif slot.inline_data is not None:
            slot.nbytes = len(slot.inline_data)
        else:
            slot.nbytes = sum([sge.length for sge in slot.sg_list])
        self.size += slot.nbytes
        self._slots.append(slot)

    def take(self, room: int) -> tuple[list[SendSlot | RunSlot], list[SendSlot | RunSlot]]:
        """Take the first slots, of up to `room` requests: those to be posted, and those that were withdrawn."""
        slots = self._slots
        ready: list[SendSlot | RunSlot] = []
        gone: list[SendSlot | RunSlot] = []
        while slots and room >= slots[0].count:
            slot = slots.popleft()
            self.size -= slot.nbytes
            if withdrawn(slot):
                gone.append(slot)
            else:
                room -= slot.count
                ready.append(slot)
        if self.size <= self.low and len(slots) <= self._max_requests:
            self.wake()
        return ready, gone

    def clear(self) -> deque[SendSlot | RunSlot]:
        """Take everything, and wake who waits for room."""
        slots, self._slots = self._slots, deque()
        self.size = 0
        self.wake()
        return slots

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Set the limits; what isn't given follows from the other, by asyncio's rule."""
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be at least low ({low}), and low at least 0")
        self.high, self.low = high, low
        if self.size <= low and len(self._slots) <= self._max_requests:
            self.wake()

    async def drain(self) -> None:
        """Wait until no longer too much waits."""
        if self.size > self.high or len(self._slots) > self._max_requests:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drainers.append(future)
            try:
                await future
            finally:
                if future in self._drainers:
                    self._drainers.remove(future)

    def wake(self) -> None:
        """End every `drain()`."""
        drainers, self._drainers = self._drainers, []
        for future in drainers:
            if not future.done():
                future.set_result(None)
