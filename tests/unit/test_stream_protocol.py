"""The rsocket protocol, two ends joined in memory by schedules of any kind."""

from __future__ import annotations

import sys
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma.errors import ProtocolError
from aiordma.stream.protocol import CONTROL_SLOTS, Layout, Post, StreamProtocol
from aiordma.stream.wire import Ctrl, Entry, Hello, Mapping, Op
from tests.conformance.support import pattern

_DATA, _SGL, _CTRL = (op << 29 for op in (Op.DATA, Op.SGL, Op.CTRL))


class End:
    """One end with its memory, what it sends, and what was placed in its memory and not looked at yet."""

    def __init__(self, base: int, lengths: list[int], sgl_length: int, rq_size: int, sq_size: int, iwarp: bool) -> None:
        layout = Layout(lengths, sgl_length=sgl_length, iomap_length=2)
        self.memory = bytearray(layout.size)
        self.base = base
        self.rkey = base + 1
        self.protocol = StreamProtocol(
            memoryview(self.memory), base, self.rkey, layout, rq_size=rq_size, sq_size=sq_size, iwarp=iwarp
        )
        self.to_send = b""
        self.sent = 0
        self.got = bytearray()
        #: Posted, not placed; and placed at the peer, its message not processed.
        self.posted: deque[tuple[Post, bytes]] = deque()
        self.placed: deque[Post] = deque()
        self.rq_size = rq_size

    def post(self) -> bool:
        """Post what can be: control messages first, then some data."""
        moved = False
        while self.protocol.due and (control := self.protocol.control()) is not None:
            self.posted.append((control, control.payload))
            moved = True
        left = len(self.to_send) - self.sent
        room = self.protocol.room
        if left and room:
            length = min(left, room, 1 + (self.sent * 7919) % 300)
            data = self.to_send[self.sent : self.sent + length]
            self.posted.append((self.protocol.data(length), data))
            self.sent += length
            return True
        return moved

    def place(self, peer: End) -> bool:
        """The device writes the oldest post's bytes to the peer's memory, and completes it."""
        if not self.posted:
            return False
        post, payload = self.posted.popleft()
        if payload:
            assert post.rkey == peer.rkey
            start = post.remote_addr - peer.base
            assert 0 <= start <= start + len(payload) <= len(peer.memory)
            peer.memory[start : start + len(payload)] = payload
        self.placed.append(post)
        assert len(self.placed) <= peer.rq_size + CONTROL_SLOTS + 4
        self.protocol.completed(not post.control, post.control)
        return True

    def process(self, peer: End) -> bool:
        """The peer takes the oldest message."""
        if not self.placed:
            return False
        peer.protocol.receive(self.placed.popleft().message)
        return True

    def read(self, most: int) -> bool:
        """The program reads some bytes."""
        start, length = self.protocol.readable()
        length = min(length, most)
        if not length:
            return False
        self.got += self.memory[start : start + length]
        self.protocol.consume(length)
        return True


def joined(a: End, b: End) -> None:
    """Exchange the private data."""
    a.protocol.start(Hello.from_bytes(b.protocol.hello().to_bytes()))
    b.protocol.start(Hello.from_bytes(a.protocol.hello().to_bytes()))


ENDS = st.tuples(
    st.lists(st.integers(1, 900), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 40), st.integers(2, 24)
)


@settings(max_examples=300)
@given(ENDS, ENDS, st.booleans(), st.integers(0, 5000), st.integers(0, 5000), st.lists(st.integers(0, 7), max_size=400))
def test_any_schedule(
    first: tuple[list[int], int, int, int],
    second: tuple[list[int], int, int, int],
    iwarp: bool,
    there: int,
    back: int,
    schedule: list[int],
) -> None:
    """Nothing is lost, repeated or reordered, no credit or segment exceeded, and it never comes to a stop."""
    a, b = End(1 << 20, *first, iwarp), End(1 << 30, *second, iwarp)
    joined(a, b)
    a.to_send, b.to_send = pattern(there, 1), pattern(back, 2)
    for step in schedule:
        one, other = (a, b) if step & 1 else (b, a)
        if step >> 1 == 0:
            one.post()
        elif step >> 1 == 1:
            one.place(other)
        elif step >> 1 == 2:
            one.process(other)
        else:
            one.read(64)
    drain(a, b, reading=True)
    assert bytes(a.got) == b.to_send
    assert bytes(b.got) == a.to_send


