"""The messages protocol without I/O: frames, credits, and the order of messages.

A frame is one SEND. All numbers are big-endian.

    header    8    kind 1 (DATA or CONTROL), flags 1, credits given back 2, count 2, zero 2
    DATA           count words of 4: kind of the record << 28 | its length; then the records, one behind the other
    CONTROL        count words of 4: numbers of offers whose memory is no longer needed

A small message is a record. A large one is an offer: a record that says where in the sender's memory it lies; the
receiver READs it, and gives back the offer's number.

Who posts how many receives:

- `credits - 1` for DATA frames. Each takes a credit of the peer's, which comes back in the header of any frame when the
  messages in it were taken.
- One for a bare CONTROL frame, which only gives credits back, when half of them are due and no other frame takes them
  along. Another one is sent only after the peer said, in the header of some frame, that it has seen this one (SEEN). A
  bare frame is answered by nothing. So it can always be sent when it is needed: it brings at least one credit, and the
  peer, if it has anything to send, uses that for a frame that says SEEN.
- One for each offer that isn't given back, for the CONTROL frame that does it. It takes no credit: else two sides whose
  programs only send could wait for each other.

On iWARP the accepting side must not send before the initiator has (RFC 5044, section 7.1), whose program may have
nothing to say: there the initiator sends a bare CONTROL frame at once, which gives back nothing, and the other side's
frames wait for it.
"""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections import deque
from enum import IntEnum
from typing import Any, Final, Self, TypeAlias

from attrs import field, frozen
from attrs.validators import ge, instance_of, le

from aiordma.errors import ProtocolError
from aiordma.types import Buffer, RemoteRegion

__all__ = ["MAX_OFFERS", "MAX_PIECES", "Arrived", "Kind", "MessageParam", "Offer", "Outgoing", "Protocol"]

#: Large messages of one side that the other hasn't taken yet; more wait in order.
MAX_OFFERS: Final = 16
#: Pieces of memory that one large message may lie in.
MAX_PIECES: Final = 8

_HEADER: Final = struct.Struct(">BBHHH")
_IDENT: Final = struct.Struct(">I")
_OFFER: Final = struct.Struct(">BBHII")
_DATA: Final = 1
_CONTROL: Final = 2
_SEEN: Final = 1
_KIND_SHIFT: Final = 28
_LENGTH: Final = (1 << _KIND_SHIFT) - 1

_HELLO: Final = struct.Struct(">4sBBHIHHQ")
_MAGIC: Final = b"aioM"
_VERSION: Final = 1


class Kind(IntEnum):
    """What a record is."""

    MESSAGE = 0
    OFFER = 1
    REQUEST = 2
    REPLY = 3
    FAILURE = 4
    CANCEL = 5


#: What an offer may stand for.
_LARGE: Final = frozenset({Kind.MESSAGE, Kind.REQUEST, Kind.REPLY})


def _within(low: int, high: int) -> Any:
    return [instance_of(int), ge(low), le(high)]


