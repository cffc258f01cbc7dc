"""`aiordma demo`, run as a command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aiordma.tools.demo import Latency, interleaved

MAIN = "from aiordma.tools.main import main; main()"
NO_UVLOOP = f"import sys; sys.modules['uvloop'] = None; {MAIN}"
#: Warnings are errors in both processes; slow callbacks, which the debug mode would report, are none.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONASYNCIODEBUG", "PYTHONDEVMODE")
} | {"PYTHONWARNINGS": "error"}
STEPS = ["connect", "READ", "WRITE", "FETCH_ADD", "SEND", "protection"]


def start(*arguments: str, code: str = MAIN) -> subprocess.Popen[str]:
    """Start the demo."""
    return subprocess.Popen(
        [sys.executable, "-c", code, "demo", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, code: str = MAIN) -> str:
    """Run the demo to its end; gives what it printed."""
    with start(*arguments, code=code) as demo:
        out, err = demo.communicate(timeout=40)
    assert (demo.returncode, err) == (0, "")
    return out


def server_pid(demo: subprocess.Popen[str]) -> int:
    """Read the demo's first line, which names its server."""
    assert demo.stdout is not None
    found = re.search(r"A server \(process (\d+)\)", line := demo.stdout.readline())
    assert found, line
    return int(found[1])


def ends(pid: int) -> bool:
    """Wait until a process has ended, or is a zombie of its new parent's; False: it goes on."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def output() -> str:
    """Run the demo once, for a person."""
    return run("--seconds", "0.2")


def test_says_what_was_proven(output: str) -> None:
    """Each step has its line."""
    told = output.partition("Measuring ...")[0]
    assert [line.split()[0] for line in told.splitlines() if line.startswith("  ")] == STEPS


def test_says_what_it_costs(output: str) -> None:
    """The table has a row for each operation and the echo, with figures for both loops, in 80 columns."""
    table = output.partition("Measuring ...")[2].rpartition("x TCP:")[0].splitlines()
    assert max(len(line.rstrip()) for line in table) <= 80
    for row in ("READ 8 B", r"WRITE 8 B \+ barrier", "SEND 8 B and back", "FETCH_ADD 8 B", "TCP echo 8 B"):
        assert any(re.fullmatch(rf" *{row}( +[\d.]+){{8}} *", line) for line in table), row


def test_json() -> None:
    """For programs there is one object; its ratios are those of its medians, and its servers are gone."""
    found = json.loads(run("--seconds", "0.2", "--json"))
    assert list(found["proven"]) == STEPS
    assert found["missing"] == []
    assert [result["loop"] for result in found["results"]] == ["asyncio"] * 4 + ["uvloop"] * 4
    for result in found["results"]:
        ours, theirs = result["ours"], result["theirs"]
        assert result["ratio"] == pytest.approx(ours["median"] / theirs["median"], abs=1e-3)
        assert 0 < ours["median"] <= ours["p99"] <= ours["p999"]
    assert len(found["server_pids"]) == 2
    assert all(ends(pid) for pid in found["server_pids"])


def test_other_sizes() -> None:
    """READ, WRITE and SEND take the size, beside an echo of it; the atomic and its echo are of 8 bytes."""
    results = json.loads(run("--seconds", "0.2", "--size", "100000", "--json"))["results"]
    assert {(result["name"], result["theirs"]["name"]) for result in results} == {
        ("READ 100,000 B", "TCP echo 100,000 B"),
        ("WRITE 100,000 B + barrier", "TCP echo 100,000 B"),
        ("SEND 100,000 B and back", "TCP echo 100,000 B"),
        ("FETCH_ADD 8 B", "TCP echo 8 B"),
    }


def test_two_at_once() -> None:
    """Two demos don't know of each other."""
    with start("--seconds", "0.2") as one, start("--seconds", "0.2") as other:
        for demo in (one, other):
            _, err = demo.communicate(timeout=40)
            assert (demo.returncode, err) == (0, "")


def test_without_uvloop() -> None:
    """Without uvloop its columns say so, and what to install."""
    out = run("--seconds", "0.1", code=NO_UVLOOP)
    assert "not here" in out
    assert re.search(r"READ 8 B( +[\d.]+){4}( +-){4}", out)
    assert out.endswith("uvloop isn't installed: pip install 'aiordma[uvloop]'\n")


def test_client_killed() -> None:
    """A client that is killed leaves no server behind."""
    with start("--seconds", "60") as demo:
        pid = server_pid(demo)
        demo.kill()
        assert ends(pid)


def test_interrupted() -> None:
    """Ctrl-C ends both, without a traceback."""
    with start("--seconds", "60") as demo:
        pid = server_pid(demo)
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=40)
    assert (demo.returncode, err.strip()) == (1, "Aborted!")
    assert ends(pid)


def test_server_killed() -> None:
    """A server that dies is one line and exit status 1."""
    with start("--seconds", "60") as demo:
        os.kill(server_pid(demo), signal.SIGKILL)
        _, err = demo.communicate(timeout=40)
    assert demo.returncode == 1
    assert re.fullmatch(r"aiordma: .+\n", err)


def test_server_that_does_not_start() -> None:
    """If the server process fails, what it wrote is shown."""
    code = f"import aiordma.tools.demo as demo; demo._MODULE = 'no.such.module'; {MAIN}"
    with start(code=code) as demo:
        _, err = demo.communicate(timeout=40)
    assert demo.returncode == 1
    assert "no.such.module" in err or "No module named" in err
    assert err.endswith("Error: the server process didn't start; what it wrote is above\n")


def test_percentiles() -> None:
    """Percentiles are by nearest rank, in microseconds."""
    assert Latency.of([n * 1000 for n in range(1000, 0, -1)]) == Latency(500.0, 990.0, 999.0, 1000)
    assert Latency.of([7000]) == Latency(7.0, 7.0, 7.0, 1)


async def test_interleaved() -> None:
    """After the warm-up operations take turns in the order given, in every round, and each is measured."""
    turns: list[str] = []

    def operation(name: str) -> Any:
        def perform() -> Any:
            if turns[-1:] != [name]:
                turns.append(name)
            return asyncio.sleep(0)

        return perform

    order = ["a", "x", "b", "x"]
    measured = await interleaved({name: operation(name) for name in "abx"}, order, 0.001, rounds=3)
    assert turns == ["a", "b", "x", *order * 3]
    assert min(latency.samples for latency in measured.values()) >= 3
