"""Run the benchmarks: ours and theirs interleaved, in both placements, and print the table."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import uvloop
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

import aiordma
from aiordma import RemoteRegion
from benchmarks.footprint import footprint
from benchmarks.rows import ROWS, Peers, Row

#: The two processes on one core, and on two.
PLACEMENTS = {"one core": (0, 0), "two cores": (0, 1)}


@frozen
class Result:
    """One line of the table; times in us per operation."""

    name: str
    placement: str
    ours: float
    theirs: float
    ratio: float
    goal: str
    met: bool | None
    ours_p99: float = 0.0
    theirs_p99: float = 0.0
    #: CPU time per operation, both processes together.
    ours_cpu: float = 0.0
    theirs_cpu: float = 0.0


def _p99(samples: Sequence[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)] if len(samples) > 1 else samples[0]


class ServerCPU:
    """Asks the server process for the CPU time it has used."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def total(self) -> int:
        self._stdin.write(b"\n")
        self._stdin.flush()
        return int(self._stdout.readline()) + time.process_time_ns()


async def measure(row: Row, peers: Peers, cpu: ServerCPU, placement: str, rounds: int) -> Result:
    """Run a row: a warm-up, then rounds of ours and theirs in turn."""
    medians: dict[str, list[float]] = {"ours": [], "theirs": []}
    tails: dict[str, list[float]] = {"ours": [], "theirs": []}
    spent = {"ours": 0, "theirs": 0}
    for turn in range(rounds + 1):
        for side, run in (("ours", row.ours), ("theirs", row.theirs)):
            before = cpu.total()
            samples = await run(peers, row.operations)
            used = cpu.total() - before
            if turn:  # the first is the warm-up
                medians[side].append(statistics.median(samples))
                tails[side].append(_p99(samples))
                spent[side] += used
    ratios = [a / b for a, b in zip(medians["ours"], medians["theirs"], strict=True)]
    ratio = statistics.median(ratios)
    if row.kind == "rate":
        ratio = 1 / ratio
    met = None
    if row.goal is not None:
        met = ratio <= row.goal if row.kind == "latency" else ratio >= row.goal
    return Result(
        name=row.name,
        placement=placement,
        ours=statistics.median(medians["ours"]) / 1e3,
        theirs=statistics.median(medians["theirs"]) / 1e3,
        ratio=ratio,
        goal=("" if row.goal is None else f"{'<=' if row.kind == 'latency' else '>='} {row.goal}"),
        met=met,
        ours_p99=statistics.median(tails["ours"]) / 1e3,
        theirs_p99=statistics.median(tails["theirs"]) / 1e3,
        ours_cpu=spent["ours"] / rounds / row.operations / 1e3,
        theirs_cpu=spent["theirs"] / rounds / row.operations / 1e3,
    )


async def on_new_connections(row: Row, ports: dict[str, Any], cpu: ServerCPU, placement: str, rounds: int) -> Result:
    """Run a row on connections of its own: what rows before it left behind, with either, isn't its business."""
    region = RemoteRegion.from_bytes(bytes.fromhex(ports["region"]))
    async with aiordma.connect("127.0.0.1", ports["rdma"], device="soft") as conn:
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["tcp"])
        sink = await asyncio.open_connection("127.0.0.1", ports["tcp"])
        sink[1].write(b"S" + bytes(8))
        await sink[0].readexactly(4)
        try:
            return await measure(row, Peers(conn, region, reader, writer, *sink), cpu, placement, rounds)
        finally:
            writer.close()
            sink[1].close()


async def run_placement(placement: str, rows: list[Row], rounds: int) -> list[Result]:
    """Run rows against a server process of its own."""
    server_cpu, client_cpu = PLACEMENTS[placement]
    os.sched_setaffinity(0, {client_cpu})
    command = [sys.executable, "-m", "benchmarks.server", "--cpu", str(server_cpu)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ports = json.loads(process.stdout.readline())
            cpu = ServerCPU(process.stdin, process.stdout)
            results = [await on_new_connections(row, ports, cpu, placement, rounds) for row in rows]
        finally:
            process.stdin.close()
    return results


def table(results: list[Result]) -> Table:
    """Lay out the results."""
    shown = Table(title="aiordma on the soft device against asyncio TCP streams, both on uvloop; us per operation")
    for column in ("row", "placement", "ours", "p99", "cpu", "theirs", "p99", "cpu", "ratio", "goal", "met"):
        shown.add_column(column, justify="left" if column in ("row", "placement") else "right")
    for r in results:
        figures = [r.ours, r.ours_p99, r.ours_cpu, r.theirs, r.theirs_p99, r.theirs_cpu, r.ratio]
        met = {True: "yes", False: "no", None: ""}[r.met]
        shown.add_row(r.name, r.placement, *(f"{figure:.2f}" for figure in figures), r.goal, met)
    return shown


def main() -> None:
    """Parse arguments, run, print, write build/bench.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.only.lower() in row.name.lower()]
    available = os.sched_getaffinity(0)
    results: list[Result] = []
    for placement, cpus in PLACEMENTS.items():
        if not available.issuperset(cpus):
            print(f"skipped {placement}: this process may use cores {sorted(available)} only")
            continue
        results += uvloop.run(run_placement(placement, rows, arguments.rounds))
    os.sched_setaffinity(0, available)
    entries: list[dict[str, Any]] = [asdict(result) for result in results]
    console = Console(width=150)
    console.print(table(results))
    if not arguments.only:
        for line in footprint():
            console.print(f"{line['name']}: {line['ours']:g} (goal {line['goal']}, met: {line['met']})")
            entries.append(line)
    target = Path("build/bench.json")
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
