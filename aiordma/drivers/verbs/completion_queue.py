"""Completion queues, each with a completion channel of its own, whose descriptor the loop watches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from aiordma.drivers.base import Completion
from aiordma.drivers.verbs.api import CQ, CompChannel, Context, PyverbsError, make_with_fd, verb
from aiordma.drivers.watch import unwatch, watch_readable
from aiordma.enums import WCFlags

__all__ = ["VerbsCQ"]

#: Events acknowledged together: it takes a mutex, and nobody waits for it but ibv_destroy_cq.
_ACK_BATCH: Final = 64
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
        watch_readable(loop, self._fd, self._readable)

    def arm(self, *, solicited_only: bool = False) -> None:
        """Ask for one event at the next completion (ibv_req_notify_cq)."""
        if not self._closed:
            self.cq.req_notify(solicited_only)

    def _readable(self) -> None:
        """Take one event: one arm yields one, and looking for another costs an exception."""
        try:
            self._channel.get_cq_event(self.cq)
        except PyverbsError:
            return  # woken for nothing
        self._unacknowledged += 1
        if self._unacknowledged == _ACK_BATCH:
            self.cq.ack_events(_ACK_BATCH)
            self._unacknowledged = 0
        self._on_ready()

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions (ibv_poll_cq); none once it is closed."""
        if self._kept or self._closed:
            return self._take_kept(limit)
        return [
            (
                wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qp_num,
                socket.ntohl(wc.imm_data) if (flags := wc.wc_flags) & _WITH_IMM else wc.imm_data,
                flags, wc.vendor_err,
            )
            for wc in self.cq.poll(limit)[1]
        ]  # fmt: skip

    def _take_kept(self, limit: int) -> list[Completion]:
        if self._closed:  # pyverbs would read through a null pointer
            return []
        taken, self._kept = self._kept[:limit], self._kept[limit:]
        return taken + self.poll(limit - len(taken)) if len(taken) < limit else taken

    def purge(self, qp_num: int) -> None:
        """Drop the completions of a destroyed queue pair: siw gives its number to the next one made."""
        polled = self.poll(1 << 16)
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
        unwatch(self._loop, self._fd)
        with verb("ibv_destroy_cq", "the completion queue can't be destroyed"):
            self.cq.close()
        with contextlib.suppress(PyverbsError):
            self._channel.close()
