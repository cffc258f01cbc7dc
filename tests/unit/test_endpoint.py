"""An endpoint from start to end: who may send when, sequence numbers, ORD, Terminate, the stream's end."""

from __future__ import annotations

import itertools

import pytest

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.mpa import RTR
from aiordma.enums import Access, AsyncEventType, Opcode, QPState, SendFlags, WCOpcode, WCStatus
from aiordma.types import SGE, SendWR
from tests.unit.wire import (
    NO_RTR,
    End,
    Terminated,
    Wire,
    agreed,
    atomic_request,
    read_request,
    tagged,
    untagged,
)

FLUSHED = WCStatus.WR_FLUSH_ERR


def started(*, initiator: bool = True, mulpdu: int = 1000, reads: int = 4, rtr: RTR = NO_RTR) -> End:
    """Make an endpoint in full operation."""
    end = End()
    end.endpoint.start(agreed(ird=reads, ord=reads, rtr=rtr), initiator=initiator, mulpdu=mulpdu)
    return end


# -- the first FPDU ------------------------------------------------------------------------------------------


def test_a_responder_holds_its_sends() -> None:
    """A responder sends nothing until it has received an FPDU (RFC 5044 section 7.1), then all in order."""
    end = started(initiator=False)
    end.send(b"first")
    end.post(Opcode.RDMA_READ)
    end.send(b"third")
    assert not end.output()
    assert not end.sent()
    end.feed(tagged(ddp.OP_WRITE, 0, 0))
    assert [record[3] & 0xF for record in end.output()] == [ddp.OP_SEND, ddp.OP_READ_REQUEST, ddp.OP_SEND]


def test_a_responder_still_answers_its_first_fpdu() -> None:
    """The first FPDU may be a Read Request: its response goes out ahead of the sends that were held."""
    end = started(initiator=False)
    end.send(b"held")
    end.feed(read_request(0, 0, 0))
    assert [record[3] & 0xF for record in end.output()] == [ddp.OP_READ_RESPONSE, ddp.OP_SEND]


def test_half_an_fpdu_is_not_the_first() -> None:
    """Sends are held until the whole first FPDU is here, also where its payload is placed as it comes."""
    end = started(initiator=False)
    target = end.memory(50_000)
    end.send(b"held")
    fpdu = tagged(ddp.OP_WRITE, target.key, target.addr, bytes(50_000))
    end.endpoint.receive(memoryview(bytearray(fpdu[:1000])), 1000)
    assert not end.output()
    placement = end.endpoint.placement
    assert placement is not None
    assert end.endpoint.placed(placement.left) == placement.tail
    assert len(end.output()) == 1


def test_a_responder_closed_unstarted() -> None:
    """Sends held for a first FPDU that never came are flushed."""
    end = started(initiator=False)
    end.send(b"held")
    end.endpoint.ended("gone")
    assert [c[1] for c in end.sent()] == [FLUSHED]
    assert not end.endpoint.outbox


@pytest.mark.parametrize(
    ("rtr", "opcode"), [(RTR.WRITE, ddp.OP_WRITE), (RTR.READ, ddp.OP_READ_REQUEST), (RTR.SEND, ddp.OP_SEND)]
)
def test_rtr_is_first_and_silent(rtr: RTR, opcode: int) -> None:
    """The ready-to-receive message is the initiator's first FPDU, and completes nothing on either side."""
    wire = Wire(rtr=rtr)
    wire.server.receive()
    wire.client.send(b"")
    (first, second) = wire.client.endpoint.outbox.small
    assert first[3] & 0xF == opcode
    assert second[3] & 0xF == ddp.OP_SEND
    wire.pump()
    assert wire.idle
    assert len(wire.client.sent()) == 1
    assert not wire.client.endpoint.send_queue.outstanding
    assert len(wire.server.received()) == 1


def test_rtr_write_bytes() -> None:
    """The zero-length Write is, byte for byte, the one siw sends."""
    end = started(rtr=RTR.WRITE)
    assert end.output() == [bytes.fromhex("000ec140 00000001 0000000000000000 00000000")]


def test_rtr_releases_a_responder() -> None:
    """A responder whose peer sends an RTR may send at once."""
    wire = Wire()
    wire.client.receive()
    wire.server.send(b"")
    wire.pump()
    assert len(wire.client.received()) == 1


