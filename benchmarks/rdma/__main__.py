"""Run the benchmarks of an RDMA device: ours and theirs interleaved, print the table, write the numbers."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import uvloop

import aiordma
from aiordma import RemoteRegion
from benchmarks.rdma.perftest import Figures, Perftest
from benchmarks.rdma.raw import RawQP, WaitMode
from benchmarks.rdma.results import Result, as_json, machine, p99, show
from benchmarks.rdma.rows import PLACEMENTS, ROWS, Control, Peers, Row
from benchmarks.rdma.steps import measure_steps

#: Seconds that a row may take: raw pyverbs waits without letting go of the GIL, and only a watchdog gets through.
ROW_LIMIT = 240.0
PERFTEST_RUNS = 3


def main() -> None:
    """Parse arguments, run, print, write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rdma", description=__doc__)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the operations: does it run?")
    parser.add_argument("--row", default="", help="rows whose name contains this; steps: only the table of steps")
    parser.add_argument("--host", default="10.77.0.1", help="an address of the device")
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.row.lower() in row.name.lower()]
    if not rows and arguments.row != "steps":
        parser.error(f"no row has {arguments.row!r} in its name; rows: {', '.join(row.name for row in ROWS)}, steps")
    began = machine()
    available = os.sched_getaffinity(0)
    run = _Run(arguments.device, arguments.host, 2 if arguments.quick else arguments.rounds, arguments.quick)
    for placement, cpus in PLACEMENTS.items():
        if not available.issuperset(cpus or ()):
            print(f"left out, {placement}: this process may use cores {sorted(available)} only")
            continue
        for mode in get_args(WaitMode):
            chosen = [row for row in rows if mode in row.goals and placement in row.placements]
            if placement == "one core" and mode == "polling":
                continue  # who polls keeps the other from the core, until the scheduler takes it away
            if chosen:
                os.sched_setaffinity(0, available if cpus is None else {cpus[1]})
                run.rows(chosen, mode, placement, cpus)
                os.sched_setaffinity(0, available)
    steps = {}
    if arguments.row in ("", "steps"):
        _watch("steps")
        steps = measure_steps(arguments.device, arguments.host, 100 if arguments.quick else 1000)
        faulthandler.cancel_dump_traceback_later()
    order = [row.name for row in ROWS]
    run.results.sort(key=lambda result: (order.index(result.name), result.mode, result.placement))
    show(run.results, steps, arguments.device)
    if arguments.json is not None:
        text = json.dumps(as_json(run.results, steps, arguments.device, began), indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


class _Run:
    """The rows measured so far, and how to measure one."""

    def __init__(self, device: str, host: str, rounds: int, quick: bool) -> None:
        self._device, self._host, self._rounds, self._quick = device, host, rounds, quick
        self.results: list[Result] = []

    def rows(self, rows: list[Row], mode: WaitMode, placement: str, cpus: tuple[int, int] | None) -> None:
        """Measure rows with one way of waiting, against processes of their own."""
        cpu = None if cpus is None else cpus[0]
        with self._peer("aiordma", mode, cpu) as server, self._peer("raw", mode, cpu) as raw_peer:
            uvloop.run(
                self._connected(rows, mode, placement, server, raw_peer, Perftest(self._device, self._host, cpus))
            )

    @contextlib.contextmanager
    def _peer(self, kind: str, mode: WaitMode, cpu: int | None) -> Iterator[Control]:
        command = [
            sys.executable, "-m", "benchmarks.rdma.peer", kind, "--device", self._device, "--host", self._host,
            "--mode", mode, *([] if cpu is None else ["--cpu", str(cpu)]),
        ]  # fmt: skip
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                yield Control(process.stdin, process.stdout)
            finally:
                process.stdin.close()

    async def _connected(
        self, rows: list[Row], mode: WaitMode, placement: str, server: Control, raw_peer: Control, perftest: Perftest
    ) -> None:
        _watch("connecting")
        offered, remote = json.loads(server.answer()), json.loads(raw_peer.answer())
        raw = RawQP(self._device, self._host)
        raw_peer.ask(json.dumps(raw.address()))
        raw.connect(remote)
        aiordma.open_device(self._device).completion_mode = "busy" if mode == "polling" else "event"
        region = RemoteRegion.from_bytes(bytes.fromhex(offered["region"]))
        async with aiordma.connect(self._host, offered["port"], device=self._device) as conn:
            peers = Peers(conn, region, server, raw, raw_peer, perftest, mode)
            for row in rows:
                _watch(row.name)
                result = await self._measure(row, peers, placement)
                self.results.append(result)
                print(
                    f"{row.name}, {mode}, {placement}: {result.ours:.0f} us, {row.opponent} {result.theirs:.0f} us, "
                    f"ratio {result.ratio:.2f} {result.goal and f'(goal {result.goal})'}", flush=True,
                )  # fmt: skip
        raw.close()
        faulthandler.cancel_dump_traceback_later()

    async def _measure(self, row: Row, peers: Peers, placement: str) -> Result:
        """Run a row: a warm-up, then rounds of ours and theirs in turn."""
        operations = row.operations // 10 if self._quick and row.operations >= 500 else row.operations
        medians: dict[str, list[float]] = {"ours": [], "theirs": []}
        tails: dict[str, list[float]] = {"ours": [], "theirs": []}
        spent = {"ours": 0, "theirs": 0}
        for turn in range(self._rounds + 1):
            for side, run in (("ours", row.ours), ("theirs", row.theirs)):
                before = _cpu(peers)
                samples = await run(peers, operations if turn else max(operations // 5, 32))
                used = _cpu(peers) - before
                if turn:  # the first is the warm-up
                    medians[side].append(statistics.median(samples))
                    tails[side].append(p99(samples))
                    spent[side] += used
        ratios = [a / b for a, b in zip(medians["ours"], medians["theirs"], strict=True)]
        if row.kind == "rate":
            ratios = [1 / ratio for ratio in ratios]
        ratio = statistics.median(ratios)
        goal = row.goals[peers.mode]
        met = None
        if goal is not None:
            met = ratio <= goal if row.kind == "latency" else ratio >= goal
        count = self._rounds * operations * 1e3
        return Result(
            name=row.name,
            mode=peers.mode,
            placement=placement,
            opponent=row.opponent,
            ours=statistics.median(medians["ours"]) / 1e3,
            ours_p99=statistics.median(tails["ours"]) / 1e3,
            ours_cpu=spent["ours"] / count,
            theirs=statistics.median(medians["theirs"]) / 1e3,
            theirs_p99=statistics.median(tails["theirs"]) / 1e3,
            theirs_cpu=None if row.opponent.startswith("ib_") else spent["theirs"] / count,
            ratio=ratio,
            ratios=(min(ratios), max(ratios)),
            goal="" if goal is None else f"{'<=' if row.kind == 'latency' else '>='} {goal}",
            met=met,
            perftest=self._perftest(row, peers, operations),
            perftest_halves=row.halves,
        )

    def _perftest(self, row: Row, peers: Peers, operations: int) -> Figures | None:
        """Run perftest's program a few times, and take medians."""
        command = row.perftest.get(peers.mode)
        if command is None:
            return None
        runs = [peers.perftest.run(f"{command} -n {operations}") for _ in range(1 if self._quick else PERFTEST_RUNS)]
        return Figures(
            command,
            typical=statistics.median(run.typical for run in runs),
            average=statistics.median(run.average for run in runs),
            p99=statistics.median(run.p99 for run in runs),
        )


def _cpu(peers: Peers) -> int:
    return peers.server.cpu() + peers.raw_peer.cpu() + time.process_time_ns()


def _watch(what: str) -> None:
    """Begin to watch over a row: a hang ends the program, with a traceback and a failure."""
    print(f"... {what}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(ROW_LIMIT, exit=True)


if __name__ == "__main__":
    main()
