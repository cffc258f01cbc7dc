"""Messages and their receives: consumed in order, kept when they come first, refused when too long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.enums import Access, AsyncEventType, Opcode, QPState, SendFlags, WCFlags, WCOpcode, WCStatus
from aiordma.types import SGE
from tests.unit.wire import End, Terminated, Wire, agreed, tagged, untagged

FLUSHED = WCStatus.WR_FLUSH_ERR


def started(*, recv_bound: int = 1 << 20) -> End:
    """Make an endpoint in full operation."""
    end = End(recv_bound=recv_bound)
    end.endpoint.start(agreed(), initiator=True, mulpdu=1000)
    return end


def test_kept_messages_are_delivered_in_order() -> None:
    """Messages that came before their receives complete them in order, one each, also empty ones."""
    end = started()
    texts = [b"one", b"", b"three" * 100]
    for msn, text in enumerate(texts, 1):
        end.feed(untagged(ddp.OP_SEND, text, msn=msn))
    inbox = end.memory(3000)
    assert not end.received()
    wrs = [end.receive(inbox.sge(index * 1000, 1000)) for index in range(3)]
    assert [c[:4] for c in end.received()] == [
        (wr.wr_id, 0, WCOpcode.RECV, len(text)) for wr, text in zip(wrs, texts, strict=True)
    ]
    for index, text in enumerate(texts):
        assert inbox.content[index * 1000 :].startswith(text)
    assert end.endpoint.receive_queue.kept_bytes == 0


def test_a_message_half_arrived() -> None:
    """A receive posted when half of its message is kept takes that half, and the rest as it comes."""
    end = started()
    end.feed(untagged(ddp.OP_SEND, b"half", control=ddp.UNTAGGED))
    inbox = end.memory(16)
    end.receive(inbox.sge())
    assert not end.received()
    end.feed(untagged(ddp.OP_SEND, b"whole", mo=4))
    assert [c[3] for c in end.received()] == [9]
    assert inbox.content[:9] == b"halfwhole"


def test_a_half_behind_a_whole() -> None:
    """A receive takes the oldest message, though a later one is half here; the next receive takes that."""
    end = started()
    end.feed(untagged(ddp.OP_SEND, b"first") + untagged(ddp.OP_SEND, b"se", msn=2, control=ddp.UNTAGGED))
    inbox = end.memory(16)
    end.receive(inbox.sge(0, 8))
    assert [c[3] for c in end.received()] == [5]
    end.receive(inbox.sge(8, 8))
    assert not end.received()
    end.feed(untagged(ddp.OP_SEND, b"cond", msn=2, mo=2))
    assert [c[3] for c in end.received()] == [6]
    assert inbox.content == b"first\0\0\0second\0\0"


def test_one_sided_traffic_passes_kept_messages() -> None:
    """A READ is answered while a message waits for its receive: pausing would deadlock the peer."""
    wire = Wire()
    source = wire.server.memory(b"answer")
    sink = wire.client.memory(6, Access.LOCAL_WRITE)
    wire.client.send(b"unexpected")
    wire.client.post(Opcode.RDMA_READ, [sink.sge()], to=source)
    wire.pump()
    assert sink.content == b"answer"
    assert [c[1] for c in wire.client.sent()] == [0, 0]


def test_kept_immediate() -> None:
    """Immediate data that came before its receive completes it with its 32 bits and the length written."""
    wire = Wire()
    target = wire.server.memory(64)
    wire.client.post(Opcode.RDMA_WRITE_WITH_IMM, to=target, inline=b"12345", imm=0xFEED_BEEF)
    wire.pump()
    wire.server.receive()
    (completion,) = wire.server.received()
    assert completion[1:] == (0, WCOpcode.RECV_RDMA_WITH_IMM, 5, 2, 0xFEED_BEEF, WCFlags.WITH_IMM, 0)
    assert target.content[:5] == b"12345"


def test_length_of_an_immediate_is_that_of_its_write() -> None:
    """The length that an immediate tells is that of the Write before it, in all its segments."""
    wire = Wire(mulpdu=128)
    target = wire.server.memory(1000)
    source = wire.client.memory(bytes(1000))
    for _ in range(3):
        wire.server.receive()
    wire.client.post(Opcode.RDMA_WRITE, [source.sge()], to=target)
    for size in (777, 0, 12):
        wire.client.post(Opcode.RDMA_WRITE_WITH_IMM, [source.sge(0, size)], to=target)
    wire.pump()
    assert [c[3] for c in wire.server.received()] == [777, 0, 12]


def test_an_immediate_needs_no_memory() -> None:
    """Immediate data completes a receive without memory, and leaves that of one with memory alone."""
    end = started()
    inbox = end.memory(8)
    end.receive()
    end.receive(inbox.sge())
    for msn in (1, 2):
        end.feed(tagged(ddp.OP_WRITE, 0, 0) + untagged(ddp.OP_IMMEDIATE, b"\1\2\3\4\5\6\7\x08", msn=msn))
    assert [c[5] for c in end.received()] == [0x01020304] * 2
    assert inbox.content == bytes(8)


@pytest.mark.parametrize("solicited", [True, False])
@pytest.mark.parametrize("opcode", [Opcode.SEND, Opcode.SEND_WITH_INV, Opcode.RDMA_WRITE_WITH_IMM])
@pytest.mark.parametrize("kept", [True, False])
def test_solicited(solicited: bool, opcode: Opcode, kept: bool) -> None:
    """A solicited message marks the queue as solicited when it completes a receive; another one doesn't."""
    wire = Wire()
    victim = wire.server.memory(8)
    if not kept:
        wire.server.receive()
    wire.client.post(opcode, flags=SendFlags.SOLICITED if solicited else 0, imm=victim.key, to=victim)
    wire.pump()
    if kept:
        assert not wire.server.recvs.solicited
        wire.server.receive()
    assert wire.server.recvs.solicited is solicited
    assert len(wire.server.received()) == 1


