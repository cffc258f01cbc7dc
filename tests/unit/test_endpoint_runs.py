"""Runs: many alike READs between aiordma devices do in one message what they do one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.enums import Access, Opcode, QPState, SendFlags, WCStatus
from aiordma.types import SGE, RunWR
from tests.unit.wire import End, Memory, Pipe, Terminated, Wire, agreed, fpdus, outstanding, read_request, tagged

COUNT = 8
SIZE = 12
FLUSHED = WCStatus.WR_FLUSH_ERR
REQUEST = ddp.OP_READ_REQUEST
RESPONSE = ddp.OP_READ_RESPONSE


def started(*, joined: bool = True, reads: int = 64) -> End:
    """Make an endpoint towards another aiordma device, or towards any."""
    end = End()
    end.endpoint.start(agreed(ird=reads, ord=reads), initiator=True, mulpdu=65_518, joined=joined)
    return end


def asks(memory: Memory, sources: list[int], size: int, *, msn: int = 1) -> bytes:
    """Make a Run Request for pieces at these offsets."""
    return runs.encode_request(msn, size, memory.key, [memory.addr + source for source in sources])


def answers(msn: int, data: bytes) -> bytes:
    """Make a Run Response."""
    return tagged(runs.OP_RESPONSE, 0, msn, data)


def feed(end: End, data: bytes, sizes: list[int]) -> Pipe:
    """Receive bytes in pieces."""
    pipe = Pipe(end.endpoint, end.endpoint)
    pipe.stream += data
    steps = 0
    while pipe.stream:
        pipe.deliver(sizes[steps % len(sizes)])
        steps += 1
    return pipe


# -- asking ----------------------------------------------------------------------------------------------------


def test_one_message() -> None:
    """Alike READs leave as one message, are answered by one, and complete as one; each lands in its place."""
    wire = Wire(joined=True, mulpdu=65_518, reads=64)
    source = wire.server.memory(bytes(range(256)))
    sink = wire.client.memory(256, Access.LOCAL_WRITE)
    wire.pump()
    run = wire.client.post_run(
        Opcode.RDMA_READ, sink, range(0, 256, 8), source, range(248, -8, -8), 8, flags=SendFlags.SIGNALED
    )
    wire.to_server.send(1 << 20)
    assert len(fpdus(bytes(wire.to_server.stream))) == 1
    wire.to_server.deliver(1 << 20)
    wire.to_client.send(1 << 20)
    assert len(fpdus(bytes(wire.to_client.stream))) == 1
    wire.pump()
    expected = [bytes(range(256))[at : at + 8] for at in range(248, -8, -8)]
    assert sink.content == b"".join(expected)
    assert [c[:3] for c in wire.client.sent()] == [(run.wr_id, 0, 2)]


def test_request_bytes() -> None:
    """A Run Request is message 12 of queue 1: size, source STag, source offsets."""
    assert runs.encode_request(7, 16, 0xABCD, [1, 2]) == bytes.fromhex(
        "002a 414c 00000000 00000001 00000007 00000000 00000010 0000abcd 0000000000000001 000000000000000200000000"
    )


@settings(deadline=None, max_examples=60)
@given(
    size=st.one_of(st.integers(0, 40), st.sampled_from([COPY_LIMIT, COPY_LIMIT + 1])),
    sinks=st.lists(st.integers(0, 1000), min_size=1, max_size=100),
    before=st.one_of(st.just(0), st.integers(ddp.MASK32 - 110, ddp.MASK32)),
    opcode=st.sampled_from([Opcode.RDMA_READ, Opcode.RDMA_WRITE]),
)
@example(size=8, sinks=list(range(8)), before=ddp.MASK32 - 3, opcode=Opcode.RDMA_READ)
@example(size=8, sinks=list(range(8)), before=ddp.MASK32 - 8, opcode=Opcode.RDMA_READ)
def test_asks_for_the_same(size: int, sinks: list[int], before: int, opcode: Opcode) -> None:
    """A run asks for the same pieces, numbered the same, as its requests one by one."""
    asked = []
    for joined in (True, False):
        end = started(joined=joined)
        memory = end.memory(1000 + 2 * COPY_LIMIT)
        end.endpoint.send_queue._request_msn = before
        run = RunWR(opcode, size, memory.key, 7, [memory.addr + s for s in sinks], [5 * s for s in sinks])
        run.wr_id = 2 * len(sinks)
        end.endpoint.post_run(run)
        asked.append(([one for fpdu in end.output() for one in single(fpdu)], end.sent(), outstanding(end)))
    assert asked[0] == asked[1]


def single(fpdu: bytes) -> list[tuple[int, ...] | bytes]:
    """Give number, size, key and source of each READ that an FPDU asks for; another FPDU as it is."""
    opcode = fpdu[3] & 0xF
    if opcode == REQUEST:
        fields = ddp.READ_REQUEST.unpack_from(fpdu)
        return [(fields[4], *fields[8:])]
    if opcode != runs.OP_REQUEST:
        return [fpdu]
    request = runs.decode_request(memoryview(fpdu), 0, int.from_bytes(fpdu[:2], "big"))
    return [(request.msn + index, request.size, request.stag, source) for index, source in enumerate(request.sources)]


@pytest.mark.parametrize("index", range(6))
def test_bad_local_memory(index: int) -> None:
    """Of a run with one piece that doesn't fit, that one fails, and the others are flushed."""
    end = started()
    memory = end.memory(64)
    addresses = [memory.addr + 8 * n for n in range(6)]
    addresses[index] = memory.addr + 57
    run = RunWR(Opcode.RDMA_READ, 8, memory.key, 7, addresses, range(6))
    run.wr_id = 12
    end.endpoint.post_run(run)
    statuses = [FLUSHED] * 6
    statuses[index] = WCStatus.LOC_PROT_ERR
    assert [c[:2] for c in end.sent()] == list(zip(range(2, 14, 2), statuses, strict=True))
    assert end.endpoint.state is QPState.ERR


