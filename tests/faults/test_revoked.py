"""Memory that is closed while a peer writes or reads it: from the return of `close()` on it is its owner's alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from aiordma import Access, BrokenError, Connection, MemoryRegion, listen
from tests.faults import raw_peer
from tests.faults.raw_peer import RawPeer
from tests.faults.support import until

READ_WRITE = Access.REMOTE_READ | Access.REMOTE_WRITE


@contextlib.asynccontextmanager
async def exposed(buffer: bytearray, *, rcvbuf: int = 0) -> AsyncIterator[tuple[Connection, RawPeer, MemoryRegion]]:
    """A raw peer, connected to a server that has registered this for it."""
    async with asyncio.timeout(30), listen("127.0.0.1", 0) as listener:
        with await RawPeer.connect(listener.port, rcvbuf=rcvbuf) as peer:
            await peer.send(raw_peer.request())
            request = await listener.get_request()
            conn = await request.accept()
            await peer.frame()
            yield conn, peer, conn.register(buffer, access=READ_WRITE)
            peer.close()
            with contextlib.suppress(BrokenError):
                await conn.close()


async def test_half_a_write() -> None:
    """A peer in the middle of a WRITE writes no more once the region is closed, and is told so."""
    buffer = bytearray(60_000)
    async with exposed(buffer) as (conn, peer, region):
        write = raw_peer.tagged(raw_peer.WRITE, region.rkey, region.addr, b"w" * len(buffer))
        await peer.send(write[:1000])
        await until(lambda: buffer[900] == ord("w"))
        await region.close()
        buffer.clear()  # nothing exports it any more
        buffer += bytes(60_000)
        await peer.send(write[1000:])
        ended = await peer.fpdu()
        assert (ended.opcode, ended.payload[:2]) == (raw_peer.TERMINATE, b"\x11\x00")
        assert buffer == bytes(60_000)
        with pytest.raises(BrokenError, match="invalid STag"):
            await conn.recv()


async def test_half_a_read() -> None:
    """A slow peer in the middle of a READ gets nothing that came into the buffer after the region was closed."""
    buffer = bytearray(b"a" * (16 << 20))
    async with exposed(buffer, rcvbuf=8192) as (conn, peer, region):
        await peer.send(raw_peer.read_request(1, region.rkey, region.addr, len(buffer)))
        outbox = conn.qp.driver.endpoint.outbox  # type: ignore[attr-defined]
        await until(lambda: bool(outbox.blocked))
        assert outbox.made
        await region.close()
        buffer.append(0)
        buffer[:] = b"S" * len(buffer)
        while (fpdu := await peer.fpdu()).opcode == raw_peer.READ_RESPONSE:
            assert b"S" not in fpdu.payload
        assert (fpdu.opcode, fpdu.payload[:2]) == (raw_peer.TERMINATE, b"\x01\x00")
