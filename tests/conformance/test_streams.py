"""Byte streams by asyncio's functions: what a program written for TCP relies on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

import aiordma
from aiordma import StreamParam, StreamTransport
from tests.conformance.support import DEVICE, HOST, pattern

open_connection = partial(aiordma.open_connection, device=DEVICE)
start_server = partial(aiordma.start_server, device=DEVICE)
create_server = partial(aiordma.create_server, device=DEVICE)
create_connection = partial(aiordma.create_connection, device=DEVICE)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Buffers that are full after a few kilobytes.
SMALL = StreamParam(recv_buffer=4096, send_buffer=4096, rq_size=16, sq_size=16)


@asynccontextmanager
async def stream_pair(
    param: StreamParam | None = None, server_param: StreamParam | None = None
) -> AsyncIterator[tuple[Streams, Streams]]:
    """Two ends of a stream, closed at the end."""
    accepted: asyncio.Queue[Streams] = asyncio.Queue()
    server = await start_server(lambda r, w: accepted.put_nowait((r, w)), HOST, 0, param=server_param or param)
    async with server:
        client = await open_connection(HOST, server.port, param=param)
        served = await accepted.get()
        try:
            yield client, served
        finally:
            for _, writer in (client, served):
                writer.close()
            for _, writer in (client, served):
                with suppress(ConnectionError):
                    await writer.wait_closed()


class Recorder(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.eof = False
        self.lost: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.transport: StreamTransport | None = None
        self.calls: list[str] = []
        self.keep_open = False
        self.news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, StreamTransport)
        self.transport = transport
        self.news.set()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.news.set()

    def eof_received(self) -> bool:
        self.eof = True
        self.news.set()
        return self.keep_open

    def pause_writing(self) -> None:
        self.calls.append("pause")
        self.news.set()

    def resume_writing(self) -> None:
        self.calls.append("resume")
        self.news.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.set_result(exc)
        self.news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds that one of the calls may bring about."""
        while not condition():
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def recorders(param: StreamParam | None = None) -> AsyncIterator[tuple[Recorder, Recorder]]:
    """Two protocols joined by a stream, aborted at the end."""
    served: asyncio.Queue[Recorder] = asyncio.Queue()

    def factory() -> Recorder:
        served.put_nowait(recorder := Recorder())
        return recorder

    async with await create_server(factory, HOST, 0, param=param) as server:
        _, client = await create_connection(Recorder, HOST, server.port, param=param)
        peer = await served.get()
        await peer.until(lambda: peer.transport)
        yield client, peer
        for one in (client, peer):
            assert one.transport is not None
            one.transport.abort()
            await one.lost


async def test_there_and_back() -> None:
    """What is written is read at the other end, in both directions."""
    async with stream_pair() as ((reader, writer), (their_reader, their_writer)):
        writer.write(b"there")
        assert await their_reader.readexactly(5) == b"there"
        their_writer.writelines([b"and ", b"back"])
        assert await reader.readexactly(8) == b"and back"


@pytest.mark.parametrize("param", [None, SMALL, StreamParam(recv_buffer=2, send_buffer=3, rq_size=16, sq_size=16)])
async def test_much_data_both_ways_at_once(param: StreamParam | None) -> None:
    """Whatever the buffers' sizes, everything arrives once, in order."""
    size = 1 << (20 if param is None else 16 if param is SMALL else 10)

    async def write(writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, size, 10_000):
            writer.write(data[start : start + 10_000])
            await writer.drain()
        writer.write_eof()

    async with stream_pair(param) as ((reader, writer), (their_reader, their_writer)):
        there, back = pattern(size, 1), pattern(size, 2)
        got, theirs, _, _ = await asyncio.gather(
            reader.read(), their_reader.read(), write(writer, there), write(their_writer, back)
        )
        assert hashlib.sha256(theirs).digest() == hashlib.sha256(there).digest()
        assert hashlib.sha256(got).digest() == hashlib.sha256(back).digest()


async def test_half_close() -> None:
    """After write_eof() the peer sees the end, and can still answer."""
    async with stream_pair() as ((reader, writer), (their_reader, their_writer)):
        writer.write(b"question")
        writer.write_eof()
        assert await their_reader.read() == b"question"
        their_writer.write(b"answer")
        await their_writer.drain()
        their_writer.close()
        assert await reader.read() == b"answer"