def pair_of_ends(
    lengths: tuple[int, ...] = (64, 64), *, sgl_length: int = 2, rq_size: int = 8, iwarp: bool = False
) -> tuple[End, End]:
    """Two ends, connected."""
    a, b = (End(base, list(lengths), sgl_length, rq_size, 64, iwarp) for base in (1 << 20, 1 << 30))
    joined(a, b)
    return a, b


def drain(a: End, b: End, *, reading: bool = False) -> None:
    """Let everything arrive."""
    moved = True
    while moved:
        moved = False
        for one, other in ((a, b), (b, a)):
            moved |= one.post() | one.place(other) | one.process(other) | (reading and one.read(1 << 20))


def test_hello_on_the_wire() -> None:
    """The private data has the layout that rdma-core's has."""
    hello = Hello(
        order="little", credits=384, sgl_addr=0x1122334455667788, sgl_rkey=0xAABBCCDD, sgl_length=2,
        iomap_length=0x300, first=Entry(0x0102030405060708, 0x11121314, 65536),
    )  # fmt: skip
    fields = "01 02 0180 000000 83 1122334455667788 aabbccdd 00000002 0102030405060708 11121314 00010000"
    assert hello.to_bytes() == bytes.fromhex(fields)
    assert Hello.from_bytes(hello.to_bytes() + bytes(16)) == hello


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 2}, "version 1: its private data says 2"),
        ({20: 0, 21: 0, 22: 0, 23: 0}, "no entries"),
        ({8: 0xFF, 9: 0xFF, 10: 0xFF, 11: 0xFF, 20: 0xFF}, "isn't memory"),
    ],
)
def test_a_hello_that_lies(change: dict[int, int], message: str) -> None:
    """Another version, a ring without entries, and one beyond the address space are refused."""
    data = bytearray(pair_of_ends()[0].protocol.hello().to_bytes())
    data[12:16] = b"\xff" * 4
    for index, value in change.items():
        data[index] = value
    with pytest.raises(ProtocolError, match=message):
        Hello.from_bytes(bytes(data))
    with pytest.raises(ProtocolError, match="39 bytes"):
        Hello.from_bytes(bytes(data[:39]))


def test_messages_as_rdma_core_sends_them() -> None:
    """20 bytes, the grant of what was read, SHUTDOWN, DISCONNECT: the words that were seen on the wire."""
    a, b = pair_of_ends((20, 20), rq_size=384)
    drain(a, b)
    data = a.protocol.data(20)
    assert data.message == 0x00000014
    b.protocol.receive(data.message)
    b.read(20)
    grant = b.protocol.control()
    assert grant is not None
    assert (grant.message, len(grant.payload)) == (0x80000000 | 385, 16)
    a.protocol.shutdown()
    a.protocol.disconnect()
    end = a.protocol.control()
    assert end is not None
    assert end.message == 0xE0000000
    b.protocol.shutdown()
    end = b.protocol.control()
    assert end is not None
    assert end.message == 0xE0000002


@pytest.mark.parametrize("sgl_length", [1, 2, 3, 7])
def test_segments_go_out_as_far_as_the_peer_has_entries(sgl_length: int) -> None:
    """At first the one of the private data counts; the second entry of the ring is written first."""
    a, b = pair_of_ends((10, 20, 30), sgl_length=sgl_length)
    posts = []
    while (post := b.protocol.control()) is not None:
        posts.append(post)
    assert len(posts) == min(3, sgl_length) - 1
    for number, post in enumerate(posts, 1):
        assert post.remote_addr == a.base + 16 * number
        assert int.from_bytes(post.payload[12:], sys.byteorder) == (10, 20, 30)[number]


def test_entries_in_the_byte_order_of_whose_memory_it_is() -> None:
    """An entry for a big-endian peer is written big-endian."""
    a, b = (End(base, [64, 64], 2, 8, 64, False) for base in (1 << 20, 1 << 30))
    hello = bytearray(a.protocol.hello().to_bytes())
    hello[1] |= 1
    b.protocol.start(Hello.from_bytes(bytes(hello)))
    post = b.protocol.control()
    assert post is not None
    assert post.payload[12:] == (64).to_bytes(4, "big")


