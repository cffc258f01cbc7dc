"""What a peer breaks, and the Terminate that answers it: layer, type and code as the RFCs name them."""
# ruff: noqa: ARG005 - each case is given its target

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiordma.drivers.soft import ddp, mpa
from aiordma.drivers.soft.mpa import Framer
from aiordma.enums import Access, AsyncEventType, Opcode, QPState, WCStatus
from aiordma.types import SGE
from tests.unit.wire import (
    End,
    Memory,
    Terminated,
    agreed,
    atomic_request,
    fpdu,
    read_request,
    tagged,
    untagged,
)

TOP = (1 << 64) - 8


class Target:
    """A responder with memory of every kind."""

    def __init__(self, *, ird: int = 4, crc: bool = False) -> None:
        self.end = End()
        self.all = self.end.memory(64, addr=0x1000)
        self.none = self.end.memory(64, Access.LOCAL_WRITE, addr=0x2000)
        self.foreign = self.end.memory(64, addr=0x3000, pd=object())
        self.top = self.end.memory(8, addr=TOP)
        self.inbox = self.end.memory(16, Access.LOCAL_WRITE, addr=0x4000)
        self.end.receive(self.inbox.sge())
        self.end.endpoint.start(agreed(ird=ird, crc=crc), initiator=False, mulpdu=1000)

    @property
    def memories(self) -> list[Memory]:
        return [self.all, self.none, self.foreign, self.top, self.inbox]


def key(name: str) -> Callable[[Target], Memory]:
    """Name a memory of the target."""

    def find(target: Target) -> Memory:
        memory: Memory = getattr(target, name)
        return memory

    return find


UNKNOWN = 0
SEND, READ, WRITE = ddp.OP_SEND, ddp.OP_READ_REQUEST, ddp.OP_WRITE

