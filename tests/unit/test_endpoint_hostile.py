"""Arbitrary bytes, and every header field driven to its extremes: nothing breaks but the stream."""

from __future__ import annotations

import mmap
import tracemalloc
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiordma.drivers.soft import ddp, mpa, runs
from aiordma.drivers.soft.mpa import RTR, Framer
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.drivers.soft.stag import Region
from aiordma.enums import Access, Opcode, QPState
from tests.unit.wire import (
    NO_RTR,
    End,
    Memory,
    Pipe,
    Terminated,
    agreed,
    atomic_request,
    read_request,
    tagged,
    untagged,
)

#: Layer, type and codes that a Terminate may have (RFC 5040 section 4.8, RFC 5044 section 8).
KNOWN = {
    (0, 1): {0, 1, 2, 3, 4, 9, 0xFF},
    (0, 2): {5, 6, 7, 8, 9, 0xFF},
    (1, 1): {0, 1, 2, 3, 4},
    (1, 2): {1, 2, 3, 4, 5, 6},
    (2, 0): {1, 2, 3},
}
BIG = COPY_LIMIT + 1000


class Victim:
    """An endpoint with a READ and an atomic outstanding, receives posted, and memory to attack."""

    def __init__(self, *, crc: bool = False, initiator: bool = True, rtr: RTR = NO_RTR, joined: bool = False) -> None:
        self.end = end = End()
        self.open = end.memory(2 * BIG, addr=0x10_0000)
        self.readable = end.memory(b"secret" * 10, Access.REMOTE_READ, addr=0x20_0000)
        self.closed = end.memory(b"private" * 10, Access.LOCAL_WRITE, addr=0x30_0000)
        self.foreign = end.memory(b"foreign" * 10, addr=0x40_0000, pd=object())
        self.sink = end.memory(48, Access.LOCAL_WRITE, addr=0x50_0000)
        self.inbox = end.memory(4 * BIG, Access.LOCAL_WRITE, addr=0x60_0000)
        end.endpoint.start(agreed(crc=crc, rtr=rtr), initiator=initiator, mulpdu=1000, joined=joined)
        end.post(Opcode.RDMA_READ, [self.sink.sge(0, 16), self.sink.sge(16, 16)])
        end.post(Opcode.ATOMIC_FETCH_AND_ADD, [self.sink.sge(32, 8)], compare_add=1)
        end.output()
        for index in range(3):
            end.receive(self.inbox.sge(index * BIG, BIG))

    def check(self, fed: int) -> Terminated | None:
        """Fail if anything happened that a peer may not cause; gives the Terminate, if there was one."""
        end = self.end
        assert self.readable.content == b"secret" * 10
        assert self.closed.content == b"private" * 10
        assert self.foreign.content == b"foreign" * 10
        assert self.open.content is not None
        assert self.inbox.content[3 * BIG :] == bytes(BIG)
        assert self.sink.content[40:] == bytes(8)
        queue = end.endpoint.receive_queue
        # A charge for each message, and no message takes less than 24 bytes of the wire.
        assert queue.kept_bytes <= fed + 128 * (fed // 24)
        statuses = [c[1] for c in end.sends.pending]
        assert len(statuses) <= 2
        failed = end.endpoint.state is QPState.ERR
        assert failed == bool(end.endpoint.refused)
        answer = end.terminated()
        if answer is not None:
            assert answer.code in KNOWN[answer.layer, answer.etype]
        if failed:
            assert end.endpoint.placement is None
            assert len(end.sends.pending) == 2
            assert len(end.recvs.pending) >= 3
        else:
            assert answer is None
            assert not end.reports
        return answer


class Field(NamedTuple):
    """A field of a header."""

    start: int
    size: int


PREFIX = [Field(0, 2), Field(2, 1), Field(3, 1), Field(2, 2)]
TAGGED = [*PREFIX, Field(4, 4), Field(8, 8)]
UNTAGGED = [*PREFIX, Field(4, 4), Field(8, 4), Field(12, 4), Field(16, 4)]
REQUEST = [*UNTAGGED, Field(20, 4), Field(24, 8), Field(32, 4), Field(36, 4), Field(40, 8)]
RUN = [*UNTAGGED, Field(20, 4), Field(24, 4), Field(28, 8)]
ATOMIC = [
    *UNTAGGED, Field(20, 4), Field(24, 4), Field(28, 4), Field(32, 8), Field(40, 8), Field(48, 8),
    Field(56, 8), Field(64, 8),
]  # fmt: skip
TERMINATE = [
    *UNTAGGED,
    Field(20, 1),
    Field(21, 1),
    Field(22, 1),
    Field(24, 2),
    Field(26, 2),
    Field(36, 4),
    Field(40, 4),
]


def valid(victim: Victim, *, joined: bool = False) -> list[tuple[bytes, list[Field]]]:
    """Give a stream with every kind of FPDU, all of them right, with their fields."""
    open_, sink = victim.open, victim.sink
    large = bytes(range(251)) * (BIG // 251)
    refused = read_request(1, 2, 3)[:48]
    return [
        (tagged(ddp.OP_WRITE, open_.key, open_.addr, b"written"), TAGGED),
        (tagged(ddp.OP_WRITE, open_.key, open_.addr + 8, large, control=ddp.TAGGED), TAGGED),
        (tagged(ddp.OP_WRITE, open_.key, open_.addr + 8 + len(large), b"end"), TAGGED),
        (untagged(ddp.OP_SEND, large, control=ddp.UNTAGGED), UNTAGGED),
        (untagged(ddp.OP_SEND, b"rest", mo=len(large)), UNTAGGED),
        (
            (runs.encode_request(1, 60, victim.readable.key, [victim.readable.addr]), RUN)
            if joined
            else (read_request(victim.readable.key, victim.readable.addr, 60), REQUEST)
        ),
        (atomic_request(open_.key, open_.addr, msn=2), ATOMIC),
        (tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr, bytes(20), control=ddp.TAGGED), TAGGED),
        (tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr + 20, bytes(12)), TAGGED),
        (
            untagged(ddp.OP_ATOMIC_RESPONSE, b"\0\0\0\2" + bytes(8), qn=3),
            [*UNTAGGED, Field(20, 4), Field(24, 8)],
        ),
        (untagged(ddp.OP_SEND_SE, b"solicited", msn=2), UNTAGGED),
        (tagged(ddp.OP_WRITE, 0, 0), TAGGED),
        (untagged(ddp.OP_IMMEDIATE_SE, bytes(8), msn=3), UNTAGGED),
        (untagged(ddp.OP_SEND, b"without a receive", msn=4), UNTAGGED),
        (untagged(ddp.OP_SEND, large, msn=5), UNTAGGED),
        (read_request(open_.key, open_.addr, 2 * BIG, msn=3), REQUEST),
        (untagged(ddp.OP_TERMINATE, bytes.fromhex("0100e000") + refused, qn=2), TERMINATE),
    ]


