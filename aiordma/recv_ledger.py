"""Receives that are with the device, in the order they were posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from aiordma.drivers.base import Completion, DriverQP, PostError
from aiordma.slots import RecvSlot

__all__ = ["RecvLedger"]


class RecvLedger:
    """The FIFO of a queue pair's receives. Their wr_id are odd, those of sends even: one CQ takes both."""

    def __init__(self, driver: DriverQP) -> None:
        self._driver = driver
        self._slots: deque[RecvSlot] = deque()
        self._next_id = 1

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __iter__(self) -> Iterator[RecvSlot]:
        return iter(self._slots)

    def post(self, slots: Sequence[RecvSlot]) -> bool:
        """Post receives; True if a completion can be polled.

        Raises:
            OSError: the device took none, or only the first of them, and no more are in the ledger. So it is with
                whatever else a driver raises.
        """
        for slot in slots:
            slot.wr_id = self._next_id
            self._next_id += 2
        self._slots.extend(slots)
        try:
            return self._driver.post_recv(slots)
        except Exception as error:
            posted = error.posted if isinstance(error, PostError) else 0
            for _ in slots[posted:]:
                self._slots.pop()
            raise

    def completed(self, completion: Completion) -> RecvSlot | None:
        """Retire the oldest receive, whose completion this is; None: it is a late flush of what `clear()` took out."""
        if not self._slots or completion[0] < self._slots[0].wr_id:
            return None
        slot = self._slots.popleft()
        if slot.wr_id != completion[0]:
            raise AssertionError(f"QP {completion[4]}: receive {completion[0]} completed before {slot.wr_id}")
        return slot

    def clear(self) -> deque[RecvSlot]:
        """Take everything."""
        slots, self._slots = self._slots, deque()
        return slots
