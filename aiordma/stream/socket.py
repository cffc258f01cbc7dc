"""An rsocket: the stream protocol on a connection, as a socket that neither blocks nor waits."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Final

from attrs import evolve, field, frozen

from aiordma.connection import Connection
from aiordma.drivers.base import Completion
from aiordma.enums import Access, Opcode, SendFlags, WCFlags
from aiordma.errors import BrokenError, ProtocolError
from aiordma.inbox import ReceiveSlot
from aiordma.memory import MemoryRegion, MemorySlice
from aiordma.slots import RecvSlot, RunSlot, SendSlot
from aiordma.stream.protocol import Layout, Post, StreamProtocol
from aiordma.stream.wire import MAX_QUEUE, ByteOrder, Hello, Mapping
from aiordma.types import SGE, Buffer, ConnParam, RemoteRegion

__all__ = ["RSocket", "StreamParam"]

_SIGNALED: Final = int(SendFlags.SIGNALED)
_WITH_IMM: Final = int(WCFlags.WITH_IMM)
_WRITE: Final = Opcode.RDMA_WRITE
_WRITE_WITH_IMM: Final = Opcode.RDMA_WRITE_WITH_IMM
_SEND: Final = Opcode.SEND
#: A message on iWARP is a SEND of so many bytes.
_MESSAGE_SIZE: Final = 4
#: Receives beyond the queue's size: control messages take no credit, but a receive.
_MORE_RECEIVES: Final = 8
#: rdma-core's smallest queue.
_MIN_QUEUE: Final = 16


def _queue_size(_: object, __: object, size: int) -> None:
    if not _MIN_QUEUE <= size <= MAX_QUEUE:
        raise ValueError(f"a queue of a stream has {_MIN_QUEUE} to {MAX_QUEUE} places, not {size}")


def _buffer_size(_: object, __: object, size: int) -> None:
    if not 2 <= size < 1 << 29:
        raise ValueError(f"a buffer of a stream has 2 to {(1 << 29) - 1} bytes, not {size}")


@frozen(kw_only=True)
class StreamParam:
    """Sizes of a stream's buffers and queues. The defaults are rdma-core's."""

    #: Bytes that the peer may send ahead of the reader (SO_RCVBUF): registered, two halves that are used in turn.
    recv_buffer: int = field(default=131072, validator=_buffer_size)
    #: Bytes on their way to the peer (SO_SNDBUF).
    send_buffer: int = field(default=131072, validator=_buffer_size)
    #: Messages that the peer may send ahead of the reader (RDMA_RQSIZE).
    rq_size: int = field(default=384, validator=_queue_size)
    #: Messages on their way to the peer (RDMA_SQSIZE).
    sq_size: int = field(default=384, validator=_queue_size)
    #: Regions that the peer may map here (RDMA_IOMAPSIZE), up to 128.
    iomap_size: int = 0
    #: Retries, time-outs, keep-alive, type of service; its queues' sizes are not looked at.
    conn: ConnParam = field(factory=ConnParam)

    def connection(self) -> ConnParam:
        """Give the connection's parameters."""
        return evolve(
            self.conn, recv_size=_MESSAGE_SIZE, recv_depth=self.rq_size + _MORE_RECEIVES, max_send_wr=2 * self.sq_size
        )


class _Posted:
    """Posts that are told of by one completion: bytes of the send buffer that they hold, and how many of each kind."""

    __slots__ = ("control", "data", "held")

    def __init__(self) -> None:
        self.held = self.data = self.control = 0


