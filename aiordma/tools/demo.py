"""`aiordma demo`: a server and a client in two processes, and what an awaited operation costs beside a TCP echo."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import platform
import random
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, Self, TypeAlias

import attrs
import click
from rich.console import Console
from rich.table import Table

import aiordma
from aiordma import Access, Connection, ConnParam, RemoteRegion

__all__ = ["Latency", "Operation", "command", "interleaved"]

HOST: Final = "127.0.0.1"
#: The server's region: a counter in front, data behind it.
DATA_START: Final = 4096
DATA_SIZE: Final = 64 * 1024
#: What the server answers with the SHA-256 of the data, as its own program sees it; all else it echoes.
DIGEST: Final = b"digest, please"
ROUNDS: Final = 5
WARM_UP: Final = 200
#: Seconds for the server process to say where it listens, and to end.
START_TIMEOUT: Final = 20
END_TIMEOUT: Final = 5

# -- measuring --------------------------------------------------------------------------------------------------

#: Starts one operation; awaiting what it returns ends it.
Operation: TypeAlias = Callable[[], Awaitable[object]]


@attrs.frozen
class Latency:
    """Percentiles of an operation's latency, in microseconds."""

    median: float
    p99: float
    p999: float
    samples: int

    @classmethod
    def of(cls, samples_ns: Sequence[int]) -> Self:
        """Take the nearest-rank percentiles of samples in nanoseconds."""
        ordered = sorted(samples_ns)
        ranks = [math.ceil(len(ordered) * part) - 1 for part in (0.5, 0.99, 0.999)]
        return cls(*(ordered[rank] / 1000 for rank in ranks), len(ordered))


async def _timed(operation: Operation, seconds: float) -> list[int]:
    """Await an operation again and again; gives the nanoseconds of each."""
    samples = []
    end = perf_counter_ns() + int(seconds * 1e9)
    while True:
        start = perf_counter_ns()
        await operation()
        stop = perf_counter_ns()
        samples.append(stop - start)
        if stop > end:
            return samples


async def interleaved(
    operations: Mapping[str, Operation], order: Sequence[str], seconds: float, rounds: int = ROUNDS
) -> dict[str, Latency]:
    """Measure operations in rounds, so that what disturbs the machine meanwhile disturbs all of them.

    Args:
        operations: by name.
        order: of their turns in a round; one may have several.
        seconds: all in all.
        rounds: how many.
    """
    samples: dict[str, list[int]] = {name: [] for name in operations}
    for operation in operations.values():
        for _ in range(WARM_UP):
            await operation()
    for _ in range(rounds):
        for name in order:
            samples[name] += await _timed(operations[name], seconds / rounds / len(order))
    return {name: Latency.of(taken) for name, taken in samples.items()}


# -- the server process -----------------------------------------------------------------------------------------


def _param(size: int) -> ConnParam:
    return ConnParam(recv_size=max(4096, size), recv_depth=16 if size <= DATA_SIZE else 2)


async def _serve(size: int) -> None:
    """Offer a region, echo messages, and echo bytes on a TCP port, until standard input ends."""
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()
    stop = asyncio.Event()

    def stdin_ended() -> None:
        loop.remove_reader(stdin)
        stop.set()

    loop.add_reader(stdin, stdin_ended)
    pd = aiordma.open_device("soft").pd
    access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    async with pd.alloc(DATA_START + max(DATA_SIZE, size), access=access) as region:
        data = region[DATA_START:].view
        data[:] = os.urandom(len(data))

        async def handle(conn: Connection) -> None:
            with contextlib.suppress(aiordma.BrokenError):  # the client's end of it is the client's to report
                async for message in conn:
                    await conn.send(hashlib.sha256(data).digest() if message == DIGEST else message)

        async with (
            aiordma.serve(
                handle, HOST, device="soft", private_data=region.remote().to_bytes(), param=_param(size)
            ) as server,
            await asyncio.start_server(_echo, HOST, 0) as tcp,
        ):
            ports = {"rdma": server.port, "tcp": tcp.sockets[0].getsockname()[1]}
            sys.stdout.write(f"{json.dumps(ports)}\n")
            sys.stdout.flush()
            await stop.wait()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@contextlib.contextmanager
