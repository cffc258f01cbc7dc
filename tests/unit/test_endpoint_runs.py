"""Runs: many alike READs handled at once do what they do one by one."""

from __future__ import annotations

from typing import Any

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


class Victim:
    """An endpoint with a run of READs outstanding, and memory to be read by one."""

    def __init__(self, *, joined: bool, ird: int = 64, mulpdu: int = 1000) -> None:
        self.end = End()
        self.sink = self.end.memory(COUNT * SIZE, Access.LOCAL_WRITE, addr=0x1000)
        self.source = self.end.memory(bytes(range(200)), Access.REMOTE_READ, addr=0x2000)
        self.end.endpoint.start(agreed(ird=ird, ord=64), initiator=True, mulpdu=mulpdu, joined=joined)
        offsets = range(0, COUNT * SIZE, SIZE)
        self.run = self.end.post_run(Opcode.RDMA_READ, self.sink, offsets, self.source, offsets, SIZE)
        self.behind = self.end.post(Opcode.RDMA_READ)
        self.end.output()

    def stream(self) -> list[bytes]:
        """Give Read Requests that are a run, then the responses to ours, all right."""
        requests = [read_request(self.source.key, 0x2000 + 9 * n, SIZE, msn=n) for n in range(1, COUNT + 1)]
        responses = [
            tagged(ddp.OP_READ_RESPONSE, self.sink.key, 0x1000 + SIZE * n, bytes((n,)) * SIZE) for n in range(COUNT)
        ]
        return [*requests, *responses, tagged(ddp.OP_READ_RESPONSE, 0, 0)]

    def outcome(self) -> dict[str, Any]:
        """Give everything that happened."""
        end = self.end
        return {
            "output": end.output(),
            "state": end.endpoint.state,
            "refused": end.endpoint.refused,
            "sent": end.sent(),
            "sink": self.sink.content,
            "source": self.source.content,
            "outstanding": outstanding(end),
            "reports": end.reports,
        }


def feed(end: End, data: bytes, sizes: list[int]) -> None:
    """Receive bytes in pieces."""
    pipe = Pipe(end.endpoint, end.endpoint)
    pipe.stream += data
    steps = 0
    while pipe.stream:
        pipe.deliver(sizes[steps % len(sizes)])
        steps += 1


SPLITS = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 1000)), min_size=1, max_size=5)
FIELDS = [
    (0, 2),
    (2, 1),
    (3, 1),
    (4, 4),
    (8, 8),
    (8, 4),
    (12, 4),
    (16, 4),
    (20, 4),
    (24, 8),
    (32, 4),
    (36, 4),
    (40, 8),
]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    index=st.integers(0, 2 * COUNT),
    field=st.sampled_from(FIELDS),
    value=st.one_of(st.sampled_from(["0", "max", "+1", "-1", "+9", "-9"]), st.integers(0, 1 << 64)),
    split=SPLITS,
    ird=st.one_of(st.just(64), st.integers(0, COUNT)),
    mulpdu=st.sampled_from([128, 1000]),
)
@example(index=0, field=(0, 2), value="0", split=[1], ird=64, mulpdu=1000)
def test_as_one_by_one(
    index: int, field: tuple[int, int], value: str | int, split: list[int], ird: int, mulpdu: int
) -> None:
    """Whatever one header field is changed to, a run ends as its requests and responses one by one."""
    outcomes = []
    for joined, sizes in ((False, [1 << 20]), (True, [1 << 20]), (True, split)):
        victim = Victim(joined=joined, ird=ird, mulpdu=mulpdu)
        stream = victim.stream()
        changed = bytearray(stream[index])
        start, size = field
        old = int.from_bytes(changed[start : start + size], "big")
        new = {"0": 0, "max": -1, "+1": old + 1, "-1": old - 1, "+9": old + 9, "-9": old - 9}.get(str(value), value)
        assert isinstance(new, int)
        if start + size <= len(changed) - 4:
            changed[start : start + size] = (new & (1 << 8 * size) - 1).to_bytes(size, "big")
        stream[index] = bytes(changed)
        feed(victim.end, b"".join(stream), sizes)
        outcomes.append(victim.outcome())
    plain, whole, cut = outcomes
    assert whole == plain
    cut["output"] = [record for record in cut["output"] if record[3] & 0xF != ddp.OP_TERMINATE]
    plain["output"] = [record for record in plain["output"] if record[3] & 0xF != ddp.OP_TERMINATE]
    assert cut == plain


def _requests(memory: Memory, count: int, *, first: int = 1) -> bytes:
    """Make Read Requests that are alike, numbered from `first` on."""
    numbers = [first + index & ddp.MASK32 for index in range(count)]
    return b"".join(read_request(memory.key, memory.addr, 8, msn=msn) for msn in numbers)


