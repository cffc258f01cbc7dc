"""Completion queues joined to the event loop: arm, poll, and hand each completion to its queue pair's ledger."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiordma.drivers.base import DriverContext

if TYPE_CHECKING:
    from aiordma.queue_pair import QueuePair

__all__ = ["CompletionQueue"]

#: Completions taken in one callback of the loop; the rest after other callbacks had their turn.
_BUDGET: Final = 256
#: Futures that may resolve without a trip through the loop in one turn, and for how many seconds. Awaiting what is
#: done doesn't suspend, so without a bound a tight loop of such operations starves every other task and timeout.
_IMMEDIATE: Final = 32
_IMMEDIATE_TIME: Final = 500e-6


class TurnBudget:
    """How much may be done at once in a turn of the loop before other tasks get theirs."""

    __slots__ = ("_deadline", "_left", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = _IMMEDIATE
        self._deadline = 0.0

    def take(self) -> bool:
        """Take one; False if the turn's are used up."""
        left = self._left
        if left == _IMMEDIATE:
            self._loop.call_soon(self._renew)
            self._deadline = self._loop.time() + _IMMEDIATE_TIME
        elif left <= 0 or self._loop.time() > self._deadline:
            self._left = 0
            return False
        self._left = left - 1
        return True

    def _renew(self) -> None:
        self._left = _IMMEDIATE


class CompletionQueue:
    """A completion queue with its channel (ibv_cq, ibv_comp_channel), shared by the queue pairs of a loop.

    Its capacity counts every posted request, signalled or not, send and receive: an error flushes all of them.

    Attributes:
        qps: the queue pairs it serves, by number.
        budget: what may resolve at once in this turn of the loop.
    """

    def __init__(self, context: DriverContext, loop: asyncio.AbstractEventLoop, cqe: int) -> None:
        self._loop = loop
        self._capacity = cqe
        self._reserved = 0
        self._deferred = False
        self.qps: dict[int, QueuePair] = {}
        self.budget = TurnBudget(loop)
        self.driver = context.create_cq(cqe, self._ready)
        self.driver.arm()

    def reserve(self, entries: int) -> bool:
        """Take room for a queue pair's requests; False if there isn't so much."""
        if self._reserved + entries > self._capacity:
            return False
        self._reserved += entries
        return True

    def release(self, entries: int) -> None:
        """Give room back."""
        self._reserved -= entries

    def _ready(self) -> None:
        """The channel has an event: ask for the next one, then poll. In this order nothing is missed."""
        self.driver.arm()
        self.poll()

    def poll(self) -> None:
        """Take what is there, and resolve its futures."""
        self._deferred = False
        completions = self.driver.poll(_BUDGET)
        qps = self.qps
        touched = None
        for completion in completions:
            qp = qps.get(completion[4])
            if qp is None:
                continue  # its queue pair was closed meanwhile
            if qp is not touched:
                if touched is not None:
                    touched.pump()
                touched = qp
            qp.completed(completion)
        if touched is not None:
            touched.pump()
        if len(completions) == _BUDGET:
            self.defer()

    def posted(self) -> None:
        """A post returned with a completion already there: resolve it at once, as far as the turn's budget goes."""
        if not self._deferred:
            if self.budget.take():
                self.poll()
            else:
                self.defer()

    def defer(self) -> None:
        """Poll in the loop's next turn."""
        if not self._deferred:
            self._deferred = True
            self._loop.call_soon(self.poll)

    def close(self) -> None:
        """Destroy (ibv_destroy_cq)."""
        self.driver.close()
