"""rsocket's protocol: one end of a byte stream over RDMA, without I/O.

Each end has memory that the other writes to: a ring of receive segments, and the target SGL, a ring of entries that say
where the other end's segments are. Bytes are written to the current segment of the other end, and a message says how
many. What is read frees its segment, whose address is then written to the other end's target SGL, with a message
again, which also carries the credits: the messages that the other end may send.

Whoever owns this class posts what it gives (`data`, `control`), in that order, tells it of each message received
(`receive`) and each post that completed (`completed`), and reads the bytes where `readable` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from aiordma.errors import ProtocolError
from aiordma.stream.wire import (
    CREDITS_MASK,
    DATA_MASK,
    ENTRY_SIZE,
    IOMAP_SIZE,
    OP_SHIFT,
    Ctrl,
    Entry,
    Hello,
    Mapping,
    Op,
)

__all__ = ["Layout", "Post", "StreamProtocol"]

#: Places of the send queue that are kept for control messages, and so many of them are on their way at most.
CONTROL_SLOTS: Final = 4
#: Where receiving isn't retried (iWARP), credits left unused: the peer's receives take control messages too, which need
#: no credit. While it processes none, these are two grants by count, one for each of two segments, and two CTRL.
_SPARE: Final = 6
#: What rdma-core has at least; with less there would be nothing left to give back half of.
_SPARE_FROM: Final = 16
_ALIGN: Final = 64
_DATA: Final = Op.DATA
_SGL: Final = Op.SGL << OP_SHIFT
_CTRL: Final = Op.CTRL << OP_SHIFT


class Layout:
    """How the memory that the other end writes to is laid out: target SGL, iomap table, segments.

    Attributes:
        sgl_length: entries of the target SGL.
        iomap_length: entries of the iomap table.
        segments: offset and length of each receive segment.
        size: of all, in bytes.
    """

    __slots__ = ("iomap_length", "segments", "sgl_length", "size")

    def __init__(self, lengths: Sequence[int], *, sgl_length: int = 2, iomap_length: int = 0) -> None:
        self.sgl_length = sgl_length
        self.iomap_length = iomap_length
        start = -(-(ENTRY_SIZE * sgl_length + IOMAP_SIZE * iomap_length) // _ALIGN) * _ALIGN
        *starts, self.size = accumulate(lengths, initial=start)
        self.segments = tuple(zip(starts, lengths, strict=True))


class Post(NamedTuple):
    """What is to be posted: bytes written to the other end's memory, if any, and then a message."""

    message: int
    remote_addr: int
    rkey: int
    #: The bytes; for DATA they are the caller's.
    payload: bytes
    #: It holds one of the control slots until it completes.
    control: bool


