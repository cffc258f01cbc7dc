"""A device of a test's own, which it may take away, and the programs that use it in processes of their own.

librdmacm keeps a device open for as long as the process lives that used it once, and `rdma link delete` waits for that:
what removes a device is no process of pytest's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tests.conformance.support import DEVICE

#: "rxe" or "siw", as the device under test.
KIND: Final = DEVICE[:3]
IWARP: Final = KIND == "siw"
#: Seconds in which `rdma link delete` returns where everything lets go.
REMOVAL_LIMIT: Final = 20.0
_PROJECT: Final = Path(__file__).parents[2]


def run(*command: str, timeout: float = REMOVAL_LIMIT) -> str:
    """Run a command that must succeed; gives its output."""
    done = subprocess.run(command, check=True, timeout=timeout, stdout=subprocess.PIPE, text=True)
    return done.stdout


@frozen
class OwnDevice:
    """A device on a network interface of its own."""

    name: str = f"{KIND}bad"
    netdev: str = "badnet"
    host: str = "10.98.0.1"

    def add(self) -> None:
        """Make it on its interface, again if it was removed."""
        run("rdma", "link", "add", self.name, "type", KIND, "netdev", self.netdev)

    def remove(self) -> None:
        """Remove it; this returns when nobody holds it any more."""
        run("rdma", "link", "delete", self.name)

    def resources(self) -> dict[str, int]:
        """Count what the kernel has of this device, by the kind of object."""
        devices = json.loads(run("rdma", "-j", "resource", "show"))
        (mine,) = [device for device in devices if device["ifname"] == self.name]
        return {kind: mine[kind] for kind in ("pd", "cq", "qp", "cm_id", "mr")}

    @property
    def environment(self) -> dict[str, str]:
        """What tells a program to use it."""
        return {**os.environ, "AIORDMA_TEST_DEVICE": self.name, "AIORDMA_TEST_HOST": self.host}


@contextlib.contextmanager
def own_device() -> Iterator[OwnDevice]:
    """Make a device; what is left of it is removed at the end."""
    device = OwnDevice()
    run("ip", "link", "add", device.netdev, "type", "dummy")
    try:
        run("ip", "address", "add", f"{device.host}/24", "dev", device.netdev)
        run("ip", "link", "set", device.netdev, "up")
        device.add()
        yield device
    finally:
        # Takes the device with it, once nobody holds it.
        run("ip", "link", "delete", device.netdev)


def program(role: str, *arguments: str, loop: str = "asyncio", wrapper: Sequence[str] = (), **more: Any) -> list[str]:
    """Run a program of tests.rdma.programs to its end, which must be a success; gives the lines it wrote."""
    command = [*wrapper, sys.executable, "-W", "error", "-m", "tests.rdma.programs", loop, role, *arguments]
    environment = more.pop("environment", None) or dict(os.environ)
    done = subprocess.run(
        command, cwd=_PROJECT, env=environment, timeout=more.pop("timeout", 120), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{role} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()