def test_rtr_read_takes_a_place_of_ord() -> None:
    """The zero-length Read counts as outstanding until it is answered."""
    end = started(rtr=RTR.READ, reads=1)
    end.post(Opcode.RDMA_READ)
    assert len(end.output()) == 1
    end.feed(tagged(ddp.OP_READ_RESPONSE, 0, 0))
    assert [record[3] & 0xF for record in end.output()] == [ddp.OP_READ_REQUEST]


def test_an_empty_send_that_is_no_rtr() -> None:
    """Where no Send RTR was agreed on, an empty first Send is a message."""
    end = started(initiator=False, rtr=RTR.WRITE)
    end.receive()
    end.feed(untagged(ddp.OP_SEND))
    assert len(end.received()) == 1


def test_rtr_send_counts_as_a_message() -> None:
    """The Send RTR has sequence number 1: the program's first message has 2, an empty one too."""
    end = started(initiator=False, rtr=RTR.SEND)
    end.receive(end.memory(8).sge())
    end.feed(untagged(ddp.OP_SEND) + untagged(ddp.OP_SEND, msn=2))
    assert len(end.received()) == 1
    assert end.endpoint.receive_queue.drained
    assert end.endpoint.state is QPState.RTS


@pytest.mark.parametrize(("qn", "msn", "mo", "code"), [(0, 7, 0, 3), (1, 1, 0, 1), (0, 1, 4, 4)])
def test_rtr_send_is_checked(qn: int, msn: int, mo: int, code: int) -> None:
    """The Send RTR's header is checked as that of any Send."""
    end = started(initiator=False, rtr=RTR.SEND)
    end.feed(untagged(ddp.OP_SEND, qn=qn, msn=msn, mo=mo))
    assert end.terminated() == Terminated(1, 2, code)


# -- sequence numbers ----------------------------------------------------------------------------------------


def test_sequence_numbers_wrap() -> None:
    """Each queue's sequence number goes from 2**32 - 1 to 0, at both ends."""
    wire = Wire()
    target = wire.server.memory(16)
    wire.pump()
    before = ddp.MASK32 - 1
    near, far = wire.client.endpoint, wire.server.endpoint
    near.send_queue._send_msn = near.send_queue._request_msn = before
    far.receive_queue.msn = far.responder.request_msn = ddp.MASK32
    near._atomic_msn = ddp.MASK32
    far.responder.atomic_msn = before
    sink = wire.client.memory(8)
    for _ in range(3):
        wire.server.receive(target.sge())
        wire.client.send(b"")
        wire.client.post(Opcode.ATOMIC_FETCH_AND_ADD, [sink.sge()], to=target, compare_add=1)
        wire.client.post(Opcode.RDMA_READ, [sink.sge()], to=target)
        wire.server.receive()
        wire.client.post(Opcode.RDMA_WRITE_WITH_IMM, to=target)
        wire.pump()
    assert [c[1] for c in wire.client.sent()] == [0] * 12
    assert len(wire.server.received()) == 6
    assert far.receive_queue.msn == far.responder.request_msn == 5
    assert near._atomic_msn == 2


def test_sequence_wraps_to_zero_on_the_wire() -> None:
    """The sequence number behind 2**32 - 1 is 0, not 1."""
    end = started()
    end.endpoint.send_queue._send_msn = ddp.MASK32 - 1
    end.send(b"")
    end.send(b"")
    assert [record[12:16] for record in end.output()] == [b"\xff\xff\xff\xff", bytes(4)]


# -- bounds of what is outstanding ---------------------------------------------------------------------------


def test_ord_is_kept() -> None:
    """With ORD 2 a third READ waits for the first response, and what is behind it waits with it."""
    end = started(reads=2)
    sink = end.memory(1, Access.LOCAL_WRITE)
    for _ in range(3):
        end.post(Opcode.RDMA_READ, [sink.sge()])
    end.send(b"behind")
    assert len(end.output()) == 2
    end.feed(tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr, b"x"))
    assert [record[3] & 0xF for record in end.output()] == [ddp.OP_READ_REQUEST, ddp.OP_SEND]


def test_without_ord_nothing_is_read() -> None:
    """ORD 0: a READ fails, it isn't sent; the peer is told that this side ended the connection."""
    end = started(reads=0)
    end.post(Opcode.RDMA_READ)
    assert [c[1] for c in end.sent()] == [WCStatus.LOC_QP_OP_ERR]
    assert end.terminated() == (0, 0, 0)


