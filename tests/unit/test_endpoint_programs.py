"""Random programs over two joined endpoints against a model of what RDMA does."""
# ruff: noqa: ARG002 - each kind of operation takes what any needs

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiordma.drivers.soft import mpa
from aiordma.drivers.soft.mpa import RTR
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.enums import Access, Opcode, SendFlags, WCFlags, WCOpcode
from aiordma.types import SGE
from tests.unit.wire import ALL, NO_RTR, End, Memory, Wire

TARGET = 320 * 1024
_U64 = struct.Struct("=Q")

KINDS = (
    "write", "write", "write_imm", "send", "send", "send_se", "send_inv", "read", "read", "fetch_add",
    "compare_swap",
    "local_inv", "receive", "receive", "read_run", "read_run", "write_run", "reads",
)  # fmt: skip


class Op(NamedTuple):
    """A step of a program: what the client (or the server) posts, then so many turns of the wire."""

    server: bool
    kind: str
    size: int
    seed: int
    turns: int


sizes = st.one_of(
    st.integers(0, 40),
    st.integers(0, 3000),
    st.sampled_from([0, 1, 3, COPY_LIMIT, COPY_LIMIT + 1]),
    st.integers(0, 300 * 1024),
)
ops = st.builds(Op, st.booleans(), st.sampled_from(KINDS), sizes, st.integers(0, 1 << 32), st.integers(0, 3))
splits = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 2000), st.integers(1, 1 << 16)), min_size=1, max_size=12)


class Side:
    """One end, its memory, and the model: what that memory and the completions must be at the end."""

    def __init__(self, end: End, lengths: list[int], name: int) -> None:
        self.end = end
        filler = random.Random(name)
        self.source = end.memory(filler.randbytes(TARGET), Access(0))
        self.target = end.memory(TARGET)
        self.sink = end.memory(TARGET, Access.LOCAL_WRITE)
        self.inbox = end.memory(sum(lengths), Access.LOCAL_WRITE)
        self.lengths = lengths
        self.posted_receives = 0
        self.victims: list[Memory] = []
        self.model_target = bytearray(TARGET)
        self.model_sink = bytearray(TARGET)
        self.model_inbox = bytearray(sum(lengths))
        self.model_sent: list[tuple[int, int]] = []
        self.model_received: list[tuple[int, int, int, int]] = []
        self.unfenced: list[range] = []

    def post_receive(self, seed: int) -> None:
        """Post the next receive, as one piece or several."""
        if self.posted_receives < len(self.lengths):
            start = sum(self.lengths[: self.posted_receives])
            length = self.lengths[self.posted_receives]
            self.posted_receives += 1
            self.end.receive(*pieces(self.inbox, start, length, random.Random(seed)))


def pieces(memory: Memory, start: int, length: int, chance: random.Random) -> list[SGE]:
    """Cut a range of memory into a scatter list, empty elements included."""
    cuts = sorted(chance.randint(0, length) for _ in range(chance.choice((0, 0, 1, 3))))
    bounds = [0, *cuts, length]
    return [memory.sge(start + a, b - a) for a, b in pairwise(bounds)]


