"""Runs between two endpoints, against the same READs posted one by one: memory, completions, refusals, the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aiordma.drivers.base import Completion
from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.ddp import vendor_err
from aiordma.drivers.soft.mpa import RTR
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.enums import Access, Opcode, QPState, SendFlags, WCStatus
from tests.unit.wire import ALL, End, Wire, agreed, fpdus, outstanding, tagged

FLUSHED = WCStatus.WR_FLUSH_ERR
REFUSED = WCStatus.REM_ACCESS_ERR
MEMORY = 2000


def wired(*, joined: bool = True, reads: int = 64, sizes: Sequence[int] = (1 << 16,), rtr: RTR = RTR.WRITE) -> Wire:
    """Join two endpoints that know each other as aiordma devices, or don't."""
    return Wire(joined=joined, mulpdu=65_518, reads=reads, sizes=sizes, rtr=rtr)


def sent_opcodes(data: bytes) -> list[int]:
    """Give the opcode of each FPDU."""
    return [record[3] & 0xF for record in fpdus(data)]


# -- the same as one by one -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.one_of(st.integers(0, 30), st.integers(0, 400)),
    places=st.lists(st.tuples(st.integers(0, MEMORY - 400), st.integers(-2, MEMORY - 300)), min_size=1, max_size=70),
    layout=st.sampled_from(["scattered", "adjacent", "overlapping"]),
    reads=st.one_of(st.just(64), st.integers(1, 20)),
    sizes=st.lists(st.one_of(st.integers(1, 60), st.integers(1, 3000)), min_size=1, max_size=5),
    flags=st.sampled_from([SendFlags.SIGNALED, SendFlags(0)]),
)
@example(
    size=8, places=[(0, n * 8) for n in range(64)], layout="adjacent", reads=64, sizes=[7], flags=SendFlags.SIGNALED
)
@example(
    size=8, places=[(n, n) for n in range(20)], layout="scattered", reads=5, sizes=[3000], flags=SendFlags.SIGNALED
)
def test_as_one_by_one(
    size: int, places: list[tuple[int, int]], layout: str, reads: int, sizes: list[int], flags: int
) -> None:
    """Whatever a run reads, and however it travels, memory and completions are those of its READs one by one."""
    if layout == "adjacent":
        sinks = [index * size for index in range(len(places)) if (index + 1) * size <= MEMORY]
    elif layout == "overlapping":
        sinks = [100 + index * (size // 2) % 500 for index in range(len(places))]
    else:
        sinks = [sink for sink, _ in places]
    sources = [source for _, source in places][: len(sinks)] or [0]
    sinks = sinks or [0]
    outcomes = []
    for joined in (True, False):
        wire = wired(joined=joined, reads=reads, sizes=sizes)
        source = wire.server.memory(bytes(n * 7 & 0xFF for n in range(MEMORY)), Access.REMOTE_READ)
        sink = wire.client.memory(MEMORY, Access.LOCAL_WRITE)
        behind = wire.client.memory(8, Access.LOCAL_WRITE, addr=0x90_0000)
        wire.client.post_run(Opcode.RDMA_READ, sink, sinks, source, sources, size, flags=flags)
        wire.client.post(Opcode.RDMA_READ, [behind.sge()], to=source)
        wire.pump()
        assert outstanding(wire.client) == 0
        outcomes.append(
            (sink.content, behind.content, source.content, wire.client.sent(), wire.server.reports,
             wire.client.endpoint.state, wire.client.endpoint.refused)
        )  # fmt: skip
    assert outcomes[0] == outcomes[1]


# -- on the wire ----------------------------------------------------------------------------------------------------


def test_response_bytes() -> None:
    """A Run Response is tagged message 13 whose TO is the first READ's number; then the data, pad and CRC field."""
    memory = memoryview(b"0123456789")
    assert runs.encode_response(7, 3, [0x1004, 0x1000], memory, 0x1000) == bytes.fromhex(
        "0014 c14d 00000000 0000000000000007 343536 303132 0000 00000000"
    )


@pytest.mark.parametrize(("size", "count", "parts"), [(4096, 64, 5), (4096, 15, 1), (4096, 16, 2), (960, 64, 1)])
def test_parts(size: int, count: int, parts: int) -> None:
    """A run is asked for in as few messages as have answers that fit an FPDU, numbered on, and answered in as many."""
    wire = wired()
    source = wire.server.memory(bytes(range(251)) * (size * count // 251 + 1))
    sink = wire.client.memory(size * count, Access.LOCAL_WRITE)
    wire.pump()
    offsets = range(0, size * count, size)
    wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, size)
    wire.to_server.send(1 << 20)
    asked = fpdus(bytes(wire.to_server.stream))
    requests = [runs.decode_request(memoryview(record), 0, int.from_bytes(record[:2], "big")) for record in asked]
    assert len(requests) == parts
    assert [request.msn for request in requests] == [
        1 + sum(len(r.sources) for r in requests[:n]) for n in range(parts)
    ]
    assert sum(len(request.sources) for request in requests) == count
    wire.to_server.deliver(1 << 20)
    wire.to_client.send(1 << 20)
    answered = fpdus(bytes(wire.to_client.stream))
    assert [record[3] & 0xF for record in answered] == [runs.OP_RESPONSE] * parts
    assert max(map(len, answered)) <= runs.LARGEST + 24
    wire.pump()
    assert sink.content == source.content[: size * count]
    assert [c[1] for c in wire.client.sent()] == [0]


def test_more_than_copied_goes_one_by_one() -> None:
    """READs too large to be copied are Read Requests, whose answers come from the peer's memory."""
    wire = wired()
    size = COPY_LIMIT + 1
    source = wire.server.memory(4 * size)
    sink = wire.client.memory(4 * size, Access.LOCAL_WRITE)
    wire.pump()
    offsets = range(0, 4 * size, size)
    wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, size)
    wire.to_server.send(1 << 20)
    assert sent_opcodes(bytes(wire.to_server.stream)) == [ddp.OP_READ_REQUEST] * 4


def test_an_answer_in_pieces_is_placed_whole() -> None:
    """A large Run Response changes nothing until its last byte is there."""
    wire = wired()
    source = wire.server.memory(b"\x11" * 32_000)
    sink = wire.client.memory(32_000, Access.LOCAL_WRITE)
    wire.pump()
    offsets = range(0, 32_000, 500)
    wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, 500)
    wire.to_server.send(1 << 20)
    wire.to_server.deliver(1 << 20)
    wire.to_client.send(1 << 20)
    stream = wire.to_client.stream
    while len(stream) > 1:
        wire.to_client.deliver(min(3000, len(stream) - 1))
        assert wire.client.endpoint.placement is None
        assert not any(sink.content)
    assert not wire.client.sent()
    wire.to_client.deliver(1)
    assert sink.content == source.content
    assert [c[1] for c in wire.client.sent()] == [0]


# -- refusals -------------------------------------------------------------------------------------------------------


def statuses(wire: Wire) -> list[tuple[int, int, int]]:
    """Take number, status and vendor_err of the client's completions."""
    return [(c[0], c[1], c[7]) for c in wire.client.sent()]


@pytest.mark.parametrize("index", [0, 1, 6, 11])
@pytest.mark.parametrize(
    ("bad", "code"), [(-1, ddp.BOUNDS), (57, ddp.BOUNDS), (1 << 40, ddp.BOUNDS), ("wraps", ddp.TO_WRAP)]
)
def test_one_out_of_bounds(index: int, bad: int | str, code: int) -> None:
    """The READ of a run that is out of bounds has the reason under its own number; those before it have their data."""
    wire = wired()
    source = wire.server.memory(bytes(range(64)), Access.REMOTE_READ)
    sink = wire.client.memory(96, Access.LOCAL_WRITE)
    sources = [n * 4 for n in range(12)]
    sources[index] = (1 << 64) - 4 - source.addr if isinstance(bad, str) else bad
    run = wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 96, 8), source, sources, 8)
    behind = wire.client.post(Opcode.RDMA_READ)
    wire.pump()
    first = run.wr_id - 22
    # Those before are unsignalled and done: they have no completions of their own.
    expected = [(first + 2 * index, REFUSED, vendor_err(0, 1, code))]
    expected += [(first + 2 * n, FLUSHED, 0) for n in range(index + 1, 12)]
    assert statuses(wire) == [*expected, (behind.wr_id, FLUSHED, 0)]
    content = bytes(range(64))
    assert sink.content == b"".join(content[at : at + 8] for at in sources[:index]) + bytes(96 - 8 * index)
    assert source.content == content
    assert wire.client.endpoint.state is wire.server.endpoint.state is QPState.ERR
    assert ddp.describe(0, 1, code) in wire.client.endpoint.refused


