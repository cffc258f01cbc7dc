"""Requests and their replies over a message channel, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeAlias, TypeVar

from aiordma.errors import BrokenError, ClosedError, ProtocolError, RDMAError, RemoteCallError, UnsupportedError
from aiordma.messages.outgoing import Data, Sending
from aiordma.messages.protocol import Arrived, Kind, MessageParam, Offer
from aiordma.messages.rendezvous import settled

__all__ = ["CallHandler", "Calls"]

_T = TypeVar("_T")

_logger = logging.getLogger("aiordma")

#: What handles calls: a coroutine function that takes the request and gives the reply.
CallHandler: TypeAlias = Callable[[bytes], Awaitable[Data]]


class Transport(Protocol):
    """What calls need of their channel."""

    #: Bytes of the largest small record of a call.
    max_small: int

    def submit(self, kind: Kind, ident: int, data: Data) -> Sending:
        """Send a record."""

    def fetch(self, offer: Offer) -> asyncio.Task[bytes]:
        """Begin to READ a large request or reply, and give its memory back."""

    def give_back(self, offer: Offer) -> None:
        """Give a large reply's memory back unread."""

    def violated(self, error: ProtocolError) -> None:
        """The peer broke the rules."""


class Calls:
    """The calls of one channel, of both sides.

    The caller keeps to the number of calls that the peer handles at once; one that it cancelled counts until the peer
    has answered that too.
    """

    def __init__(self, channel: Transport, own: MessageParam, peer: MessageParam, handler: CallHandler | None) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._serves = peer.max_calls > 0
        #: Calls that the peer has room for, and who waits for that.
        self._room = peer.max_calls
        self._queue: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._ended: RDMAError | None = None
        self._handler = handler
        self._max_calls = own.max_calls
        self._handling: dict[int, asyncio.Task[Data]] = {}
        #: Of handlers, and of what fetches large replies.
        self.tasks: set[asyncio.Task[Any]] = set()

    # -- calling ------------------------------------------------------------------------------------------------------

    async def call(self, data: Data) -> bytes:
        """Send a request, and wait for its reply."""
        if not self._serves:
            raise UnsupportedError("the peer handles no calls: serve_calls() does")
        await self._enter()
        ident = next(self._numbers) & 0xFFFFFFFF
        reply: asyncio.Future[bytes] = self._loop.create_future()
        try:
            request = self._channel.submit(Kind.REQUEST, ident, data)
        except BaseException:
            self._leave()
            raise
        self._replies[ident] = reply
        try:
            if not request.future.done():
                await request.future
            return await reply
        except BaseException as error:
            self._give_up(ident, request, cancelled=isinstance(error, asyncio.CancelledError))
            raise

    async def _enter(self) -> None:
        """Wait until the peer has room for another call, in order."""
        if self._room and not self._queue:
            self._room -= 1
            return
        waiter = self._loop.create_future()
        self._queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._leave()
            elif waiter in self._queue:
                self._queue.remove(waiter)
            raise

    def _leave(self) -> None:
        """The peer has room for another call."""
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._room += 1

    def _give_up(self, ident: int, request: Sending, *, cancelled: bool) -> None:
        """Nobody waits for the reply any more."""
        if ident not in self._replies:
            return  # it was answered, by a failure
        if request.taken and cancelled:
            with contextlib.suppress(BrokenError, ClosedError):  # the channel's end cancels it too
                self._channel.submit(Kind.CANCEL, ident, b"")
            self._replies[ident].cancel()
            return  # the peer answers the cancellation: then it has room for another call
        del self._replies[ident]
        self._leave()

    def _replied(self, kind: Kind, ident: int, content: Arrived) -> None:
        reply = self._replies.pop(ident, None)
        if reply is None:
            self._channel.violated(ProtocolError(f"the peer answers a call that it wasn't sent ({ident})"))
            return
        self._leave()
        if isinstance(content, Offer):
            if reply.done():
                self._channel.give_back(content)
            else:
                self._spawn(self._fetch_reply(content, reply))
        elif reply.done():
            pass  # it was cancelled
        elif kind == Kind.REPLY:
            reply.set_result(content)
        else:
            name, _, text = content.decode(errors="replace").partition("\0")
            reply.set_exception(RemoteCallError(name, text))

    async def _fetch_reply(self, offer: Offer, reply: asyncio.Future[bytes]) -> None:
        try:
            content = await settled(self._channel.fetch(offer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            if not reply.done():
                reply.set_exception(error)
        else:
            if not reply.done():
                reply.set_result(content)

    # -- handling -----------------------------------------------------------------------------------------------------

    def _requested(self, ident: int, content: Arrived) -> None:
        if self._handler is None or len(self._handling) >= self._max_calls:
            self._channel.violated(ProtocolError(f"the peer makes more than {self._max_calls} calls at once"))
        elif ident in self._handling:
            self._channel.violated(ProtocolError(f"the peer makes call {ident} twice"))
        else:
            # Not in the handler's task, which may be cancelled before it begins: the memory is to be given back.
            request = self._channel.fetch(content) if isinstance(content, Offer) else content
            task = self._handling[ident] = self._spawn(self._handle(self._handler, request))
            task.add_done_callback(functools.partial(self._handled, ident))

    @staticmethod
    async def _handle(handler: CallHandler, request: bytes | asyncio.Task[bytes]) -> Data:
        return await handler(request if isinstance(request, bytes) else await settled(request))

    def _handled(self, ident: int, task: asyncio.Task[Data]) -> None:
        """A handler is done: send its reply. Not in its task, which may be cancelled before it begins."""
        del self._handling[ident]
        error = asyncio.CancelledError("the call was cancelled") if task.cancelled() else task.exception()
        if self._ended is not None:
            return
        with contextlib.suppress(BrokenError, ClosedError):  # nobody is there to get it
            if error is None:
                try:
                    self._channel.submit(Kind.REPLY, ident, task.result())
                except (TypeError, ValueError) as unsendable:  # what it gave is no message, or too long
                    error = unsendable
            if error is not None:
                _logger.debug("the handler of a call failed", exc_info=error)
                failure = f"{type(error).__name__}\0{error}".encode(errors="replace")[: self._channel.max_small - 4]
                self._channel.submit(Kind.FAILURE, ident, failure)

    # -- both ---------------------------------------------------------------------------------------------------------

    def take(self, records: list[tuple[Kind, int, Arrived]]) -> None:
        """Take what came; called by the loop, since it starts tasks."""
        for kind, ident, content in records:
            if self._ended is not None:
                return
            if kind == Kind.REQUEST:
                self._requested(ident, content)
            elif kind == Kind.CANCEL:
                task = self._handling.get(ident)
                if task is not None:  # else the reply is on its way
                    task.cancel()
            else:
                self._replied(kind, ident, content)

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def end(self, error: RDMAError) -> None:
        """The channel has ended: nobody gets a reply any more, and handlers are cancelled."""
        if self._ended is None:
            self._ended = error
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(another(error))
                    reply.exception()
            for task in self._handling.values():
                task.cancel()
            for waiter in self._queue:
                if not waiter.done():
                    waiter.set_exception(another(error))


def another(error: RDMAError) -> RDMAError:
    """Make an exception once more: each that waits gets its own."""
    if isinstance(error, BrokenError):
        again: RDMAError = BrokenError(*error.args, orderly=error.orderly)
    else:
        again = ClosedError(*error.args)
    again.__cause__ = error.__cause__
    return again
