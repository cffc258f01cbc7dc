"""Where a connection sends runs: to another aiordma device, and only if neither CRC nor markers are needed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import attrs
import pytest

from aiordma.drivers.soft import ddp, mpa, runs
from aiordma.drivers.soft.link import Link
from aiordma.enums import Opcode
from tests.unit.wire import End, agreed

RUN = ddp.PREFIX.pack(18 + 8 + 4 * 8, runs.REQUEST)
READ = ddp.PREFIX.pack(46, ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST)


@contextlib.contextmanager
def loopback() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Join two TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        with near, listener.accept()[0] as far:
            near.setblocking(False)
            far.settimeout(10)
            yield near, far


@pytest.mark.skipif(not mpa.CRC32C_AVAILABLE, reason="needs the package crc32c")
@pytest.mark.parametrize(
    ("ours", "crc", "markers", "run"),
    [
        (True, False, False, True), (True, True, False, False), (True, False, True, False),
        (False, False, False, False), (False, True, True, False),
    ],
)  # fmt: skip
async def test_who_gets_runs(ours: bool, crc: bool, markers: bool, run: bool) -> None:
    """Where a peer can't take a run, its READs leave as Read Requests."""
    loop = asyncio.get_running_loop()
    end = End()
    memory = end.memory(32)
    settled = attrs.evolve(agreed(crc=crc), ours=ours, send_markers=markers)
    with loopback() as (near, far):
        staging = memoryview(bytearray(1 << 17))
        link = Link(loop, near, end.endpoint, settled, staging, lambda: None, lambda: None)
        link.start(initiator=True, agreed=settled, leftover=b"")
        end.post_run(Opcode.RDMA_READ, memory, range(0, 32, 8), memory, range(0, 32, 8), 8)
        link.flush()
        link.shutdown()
        data = b""
        while piece := far.recv(1 << 16):
            data += piece
        assert (data.count(RUN), data.count(READ)) == ((1, 0) if run else (0, 4))
        link.close()
