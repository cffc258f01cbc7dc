"""`aiordma demo`: a server and a client in two processes, and what an operation costs beside a TCP echo."""

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, Self, TypeAlias

import attrs
import click
from rich import box
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
_MODULE: Final = "aiordma.tools.demo"

# -- measuring -----------------------------------------------------------------------------------------------

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

        def part(share: float) -> float:
            return ordered[math.ceil(len(ordered) * share) - 1] / 1000

        return cls(part(0.5), part(0.99), part(0.999), len(ordered))


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


# -- the server process --------------------------------------------------------------------------------------


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
    # The very package that this is, wherever it was imported from, and (-P) not one in the working directory.
    paths = [str(Path(aiordma.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(  # noqa: S603 - this same interpreter
        [sys.executable, "-P", "-m", _MODULE, loop, str(size), "" if cpu is None else str(cpu)],
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


# -- the client ----------------------------------------------------------------------------------------------


def _prove(what: bool, claim: str) -> None:
    if not what:
        raise click.ClickException(f"the demo failed: not true that {claim}")


async def _tour(conn: Connection, port: int) -> AsyncIterator[tuple[str, str]]:
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


def _rows(size: int) -> dict[str, str]:
    """Give the rows of the table: each operation, and the TCP echo that it is measured beside."""
    echo = f"TCP echo {size:,} B"
    return {
        f"READ {size:,} B": echo,
        f"WRITE {size:,} B + barrier": echo,
        f"SEND {size:,} B and back": echo,
        "FETCH_ADD 8 B": "TCP echo 8 B",
    }


async def _measure(conn: Connection, tcp_port: int, size: int, seconds: float) -> dict[str, Latency]:
    """Measure each kind of operation, and in turn with it a TCP echo."""
    remote = RemoteRegion.from_bytes(conn.peer_private_data)
    data = remote[DATA_START : DATA_START + size]
    counter = remote[:8]
    local = conn.alloc(size)
    payload = bytes(size)
    reader, writer = await asyncio.open_connection(HOST, tcp_port)

    def read() -> Awaitable[object]:
        return conn.read(data, into=local)

    def write() -> Awaitable[object]:
        conn.write(data, payload)
        return conn.barrier()

    def send() -> Awaitable[object]:
        conn.send(payload)
        return conn.recv()

    def fetch_add() -> Awaitable[object]:
        return conn.fetch_add(counter, 1)

    def echo() -> Awaitable[object]:
        writer.write(payload)
        return reader.readexactly(size)

    def echo_8() -> Awaitable[object]:
        writer.write(b"8 bytes!")
        return reader.readexactly(8)

    rows = _rows(size)
    operations: dict[str, Operation] = dict(zip(rows, (read, write, send, fetch_add), strict=True))
    operations["TCP echo 8 B"] = echo_8
    operations[f"TCP echo {size:,} B"] = echo
    try:
        return await interleaved(operations, [name for row in rows.items() for name in row], seconds)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class _Demo:
    """One run of the client's side."""

    def __init__(self, size: int, seconds: float, console: Console | None) -> None:
        self._size = size
        self._seconds = seconds
        self._console = console
        self.proven: dict[str, str] = {}
        self.pids: list[int] = []
        cpus = sorted(os.sched_getaffinity(0))
        #: A core for the server and one for the client: left to chance, it would decide the figures.
        self.placement = tuple(random.sample(cpus, 2)) if len(cpus) > 1 else ()

    def say(self, text: str = "") -> None:
        """Print a line, unless the output is for programs."""
        if self._console is not None:
            self._console.print(text, soft_wrap=True, markup=False)

    def run(self, loop: str, factory: Callable[[], asyncio.AbstractEventLoop]) -> dict[str, Latency]:
        """Start a server on a kind of loop, and measure it from a client on the same kind."""
        server_cpu, client_cpu = self.placement or (None, None)
        with _server(loop, self._size, server_cpu) as (pid, ports), _pinned(client_cpu):
            self.pids.append(pid)
            with asyncio.Runner(loop_factory=factory) as runner:
                return runner.run(self._client(ports))

    async def _client(self, ports: dict[str, int]) -> dict[str, Latency]:
        port = ports["rdma"]
        async with (
            asyncio.timeout(self._seconds + 20),
            aiordma.connect(HOST, port, device="soft", param=_param(self._size)) as conn,
        ):
            if not self.proven:
                (device,) = [device for device in aiordma.devices() if device.name == conn.device]
                self.say(
                    f"A server (process {self.pids[0]}) and this client (process {os.getpid()}), "
                    f"on device {device.name}: {device.transport}.\n"
                )
                async for step, claim in _tour(conn, port):
                    self.proven[step] = claim
                    self.say(f"  {step:<10}  {claim}")
                self.say("\nMeasuring ...\n")
            return await _measure(conn, ports["tcp"], self._size, self._seconds)


@contextlib.contextmanager
def _pinned(cpu: int | None) -> Iterator[None]:
    """Run this thread on one core."""
    before = os.sched_getaffinity(0)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop] | None]:
    """Give the kinds of loop; None for one that isn't installed."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return {"asyncio": asyncio.new_event_loop, "uvloop": None}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


# -- what is printed -----------------------------------------------------------------------------------------


def _ratio(measured: Mapping[str, Latency], row: str, echo: str) -> float:
    return measured[row].median / measured[echo].median


def _table(size: int, results: Mapping[str, dict[str, Latency] | None]) -> Table:
    rows = _rows(size)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("microseconds", no_wrap=True)
    for loop, measured in results.items():
        table.add_column(f"{loop}\nmedian" if measured else f"{loop}:\nnot here", justify="right", no_wrap=True)
        for title in ("p99", "p99.9", "x TCP"):
            table.add_column(f"\n{title}", justify="right", no_wrap=True)
    for name in (*rows, *dict.fromkeys(rows.values())):
        cells = [name]
        for measured in results.values():
            if measured is None:
                cells += ["-"] * 4
                continue
            latency = measured[name]
            cells += [f"{latency.median:.1f}", f"{latency.p99:.0f}", f"{latency.p999:.0f}"]
            cells.append(f"{_ratio(measured, name, rows[name]):.2f}" if name in rows else "1")
        table.add_row(*cells, style=None if name in rows else "dim")
    return table


def _as_dict(demo: _Demo, size: int, results: Mapping[str, dict[str, Latency] | None]) -> dict[str, Any]:
    rows = _rows(size)
    return {
        "device": "soft",
        "python": platform.python_version(),
        "cpus": list(demo.placement),
        "server_pids": demo.pids,
        "proven": demo.proven,
        "missing": [loop for loop, measured in results.items() if measured is None],
        "results": [
            {
                "name": name,
                "loop": loop,
                "unit": "us",
                "ours": attrs.asdict(measured[name]),
                "theirs": {"name": echo, **attrs.asdict(measured[echo])},
                "ratio": round(_ratio(measured, name, echo), 3),
            }
            for loop, measured in results.items()
            if measured is not None
            for name, echo in rows.items()
        ],
    }


@click.command("demo")
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=8.0, show_default=True, help="To measure, in all.")
@click.option(
    "--size",
    type=click.IntRange(1, 1 << 20),
    default=8,
    show_default=True,
    help="Bytes of READ, WRITE and SEND.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def command(*, seconds: float, size: int, as_json: bool) -> None:
    """A server and a client in two processes, and what an awaited operation costs beside a TCP echo."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100  # nothing is cut where nobody sees the edge
    loops = _loops()
    demo = _Demo(size, seconds / sum(factory is not None for factory in loops.values()), None if as_json else console)
    results: dict[str, dict[str, Latency] | None] = {}
    try:
        for loop, factory in loops.items():
            results[loop] = demo.run(loop, factory) if factory is not None else None
    except aiordma.RDMAError:
        raise
    except TimeoutError:
        raise click.ClickException("the demo wasn't done in time; is this machine very busy?") from None
    if as_json:
        click.echo(json.dumps(_as_dict(demo, size, results), indent=2))
        return
    console.print(_table(size, results))
    demo.say("x TCP: the median over that of a TCP echo (asyncio streams) on the same loop; below 1 is faster.")
    if demo.placement:
        server_cpu, client_cpu = demo.placement
        demo.say(f"Measured in turns, with the servers on core {server_cpu} and the clients on core {client_cpu}.")
    if results["uvloop"] is None:
        demo.say("uvloop isn't installed: pip install 'aiordma[uvloop]'")


def _main(loop: str, size: str, cpu: str) -> None:
    """Be the server process."""
    if cpu:
        os.sched_setaffinity(0, {int(cpu)})
    factory = _loops()[loop]
    assert factory is not None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(int(size)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
