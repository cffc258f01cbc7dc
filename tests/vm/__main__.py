"""The targets test-rdma, bench-rdma and shell-rdma of the Makefile: python -m tests.vm test|bench|shell|clean."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.vm.guest import PROJECT, Guest
from tests.vm.host import HarnessError
from tests.vm.image import clean, image
from tests.vm.peer import IN_GUEST, Cable, Peer
from tests.vm.suites import DEVICES, MANY, SUITES, Suite
from tests.vm.summary import Outcome, read_junit, table

BUILD: Final = PROJECT / "build"
#: The guest's /out.
OUT: Final = BUILD / "vm"
SETUP_LIMIT: Final = 120.0
#: Seconds for one test, over the project's own, which is made for a machine that isn't emulated.
TEST_LIMIT: Final = 240


class Run:
    """A guest, and the suites that run in it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.pytest: list[str] = arguments.pytest
        self.deadline = time.monotonic() + arguments.limit
        #: What runs one after the other, and of each what runs at the same time.
        self.plan: list[tuple[Suite, list[Outcome]]] = []
        for suite in SUITES:
            if arguments.suite and suite.name not in arguments.suite:
                continue
            chosen = [device for device in suite.devices if device in (arguments.device or DEVICES)]
            for devices in [chosen] if suite.together and chosen else [[device] for device in chosen]:
                self.plan.append((suite, [Outcome(device, suite.name) for device in devices]))
        self.outcomes = [outcome for _, group in self.plan for outcome in group]
        self.traces: list[str] = []

    def all(self, folder: Path) -> None:
        """Run them; what can't run because the guest is gone counts as failed."""
        with contextlib.ExitStack() as stack:
            cable = stack.enter_context(contextlib.closing(Cable()))
            guest = stack.enter_context(Guest(folder, OUT, wire=cable.near))
            gone = ""
            try:
                guest.boot()
                print(f"aiordma: the guest is up after {guest.boot_seconds:.1f} s", flush=True)
            except HarnessError as error:
                gone = _report(error)
            for suite, group in self.plan:
                try:
                    if not gone:
                        self._run(folder, guest, cable, suite, group)
                        continue
                except HarnessError as error:
                    guest.kill()
                    gone = _report(error)
                for outcome in group:
                    outcome.problem = outcome.problem or f"not run, as {gone}"
            self.traces = guest.traces()

    def _run(self, folder: Path, guest: Guest, cable: Cable, suite: Suite, group: list[Outcome]) -> None:
        """Run a suite on some devices at the same time."""
        print(f"\n--- {suite.name} on {' and '.join(outcome.device for outcome in group)}", flush=True)
        limit = min(suite.limit, self.deadline - time.monotonic())
        problem = "" if limit > 0 else "not run: the time limit of the whole run was reached"
        with contextlib.ExitStack() as stack:
            peer = None
            environment = {"AIORDMA_TEST_MANY": MANY}
            if suite.peer and not problem:
                peer = Peer(folder, guest, cable)
                stack.enter_context(peer.guest)
                peer.start()
                environment["AIORDMA_TEST_PEER"] = IN_GUEST
            for command in suite.setup:
                if not problem and guest.run(command, {}, SETUP_LIMIT):
                    problem = f"its setup failed: {command}"
            if problem:
                for outcome in group:
                    outcome.problem = problem
                return
            jobs = [
                guest.start(self._pytest(suite, outcome), environment | suite.variables(outcome.device), limit)
                for outcome in group
            ]
            for outcome, job in zip(group, jobs, strict=True):
                status = guest.wait(job, poll=peer.serve if peer else None)
                read_junit(outcome, OUT / "junit" / f"{outcome.name}.xml", status, empty_is_fine=bool(self.pytest))
            for command in suite.teardown:
                guest.run(command, {}, SETUP_LIMIT)

    def _pytest(self, suite: Suite, outcome: Outcome) -> str:
        pytest = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"timeout={TEST_LIMIT}"]
        if suite.workers:
            pytest += ["-n", str(suite.workers), "--dist=worksteal"]
        return shlex.join([*pytest, f"--junitxml=/out/junit/{outcome.name}.xml", suite.path, *self.pytest])


def _report(error: HarnessError) -> str:
    """Print an error in full, and give its first sentence."""
    print(f"aiordma: {error}", flush=True)
    return str(error).partition(";")[0]


def test(arguments: argparse.Namespace) -> int:
    """Run the suites, and print the table."""
    started = time.monotonic()
    run = Run(arguments)
    if not run.plan:
        raise HarnessError("no suite of tests/vm/suites.py is for that device")
    run.all(image())
    print("\n" + table(run.outcomes, run.traces, time.monotonic() - started))
    none = not any(outcome.passed or outcome.failed for outcome in run.outcomes)
    if none:
        print("aiordma: no test ran", file=sys.stderr)
    return int(none or any(outcome.bad for outcome in run.outcomes))


def bench(arguments: argparse.Namespace) -> int:
    """Run the benchmarks, and bring their numbers back."""
    with Guest(image(), OUT) as guest:
        guest.boot()
        status = guest.run('bash "$AIORDMA_VM_TOOLS/devices"', {}, SETUP_LIMIT)
        command = shlex.join(["python3", "-m", "benchmarks.rdma", "--json", "/out/bench-rdma.json", *arguments.pytest])
        status = status or guest.run(command, {}, arguments.limit)
    if not status:
        shutil.copyfile(OUT / "bench-rdma.json", BUILD / "bench-rdma.json")
        print(f"aiordma: written to {BUILD / 'bench-rdma.json'}")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    parser.add_argument("command", choices=("test", "bench", "shell", "clean"))
    parser.add_argument("--device", action="append", choices=list(DEVICES), help="only this one; more than once")
    parser.add_argument("--suite", action="append", choices=[suite.name for suite in SUITES], help="only this one")
    parser.add_argument("--limit", type=float, default=4_200.0, help="seconds for the whole run")
    parser.epilog = "What follows -- is passed on to pytest, or to the benchmarks."
    # Cut off by hand: argparse takes no rest after options.
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:cut])
    arguments.pytest = given[cut + 1 :]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # And on the way out the guest is killed.
    try:
        if arguments.command == "test":
            return test(arguments)
        if arguments.command == "bench":
            return bench(arguments)
        if arguments.command == "shell":
            return Guest(image(), OUT).shell()
        clean()
    except HarnessError as error:
        print(f"aiordma: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