async def test_close_sends_what_waits() -> None:
    """What was written before close() arrives, though it is more than the buffers take."""
    data = pattern(40_000)
    async with stream_pair(SMALL) as ((_, writer), (their_reader, _)):
        writer.write(data)
        writer.close()
        assert await their_reader.read() == data
        await writer.wait_closed()


async def test_abort_is_a_connection_lost_with_a_cause() -> None:
    """The peer of an aborted stream is told by an exception, not by an orderly end."""
    async with recorders() as (client, peer):
        assert client.transport is not None
        client.transport.abort()
        assert await client.lost is None
        assert isinstance(await peer.lost, aiordma.BrokenError)
        assert not peer.eof


async def test_eof_received() -> None:
    """Its false value closes the transport; a true one leaves it open for writing."""
    async with recorders() as (client, peer):
        assert client.transport is not None
        assert peer.transport is not None
        peer.keep_open = True
        client.transport.write_eof()
        await peer.until(lambda: peer.eof)
        assert not peer.transport.is_closing()
        peer.transport.write(b"still here")
        await client.until(lambda: client.data == b"still here")
        peer.transport.write_eof()
        assert await client.lost is None
        assert client.eof
        assert await peer.lost is None


async def test_both_close_at_once() -> None:
    """Each end's connection_lost() has no exception."""
    async with recorders() as (client, peer):
        assert client.transport is not None
        assert peer.transport is not None
        client.transport.write(b"bye")
        client.transport.close()
        peer.transport.close()
        assert await client.lost is None
        assert await peer.lost is None


async def test_pause_reading_stops_the_sender() -> None:
    """A reader that pauses makes the peer's pause_writing() come, and resume_writing() when it goes on."""
    data = pattern(300_000)
    async with recorders(SMALL) as (client, peer):
        assert client.transport is not None
        assert peer.transport is not None
        peer.transport.pause_reading()
        assert not peer.transport.is_reading()
        client.transport.write(data)
        await client.until(lambda: client.calls == ["pause"])
        assert client.transport.get_write_buffer_size() >= len(data) - 2 * 4096
        assert not peer.data
        peer.transport.resume_reading()
        await peer.until(lambda: len(peer.data) == len(data))
        assert peer.data == data
        await client.until(lambda: client.calls == ["pause", "resume"])
        assert client.transport.get_write_buffer_size() == 0


async def test_buffered_protocol() -> None:
    """A BufferedProtocol's buffer is filled, in parts if it is small."""

    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.buffer = bytearray(7)
            self.data = bytearray()
            self.complete = asyncio.Event()

        def get_buffer(self, sizehint: int) -> bytearray:
            assert sizehint > 0
            return self.buffer

        def buffer_updated(self, nbytes: int) -> None:
            self.data += self.buffer[:nbytes]
            if len(self.data) == 1000:
                self.complete.set()

    made: asyncio.Queue[Buffered] = asyncio.Queue()

    def factory() -> Buffered:
        made.put_nowait(protocol := Buffered())
        return protocol

    async with await create_server(factory, HOST, 0) as server:
        _, writer = await open_connection(HOST, server.port)
        writer.write(pattern(1000))
        protocol = await made.get()
        await protocol.complete.wait()
        assert protocol.data == pattern(1000)
        writer.close()
        await writer.wait_closed()


async def test_write_limits() -> None:
    """They follow asyncio's rule, and refuse what makes no sense."""
    async with recorders() as (client, _):
        transport = client.transport
        assert transport is not None
        assert transport.get_write_buffer_limits() == (16384, 65536)
        transport.set_write_buffer_limits(high=1000)
        assert transport.get_write_buffer_limits() == (250, 1000)
        transport.set_write_buffer_limits(low=1000)
        assert transport.get_write_buffer_limits() == (1000, 4000)
        with pytest.raises(ValueError, match="must be >="):
            transport.set_write_buffer_limits(high=1, low=2)


async def test_write_where_it_makes_no_sense() -> None:
    """No bytes, and after write_eof(), are errors; after close() it is ignored, as asyncio does."""
    async with recorders() as (client, peer):
        transport = client.transport
        assert transport is not None
        with pytest.raises(TypeError, match="bytes-like"):
            transport.write("text")
        transport.write(b"")
        transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            transport.write(b"late")
        assert transport.can_write_eof()
        await peer.until(lambda: peer.eof)
        assert await peer.lost is None
        assert await client.lost is None
        assert peer.data == b""
        transport.close()
        transport.pause_reading()
        transport.resume_reading()