def _asked(*, ird: int = 64, msn: int = 1) -> End:
    """Make an endpoint that is asked by runs."""
    end = End()
    end.endpoint.start(agreed(ird=ird), initiator=True, mulpdu=1000, joined=True)
    end.endpoint.responder.request_msn = msn
    return end


@pytest.mark.parametrize("before", range(10))
def test_numbers_wrap_within_a_run(before: int) -> None:
    """A run whose sequence numbers wrap, or end right before, is answered, and so is what follows."""
    first = ddp.MASK32 - before
    end = _asked(msn=first)
    end.feed(_requests(end.memory(8), 6, first=first))
    end.feed(_requests(end.memory(8), 6, first=first + 6 & ddp.MASK32))
    assert len(end.output()) == 12
    assert end.endpoint.state is QPState.RTS


@pytest.mark.parametrize("ird", [8, 11])
def test_runs_keep_ird(ird: int) -> None:
    """Each request of a run counts as one: what is beyond IRD is refused."""
    end = _asked(ird=ird)
    end.feed(_requests(end.memory(8), 8))
    end.feed(_requests(end.memory(8), ird - 7, first=9))
    assert end.terminated() == Terminated(1, 2, 2)


@pytest.mark.parametrize("fault", ["right", "domain", "closed"])
def test_a_run_without_a_right(fault: str) -> None:
    """A run that reads what it may not is refused as a single READ is."""
    end = _asked()
    access = Access.REMOTE_WRITE if fault == "right" else Access.REMOTE_READ
    memory = end.memory(8, access, pd=object() if fault == "domain" else None)
    if fault == "closed":
        memory.region.close()
    end.feed(_requests(memory, 8))
    code = {"right": 2, "domain": 3, "closed": 0}[fault]
    assert end.terminated() == Terminated(0, 1, code)


def test_the_fast_path_is_taken() -> None:
    """Requests that are alike leave in one buffer and are answered in one."""
    wire = Wire(joined=True, reads=64)
    source = wire.server.memory(bytes(range(256)))
    sink = wire.client.memory(256, Access.LOCAL_WRITE)
    wire.pump()
    offsets = range(0, 256, 8)
    wire.client.post_run(Opcode.RDMA_READ, sink, offsets, source, offsets, 8)
    assert len(wire.client.endpoint.outbox.small) == 1
    wire.to_server.send(1 << 20)
    wire.to_server.deliver(1 << 20)
    assert len(wire.server.endpoint.outbox.small) == 1
    wire.pump()
    assert sink.content == bytes(range(256))
    assert len(wire.client.sent()) == 1


def requests_of(end: End, run: RunWR) -> list[bytes]:
    """Post a run; gives its FPDUs."""
    end.endpoint.post_run(run)
    return end.output()


@settings(deadline=None, max_examples=100)
@given(
    size=st.one_of(st.integers(0, 40), st.sampled_from([COPY_LIMIT, COPY_LIMIT + 1])),
    sinks=st.lists(st.integers(0, 1000), min_size=1, max_size=70),
    before=st.one_of(st.just(0), st.integers(ddp.MASK32 - 80, ddp.MASK32)),
    opcode=st.sampled_from([Opcode.RDMA_READ, Opcode.RDMA_WRITE]),
)
@example(size=8, sinks=list(range(8)), before=ddp.MASK32 - 3, opcode=Opcode.RDMA_READ)
@example(size=8, sinks=list(range(8)), before=ddp.MASK32 - 8, opcode=Opcode.RDMA_READ)
def test_same_bytes(size: int, sinks: list[int], before: int, opcode: Opcode) -> None:
    """A run is the same FPDUs on the wire as its requests, whatever its size, count and sequence numbers."""
    made = []
    for joined in (True, False):
        end = End()
        memory = end.memory(1000 + 2 * COPY_LIMIT)
        end.endpoint.start(agreed(ord=64), initiator=True, mulpdu=65_518, joined=joined)
        end.endpoint.send_queue._request_msn = before
        run = RunWR(opcode, size, memory.key, 7, [memory.addr + s for s in sinks], [5 * s for s in sinks])
        run.wr_id = 2 * len(sinks)
        if joined:
            end.endpoint.post_run(run)
        else:
            end.endpoint.post_send(run.expand())
        made.append((end.output(), end.sent(), outstanding(end)))
    assert made[0] == made[1]


def bad(memory: Memory, index: int) -> list[int]:
    """Give addresses of which one isn't in the memory."""
    addresses = [memory.addr + 8 * n for n in range(6)]
    addresses[index] = memory.addr + memory.length - 7
    return addresses


