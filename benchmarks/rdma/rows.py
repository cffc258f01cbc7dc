"""What is measured: each row runs ours and theirs for a number of operations, and gives nanoseconds per operation."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import IO, Literal

from attrs import evolve, field, frozen

from aiordma import Connection, RemoteRegion
from benchmarks.rdma.perftest import Perftest
from benchmarks.rdma.raw import RawQP, WaitMode

__all__ = ["PLACEMENTS", "ROWS", "Control", "Peers", "Row", "Run"]

KIB_64 = 1 << 16
IN_FLIGHT = 16
BATCH = 32

#: Cores of the peer's process and of ours. Unpinned is a placement too: rxe's work is done by threads of the kernel on
#: any core, and a pinned process gets out of their way only by waiting. Where the peer's process takes no part, its
#: core says nothing.
PLACEMENTS: dict[str, tuple[int, int] | None] = {"one core": (0, 0), "two cores": (0, 1), "unpinned": None}


class Control:
    """A peer's process, asked by lines."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def ask(self, line: str) -> str:
        """Send a line, and give the answer."""
        self._stdin.write(line + "\n")
        self._stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Wait for a line."""
        line = self._stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended")
        return line

    def cpu(self) -> int:
        """Ask for the CPU time it has used, in ns."""
        return int(self.ask('{"do": "cpu"}'))


@frozen
class Peers:
    """The client's ends."""

    conn: Connection
    remote: RemoteRegion
    server: Control
    raw: RawQP
    raw_peer: Control
    perftest: Perftest
    mode: WaitMode


#: Runs for a number of operations, and gives the time of each, or of each group, per operation in ns.
Run = Callable[[Peers, int], Awaitable[Sequence[float]]]


@frozen
class Row:
    """One line of the table.

    Attributes:
        name: of the operation.
        ours: runs aiordma.
        theirs: runs the opponent.
        opponent: who that is.
        kind: "latency": the ratio is ours over theirs, at most the goal; "rate": theirs over ours in time.
        goals: by the way of waiting; a way that isn't here isn't run.
        operations: of a round.
        perftest: the command that measures about the same, by the way of waiting.
        halves: perftest's latency is that of one way.
        placements: which of them.
    """

    name: str
    ours: Run
    theirs: Run
    opponent: str
    kind: Literal["latency", "rate"]
    goals: dict[WaitMode, float | None]
    operations: int
    perftest: dict[WaitMode, str] = field(factory=dict)
    halves: bool = False
    placements: Sequence[str] = ("two cores",)


# -- one at a time ----------------------------------------------------------------------------------------------------


async def read(peers: Peers, count: int) -> list[float]:
    """Awaited READ."""
    conn, remote, into, clock = peers.conn, peers.remote[:8], peers.conn.alloc(8), time.perf_counter_ns
    samples = []
    for _ in range(count):
        start = clock()
        await conn.read(remote, into)
        samples.append(float(clock() - start))
    return samples


async def write(peers: Peers, count: int) -> list[float]:
    """Awaited WRITE of registered memory."""
    conn, remote, data, clock = peers.conn, peers.remote[:8], peers.conn.alloc(8), time.perf_counter_ns
    samples = []
    for _ in range(count):
        start = clock()
        await conn.write(remote, data)
        samples.append(float(clock() - start))
    return samples


async def fetch_add(peers: Peers, count: int) -> list[float]:
    """Awaited FETCH_ADD."""
    conn, remote, clock = peers.conn, peers.remote[64:72], time.perf_counter_ns
    samples = []
    for _ in range(count):
        start = clock()
        await conn.fetch_add(remote, 1)
        samples.append(float(clock() - start))
    return samples


async def ping_pong(peers: Peers, count: int) -> list[float]:
    """Awaited SEND, and the answer of the peer's program."""
    conn, data, clock = peers.conn, peers.conn.alloc(8), time.perf_counter_ns
    samples = []
    for _ in range(count):
        start = clock()
        await conn.send(data)
        await conn.recv()
        samples.append(float(clock() - start))
    return samples


async def by_hand(operation: str, peers: Peers, count: int) -> list[float]:
    """One-sided operations of raw pyverbs."""
    return peers.raw.one_sided(operation, peers.mode, count)


async def ping_pong_by_hand(peers: Peers, count: int) -> list[float]:
    """Messages between two processes of raw pyverbs."""
    peers.raw_peer.ask(json.dumps({"do": "echo", "mode": peers.mode, "count": count}))
    samples = peers.raw.ping_pong(peers.mode, count)
    peers.raw_peer.answer()
    return samples


# -- many at a time ---------------------------------------------------------------------------------------------------


