"""The harness's link within one kernel: frames between rxa and rxb cross the pair of veth, where tc gets at them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.two_hosts.support import HOST, needs_link, netem

pytestmark = needs_link


def rping(port: int, count: int) -> None:
    """Run rping's client against its server, at the other end."""
    common = ["-a", HOST, "-p", str(port), "-C", str(count)]
    with subprocess.Popen(["rping", "-s", *common]) as server:
        try:
            while f":{port}" not in listening():
                time.sleep(0.05)
            subprocess.run(["rping", "-c", *common], check=True, timeout=120)
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()


def listening() -> str:
    """Name the addresses of rdma_cm's listeners."""
    return subprocess.run(["rdma", "resource", "show", "cm_id"], check=True, stdout=subprocess.PIPE, text=True).stdout


def sent() -> int:
    """Count the frames that left va."""
    return int(Path("/sys/class/net/va/statistics/tx_packets").read_text())


def test_frames_cross_the_link() -> None:
    """Each of ten pings costs four messages on the wire at least, two of them sent at the near end."""
    before = sent()
    rping(7201, 10)
    assert sent() - before >= 20


def test_delay_reaches_the_device() -> None:
    """A delay that tc sets is one that RDMA meets: ten pings take ten times as long at least."""
    with netem("delay", "100ms"):
        started = time.monotonic()
        rping(7202, 10)
        assert time.monotonic() - started >= 1.0