class Poster:
    """Posts one side's operations and applies them to the model of both."""

    def __init__(self, side: Side, peer: Side) -> None:
        self.side = side
        self.peer = peer

    def run(self, op: Op) -> None:
        chance = random.Random(op.seed)
        flags = SendFlags.SIGNALED if chance.random() < 0.7 else SendFlags(0)
        if chance.random() < 0.1:
            flags |= SendFlags.FENCE
        actions: dict[str, Callable[[int, random.Random, int], None]] = {
            "write": self.write, "write_imm": self.write_imm, "send": self.send, "send_se": self.send_se,
            "send_inv": self.send_inv, "read": self.read, "fetch_add": self.fetch_add,
            "compare_swap": self.compare_swap, "local_inv": self.local_inv, "read_run": self.read_run,
            "write_run": self.write_run, "reads": self.reads,
        }  # fmt: skip
        actions[op.kind](op.size, chance, flags)

    def _data(self, size: int, chance: random.Random) -> tuple[bytes, list[SGE], bytes | None]:
        start = chance.randint(0, TARGET - size)
        data = bytes(self.side.source.view[start : start + size])
        if chance.random() < 0.3:
            return data, [], data
        return data, pieces(self.side.source, start, size, chance), None

    def _fenced(self, flags: int, touched: range) -> int:
        """Fence what would change memory under an unanswered READ: iWARP lets it overtake the answer."""
        if any(touched.start < other.stop and other.start < touched.stop for other in self.side.unfenced):
            flags |= SendFlags.FENCE
        if flags & SendFlags.FENCE:
            self.side.unfenced.clear()
        return flags

    def _posted(self, wr_id: int, flags: int, opcode: WCOpcode) -> None:
        if flags & SendFlags.SIGNALED:
            self.side.model_sent.append((wr_id, opcode))

    def write(self, size: int, chance: random.Random, flags: int, imm: int | None = None) -> None:
        data, sg_list, inline = self._data(size, chance)
        at = chance.randint(0, TARGET - size)
        flags = self._fenced(flags, range(at, at + size))
        opcode = Opcode.RDMA_WRITE if imm is None else Opcode.RDMA_WRITE_WITH_IMM
        wr = self.side.end.post(opcode, sg_list, to=self.peer.target, at=at, flags=flags, inline=inline, imm=imm or 0)
        self.peer.model_target[at : at + size] = data
        self._posted(wr.wr_id, flags, WCOpcode.RDMA_WRITE)

    def write_imm(self, size: int, chance: random.Random, flags: int) -> None:
        imm = chance.getrandbits(32)
        self.write(size, chance, flags, imm)
        self.peer.model_received.append((WCOpcode.RECV_RDMA_WITH_IMM, size, imm, WCFlags.WITH_IMM))

    def send(self, size: int, chance: random.Random, flags: int) -> None:
        self._message(Opcode.SEND, size, chance, flags, 0)

    def send_se(self, size: int, chance: random.Random, flags: int) -> None:
        self._message(Opcode.SEND, size, chance, flags | SendFlags.SOLICITED, 0)

    def send_inv(self, size: int, chance: random.Random, flags: int) -> None:
        victim = self.peer.end.memory(8)
        self.peer.victims.append(victim)
        self._message(Opcode.SEND_WITH_INV, size, chance, flags, victim.key)

    def _message(self, opcode: Opcode, size: int, chance: random.Random, flags: int, key: int) -> None:
        data, sg_list, inline = self._data(size, chance)
        self._fenced(flags, range(0))
        wr = self.side.end.post(opcode, sg_list, flags=flags, inline=inline, imm=key)
        start = sum(self.peer.lengths[: len(self.peer.model_received)])
        self.peer.model_inbox[start : start + size] = data
        self.peer.model_received.append((WCOpcode.RECV, size, key, WCFlags.WITH_INV if key else 0))
        self._posted(wr.wr_id, flags, WCOpcode.SEND)

    def read(self, size: int, chance: random.Random, flags: int) -> None:
        at, into = chance.randint(0, TARGET - size), chance.randint(0, TARGET - size)
        flags = self._fenced(flags, range(0))
        sg_list = pieces(self.side.sink, into, size, chance)
        wr = self.side.end.post(Opcode.RDMA_READ, sg_list, to=self.peer.target, at=at, flags=flags)
        self.side.unfenced.append(range(at, at + size))
        self.side.model_sink[into : into + size] = self.peer.model_target[at : at + size]
        self._posted(wr.wr_id, flags, WCOpcode.RDMA_READ)

    def _offsets(self, count: int, size: int, chance: random.Random) -> list[int]:
        """Give places for pieces of one size: next to each other, near each other, or anywhere."""
        start = chance.randint(0, TARGET - count * size)
        kind = chance.random()
        if kind < 0.4:
            return [start + index * size for index in range(count)]
        if kind < 0.7:
            return [start + chance.randint(0, (count - 1) * size) for _ in range(count)]
        return [chance.randint(0, TARGET - size) for _ in range(count)]

    def read_run(self, size: int, chance: random.Random, flags: int) -> None:
        count, size = chance.randint(1, 40), size % 5000
        at, into = self._offsets(count, size, chance), self._offsets(count, size, chance)
        flags &= ~SendFlags.FENCE
        run = self.side.end.post_run(Opcode.RDMA_READ, self.side.sink, into, self.peer.target, at, size, flags=flags)
        for source, sink in zip(at, into, strict=True):
            self.side.unfenced.append(range(source, source + size))
            self.side.model_sink[sink : sink + size] = self.peer.model_target[source : source + size]
        self._posted(run.wr_id, flags, WCOpcode.RDMA_READ)

    def write_run(self, size: int, chance: random.Random, flags: int) -> None:
        count, size = chance.randint(1, 40), size % 5000
        at, out = self._offsets(count, size, chance), self._offsets(count, size, chance)
        # A fence of its own, as a run has none: behind it nothing is outstanding.
        if self._fenced(flags & ~SendFlags.FENCE, range(min(at), max(at) + size)) & SendFlags.FENCE:
            self.side.end.post(Opcode.RDMA_WRITE, flags=SendFlags.FENCE)
        flags &= ~SendFlags.FENCE
        run = self.side.end.post_run(Opcode.RDMA_WRITE, self.side.source, out, self.peer.target, at, size, flags=flags)
        for target, source in zip(at, out, strict=True):
            self.peer.model_target[target : target + size] = self.side.source.view[source : source + size]
        self._posted(run.wr_id, flags, WCOpcode.RDMA_WRITE)

    def reads(self, size: int, chance: random.Random, flags: int) -> None:
        """Single READs that are alike, as a run is."""
        size %= 200
        for at in self._offsets(10, size, chance):
            into = chance.randint(0, TARGET - size)
            wr = self.side.end.post(
                Opcode.RDMA_READ, [self.side.sink.sge(into, size)], to=self.peer.target, at=at, flags=flags
            )
            self.side.unfenced.append(range(at, at + size))
            self.side.model_sink[into : into + size] = self.peer.model_target[at : at + size]
            self._posted(wr.wr_id, flags, WCOpcode.RDMA_READ)

    def fetch_add(self, size: int, chance: random.Random, flags: int) -> None:
        self._atomic(Opcode.ATOMIC_FETCH_AND_ADD, chance, flags)

    def compare_swap(self, size: int, chance: random.Random, flags: int) -> None:
        self._atomic(Opcode.ATOMIC_CMP_AND_SWP, chance, flags)

    def _atomic(self, opcode: Opcode, chance: random.Random, flags: int) -> None:
        at = 8 * chance.randint(0, TARGET // 8 - 1)
        into = chance.randint(0, TARGET - 8)
        target = self.peer.model_target
        (old,) = _U64.unpack_from(target, at)
        operand = chance.choice((0, 1, old, chance.getrandbits(64), (1 << 64) - 1))
        swap = chance.getrandbits(64)
        flags = self._fenced(flags, range(at, at + 8))
        wr = self.side.end.post(
            opcode, [self.side.sink.sge(into, 8)], to=self.peer.target, at=at, flags=flags,
            compare_add=operand, swap=swap,
        )  # fmt: skip
        _U64.pack_into(self.side.model_sink, into, old)
        if opcode == Opcode.ATOMIC_FETCH_AND_ADD:
            _U64.pack_into(target, at, old + operand & (1 << 64) - 1)
            self._posted(wr.wr_id, flags, WCOpcode.FETCH_ADD)
        else:
            _U64.pack_into(target, at, swap if old == operand else old)
            self._posted(wr.wr_id, flags, WCOpcode.COMP_SWAP)

    def local_inv(self, size: int, chance: random.Random, flags: int) -> None:
        victim = self.side.end.memory(8)
        self.side.victims.append(victim)
        self._fenced(flags, range(0))
        wr = self.side.end.post(Opcode.LOCAL_INV, to=victim, flags=flags)
        self._posted(wr.wr_id, flags, WCOpcode.LOCAL_INV)


def check(side: Side) -> None:
    """Compare one side with its model."""
    sent = side.end.sent()
    assert [(c[0], c[2]) for c in sent] == side.model_sent
    assert not any(c[1] for c in sent)
    received = side.end.received()
    assert [(c[2], c[3], c[5], c[6]) for c in received] == side.model_received
    assert not any(c[1] for c in received)
    assert [c[0] for c in received] == sorted(c[0] for c in received)
    assert side.target.content == side.model_target
    assert side.sink.content == side.model_sink
    assert side.inbox.content == side.model_inbox
    assert side.source.content
    assert not any(victim.region.registered for victim in side.victims)
    assert not side.end.reports
    assert side.end.endpoint.send_queue.idle
    assert side.end.endpoint.receive_queue.kept_bytes == 0


def lengths_for(program: list[Op], *, server: bool) -> list[int]:
    """Give the size of each receive of a side: as the messages that will come, and some longer."""
    lengths = []
    for op in program:
        if op.server != server:
            if op.kind in ("send", "send_se", "send_inv"):
                lengths.append(op.size + op.seed % 3)
            elif op.kind == "write_imm":
                lengths.append(op.seed % 9)
    return lengths


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    program=st.lists(ops, max_size=25),
    mulpdu=st.one_of(st.integers(128, 2000), st.sampled_from([1428, 65_518])),
    crc=st.booleans() if mpa.CRC32C_AVAILABLE else st.just(value=False),
    reads=st.one_of(st.integers(1, 4), st.integers(1, 128)),
    joined=st.booleans(),
    rtr=st.sampled_from([NO_RTR, RTR.WRITE, RTR.READ, RTR.SEND]),
    seed=st.integers(0, 1 << 32),
    split=splits,
)
def test_programs(
    program: list[Op], mulpdu: int, crc: bool, reads: int, joined: bool, rtr: RTR, seed: int, split: list[int]
) -> None:
    """Any program, segmented and split in any way, does to memory and completions what the model says."""
    joined = joined and not crc
    wire = Wire(
        crc=crc, joined=joined, mulpdu=65_518 if joined else mulpdu, reads=reads, rtr=rtr, seed=seed, sizes=split,
        recv_bound=1 << 30,
    )  # fmt: skip
    client = Side(wire.client, lengths_for(program, server=False), 1)
    server = Side(wire.server, lengths_for(program, server=True), 2)
    for op in program:
        side, peer = (server, client) if op.server else (client, server)
        if op.kind == "receive":
            side.post_receive(op.seed)
        else:
            Poster(side, peer).run(op)
        for _ in range(op.turns):
            wire.step()
    # Without a ready-to-receive message the server waits for the client's first.
    Poster(client, server).write(0, random.Random(0), SendFlags.SIGNALED)
    wire.pump()
    for side in (client, server):
        while side.posted_receives < len(side.lengths):
            side.post_receive(0)
    wire.pump()
    assert wire.idle
    check(client)
    check(server)


@pytest.mark.parametrize(("mulpdu", "joined"), [(128, False), (65_518, False), (65_518, True)])
def test_every_kind_at_every_split(mulpdu: int, joined: bool) -> None:
    """A program with every operation survives a cut at each single byte of its first kilobytes."""
    program = [Op(False, kind, 50 * index, 7 + index, 0) for index, kind in enumerate(dict.fromkeys(KINDS))]
    for cut in range(1, 2000, 3):
        wire = Wire(mulpdu=mulpdu, joined=joined, reads=64 if joined else 2, sizes=(cut, 1 << 17))
        client = Side(wire.client, [], 1)
        server = Side(wire.server, lengths_for(program, server=True), 2)
        for op in program:
            if op.kind == "receive":
                server.post_receive(op.seed)
            else:
                Poster(client, server).run(op)
        while server.posted_receives < len(server.lengths):
            server.post_receive(0)
        wire.pump()
        check(client)
        check(server)


assert ALL  # what `Side.target` is registered with
