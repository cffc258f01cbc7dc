"""Message channels: whole messages of any size, in order, under flow control."""

from __future__ import annotations

import array
import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import (
    Access,
    BrokenError,
    BusyError,
    ClosedError,
    ConnectError,
    MessageChannel,
    MessageParam,
    ProtocolError,
)
from tests.conformance.support import DEVICE, HOST, pattern, until

#: A frame of 256 bytes, and one of them at a time.
TINY = MessageParam(frame_size=256, credits=2)


@asynccontextmanager
async def channels(
    param: MessageParam | None = None, server_param: MessageParam | None = None
) -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    """Two ends of a channel, closed at the end."""
    accepted: asyncio.Queue[MessageChannel] = asyncio.Queue()
    leaving = asyncio.Event()

    async def handle(channel: MessageChannel) -> None:
        accepted.put_nowait(channel)
        await leaving.wait()

    serving = aiordma.serve_messages(handle, HOST, 0, device=DEVICE, messages=server_param or param)
    async with serving as server:
        client = await aiordma.connect_messages(HOST, server.port, device=DEVICE, messages=param)
        served = await accepted.get()
        try:
            yield client, served
        finally:
            leaving.set()
            with suppress(BrokenError):
                await client.close()
            await served.wait_closed()


async def test_there_and_back() -> None:
    """What is sent is received at the other end, in both directions."""
    async with channels() as (client, server):
        await client.send(b"there")
        assert await server.recv() == b"there"
        await server.send(b"and back")
        assert await client.recv() == b"and back"


async def test_the_server_speaks_first() -> None:
    """A server may send before its client does, or without it: on iWARP too."""

    async def greet(channel: MessageChannel) -> None:
        await channel.send(b"welcome")
        await channel.send(pattern(100_000))
        assert await channel.recv() == b"thanks"

    async with (
        aiordma.serve_messages(greet, HOST, 0, device=DEVICE) as server,
        aiordma.connect_messages(HOST, server.port, device=DEVICE) as channel,
    ):
        assert await channel.recv() == b"welcome"
        assert await channel.recv() == pattern(100_000)
        await channel.send(b"thanks")


@pytest.mark.parametrize("param", [None, TINY, MessageParam(frame_size=4096, credits=3)])
async def test_all_sizes(param: MessageParam | None) -> None:
    """Messages of all sizes arrive whole and in order, in both directions at once."""
    edges = [0, 1, 240, 243, 244, 245, 4083, 4084, 4085, 16_371, 16_372, 16_373, 65_536]
    sizes = [*edges, 1 << 20, 3, *reversed(edges), *range(60)]

    async def send(channel: MessageChannel, seed: int) -> None:
        for index, size in enumerate(sizes):
            await channel.send(pattern(size, seed + index))

    async def receive(channel: MessageChannel, seed: int) -> None:
        for index, size in enumerate(sizes):
            message = await channel.recv()
            assert len(message) == size
            assert message == pattern(size, seed + index)

    async with channels(param) as (client, server):
        await asyncio.gather(send(client, 1), send(server, 100), receive(server, 1), receive(client, 100))


async def test_large() -> None:
    """A message of 64 MiB, from registered memory and into registered memory."""
    size = 64 << 20
    async with channels() as (client, server):
        source = client.connection.alloc(size, access=Access.REMOTE_READ)
        sink = server.connection.alloc(size)
        source.view[:] = pattern(size)
        length, _ = await asyncio.gather(server.recv_into(sink), client.send(source))
        assert length == size
        assert hashlib.sha256(sink.view).digest() == hashlib.sha256(source.view).digest()


def kinds(channel: MessageChannel, length: int) -> Iterable[tuple[Any, bytes]]:
    """Everything that a message may be given as."""
    data = pattern(length)
    half = length // 2
    memory = channel.connection.alloc(length)
    memory.view[:] = data
    readable = channel.connection.alloc(length, access=Access.REMOTE_READ)
    readable.view[:] = data
    yield data, data
    yield bytearray(data), data
    yield memoryview(data)[1:], data[1:]
    yield np.frombuffer(data, dtype=np.uint8), data
    yield array.array("B", data), data
    yield memory, data
    yield readable, data
    yield readable[half:], data[half:]
    yield [data[:half], bytearray(data[half:])], data
    yield (memory[:half], b"", readable[half:], b"end"), data + b"end"
    yield [data] * 20, data * 20
    yield [], b""