async def writes_batched(peers: Peers, count: int) -> list[float]:
    """WRITEs of 64 bytes to 32 places, in a batch."""
    conn, data, clock = peers.conn, peers.conn.alloc(64 * BATCH), time.perf_counter_ns
    pieces = [data[start : start + 64] for start in range(0, 64 * BATCH, 64)]
    places = [peers.remote[start : start + 64] for start in range(0, 64 * BATCH, 64)]
    samples = []
    for _ in range(count // BATCH):
        start = clock()
        async with conn.batch() as batch:
            for place, piece in zip(places, pieces, strict=True):
                batch.write(place, piece)
        samples.append((clock() - start) / BATCH)
    return samples


async def writes_run(peers: Peers, count: int) -> list[float]:
    """The same by `write_many`."""
    conn, data, clock = peers.conn, peers.conn.alloc(64 * BATCH), time.perf_counter_ns
    offsets = range(0, 64 * BATCH, 64)
    samples = []
    for _ in range(count // BATCH):
        start = clock()
        async with conn.batch() as batch:
            batch.write_many(peers.remote, offsets, 64, data=data)
        samples.append((clock() - start) / BATCH)
    return samples


async def writes_one_by_one(peers: Peers, count: int) -> list[float]:
    """The same, each awaited before the next."""
    conn, data, clock = peers.conn, peers.conn.alloc(64 * BATCH), time.perf_counter_ns
    pieces = [data[start : start + 64] for start in range(0, 64 * BATCH, 64)]
    places = [peers.remote[start : start + 64] for start in range(0, 64 * BATCH, 64)]
    samples = []
    for _ in range(count // BATCH):
        start = clock()
        for place, piece in zip(places, pieces, strict=True):
            await conn.write(place, piece)
        samples.append((clock() - start) / BATCH)
    return samples


async def stream(operation: str, peers: Peers, count: int) -> list[float]:
    """Requests of 64 KiB, 16 in flight: the oldest is awaited, then the next is posted in its place."""
    conn, memory = peers.conn, peers.conn.alloc(KIB_64 * IN_FLIGHT)
    operate = conn.read if operation == "READ" else conn.write
    starts = range(0, KIB_64 * IN_FLIGHT, KIB_64)
    pieces = [memory[start : start + KIB_64] for start in starts]
    places = [peers.remote[start : start + KIB_64] for start in starts]
    begin = time.perf_counter_ns()
    pending = [operate(places[index], pieces[index]) for index in range(IN_FLIGHT)]
    for index in range(count):
        slot = index % IN_FLIGHT
        await pending[slot]
        if index + IN_FLIGHT < count:
            pending[slot] = operate(places[slot], pieces[slot])
    return [(time.perf_counter_ns() - begin) / count]


async def stream_perftest(command: str, peers: Peers, count: int) -> list[float]:
    """The same by a program of perftest, of its average."""
    rate = peers.perftest.run(f"{command} -s {KIB_64} -t {IN_FLIGHT} -n {count}").rate
    return [KIB_64 / (rate * (1 << 20)) * 1e9]


def _latency(name: str, ours: Run, theirs: Run, perftest: dict[WaitMode, str], operations: int = 1000) -> Row:
    goals: dict[WaitMode, float | None] = {"event": 1.4, "polling": 1.5}
    return Row(name, ours, theirs, "raw pyverbs", "latency", goals, operations, perftest)


ROWS = [
    _latency(
        "READ 8 B", read, partial(by_hand, "READ"), {"event": "ib_read_lat -s 8 -e", "polling": "ib_read_lat -s 8"}
    ),
    _latency("WRITE 8 B", write, partial(by_hand, "WRITE"), {"polling": "ib_write_lat -s 8"}),
    _latency(
        "FETCH_ADD", fetch_add, partial(by_hand, "FETCH_ADD"), {"event": "ib_atomic_lat -e", "polling": "ib_atomic_lat"}
    ),
    evolve(
        _latency(
            "SEND round trip 8 B", ping_pong, ping_pong_by_hand,
            {"event": "ib_send_lat -s 8 -e", "polling": "ib_send_lat -s 8"}, 500,
        ),
        halves=True, placements=tuple(PLACEMENTS),
    ),
    Row(
        "WRITE 64 KiB, 16 in flight", partial(stream, "WRITE"), partial(stream_perftest, "ib_write_bw"),
        "ib_write_bw (polls)", "rate", {"event": 0.95}, 200,
    ),
    Row(
        "READ 64 KiB, 16 in flight", partial(stream, "READ"), partial(stream_perftest, "ib_read_bw"),
        "ib_read_bw (polls)", "rate", {"event": 0.95}, 200,
    ),
    Row(
        "READ 64 KiB, 16 in flight, events", partial(stream, "READ"), partial(stream_perftest, "ib_read_bw -e"),
        "ib_read_bw -e", "rate", {"event": None}, 200,
    ),
    Row(
        "batch of 32 WRITEs of 64 B", writes_batched, writes_one_by_one, "awaited one by one", "rate",
        {"event": 4.0}, 640,
    ),
    Row(
        "write_many of 32 times 64 B", writes_run, writes_one_by_one, "awaited one by one", "rate",
        {"event": None}, 640,
    ),
]  # fmt: skip