async def test_extra_info() -> None:
    """Who and where is told, and that there is no socket."""
    async with stream_pair() as ((_, writer), (_, their_writer)):
        assert writer.get_extra_info("peername") == their_writer.get_extra_info("sockname")
        assert writer.get_extra_info("sockname") == their_writer.get_extra_info("peername")
        assert writer.get_extra_info("device") == DEVICE
        assert writer.get_extra_info("qp").qp_num
        assert writer.get_extra_info("socket") is None


async def test_a_protocol_that_raises_ends_its_stream(loop_errors: list[dict[str, Any]]) -> None:
    """As with asyncio, the loop's exception handler is told, and connection_lost() has the exception."""
    async with recorders() as (client, peer):
        assert client.transport is not None
        error = ZeroDivisionError("in data_received")

        def fail(_: bytes) -> None:
            raise error

        peer.data_received = fail  # type: ignore[assignment,method-assign]
        client.transport.write(b"x")
        assert await peer.lost is error
        assert loop_errors.pop()["exception"] is error


async def test_a_peer_that_is_no_rsocket() -> None:
    """A listener of another kind is told apart by its private data; a client of another kind is rejected."""
    async with aiordma.serve(lambda conn: conn.recv(), HOST, 0, device=DEVICE) as server:
        with pytest.raises(aiordma.ProtocolError, match="no rsocket"):
            await open_connection(HOST, server.port)
    async with await start_server(lambda _, __: None, HOST, 0) as streams:
        with pytest.raises(aiordma.RejectedError):
            await aiordma.connect(HOST, streams.port, device=DEVICE, private_data=b"something else")


async def test_a_server_goes_on_with_what_is_open() -> None:
    """close() accepts no more, and wait_closed() waits until the last stream has ended."""
    accepted: asyncio.Queue[Streams] = asyncio.Queue()
    server = await start_server(lambda r, w: accepted.put_nowait((r, w)), HOST, 0, start_serving=False)
    assert not server.is_serving()
    await server.start_serving()
    assert server.is_serving()
    _, writer = await open_connection(HOST, server.port)
    reader, their_writer = await accepted.get()
    server.close()
    waiting = asyncio.create_task(server.wait_closed())
    writer.write(b"still open")
    assert await reader.readexactly(10) == b"still open"
    assert not waiting.done()
    with pytest.raises(aiordma.ConnectError):
        await open_connection(HOST, server.port)
    for one in (writer, their_writer):
        one.close()
    await waiting
    assert not server.is_serving()
    with pytest.raises(RuntimeError, match="closed"):
        await server.start_serving()


async def test_serve_forever_is_cancelled() -> None:
    """It closes the server, and passes the cancellation on."""
    server = await start_server(lambda _, __: None, HOST, 0)
    task = asyncio.create_task(server.serve_forever())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already"):
        await server.serve_forever()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.is_serving()


async def test_a_socket_is_refused() -> None:
    """There is none, in neither direction."""
    with pytest.raises(aiordma.UnsupportedError, match="no socket"):
        await open_connection(sock=object())
    with pytest.raises(aiordma.UnsupportedError, match="no socket"):
        await start_server(lambda _, __: None, sock=object())


async def test_direct_writes() -> None:
    """A region that one end maps is written to by the other, before what that writes afterwards is read."""
    async with recorders(StreamParam(iomap_size=2)) as (client, peer):
        assert client.transport is not None
        assert peer.transport is not None
        conn = peer.transport.get_extra_info("connection")
        region = conn.alloc(100, access=aiordma.Access.REMOTE_WRITE)
        with pytest.raises(ValueError, match="no region mapped at 1000"):
            await client.transport.write_at(1000, b"too early")
        assert peer.transport.map_region(region, 1000) == 1000
        peer.transport.write(b"mapped")
        await client.until(lambda: client.data == b"mapped")
        await client.transport.write_at(1010, b"directly")
        client.transport.write(b"written")
        await peer.until(lambda: peer.data == b"written")
        assert region.view[10:18] == b"directly"
        with pytest.raises(ValueError, match="without REMOTE_WRITE"):
            peer.transport.map_region(conn.alloc(8))