def test_send_with_invalidate() -> None:
    """The receive's completion names the key, which is good no more by then."""
    wire = Wire()
    victim = wire.server.memory(8)
    wire.server.receive()
    wire.client.post(Opcode.SEND_WITH_INV, imm=victim.key)
    wire.pump()
    (completion,) = wire.server.received()
    assert completion[5:7] == (victim.key, WCFlags.WITH_INV)
    wire.client.post(Opcode.RDMA_WRITE, to=victim, inline=b"x")
    wire.to_server.send(1 << 16)
    wire.to_server.deliver(1 << 16)
    assert wire.server.terminated() == Terminated(1, 1, 0)
    assert victim.content == bytes(8)


SIZES = st.integers(0, 3 * COPY_LIMIT)


@settings(deadline=None, max_examples=60)
@given(size=SIZES, room=SIZES, kept=st.booleans(), segments=st.integers(1, 4), split=st.integers(1, 20_000))
def test_too_long(size: int, room: int, kept: bool, segments: int, split: int) -> None:
    """A message longer than its receive fails it with LOC_LEN_ERR, and is answered by DDP/untagged/5."""
    end = started()
    inbox = end.memory(room)
    data = bytes(range(256)) * (size // 256 + 1)
    step = max(1, -(-size // segments))
    stream = b""
    for start in range(0, max(size, 1), step):
        last = start + step >= size
        control = ddp.UNTAGGED_LAST if last else ddp.UNTAGGED
        stream += untagged(ddp.OP_SEND, data[start : min(size, start + step)], mo=start, control=control)
    receives = [] if kept else [end.receive(inbox.sge()), end.receive()]
    pieces = [stream[start : start + split] for start in range(0, len(stream), split)]
    deliver(end, pieces)
    first, second = receives or [end.receive(inbox.sge()), end.receive()]
    completions = end.received()
    if size <= room:
        assert [c[:4] for c in completions] == [(first.wr_id, 0, WCOpcode.RECV, size)]
        assert inbox.content[:size] == data[:size]
        assert end.terminated() is None
    else:
        assert [c[:2] for c in completions] == [
            (first.wr_id, WCStatus.LOC_LEN_ERR), (second.wr_id, FLUSHED),
        ]  # fmt: skip
        assert len(inbox.content) == room
        assert end.terminated() == Terminated(1, 2, 5)
        assert end.reports[0][0] is AsyncEventType.QP_ACCESS_ERR
        assert "longer than its receive" in end.endpoint.refused


def deliver(end: End, pieces: list[bytes]) -> None:
    """Give an endpoint bytes as they come."""
    carry, skip = b"", 0
    for piece in pieces:
        data = piece
        placement = end.endpoint.placement
        if placement is not None:
            direct = data[: placement.left]
            start = 0
            for view in placement.views:
                part = direct[start : start + len(view)]
                view[: len(part)] = part
                start += len(part)
            data = data[len(direct) :]
            skip = end.endpoint.placed(len(direct))
        skipped = min(skip, len(data))
        skip -= skipped
        data = carry + data[skipped:]
        done = end.endpoint.receive(memoryview(bytearray(data)), len(data)) if data else 0
        carry = data[done:]


def test_an_empty_first_segment() -> None:
    """A message that began with nothing is in its receive all the same: the rest isn't another message."""
    end = started()
    inbox = end.memory(16)
    first = end.receive(inbox.sge(0, 8))
    end.receive(inbox.sge(8, 8))
    end.feed(untagged(ddp.OP_SEND, control=ddp.UNTAGGED) + untagged(ddp.OP_SEND, b"rest"))
    assert [(c[0], c[3]) for c in end.received()] == [(first.wr_id, 4)]


def test_scattered() -> None:
    """A message fills the pieces of its receive in order; what is behind it stays."""
    end = started()
    inbox = end.memory(b"." * 20)
    end.receive(inbox.sge(10, 3), inbox.sge(5, 0), inbox.sge(0, 4), inbox.sge(16, 4))
    end.feed(untagged(ddp.OP_SEND, b"abcdefgh"))
    assert inbox.content == b"defg......abc...h..."


def test_receive_memory_without_local_write() -> None:
    """A receive into memory without LOCAL_WRITE fails when its message comes."""
    end = started()
    end.receive(end.memory(8, Access.REMOTE_WRITE).sge())
    end.feed(untagged(ddp.OP_SEND, b"x"))
    assert [c[1] for c in end.received()] == [WCStatus.LOC_PROT_ERR]


def test_bad_receive_for_a_kept_message() -> None:
    """A receive that can't take the message that waits for it fails at the post, without a Terminate."""
    end = started()
    end.feed(untagged(ddp.OP_SEND, b"x"))
    bad = end.receive(SGE(0, 8, 0xBAD))
    assert [c[:2] for c in end.received()] == [(bad.wr_id, WCStatus.LOC_PROT_ERR)]
    assert end.terminated() == (0, 0, 0)


def test_bound() -> None:
    """Past the bound the queue is full until a receive takes a message."""
    end = started(recv_bound=1000)
    queue = end.endpoint.receive_queue
    end.feed(untagged(ddp.OP_SEND, bytes(600)))
    assert not queue.full
    end.feed(untagged(ddp.OP_SEND, bytes(600), msn=2))
    assert queue.full
    end.receive(end.memory(600).sge())
    assert not queue.full


# -- the end of the stream -----------------------------------------------------------------------------------


def test_messages_outlive_the_stream() -> None:
    """Messages that came before the end complete receives posted after it; later ones are flushed."""
    end = started()
    for msn in (1, 2):
        end.feed(untagged(ddp.OP_SEND, b"%d" % msn, msn=msn))
    end.endpoint.ended("the peer closed", orderly=True)
    assert end.endpoint.draining
    assert end.endpoint.state is QPState.ERR
    inbox = end.memory(8)
    end.send(b"")
    for _ in range(4):
        end.receive(inbox.sge())
    assert [c[1] for c in end.received()] == [0, 0, FLUSHED, FLUSHED]
    assert [c[1] for c in end.sent()] == [FLUSHED]
    assert not end.endpoint.draining


def test_half_a_message_is_never_delivered() -> None:
    """A message that the stream's end cut off completes its receive as flushed, whenever that was posted."""
    for early in (True, False):
        end = started()
        inbox = end.memory(8)
        if early:
            end.receive(inbox.sge())
        end.feed(untagged(ddp.OP_SEND, b"half", control=ddp.UNTAGGED))
        end.endpoint.ended("gone")
        if not early:
            end.receive(inbox.sge())
        assert [c[1] for c in end.received()] == [FLUSHED]
        assert not end.endpoint.draining


@pytest.mark.parametrize("size", [1, 9])
def test_a_bad_receive_ends_the_draining(size: int) -> None:
    """A receive that can't take the message that waits after the end fails, and the draining is over."""
    end = started()
    end.feed(untagged(ddp.OP_SEND, bytes(9)) + untagged(ddp.OP_SEND, b"", msn=2))
    end.endpoint.ended("gone")
    end.receive(end.memory(8).sge() if size == 1 else SGE(0, 9, 0xBAD))
    assert not end.endpoint.draining
    end.receive()
    assert [c[1] for c in end.received()][1] == FLUSHED


def test_to_error_drops_what_is_kept() -> None:
    """Closing this side drops the messages that nobody received."""
    end = started()
    end.feed(untagged(ddp.OP_SEND, b"x"))
    end.endpoint.ended("gone")
    end.endpoint.to_error()
    end.receive()
    assert [c[1] for c in end.received()] == [FLUSHED]
    assert not end.endpoint.draining
    assert end.endpoint.receive_queue.kept_bytes == 0
