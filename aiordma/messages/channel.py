"""MessageChannel: whole messages of any size over a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from aiordma.connection import Connection
from aiordma.enums import Access, Opcode
from aiordma.errors import BrokenError, BusyError, ClosedError, ProtocolError, RDMAError
from aiordma.local_memory import LOCAL, Memory
from aiordma.memory import exported
from aiordma.messages.calls import CallHandler, Calls, another
from aiordma.messages.outgoing import Data, Sending
from aiordma.messages.protocol import Kind, MessageParam, Offer, Protocol
from aiordma.messages.rendezvous import Rendezvous, settled
from aiordma.types import Buffer

__all__ = ["MessageChannel"]

_SEND: Final = Opcode.SEND
#: Frames that leave as soon as they are full, in one turn of the loop; then senders wait for the next turn.
_FRAMES_A_TURN: Final = 4
#: Messages that are received without a trip through the loop before it gets its turn.
_RECEIVES_A_TURN: Final = 256
#: Bytes of large messages that are READ before `recv()` asks for them; a first one is READ whatever its size.
_AHEAD: Final = 8 << 20


class MessageChannel:
    """Whole messages of any size, in order and under flow control, to and from one peer.

    Small messages are copied into frames; those that wait together leave together. A message that doesn't fit a frame
    stays where it is, and the peer READs it from there. A peer that doesn't receive makes `send` wait.

    Made by `connect_messages()` and `serve_messages()`, not directly.

    Attributes:
        connection: what it runs over; its `recv` methods are the channel's now.
        max_small: bytes of the largest message that is copied.
        max_message: bytes of the largest message that the peer takes.
    """

    def __init__(
        self,
        connection: Connection,
        own: MessageParam,
        peer: MessageParam,
        *,
        accepted: bool,
        handler: CallHandler | None = None,
    ) -> None:
        self.connection = connection
        self.max_message = peer.max_message
        self._loop = asyncio.get_running_loop()
        self._protocol = Protocol(own, peer)
        self.max_small = self._protocol.max_small
        self._inbound = self._protocol.inbound
        self._max_inline = connection.capabilities.max_inline_data
        #: What `send` gives where it has nothing to wait for.
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._done.set_result(None)
        #: Registered memory of frames that are not in flight.
        self._frames: list[Memory] = []
        #: `_end_of_turn` is on its way.
        self._scheduled = False
        self._frames_left = _FRAMES_A_TURN
        self._receives_left = _RECEIVES_A_TURN
        self._receiving = False
        self._waiter: asyncio.Future[None] | None = None
        #: Large messages that are READ, or were, for a `recv()` to come.
        self._fetches: dict[Offer, asyncio.Task[bytes]] = {}
        self._ahead = False
        self._rendezvous = Rendezvous(connection)
        #: Why nothing can be sent any more.
        self._refusal: RDMAError | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._drainers: list[asyncio.Future[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._calls = Calls(self, own, peer, handler)
        connection.divert(self._take)
        if connection.capabilities.transport == "iwarp":
            if accepted:
                self._protocol.be_silent()
            else:
                self._post(self._protocol.greet())

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, data: Data) -> asyncio.Future[None]:
        """Send a message, now or in order when there is room. Awaiting it is backpressure.

        Success proves of a small message (`max_small`) that it was copied, and will be sent; of a large one that the
        peer has READ it. Not that the peer's program saw it.

        Ownership: the data is borrowed until the future is done. Registered memory that has REMOTE_READ is lent as it
        is, other memory is registered for this message.
        Cancellation: a message that still waits for room is withdrawn. One that doesn't is sent all the same; a large
        one's memory is lent until the peer has READ it, so don't change it before `drain()` returns.

        Args:
            data: any contiguous buffer, registered memory, or a list of these, sent as one message.

        Raises:
            ValueError: it is longer than the peer takes (`max_message`).
            ClosedError, BrokenError: the channel ended.
        """
        if type(data) is bytes and self._refusal is None and self._protocol.put(data):
            if not self._scheduled:
                self._schedule()
            return self._done
        return self.submit(Kind.MESSAGE, 0, data).future

    def submit(self, kind: Kind, ident: int, data: Data) -> Sending:
        """Send a message or a record of a call; see `send`."""
        if self._refusal is not None:
            raise another(self._refusal)
        max_small = self.max_small if kind == Kind.MESSAGE else self.max_small - 4
        message = Sending(self.connection.pd, kind, ident, data, max_small, self._loop.create_future())
        if message.length > self.max_message:
            raise ValueError(f"a message of {message.length} bytes: the peer takes {self.max_message} at most")
        self._protocol.submit(message)
        if not message.taken and self._frames_left:
            self._frames_left -= 1
            self._flush()
        if not self._scheduled:
            self._schedule()
        return message

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self._scheduled = False
        self._frames_left = _FRAMES_A_TURN
        if not self._gone.done():
            self._flush()
            if self._ahead:
                self._read_ahead()

    def _flush(self) -> None:
        """Post the frames that there are credits for."""
        protocol = self._protocol
        while (frame := protocol.next_frame()) is not None:
            self._post(frame)
        if self._drainers and protocol.finished:
            self._wake_drainers()

    def _post(self, frame: bytes) -> None:
        qp = self.connection.qp
        try:
            if len(frame) <= self._max_inline:
                future = qp.post_send(_SEND, (), 0, 0, frame)
            else:
                memory = self._frames.pop() if self._frames else self.connection.alloc(self._protocol.frame_size)
                memory.view[: len(frame)] = frame
                future = qp.post_send(_SEND, (memory[: len(frame)],))
                future.add_done_callback(lambda _: self._frames.append(memory))
        except (BrokenError, ClosedError):
            return  # the connection tells of its end by itself
        if future.done():
            self._posted(future)
        else:
            future.add_done_callback(self._posted)

    def _posted(self, future: asyncio.Future[None]) -> None:
        error = future.exception()
        if error is not None and self._refusal is None:
            self._break(f"a frame couldn't be sent: {error}", error)

    async def drain(self) -> None:
        """Wait until all that was sent has left: small messages are posted, large ones READ by the peer.

        Raises:
            ClosedError, BrokenError: the channel ended before.
        """
        if self._scheduled:
            self._flush()
        if not self._protocol.finished and not self._gone.done():
            waiter = self._loop.create_future()
            self._drainers.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._drainers:
                    self._drainers.remove(waiter)
        if self._gone.done():
            raise another(self._why())

    def _wake_drainers(self) -> None:
        drainers, self._drainers = self._drainers, []
        for waiter in drainers:
            if not waiter.done():
                waiter.set_result(None)

    # -- receiving ----------------------------------------------------------------------------------------------------

    async def recv(self) -> bytes:
        """Receive the next message. A large one is READ into the very bytes that are returned.

        While a program receives in this way large messages are also READ ahead, up to 8 MiB.

        Cancellation: safe, no message is lost.

        Raises:
            BrokenError: the channel ended, and everything that came before was received; or a large message couldn't
                be READ from the peer's memory.
            ClosedError: you closed it, and everything that came before was received.
            BusyError: another task is receiving.
        """
        if self._inbound and self._receives_left and not self._receiving:
            first = self._inbound[0]
            if isinstance(first, bytes):
                self._receives_left -= 1
                self._inbound.popleft()
                if self._protocol.consume() and not self._scheduled:
                    self._schedule()
                return first
        with self._alone():
            self._ahead = True
            await self._arrived()
            first = self._inbound[0]
            data = await self._fetched(first) if isinstance(first, Offer) else first
            self._taken()
            return data

    async def recv_into(self, buffer: Memory | Buffer) -> int:
        """Receive the next message into a buffer, and give its length. A large one is READ straight into it.

        Registered memory is used as it is; other memory is registered for each large message.

        Cancellation: no message is lost: a large one is READ again by the next call. What was begun may write to the
        buffer until then; registered memory's `idle()` says when that is over.

        Raises:
            ValueError: the message is longer than the buffer; it stays, and can be received again. Or the buffer is
                read-only.
            BrokenError, ClosedError, BusyError: as for `recv`.
        """
        target = exported(buffer.view if isinstance(buffer, LOCAL) else buffer, Access.LOCAL_WRITE)
        with self._alone():
            self._ahead = False
            await self._arrived()
            first = self._inbound[0]
            length = first.length if isinstance(first, Offer) else len(first)
            if length > len(target):
                raise ValueError(f"the message has {length} bytes, the buffer {len(target)}")
            if isinstance(first, bytes):
                target[:length] = first
            elif first in self._fetches:
                target[:length] = await self._fetched(first)
            else:
                await settled(self._rendezvous.fetch_into(first, buffer, target[:length]))
                self._protocol.offers.popleft()
                self._protocol.give_back(first)
            self._taken()
            return length

    def __aiter__(self) -> Self:
        """Iterate over messages, until the peer closes."""
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except BrokenError as error:
            if error.orderly:
                raise StopAsyncIteration from None
            raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._receiving:
            raise BusyError("another task is receiving from this channel")
        self._receiving = True
        try:
            yield
        finally:
            self._receiving = False

    async def _arrived(self) -> None:
        """Wait until a message is there."""
        if self._inbound and not self._receives_left:
            # Receiving what is there doesn't suspend: other tasks must have their turn.
            await asyncio.sleep(0)
            self._receives_left = _RECEIVES_A_TURN
        while not self._inbound:
            if self._gone.done():
                raise another(self._why())
            if self._scheduled:
                self._flush()  # not at the end of the turn: this task has nothing more to say
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _taken(self) -> None:
        """Take the first message off: it was received."""
        first = self._inbound.popleft()
        if isinstance(first, Offer):
            self._fetches.pop(first, None)
        self._protocol.consume()
        if self._ahead and self._protocol.offers:
            self._read_ahead()
        if not self._scheduled and self._protocol.due:
            self._schedule()

    # -- large messages -----------------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Begin to READ the messages that a program which receives by `recv()` will ask for next."""
        offers = self._protocol.offers
        begun = sum([offer.length for offer in self._fetches])
        while offers and (not self._fetches or begun + offers[0].length <= _AHEAD) and not self._gone.done():
            begun += offers[0].length
            self._begin(offers.popleft())

    def _begin(self, offer: Offer) -> asyncio.Task[bytes]:
        def done(task: asyncio.Task[bytes]) -> None:
            if not task.cancelled() and task.exception() is None:
                self.give_back(offer)

        task = self._fetches[offer] = self._rendezvous.fetch(offer)
        task.add_done_callback(done)
        return task

    async def _fetched(self, offer: Offer) -> bytes:
        """Wait until the first message, a large one, is READ."""
        task = self._fetches.get(offer)
        if task is None:
            task = self._begin(self._protocol.offers.popleft())
        try:
            return await settled(task)
        except Exception:
            del self._fetches[offer]
            self._protocol.offers.appendleft(offer)  # it stays: perhaps there is memory for it the next time
            raise

    def fetch(self, offer: Offer) -> asyncio.Task[bytes]:
        """Begin to READ a large message of a call; its memory is given back when that is over, whoever waits for it."""
        task = self._rendezvous.fetch(offer)
        task.add_done_callback(lambda _: self.give_back(offer))
        return task

    def give_back(self, offer: Offer) -> None:
        """Tell the peer that a large message's memory isn't needed any more."""
        self._protocol.give_back(offer)
        if not self._scheduled:
            self._schedule()

    # -- calls --------------------------------------------------------------------------------------------------------

    async def call(self, data: Data) -> bytes:
        """Send a request to a peer that handles calls (`serve_calls`), and wait for its reply.

        Many calls may be in flight; more than the peer handles at once wait in order. Requests and replies are messages
        of any size. For a time limit, use `asyncio.timeout`.

        Cancellation: reaches the peer, whose handler is cancelled; it may have done its work before.

        Raises:
            RemoteCallError: the peer's handler raised an exception.
            UnsupportedError: the peer handles no calls.
            ValueError, ClosedError, BrokenError: as for `send`. Whether the call was handled isn't known then.
        """
        return await self._calls.call(data)

    # -- what the connection reports ----------------------------------------------------------------------------------

    def _take(self, view: memoryview | None) -> None:
        """Take a frame, or learn of the connection's end. Called while completions are handed out: it posts nothing."""
        if self._gone.done():
            return
        if view is None:
            self._end()
            return
        protocol = self._protocol
        try:
            protocol.receive(bytes(view))
        except ProtocolError as error:
            self.violated(error)
            return
        self._receives_left = _RECEIVES_A_TURN
        if protocol.calls:
            calls, protocol.calls = protocol.calls, []
            self._loop.call_soon(self._calls.take, calls)
        self._wake()
        if not self._scheduled and (protocol.due or self._drainers or (self._ahead and protocol.offers)):
            self._schedule()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def violated(self, error: ProtocolError) -> None:
        """The peer broke the rules: end the connection."""
        self._break(f"it broke the rules of messages: {error}", error)

    def _break(self, why: str, cause: BaseException) -> None:
        if not self._gone.done():
            failure = BrokenError(f"the channel to {self.connection.peer_addr} ended: {why}")
            failure.__cause__ = cause
            if self._refusal is None:
                self._refusal = failure
            self._end()
            self._loop.call_soon(self.connection.abort)

    def _end(self) -> None:
        """Nothing more comes, and nothing more leaves."""
        if self._gone.done():
            return
        if self._refusal is None:
            self._refusal = self.connection.qp.unusable()
        self._gone.set_result(None)
        for message in self._protocol.abandon():
            message.fail(another(self._refusal))
        # Behind the records of calls that came before.
        self._loop.call_soon(self._calls.end, self._refusal)
        self._wake()
        self._wake_drainers()

    def _why(self) -> RDMAError:
        assert self._refusal is not None
        return self._refusal

    # -- the end ------------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Whether it is closed, being closed, or ended from outside."""
        return self._refusal is not None

    async def wait_closed(self) -> None:
        """Wait until it has ended, by whichever side. Cancellation: drops the waiter."""
        await asyncio.shield(self._gone)

    async def close(self, *, timeout: float = 5.0) -> None:
        """Close: what was sent leaves within `timeout` seconds, large messages are READ; then the connection closes.

        What didn't leave in time ends with ClosedError at its sender. Calls in flight end, their handlers here are
        cancelled. Messages that came can still be received, except large ones that weren't READ. Idempotent.

        Cancellation: drops the waiter; the closing itself goes on.

        Raises:
            BrokenError: the connection had failed, and nobody was told yet.
        """
        if self._closing is None:
            self._refusal = self._refusal or ClosedError(f"{self!r} was closed")
            self._closing = self._loop.create_task(self._close(timeout))
        await asyncio.shield(self._closing)

    async def _close(self, timeout: float) -> None:
        deadline = self._loop.time() + timeout
        self._calls.end(self._why())
        try:
            with contextlib.suppress(TimeoutError, ClosedError, BrokenError):
                async with asyncio.timeout_at(deadline):
                    await self.drain()
        finally:
            self._end()
            try:
                await self.connection.close(timeout=max(0.0, deadline - self._loop.time()))
            finally:
                if left := self._rendezvous.tasks | self._calls.tasks:
                    await asyncio.wait(left)

    def abort(self) -> None:
        """End at once: what wasn't received is lost, the peer sees the connection break. Idempotent."""
        self._refusal = self._refusal or ClosedError(f"{self!r} was aborted")
        self._end()
        self.connection.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except BrokenError:
            if exc is None:
                raise

    def __repr__(self) -> str:
        state = " closed" if self._refusal is not None else ""
        return f"<MessageChannel to {self.connection.peer_addr} on {self.connection.device}{state}>"
