"""A device that is removed under load and comes back, and one whose network interface goes down and up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import LOOPS
from tests.rdma.own_device import IWARP, OwnDevice, own_device, program

both_loops = pytest.mark.parametrize("loop", list(LOOPS))


@pytest.fixture
def device() -> Iterator[OwnDevice]:
    """A device of this test's own."""
    with own_device() as made:
        yield made


@both_loops
def test_removed_under_load(device: OwnDevice, loop: str) -> None:
    """Everything ends within a second with BrokenError that names the device, and the program goes on.

    READs, WRITEs and barriers are under way, receives and an accept are waited for. `rdma link delete` returns, and the
    device made anew serves.
    """
    assert program("removed", loop=loop, environment=device.environment) == [
        "all ended True",
        "rdma link delete returned 0",
        "True",
        "True",
        "True",
        "{True}",
        "DEVICE_FATAL",
        "DeviceError",
        "serves again",
    ]


@both_loops
def test_removed_under_an_idle_process(device: OwnDevice, loop: str) -> None:
    """A process that does nothing at all lets go of its device too, and goes on: the removal returns."""
    command = [sys.executable, "-W", "error", "-m", "tests.rdma.programs", loop, "idle_when_removed"]
    with subprocess.Popen(
        command, env=device.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "idle\n"
            device.remove()
            assert [process.stdout.readline() for _ in range(2)] == ["True\n", "True\n"]
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


@both_loops
def test_interface_down_and_up(device: OwnDevice, loop: str) -> None:
    """Context.events() tells of the port's end and its return; the connection survives, and a new one works."""
    assert program("port", loop=loop, environment=device.environment) == [
        "PORT_ERR 1 the port is down: down",
        "PORT_ACTIVE 1 the port is up: active",
        "goes on",
        "serves again",
    ]


@both_loops
def test_use_while_the_interface_is_down(device: OwnDevice, loop: str) -> None:
    """A READ while the interface is down has its data later on siw, whose TCP waits; on rxe the connection ends."""
    (outcome,) = program("used_while_down", loop=loop, environment=device.environment)
    if IWARP:
        assert outcome == "read"
    else:
        assert outcome.startswith("FlushedError RDMA_READ")
        assert outcome.endswith("cause: the queue pair went to error")