@frozen(kw_only=True)
class MessageParam:
    """Sizes of a message channel. The two sides need not agree: each says what it takes.

    They are this side's hello, 24 bytes of the private data of connect and accept.
    """

    #: Bytes of the largest frame. A message that fits is copied, several that wait together leave in one frame; what
    #: is longer is READ by the receiver from the sender's memory.
    frame_size: int = field(default=16 * 1024, validator=_within(256, 1 << 20))
    #: Frames that may be here without being received by the program. One more or less of them is kept for control.
    credits: int = field(default=32, validator=_within(2, 0xFFFF))
    #: Bytes of the largest message that this side takes; not less than a frame.
    max_message: int = field(default=1 << 30, validator=_within(256, (1 << 64) - 1))
    #: Calls that this side handles at once; 0 where it handles none.
    max_calls: int = field(default=0, validator=_within(0, 0xFFFF))

    def __attrs_post_init__(self) -> None:
        if self.max_message < self.frame_size:  # what fits a frame isn't looked at any further
            raise ValueError(f"max_message is {self.max_message}, less than a frame ({self.frame_size})")

    def to_bytes(self) -> bytes:
        """Encode as a hello."""
        return _HELLO.pack(
            _MAGIC, _VERSION, 0, self.credits, self.frame_size, self.max_calls, 0, self.max_message
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Decode the peer's hello; private data may arrive zero-padded.

        Raises:
            ProtocolError: it is none, of another version, or its numbers make no sense.
        """
        if len(data) < _HELLO.size or bytes(data[:4]) != _MAGIC:
            raise ProtocolError(
                "the peer's private data isn't a hello of aiordma's messages: connect_messages() talks to "
                "serve_messages() and serve_calls()"
            )
        _, version, _, depth, frame_size, max_calls, _, max_message = _HELLO.unpack_from(data)
        if version != _VERSION:
            raise ProtocolError(f"the peer speaks version {version} of the messages protocol, this side {_VERSION}")
        try:
            return cls(frame_size=frame_size, credits=depth, max_message=max_message, max_calls=max_calls)
        except ValueError as error:
            raise ProtocolError(f"the peer's hello makes no sense: {error.args[0]}") from error


class Outgoing(ABC):
    """A message on its way out, as the protocol sees it.

    Attributes:
        kind: MESSAGE, REQUEST, REPLY, FAILURE or CANCEL.
        ident: the call it belongs to; of no meaning with MESSAGE.
        length: in bytes.
        pieces: of memory that it lies in, if it is large; else 0.
        taken: it is in a frame, and can't be withdrawn any more.
    """

    __slots__ = ("ident", "kind", "length", "pieces", "taken")

    def __init__(self, kind: Kind, ident: int, length: int, pieces: int) -> None:
        self.kind = kind
        self.ident = ident
        self.length = length
        self.pieces = pieces
        self.taken = False

    @abstractmethod
    def withdrawn(self) -> bool:
        """Whether nobody wants it sent any more."""

    @abstractmethod
    def content(self) -> bytes:
        """Give a small message's bytes."""

    @abstractmethod
    def lend(self) -> list[RemoteRegion] | None:
        """Give a large message's memory, to be READ; None: that failed, and it isn't sent."""

    @abstractmethod
    def finish(self) -> None:
        """It is copied, or the peer has READ it: its memory isn't needed any more."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """The channel ended before that."""


class Offer:
    """A large message of the peer's.

    Attributes:
        kind: what it is.
        ident: the call it belongs to.
        number: the peer's, to be given back.
        regions: where it lies.
        length: in bytes.
    """

    __slots__ = ("ident", "kind", "length", "number", "regions")

    def __init__(self, kind: Kind, ident: int, number: int, regions: list[RemoteRegion]) -> None:
        self.kind = kind
        self.ident = ident
        self.number = number
        self.regions = regions
        self.length = sum([region.length for region in regions])


#: A message that came: its bytes, or where it is.
Arrived: TypeAlias = bytes | Offer


class Protocol:
    """One end of a message channel.

    What is to be sent goes in by `put` and `submit`, and comes out by `next_frame`, to be sent by one SEND each. What
    was received goes in by `receive`, and comes out in `inbound` and `calls`.

    Attributes:
        frame_size: bytes of the largest frame that is sent.
        max_small: bytes of the largest message that goes in a frame.
        inbound: messages that came, in order; each that is taken off is to be told by `consume`.
        offers: the large ones in `inbound`, until somebody takes them off to READ them.
        calls: records of calls that came: kind, call, content.
    """

    def __init__(self, own: MessageParam, peer: MessageParam) -> None:
        self.frame_size = min(own.frame_size, peer.frame_size)
        self.max_small = self.frame_size - _HEADER.size - 4
        self._max_message = own.max_message
        # Sending.
        self._peer_window = self._credits = peer.credits - 1
        self._bare_free = True
        self._silent = False
        self._words: list[int] = []
        self._parts: list[bytes] = []
        self._used = _HEADER.size
        self._waiting: deque[Outgoing] = deque()
        self._lent: dict[int, Outgoing] = {}
        self._numbers = itertools.count()
        # Receiving.
        self._window = own.credits - 1
        self._unreturned = 0
        self._owed = 0
        self._counts: deque[int] = deque()
        self._given_back: list[int] = []
        self._must_say_seen = False
        self.inbound: deque[Arrived] = deque()
        self.offers: deque[Offer] = deque()
        self.calls: list[tuple[Kind, int, Arrived]] = []

    @staticmethod
    def receives(own: MessageParam) -> int:
        """How many receives a side posts that the protocol never goes beyond."""
        return own.credits + MAX_OFFERS

    # -- sending ------------------------------------------------------------------------------------------------------

    def greet(self) -> bytes:
        """Give the frame to be sent before all others, where the peer is silent until then."""
        self._bare_free = False
        return self._header(_CONTROL, [])

    def be_silent(self) -> None:
        """Give out no frame until one came."""
        self._silent = True

    def put(self, data: bytes) -> bool:
        """Put a message into the open frame; False if it doesn't fit, or others wait before it."""
        length = len(data)
        used = self._used + length + 4
        if used > self.frame_size or self._waiting:
            return False
        self._used = used
        self._words.append(length)
        self._parts.append(data)
        return True

    def submit(self, message: Outgoing) -> None:
        """Take a message to be sent, in order behind those before it."""
        self._waiting.append(message)
        if len(self._waiting) == 1:
            self._fill()

    def _fill(self) -> None:
        """Put what waits into the open frame, as far as there is room for it."""
        waiting = self._waiting
        while waiting:
            message = waiting[0]
            if not message.withdrawn():
                if message.pieces:
                    if len(self._lent) >= MAX_OFFERS or not self._fits(_OFFER.size + 20 * message.pieces):
                        return
                    message.taken = True
                    self._put_offer(message)
                else:
                    ident = b"" if message.kind == Kind.MESSAGE else _IDENT.pack(message.ident)
                    if not self._fits(len(ident) + message.length):
                        return
                    message.taken = True
                    self._put_record(message.kind, ident + message.content())
                    message.finish()
            waiting.popleft()

    def _fits(self, length: int) -> bool:
        return self._used + length + 4 <= self.frame_size

    def _put_record(self, kind: Kind, record: bytes) -> None:
        self._used += len(record) + 4
        self._words.append(kind << _KIND_SHIFT | len(record))
        self._parts.append(record)

    def _put_offer(self, message: Outgoing) -> None:
        regions = message.lend()
        if regions is None:
            return
        number = next(self._numbers) & 0xFFFFFFFF
        self._lent[number] = message
        head = _OFFER.pack(message.kind, len(regions), 0, message.ident, number)
        self._put_record(Kind.OFFER, head + b"".join([region.to_bytes() for region in regions]))

    def next_frame(self) -> bytes | None:
        """Give the next frame to be sent, or None if there is nothing to send, or no credit for it."""
        if self._waiting:
            self._fill()
        if self._silent:
            return None
        if self._words and self._credits:
            self._credits -= 1
            words, parts = self._words, self._parts
            self._words, self._parts, self._used = [], [], _HEADER.size
            return self._header(_DATA, words) + b"".join(parts)
        if self._given_back:
            most = (self.frame_size - _HEADER.size) // 4
            numbers, self._given_back = self._given_back[:most], self._given_back[most:]
            return self._header(_CONTROL, numbers)
        if self._bare_free and self._owed * 2 >= self._window:
            self._bare_free = False
            return self._header(_CONTROL, [])
        return None

    def _header(self, kind: int, words: list[int]) -> bytes:
        """Make a frame's header and its words; it takes along what the peer is to be told."""
        owed, self._owed = self._owed, 0
        self._unreturned -= owed
        flags, self._must_say_seen = (_SEEN if self._must_say_seen else 0), False
        count = len(words)
        return struct.pack(f">BBHHH{count}I", kind, flags, owed, count, 0, *words)

    @property
    def blocked(self) -> bool:
        """Whether messages wait that the open frame has no room for."""
        return bool(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether every message is in a frame that was given out, and what was lent is given back."""
        return not (self._words or self._waiting or self._lent)

    def abandon(self) -> list[Outgoing]:
        """Give up what isn't sent yet, and what is lent: the channel has ended."""
        messages = [*self._lent.values(), *self._waiting]
        self._lent.clear()
        self._waiting.clear()
        self._words, self._parts = [], []
        return messages

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """Take a frame that came.

        Raises:
            ProtocolError: the peer must not have sent it; nothing of it was taken, and the channel is of no more use.
        """
        if len(frame) < _HEADER.size:
            raise ProtocolError(f"a frame of {len(frame)} bytes came, its header alone has {_HEADER.size}")
        kind, flags, given, count, _ = _HEADER.unpack_from(frame)
        if _HEADER.size + 4 * count > len(frame):
            raise ProtocolError(f"a frame says that it has {count} records, but it has only {len(frame)} bytes")
        self._credits += given
        if self._credits > self._peer_window:
            raise ProtocolError(f"the peer gives back {given} credits, more than were taken")
        if flags & _SEEN:
            if self._bare_free:
                raise ProtocolError("the peer says it has seen a control frame that wasn't sent")
            self._bare_free = True
        self._silent = False
        words: tuple[int, ...] = struct.unpack_from(f">{count}I", frame, _HEADER.size)
        if kind == _DATA:
            self._receive_data(frame, words)
        elif kind == _CONTROL:
            self._receive_control(frame, words)
        else:
            raise ProtocolError(f"a frame of kind {kind} came: there is none such")

    def _receive_control(self, frame: bytes, numbers: tuple[int, ...]) -> None:
        if len(frame) != _HEADER.size + 4 * len(numbers):
            raise ProtocolError(f"a control frame has {len(frame)} bytes, which isn't what its header says")
        if not numbers:
            if self._must_say_seen:
                raise ProtocolError("the peer sent a control frame before the last one was seen")
            self._must_say_seen = True
        for number in numbers:
            message = self._lent.pop(number, None)
            if message is None:
                raise ProtocolError(f"the peer gives back memory that wasn't lent to it (offer {number})")
            message.finish()

    def _receive_data(self, frame: bytes, words: tuple[int, ...]) -> None:
        if self._unreturned == self._window:
            raise ProtocolError(f"the peer sent a frame more than the {self._window} it has credits for")
        if not words:
            raise ProtocolError("a data frame without a record came")
        messages: list[Arrived] = []
        offers: list[Offer] = []
        calls: list[tuple[Kind, int, Arrived]] = []
        start = _HEADER.size + 4 * len(words)
        end = len(frame)
        for word in words:
            stop = start + word
            if stop <= end:  # a small message: its kind is 0, and that of others makes a large number
                messages.append(frame[start:stop])
            else:
                stop = start + (word & _LENGTH)
                if stop > end:
                    raise ProtocolError(f"a record of {word & _LENGTH} bytes goes beyond its frame of {end}")
                record = self._parse(word >> _KIND_SHIFT, frame[start:stop])
                if isinstance(record, Offer):
                    messages.append(record)
                    offers.append(record)
                else:
                    calls.append(record)
            start = stop
        if start != end:
            raise ProtocolError(f"a frame has {end - start} bytes behind its last record")
        self._unreturned += 1
        if messages:
            self._counts.append(len(messages))
            self.inbound.extend(messages)
            self.offers.extend(offers)
        else:
            self._owed += 1
        self.calls += calls

    def _parse(self, kind: int, record: bytes) -> Offer | tuple[Kind, int, Arrived]:
        """Parse a record that isn't a small message: a large message, or a call's."""
        if kind == Kind.OFFER:
            offer = self._parse_offer(record)
            return offer if offer.kind == Kind.MESSAGE else (offer.kind, offer.ident, offer)
        if not Kind.REQUEST <= kind <= Kind.CANCEL:
            raise ProtocolError(f"a record of kind {kind} came: there is none such")
        if len(record) < _IDENT.size:
            raise ProtocolError("a record of a call doesn't say of which")
        return Kind(kind), _IDENT.unpack_from(record)[0], record[_IDENT.size :]

    def _parse_offer(self, record: bytes) -> Offer:
        if len(record) < _OFFER.size:
            raise ProtocolError(f"an offer of {len(record)} bytes came")
        kind, count, _, ident, number = _OFFER.unpack_from(record)
        if kind not in _LARGE or not 1 <= count <= MAX_PIECES or len(record) != _OFFER.size + 20 * count:
            raise ProtocolError(f"an offer of {len(record)} bytes with {count} pieces came, of kind {kind}")
        try:
            regions = [RemoteRegion.from_bytes(record[_OFFER.size + 20 * index :]) for index in range(count)]
        except ValueError as error:
            raise ProtocolError(f"the peer offers memory that can't be: {error}") from error
        offer = Offer(Kind(kind), ident, number, regions)
        if not all(region.length for region in regions) or offer.length > self._max_message:
            raise ProtocolError(
                f"the peer offers a message of {offer.length} bytes, this side takes {self._max_message}"
            )
        return offer

    def consume(self) -> bool:
        """Note that a message was taken off `inbound`; tells whether credits are due."""
        counts = self._counts
        counts[0] -= 1
        if counts[0]:
            return False
        counts.popleft()
        self._owed += 1
        return self._owed * 2 >= self._window

    def give_back(self, offer: Offer) -> None:
        """Note that an offer's memory was READ, and isn't needed any more."""
        self._given_back.append(offer.number)

    @property
    def due(self) -> bool:
        """Whether there may be a frame to send."""
        return bool(self._words or self._waiting or self._given_back or self._owed * 2 >= self._window)