@pytest.mark.parametrize("index", range(6))
def test_bad_local_memory(index: int) -> None:
    """Of a run with one piece that doesn't fit, that one fails, and the others are flushed."""
    end = End()
    end.endpoint.start(agreed(ord=64), initiator=True, mulpdu=1000, joined=True)
    memory = end.memory(64)
    run = RunWR(Opcode.RDMA_READ, 8, memory.key, 7, bad(memory, index), range(6))
    run.wr_id = 12
    end.endpoint.post_run(run)
    statuses = [WCStatus.WR_FLUSH_ERR] * 6
    statuses[index] = WCStatus.LOC_PROT_ERR
    assert [c[:2] for c in end.sent()] == list(zip(range(2, 14, 2), statuses, strict=True))
    assert end.endpoint.state is QPState.ERR


def test_sink_without_local_write() -> None:
    """A run into memory without LOCAL_WRITE fails with its first request."""
    end = End()
    end.endpoint.start(agreed(ord=64), initiator=True, mulpdu=1000, joined=True)
    memory = end.memory(64, Access.REMOTE_WRITE)
    offsets = range(0, 64, 8)
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert [c[1] for c in end.sent()] == [WCStatus.LOC_PROT_ERR] + [WCStatus.WR_FLUSH_ERR] * 7
    assert not end.output()


@pytest.mark.parametrize("answered", range(COUNT))
def test_flush(answered: int) -> None:
    """A run that is flushed halfway completes, flushed, with each request that wasn't answered."""
    victim = Victim(joined=True)
    feed(victim.end, b"".join(victim.stream()[COUNT : COUNT + answered]), [1 << 20])
    victim.end.endpoint.ended("gone")
    first = victim.run.wr_id - 2 * (COUNT - 1)
    left = [first + 2 * n for n in range(answered, COUNT)]
    assert [c[:2] for c in victim.end.sent()] == [
        (wr_id, WCStatus.WR_FLUSH_ERR) for wr_id in (*left, victim.behind.wr_id)
    ]


def test_flush_of_a_run_that_waits() -> None:
    """A run that waits for ORD, or was posted too late, completes flushed with each of its requests."""
    end = End()
    end.endpoint.start(agreed(ord=4), initiator=True, mulpdu=1000, joined=True)
    memory = end.memory(64)
    end.post(Opcode.RDMA_READ)
    offsets = [0, 8, 16, 24]
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert len(end.output()) == 1
    end.endpoint.to_error()
    assert len(end.sent()) == 5
    end.post_run(Opcode.RDMA_READ, memory, offsets, memory, offsets, 8)
    assert [c[1] for c in end.sent()] == [WCStatus.WR_FLUSH_ERR] * 4


def test_terminate_names_one_of_a_run() -> None:
    """The peer's Terminate fails the READ of the run that it quotes; the others are flushed."""
    victim = Victim(joined=True)
    refused = read_request(1, 2, 3, msn=4)[:48]
    payload = bytes.fromhex("0101e000") + refused
    terminate = ddp.UNTAGGED_HEADER.pack(18 + len(payload), ddp.UNTAGGED_LAST | 7, 0, 2, 1, 0) + payload
    victim.end.feed(terminate + bytes(-len(terminate) % 4 + 4))
    statuses = [c[1] for c in victim.end.sent()]
    assert statuses == [5, 5, 5, WCStatus.REM_ACCESS_ERR, 5, 5, 5, 5, 5]


def test_runs_keep_ord() -> None:
    """Runs and single READs together stay within ORD, and go on as responses come."""
    wire = Wire(joined=True, reads=10, sizes=[100])
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


def test_ord_behind_a_run() -> None:
    """A run that is done leaves as many places as there were before, and no more."""
    victim = Victim(joined=True)
    feed(victim.end, b"".join(victim.stream()[COUNT:]), [50])
    assert outstanding(victim.end) == 0
    for _ in range(70):
        victim.end.post(Opcode.RDMA_READ)
    assert len(victim.end.output()) == outstanding(victim.end) == 64


def test_fence_behind_a_run() -> None:
    """A fenced request waits for the whole run."""
    victim = Victim(joined=True)
    victim.end.post(Opcode.SEND, flags=SendFlags.FENCE)
    stream = victim.stream()[COUNT:]
    for record in stream:
        assert not victim.end.output()
        victim.end.feed(record)
    assert len(victim.end.output()) == 1


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


def test_sizes() -> None:
    """What a run counts with is what is on the wire."""
    assert len(read_request(1, 2, 3)) == runs.REQUEST_SIZE
    for size in range(1, 20):
        response = tagged(ddp.OP_READ_RESPONSE, 1, 2, bytes(size))
        assert len(response) == runs.response_size(size)
    assert len(fpdus(runs.encode_requests(1, 2, range(5), 8, 3, range(5)))) == 5