@pytest.mark.parametrize(("crime", "code"), [("key", 0), ("stale", 0), ("right", 2), ("domain", 3)])
def test_all_are_refused(crime: str, code: int) -> None:
    """A run under a key that isn't good fails with its first READ; what was read before it is there."""
    wire = wired()
    good = wire.server.memory(b"good" * 10, Access.REMOTE_READ)
    access = ALL & ~Access.REMOTE_READ if crime == "right" else Access.REMOTE_READ
    bad = wire.server.memory(64, access, addr=0x20_0000, pd=object() if crime == "domain" else None)
    if crime == "key":
        bad.key ^= 0x100
    sink = wire.client.memory(104, Access.LOCAL_WRITE)
    before = wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 40, 4), good, range(0, 40, 4), 4)
    run = wire.client.post_run(Opcode.RDMA_READ, sink, range(40, 104, 8), bad, range(0, 64, 8), 8)
    if crime == "stale":
        bad.region.close()
    wire.pump()
    first = run.wr_id - 14
    assert statuses(wire) == [
        (before.wr_id, 0, 0), (first, REFUSED, vendor_err(0, 1, code)),
        *((first + 2 * n, FLUSHED, 0) for n in range(1, 8)),
    ]  # fmt: skip
    assert sink.content == b"good" * 10 + bytes(64)


