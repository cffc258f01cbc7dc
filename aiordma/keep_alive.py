"""Keep-alive: an idle connection learns within its interval that the peer's host is gone."""

from __future__ import annotations

import asyncio
from contextvars import Context

from aiordma.queue_pair import QueuePair

__all__ = ["KeepAlive"]


class KeepAlive:
    """Probes a queue pair in each interval, until it takes no requests any more."""

    def __init__(self, qp: QueuePair, interval: float) -> None:
        self._qp = qp
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._timer = self._next()

    def _next(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._interval, self._probe, context=Context())

    def _probe(self) -> None:
        if self._qp.refusal is None:
            self._qp.probe()
            self._timer = self._next()

    def cancel(self) -> None:
        """Probe no more."""
        self._timer.cancel()
