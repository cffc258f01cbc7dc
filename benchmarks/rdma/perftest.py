"""perftest's programs, run as a pair, and what they print."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from attrs import frozen

__all__ = ["Figures", "Perftest"]

_LIMIT: Final = 120.0
_LISTENING: Final = "0A"


@frozen
class Figures:
    """What a program of perftest measured: latencies in us, or MiB per second."""

    command: str
    typical: float = 0.0
    average: float = 0.0
    p99: float = 0.0
    rate: float = 0.0


@frozen
class Perftest:
    """A way to run it."""

    device: str
    host: str
    #: Of the server, and of the client; None: any.
    cpus: tuple[int, int] | None

    def run(self, command: str) -> Figures:
        """Run a program as server and as client, and read the client's table.

        Raises:
            RuntimeError: it failed; the text has its output.
        """
        program, *options = command.split()
        port = _free_port(self.host)
        line = [program, "-d", self.device, "-p", str(port), "-F", *options]
        before = os.sched_getaffinity(0)
        cpus = self.cpus
        try:
            if cpus is not None:
                os.sched_setaffinity(0, {cpus[0]})
            with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
                try:
                    _wait_until_listening(port, server)
                    if cpus is not None:
                        os.sched_setaffinity(0, {cpus[1]})
                    client = subprocess.run([*line, self.host], capture_output=True, text=True, timeout=_LIMIT)  # noqa: PLW1510
                    if client.returncode:
                        raise RuntimeError(f"{command} failed: {client.stdout}{client.stderr}")
                    server.wait(_LIMIT)
                finally:
                    server.kill()
        finally:
            os.sched_setaffinity(0, before)
        return _parse(command, client.stdout)


def _parse(command: str, output: str) -> Figures:
    """Read the line below the one that begins with #bytes."""
    lines = output.splitlines()
    for index, line in enumerate(lines[:-1]):
        if line.split()[:1] == ["#bytes"]:
            found = [float(figure) for figure in lines[index + 1].split()]
            if "_bw" in command:
                return Figures(command, rate=found[3])
            return Figures(command, typical=found[4], average=found[5], p99=found[7])
    raise RuntimeError(f"{command} printed no table: {output}")


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def _wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    """A server of perftest takes one connection: whether it listens can't be found out by connecting."""
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline and server.poll() is None:
        for name in ("tcp", "tcp6"):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    return
        time.sleep(0.05)
    raise RuntimeError(f"perftest's server doesn't listen on port {port}; exit status {server.returncode}")