@pytest.mark.parametrize("length", [200, 40_000])
async def test_kinds_of_data(length: int) -> None:
    """Any contiguous buffer, registered memory, and lists of these are messages."""
    async with channels() as (client, server):
        for data, expected in kinds(client, length):
            sending = client.send(data)
            assert await server.recv() == expected
            await sending


async def test_no_message() -> None:
    """What isn't a contiguous buffer is refused where it is given, and the channel goes on."""
    async with channels() as (client, server):
        with pytest.raises(TypeError):
            client.send("text")
        with pytest.raises(TypeError, match="not contiguous"):
            client.send(np.zeros((4, 4), dtype=np.uint8)[:, 1])
        await client.send(b"fine")
        assert await server.recv() == b"fine"


async def test_too_long_for_the_peer() -> None:
    """A message longer than the peer takes is refused where it is given."""
    async with channels(server_param=MessageParam(frame_size=1000, max_message=1000)) as (client, server):
        assert client.max_message == 1000
        with pytest.raises(ValueError, match="1001 bytes: the peer takes 1000"):
            client.send(bytes(1001))
        sending = client.send(bytes(1000))
        assert await server.recv() == bytes(1000)
        await sending


async def test_iterate() -> None:
    """`async for` gives the messages until the peer closes; those on their way at the close arrive."""
    messages = [pattern(size, size) for size in (1, 20_000, 3, 200_000, 0)]
    async with channels() as (client, server):
        for message in messages:
            client.send(message)
        closing = asyncio.create_task(client.close())
        assert [message async for message in server] == messages
        await closing


async def test_recv_into() -> None:
    """Small and large messages into memory of the program's, registered and not; the rest of it isn't touched."""
    async with channels() as (client, server):
        for size in (100, 50_000):
            sinks: list[Any] = [bytearray(size + 10), server.connection.alloc(size + 10), np.zeros(size + 10, "u1")]
            for sink in sinks:
                view = sink.view if hasattr(sink, "view") and not isinstance(sink, np.ndarray) else memoryview(sink)
                view[:] = b"g" * (size + 10)
                sending = client.send(pattern(size))
                assert await server.recv_into(sink) == size
                assert bytes(view) == pattern(size) + b"g" * 10
                await sending


async def test_recv_into_too_short() -> None:
    """A message longer than the buffer stays, and can be received by a longer one or by `recv`."""
    async with channels() as (client, server):
        for size in (100, 50_000):
            client.send(pattern(size))
            client.send(b"behind")
            with pytest.raises(ValueError, match=f"the message has {size} bytes, the buffer 99"):
                await server.recv_into(bytearray(99))
            sink = bytearray(size)
            assert await server.recv_into(sink) == size
            assert sink == pattern(size)
            assert await server.recv() == b"behind"
            client.send(pattern(size))
            with pytest.raises(ValueError, match="the buffer 1"):
                await server.recv_into(bytearray(1))
            assert await server.recv() == pattern(size)


async def test_recv_into_read_only() -> None:
    """A buffer that can't be written to is refused, and no message is lost."""
    async with channels() as (client, server):
        client.send(b"here")
        with pytest.raises(ValueError, match="read-only"):
            await server.recv_into(b"1234")
        assert await server.recv() == b"here"


async def test_one_receiver() -> None:
    """A second task that receives is told so; the first goes on."""
    async with channels() as (client, server):
        first = asyncio.create_task(server.recv())
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await server.recv()
        with pytest.raises(BusyError):
            await server.recv_into(bytearray(9))
        client.send(b"for the first")
        assert await first == b"for the first"


@pytest.mark.parametrize("size", [100, 30_000])
async def test_backpressure(size: int) -> None:
    """A peer that receives nothing makes the sender wait, with little memory used; then everything arrives."""
    count = 500
    sent = 0

    async def send(channel: MessageChannel) -> None:
        nonlocal sent
        for index in range(count):
            await channel.send(pattern(size, index))
            sent += 1

    async with channels(MessageParam(frame_size=1024, credits=4)) as (client, server):
        sending = asyncio.create_task(send(client))
        await asyncio.wait((sending,), timeout=0.3)
        assert not sending.done()
        assert sent < 100
        for index in range(count):
            assert await server.recv() == pattern(size, index)
        await sending