class RSocket:
    """One end of a stream on a connection: bytes to send are copied to its send buffer, bytes received are lent.

    Attributes:
        conn: the connection; it is the owner's to close.
        on_progress: called in a turn of its own when something changed: bytes came, or room; the peer said that it
            ends; the connection ended.
        error: why the connection can't go on, other than by the peer's orderly end.
        ended: the queue pair takes and gives nothing more.
    """

    def __init__(self, conn: Connection, param: StreamParam) -> None:
        self.conn = conn
        self.on_progress: Callable[[], None] = _nothing
        self.error: BaseException | None = None
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        self._qp = conn.qp
        self._iwarp = conn.capabilities.transport == "iwarp"
        half = param.recv_buffer // 2
        layout = Layout((half, param.recv_buffer - half), iomap_length=param.iomap_size)
        region = conn.alloc(layout.size, access=Access.REMOTE_WRITE)
        self._view = region.view
        self.protocol = StreamProtocol(
            self._view, region.addr, region.rkey, layout,
            rq_size=min(param.rq_size, conn.param.recv_depth), sq_size=param.sq_size, iwarp=self._iwarp,
        )  # fmt: skip
        self._immediate = not self._iwarp
        self._max_inline = conn.capabilities.max_inline_data
        #: The send buffer, made when something is sent that isn't inline.
        self._ring: MemoryRegion | None = None
        self._size = param.send_buffer
        self._head = 0
        self._used = 0
        #: Something waits for a completion.
        self._blocked = False
        #: What was posted since the last signalled post, and before each of those that aren't completed.
        self._since = _Posted()
        self._posted: deque[_Posted] = deque()
        self._signal_every = max(1, param.sq_size // 16)
        self._signal_bytes = param.send_buffer // 4
        self._failures: list[BaseException] = []
        #: Messages that came with immediate data, and receives that hold one.
        self._messages: list[int | ReceiveSlot] = []
        self._received: list[ReceiveSlot] = []
        self._order: ByteOrder = "little"
        self._started = False
        #: This side mustn't send yet.
        self._silent = False
        self._scheduled = False
        self._qp.on_receive = self._on_receive

    def hello(self) -> bytes:
        """Give this end's private data."""
        return evolve(self.protocol.hello(), immediate=self._offers_immediate).to_bytes()

    @property
    def _offers_immediate(self) -> bool:
        return self._iwarp and self.conn.capabilities.write_with_imm

    def start(self, private_data: bytes, *, passive: bool) -> None:
        """Take the peer's private data: the connection is established; `passive`: by accepting.

        On iWARP the side that accepted waits with everything until the first message is there: what follows the MPA
        Reply too closely makes siw refuse it (3 of 30 connections, Linux 6.12). The other side always has its second
        segment to tell of.

        Raises:
            ProtocolError: the peer is no rsocket.
        """
        peer = Hello.from_bytes(private_data)
        self._order = peer.order
        self._silent = self._iwarp and passive
        self._immediate = not self._iwarp or (peer.immediate and self._offers_immediate)
        self.protocol.start(peer)
        self._started = True
        self._control()
        if self._received or self.ended:
            self._schedule()

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        """Send as much as there is room for, and tell how many bytes that was; `bytes` are kept, others were copied."""
        if self._silent:
            return 0
        sent, total = 0, len(data)
        protocol = self.protocol
        while sent < total:
            length = min(total - sent, protocol.room, self._size - self._used)
            if not length:
                self._blocked = True
                break
            if length <= self._max_inline:
                inline = data if length == total and type(data) is bytes else bytes(data[sent : sent + length])
                self._used += length
                self._post(protocol.data(length), (), length, inline)
            else:
                piece = self._piece(length)
                length = piece.length
                piece.view[:] = data[sent : sent + length]
                self._used += length
                self._post(protocol.data(length), (piece,), length)
            sent += length
        return sent

    def _piece(self, length: int) -> MemorySlice:
        """Take the next so many bytes of the send buffer, or as many as there are up to its end."""
        if self._ring is None:
            self._ring = self.conn.pd.alloc(self._size)
        head = self._head
        stop = min(head + length, self._size)
        self._head = stop % self._size
        return self._ring[head:stop]

    def _control(self) -> None:
        """Post the control messages that are due."""
        if self.ended or self.error is not None or self._silent:
            return
        while (post := self.protocol.control()) is not None:
            sg_list, inline, _ = self.conn.memory.source(post.payload)
            self._post(post, sg_list, 0, inline)
        self._blocked |= self.protocol.waits

    def _post(self, post: Post, sg_list: Sequence[SGE], length: int, inline: bytes | None = None) -> None:
        """Post a message, and the bytes before it; of those that carry data, some are signalled."""
        qp = self._qp
        if qp.refusal is not None:
            return  # its end is on the way here
        since = self._since
        since.held += length
        since.control += post.control
        since.data += not post.control
        finish, flags = None, 0
        if since.control or since.data == self._signal_every or since.held >= self._signal_bytes or self._blocked:
            self._since = _Posted()
            self._posted.append(since)
            finish, flags = self._completed, _SIGNALED
        message = post.message
        if self._immediate:
            qp.post_send(
                _WRITE_WITH_IMM, sg_list, post.remote_addr, post.rkey, inline, flags, finish, message,
                group=self._failures,
            )  # fmt: skip
            return
        slots: list[SendSlot | RunSlot] = []
        if post.remote_addr:
            slots.append(qp.slot(_WRITE, sg_list, post.remote_addr, post.rkey, inline, 0))
        elements, inline, _ = self.conn.memory.source(message.to_bytes(_MESSAGE_SIZE, sys.byteorder))
        last = qp.slot(_SEND, elements, 0, 0, inline, flags)
        last.finish = finish
        slots.append(last)
        qp.post_list(slots, self._failures)

    def _completed(self) -> None:
        """The oldest signalled post completed, and those before it; within a poll, so nothing may be posted here."""
        done = self._posted.popleft()
        self._used -= done.held
        self.protocol.completed(done.data, done.control)
        if self._blocked:
            self._schedule()

    def shutdown(self) -> None:
        """Send no more: the peer sees the end behind the data (SHUT_WR)."""
        self.protocol.shutdown()
        self._control()

    def disconnect(self) -> None:
        """Go away: the peer sees the end behind the data."""
        self.protocol.disconnect()
        self._control()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def peek(self) -> memoryview:
        """Give the next bytes that came, as far as they are in one piece: lent until `consume()`."""
        start, length = self.protocol.readable()
        return self._view[start : start + length]

    def consume(self, length: int) -> None:
        """Give back the first bytes of `peek()`: the peer may write there again."""
        self.protocol.consume(length)
        if self.protocol.due:
            self._control()

    def _on_receive(self, slot: RecvSlot, completion: Completion) -> None:
        """A message came; within a poll, so it is only noted."""
        assert isinstance(slot, ReceiveSlot)
        if completion[1]:
            self.ended = True
        else:
            self._received.append(slot)
            self._messages.append(completion[5] if completion[6] & _WITH_IMM else slot)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._started:
            self._scheduled = True
            self._loop.call_soon(self._progress, context=self._context)

    def _progress(self) -> None:
        self._scheduled = False
        received, self._received = self._received, []
        messages, self._messages = self._messages, []
        order = self._order
        self._blocked = False
        self._silent &= not messages
        try:
            for message in messages:
                self.protocol.receive(message if isinstance(message, int) else int.from_bytes(message.view, order))
            if received and not self.ended:
                self._qp.post_recv_slots(received)
            if self.protocol.due:
                self._control()
        except (ProtocolError, BrokenError, OSError) as error:
            self.error = error
        if self.ended and self.error is None and not self.protocol.disconnected:
            self.error = self._qp.failure
        self.on_progress()

    # -- direct placement ---------------------------------------------------------------------------------------------

    def map(self, region: MemoryRegion, offset: int | None) -> int:
        """Offer a region to the peer (riomap); gives its offset."""
        mapping = Mapping(region.addr if offset is None else offset, region.addr, region.rkey, region.length)
        self.protocol.map(mapping)
        self._control()
        return mapping.offset

    def write_at(self, offset: int, data: Buffer) -> asyncio.Future[None]:
        """Write to a region that the peer offers (riowrite)."""
        length = memoryview(data).nbytes
        addr, rkey = self.protocol.mapped(offset, length)
        return self.conn.write(RemoteRegion(addr, length, rkey), data)


def _nothing() -> None:
    """Nobody listens yet."""