def test_credits_of_a_peer_that_does_not_read() -> None:
    """A receive queue of 32 takes exactly 32 messages of one byte; on iWARP six are left for control messages."""
    for iwarp, messages in ((False, 32), (True, 26)):
        a, b = pair_of_ends((4096, 4096), rq_size=32, iwarp=iwarp)
        drain(a, b)
        count = 0
        while a.protocol.room:
            a.protocol.data(1)
            a.protocol.completed(1, 0)
            count += 1
        assert count == messages


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (_DATA | 0, "DATA of 0 bytes"),
        (_DATA | 65, "DATA of 65 bytes, and its segment has room for 64"),
        (1 << 29, "reserved opcode 1"),
        (3 << 29, "reserved opcode 3"),
        (5 << 29, "reserved opcode 5"),
        (Op.IOMAP << 29 | 2, "mapped entry 2 of 2"),
    ],
)
def test_forbidden_messages(message: int, text: str) -> None:
    """A message that the protocol forbids is an error that says which."""
    _, b = pair_of_ends()
    with pytest.raises(ProtocolError, match=text):
        b.protocol.receive(message)


def test_more_data_than_credits() -> None:
    """The ninth message of a peer that had eight credits is an error."""
    _, b = pair_of_ends(rq_size=8)
    for _ in range(8):
        b.protocol.receive(_DATA | 1)
    with pytest.raises(ProtocolError, match="the 8 it had credits for"):
        b.protocol.receive(_DATA | 1)


def test_data_into_a_segment_that_was_not_published() -> None:
    """Data beyond the published segments is an error, however small."""
    _, b = pair_of_ends((64, 64))
    b.protocol.receive(_DATA | 64)
    with pytest.raises(ProtocolError, match="DATA of 1 bytes"):
        b.protocol.receive(_DATA | 1)


def test_ignored_messages() -> None:
    """Keep-alive, a message of the tag that is never sent, and controls that don't exist yet do nothing."""
    _, b = pair_of_ends()
    for message in (_CTRL | Ctrl.KEEPALIVE, Op.WRITE << 29 | 5, _CTRL | 9):
        b.protocol.receive(message)
    assert (b.protocol.unread, b.protocol.eof, b.protocol.disconnected) == (0, False, False)


def test_half_close() -> None:
    """SHUTDOWN ends one direction; the other one's SHUTDOWN then is a DISCONNECT, and ends both."""
    a, b = pair_of_ends()
    a.to_send = b"last"
    drain(a, b)
    a.protocol.shutdown()
    drain(a, b)
    assert b.protocol.eof
    assert not b.protocol.disconnected
    b.read(4)
    assert b.got == b"last"
    b.to_send = b"answer"
    drain(a, b)
    b.protocol.shutdown()
    drain(a, b)
    a.read(6)
    assert a.got == b"answer"
    assert a.protocol.eof
    assert a.protocol.disconnected


def test_data_after_a_shutdown_is_tolerated() -> None:
    """rdma-core may send DATA after its SHUTDOWN."""
    _, b = pair_of_ends()
    b.protocol.receive(_CTRL | Ctrl.SHUTDOWN)
    b.protocol.receive(_DATA | 4)
    assert b.protocol.unread == 4


def test_a_disconnected_end_sends_nothing() -> None:
    """After the peer's DISCONNECT there is no room, and no control message."""
    _, b = pair_of_ends()
    b.protocol.receive(_CTRL | Ctrl.DISCONNECT)
    assert b.protocol.room == 0
    b.protocol.shutdown()
    assert b.protocol.control() is None


def test_control_messages_wait_for_a_place() -> None:
    """Four may be on their way; the next one waits until one completes."""
    a, b = pair_of_ends((8, 8, 8, 8, 8, 8), sgl_length=6)
    posts = []
    while (post := a.protocol.control()) is not None:
        posts.append(post)
    assert len(posts) == CONTROL_SLOTS
    a.protocol.completed(0, 1)
    assert a.protocol.control() is not None
    assert a.protocol.control() is None
    assert b.protocol.control() is not None


def test_mappings() -> None:
    """A mapped region is found at its offset by the peer; a table that is full, and a hole, are errors."""
    a, b = pair_of_ends(rq_size=40)
    for offset in (0, 1000):
        assert a.protocol.map(Mapping(offset, 0x5000 + offset, 7, 100)) == offset // 1000
    with pytest.raises(ValueError, match="takes 2 mappings"):
        a.protocol.map(Mapping(9, 9, 9, 9))
    drain(a, b)
    assert b.protocol.mapped(1010, 90) == (0x5000 + 1010, 7)
    with pytest.raises(ValueError, match="no region mapped at 1010"):
        b.protocol.mapped(1010, 91)