def test_fence_waits_for_reads_and_atomics() -> None:
    """A fenced request is sent when every READ and atomic before it is answered."""
    end = started()
    sink = end.memory(8, Access.LOCAL_WRITE)
    end.post(Opcode.RDMA_READ, [sink.sge()])
    end.post(Opcode.ATOMIC_FETCH_AND_ADD, [sink.sge()])
    end.post(Opcode.SEND, flags=SendFlags.FENCE | SendFlags.SIGNALED)
    end.output()
    end.feed(tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr, bytes(8)))
    assert not end.output()
    end.feed(untagged(ddp.OP_ATOMIC_RESPONSE, b"\0\0\0\2" + bytes(8), qn=3))
    assert len(end.output()) == 1


def test_completions_in_post_order() -> None:
    """A send that left before a READ's response came completes after the READ."""
    end = started()
    sink = end.memory(1, Access.LOCAL_WRITE)
    read = end.post(Opcode.RDMA_READ, [sink.sge()])
    send = end.send(b"left at once")
    end.output()
    assert not end.sent()
    end.feed(tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr, b"x"))
    assert [c[0] for c in end.sent()] == [read.wr_id, send.wr_id]


def test_large_send_completes_when_it_left() -> None:
    """A send from user memory completes when its last FPDU was handed to TCP, not before."""
    end = started()
    memory = end.memory(50_000)
    end.post(Opcode.SEND, [memory.sge()])
    outbox = end.endpoint.outbox
    while outbox.queued - outbox.sent > 1:
        end.endpoint.fill()
        outbox.left(1)
        end.endpoint.send_queue.records_left()
    assert not end.sent()
    end.output()
    assert len(end.sent()) == 1


def test_copies_behind_a_full_socket() -> None:
    """Small sends complete at the post; behind a socket that takes no more, when they have left."""
    end = started()
    end.send(b"at once")
    assert len(end.sent()) == 1
    end.endpoint.outbox.blocked = True
    end.send(b"later")
    end.post(Opcode.RDMA_WRITE, inline=b"later too")
    assert not end.sent()
    end.output()
    assert [c[1] for c in end.sent()] == [0, 0]


# -- faults of this side's own requests ----------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_WRITE_WITH_IMM, Opcode.RDMA_READ])
@pytest.mark.parametrize("fault", ["key", "below", "above", "domain", "freed"])
def test_bad_local_memory(opcode: Opcode, fault: str) -> None:
    """A request whose local memory doesn't fit fails with LOC_PROT_ERR; what is behind it is flushed."""
    end = started()
    memory = end.memory(16, addr=0x1000, pd=object() if fault == "domain" else None)
    sge = {
        "key": SGE(0x1000, 16, 0xBAD),
        "below": SGE(0xFFF, 4, memory.key),
        "above": SGE(0x1001, 16, memory.key),
    }.get(fault, memory.sge())
    if fault == "freed":
        memory.region.close()
    bad = end.post(opcode, [sge])
    behind = end.send(b"")
    receive = end.receive()
    assert [c[:2] for c in end.sent()] == [(bad.wr_id, WCStatus.LOC_PROT_ERR), (behind.wr_id, FLUSHED)]
    assert [c[:2] for c in end.received()] == [(receive.wr_id, FLUSHED)]
    assert end.endpoint.state is QPState.ERR
    assert "LOC_PROT_ERR" in end.endpoint.refused


@pytest.mark.parametrize("opcode", [Opcode.RDMA_READ, Opcode.ATOMIC_CMP_AND_SWP])
def test_sink_without_local_write(opcode: Opcode) -> None:
    """A READ or atomic into memory without LOCAL_WRITE fails with LOC_PROT_ERR."""
    end = started()
    end.post(opcode, [end.memory(8, Access.REMOTE_READ).sge()])
    assert [c[1] for c in end.sent()] == [WCStatus.LOC_PROT_ERR]


