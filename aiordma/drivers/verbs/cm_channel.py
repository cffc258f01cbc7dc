"""The event channel of rdma_cm, the identifiers that live on it, and the threads of their slow calls.

Whatever may wait in the kernel runs in a thread of its own, and an identifier that is destroyed meanwhile is destroyed
there, once the call returned. The event channel is open as long as there are identifiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Final

from aiordma.drivers.base import CMEvent
from aiordma.drivers.verbs.cm import VerbsCMID
from aiordma.drivers.verbs.rdmacm import Library, RawEvent, library
from aiordma.drivers.watch import unwatch, watch_readable
from aiordma.enums import CMEventType
from aiordma.errors import DeviceError

__all__ = ["VerbsCMChannel"]

#: Events taken in one turn of the loop.
_BUDGET: Final = 16


class VerbsCMChannel:
    """The event channel of one loop (rdma_event_channel); open while there are identifiers."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_event: Callable[[CMEvent], None],
        lib: Library | None = None,
    ) -> None:
        self.loop = loop
        self.on_event = on_event
        self.library = lib or library()
        #: Those that live, by their address.
        self._ids: dict[int, VerbsCMID] = {}
        self._closed = False
        self._watching = False
        #: Guards all below, and `VerbsCMID.in_call`: threads of slow calls end by destroying what they called for.
        self._lock = threading.Lock()
        self._channel = 0
        self._fd = -1
        #: Structs rdma_cm_id that exist, of destroyed identifiers too.
        self._users = 0

    # -- identifiers ------------------------------------------------------------------------------------------------

    def create_id(self) -> VerbsCMID:
        """Create an identifier (rdma_create_id).

        Raises:
            DeviceError: no RDMA device is here, or rdma_cm can't be used; the hint says why.
        """
        if self._closed:
            raise DeviceError(errno.EBADF, "the event channel is closed", verb="rdma_create_id")
        with self._lock:
            if not self._channel:
                self._channel, self._fd = self.library.create_event_channel()
            self._users += 1
        try:
            handle = self.library.create_id(self._channel)
        except BaseException:
            self._release()
            raise
        return self._adopt(handle)

    def _adopt(self, handle: int) -> VerbsCMID:
        cm_id = self._ids[handle] = VerbsCMID(self, handle)
        if not self._watching:
            self._watching = True
            watch_readable(self.loop, self._fd, self._readable)
        return cm_id

    def destroy(self, cm_id: VerbsCMID, handle: int, *, slow: bool) -> None:
        """Destroy an identifier: now, or in a thread if a call with it is under way or destroying it may wait."""
        self._ids.pop(handle, None)
        if not self._ids and self._watching:
            self._watching = False
            unwatch(self.loop, self._fd)
        with self._lock:
            cm_id.destroyed = True
            if cm_id.in_call:
                return
        if slow:
            self._start_thread("rdma_destroy_id", partial(self._reap_in_thread, cm_id, handle))
        else:
            self._reap(handle)
            cm_id.released()

    def _reap_in_thread(self, cm_id: VerbsCMID, handle: int) -> None:
        """Destroy the struct, and then what the kernel held with it in the loop, which closed devices do themselves."""
        self._reap(handle)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(cm_id.released, context=Context())

    def _reap(self, handle: int) -> None:
        """In any thread: destroy the struct."""
        with contextlib.suppress(DeviceError):
            self.library.destroy_id(handle)
        self._release()

    def _release(self) -> None:
        """In any thread: one struct less; without any, close the channel."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            channel, self._channel, self._fd = self._channel, 0, -1
            self.library.destroy_event_channel(channel)

    def close(self) -> None:
        """Destroy what is left. Idempotent."""
        self._closed = True
        for cm_id in list(self._ids.values()):
            cm_id.destroy()

    def __del__(self) -> None:
        if getattr(self, "_ids", None):
            self.close()

    # -- slow calls -------------------------------------------------------------------------------------------------

    def call_in_thread(
        self, cm_id: VerbsCMID, handle: int, call: Callable[[], None], done: Callable[[DeviceError | None], None]
    ) -> None:
        """Make a call that may wait for long, and pass its outcome to `done` in the loop, unless destroyed by then."""
        cm_id.in_call = True
        try:
            self._start_thread("rdma_cm call", partial(self._run, cm_id, handle, call, done))
        except BaseException:
            cm_id.in_call = False
            raise

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        # A daemon: a peer that is not there must not keep the interpreter from its exit.
        threading.Thread(target=target, name=f"aiordma {name}", daemon=True).start()

    def _run(
        self, cm_id: VerbsCMID, handle: int, call: Callable[[], None], done: Callable[[DeviceError | None], None]
    ) -> None:
        failure: DeviceError | None = None
        try:
            call()
        except DeviceError as error:
            failure = error

        def report() -> None:
            if not cm_id.destroyed:
                done(failure)

        with self._lock:
            cm_id.in_call = False
            destroyed = cm_id.destroyed
        if destroyed:
            self._reap_in_thread(cm_id, handle)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(report, context=Context())

    # -- events -----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(_BUDGET):
            if not self._ids:  # an event's receiver destroyed the last one
                return
            raw = self.library.get_event(self._channel)
            if raw is None:
                return
            self._dispatch(raw)

    def _dispatch(self, raw: RawEvent) -> None:
        try:
            kind = CMEventType(raw.event)
        except ValueError:  # of a newer librdmacm
            return
        if kind != CMEventType.CONNECT_REQUEST:
            cm_id = self._ids.get(raw.id)
            if cm_id is not None:
                cm_id.on_raw(raw, kind, None)
            return
        with self._lock:
            self._users += 1
        listener = self._ids.get(raw.listen_id)
        if listener is None:
            self._reap(raw.id)
            return
        self._adopt(raw.id).on_raw(raw, kind, listener)
