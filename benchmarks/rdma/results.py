"""Results of rows, and how they are shown."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.rdma.perftest import Figures

__all__ = ["Result", "machine", "p99", "show"]


@frozen
class Result:
    """One line of the table; times in us per operation."""

    name: str
    mode: str
    placement: str
    opponent: str
    ours: float
    ours_p99: float
    #: CPU time per operation, both processes together, without the kernel's threads.
    ours_cpu: float
    theirs: float
    theirs_p99: float
    theirs_cpu: float | None
    ratio: float
    #: The lowest and the highest ratio of a round.
    ratios: tuple[float, float]
    goal: str
    met: bool | None
    perftest: Figures | None
    #: perftest's figure is half a round trip.
    perftest_halves: bool


def p99(samples: Sequence[float]) -> float:
    """Give the 99th percentile."""
    return sorted(samples)[min(int(len(samples) * 0.99), len(samples) - 1)]


def machine() -> dict[str, Any]:
    """Say where it was measured."""
    return {
        "kernel": platform.release(), "python": platform.python_version(), "cpus": len(os.sched_getaffinity(0)),
        "load average": os.getloadavg()[0],
    }  # fmt: skip


def show(results: Sequence[Result], steps: Mapping[str, float], device: str) -> None:
    """Print the tables."""
    console = Console(width=170)
    shown = Table(title=f"aiordma on {device}, on uvloop, medians; us per operation")
    right = ("ours", "p99", "cpu", "theirs", "p99", "cpu", "ratio", "of rounds", "goal", "met")
    for column in ("row", "mode", "placement", "theirs is"):
        shown.add_column(column)
    for column in right:
        shown.add_column(column, justify="right")
    shown.add_column("perftest: typical, average, p99")
    for r in results:
        perftest = ""
        if r.perftest is not None:
            figures = f"{r.perftest.typical:.0f}, {r.perftest.average:.0f}, {r.perftest.p99:.0f}"
            perftest = f"{figures} {r.perftest.command}" + (", half a round trip" if r.perftest_halves else "")
        shown.add_row(
            r.name, r.mode, r.placement, r.opponent,
            f"{r.ours:.0f}", f"{r.ours_p99:.0f}", f"{r.ours_cpu:.0f}",
            f"{r.theirs:.0f}", f"{r.theirs_p99:.0f}", "" if r.theirs_cpu is None else f"{r.theirs_cpu:.0f}",
            f"{r.ratio:.2f}", f"{r.ratios[0]:.2f}-{r.ratios[1]:.2f}", r.goal,
            {True: "yes", False: "no", None: ""}[r.met], perftest,
        )  # fmt: skip
    if results:
        console.print(shown)
    if steps:
        prices = Table(title="What each step costs there, us")
        prices.add_column("step")
        prices.add_column("us", justify="right")
        for step, cost in steps.items():
            prices.add_row(step, f"{cost:.2f}")
        console.print(prices)


def as_json(results: Sequence[Result], steps: Mapping[str, float], device: str, began: Mapping[str, Any]) -> Any:
    """Give what goes into the file."""
    return {
        "device": device, "machine": dict(began), "load average at the end": os.getloadavg()[0],
        "unit": "us per operation, medians", "rows": [asdict(result) for result in results], "steps": dict(steps),
    }  # fmt: skip


def median(samples: Sequence[float]) -> float:
    """Give the median in us of samples in ns."""
    return statistics.median(samples) / 1e3