def _server(loop: str, size: int, cpu: int | None) -> Iterator[tuple[int, dict[str, int]]]:
    """Run the server process; gives its pid and ports. It ends when the block does, or this process."""
    # The very package that this is, wherever it was imported from; -P: and not another one in the working directory.
    paths = [str(Path(aiordma.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(  # noqa: S603 - this same interpreter
        [sys.executable, "-P", "-m", __spec__.name, loop, str(size), "" if cpu is None else str(cpu)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,  # Ctrl-C is for the client; the server ends with it
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT)
            line = process.stdout.readline() if ready else b""
            if not line:
                raise click.ClickException("the server process didn't start; what it wrote is above")
            yield process.pid, json.loads(line)
        finally:
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()


# -- the client -------------------------------------------------------------------------------------------------


def _prove(what: bool, claim: str) -> None:  # noqa: FBT001
    if not what:
        raise click.ClickException(f"the demo failed: not true that {claim}")


async def _tour(conn: Connection, port: int) -> AsyncSteps:
    """Use each kind of operation, and say what was proven."""
    remote = RemoteRegion.from_bytes(conn.peer_private_data)
    data = remote[DATA_START:]

    async def digest() -> bytes:
        await conn.send(DIGEST)
        return await conn.recv()

    async def same(view: bytes | memoryview) -> bool:
        return hashlib.sha256(view).digest() == await digest()

    yield "connect", f"port {port} answered, and its private data offers a region of {remote.length:,} bytes"

    local = conn.alloc(data.length)
    await conn.read(data, into=local)
    claim = f"{data.length:,} bytes came from the server's memory; its program names the same SHA-256"
    _prove(await same(local.view), claim)
    yield "READ", claim

    local.view[:] = os.urandom(len(local))
    await conn.write(data, local)
    await conn.barrier()
    claim = "as many bytes went there, and the barrier is passed: its program sees every one of them"
    _prove(await same(local.view), claim)
    yield "WRITE", claim

    async with contextlib.AsyncExitStack() as stack:
        connecting = [aiordma.connect(HOST, port, device="soft") for _ in range(4)]
        conns = [await stack.enter_async_context(opening) for opening in connecting]
        numbers = await asyncio.gather(*(c.fetch_add(remote[:8], 1) for _ in range(250) for c in conns))
    claim = "1,000 additions over 4 connections at once: each got a number of its own, none is missing"
    _prove(sorted(numbers) == list(range(1000)), claim)
    yield "FETCH_ADD", claim

    texts = [f"message {number}".encode() * (number % 10) for number in range(100)]
    for text in texts:
        conn.send(text)
    claim = "100 messages, from 0 to 90 bytes, came back whole and in order"
    _prove([await conn.recv() for _ in texts] == texts, claim)
    yield "SEND", claim

    reason = ""
    async with aiordma.connect(HOST, port, device="soft") as intruder:
        try:
            await intruder.read(RemoteRegion(remote.addr + remote.length, 8, remote.rkey))
        except aiordma.RemoteError as error:
            reason = error.reason
    _prove(bool(reason) and await same(local.view), "a READ beyond the region is refused")
    yield "protection", f"a READ beyond the region was refused ({reason}); other connections go on"


#: Name of a step, and what it has proven.
AsyncSteps: TypeAlias = "contextlib.AbstractAsyncContextManager[Any] | Any"


def _rows(size: int) -> dict[str, tuple[str, str]]:
    """Give the rows of the table: name, its operation, the TCP echo beside it."""
    return {
        "READ": (f"READ {size:,} B", f"TCP echo {size:,} B"),
        "WRITE": (f"WRITE {size:,} B + barrier", f"TCP echo {size:,} B"),
        "SEND": (f"SEND {size:,} B and back", f"TCP echo {size:,} B"),
        "FETCH_ADD": ("FETCH_ADD 8 B", "TCP echo 8 B"),
    }
