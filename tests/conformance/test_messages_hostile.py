"""Message channels with a peer that breaks the rules: made by hand, on a connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

import aiordma
from aiordma import (
    BrokenError,
    Connection,
    ConnParam,
    FlushedError,
    MessageChannel,
    MessageParam,
    ProtocolError,
    RemoteRegion,
)
from aiordma.messages.protocol import Kind
from tests.conformance.support import DEVICE, HOST, pattern
from tests.unit.test_message_protocol import control_frame, data_frame, offer

_PARAM = MessageParam(frame_size=1024, credits=4)


@asynccontextmanager
async def hostile() -> AsyncIterator[tuple[Connection, MessageChannel]]:
    """Connect a peer made by hand to a server of messages, and say hello."""
    accepted: asyncio.Queue[MessageChannel] = asyncio.Queue()
    leaving = asyncio.Event()

    async def handle(channel: MessageChannel) -> None:
        accepted.put_nowait(channel)
        await leaving.wait()

    async with aiordma.serve_messages(handle, HOST, 0, device=DEVICE, messages=_PARAM) as server:
        conn = await aiordma.connect(
            HOST, server.port, device=DEVICE, private_data=_PARAM.to_bytes(), param=ConnParam(recv_size=1024)
        )
        channel = await accepted.get()
        try:
            await conn.send(control_frame())
            yield conn, channel
        finally:
            leaving.set()
            conn.abort()
            await channel.wait_closed()


async def _last(conn: Connection) -> None:
    """Receive until the end."""
    while True:
        await conn.recv()


async def test_an_honest_one() -> None:
    """What the others do wrong can be done right."""
    async with hostile() as (conn, channel):
        await conn.send(data_frame((0, b"hello"), (0, b"again")))
        assert [await channel.recv() for _ in range(2)] == [b"hello", b"again"]
        channel.send(b"and back")
        assert (await conn.recv())[12:] == b"and back"
        region = conn.alloc(5000, access=aiordma.Access.REMOTE_READ)
        region.view[:] = pattern(5000)
        head = struct.pack(">BBHII", Kind.MESSAGE, 1, 0, 0, 77)
        await conn.send(data_frame((Kind.OFFER, head + region.remote().to_bytes())))
        assert await channel.recv() == pattern(5000)
        assert (await conn.recv())[8:] == (77).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"short", "a frame of 5 bytes"),
        (data_frame((0, b"x"), given=9), "gives back 9 credits"),
        (data_frame((0, b"x"))[:-1], "goes beyond its frame"),
        (data_frame((Kind.OFFER, offer(length=1 << 31))), "this side takes"),
        (data_frame((Kind.REQUEST, b"1234")), "more than 0 calls"),
        (data_frame((Kind.REPLY, b"1234")), "wasn't sent"),
        (control_frame(1), "wasn't lent"),
        (control_frame(), "before the last one was seen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_breaks_the_rules(frame: bytes, words: str) -> None:
    """The channel ends, and says to everybody who waits what the peer did; what came before is received."""
    async with hostile() as (conn, channel):
        await conn.send(data_frame((0, b"before")))
        with suppress(BrokenError, FlushedError):
            await conn.send(frame)
        assert await channel.recv() == b"before"
        with pytest.raises(BrokenError, match=words) as caught:
            await channel.recv()
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert "it broke the rules of messages" in str(caught.value)
        with pytest.raises(BrokenError):
            channel.send(b"x")
        with pytest.raises(BrokenError):
            await _last(conn)


async def test_more_frames_than_credits() -> None:
    """A peer that sends on without credits is caught, not buffered."""
    async with hostile() as (conn, channel):
        with suppress(BrokenError, FlushedError):
            for _ in range(6):
                await conn.send(data_frame((0, b"x")))
        await channel.wait_closed()
        assert [await channel.recv() for _ in range(3)] == [b"x"] * 3
        with pytest.raises(BrokenError, match="more than the 3 it has credits for"):
            await channel.recv()


@pytest.mark.parametrize("into", [False, True])
async def test_offers_what_it_has_not(into: bool) -> None:
    """Memory that may not be READ is a BrokenError that names the message, not a hang."""
    async with hostile() as (conn, channel):
        head = struct.pack(">BBHII", Kind.MESSAGE, 1, 0, 0, 1)
        await conn.send(data_frame((Kind.OFFER, head + RemoteRegion(4096, 5000, 0xABCDEF).to_bytes())))
        with pytest.raises(BrokenError, match="a message of 5000 bytes couldn't be READ"):
            await (channel.recv_into(bytearray(5000)) if into else channel.recv())
        await channel.wait_closed()


async def test_takes_nothing() -> None:
    """A peer that never gives credits back can't hold a close up longer than its time limit."""
    async with hostile() as (conn, channel):
        waiting = [channel.send(bytes(1000)) for _ in range(20)]
        for _ in range(_PARAM.credits - 1):
            await conn.recv()
        await channel.close(timeout=0.2)
        assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[-1], aiordma.ClosedError)
