"""Programs that nobody here wrote, at the other end.

They need the kernel's RDMA and an address of one of its devices: AIORDMA_TEST_HOST says which, AIORDMA_TEST_DEVICE is
the device of this side, as for the conformance suite. On a device of the kernel's both ends are that device. With
`soft` the address is an iWARP device's, siw's for one: the kernel is the peer of the soft device in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import pytest

import aiordma
from aiordma import Connection, ConnParam
from tests.conformance.support import DEVICE, HOST

#: The address is an RDMA device's: rdma_cm has none of loopback.
HERE: Final = not HOST.startswith("127.")
#: Each file's mark. In the guest of `make test-rdma` nothing is skipped by it, and a program that is missing fails.
needs_rdma: Final = pytest.mark.skipif(
    not HERE, reason="needs the kernel's RDMA, and AIORDMA_TEST_HOST for an address of it: make test-rdma"
)


class Program:
    """A program in a process. What it writes goes to files: it may be more than a pipe takes."""

    def __init__(self, command: tuple[str, ...], out: IO[str], err: IO[str]) -> None:
        self.command = command
        self._out = out
        self._err = err
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def read(self) -> tuple[str, str]:
        """Give what it has written so far: output and errors."""
        return Path(self._out.name).read_text(), Path(self._err.name).read_text()

    def wait(self) -> tuple[str, str]:
        """Wait until it ends, with status 0; gives what it wrote: output and errors."""
        self.process.wait(timeout=45)
        out, err = self.read()
        assert self.process.returncode == 0, f"{self.command} ended with {self.process.returncode}: {out[:2000]} {err}"
        return out, err

    async def end(self) -> tuple[str, str]:
        """Wait for it as `wait` does, while the loop goes on."""
        return await asyncio.to_thread(self.wait)


@contextlib.contextmanager
def program(*command: str) -> Iterator[Program]:
    """Run a program in the block."""
    with tempfile.NamedTemporaryFile("w") as out, tempfile.NamedTemporaryFile("w") as err:
        running = Program(command, out, err)
        with running.process:
            try:
                yield running
            finally:
                running.process.kill()


def free_port() -> int:
    """Give a port for a program that can't choose one: free in TCP's port space now, and drawn for RDMA's."""
    while True:
        with socket.socket() as sock:
            try:
                sock.bind((HOST, random.randrange(20_000, 32_000)))
            except OSError:
                continue
            return int(sock.getsockname()[1])


async def connect_when_up(port: int, param: ConnParam) -> Connection:
    """Connect to a program that has just been started: it has no way to say when it listens, and a short backlog."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await aiordma.connect(HOST, port, device=DEVICE, param=param)
            except aiordma.ConnectError:
                await asyncio.sleep(0.05)
