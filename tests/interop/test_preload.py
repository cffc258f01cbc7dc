"""Programs written for TCP, which librspreload makes use rsockets: nc (traditional) and iperf 2."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

import aiordma
from tests.conformance.support import DEVICE, HOST, pattern
from tests.interop.support import free_port, needs_rdma

pytestmark = needs_rdma

_BLOCK = 1_000_000


def preload() -> str:
    """Give the library's path."""
    (found,) = Path("/usr/lib").glob("*/rsocket/librspreload.so")
    return str(found)


@contextlib.contextmanager
def preloaded(*command: str, **files: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program over rsockets in the block."""
    environment = {**os.environ, "LD_PRELOAD": preload()}
    with subprocess.Popen(command, env=environment, **files) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def total() -> int:
    """Give how many bytes go: 100 MB once, as that takes half a minute where the processor is emulated."""
    return (100 if isinstance(asyncio.get_running_loop(), uvloop.Loop) else 10) * _BLOCK


def blocks() -> Iterator[bytes]:
    """Give what is sent, in pieces."""
    for number in range(total() // _BLOCK):
        yield pattern(_BLOCK, number)


@pytest.mark.timeout(120)
async def test_nc_receives(tmp_path: Path) -> None:
    """Much data to nc, which writes them to a file."""
    port, path = free_port(), tmp_path / "received"
    digest = hashlib.sha256()
    with (
        path.open("wb") as file,
        preloaded("nc.traditional", "-l", "-s", HOST, "-p", str(port), stdin=subprocess.PIPE, stdout=file) as nc,
    ):
        reader, writer = await _connect_when_up(port)
        for block in blocks():
            digest.update(block)
            writer.write(block)
            await writer.drain()
        writer.write_eof()
        while path.stat().st_size < total():  # noqa: ASYNC110 - nothing else tells what nc has written
            await asyncio.sleep(0.05)
        assert nc.stdin is not None
        nc.stdin.close()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await asyncio.to_thread(nc.wait, 30)
    with path.open("rb") as written:
        assert hashlib.file_digest(written, "sha256").digest() == digest.digest()


@pytest.mark.timeout(120)
async def test_nc_sends(tmp_path: Path) -> None:
    """Much data from nc, which reads them from a file."""
    path = tmp_path / "sent"
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in blocks():
            digest.update(block)
            file.write(block)
    got = hashlib.sha256()
    received: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while count < total() and (data := await reader.read(1 << 20)):
            count += len(data)
            got.update(data)
        writer.close()
        received.set_result(count)

    async with await aiordma.start_server(take, HOST, 0, device=DEVICE) as server:
        with path.open("rb") as source, preloaded("nc.traditional", HOST, str(server.port), stdin=source) as nc:
            assert await received == total()
            await asyncio.to_thread(nc.wait, 30)
    assert got.digest() == digest.digest()


@pytest.mark.timeout(60)
async def test_iperf_sends() -> None:
    """Iperf's client sends for a number of bytes to our server, which counts them."""
    count = 0
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        while data := await reader.read(1 << 20):
            count += len(data)
        writer.close()
        ended.set_result(None)

    async with await aiordma.start_server(take, HOST, 0, device=DEVICE) as server:
        command = ("iperf", "-c", HOST, "-p", str(server.port), "-n", "20000000", "-l", "1000")
        with preloaded(*command, stdout=subprocess.PIPE) as iperf:
            await ended
            out, _ = await asyncio.to_thread(iperf.communicate, timeout=30)
    assert count >= 20_000_000
    assert b"bits/sec" in out


async def _connect_when_up(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(30):
        while True:
            try:
                return await aiordma.open_connection(HOST, port, device=DEVICE)
            except aiordma.ConnectError:
                await asyncio.sleep(0.05)