@pytest.mark.parametrize("lengths", [[], [4], [16], [4, 4]])
def test_sink_of_an_atomic(lengths: list[int]) -> None:
    """An atomic's sink is one piece of 8 bytes, else LOC_LEN_ERR."""
    end = started()
    sink = end.memory(16, Access.LOCAL_WRITE)
    end.post(Opcode.ATOMIC_FETCH_AND_ADD, [sink.sge(0, length) for length in lengths])
    assert [c[1] for c in end.sent()] == [WCStatus.LOC_LEN_ERR]


def test_fault_of_a_request_that_waited() -> None:
    """A request that waited for ORD and turns out bad when its turn comes fails then, with its own status."""
    end = started(reads=1)
    sink = end.memory(1, Access.LOCAL_WRITE)
    first = end.post(Opcode.RDMA_READ, [sink.sge()])
    second = end.post(Opcode.RDMA_READ, [SGE(0, 1, 0xBAD)])
    third = end.send(b"")
    end.feed(tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr, b"x"))
    assert [c[:2] for c in end.sent()] == [
        (first.wr_id, 0), (second.wr_id, WCStatus.LOC_PROT_ERR), (third.wr_id, FLUSHED),
    ]  # fmt: skip


def test_a_list_with_a_bad_one() -> None:
    """Of a list, what is before the bad one is executed, and what is behind it is flushed."""
    end = started()
    bad = [SGE(0, 1, 0xBAD)]
    end.endpoint.post_send([SendWR(wr_id=1), SendWR(sg_list=bad, wr_id=2), SendWR(wr_id=3), SendWR(wr_id=4)])
    assert [c[:2] for c in end.sent()] == [(1, 0), (2, WCStatus.LOC_PROT_ERR), (3, FLUSHED), (4, FLUSHED)]


def test_what_completed_still_leaves() -> None:
    """A send that completed with success is handed to TCP, though the request behind it fails at once."""
    end = started()
    end.send(b"completed")
    end.post(Opcode.SEND, [SGE(0, 1, 0xBAD)])
    assert [c[1] for c in end.sent()] == [0, WCStatus.LOC_PROT_ERR]
    sent, terminate = end.output()
    assert sent[20:29] == b"completed"
    assert terminate[3] & 0xF == ddp.OP_TERMINATE


def test_local_invalidate() -> None:
    """LOCAL_INV ends a region of this domain; of an unknown key or another domain it fails."""
    end = started()
    region = end.memory(8)
    end.post(Opcode.LOCAL_INV, to=region)
    assert not region.region.registered
    end.post(Opcode.LOCAL_INV, to=end.memory(8, pd=object()))
    assert [c[1:3] for c in end.sent()] == [(0, WCOpcode.LOCAL_INV), (WCStatus.LOC_PROT_ERR, 0)]


# -- the peer's Terminate, and the end -----------------------------------------------------------------------


def answered(end: End, payload: bytes) -> None:
    """Let the peer's Terminate come."""
    end.output()
    end.feed(untagged(ddp.OP_TERMINATE, payload, qn=2))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ((0, 1, 0), WCStatus.REM_ACCESS_ERR),
        ((0, 1, 2), WCStatus.REM_ACCESS_ERR),
        ((0, 2, 7), WCStatus.REM_INV_REQ_ERR),
        ((1, 2, 2), WCStatus.REM_INV_REQ_ERR),
        ((0, 2, 6), WCStatus.REM_OP_ERR),
    ],
)
def test_terminate_fails_what_it_refuses(code: tuple[int, int, int], status: WCStatus) -> None:
    """A Terminate that quotes a Read Request fails that one, with the reason; the others are flushed."""
    end = started()
    wrs = [end.post(Opcode.RDMA_READ) for _ in range(3)]
    answered(end, bytes((code[0] << 4 | code[1], code[2], 0xE0, 0)) + read_request(1, 2, 0, msn=2)[:48])
    done = end.sent()
    statuses = [FLUSHED, status, FLUSHED]
    assert [c[:2] for c in done] == [(wr.wr_id, expected) for wr, expected in zip(wrs, statuses, strict=True)]
    assert ddp.describe_vendor_err(done[1][7]) == ddp.describe(*code)
    assert done[0][7] == done[2][7] == 0
    assert ddp.describe(*code) in end.endpoint.refused
    assert end.reports == [(AsyncEventType.QP_FATAL, end.endpoint.refused)]


