"""The two topologies: a pair of veth in one kernel, and a second guest at the other end of a cable.

AIORDMA_TEST_HOST is an address of the other end, AIORDMA_TEST_NEAR of this one, AIORDMA_TEST_DEVICE this end's device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

HOST: Final = os.environ.get("AIORDMA_TEST_HOST", "")
NEAR: Final = os.environ.get("AIORDMA_TEST_NEAR", "")
DEVICE: Final = os.environ.get("AIORDMA_TEST_DEVICE", "")
#: The device at the other end of the link.
FAR: Final = "rxb"
#: The peer's folder, as it is seen in this guest.
PEER: Final = os.environ.get("AIORDMA_TEST_PEER", "")

#: Each file's mark. In the guest of `make test-rdma` nothing is skipped by it.
needs_link: Final = pytest.mark.skipif(not NEAR, reason="needs the two ends of a link: make test-rdma")
needs_peer: Final = pytest.mark.skipif(not PEER, reason="needs a second guest: make test-rdma")


@contextlib.contextmanager
def netem(*arguments: str, interfaces: tuple[str, ...] = ("va",)) -> Iterator[None]:
    """Let tc treat the frames that leave these ends of the link: va's go to HOST."""
    with contextlib.ExitStack() as stack:
        for interface in interfaces:
            qdisc = ["dev", interface, "root"]
            subprocess.run(["tc", "qdisc", "add", *qdisc, "netem", *arguments], check=True)
            stack.callback(subprocess.run, ["tc", "qdisc", "del", *qdisc], check=True)
        yield


class Job:
    """A command in the peer guest."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self._path.with_suffix(".out").read_text(errors="replace")

    def wait_started(self) -> None:
        """Wait until the peer has taken it."""
        _wait_for(self._path.with_suffix(".out"), exists=True)

    def wait(self) -> int:
        """Wait until it has ended; gives its exit status."""
        status = self._path.with_suffix(".rc")
        _wait_for(status, exists=True)
        return int(status.read_text())


class Peer:
    """The other guest, with the project in its current folder too."""

    _numbers = itertools.count(1)

    def start(self, command: str) -> Job:
        """Start a command of bash there."""
        # The harness numbers its own.
        path = Path(PEER) / "jobs" / f"test-{next(self._numbers)}"
        path.with_suffix(".new").write_text(f"exec bash -c {shlex.quote(command)}\n")
        path.with_suffix(".new").rename(path.with_suffix(".sh"))
        return Job(path)

    def die(self) -> None:
        """End that host as a power cut does: when this returns it is gone."""
        self._ask("kill")

    def boot(self) -> None:
        """Start it again."""
        self._ask("start")

    def _ask(self, what: str) -> None:
        asked = Path("/out/asked") / what
        asked.parent.mkdir(exist_ok=True)
        asked.touch()
        _wait_for(asked, exists=False)


def _wait_for(path: Path, *, exists: bool) -> None:
    # No event crosses 9p: this polls, and pytest's own time-out ends it.
    while path.exists() is not exists:
        time.sleep(0.05)
