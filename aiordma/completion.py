"""Completion queues joined to the event loop: arm, poll, and hand each completion to its queue pair's ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from aiordma.drivers.base import DriverContext

if TYPE_CHECKING:
    from aiordma.queue_pair import QueuePair
    from aiordma.send_ledger import SendLedger

__all__ = ["CompletionQueue"]

_T = TypeVar("_T")

#: Completions taken in one callback of the loop; the rest after other callbacks had their turn.
_BUDGET: Final = 256
#: Futures that may resolve without a trip through the loop before it gets its turn. Awaiting what is done doesn't
#: suspend, so without a bound a tight loop of such operations starves every other task and timeout (tried). They cost
#: some 10 us each at most, what is larger doesn't complete in its post.
_IMMEDIATE: Final = 32


class TurnBudget:
    """How many operations may resolve at once before other tasks get their turn.

    Renewed by whoever knows that the loop went round: the callbacks of the completion queue.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _IMMEDIATE

    def take(self) -> bool:
        """Take one; False if the turn's are used up."""
        if self.left:
            self.left -= 1
            return True
        return False

    def renew(self) -> None:
        """The loop went round."""
        self.left = _IMMEDIATE


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
        self.budget = TurnBudget()
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
        self.budget.renew()
        self.poll()

    def posting(self, ledger: SendLedger, post: Callable[[_T], bool]) -> Callable[[_T], bool]:  # noqa: ARG002
        """Give what a queue pair posts by: the driver's own function, as nothing has to follow a post."""
        return post

    def poll(self) -> int:
        """Take what is there, resolve its futures, and tell how many completions that were."""
        completions = self.driver.poll(_BUDGET)
        qps = self.qps
        if len(completions) == 1 and not completions[0][1]:
            # The common case of what follows, in line: it is on the path of every operation.
            completion = completions[0]
            qp = qps.get(completion[4])
            if qp is not None:
                qp.completed(completion)
                if qp.attention:
                    qp.pump()
            return 1
        touched: list[QueuePair] = []
        for index, completion in enumerate(completions):
            qp = qps.get(completion[4])
            if qp is not None:  # else its queue pair was closed meanwhile
                if completion[1] and qp.failure is None and qp.unexplained(completions[index:]):
                    continue
                qp.completed(completion)
                if qp.attention and qp not in touched:
                    touched.append(qp)
        for qp in touched:
            qp.pump()
        if len(completions) == _BUDGET:
            self.defer()
        return len(completions)

    def posted(self) -> None:
        """A post returned with a completion already there: resolve it at once, as far as the turn's budget goes."""
        if self.budget.take():
            self.poll()
        else:
            self.defer()

    def defer(self) -> None:
        """Poll in the loop's next turn."""
        if not self._deferred:
            self._deferred = True
            self._loop.call_soon(self._poll_deferred)

    def _poll_deferred(self) -> None:
        self._deferred = False
        self.budget.renew()
        self.poll()

    def close(self) -> None:
        """Destroy (ibv_destroy_cq)."""
        self.driver.close()