def test_sink_without_local_write() -> None:
    """A run into memory without LOCAL_WRITE fails with its first request."""
    end = started()
    memory = end.memory(64, Access.REMOTE_WRITE)
    offsets = range(0, 64, 8)
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert [c[1] for c in end.sent()] == [WCStatus.LOC_PROT_ERR] + [FLUSHED] * 7
    assert end.terminated() == (0, 0, 0)


def test_large_runs_go_in_parts() -> None:
    """A run whose answer would be longer than an FPDU is asked for in parts that aren't."""
    wire = Wire(joined=True, mulpdu=65_518, reads=64)
    source = wire.server.memory(bytes(range(256)) * 16 * 64)
    sink = wire.client.memory(COPY_LIMIT * 64, Access.LOCAL_WRITE)
    offsets = range(0, COPY_LIMIT * 64, COPY_LIMIT)
    wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, COPY_LIMIT)
    wire.pump()
    assert sink.content == source.content
    assert len(wire.client.sent()) == 1


def test_runs_keep_ord() -> None:
    """Runs and single READs together stay within ORD, and go on as responses come."""
    wire = Wire(joined=True, mulpdu=65_518, reads=10, sizes=[100])
    source = wire.server.memory(bytes(range(200)))
    sink = wire.client.memory(200, Access.LOCAL_WRITE)
    for start in range(0, 200, 40):
        offsets = range(start, start + 40, 5)
        wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, 5, flags=0)
        wire.client.post(Opcode.RDMA_READ, [sink.sge(start, 1)], to=source, at=start)
    wire.pump()
    assert wire.idle
    assert sink.content == bytes(range(200))
    assert len(wire.client.sent()) == 5


# -- answering --------------------------------------------------------------------------------------------------