def feed(end: End, data: bytes, split: list[int]) -> Pipe:
    """Receive bytes, in pieces of the sizes in `split`, over and over."""
    pipe = Pipe(end.endpoint, end.endpoint)
    pipe.stream += data
    steps = 0
    while pipe.stream:
        size = split[steps % len(split)] if steps < 500 else 1 << 16
        steps += 1
        if not pipe.deliver(size):
            break
    return pipe


splits = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 5000), st.just(1 << 20)), min_size=1, max_size=8)
modest = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


@modest
@given(
    index=st.integers(0, len(valid(Victim())) - 1),
    field=st.integers(0, 100),
    value=st.one_of(
        st.sampled_from(["0", "1", "2", "max", "max-1", "top", "+1", "-1", "+4", "-4"]),
        st.integers(0, 1 << 64),
    ),
    split=splits,
    crc=st.booleans() if mpa.CRC32C_AVAILABLE else st.just(value=False),
    joined=st.booleans(),
)
def test_extremes(index: int, field: int, value: str | int, split: list[int], crc: bool, joined: bool) -> None:
    """One field of one header at an extreme: the stream goes on, or ends by a Terminate of the RFCs.

    The outcome doesn't depend on how the bytes are split.
    """
    outcomes = []
    complete = False
    for sizes in ([1 << 20], split):
        victim = Victim(crc=crc, joined=joined and not crc)
        records = valid(victim, joined=joined and not crc)
        record, fields = records[index]
        start, size = fields[field % len(fields)]
        changed = bytearray(record)
        old = int.from_bytes(record[start : start + size], "big")
        new = _extreme(value, old, (1 << 8 * size) - 1)
        changed[start : start + size] = new.to_bytes(size, "big")
        stream = [r for r, _ in records]
        stream[index] = bytes(changed)
        if crc:
            framer = Framer(crc=True, markers=False)
            stream = [b"".join(framer.frame([r])) if len(r) >= 8 else r for r in stream]
        data = b"".join(stream)
        pipe = feed(victim.end, data, sizes)
        state, placement = victim.end.endpoint.state, victim.end.endpoint.placement
        answer = victim.check(len(data))
        complete = placement is None and not pipe._carry
        outcomes.append((answer, state, *(_effects(victim) if complete else ())))
    if complete:
        assert outcomes[0] == outcomes[1]


def _extreme(value: str | int, old: int, most: int) -> int:
    named = {
        "0": 0, "1": 1, "2": 2, "max": most, "max-1": most - 1, "top": (most + 1) // 2, "+1": old + 1,
        "-1": old - 1, "+4": old + 4, "-4": old - 4,
    }  # fmt: skip
    return (named[value] if isinstance(value, str) else value) & most


