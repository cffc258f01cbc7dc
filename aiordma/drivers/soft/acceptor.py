"""A listening socket of the soft device, that accepts no more connections than may wait for an answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextvars import Context
from typing import Final

from aiordma.drivers.watch import unwatch, watch_readable
from aiordma.types import SocketAddress

_ACCEPTS_PER_WAKEUP: Final = 64
#: Seconds without accepting after it failed for want of descriptors or memory: asyncio's own.
_RETRY_AFTER: Final = 1.0


class Acceptor:
    """Accepts TCP connections while fewer than `backlog` of them wait; more stay in the kernel.

    A connection waits from then on until `left()` is called for it: once, when its request is answered or it is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        backlog: int,
        take: Callable[[socket.socket, SocketAddress], None],
    ) -> None:
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._backlog = max(1, backlog)
        self._take = take
        self._waiting = 0
        self._watching = False
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    def left(self) -> None:
        """One waits no more."""
        self._waiting -= 1
        self._watch()

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sock, self._sock = self._sock, None
        if sock is not None:
            unwatch(self._loop, sock)
            sock.close()

    def _watch(self) -> None:
        if self._sock is None or self._watching or self._timer is not None or self._loop.is_closed():
            return
        self._watching = True
        watch_readable(self._loop, self._sock, self._acceptable)

    def _unwatch(self, sock: socket.socket) -> None:
        self._watching = False
        unwatch(self._loop, sock)

    def _acceptable(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKEUP):
            listening = self._sock
            if listening is None:
                return
            if self._waiting >= self._backlog:
                self._unwatch(listening)
                return
            try:
                sock, addr = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._failed(listening, error)
                return
            sock.setblocking(False)
            self._waiting += 1
            self._take(sock, addr)

    def _failed(self, listening: socket.socket, error: OSError) -> None:
        """Out of descriptors or memory: leave the queue alone for a second, as asyncio does, and say so."""
        self._unwatch(listening)
        self._timer = self._loop.call_later(_RETRY_AFTER, self._retry, context=Context())
        where = listening.getsockname()
        self._loop.call_exception_handler(
            {
                "message": f"the listener at {where} can't accept; it tries again in {_RETRY_AFTER:g} s",
                "exception": error,
            }
        )

    def _retry(self) -> None:
        self._timer = None
        self._watch()