async def test_both_only_send() -> None:
    """Two sides that send much before they receive don't wait for each other for ever."""
    async with channels(TINY) as (client, server):
        futures = [end.send(pattern(size)) for end in (client, server) for size in (100, 10_000) * 20]
        await asyncio.wait(futures, timeout=0.1)
        for _ in range(20):
            for size in (100, 10_000):
                assert list(await asyncio.gather(client.recv(), server.recv())) == [pattern(size)] * 2
        await asyncio.gather(*futures)


async def test_fair_between_senders() -> None:
    """Many tasks that send at once get their turns in order: none is more than a turn ahead of another."""
    count, rounds = 20, 15

    async def send(channel: MessageChannel, name: int) -> None:
        for _ in range(rounds):
            await channel.send(bytes((name,)) * 200)

    async with channels(TINY) as (client, server):
        senders = [asyncio.create_task(send(client, name)) for name in range(count)]
        seen = [0] * count
        for _ in range(count * rounds):
            seen[(await server.recv())[0]] += 1
            assert max(seen) - min(seen) <= 3
        await asyncio.gather(*senders)


async def test_recv_cancelled() -> None:
    """A receiver that is cancelled loses no message, small or large."""
    async with channels() as (client, server):
        waiting = asyncio.create_task(server.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for size in (10, 1 << 20):
            client.send(pattern(size))
            for turns in range(6):
                receiving = asyncio.create_task(server.recv())
                for _ in range(turns):
                    await asyncio.sleep(0)
                if receiving.cancel():
                    with pytest.raises(asyncio.CancelledError):
                        await receiving
                else:
                    assert receiving.result() == pattern(size)
                    break
            else:
                assert await server.recv() == pattern(size)


async def test_recv_into_cancelled() -> None:
    """A large message whose `recv_into` was cancelled is there for the next one."""
    size = 4 << 20
    async with channels() as (client, server):
        sending = client.send(pattern(size))
        sink = server.connection.alloc(size)
        for turns in (1, 2, 3, 5):
            receiving = asyncio.create_task(server.recv_into(sink))
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            with suppress(asyncio.CancelledError):
                await receiving
                break
        else:
            assert await server.recv_into(sink) == size
        await sink.idle()
        assert sink.view == pattern(size)
        await sending


async def test_send_cancelled() -> None:
    """A message that waits for room is withdrawn by its cancellation; those around it arrive."""
    async with channels(TINY) as (client, server):
        futures = [client.send(bytes((index,)) * 200) for index in range(20)]
        await asyncio.sleep(0.1)
        assert not futures[10].done()
        futures[10].cancel()
        for index in [*range(10), *range(11, 20)]:
            assert await server.recv() == bytes((index,)) * 200
        assert await asyncio.gather(*futures[:10], *futures[11:]) == [None] * 19


async def test_large_send_cancelled() -> None:
    """A large message that is lent already arrives although its sender was cancelled; `drain` waits for it."""
    async with channels() as (client, server):
        data = bytearray(pattern(100_000))
        sending = client.send(data)
        await asyncio.sleep(0.05)
        sending.cancel()
        draining = asyncio.create_task(client.drain())
        assert await server.recv() == pattern(100_000)
        await draining


async def test_drain() -> None:
    """`drain` returns when small messages have left and large ones are READ, and raises if the channel ends before."""
    async with channels(TINY) as (client, server):
        await client.drain()
        for size in (200, 200, 5000, 200):
            client.send(bytes(size))
        draining = asyncio.create_task(client.drain())
        await asyncio.wait((draining,), timeout=0.1)
        assert not draining.done()
        for size in (200, 200, 5000, 200):
            assert await server.recv() == bytes(size)
        await draining
        client.send(bytes(5000))
        draining = asyncio.create_task(client.drain())
        cancelled = asyncio.create_task(client.drain())
        await asyncio.sleep(0)
        cancelled.cancel()
        server.abort()
        with pytest.raises(BrokenError):
            await draining
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_memory_is_free_afterwards() -> None:
    """Memory that was lent for a large message isn't held any more when the future is done."""
    async with channels() as (client, server):
        data = bytearray(100_000)
        sending = client.send(data)
        with pytest.raises(BufferError):
            data.append(1)  # lent
        await server.recv()
        await sending
        data.append(1)


async def test_closed() -> None:
    """After a close nothing can be sent; what came before is received; then each side is told in its own way."""
    async with channels() as (client, server):
        server.send(b"last words")
        await server.drain()
        await until(lambda: client._protocol.inbound)
        await client.close()
        await client.close()
        assert client.is_closing()
        assert await client.recv() == b"last words"
        for attempt in (client.recv, client.drain, lambda: client.recv_into(bytearray(9))):
            with pytest.raises(ClosedError):
                await attempt()
        with pytest.raises(ClosedError):
            client.send(b"more")
        with pytest.raises(BrokenError) as caught:
            await server.recv()
        assert caught.value.orderly
        await server.wait_closed()
        with pytest.raises(BrokenError):
            server.send(b"more")


async def test_close_waits_for_large_messages() -> None:
    """`close` lets the peer READ what was sent; nobody's message is lost."""
    async with channels() as (client, server):
        sending = [client.send(pattern(200_000, index)) for index in range(40)]
        closing = asyncio.create_task(client.close())
        for index in range(40):
            assert await server.recv() == pattern(200_000, index)
        await asyncio.gather(*sending, closing)


async def test_close_in_time() -> None:
    """A peer that takes nothing can't hold a close up: what didn't leave ends with ClosedError."""
    async with channels(TINY) as (client, _):
        futures = [client.send(bytes(200)) for _ in range(10)]
        await client.close(timeout=0.2)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[-1], ClosedError)