def _effects(victim: Victim) -> tuple[object, ...]:
    """Give what the stream did, leaving out keys, which differ between victims."""
    end = victim.end
    return (
        [c[1:4] for c in end.received()],
        [c[1:3] for c in end.sent()],
        victim.open.content,
        victim.sink.content,
        victim.inbox.content,
        end.endpoint.receive_queue.kept_bytes,
    )


@modest
@given(
    data=st.lists(
        st.one_of(
            st.binary(max_size=100),
            st.builds(
                lambda length, control, rest: length.to_bytes(2, "big") + control + rest,
                st.one_of(st.integers(0, 80), st.integers(0, 0xFFFF)),
                st.builds(
                    lambda ddp_byte, rdmap_byte: bytes((ddp_byte, rdmap_byte)),
                    st.one_of(st.sampled_from([0x41, 0xC1, 0x01, 0x81]), st.integers(0, 255)),
                    st.one_of(st.integers(0x40, 0x4F), st.integers(0, 255)),
                ),
                st.binary(max_size=100),
            ),
        ),
        max_size=8,
    ),
    split=splits,
    initiator=st.booleans(),
    joined=st.booleans(),
)
def test_arbitrary_bytes(data: list[bytes], split: list[int], initiator: bool, joined: bool) -> None:
    """Arbitrary bytes after the handshake end the stream, or wait for more of the FPDU they began."""
    victim = Victim(initiator=initiator, rtr=RTR.SEND, joined=joined)
    stream = b"".join(data)
    feed(victim.end, stream, split)
    victim.check(len(stream))


@modest
@given(cut=st.integers(0, 20_000), crc=st.booleans() if mpa.CRC32C_AVAILABLE else st.just(value=False))
def test_the_stream_ends_anywhere(cut: int, crc: bool) -> None:
    """A stream that ends in the middle of anything flushes everything, and nothing is delivered in part."""
    victim = Victim(crc=crc)
    framer = Framer(crc=crc, markers=False)
    data = b"".join(b"".join(framer.frame([record])) for record, _ in valid(victim)[:-1])
    feed(victim.end, data[:cut], [777])
    end = victim.end
    end.endpoint.ended("the end")
    while end.endpoint.draining:
        end.receive(victim.inbox.sge(3 * BIG))
    assert end.endpoint.state is QPState.ERR
    assert len(end.sent()) == 2
    assert all(c[1] in (0, 5) for c in end.received())
    assert end.endpoint.send_queue.idle
    assert not end.endpoint.outbox


def test_lengths_allocate_nothing() -> None:
    """A READ of 1 GiB and an FPDU that claims 64 KiB cost what they bring, not what they say."""
    end = End()
    size = 1 << 30
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        region = Region(end.stags, end.pd, memory, 0x1_0000_0000, size, Access.REMOTE_READ)
        end.endpoint.start(agreed(), initiator=True, mulpdu=1000)
        tracemalloc.start()
        try:
            end.feed(read_request(region.rkey, region.addr, size))
            end.endpoint.fill()
            end.feed(untagged(ddp.OP_SEND, bytes(60_000))[:100])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert end.endpoint.outbox.queued > 1_000_000
        assert peak < 500_000
        end.endpoint.to_error()
        region.close()
        region.whole.release()


def test_kept_messages_are_bounded_by_what_came() -> None:
    """Messages without a receive stop the reading at the bound; empty ones are charged too."""
    end = End(recv_bound=10_000)
    end.endpoint.start(agreed(), initiator=True, mulpdu=1000)
    stream = b"".join(untagged(ddp.OP_SEND, msn=msn) for msn in range(1, 1000))
    pipe = feed(end, stream, [24])
    queue = end.endpoint.receive_queue
    assert queue.full
    assert queue.kept_bytes <= 10_000 + 128
    assert len(pipe.stream) > len(stream) * 9 // 10


def _memory(victim: Victim) -> list[Memory]:
    return [victim.open, victim.readable, victim.closed, victim.foreign, victim.sink, victim.inbox]


@pytest.mark.parametrize("joined", [False, True])
def test_the_valid_stream_is_valid(joined: bool) -> None:
    """What the tests above change one field of is right as it is."""
    victim = Victim(joined=joined)
    data = b"".join(record for record, _ in valid(victim, joined=joined)[:-1])
    feed(victim.end, data, [1 << 20])
    assert victim.end.endpoint.state is QPState.RTS
    assert [c[1] for c in victim.end.sent()] == [0, 0]
    assert len(victim.end.received()) == 3
    assert len(victim.end.output()) == 2 + -(-2 * BIG // 984)
    assert all(memory.content for memory in _memory(victim))