def outcome(end: End) -> tuple[list[tuple[int, bytes]], object, bytes]:
    """Give the data answered with the number of its READ or run, the state, and the Terminate without its header."""
    answered, terminate = [], b""
    for fpdu in end.output():
        payload = fpdu[16 : 2 + int.from_bytes(fpdu[:2], "big")]
        if fpdu[3] & 0xF == ddp.OP_TERMINATE:
            terminate = payload[4:]
        else:
            answered.append((int.from_bytes(fpdu[8:16], "big"), payload))
    return answered, end.endpoint.state, terminate


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.one_of(st.integers(1, 20), st.integers(1, 300)),
    sources=st.lists(st.integers(-3, 300), min_size=1, max_size=20),
    key=st.sampled_from(["good", "good", "good", "right", "domain", "unknown"]),
    reads=st.one_of(st.just(64), st.integers(0, 20)),
    split=st.lists(st.integers(1, 400), min_size=1, max_size=4),
)
def test_answered_as_one_by_one(size: int, sources: list[int], key: str, reads: int, split: list[int]) -> None:
    """A run is answered as its READs are one by one: the same data, and the same Terminate for the first refused."""
    outcomes = []
    for joined in (True, False):
        end = started(joined=joined, reads=reads)
        memory = end.memory(bytes(range(256)), Access.REMOTE_WRITE if key == "right" else Access.REMOTE_READ)
        if key == "domain":
            memory.region.pd = object()
        elif key == "unknown":
            memory.region.close()
        if joined:
            feed(end, asks(memory, sources, size), split)
        else:
            stream = [
                read_request(memory.key, memory.addr + source, size, msn=msn) for msn, source in enumerate(sources, 1)
            ]
            feed(end, b"".join(stream), [1 << 20])
        assert memory.content == bytes(range(256))
        outcomes.append(outcome(end))
    run, plain = outcomes
    if len(sources) <= reads:  # else a run is refused as a whole
        assert b"".join(data for _, data in run[0]) == b"".join(data for _, data in plain[0])
        # Code and flags, length, DDP header, size and source; a run names no sink.
        assert run[2][:26] == plain[2][:26]
        assert run[2][38:] == plain[2][38:]
    else:
        assert run[2][:2] == bytes((0x12, 2))
    assert run[1] == plain[1]


@pytest.mark.parametrize("reads", [8, 11])
def test_runs_keep_ird(reads: int) -> None:
    """Each READ of a run counts as one: what is beyond IRD is refused."""
    end = started(reads=reads)
    memory = end.memory(8)
    end.feed(asks(memory, [0] * 8, 8))
    assert end.endpoint.state is QPState.RTS
    end.feed(asks(memory, [0] * (reads - 7), 8, msn=9))
    assert end.terminated() == Terminated(1, 2, 2)


def test_answered_runs_free_their_places() -> None:
    """IRD bounds the READs that aren't answered, and single READs go on numbered behind a run."""
    end = started(reads=8)
    memory = end.memory(8)
    for msn in range(1, 100, 9):
        end.feed(asks(memory, [0] * 8, 8, msn=msn))
        assert len(end.output()) == 1
        end.feed(read_request(memory.key, memory.addr, 8, msn=msn + 8))
        assert len(end.output()) == 1


@pytest.mark.parametrize("before", range(10))
def test_a_run_never_wraps(before: int) -> None:
    """A run up to sequence number 2**32 - 1 is answered, one beyond is refused: the requester doesn't send it."""
    end = started()
    first = ddp.MASK32 - before
    end.endpoint.responder.request_msn = first
    memory = end.memory(8)
    end.feed(asks(memory, [0] * 6, 8, msn=first))
    fits = end.endpoint.state is QPState.RTS
    assert fits == (before >= 6)
    if fits:
        end.feed(read_request(memory.key, memory.addr, 8, msn=first + 6 & ddp.MASK32))
        assert end.endpoint.state is QPState.RTS


def test_a_run_of_nothing() -> None:
    """READs of nothing aren't asked for as a run: whoever does is refused."""
    end = started()
    end.feed(asks(end.memory(8), [0] * 4, 0))
    assert end.terminated() == Terminated(1, 2, 5)