class StreamProtocol:
    """One end.

    Attributes:
        unread: bytes received and not consumed.
        eof: the other end sends no more: what is unread is the rest.
        due: `control()` may have something to post.
        disconnected: one of the ends said that it goes away: nothing more can be sent.
        shut: this end said that it sends no more.
        mappings: regions that the other end offers (riomap), by their index.
    """

    def __init__(
        self, memory: memoryview, addr: int, rkey: int, layout: Layout, *, rq_size: int, sq_size: int, iwarp: bool
    ) -> None:
        self._memory = memory
        self._addr = addr
        self._rkey = rkey
        self._layout = layout
        self._rq_size = rq_size
        self._iwarp = iwarp
        # Each message takes two places on iWARP: the WRITE's and the SEND's.
        self._max_in_flight = max(1, sq_size // (1 + iwarp) - CONTROL_SLOTS)
        self._in_flight = 0
        self._control_slots = CONTROL_SLOTS
        # Sending.
        self._targets: deque[Entry] = deque()
        self._next_entry = 1 % layout.sgl_length
        self._sent = 0
        self._limit = 0
        self._spare = 0
        self._ctrl: deque[int] = deque()
        self._new_mappings: deque[tuple[int, Mapping]] = deque()
        self._n_mapped = 0
        self._leaving = False
        # Receiving: segments are counted without end; a segment's place in the ring is its number modulo their count.
        self._published = 1
        self._filled = 0
        self._freed = 0
        self._fill_at = 0
        self._read_at = 0
        self._lengths: deque[int] = deque()
        self._messages_read = 0
        self._messages_received = 0
        self._granted = rq_size
        self._grant_from = max(1, rq_size // 2)
        self.unread = 0
        self.due = False
        self.eof = False
        self.disconnected = False
        self.shut = False
        self.mappings: dict[int, Mapping] = {}

    # -- the beginning ------------------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """Give this end's private data."""
        start, length = self._layout.segments[0]
        return Hello(
            credits=self._rq_size, sgl_addr=self._addr, sgl_rkey=self._rkey, sgl_length=self._layout.sgl_length,
            iomap_length=self._layout.iomap_length, first=Entry(self._addr + start, self._rkey, length),
        )  # fmt: skip

    def start(self, peer: Hello) -> None:
        """Take the other end's private data: from now on there may be something to post."""
        self._peer = peer
        self._limit = peer.credits
        self._spare = _SPARE if self._iwarp and peer.credits >= _SPARE_FROM else 0
        if peer.first.length:
            self._targets.append(peer.first)
        self.due = True

    # -- sending ------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that the next DATA may carry; 0: none may be sent now."""
        if self._targets and self._in_flight < self._max_in_flight and self._credits > 0 and not self.disconnected:
            return self._targets[0].length
        return 0

    @property
    def _credits(self) -> int:
        return ((self._limit - self._sent) & CREDITS_MASK) - self._spare

    def data(self, length: int) -> Post:
        """Give the post of so many bytes, from 1 to `room`."""
        target = self._targets[0]
        if length < target.length:
            self._targets[0] = Entry(target.addr + length, target.rkey, target.length - length)
        else:
            self._targets.popleft()
        self._sent += 1
        self._in_flight += 1
        return Post(length, target.addr, target.rkey, b"", False)

    def control(self) -> Post | None:
        """Give the next control message that is due, if one can be sent now."""
        if not self._control_slots or self.disconnected:
            self.due = False
            return None
        post = self._grant() or self._mapping()
        if post is None and self._ctrl:
            ctrl = self._ctrl.popleft()
            self.disconnected = ctrl == Ctrl.DISCONNECT
            post = Post(_CTRL | ctrl, 0, 0, b"", True)
        if post is None:
            self.due = False
        elif post.control:
            self._control_slots -= 1
        return post

    @property
    def waits(self) -> bool:
        """Whether a control message waits for a post to complete."""
        return not self._control_slots or bool(self._new_mappings)

    def _grant(self) -> Post | None:
        """Publish a free segment, or give back the credits of messages that were read."""
        if self._leaving:
            return None
        limit = self._messages_read + self._rq_size
        message = _SGL | (limit & CREDITS_MASK)
        peer, layout = self._peer, self._layout
        segments = layout.segments
        if self._published - self._freed < len(segments) and self._published - self._filled < peer.sgl_length:
            start, length = segments[self._published % len(segments)]
            entry = Entry(self._addr + start, self._rkey, length).to_bytes(peer.order)
            post = Post(
                message, peer.sgl_addr + ENTRY_SIZE * (self._published % peer.sgl_length), peer.sgl_rkey, entry, True
            )  # fmt: skip
            self._published += 1
        elif limit - self._granted >= self._grant_from:
            post = Post(message, 0, 0, b"", True)
        else:
            return None
        self._granted = limit
        return post

    def _mapping(self) -> Post | None:
        if not self._new_mappings or self._credits <= 0 or self._in_flight >= self._max_in_flight:
            return None
        index, mapping = self._new_mappings.popleft()
        peer = self._peer
        table = peer.sgl_addr + ENTRY_SIZE * peer.sgl_length
        self._sent += 1
        self._in_flight += 1
        return Post(
            Op.IOMAP << OP_SHIFT | index, table + IOMAP_SIZE * index, peer.sgl_rkey, mapping.to_bytes(peer.order),
            False,
        )  # fmt: skip

    def completed(self, data: int, control: int) -> None:
        """So many posts of each kind completed: their places in the queue are free."""
        self._in_flight -= data
        self._control_slots += control
        self.due = True

    def shutdown(self) -> None:
        """Say, behind the data, that this end sends no more (SHUT_WR)."""
        if not self.shut:
            self.shut = self.due = True
            self._ctrl.append(Ctrl.DISCONNECT if self.eof else Ctrl.SHUTDOWN)

    def disconnect(self) -> None:
        """Say, behind the data, that this end goes away."""
        self.shut = self._leaving = self.due = True
        self._ctrl.clear()
        self._ctrl.append(Ctrl.DISCONNECT)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, message: int) -> None:
        """Take a message.

        Raises:
            ProtocolError: the other end does what the protocol forbids.
        """
        op, data = message >> OP_SHIFT, message & DATA_MASK
        if op == _DATA:
            self._received_data(data)
        elif op == Op.SGL:
            self._limit = data & CREDITS_MASK
            self._take_entry()
            self.due = True
        elif op == Op.CTRL:
            self._received_ctrl(data)
        elif op == Op.IOMAP:
            self._count_message()
            if data >= self._layout.iomap_length:
                raise ProtocolError(f"the peer mapped entry {data} of {self._layout.iomap_length}")
            start = ENTRY_SIZE * self._layout.sgl_length + IOMAP_SIZE * data
            self.mappings[data] = Mapping.from_buffer(self._memory, start)
        elif op != Op.WRITE:
            raise ProtocolError(f"the peer sent the reserved opcode {op}")

    def _count_message(self) -> None:
        self._messages_received += 1
        if self._messages_received > self._granted:
            raise ProtocolError(f"the peer sent more messages than the {self._granted} it had credits for")

    def _received_data(self, length: int) -> None:
        self._count_message()
        if not length:
            raise ProtocolError("the peer sent DATA of 0 bytes")
        segments = self._layout.segments
        room = segments[self._filled % len(segments)][1] - self._fill_at
        if self._filled == self._published or length > room:
            raise ProtocolError(f"the peer sent DATA of {length} bytes, and its segment has room for {room}")
        self._lengths.append(length)
        self.unread += length
        self._fill_at += length
        if length == room:
            self._filled += 1
            self._fill_at = 0
            self.due = True

    def _take_entry(self) -> None:
        """Take the next entry of the target SGL, if it was written.

        Not while its bytes come in: read when the message behind them is there, a peer writes no more than one ahead,
        and 16 bytes are placed at once by every device that is known here.
        """
        start = ENTRY_SIZE * self._next_entry
        entry = Entry.from_buffer(self._memory, start)
        if entry.length:
            self._memory[start : start + ENTRY_SIZE] = bytes(ENTRY_SIZE)
            self._targets.append(entry)
            self._next_entry = (self._next_entry + 1) % self._layout.sgl_length

    def _received_ctrl(self, ctrl: int) -> None:
        if ctrl == Ctrl.DISCONNECT:
            self.eof = self.disconnected = True
        elif ctrl == Ctrl.SHUTDOWN:
            self.eof = True
            self.disconnected = self.shut and not self._ctrl

    def readable(self) -> tuple[int, int]:
        """Give where the next unread bytes are in memory, as far as they are in one piece: start and length."""
        segments = self._layout.segments
        start, length = segments[self._freed % len(segments)]
        return start + self._read_at, min(self.unread, length - self._read_at)

    def consume(self, length: int) -> None:
        """The first unread bytes were read, at most what `readable` gave: their place is the other end's again."""
        segments = self._layout.segments
        self.unread -= length
        self._read_at += length
        if self._read_at == segments[self._freed % len(segments)][1]:
            self._freed += 1
            self._read_at = 0
            self.due = True
        lengths = self._lengths
        while length:
            if length < lengths[0]:
                lengths[0] -= length
                return
            length -= lengths.popleft()
            self._messages_read += 1
        if self._messages_read + self._rq_size - self._granted >= self._grant_from:
            self.due = True

    # -- direct placement (riomap, riowrite) --------------------------------------------------------------------------

    def map(self, mapping: Mapping) -> int:
        """Offer a region to the other end: its `control()` post goes out before the next data; gives its index.

        Raises:
            ValueError: the other end's table is full, or its credits are too few: each mapping costs one for good, and
                it gives back others when it has read half of all.
        """
        limit = min(self._peer.iomap_length, self._peer.credits // 2 - self._spare)
        if self._n_mapped >= limit:
            raise ValueError(f"the peer takes {max(0, limit)} mappings, and no more")
        index = self._n_mapped
        self._n_mapped += 1
        self.due = True
        self._new_mappings.append((index, mapping))
        return index

    def mapped(self, offset: int, length: int) -> tuple[int, int]:
        """Give address and key of so many bytes at an offset of the other end's regions.

        Raises:
            ValueError: none of them has these bytes.
        """
        for mapping in self.mappings.values():
            if mapping.offset <= offset and offset + length <= mapping.offset + mapping.length:
                return mapping.addr + offset - mapping.offset, mapping.rkey
        raise ValueError(f"the peer has no region mapped at {offset} with {length} bytes")
