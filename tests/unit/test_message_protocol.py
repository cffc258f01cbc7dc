"""The messages protocol, two ends joined in memory by schedules of any kind, and frames that must not come."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma.errors import ProtocolError
from aiordma.messages.protocol import MAX_OFFERS, MAX_PIECES, Kind, MessageParam, Offer, Outgoing, Protocol
from aiordma.types import RemoteRegion
from tests.conformance.support import pattern

SMALLEST = MessageParam(frame_size=256, credits=2, max_calls=3)
_HEADER = struct.Struct(">BBHHH")
_DATA, _CONTROL, _SEEN = 1, 2, 1


class Sent(Outgoing):
    """A message that an end sends: small by its bytes, large as regions that nobody READs."""

    def __init__(self, kind: Kind, ident: int, data: bytes, regions: list[RemoteRegion] | None = None) -> None:
        length = sum([region.length for region in regions]) if regions else len(data)
        super().__init__(kind, ident, length, len(regions) if regions else 0)
        self.data = data
        self.regions = regions
        self.cancelled = False
        self.finished = 0
        self.failed: BaseException | None = None

    def withdrawn(self) -> bool:
        return self.cancelled

    def content(self) -> bytes:
        return self.data

    def lend(self) -> list[RemoteRegion] | None:
        return self.regions

    def finish(self) -> None:
        self.finished += 1

    def fail(self, error: BaseException) -> None:
        self.failed = error


class End:
    """One end: what it sent and got, and its frames on the way to the other."""

    def __init__(self, own: MessageParam, peer: MessageParam) -> None:
        self.protocol = Protocol(own, peer)
        self.receives = Protocol.receives(peer)
        self.flying: deque[bytes] = deque()
        self.numbers = itertools.count()
        self.sent: list[Any] = []
        self.lent: list[Sent] = []
        self.got: list[Any] = []
        self.got_calls: list[Any] = []
        self.sent_calls: list[Any] = []
        self.unread: deque[Offer] = deque()

    def send(self, what: int) -> None:
        """Send something: a small message of some length, a large one, or a record of a call."""
        number = next(self.numbers)
        if what < 16:
            data = pattern(what * 15, number)
            self.sent.append(data)
            if not self.protocol.put(data):
                self.protocol.submit(Sent(Kind.MESSAGE, 0, data))
        elif what < 22:
            regions = [RemoteRegion(number << 20, 1 + number, number)] * (what - 15)
            message = Sent(Kind.MESSAGE, 0, b"", regions)
            self.sent.append(regions)
            self.lent.append(message)
            self.protocol.submit(message)
        elif what < 23:
            regions = [RemoteRegion(number << 20, 1 + number, number)]
            message = Sent(Kind.REQUEST, number, b"", regions)
            self.sent_calls.append((Kind.REQUEST, number, regions))
            self.lent.append(message)
            self.protocol.submit(message)
        else:
            data = pattern(what, number)
            self.sent_calls.append((Kind.REPLY, number, data))
            self.protocol.submit(Sent(Kind.REPLY, number, data))

    def post(self) -> bool:
        """Send a frame, if there is one."""
        frame = self.protocol.next_frame()
        if frame is None:
            return False
        assert len(frame) <= self.protocol.frame_size
        self.flying.append(frame)
        assert len(self.flying) <= self.receives
        return True

    def arrive(self, peer: End) -> bool:
        """The peer takes the oldest frame."""
        if not self.flying:
            return False
        peer.protocol.receive(self.flying.popleft())
        for kind, ident, content in peer.protocol.calls:
            if isinstance(content, Offer):
                peer.unread.append(content)
                peer.got_calls.append((kind, ident, content.regions))
            else:
                peer.got_calls.append((kind, ident, content))
        peer.protocol.calls.clear()
        return True

    def take(self) -> bool:
        """The program receives a message."""
        if not self.protocol.inbound:
            return False
        message = self.protocol.inbound.popleft()
        if isinstance(message, Offer):
            assert self.protocol.offers.popleft() is message
            self.unread.append(message)
            self.got.append(message.regions)
        else:
            self.got.append(message)
        self.protocol.consume()
        return True

    def read(self) -> bool:
        """An offer's memory was READ."""
        if not self.unread:
            return False
        self.protocol.give_back(self.unread.popleft())
        return True


PARAMS = st.builds(
    MessageParam, frame_size=st.integers(256, 700), credits=st.integers(2, 9), max_calls=st.just(0)
)  # fmt: skip


@settings(max_examples=300)
@given(PARAMS, PARAMS, st.booleans(), st.lists(st.tuples(st.booleans(), st.integers(0, 39)), max_size=400))
def test_any_schedule(own: MessageParam, other: MessageParam, silent: bool, schedule: list[tuple[bool, int]]) -> None:
    """Nothing is lost, repeated or reordered, no receive is missing for a frame, and it never comes to a stop."""
    a, b = End(own, other), End(other, own)
    if silent:
        b.protocol.be_silent()
        a.flying.append(a.protocol.greet())
    for turn, what in schedule:
        one, peer = (a, b) if turn else (b, a)
        if what < 24:
            one.send(what)
        elif what < 28:
            one.post()
        elif what < 33:
            one.arrive(peer)
        elif what < 37:
            one.take()
        else:
            one.read()
    settle(a, b)
    for one, peer in ((a, b), (b, a)):
        assert peer.got == one.sent
        assert peer.got_calls == one.sent_calls
        assert one.protocol.finished
        assert [message.finished for message in one.lent] == [1] * len(one.lent)