def test_a_later_part_is_refused() -> None:
    """A region deregistered between two parts of a run: the first part is done, the next READ has the reason."""
    wire = wired()
    source = wire.server.memory(b"\x22" * 4096 * 20, Access.REMOTE_READ)
    sink = wire.client.memory(4096 * 20, Access.LOCAL_WRITE)
    wire.pump()
    offsets = range(0, 4096 * 20, 4096)
    run = wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, 4096)
    wire.to_server.send(1 << 20)
    wire.to_server.deliver(len(fpdus(bytes(wire.to_server.stream))[0]))
    source.region.close()
    wire.pump()
    first = run.wr_id - 38
    assert statuses(wire) == [
        (first + 30, REFUSED, vendor_err(0, 1, 0)), *((first + 2 * n, FLUSHED, 0) for n in range(16, 20)),
    ]  # fmt: skip
    assert sink.content == b"\x22" * 4096 * 15 + bytes(4096 * 5)


def test_a_sink_deregistered_meanwhile() -> None:
    """Memory of a run that is deregistered while it is outstanding is held until the answer is in it."""
    wire = wired()
    source = wire.server.memory(bytes(range(64)), Access.REMOTE_READ)
    sink = wire.client.memory(64, Access.LOCAL_WRITE)
    wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 64, 8), source, range(0, 64, 8), 8)
    sink.region.close()
    wire.pump()
    assert [c[1] for c in wire.client.sent()] == [0]
    assert sink.content == bytes(range(64))


# -- waiting --------------------------------------------------------------------------------------------------------


def test_a_run_waits_for_room() -> None:
    """A run waits until there is room for all of it, and what is posted behind it waits too."""
    wire = wired(reads=8)
    source = wire.server.memory(bytes(range(64)))
    sink = wire.client.memory(64, Access.LOCAL_WRITE)
    wire.pump()
    wire.client.post(Opcode.RDMA_READ, [sink.sge(0, 8)], to=source)
    wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 64, 8), source, range(0, 64, 8), 8)
    wire.client.send(b"")
    wire.server.receive()
    wire.to_server.send(1 << 20)
    assert sent_opcodes(bytes(wire.to_server.stream)) == [ddp.OP_READ_REQUEST]
    wire.to_server.deliver(1 << 20)
    wire.to_client.send(1 << 20)
    wire.to_client.deliver(1 << 20)
    wire.to_server.send(1 << 20)
    assert sent_opcodes(bytes(wire.to_server.stream)) == [runs.OP_REQUEST, ddp.OP_SEND]
    wire.pump()
    assert [c[1] for c in wire.client.sent()] == [0, 0, 0]