async def test_both_close_at_once() -> None:
    """Both ends close at the same time, with messages on their way, and neither is told of a fault."""
    async with channels() as (client, server):
        client.send(b"x")
        server.send(b"y")
        await asyncio.gather(client.close(), server.close())
        for end in (client, server):
            with suppress(ClosedError):
                await end.recv()


async def test_abort() -> None:
    """An abort ends both sides at once: what waits is told."""
    async with channels(TINY) as (client, server):
        futures = [client.send(bytes(200)) for _ in range(10)]
        receiving = asyncio.create_task(client.recv())
        await asyncio.sleep(0)
        client.abort()
        client.abort()
        with pytest.raises(ClosedError):
            await receiving
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[-1], ClosedError)
        await server.wait_closed()
        with pytest.raises(BrokenError):
            server.send(b"x")


@pytest.mark.parametrize("size", [200, 100_000])
async def test_peer_dies(size: int) -> None:
    """A peer that vanishes while messages are sent and received: everybody is told, nobody hangs."""
    async with channels(TINY) as (client, server):

        async def send() -> None:
            while True:
                await client.send(bytes(size))

        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(send()) for _ in range(5)]
        tasks.append(asyncio.create_task(client.recv()))
        for _ in range(3):
            await server.recv()
        server.connection.abort()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, BrokenError)

        async def receive() -> None:
            while True:
                await server.recv()

        with pytest.raises((BrokenError, ClosedError)):
            await receive()


async def test_many_in_flight() -> None:
    """Ten thousand small messages that nobody waits for, each received once and in order."""
    count = 10_000 if DEVICE == "soft" else 2000

    async def send(channel: MessageChannel) -> None:
        for index in range(count):
            await channel.send(index.to_bytes(64, "big"))

    async with channels() as (client, server):
        sending = asyncio.create_task(send(client))
        for index in range(count):
            assert int.from_bytes(await server.recv(), "big") == index
        await sending


async def test_a_receiver_lets_others_run() -> None:
    """Receiving messages that are there doesn't keep other tasks from running."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with channels(MessageParam(credits=200)) as (client, server):
        for _ in range(2000):
            await client.send(b"")
        await client.drain()
        ticking = asyncio.create_task(tick())
        for _ in range(2000):
            assert await server.recv() == b""
        ticking.cancel()
        assert ticks >= 5


async def test_not_a_server_of_messages() -> None:
    """A server of something else is told apart: by a ProtocolError that names the other side."""

    async def handle(connection: aiordma.Connection) -> None:
        with suppress(BrokenError):
            await connection.recv()

    async with aiordma.serve(handle, HOST, 0, device=DEVICE, private_data=b"something else") as server:
        with pytest.raises(ProtocolError, match="isn't a hello"):
            await aiordma.connect_messages(HOST, server.port, device=DEVICE)


async def test_not_a_client_of_messages() -> None:
    """A client of something else is rejected, and the server goes on."""
    async with aiordma.serve_messages(MessageChannel.wait_closed, HOST, 0, device=DEVICE) as server:
        for private_data in (b"", b"something else", b"aioM\x07"):
            with pytest.raises(ConnectError):
                await aiordma.connect(HOST, server.port, device=DEVICE, private_data=private_data)
        async with aiordma.connect_messages(HOST, server.port, device=DEVICE):
            pass