def test_terminate_of_an_atomic() -> None:
    """A Terminate that quotes an Atomic Request's DDP header fails the atomic."""
    end = started()
    sink = end.memory(8, Access.LOCAL_WRITE)
    end.post(Opcode.RDMA_READ)
    atomic = end.post(Opcode.ATOMIC_FETCH_AND_ADD, [sink.sge()])
    answered(end, bytes.fromhex("0207c000") + atomic_request(1, 2, msn=2)[:20])
    assert [c[:2] for c in end.sent()][1] == (atomic.wr_id, WCStatus.REM_INV_REQ_ERR)


def test_terminate_without_headers() -> None:
    """A Terminate that quotes nothing flushes everything; the reason is still told."""
    end = started()
    end.post(Opcode.RDMA_READ)
    answered(end, bytes.fromhex("20020000"))
    assert [c[1] for c in end.sent()] == [FLUSHED]
    assert "CRC" in end.endpoint.refused


def test_terminate_of_a_write() -> None:
    """A Terminate that quotes a Write fails no READ for it."""
    end = started()
    end.post(Opcode.RDMA_READ)
    answered(end, bytes.fromhex("1100c000") + tagged(ddp.OP_WRITE, 1, 2, b"x")[:16])
    assert [c[1] for c in end.sent()] == [FLUSHED]


def test_terminate_of_siw() -> None:
    """Siw quotes a Read Request with its size where the sequence number is: the oldest READ is taken."""
    end = started()
    first, second = end.post(Opcode.RDMA_READ), end.post(Opcode.RDMA_READ)
    request = untagged(ddp.OP_READ_REQUEST, bytes(28), qn=1, msn=4096)[:48]
    answered(end, bytes.fromhex("10000700") + request)
    assert [c[:2] for c in end.sent()] == [(first.wr_id, WCStatus.REM_ACCESS_ERR), (second.wr_id, FLUSHED)]


def test_a_short_terminate() -> None:
    """A Terminate of fewer than four bytes is itself answered, by one."""
    end = started()
    answered(end, b"\0\0\0")
    assert end.terminated() == Terminated(1, 2, 5)


def test_terminate_stops_the_sending() -> None:
    """After the peer's Terminate nothing more is sent: it processes nothing."""
    end = started()
    end.send(b"unsent")
    end.feed(untagged(ddp.OP_TERMINATE, bytes(4), qn=2))
    assert not end.endpoint.outbox


@pytest.mark.parametrize("orderly", [True, False])
def test_ended(orderly: bool) -> None:
    """The stream's end flushes everything, once, and says why."""
    end = started()
    end.post(Opcode.RDMA_READ)
    end.receive()
    end.endpoint.ended("why", orderly=orderly)
    end.endpoint.ended("later")
    end.endpoint.to_error()
    assert [c[1] for c in end.sent()] == [c[1] for c in end.received()] == [FLUSHED]
    assert end.endpoint.refused == "why"
    assert end.endpoint.orderly is orderly


def test_to_error_flushes_in_order() -> None:
    """Everything posted completes flushed, in post order, unsignalled requests too."""
    end = started(reads=1)
    flags = itertools.cycle((0, SendFlags.SIGNALED))
    wrs = [end.post(Opcode.RDMA_READ, flags=next(flags)) for _ in range(5)]
    receives = [end.receive() for _ in range(3)]
    end.endpoint.to_error()
    assert [c[:2] for c in end.sent()] == [(wr.wr_id, FLUSHED) for wr in wrs]
    assert [c[:2] for c in end.received()] == [(wr.wr_id, FLUSHED) for wr in receives]


def test_posts_in_error() -> None:
    """Posts to a queue pair in error complete, flushed."""
    end = started()
    end.endpoint.to_error()
    send, receive = end.send(b""), end.receive()
    assert [c[:2] for c in end.sent()] == [(send.wr_id, FLUSHED)]
    assert [c[:2] for c in end.received()] == [(receive.wr_id, FLUSHED)]
    assert not end.endpoint.outbox


def test_a_bad_request_at_the_handshake() -> None:
    """A request posted before the first FPDU and bad when it is sent fails then; nothing is raised."""
    end = started(initiator=False)
    end.post(Opcode.SEND, [SGE(0, 1, 0xBAD)])
    end.feed(tagged(ddp.OP_WRITE, 0, 0))
    assert [c[1] for c in end.sent()] == [WCStatus.LOC_PROT_ERR]