def settle(*ends: End) -> None:
    """Let everything arrive, be received and be READ."""
    a, b = ends
    moved = True
    while moved:
        moved = False
        for one, peer in ((a, b), (b, a)):
            moved |= one.post() | one.arrive(peer) | one.take() | one.read()


def two(own: MessageParam = SMALLEST, other: MessageParam = SMALLEST) -> tuple[End, End]:
    """Two ends."""
    return End(own, other), End(other, own)


def test_nothing_before_the_first_frame() -> None:
    """A silent side's messages wait for the other's greeting, and then go."""
    a, b = two()
    b.protocol.be_silent()
    b.send(3)
    assert not b.post()
    a.flying.append(a.protocol.greet())
    a.arrive(b)
    assert b.post()
    b.arrive(a)
    assert a.take()
    assert a.got == b.sent


def test_senders_only() -> None:
    """Two sides whose programs only send large messages get their memory back all the same, once it was READ."""
    a, b = two()
    for _ in range(MAX_OFFERS * 2):
        a.send(16)
        b.send(16)
    settle(a, b)
    assert a.protocol.finished
    assert b.protocol.finished


def test_credits_end() -> None:
    """A peer that receives nothing is sent as many frames as it has credits for, and no message is lost by that."""
    a, b = two()
    for _ in range(50):
        a.send(15)
    while a.post():
        pass
    while a.arrive(b):
        pass
    assert len(b.protocol.inbound) == 1
    assert a.protocol.blocked
    settle(a, b)
    assert b.got == a.sent


def test_offers_end() -> None:
    """No more than MAX_OFFERS large messages are lent at once; a small one behind them waits in order."""
    a, b = End(MessageParam(), MessageParam()), End(MessageParam(), MessageParam())
    for _ in range(MAX_OFFERS + 1):
        a.send(16)
    a.send(1)
    while a.post():
        pass
    while a.arrive(b):
        pass
    assert len(b.protocol.inbound) == MAX_OFFERS
    settle(a, b)
    assert b.got == a.sent


def test_withdrawn() -> None:
    """A message that was cancelled before it was put into a frame isn't sent; one that failed to be lent neither."""
    a, b = two()
    for _ in range(2):
        a.protocol.submit(Sent(Kind.MESSAGE, 0, bytes(230)))
    cancelled = Sent(Kind.MESSAGE, 0, b"cancelled")
    failing = Sent(Kind.MESSAGE, 0, b"", [RemoteRegion(1, 1000, 1)])
    failing.regions = None
    for message in (cancelled, failing, Sent(Kind.MESSAGE, 0, b"last")):
        a.protocol.submit(message)
    cancelled.cancelled = True
    settle(a, b)
    assert b.got == [bytes(230), bytes(230), b"last"]
    assert not cancelled.taken
    assert not cancelled.finished


def test_abandon() -> None:
    """At the end it gives what waits and what is lent, so that each can be told."""
    a, b = two()
    a.send(16)
    a.post()
    waiting = [Sent(Kind.MESSAGE, 0, bytes(200)) for _ in range(4)]
    for message in waiting:
        a.protocol.submit(message)
    left = a.protocol.abandon()
    assert left == [a.lent[0], *waiting[1:]]
    assert not a.protocol.abandon()
    assert a.protocol.next_frame() is None
    del b


@given(
    st.builds(
        MessageParam, frame_size=st.integers(256, 1 << 20), credits=st.integers(2, 0xFFFF),
        max_message=st.integers(1 << 20, (1 << 64) - 1), max_calls=st.integers(0, 0xFFFF),
    ),
    st.integers(0, 200),
)  # fmt: skip
def test_hello(param: MessageParam, padding: int) -> None:
    """A hello is decoded as it was encoded, padded with zeros or not."""
    assert len(param.to_bytes()) == 24
    assert MessageParam.from_bytes(param.to_bytes() + bytes(padding)) == param


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "isn't a hello"),
        (b"aioM", "isn't a hello"),
        (b"aioX" + bytes(20), "isn't a hello"),
        (b"aioM\x02" + bytes(19), "version 2"),
        (b"aioM\x01" + bytes(19), "makes no sense"),
        (struct.pack(">4sBBHIHHQ", b"aioM", 1, 0, 1, 4096, 0, 0, 0), "credits"),
        (struct.pack(">4sBBHIHHQ", b"aioM", 1, 0, 2, 255, 0, 0, 0), "frame_size"),
        (struct.pack(">4sBBHIHHQ", b"aioM", 1, 0, 2, 4096, 0, 0, 4095), "max_message is 4095"),
    ],
)
def test_hello_that_is_none(data: bytes, words: str) -> None:
    """What isn't a hello is a ProtocolError that says why."""
    with pytest.raises(ProtocolError, match=words):
        MessageParam.from_bytes(data)


