"""Calls over message channels: requests and their replies, many at once, cancelled, failing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import (
    BrokenError,
    ClosedError,
    MessageChannel,
    MessageParam,
    RDMAError,
    RemoteCallError,
    UnsupportedError,
)
from aiordma.messages.calls import CallHandler
from tests.conformance.support import DEVICE, HOST, pattern, until


@asynccontextmanager
async def calling(
    handler: CallHandler, server_param: MessageParam | None = None, param: MessageParam | None = None
) -> AsyncIterator[MessageChannel]:
    """Connect to a server of calls."""
    async with (
        aiordma.serve_calls(handler, HOST, 0, device=DEVICE, messages=server_param) as server,
        aiordma.connect_messages(HOST, server.port, device=DEVICE, messages=param) as channel,
    ):
        yield channel


async def echo(request: bytes) -> bytes:
    """Reply with the request."""
    return request


class Slow:
    """A handler that is told when to go on, and keeps what became of its calls."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.ended: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.most = 0
        self.go = asyncio.Event()

    async def __call__(self, request: bytes) -> bytes:
        self.begun.append(request)
        self.most = max(self.most, len(self.begun) - len(self.ended) - len(self.cancelled))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        self.ended.append(request)
        return request


@pytest.mark.parametrize("size", [0, 1, 16_366, 16_367, 16_368, 16_369, 1_000_000])
async def test_call(size: int) -> None:
    """A call gives the reply, whatever the sizes."""
    async with calling(echo) as channel:
        assert await channel.call(pattern(size)) == pattern(size)


async def test_kinds_of_data() -> None:
    """Requests and replies are given as messages are: as any buffers, and lists of them."""

    async def handler(request: bytes) -> list[Any]:
        return [request, np.frombuffer(request, "u1")]

    async with calling(handler) as channel:
        assert await channel.call([b"ab", bytearray(b"cd")]) == b"abcd" * 2
        memory = channel.connection.alloc(50_000)
        memory.view[:] = pattern(50_000)
        assert await channel.call(memory) == pattern(50_000) * 2


async def test_many_at_once() -> None:
    """Replies find their callers, in whatever order they come."""

    async def handler(request: bytes) -> bytes:
        for _ in range(request[0] % 7):
            await asyncio.sleep(0)
        return request * 2

    async with calling(handler) as channel:
        requests = [pattern(1 + index * 97, index) for index in range(300)]
        replies = await asyncio.gather(*[channel.call(request) for request in requests])
        assert replies == [request * 2 for request in requests]


async def test_more_than_the_peer_handles() -> None:
    """More calls than the peer handles at once wait, in order, and then are made."""
    slow = Slow()
    async with calling(slow, MessageParam(max_calls=3)) as channel:
        calls = [asyncio.create_task(channel.call(bytes((index,)))) for index in range(10)]
        await until(lambda: len(slow.begun) == 3)
        await asyncio.wait(calls, timeout=0.1)
        assert len(slow.begun) == 3
        calls[5].cancel()
        slow.go.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results.pop(5), asyncio.CancelledError)
        assert results == [bytes((index,)) for index in range(10) if index != 5]
        assert slow.begun == results
        assert slow.most == 3


async def test_handler_raises() -> None:
    """The handler's exception reaches the caller, with type and text; other calls go on."""

    async def handler(request: bytes) -> bytes:
        if request == b"bad":
            raise KeyError("no such thing: ü" + "x" * 100_000)
        return request

    async with calling(handler) as channel:
        good, bad = channel.call(b"good"), channel.call(b"bad")
        results = await asyncio.gather(good, bad, return_exceptions=True)
        assert results[0] == b"good"
        error = results[1]
        assert isinstance(error, RemoteCallError)
        assert error.type == "KeyError"
        assert error.text.startswith("'no such thing: ü")
        assert "the peer's handler raised KeyError: 'no such" in str(error)


async def test_reply_that_cannot_be_sent() -> None:
    """A handler that gives what is no message, or a message that is too long, fails its call and no other."""

    async def handler(request: bytes) -> bytes:
        return "text" if request == b"text" else bytes(int(request))  # type: ignore[return-value]

    async with calling(handler, param=MessageParam(max_message=20_000)) as channel:
        with pytest.raises(RemoteCallError, match="TypeError"):
            await channel.call(b"text")
        with pytest.raises(RemoteCallError, match=r"ValueError: .*the peer takes 20000"):
            await channel.call(b"20001")
        assert await channel.call(b"20000") == bytes(20_000)


async def test_time_limit() -> None:
    """A call that takes too long ends at its time limit, and its handler is cancelled."""
    slow = Slow()
    async with calling(slow) as channel:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await channel.call(b"slow")
        await until(lambda: slow.cancelled == [b"slow"])
        slow.go.set()
        assert await channel.call(b"next") == b"next"


@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_cancelled_at_any_time(size: int) -> None:
    """Wherever a cancellation hits a call, the room it took is free again and its memory isn't lent any more."""
    slow = Slow()
    slow.go.set()
    async with calling(slow, MessageParam(max_calls=2)) as channel:
        for turns in range(12):
            call = asyncio.create_task(channel.call(pattern(size)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if call.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await call
        assert await asyncio.gather(*[channel.call(b"x") for _ in range(5)]) == [b"x"] * 5
        async with asyncio.timeout(5):
            await channel.drain()


async def test_handler_cancels_itself() -> None:
    """A handler that ends cancelled is an error of its call's."""

    async def handler(request: bytes) -> bytes:
        raise asyncio.CancelledError

    async with calling(handler) as channel:
        with pytest.raises(RemoteCallError, match="CancelledError"):
            await channel.call(b"x")


async def test_no_calls_there() -> None:
    """A peer that handles none is known before anything is sent."""
    async with (
        aiordma.serve_messages(MessageChannel.wait_closed, HOST, 0, device=DEVICE) as server,
        aiordma.connect_messages(HOST, server.port, device=DEVICE) as channel,
    ):
        with pytest.raises(UnsupportedError, match="serve_calls"):
            await channel.call(b"x")


async def test_caller_vanishes() -> None:
    """The handlers of a caller that is gone are cancelled."""
    slow = Slow()
    async with aiordma.serve_calls(slow, HOST, 0, device=DEVICE) as server:
        channel = await aiordma.connect_messages(HOST, server.port, device=DEVICE)
        calls = [asyncio.create_task(channel.call(bytes((index,)))) for index in range(5)]
        await until(lambda: len(slow.begun) == 5)
        channel.abort()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, ClosedError)
        await until(lambda: len(slow.cancelled) == 5)


async def test_server_vanishes() -> None:
    """Calls whose server is gone end with BrokenError, those that wait for room too; so do later ones."""
    slow = Slow()
    serving = aiordma.serve_calls(slow, HOST, 0, device=DEVICE, messages=MessageParam(max_calls=2))
    async with serving as server:
        channel = await aiordma.connect_messages(HOST, server.port, device=DEVICE)
        calls = [asyncio.create_task(channel.call(bytes((index,)))) for index in range(5)]
        await until(lambda: len(slow.begun) == 2)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, BrokenError)
    assert len(slow.cancelled) == 2
    with pytest.raises(RDMAError):
        await channel.call(b"x")
    with suppress(BrokenError):
        await channel.close()


async def test_calls_beside_messages() -> None:
    """A channel takes both at once: messages to the peer's program, calls to its handler."""
    async with calling(echo) as channel:
        for index in range(50):
            channel.send(pattern(index * 50))
        assert await channel.call(b"x") == b"x"
