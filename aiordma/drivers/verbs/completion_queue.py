"""Completion queues, each with a completion channel of its own, whose descriptor the loop watches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from aiordma.drivers.base import Completion
from aiordma.drivers.verbs.api import CQ, CompChannel, Context, PyverbsError, make_with_fd, verb
from aiordma.drivers.verbs.direct_poll import ROOM, DirectPoll, acknowledge, queue_of
from aiordma.drivers.watch import unwatch, watch_readable
from aiordma.enums import WCFlags

__all__ = ["VerbsCQ"]

#: Events acknowledged together: it takes a mutex, and nobody waits for it but ibv_destroy_cq.
_ACK_BATCH: Final = 64
#: struct ib_uverbs_comp_event_desc.
_EVENT_SIZE: Final = 8
_WITH_IMM: Final = int(WCFlags.WITH_IMM)


class VerbsCQ:
    """A completion queue (ibv_cq). One channel each: ibv_get_cq_event of pyverbs loses events of another's."""

    def __init__(
        self, context: Context, loop: asyncio.AbstractEventLoop, cqe: int, on_ready: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_ready = on_ready
        with verb("ibv_create_comp_channel", "no completion channel"):
            self._channel, self._fd = make_with_fd(lambda: CompChannel(context))
        try:
            with verb("ibv_create_cq", f"no completion queue of {cqe} entries"):
                self.cq = CQ(context, cqe, None, self._channel, 0)
        except BaseException:
            self._channel.close()
            raise
        self._unacknowledged = 0
        #: Polled on behalf of others while a queue pair was destroyed.
        self._kept: list[Completion] = []
        self._closed = False
        self._arming = False
        #: The channel has an event that wasn't taken yet.
        self._event = False
        self._solicited_only = False
        self._poll: Callable[[int], list[Completion]] = self._poll_slowly
        watch_readable(loop, self._fd, self._first_readable)

    def arm(self, *, solicited_only: bool = False) -> None:
        """Ask for one event at the next completion (ibv_req_notify_cq), in the loop's next turn.

        What waited for a completion mostly posts the next request as soon as it is resumed: the device works on that
        while this takes the last event, asks for the next one, and then polls, in this order, so that nothing is
        missed. Often the completion is there by then, and needs no event. (On rxe: ratio to raw pyverbs 1.6 to 1.8,
        where it was 1.8 to 2.1.)
        """
        self._solicited_only = solicited_only
        if not self._arming:
            self._arming = True
            self._loop.call_soon(self._arm_now)

    def _arm_now(self) -> None:
        self._arming = False
        if self._closed:
            return
        if self._event:
            self._event = False
            self._take_event()
        self.cq.req_notify(self._solicited_only)
        self._kept += self._poll(ROOM)
        if self._kept:
            self._on_ready()

    def _first_readable(self) -> None:
        """Take the first event by hand: it carries the queue's address, which pyverbs doesn't tell."""
        try:
            event = os.read(self._fd, _EVENT_SIZE)
        except BlockingIOError:
            return  # woken for nothing
        queue = queue_of(event)
        acknowledge(queue, 1)
        self._poll = DirectPoll(queue).poll
        watch_readable(self._loop, self._fd, self._readable)
        self._on_ready()

    def _readable(self) -> None:
        if not self._event:  # else asyncio looked at the descriptor before it ran what was scheduled
            self._event = True
            self._on_ready()
            if self._event and not self._arming and not self._closed:  # who polls on its own account asks for none
                self._event = False
                self._take_event()

    def _take_event(self) -> None:
        """Take one event: one arm yields one, and looking for another costs an exception."""
        try:
            self._channel.get_cq_event(self.cq)
        except PyverbsError:
            return  # woken for nothing
        self._unacknowledged += 1
        if self._unacknowledged == _ACK_BATCH:
            self.cq.ack_events(_ACK_BATCH)
            self._unacknowledged = 0

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions (ibv_poll_cq); none once it is closed."""
        if self._closed:  # there is no queue any more to read from
            return []
        if self._kept:
            taken, self._kept = self._kept[:limit], self._kept[limit:]
            return taken + self._poll(limit - len(taken)) if len(taken) < limit else taken
        return self._poll(limit)

    def _poll_slowly(self, limit: int) -> list[Completion]:
        """Take completions by pyverbs, until the first event."""
        return [
            (
                wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qp_num,
                socket.ntohl(wc.imm_data) if (flags := wc.wc_flags) & _WITH_IMM else wc.imm_data,
                flags, wc.vendor_err,
            )
            for wc in self.cq.poll(limit)[1]
        ]  # fmt: skip

    def purge(self, qp_num: int) -> None:
        """Drop the completions of a destroyed queue pair: siw gives its number to the next one made."""
        polled = self._kept
        while taken := self._poll(ROOM):
            polled += taken
        self._kept = [completion for completion in polled if completion[4] != qp_num]
        if self._kept and not self._loop.is_closed():
            self._loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        if self._kept and not self._closed:
            self._on_ready()

    def close(self) -> None:
        """Destroy (ibv_destroy_cq), which waits for every event to be acknowledged: pyverbs does that. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._kept.clear()
        self._poll = lambda _: []  # what is left of a turn must not reach a queue that isn't there
        unwatch(self._loop, self._fd)
        with verb("ibv_destroy_cq", "the completion queue can't be destroyed"):
            self.cq.close()
        with contextlib.suppress(PyverbsError):
            self._channel.close()