@pytest.mark.parametrize(
    "param",
    [{"frame_size": 255}, {"frame_size": (1 << 20) + 1}, {"credits": 1}, {"max_calls": -1}, {"max_message": 16_383}],
)
def test_param_out_of_range(param: dict[str, int]) -> None:
    """Sizes that can't work are refused where they are given."""
    with pytest.raises(ValueError, match=next(iter(param))):
        MessageParam(**param)


def data_frame(*records: tuple[int, bytes], given: int = 0, flags: int = 0) -> bytes:
    """Make a DATA frame of records: kind, content."""
    words = [kind << 28 | len(content) for kind, content in records]
    body = b"".join([content for _, content in records])
    return _HEADER.pack(_DATA, flags, given, len(words), 0) + struct.pack(f">{len(words)}I", *words) + body


def control_frame(*numbers: int, given: int = 0, flags: int = 0) -> bytes:
    """Make a CONTROL frame."""
    return _HEADER.pack(_CONTROL, flags, given, len(numbers), 0) + struct.pack(f">{len(numbers)}I", *numbers)


def offer(kind: int = 0, count: int = 1, length: int = 100, pieces: int = 1) -> bytes:
    """Make an offer's record."""
    regions = RemoteRegion(4096, length, 7).to_bytes() * pieces
    return struct.pack(">BBHII", kind, count, 0, 0, 5) + regions


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "a frame of 0 bytes"),
        (bytes(7), "a frame of 7 bytes"),
        (_HEADER.pack(9, 0, 0, 0, 0), "kind 9"),
        (_HEADER.pack(_DATA, 0, 0, 0, 0), "without a record"),
        (_HEADER.pack(_DATA, 0, 0, 0xFFFF, 0), "65535 records"),
        (data_frame((0, b"x"), given=1), "gives back 1 credits"),
        (data_frame((0, b"x"), flags=_SEEN), "wasn't sent"),
        (data_frame((0, b"x"))[:-1], "goes beyond its frame"),
        (data_frame((0, b"x")) + b"y", "1 bytes behind its last record"),
        (data_frame((6, b"1234")), "kind 6"),
        (data_frame((15, b"1234")), "kind 15"),
        (data_frame((Kind.REQUEST, b"123")), "doesn't say of which"),
        (data_frame((Kind.OFFER, b"123")), "an offer of 3 bytes"),
        (data_frame((Kind.OFFER, offer(kind=Kind.OFFER))), "kind 1"),
        (data_frame((Kind.OFFER, offer(kind=Kind.CANCEL))), "kind 5"),
        (data_frame((Kind.OFFER, offer(kind=77))), "kind 77"),
        (data_frame((Kind.OFFER, offer(count=0))), "0 pieces"),
        (data_frame((Kind.OFFER, offer(count=2))), "2 pieces"),
        (data_frame((Kind.OFFER, offer(count=MAX_PIECES + 1, pieces=MAX_PIECES + 1))), "9 pieces"),
        (data_frame((Kind.OFFER, offer(length=0))), "a message of 0 bytes"),
        (data_frame((Kind.OFFER, offer(length=1001))), "a message of 1001 bytes, this side takes 1000"),
        (control_frame(3), "wasn't lent"),
        (control_frame() + b"x", "isn't what its header says"),
        (control_frame(flags=_SEEN), "wasn't sent"),
    ],
)
def test_frame_that_must_not_come(frame: bytes, words: str) -> None:
    """Each is a ProtocolError that says what is wrong with it, and none of its messages is received."""
    protocol = Protocol(MessageParam(frame_size=1000, max_message=1000), SMALLEST)
    with pytest.raises(ProtocolError, match=words):
        protocol.receive(frame)
    assert not protocol.inbound
    assert not protocol.calls


def test_too_many_frames() -> None:
    """A peer that sends more frames than it has credits for is caught."""
    protocol = Protocol(SMALLEST, SMALLEST)
    protocol.receive(data_frame((0, b"x")))
    with pytest.raises(ProtocolError, match="more than the 1"):
        protocol.receive(data_frame((0, b"x")))


def test_too_many_control_frames() -> None:
    """A bare control frame before the last one was answered is caught; one after it is not."""
    protocol = Protocol(SMALLEST, SMALLEST)
    protocol.receive(control_frame())
    with pytest.raises(ProtocolError, match="before the last one was seen"):
        protocol.receive(control_frame())
    protocol = Protocol(SMALLEST, SMALLEST)
    protocol.receive(control_frame())
    assert protocol.put(b"x")
    frame = protocol.next_frame()
    assert frame is not None
    assert frame[1] & _SEEN
    protocol.receive(control_frame(given=1))


@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_bytes(data: bytes, kind: int) -> None:
    """Whatever comes is a ProtocolError, or taken: nothing else happens."""
    protocol = Protocol(MessageParam(), SMALLEST)
    try:
        protocol.receive(bytes((kind,)) + data)
    except ProtocolError:
        assert not protocol.inbound
