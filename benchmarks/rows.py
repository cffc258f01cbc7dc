"""What is measured: each row runs ours and theirs for a number of operations, and gives nanoseconds per operation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from attrs import frozen

from aiordma import Connection, RemoteRegion

MIB = 1 << 20
IN_FLIGHT = 64


@frozen
class Peers:
    """The client's ends of both connections."""

    conn: Connection
    remote: RemoteRegion
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sink_reader: asyncio.StreamReader
    sink_writer: asyncio.StreamWriter


#: Runs for a number of operations, and gives the time of each, or of each group, per operation in ns.
Run = Callable[[Peers, int], Awaitable[Sequence[float]]]


@frozen
class Row:
    """One line of the table."""

    name: str
    ours: Run
    theirs: Run
    #: "latency": ratio is ours over theirs, at most the goal. "rate": theirs over ours in time, at least the goal.
    kind: Literal["latency", "rate"]
    goal: float | None
    operations: int


async def read_8(peers: Peers, count: int) -> list[float]:
    """Awaited READ of 8 bytes, one at a time."""
    conn, remote = peers.conn, peers.remote[:8]
    into = conn.alloc(8)
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        await conn.read(remote, into=into)
        samples.append(float(clock() - start))
    return samples


async def write_8_barrier(peers: Peers, count: int) -> list[float]:
    """WRITE of 8 bytes, then a barrier: placed in the peer's memory."""
    conn, remote = peers.conn, peers.remote[:8]
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        await conn.write(remote, b"8 bytes!")
        await conn.barrier()
        samples.append(float(clock() - start))
    return samples


async def write_8_local(peers: Peers, count: int) -> list[float]:
    """WRITE of 8 bytes to its local completion: handed to the device."""
    conn, remote = peers.conn, peers.remote[:8]
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count // 50):
        start = clock()
        for _ in range(50):
            await conn.write(remote, b"8 bytes!")
        samples.append((clock() - start) / 50)
        await conn.barrier()
    return samples


async def send_8(peers: Peers, count: int) -> list[float]:
    """SEND of 8 bytes, and the peer's program sends it back."""
    conn = peers.conn
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        await conn.send(b"8 bytes!")
        await conn.recv()
        samples.append(float(clock() - start))
    return samples


async def fetch_add(peers: Peers, count: int) -> list[float]:
    """Awaited FETCH_ADD."""
    conn, remote = peers.conn, peers.remote[64:72]
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        await conn.fetch_add(remote, 1)
        samples.append(float(clock() - start))
    return samples


async def echo_8(peers: Peers, count: int) -> list[float]:
    """TCP streams echo of 8 bytes."""
    reader, writer = peers.reader, peers.writer
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        writer.write(b"8 bytes!")
        await reader.readexactly(8)
        samples.append(float(clock() - start))
    return samples


async def reads_64(peers: Peers, count: int) -> list[float]:
    """64 READs of 64 bytes in flight, one awaited future each."""
    conn = peers.conn
    into = conn.alloc(64 * IN_FLIGHT)
    sinks = [into[start : start + 64] for start in range(0, 64 * IN_FLIGHT, 64)]
    remotes = [peers.remote[start : start + 64] for start in range(0, 64 * IN_FLIGHT, 64)]
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count // IN_FLIGHT):
        start = clock()
        for future in [conn.read(remote, sink) for remote, sink in zip(remotes, sinks, strict=True)]:
            await future
        samples.append((clock() - start) / IN_FLIGHT)
    return samples


async def batch_64(peers: Peers, count: int) -> list[float]:
    """64 READs of 64 bytes in one batch."""
    conn = peers.conn
    into = conn.alloc(64 * IN_FLIGHT)
    offsets = range(0, 64 * IN_FLIGHT, 64)
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count // IN_FLIGHT):
        start = clock()
        async with conn.batch() as batch:
            batch.read_many(peers.remote, offsets, 64, into=into)
        samples.append((clock() - start) / IN_FLIGHT)
    return samples


async def echoes_64(peers: Peers, count: int) -> list[float]:
    """64 pipelined TCP echoes of 64 bytes."""
    reader, writer = peers.reader, peers.writer
    data = bytes(64)
    samples = []
    clock = time.perf_counter_ns
    for _ in range(count // IN_FLIGHT):
        start = clock()
        for _ in range(IN_FLIGHT):
            writer.write(data)
        for _ in range(IN_FLIGHT):
            await reader.readexactly(64)
        samples.append((clock() - start) / IN_FLIGHT)
    return samples


async def write_mib(peers: Peers, count: int) -> list[float]:
    """WRITE of 1 MiB, 8 in flight, to placement."""
    conn = peers.conn
    data = conn.alloc(MIB)
    slots = [peers.remote[start : start + MIB] for start in range(0, 8 * MIB, MIB)]
    start = time.perf_counter_ns()
    pending = [conn.write(slots[index], data) for index in range(min(8, count))]
    for index in range(count):
        await pending[index % 8]
        if index + 8 < count:
            pending[index % 8] = conn.write(slots[index % 8], data)
    await conn.barrier()
    return [(time.perf_counter_ns() - start) / count]


async def stream_mib(peers: Peers, count: int) -> list[float]:
    """TCP streams, one way, writes of 1 MiB with drain; the peer acknowledges the end."""
    writer = peers.sink_writer
    data = bytes(MIB)
    start = time.perf_counter_ns()
    writer.write((count * MIB).to_bytes(8, "big"))
    for _ in range(count):
        writer.write(data)
        await writer.drain()
    await peers.sink_reader.readexactly(4)
    return [(time.perf_counter_ns() - start) / count]


ROWS = [
    Row("READ 8 B", read_8, echo_8, "latency", 1.6, 4000),
    Row("WRITE 8 B + barrier", write_8_barrier, echo_8, "latency", 1.6, 4000),
    Row("WRITE 8 B, local completion", write_8_local, echo_8, "latency", None, 4000),
    Row("SEND round trip 8 B", send_8, echo_8, "latency", None, 4000),
    Row("FETCH_ADD", fetch_add, echo_8, "latency", None, 4000),
    Row("64 READs of 64 B in flight", reads_64, echoes_64, "rate", 1.7, 6400),
    Row("64 READs of 64 B in a batch", batch_64, echoes_64, "rate", 3.0, 6400),
    Row("WRITE 1 MiB, 8 in flight", write_mib, stream_mib, "rate", 1.0, 256),
]
