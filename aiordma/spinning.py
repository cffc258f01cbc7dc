"""Completion queues that are polled in the loop's turns, instead of waiting for an event of the channel.

An event costs a system call to ask for it, a wake-up, and two more calls to take it: on rxe half of a READ's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from aiordma.completion import CompletionQueue
from aiordma.drivers.base import DriverContext

if TYPE_CHECKING:
    from aiordma.send_ledger import SendLedger

__all__ = ["CompletionMode", "SpinningQueue"]

_T = TypeVar("_T")

#: "event": the channel's event; "busy": poll in every turn of the loop while requests are in flight; "adaptive": poll
#: in every turn for a moment after each completion, then wait for an event.
CompletionMode: TypeAlias = Literal["event", "busy", "adaptive"]

#: Turns without anything in flight after which `busy` goes back to events: a task that awaits one operation after the
#: other posts the next one a turn after the completion.
_IDLE_TURNS: Final = 8
#: Seconds that `adaptive` polls after a completion. Tried with TCP between two processes on two cores: 12 to 14 us
#: round trip with it, 77 us without.
_WINDOW: Final = 20e-6
#: Windows in a row without a completion after which `adaptive` polls no more until an event comes soon after another.
_FRUITLESS: Final = 4


class SpinningQueue(CompletionQueue):
    """A completion queue that is polled in the loop's turns; other descriptors are served in each turn.

    It is armed whenever it isn't being polled, so that nothing is missed; a posted receive alone isn't work in flight,
    and costs nothing while idle.

    Attributes:
        spinning: it is being polled in each turn.
    """

    def __init__(self, context: DriverContext, loop: asyncio.AbstractEventLoop, cqe: int, mode: CompletionMode) -> None:
        self._goes_on = self._busy if mode == "busy" else self._adaptive
        self.spinning = False
        self._closed = False
        self._armed = True
        self._taken = 0
        #: Queue pairs that may have requests in flight.
        self._active: set[SendLedger] = set()
        self._idle_turns = 0
        self._until = 0.0
        self._fruitless = 0
        self._last_event = 0.0
        super().__init__(context, loop, cqe)

    def posting(self, ledger: SendLedger, post: Callable[[_T], bool]) -> Callable[[_T], bool]:
        """Wrap a driver's post, so that polling starts with it."""
        active, loop_turn = self._active, self.spin

        def posted(requests: _T) -> bool:
            ready = post(requests)
            active.add(ledger)
            loop_turn()
            return ready

        return posted

    def spin(self) -> None:
        """Poll in the loop's turns from now on."""
        if not self.spinning and (self._goes_on is self._busy or self._fruitless < _FRUITLESS):
            self.spinning = True
            self._idle_turns = 0
            self._until = time.monotonic() + _WINDOW
            self._loop.call_soon(self._turn)

    def _ready(self) -> None:
        """The channel has an event; it is asked for the next one when polling ends."""
        self._armed = False
        self.budget.renew()
        now = time.monotonic()
        if now - self._last_event < _WINDOW:
            self._fruitless = 0
        self._last_event = now
        if not self.spinning:
            self.poll()
            self.spin()
            if not self.spinning:
                self._rest()

    def poll(self) -> int:
        """Take what is there, and resolve its futures."""
        taken = super().poll()
        self._taken += taken
        return taken

    def close(self) -> None:
        """Destroy (ibv_destroy_cq); it isn't polled any more."""
        self._closed = True
        super().close()

    def _turn(self) -> None:
        if self._closed:
            return
        self.budget.renew()
        self.poll()
        if self._goes_on():
            self._loop.call_soon(self._turn)
        else:
            self.spinning = False
            self._rest()

    def _rest(self) -> None:
        """Wait for an event from now on: arm, then poll once more, in this order."""
        if not self._armed:
            self._armed = True
            self.driver.arm()
        self.poll()

    def _busy(self) -> bool:
        active = self._active
        for ledger in [ledger for ledger in active if not ledger.in_flight]:
            active.discard(ledger)
        self._idle_turns = 0 if active or self._taken else self._idle_turns + 1
        self._taken = 0
        return self._idle_turns < _IDLE_TURNS

    def _adaptive(self) -> bool:
        now = time.monotonic()
        if self._taken:
            self._taken = 0
            self._fruitless = 0
            self._until = now + _WINDOW
        elif now >= self._until:
            self._fruitless += 1
            return False
        return True
