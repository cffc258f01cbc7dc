"""The harness's second guest: reached through the cable, killed outright, and booted again."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.two_hosts.support import HOST, Peer, needs_peer

pytestmark = needs_peer


def serve(peer: Peer, port: int) -> None:
    """Start rping's persistent server there, and wait until it listens."""
    peer.start(f"exec rping -s -P -a {HOST} -p {port}").wait_started()
    assert peer.start(f"until rdma resource show cm_id | grep -q ':{port} '; do sleep 0.1; done").wait() == 0


def client(port: int, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start rping's client here."""
    command = ["rping", "-c", "-a", HOST, "-p", str(port), "-v", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_death_of_a_host_and_its_return() -> None:
    """A client of a host that dies meets a transport error, and one of the host that came back works."""
    peer = Peer()
    serve(peer, 7301)
    with client(7301) as pinging:
        try:
            assert pinging.stdout is not None
            assert "ping data" in pinging.stdout.readline()
            peer.die()
            # rping itself goes on for minutes then: it waits for an answer to its disconnecting.
            assert any("completion failed status 12" in line for line in pinging.stdout)  # RETRY_EXC_ERR
        finally:
            pinging.kill()
    peer.boot()
    serve(peer, 7302)
    with client(7302, ["-C", "3"]) as pinging:
        output, _ = pinging.communicate(timeout=120)
        assert pinging.returncode == 0, output