def test_the_largest_answer() -> None:
    """A run whose answer doesn't fit one FPDU is refused."""
    end = started()
    memory = end.memory(1 << 20)
    end.feed(asks(memory, [0] * 16, runs.LARGEST // 15))
    assert end.terminated() == Terminated(1, 2, 5)


# -- being answered ---------------------------------------------------------------------------------------------


class Reader:
    """An endpoint with a run of READs outstanding, and a READ of nothing behind it."""

    def __init__(self) -> None:
        self.end = started()
        self.sink = self.end.memory(COUNT * SIZE, Access.LOCAL_WRITE)
        offsets = [*range(0, COUNT * SIZE // 2, SIZE), *range(COUNT * SIZE - SIZE, COUNT * SIZE // 2 - 1, -SIZE)]
        self.offsets = offsets
        self.run = self.end.post_run(Opcode.RDMA_READ, self.sink, offsets, self.sink, offsets, SIZE)
        self.behind = self.end.post(Opcode.RDMA_READ)
        self.end.output()
        self.data = bytes(range(COUNT * SIZE))

    def answer(self, start: int, stop: int) -> bytes:
        """Make the response to some of the run's READs."""
        return answers(1 + start, self.data[SIZE * start : SIZE * stop])


@given(cuts=st.lists(st.integers(1, COUNT - 1), max_size=4), split=st.lists(st.integers(1, 80), min_size=1, max_size=4))
def test_answered_in_parts(cuts: list[int], split: list[int]) -> None:
    """However a run's answer is cut, each piece lands in its place, and the run completes with the last."""
    reader = Reader()
    bounds = [0, *sorted(set(cuts)), COUNT]
    parts = [reader.answer(a, b) for a, b in pairwise(bounds)]
    feed(reader.end, b"".join(parts[:-1]), split)
    assert not reader.end.sent()
    feed(reader.end, parts[-1], split)
    assert [c[:2] for c in reader.end.sent()] == [(reader.run.wr_id, 0)]
    for index, offset in enumerate(reader.offsets):
        assert reader.sink.content[offset : offset + SIZE] == reader.data[index * SIZE : (index + 1) * SIZE]
    reader.end.feed(tagged(RESPONSE, 0, 0))
    assert [c[:2] for c in reader.end.sent()] == [(reader.behind.wr_id, 0)]


WRONG: dict[str, tuple[bytes, tuple[int, int, int]]] = {
    "half a piece": (answers(1, bytes(SIZE // 2)), (1, 1, 1)),
    "a piece and a half": (answers(1, bytes(SIZE * 3 // 2)), (1, 1, 1)),
    "nothing": (answers(1, b""), (1, 1, 1)),
    "a piece too many": (answers(1, bytes(SIZE * (COUNT + 1))), (1, 1, 1)),
    "the second first": (answers(2, bytes(SIZE)), (1, 1, 1)),
    "number 0": (answers(0, bytes(SIZE)), (1, 1, 1)),
    "a number beyond 32 bits": (answers(1 + (1 << 32), bytes(SIZE)), (1, 1, 1)),
    "a Read Response": (tagged(RESPONSE, 0, 1, bytes(SIZE)), (0, 2, 6)),
    "a Read Response's first segment": (tagged(RESPONSE, 0, 1, bytes(SIZE), control=ddp.TAGGED), (0, 2, 6)),
    "not last": (tagged(runs.OP_RESPONSE, 0, 1, bytes(SIZE), control=ddp.TAGGED), (0, 2, 6)),
    "another run's": (answers(1, bytes(SIZE * COUNT)) + answers(9, bytes(SIZE)), (0, 2, 6)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers(name: str) -> None:
    """An answer that doesn't fit the run ends the stream; nothing of it is placed, and what is left is flushed."""
    data, code = WRONG[name]
    reader = Reader()
    reader.end.feed(data)
    assert reader.end.terminated() == Terminated(*code)
    assert not any(reader.sink.content)
    assert {c[1] for c in reader.end.sent()} <= {0, FLUSHED}
    assert outstanding(reader.end) == 0


def test_more_than_is_left() -> None:
    """An answer to more READs than are left of the run ends the stream; the memory behind it is safe."""
    reader = Reader()
    reader.end.feed(reader.answer(0, 3) + answers(4, bytes(SIZE * COUNT)))
    assert reader.end.terminated() == Terminated(1, 1, 1)
    assert reader.sink.content[: 3 * SIZE] == reader.data[: 3 * SIZE]
    assert [c[1] for c in reader.end.sent()] == [FLUSHED] * (COUNT - 3 + 1)


@pytest.mark.parametrize("opcode", [runs.OP_REQUEST, runs.OP_RESPONSE])
def test_only_among_ourselves(opcode: int) -> None:
    """A peer that isn't known to be an aiordma device may not use the opcodes of runs."""
    end = started(joined=False)
    memory = end.memory(64)
    end.post(Opcode.RDMA_READ, [memory.sge(0, 8)])
    end.output()
    end.feed(asks(memory, [0], 8) if opcode == runs.OP_REQUEST else answers(1, bytes(8)))
    assert end.terminated() == Terminated(0, 2, 6)


def test_to_others_runs_are_reads() -> None:
    """Towards a peer that isn't known to be an aiordma device a run leaves as Read Requests."""
    end = started(joined=False)
    memory = end.memory(64)
    offsets = range(0, 64, 8)
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert [record[3] & 0xF for record in end.output()] == [REQUEST] * 8


FIELDS = [(0, 2), (2, 1), (3, 1), (4, 4), (8, 8), (8, 4), (12, 4), (16, 4), (20, 4), (24, 4), (28, 8), (44, 8)]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    response=st.booleans(),
    field=st.sampled_from(FIELDS),
    value=st.one_of(st.sampled_from(["0", "max", "+1", "-1", "+9", "-9"]), st.integers(0, 1 << 64)),
    split=st.lists(st.integers(1, 200), min_size=1, max_size=4),
)
def test_extremes(response: bool, field: tuple[int, int], value: str | int, split: list[int]) -> None:
    """One field of a run's header at an extreme: the stream goes on or ends by a Terminate, however it is split."""
    outcomes = []
    complete = False
    for sizes in ([1 << 20], split):
        reader = Reader()
        end = reader.end
        secret = end.memory(b"secret" * 10, Access.LOCAL_WRITE, addr=0x30_0000)
        source = end.memory(bytes(range(200)), Access.REMOTE_READ, addr=0x20_0000)
        stream = [asks(source, [10, 20, 30], 8), reader.answer(0, COUNT), tagged(RESPONSE, 0, 0)]
        changed = bytearray(stream[response])
        start, size = field
        old = int.from_bytes(changed[start : start + size], "big")
        named = {"0": 0, "max": -1, "+1": old + 1, "-1": old - 1, "+9": old + 9, "-9": old - 9}
        new = value if isinstance(value, int) else named[value]
        changed[start : start + size] = (new & (1 << 8 * size) - 1).to_bytes(size, "big")
        stream[response] = bytes(changed)
        pipe = feed(end, b"".join(stream), sizes)
        state = end.endpoint.state
        complete = not pipe._carry and end.endpoint.placement is None
        answered, _, terminate = outcome(end)
        assert all(b"secret" not in data for _, data in answered)
        assert secret.content == b"secret" * 10
        assert source.content == bytes(range(200))
        assert (state is QPState.ERR) == bool(terminate or end.endpoint.refused)
        outcomes.append((state, answered, terminate[:2], end.sent(), reader.sink.content))
    if complete:
        assert outcomes[0] == outcomes[1]


# -- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", range(COUNT))
def test_flush(answered: int) -> None:
    """A run that is flushed halfway completes, flushed, with each request that wasn't answered."""
    reader = Reader()
    if answered:
        reader.end.feed(reader.answer(0, answered))
    reader.end.endpoint.ended("gone")
    first = reader.run.wr_id - 2 * (COUNT - 1)
    left = [first + 2 * n for n in range(answered, COUNT)]
    assert [c[:2] for c in reader.end.sent()] == [(wr_id, FLUSHED) for wr_id in (*left, reader.behind.wr_id)]


def test_flush_of_a_run_that_waits() -> None:
    """A run that waits for ORD, or was posted too late, completes flushed with each of its requests."""
    end = started(reads=4)
    memory = end.memory(64)
    end.post(Opcode.RDMA_READ)
    offsets = [0, 8, 16, 24]
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert len(end.output()) == 1
    end.endpoint.to_error()
    assert len(end.sent()) == 5
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert [c[1] for c in end.sent()] == [FLUSHED] * 4


def test_terminate_names_one_of_a_run() -> None:
    """The peer's Terminate fails the READ of the run that it quotes; the others are flushed."""
    reader = Reader()
    payload = bytes.fromhex("0101e000") + read_request(1, 2, 3, msn=4)[:48]
    terminate = ddp.UNTAGGED_HEADER.pack(18 + len(payload), ddp.UNTAGGED_LAST | 7, 0, 2, 1, 0) + payload
    reader.end.feed(terminate + bytes(-len(terminate) % 4 + 4))
    assert [c[1] for c in reader.end.sent()] == [5, 5, 5, WCStatus.REM_ACCESS_ERR, 5, 5, 5, 5, 5]


def test_one_of_a_run_is_refused() -> None:
    """Of a run the READs before the one that is refused succeed, that one has the reason, the others are flushed."""
    wire = Wire(joined=True, mulpdu=65_518, reads=64)
    source = wire.server.memory(64)
    sink = wire.client.memory(64, Access.LOCAL_WRITE)
    run = wire.client.post_run(Opcode.RDMA_READ, sink, range(0, 48, 8), source, [0, 8, 16, 60, 24, 32], 8)
    wire.pump()
    first = run.wr_id - 10
    assert [c[:2] for c in wire.client.sent()] == [
        (first + 6, WCStatus.REM_ACCESS_ERR),
        (first + 8, FLUSHED),
        (first + 10, FLUSHED),
    ]
    assert wire.server.reports


def test_ord_behind_a_run() -> None:
    """A run that is done leaves as many places as there were before, and no more."""
    reader = Reader()
    feed(reader.end, reader.answer(0, 3) + reader.answer(3, COUNT) + tagged(RESPONSE, 0, 0), [50])
    assert outstanding(reader.end) == 0
    for _ in range(70):
        reader.end.post(Opcode.RDMA_READ)
    assert len(reader.end.output()) == outstanding(reader.end) == 64


def test_fence_behind_a_run() -> None:
    """A fenced request waits for the whole run."""
    reader = Reader()
    reader.end.post(Opcode.SEND, flags=SendFlags.FENCE)
    for data in (reader.answer(0, 3), reader.answer(3, COUNT), tagged(RESPONSE, 0, 0)):
        assert not reader.end.output()
        reader.end.feed(data)
    assert len(reader.end.output()) == 1


def test_expand() -> None:
    """A run stands for requests whose numbers go up by two, of which the last has its flags."""
    run = RunWR(Opcode.RDMA_READ, 8, 1, 2, [100, 200, 300], [10, 20, 30])
    run.wr_id = 50
    run.send_flags = SendFlags.SIGNALED
    for start in range(3):
        requests = run.expand(start)
        assert [wr.wr_id for wr in requests] == [46, 48, 50][start:]
        assert [wr.send_flags for wr in requests] == [0, 0, SendFlags.SIGNALED][start:]
        assert [wr.remote_addr for wr in requests] == [10, 20, 30][start:]
        assert [wr.rkey for wr in requests] == [2] * (3 - start)
        sges: list[SGE] = [wr.sg_list[0] for wr in requests]
        assert [(sge.addr, sge.length, sge.lkey) for sge in sges] == [(addr, 8, 1) for addr in (100, 200, 300)][start:]
