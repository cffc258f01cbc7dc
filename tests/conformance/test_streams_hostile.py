"""Streams with a peer that lies: made by hand, on a connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import attrs
import pytest

import aiordma
from aiordma import Access, Connection
from aiordma.stream.wire import Ctrl, Entry, Hello, Op
from tests.conformance.support import DEVICE, HOST
from tests.conformance.test_streams import SMALL, Recorder, create_server


class Peer:
    """A peer made by hand: it says and sends what it is told to."""

    def __init__(self, conn: Connection, hello: Hello) -> None:
        self.conn = conn
        self.server = hello

    async def message(self, message: int, data: bytes = b"", offset: int = 0) -> None:
        """Write bytes into the first segment, and send a message."""
        target = aiordma.RemoteRegion(self.server.first.addr + offset, len(data), self.server.first.rkey)
        if self.conn.capabilities.transport == "iwarp":
            if data:
                await self.conn.write(target, data)
            await self.conn.send(message.to_bytes(4, sys.byteorder))
        else:
            await self.conn.write(target, data, imm=message)

    async def received(self) -> int:
        """Wait for the server's next message."""
        with await self.conn.recv_message() as message:
            imm = message.imm_data
            return int.from_bytes(message.data, sys.byteorder) if imm is None else imm


@asynccontextmanager
async def hostile(**lies: object) -> AsyncIterator[tuple[Peer, Recorder]]:
    """Connect a peer made by hand to a server of streams with small buffers."""
    served: asyncio.Queue[Recorder] = asyncio.Queue()

    def factory() -> Recorder:
        served.put_nowait(recorder := Recorder())
        return recorder

    def private_data(conn: Connection) -> bytes:
        region = conn.alloc(4096, access=Access.REMOTE_WRITE)
        hello = Hello(
            credits=16, sgl_addr=region.addr, sgl_rkey=region.rkey, sgl_length=2,
            first=Entry(region.addr + 64, region.rkey, 1024),
        )  # fmt: skip
        return attrs.evolve(hello, **lies).to_bytes()  # type: ignore[arg-type]

    async with await create_server(factory, HOST, 0, param=SMALL) as server:
        conn = await aiordma.connect(HOST, server.port, device=DEVICE, private_data=private_data)
        recorder = await served.get()
        try:
            yield Peer(conn, Hello.from_bytes(conn.peer_private_data)), recorder
        finally:
            conn.abort()
            if not recorder.lost.done():
                assert recorder.transport is not None
                recorder.transport.abort()
            await recorder.lost


async def test_an_honest_one() -> None:
    """What the others do wrong can be done right."""
    async with hostile() as (peer, recorder):
        await peer.message(Op.DATA << 29 | 5, b"hello")
        await recorder.until(lambda: recorder.data == b"hello")
        await peer.message(Op.CTRL << 29 | Ctrl.KEEPALIVE)
        await peer.message(Op.DATA << 29 | 6, b" again", 5)
        await recorder.until(lambda: recorder.data == b"hello again")
        await peer.message(Op.CTRL << 29 | Ctrl.DISCONNECT)
        assert await recorder.lost is None


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Op.DATA << 29, "DATA of 0 bytes"),
        (Op.DATA << 29 | 2049, "its segment has room for 2048"),
        (1 << 29 | 5, "reserved opcode 1"),
        (3 << 29, "reserved opcode 3"),
        (5 << 29, "reserved opcode 5"),
        (Op.IOMAP << 29, "mapped entry 0 of 0"),
    ],
)
async def test_a_forbidden_message(message: int, text: str) -> None:
    """It ends the stream with a ProtocolError that says what was wrong."""
    async with hostile() as (peer, recorder):
        with suppress(aiordma.RDMAError):
            await peer.message(message)
        error = await recorder.lost
        assert isinstance(error, aiordma.ProtocolError)
        assert text in str(error)


async def test_more_messages_than_credits() -> None:
    """A peer that goes on when its credits are used up is cut off."""
    async with hostile() as (peer, recorder):
        await recorder.until(lambda: recorder.transport)
        assert recorder.transport is not None
        recorder.transport.pause_reading()
        with suppress(aiordma.RDMAError):
            for number in range(17):
                await peer.message(Op.DATA << 29 | 1, b"x", number)
        error = await recorder.lost
        assert isinstance(error, aiordma.ProtocolError)
        assert "the 16 it had credits for" in str(error)


async def test_a_key_that_is_none() -> None:
    """Writing to a peer that gave a wrong key ends the stream, with what the device says."""
    async with hostile(first=Entry(0x1000, 0xDEAD, 1024)) as (peer, recorder):
        await peer.message(Op.CTRL << 29 | Ctrl.KEEPALIVE)  # on iWARP it's for the client to begin
        await recorder.until(lambda: recorder.transport)
        assert recorder.transport is not None
        recorder.transport.write(b"into the blue")
        assert isinstance(await recorder.lost, aiordma.RDMAError)


@pytest.mark.parametrize("lie", [{"sgl_length": 0}, {"sgl_addr": (1 << 64) - 8}])
async def test_a_target_list_that_cannot_be(lie: dict[str, int]) -> None:
    """It is rejected before anything is accepted."""
    with pytest.raises(aiordma.RejectedError):
        async with hostile(**lie):
            pass


async def test_a_huge_ring_and_no_credits() -> None:
    """A ring of 4 G entries is as good as one of two, and without credits nothing is sent."""
    async with hostile(sgl_length=0xFFFFFFFF, credits=0) as (peer, recorder):
        await peer.message(Op.DATA << 29 | 5, b"hello")
        await recorder.until(lambda: recorder.data == b"hello")
        assert recorder.transport is not None
        recorder.transport.write(b"waits")
        assert recorder.transport.get_write_buffer_size() == 5
        await peer.message(Op.SGL << 29 | 1)
        assert await peer.received() >> 29 == Op.SGL
        assert await peer.received() == Op.DATA << 29 | 5
        assert recorder.transport.get_write_buffer_size() == 0