def test_an_atomic_waits_behind_a_run() -> None:
    """READs of a run count to the ORD of atomics, until the whole run is answered."""
    wire = wired(reads=8)
    source = wire.server.memory(64)
    sink = wire.client.memory(64)
    old = wire.client.memory(8, addr=0x80_0000)
    wire.pump()
    wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 64, 8), source, range(0, 64, 8), 8)
    wire.client.post(Opcode.ATOMIC_FETCH_AND_ADD, [old.sge()], to=source, compare_add=5)
    wire.to_server.send(1 << 20)
    assert sent_opcodes(bytes(wire.to_server.stream)) == [runs.OP_REQUEST]
    wire.pump()
    assert [c[1] for c in wire.client.sent()] == [0, 0]
    assert ddp.NATIVE_U64.unpack_from(source.content)[0] == 5


def test_a_run_held_back() -> None:
    """A run that the responder posts before it may send leaves as one when it may."""
    wire = wired(rtr=RTR.READ)
    source = wire.client.memory(bytes(range(64)))
    sink = wire.server.memory(64, Access.LOCAL_WRITE)
    wire.server.post_run(Opcode.RDMA_READ, sink, range(0, 64, 8), source, range(0, 64, 8), 8)
    assert not wire.server.endpoint.outbox
    wire.to_server.send(1 << 20)
    wire.to_server.deliver(1 << 20)
    wire.to_client.send(1 << 20)
    assert sent_opcodes(bytes(wire.to_client.stream)) == [ddp.OP_READ_RESPONSE, runs.OP_REQUEST]
    wire.pump()
    assert sink.content == bytes(range(64))


@pytest.mark.parametrize("before", range(1, 9))
def test_numbers_wrap_between_runs(before: int) -> None:
    """Run after run across sequence number 2**32: one that would wrap goes one by one, and all are answered."""
    wire = wired(reads=6)
    wire.pump()
    wire.client.endpoint.send_queue._request_msn = ddp.MASK32 - before
    wire.server.endpoint.responder.request_msn = ddp.MASK32 - before + 1
    source = wire.server.memory(bytes(range(48)))
    sink = wire.client.memory(48, Access.LOCAL_WRITE)
    messages = []
    for _ in range(4):
        sink.view[:] = bytes(48)
        wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 48, 8), source, range(0, 48, 8), 8)
        wire.to_server.send(1 << 20)
        messages.append(len(fpdus(bytes(wire.to_server.stream))))
        wire.pump()
        assert sink.content == bytes(range(48))
    # One that ends with the last number goes one by one as well, and so does the one behind it, which begins with 0.
    assert sorted(messages) == ([1, 1, 6, 6] if before == 6 else [1, 1, 1, 6])
    assert wire.idle


def test_a_run_does_not_overtake() -> None:
    """A run stays behind a request that waits for its fence, though there is room for the run."""
    wire = wired()
    source = wire.server.memory(bytes(range(64)))
    sink = wire.client.memory(64, Access.LOCAL_WRITE)
    wire.server.receive()
    wire.pump()
    wire.client.post(Opcode.RDMA_READ, [sink.sge(0, 8)], to=source)
    wire.client.post(Opcode.SEND, flags=SendFlags.SIGNALED | SendFlags.FENCE)
    wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 64, 8), source, range(0, 64, 8), 8)
    wire.to_server.send(1 << 20)
    assert sent_opcodes(bytes(wire.to_server.stream)) == [ddp.OP_READ_REQUEST]
    wire.pump()
    assert [c[1] for c in wire.client.sent()] == [0, 0, 0]
    assert sink.content == bytes(range(64))


# -- the end ----------------------------------------------------------------------------------------------------------


