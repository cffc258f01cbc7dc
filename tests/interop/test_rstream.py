"""rstream of rdma-core at the other end of a stream: 16 bytes each way, then so many transfers there, and back.

With -T v each side checks the other's bytes: they count up from 0, in each direction, over everything that is sent.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

import aiordma
from aiordma import StreamParam
from tests.conformance.support import DEVICE, HOST
from tests.interop.support import free_port, needs_rdma, program

pytestmark = needs_rdma

#: rstream sends so much first, to agree on what follows.
HELLO = 16
TRANSFERS = 20
ITERATIONS = 3


class Counting:
    """Bytes that count up, modulo 256."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, length: int) -> bytes:
        """Give the next ones."""
        start, self._next = self._next, (self._next + length) % 256
        whole = bytes(range(256)) * (length // 256 + 2)
        return whole[start : start + length]


class Ends(NamedTuple):
    """A stream, and what is to come and go by it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def converse(self, size: int, *, first: bool) -> None:
        """Speak rstream's protocol, as client (`first`) or as server."""
        theirs, ours = Counting(), Counting()

        async def send(length: int, times: int) -> None:
            for _ in range(times):
                self.writer.write(ours.take(length))
                await self.writer.drain()

        async def receive(length: int, times: int) -> None:
            for _ in range(times):
                assert await self.reader.readexactly(length) == theirs.take(length)

        steps = (send, receive) if first else (receive, send)
        for step in steps:
            await step(HELLO, 1)
        for _ in range(ITERATIONS):
            for step in steps:
                await step(size, TRANSFERS)


@pytest.mark.parametrize("size", [1, 4096, 1 << 18])
async def test_their_client(size: int) -> None:
    """Rstream's client at our server."""
    served: asyncio.Queue[Ends] = asyncio.Queue()
    async with await aiordma.start_server(lambda r, w: served.put_nowait(Ends(r, w)), HOST, 0, device=DEVICE) as server:
        with program("rstream", "-s", HOST, "-p", str(server.port), "-T", "v", *_options(size)) as client:
            ends = await served.get()
            await ends.converse(size, first=False)
            assert await ends.reader.read() == b""
            ends.writer.close()
            out, _ = await client.end()
        assert "bytes" in out


@pytest.mark.parametrize("param", [None, StreamParam(recv_buffer=5000, send_buffer=3000, rq_size=16, sq_size=16)])
@pytest.mark.parametrize("size", [64, 65_536])
async def test_their_server(size: int, param: StreamParam | None) -> None:
    """Our client at rstream's server, with the default buffers and with small ones."""
    port = free_port()
    with program("rstream", "-b", HOST, "-p", str(port), "-T", "v", *_options(size)) as server:
        ends = await _connect_when_up(port, param)
        await ends.converse(size, first=True)
        ends.writer.close()
        await ends.writer.wait_closed()
        await server.end()


def _options(size: int) -> tuple[str, ...]:
    return "-S", str(size), "-C", str(TRANSFERS), "-I", str(ITERATIONS)


async def _connect_when_up(port: int, param: StreamParam | None) -> Ends:
    """Connect to a program that has just been started."""
    async with asyncio.timeout(30):
        while True:
            try:
                return Ends(*await aiordma.open_connection(HOST, port, device=DEVICE, param=param))
            except aiordma.ConnectError:
                await asyncio.sleep(0.05)