#: What is sent, and the code that must answer it (RFC 5040 section 4.8, RFC 5041 section 7).
CASES: dict[str, tuple[Callable[[Target], bytes], tuple[int, int, int]]] = {
    "write: unknown key": (lambda t: tagged(WRITE, UNKNOWN, 0x1000, b"x"), (1, 1, 0)),
    "write: below the region": (lambda t: tagged(WRITE, t.all.key, 0xFFF, b"x"), (1, 1, 1)),
    "write: across the region's end": (lambda t: tagged(WRITE, t.all.key, 0x103F, b"xy"), (1, 1, 1)),
    "write: other domain": (lambda t: tagged(WRITE, t.foreign.key, 0x3000, b"x"), (1, 1, 2)),
    "write: offset wraps": (lambda t: tagged(WRITE, t.top.key, TOP, b"x" * 9), (1, 1, 3)),
    "write: no right": (lambda t: tagged(WRITE, t.none.key, 0x2000, b"x"), (0, 1, 2)),
    "write: not last": (lambda t: tagged(WRITE, UNKNOWN, 0, b"x", control=ddp.TAGGED), (1, 1, 0)),
    "write: DDP version 0": (lambda t: tagged(WRITE, t.all.key, 0x1000, b"x", control=0xC040), (1, 1, 4)),
    "write: DDP version 2": (lambda t: tagged(WRITE, t.all.key, 0x1000, b"x", control=0xC240), (1, 1, 4)),
    "write: RDMAP version 0": (lambda t: tagged(WRITE, t.all.key, 0x1000, b"x", control=0xC100), (0, 2, 5)),
    "write: RDMAP version 3": (lambda t: tagged(WRITE, t.all.key, 0x1000, b"x", control=0xC1C0), (0, 2, 5)),
    "write: untagged": (lambda t: untagged(WRITE, b"x"), (0, 2, 6)),
    "send: tagged": (lambda t: tagged(SEND, t.all.key, 0x1000, b"x"), (0, 2, 6)),
    "send: queue 1": (lambda t: untagged(SEND, b"x", qn=1), (1, 2, 1)),
    "send: queue 4": (lambda t: untagged(SEND, b"x", qn=4), (1, 2, 1)),
    "send: sequence 0": (lambda t: untagged(SEND, b"x", msn=0), (1, 2, 3)),
    "send: sequence 2": (lambda t: untagged(SEND, b"x", msn=2), (1, 2, 3)),
    "send: offset 4": (lambda t: untagged(SEND, b"x", mo=4), (1, 2, 4)),
    "send: DDP version 0": (lambda t: untagged(SEND, b"x", control=0x4040), (1, 2, 6)),
    "send: RDMAP version 2": (lambda t: untagged(SEND, b"x", control=0x4180), (0, 2, 5)),
    "send: longer than the receive": (lambda t: untagged(SEND, b"x" * 17), (1, 2, 5)),
    "send: the next segment at a wrong offset": (
        lambda t: untagged(SEND, b"1234", control=ddp.UNTAGGED) + untagged(SEND, b"x", mo=5), (1, 2, 4),
    ),
    "send: its invalidate has an unknown key": (
        lambda t: untagged(ddp.OP_SEND_INV, b"x", invalidate=UNKNOWN), (0, 1, 9),
    ),
    "send: its invalidate has a key of another domain": (
        lambda t: untagged(ddp.OP_SEND_SE_INV, b"x", invalidate=t.foreign.key), (0, 1, 9),
    ),
    "read: unknown key": (lambda t: read_request(UNKNOWN, 0x1000, 1), (0, 1, 0)),
    "read: below the region": (lambda t: read_request(t.all.key, 0xFFF, 1), (0, 1, 1)),
    "read: across the region's end": (lambda t: read_request(t.all.key, 0x1000, 65), (0, 1, 1)),
    "read: 4 GiB": (lambda t: read_request(t.all.key, 0x1000, ddp.MASK32), (0, 1, 1)),
    "read: no right": (lambda t: read_request(t.none.key, 0x2000, 1), (0, 1, 2)),
    "read: other domain": (lambda t: read_request(t.foreign.key, 0x3000, 1), (0, 1, 3)),
    "read: offset wraps": (lambda t: read_request(t.top.key, TOP, 9), (0, 1, 4)),
    "read: queue 0": (lambda t: read_request(t.all.key, 0x1000, 1, qn=0), (1, 2, 1)),
    "read: sequence 2": (lambda t: read_request(t.all.key, 0x1000, 1, msn=2), (1, 2, 3)),
    "read: the same sequence again": (
        lambda t: read_request(t.all.key, 0x1000, 1) + read_request(t.all.key, 0x1000, 1), (1, 2, 3),
    ),
    "read: offset 4": (lambda t: read_request(t.all.key, 0x1000, 1, mo=4), (1, 2, 4)),
    "read: not last": (lambda t: read_request(t.all.key, 0x1000, 1, control=ddp.UNTAGGED), (1, 2, 4)),
    "read: header too long": (lambda t: untagged(READ, bytes(29), qn=1), (1, 2, 5)),
    "read: the fifth of four": (
        lambda t: b"".join(read_request(t.all.key, 0x1000, 1, msn=n) for n in range(1, 6)), (1, 2, 2),
    ),
    "read response: nothing was read": (lambda t: tagged(ddp.OP_READ_RESPONSE, 1, 0), (0, 2, 6)),
    "atomic: unknown key": (lambda t: atomic_request(UNKNOWN, 0x1000), (0, 1, 0)),
    "atomic: bounds": (lambda t: atomic_request(t.all.key, 0x1040), (0, 1, 1)),
    "atomic: no right": (lambda t: atomic_request(t.none.key, 0x2000), (0, 1, 2)),
    "atomic: other domain": (lambda t: atomic_request(t.foreign.key, 0x3000), (0, 1, 3)),
    "atomic: not aligned": (lambda t: atomic_request(t.all.key, 0x1004), (0, 2, 7)),
    "atomic: unknown operation": (lambda t: atomic_request(t.all.key, 0x1000, operation=1), (0, 2, 6)),
    "atomic: queue 0": (lambda t: atomic_request(t.all.key, 0x1000, qn=0), (1, 2, 1)),
    "atomic: sequence 3": (lambda t: atomic_request(t.all.key, 0x1000, msn=3), (1, 2, 3)),
    "atomic: header too long": (lambda t: untagged(ddp.OP_ATOMIC_REQUEST, bytes(53), qn=1), (1, 2, 5)),
    "atomic: header too short": (lambda t: untagged(ddp.OP_ATOMIC_REQUEST, bytes(51), qn=1), (1, 2, 4)),
    "atomic: the fifth of four": (
        lambda t: b"".join(atomic_request(t.all.key, 0x1000, msn=n) for n in range(1, 6)), (1, 2, 2),
    ),
    "atomic response: none was asked for": (
        lambda t: untagged(ddp.OP_ATOMIC_RESPONSE, bytes(12), qn=3), (0, 2, 6),
    ),
    "atomic response: queue 0": (lambda t: untagged(ddp.OP_ATOMIC_RESPONSE, bytes(12)), (1, 2, 1)),
    "immediate: 9 bytes": (lambda t: untagged(ddp.OP_IMMEDIATE, bytes(9)), (1, 2, 5)),
    "immediate: sequence 2": (lambda t: untagged(ddp.OP_IMMEDIATE, bytes(8), msn=2), (1, 2, 3)),
    "immediate: within a send": (
        lambda t: untagged(SEND, b"", control=ddp.UNTAGGED) + untagged(ddp.OP_IMMEDIATE, bytes(8)), (0, 2, 6),
    ),
    "terminate: queue 0": (lambda t: untagged(ddp.OP_TERMINATE, bytes(4)), (1, 2, 1)),
    "opcode 12": (lambda t: untagged(12, b"x"), (0, 2, 6)),
    "opcode 15, tagged": (lambda t: tagged(15, t.all.key, 0x1000), (0, 2, 6)),
    "shorter than any tagged header": (lambda t: fpdu(b"\xc1\x40" + bytes(11)), (1, 1, 1)),
    "shorter than any untagged header": (lambda t: fpdu(b"\x41\x43" + bytes(11)), (1, 2, 4)),
    "a byte shorter than a send's header": (
        lambda t: fpdu(b"\x41\x43" + bytes(8) + b"\0\0\0\1" + bytes(3)),
        (1, 2, 4),
    ),
    "shorter than an untagged header": (lambda t: fpdu(b"\x41\x43" + bytes(14)), (1, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_code(name: str) -> None:
    """Each fault ends the stream by the Terminate the RFC names, reports it once, and changes no memory."""
    build, expected = CASES[name]
    target = Target()
    before = [memory.content for memory in target.memories]
    target.end.feed(build(target))
    assert target.end.endpoint.state is QPState.ERR
    assert target.end.terminated() == Terminated(*expected)
    assert [event for event, _ in target.end.reports] == [AsyncEventType.QP_ACCESS_ERR]
    after = [memory.content for memory in target.memories]
    if name.startswith(("send: ", "immediate")):  # may have reached its receive, nothing else
        before[-1] = after[-1]
    if name == "atomic: the fifth of four":
        before[0] = ddp.NATIVE_U64.pack(4) + before[0][8:]
    assert after == before


@pytest.mark.parametrize("name", CASES)
def test_code_byte_by_byte(name: str) -> None:
    """The same faults are answered by the same Terminate when each byte comes alone."""
    build, expected = CASES[name]
    target = Target()
    carry = b""
    for byte in build(target):
        carry += bytes((byte,))
        placement = target.end.endpoint.placement
        if placement is not None:
            placement.views[0][:1] = carry
            target.end.endpoint.placed(1)
            carry = b""
            continue
        done = target.end.endpoint.receive(memoryview(bytearray(carry)), len(carry))
        carry = carry[done:]
    assert target.end.terminated() == Terminated(*expected)


@pytest.mark.skipif(not mpa.CRC32C_AVAILABLE, reason="needs the package crc32c")
def test_crc() -> None:
    """A wrong CRC ends the stream by an MPA error, and nothing of the FPDU is placed or delivered."""
    target = Target(crc=True)
    framer = Framer(crc=True, markers=False)
    good = b"".join(framer.frame([tagged(WRITE, target.all.key, 0x1000, b"good")]))
    bad = bytearray(b"".join(framer.frame([tagged(WRITE, target.all.key, 0x1004, b"bad")])))
    bad[17] ^= 1
    target.end.feed(good + bytes(bad))
    assert target.end.terminated() == Terminated(2, 0, 2)
    assert target.all.content == b"good" + bytes(60)
    assert target.end.reports[0][0] is AsyncEventType.QP_FATAL


@pytest.mark.skipif(not mpa.CRC32C_AVAILABLE, reason="needs the package crc32c")
@pytest.mark.parametrize("right", [True, False])
def test_crc_of_a_short_fpdu(right: bool) -> None:
    """An FPDU too short for a header is believed to be that only when its CRC is here, and right."""
    target = Target(crc=True)
    short = bytearray(b"".join(Framer(crc=True, markers=False).frame([fpdu(b"\xc1\x40" + bytes(3))])))
    if not right:
        short[5] ^= 1
    assert target.end.endpoint.receive(memoryview(short), len(short) - 1) == 0
    assert target.end.endpoint.state is QPState.RTS
    target.end.feed(bytes(short))
    assert target.end.terminated() == (Terminated(1, 1, 1) if right else Terminated(2, 0, 2))


def test_headers_of_a_refused_write() -> None:
    """The Terminate carries the length and the DDP header of the FPDU it refuses."""
    target = Target()
    write = tagged(WRITE, 0xDEADBE00, 0x1000, b"payload")
    target.end.feed(write)
    (answer,) = target.end.output()
    assert answer[20:-4] == bytes.fromhex("1100c000") + write[:16]


def test_headers_of_a_refused_read() -> None:
    """The Terminate carries the Read Request's header too, and its flag."""
    target = Target()
    request = read_request(UNKNOWN, 0x1000, 5)
    target.end.feed(request)
    (answer,) = target.end.output()
    assert answer[20 : 2 + int.from_bytes(answer[:2], "big")] == bytes.fromhex("0100e000") + request[:48]
    assert answer[:20] == bytes.fromhex("0046 4147 00000000 00000002 00000001 00000000")


@pytest.mark.skipif(not mpa.CRC32C_AVAILABLE, reason="needs the package crc32c")
def test_no_headers_for_mpa() -> None:
    """A Terminate of the layer below carries no header: what can't be trusted isn't quoted."""
    target = Target(crc=True)
    target.end.feed(tagged(WRITE, target.all.key, 0x1000, b"1234"))
    (answer,) = target.end.output()
    assert answer[20:-4] == bytes.fromhex("20020000")


def test_nothing_follows() -> None:
    """After its Terminate an endpoint neither processes what comes nor sends what is posted."""
    target = Target()
    target.end.feed(tagged(WRITE, UNKNOWN, 0, b"x"))
    target.end.feed(tagged(WRITE, target.all.key, 0x1000, b"late") + read_request(target.all.key, 0x1000, 1))
    target.end.send(b"late")
    assert target.all.content == bytes(64)
    assert len(target.end.output()) == 1
    assert [c[1] for c in target.end.sent()] == [WCStatus.WR_FLUSH_ERR]


def test_what_was_queued_before_still_leaves() -> None:
    """Answers and sends from before the fault go out ahead of the Terminate, but none from user memory."""
    target = Target()
    end = target.end
    end.feed(read_request(target.all.key, 0x1000, 3))
    end.send(b"before")
    large = end.memory(100_000, addr=0x9_0000)
    end.post(Opcode.SEND, [large.sge()])
    end.send(b"behind it")
    end.feed(tagged(WRITE, UNKNOWN, 0, b"x"))
    opcodes = [record[3] & 0xF for record in end.output()]
    assert opcodes == [ddp.OP_READ_RESPONSE, SEND, ddp.OP_TERMINATE]
    assert [c[1] for c in end.sent()] == [0, WCStatus.WR_FLUSH_ERR, WCStatus.WR_FLUSH_ERR]


def test_an_fpdu_begun_is_finished() -> None:
    """An FPDU that left in part is sent to its end, from memory that the user may have changed meanwhile."""
    target = Target()
    end = target.end
    end.feed(tagged(WRITE, 0, 0))
    large = end.memory(b"\x01" * 5000, addr=0x9_0000)
    end.post(Opcode.SEND, [large.sge()])
    outbox = end.endpoint.outbox
    end.endpoint.fill()
    whole = b"".join(outbox.made[0])
    outbox.made[0] = (memoryview(whole)[:20][16:], memoryview(large.view)[: len(whole) - 24], whole[-4:])
    outbox.partial = True
    end.feed(tagged(WRITE, UNKNOWN, 0, b"x"))
    large.view[:] = b"\x02" * 5000
    rest, answer = end.output()
    assert rest == whole[16:]
    assert answer[3] & 0xF == ddp.OP_TERMINATE


class Reader:
    """A requester with one READ of 8 bytes outstanding, and one atomic behind it."""

    def __init__(self) -> None:
        self.end = End()
        self.end.endpoint.start(agreed(), initiator=True, mulpdu=1000)
        self.sink = self.end.memory(8, Access.LOCAL_WRITE, addr=0x1000)
        self.old = self.end.memory(8, Access.LOCAL_WRITE, addr=0x2000)
        self.end.post(Opcode.RDMA_READ, [self.sink.sge()])
        self.end.post(Opcode.ATOMIC_FETCH_AND_ADD, [self.old.sge()], compare_add=1)
        self.end.output()

    def response(self, data: bytes, *, key: int | None = None, to: int = 0x1000, last: bool = True) -> bytes:
        control = ddp.TAGGED_LAST if last else ddp.TAGGED
        return tagged(ddp.OP_READ_RESPONSE, self.sink.key if key is None else key, to, data, control=control)

    def atomic(self, request: int, *, msn: int = 1, mo: int = 0) -> bytes:
        payload = request.to_bytes(4, "big") + (7).to_bytes(8, "big")
        return untagged(ddp.OP_ATOMIC_RESPONSE, payload, qn=3, msn=msn, mo=mo)


RESPONSES: dict[str, tuple[Callable[[Reader], bytes], tuple[int, int, int]]] = {
    "other key": (lambda r: r.response(bytes(8), key=r.old.key), (1, 1, 0)),
    "other address": (lambda r: r.response(bytes(8), to=0x1001), (1, 1, 1)),
    "too long": (lambda r: r.response(bytes(9)), (1, 1, 1)),
    "too long, not last": (lambda r: r.response(bytes(9), last=False), (1, 1, 1)),
    "too short": (lambda r: r.response(bytes(7)), (1, 1, 1)),
    "empty": (lambda r: r.response(b""), (1, 1, 1)),
    "second segment elsewhere": (
        lambda r: r.response(bytes(4), last=False) + r.response(bytes(4), to=0x1000), (1, 1, 1),
    ),
    "second segment with another key": (
        lambda r: r.response(bytes(4), last=False) + r.response(bytes(4), key=1, to=0x1004), (1, 1, 0),
    ),
    "the whole again behind a first segment": (
        lambda r: r.response(bytes(4), last=False) + r.response(bytes(8)),
        (1, 1, 1),
    ),
    "a READ's, numbered as the atomic": (
        lambda r: r.response(bytes(8)) + r.response(bytes(8), key=2, to=0),
        (0, 2, 6),
    ),
    "an atomic's": (lambda r: r.atomic(2), (0, 2, 6)),
    "a READ's for the atomic": (lambda r: r.response(bytes(8)) + r.response(bytes(8)), (0, 2, 6)),
    "another atomic's": (lambda r: r.response(bytes(8)) + r.atomic(3), (0, 2, 6)),
    "an atomic's, sequence 2": (lambda r: r.response(bytes(8)) + r.atomic(2, msn=2), (1, 2, 3)),
    "an atomic's, offset 8": (lambda r: r.response(bytes(8)) + r.atomic(2, mo=8), (1, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESPONSES)
def test_response(name: str) -> None:
    """A response that fits no request ends the stream, flushes the requests and stays within their memory."""
    build, expected = RESPONSES[name]
    reader = Reader()
    reader.end.feed(build(reader))
    assert reader.end.terminated() == Terminated(*expected)
    statuses = [c[1] for c in reader.end.sent()]
    assert statuses in ([WCStatus.WR_FLUSH_ERR] * 2, [0, WCStatus.WR_FLUSH_ERR])
    assert reader.sink.content == reader.old.content == bytes(8)


def test_reserved_bits_are_ignored() -> None:
    """The bits that DDP and RDMAP reserve mean nothing on receipt."""
    target = Target()
    end = target.end
    end.feed(tagged(WRITE, target.all.key, 0x1000, b"word", control=ddp.TAGGED_LAST | 0x3C30))
    end.feed(read_request(target.all.key, 0x1000, 4, control=ddp.UNTAGGED_LAST | 0x3C30))
    end.feed(untagged(SEND, b"message", control=ddp.UNTAGGED_LAST | 0x3C30))
    assert end.endpoint.state is QPState.RTS
    assert end.output()[0][16:20] == b"word"
    assert [c[1:4] for c in end.received()] == [(0, 128, 7)]


def test_reserved_bits_of_a_response_are_ignored() -> None:
    """Those of a Read Response neither."""
    reader = Reader()
    control = ddp.TAGGED_LAST | 0x3C30
    reader.end.feed(tagged(ddp.OP_READ_RESPONSE, reader.sink.key, 0x1000, b"8 bytes!", control=control))
    assert reader.sink.content == b"8 bytes!"


def test_a_zero_length_write_is_not_checked() -> None:
    """STag and offset of an empty tagged message mean nothing (RFC 5040 section 5.1)."""
    target = Target()
    target.end.feed(tagged(WRITE, UNKNOWN, (1 << 64) - 1))
    assert target.end.endpoint.state is QPState.RTS


def test_a_zero_length_read_is_not_checked() -> None:
    """The source of an empty READ means nothing; its response is empty."""
    target = Target()
    target.end.feed(read_request(UNKNOWN, (1 << 64) - 1, 0))
    (answer,) = target.end.output()
    assert answer == tagged(ddp.OP_READ_RESPONSE, 0x51, 0x1000)


def test_an_answered_read_frees_its_place() -> None:
    """IRD bounds the READs that are not answered, not those ever received."""
    target = Target(ird=2)
    for msn in range(1, 20):
        target.end.feed(read_request(target.all.key, 0x1000, 1, msn=msn))
        assert len(target.end.output()) == 1
    assert target.end.endpoint.state is QPState.RTS


def test_region_deregistered_while_it_is_read() -> None:
    """A READ of a region that is deregistered halfway is ended by a Terminate."""
    end = End()
    source = end.memory(1 << 20)
    end.endpoint.start(agreed(), initiator=False, mulpdu=1000)
    end.feed(read_request(source.key, source.addr, 1 << 20))
    end.endpoint.fill()
    end.endpoint.outbox.left(10)
    source.region.close()
    assert end.terminated() == Terminated(0, 1, 0)


def test_a_fault_without_its_header() -> None:
    """An invalidate that fails behind a directly placed message is answered too, without a header."""
    end = End()
    end.endpoint.start(agreed(), initiator=True, mulpdu=65_518)
    inbox = end.memory(20_000)
    end.receive(inbox.sge())
    message = untagged(ddp.OP_SEND_INV, bytes(20_000), invalidate=UNKNOWN)
    half = memoryview(bytearray(message[:5000]))
    assert end.endpoint.receive(half, 5000) == 5000
    placement = end.endpoint.placement
    assert placement is not None
    end.endpoint.placed(placement.left)
    assert end.terminated() == Terminated(0, 1, 9)


def test_sge_of_the_failed_receive() -> None:
    """A receive whose memory isn't registered fails when its message comes: LOC_PROT_ERR, no Terminate."""
    end = End()
    end.endpoint.start(agreed(), initiator=True, mulpdu=1000)
    bad = end.receive(SGE(0, 8, 12345))
    other = end.receive()
    end.feed(untagged(SEND, b"x"))
    assert [c[:2] for c in end.received()] == [
        (bad.wr_id, WCStatus.LOC_PROT_ERR), (other.wr_id, WCStatus.WR_FLUSH_ERR),
    ]  # fmt: skip
    assert end.terminated() == (0, 0, 0)
    assert "LOC_PROT_ERR" in end.endpoint.refused


def test_answers_that_left_in_part_are_answers() -> None:
    """A peer has a large answer, and may ask for more, before the CRC field behind the payload has left."""
    end = End()
    source = end.memory(10_000, Access.REMOTE_READ)
    end.endpoint.start(agreed(ird=1), initiator=True, mulpdu=65_518)
    end.feed(read_request(source.key, source.addr, 10_000))
    end.endpoint.fill()
    outbox = end.endpoint.outbox
    *_, trailer = outbox.made[0]
    outbox.made[0] = (trailer,)
    outbox.partial = True
    end.feed(read_request(source.key, source.addr, 8, msn=2))
    assert not end.endpoint.refused
    end.feed(read_request(source.key, source.addr, 8, msn=3))
    assert end.endpoint.terminating