def _stopped(*, joined: bool, answered: int) -> tuple[list[Completion], bytes]:
    """Flush a run of which so many READs are answered, behind a WRITE that hasn't left; gives what completes."""
    end = End()
    end.endpoint.start(agreed(ird=64, ord=64), initiator=True, mulpdu=65_518, joined=joined)
    memory = end.memory(20_000)
    sink = end.memory(32, Access.LOCAL_WRITE, addr=0x30_0000)
    end.post(Opcode.RDMA_WRITE, [memory.sge(0, 10_000)], to=memory)
    end.post_run(Opcode.RDMA_READ, sink, range(0, 32, 8), memory, range(0, 32, 8), 8)
    if joined and answered:
        end.feed(tagged(runs.OP_RESPONSE, 0, 1, b"answered" * answered))
    for index in range(0 if joined else answered):
        end.feed(tagged(ddp.OP_READ_RESPONSE, sink.key, sink.addr + 8 * index, b"answered"))
    end.endpoint.to_error()
    return end.sent(), sink.content


@pytest.mark.parametrize("answered", range(5))
def test_flush_behind_what_has_not_left(answered: int) -> None:
    """A run answered in part or whole, but behind a request that isn't done, is flushed as one by one."""
    assert _stopped(joined=True, answered=answered) == _stopped(joined=False, answered=answered)
    assert len(_stopped(joined=True, answered=answered)[0]) == 5


@pytest.mark.parametrize("answered", range(1, 8))
@pytest.mark.parametrize("named", range(8))
def test_terminate_of_a_run_answered_in_part(answered: int, named: int) -> None:
    """A Terminate names a run's READ by its number, however many are answered; an old number means the oldest."""
    end = End()
    end.endpoint.start(agreed(ird=64, ord=64), initiator=True, mulpdu=65_518, joined=True)
    sink = end.memory(64, Access.LOCAL_WRITE)
    run = end.post_run(Opcode.RDMA_READ, sink, range(0, 64, 8), sink, range(0, 64, 8), 8)
    end.feed(tagged(runs.OP_RESPONSE, 0, 1, bytes(8 * answered)))
    request = ddp.READ_REQUEST.pack(
        46, ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST, 0, 1, 1 + named, 0, 0, 0, 8, sink.key, sink.addr
    )
    end.feed(ddp.encode_terminate(ddp.fault(ddp.RDMAP_PROTECTION, ddp.BOUNDS), request))
    first = run.wr_id - 14
    failed = max(answered, named)
    assert [c[:2] for c in end.sent()] == [
        (first + 2 * n, REFUSED if n == failed else FLUSHED) for n in range(answered, 8)
    ]


def test_terminate_behind_what_has_not_left() -> None:
    """A Terminate names the right READ of a run answered in part behind a WRITE that hasn't left."""
    end = End()
    end.endpoint.start(agreed(ird=64, ord=64), initiator=True, mulpdu=65_518, joined=True)
    memory = end.memory(20_000)
    end.post(Opcode.RDMA_WRITE, [memory.sge(0, 10_000)], to=memory)
    run = end.post_run(Opcode.RDMA_READ, memory, range(0, 32, 8), memory, range(0, 32, 8), 8)
    end.feed(tagged(runs.OP_RESPONSE, 0, 1, bytes(16)))
    request = ddp.READ_REQUEST.pack(46, ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST, 0, 1, 4, 0, 0, 0, 8, 1, 0)
    end.feed(ddp.encode_terminate(ddp.fault(ddp.RDMAP_PROTECTION, ddp.BOUNDS), request))
    assert [c[1] for c in end.sent()] == [FLUSHED] * 4 + [REFUSED]
    assert run.wr_id == 9


def test_a_run_refused_behind_a_large_send() -> None:
    """What the Terminate cuts off isn't answered: every READ of the run fails or is flushed, none is taken for done."""
    wire = wired()
    source = wire.server.memory(64, Access.REMOTE_READ)
    large = wire.server.memory(200_000, addr=0x80_0000)
    sink = wire.client.memory(32, Access.LOCAL_WRITE)
    wire.pump()
    wire.server.post(Opcode.SEND, [large.sge()])
    run = wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 32, 8), source, [0, 8, 60, 16], 8)
    wire.to_server.send(1 << 20)
    wire.to_server.deliver(1 << 20)
    wire.pump()
    first = run.wr_id - 6
    assert [c[:2] for c in wire.client.sent()] == [
        (first, FLUSHED), (first + 2, FLUSHED), (first + 4, REFUSED), (first + 6, FLUSHED),
    ]  # fmt: skip
    assert not any(sink.content)
