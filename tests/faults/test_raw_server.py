"""Servers that aren't what they seem, seen from `connect()` and from the connection it gives."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable

import pytest

import aiordma
from aiordma import (
    BrokenError,
    ConnectError,
    Connection,
    ConnectTimeoutError,
    FlushedError,
    RDMAError,
    RejectedError,
    RemoteError,
)
from aiordma.drivers.soft import cm
from aiordma.drivers.soft.sockets import open_socket
from aiordma.types import SocketAddress
from tests.faults import raw_peer
from tests.faults.raw_peer import RawListener, RawPeer
from tests.faults.support import REMOTE, against_raw, until


async def _refused(listener: RawListener) -> ConnectError:
    async with asyncio.timeout(20):
        with pytest.raises(ConnectError) as caught:
            await aiordma.connect("127.0.0.1", listener.port)
    return caught.value


async def test_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts TCP and says nothing: a time-out that is a TimeoutError, and says what to look at."""
    monkeypatch.setattr(cm, "REPLY_TIMEOUT", 0.05)
    with RawListener() as listener:
        error = await _refused(listener)
        assert isinstance(error, ConnectTimeoutError)
        assert isinstance(error, TimeoutError)
        assert str(listener.port) in str(error)
        assert "no MPA Reply within 0.05 s" in str(error)
        assert "is it an RDMA server" in str(error)


async def test_says_nothing_under_a_timeout_of_the_program() -> None:
    """asyncio.timeout ends a connect, and nothing is left of it."""
    with RawListener() as listener:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await aiordma.connect("127.0.0.1", listener.port)
        with await listener.accept() as peer:
            async with asyncio.timeout(20):
                assert (await peer.frame()).key == b"MPA ID Req Frame"
                await peer.ended()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(600),
        raw_peer.request(),
        raw_peer.reply(revision=3),
        raw_peer.reply(flags=0),
        raw_peer.reply(flags=0, revision=1),
        b"MPA ID Rep Frame" + struct.pack(">BBH", raw_peer.ENHANCED, 2, 513),
        b"MPA ID Rep Frame" + struct.pack(">BBH", raw_peer.ENHANCED, 2, 3) + bytes(3),
        raw_peer.reply(word=0x0010_3FFE),  # more READs than we accept
        raw_peer.reply(word=0x0010_0010 | raw_peer.PEER_TO_PEER | 0x4000_0000),  # an RTR that wasn't offered
    ],
    ids=["http", "zeros", "request", "revision 3", "not enhanced", "revision 1", "long", "short", "ord", "rtr"],
)  # fmt: skip
async def test_faulty_reply(answer: bytes) -> None:
    """A Reply that isn't one, or doesn't answer the Request: ConnectError that says so, and a closed socket."""
    with RawListener() as listener:
        answering = asyncio.create_task(listener.respond(answer))
        error = await _refused(listener)
        assert not isinstance(error, TimeoutError)
        assert "the MPA Reply is faulty" in str(error)
        with await answering as peer:
            async with asyncio.timeout(20):
                await peer.ended()


async def test_half_a_reply_then_the_end() -> None:
    """Half a Reply, then the end of the stream: RejectedError at once, not a time-out."""
    with RawListener() as listener:
        answering = asyncio.create_task(listener.respond(raw_peer.reply()[:15]))
        answering.add_done_callback(lambda task: task.result().close())
        assert isinstance(await _refused(listener), RejectedError)


async def test_half_a_reply_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a Reply, then silence: the time-out counts for the whole of it."""
    monkeypatch.setattr(cm, "REPLY_TIMEOUT", 0.05)
    with RawListener() as listener:
        answering = asyncio.create_task(listener.respond(raw_peer.reply()[:15]))
        assert isinstance(await _refused(listener), ConnectTimeoutError)
        (await answering).close()


@pytest.mark.parametrize("leave", [RawPeer.close, RawPeer.reset])
async def test_leaves_before_the_reply(leave: Callable[[RawPeer], None]) -> None:
    """A server that goes away on the Request: asked once more in revision 1, then RejectedError."""
    with RawListener() as listener:

        async def serve() -> list[int]:
            revisions = []
            for _ in range(2):
                peer = await listener.accept()
                revisions.append((await peer.frame()).revision)
                leave(peer)
            return revisions

        serving = asyncio.create_task(serve())
        error = await _refused(listener)
        assert isinstance(error, RejectedError)
        assert "before its MPA Reply" in str(error)
        assert await serving == [2, 1]


async def test_takes_revision_1_only() -> None:
    """A server older than RFC 6581, which closes on revision 2, is connected to in revision 1, and it works."""
    with RawListener() as listener:

        async def serve() -> RawPeer:
            first = await listener.accept()
            assert (await first.frame()).revision == 2
            first.close()
            second = await listener.accept()
            asked = await second.frame()
            assert (asked.revision, asked.flags & raw_peer.ENHANCED, asked.private_data) == (1, 0, b"hi")
            await second.send(raw_peer.reply(flags=0, revision=1, private_data=b"old"))
            return second

        serving = asyncio.create_task(serve())
        async with asyncio.timeout(20):
            conn = await aiordma.connect("127.0.0.1", listener.port, private_data=b"hi")
            with await serving as peer:
                assert conn.peer_private_data == b"old"
                await conn.send(b"client first")
                assert (await peer.fpdu()).payload == b"client first"
                await peer.send(raw_peer.send(1, b"then the server"))
                assert await conn.recv() == b"then the server"
            await conn.close()


async def test_revision_1_from_a_fixed_port() -> None:
    """The second try from a local address of the program's choice works as the first does."""
    with RawListener() as listener, RawListener() as free:
        port = free.port
        free.sock.close()

        async def serve() -> RawPeer:
            first = await listener.accept()
            await first.frame()
            first.reset()
            second = await listener.accept()
            assert (await second.frame()).revision == 1
            await second.send(raw_peer.reply(flags=0, revision=1))
            return second

        serving = asyncio.create_task(serve())
        async with asyncio.timeout(20):
            conn = await aiordma.connect("127.0.0.1", listener.port, local_addr=("127.0.0.1", port))
            (await serving).close()
            await conn.close()


async def test_no_socket_for_revision_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second try can't even begin, connect says why, and doesn't wait for ever."""
    opened = 0

    def second_fails(address: SocketAddress) -> socket.socket:
        nonlocal opened
        opened += 1
        if opened == 2:
            raise OSError(24, "Too many open files")
        return open_socket(address)

    monkeypatch.setattr("aiordma.drivers.soft.cm.open_socket", second_fails)
    with RawListener() as listener:
        connecting = asyncio.create_task(_refused(listener))
        peer = await listener.accept()
        await peer.frame()
        peer.close()
        assert "Too many open files" in str(await connecting)


async def test_rejects() -> None:
    """A Reply with the reject flag: RejectedError with the private data of the peer's program."""
    with RawListener() as listener:
        answer = raw_peer.reply(flags=raw_peer.ENHANCED | raw_peer.REJECT, private_data=b"full")
        answering = asyncio.create_task(listener.respond(answer))
        error = await _refused(listener)
        assert isinstance(error, RejectedError)
        assert (error.status, error.private_data) == (28, b"full")
        (await answering).close()


async def test_resets_at_once() -> None:
    """A server that resets as soon as it has accepted: the connect or the connection ends, and says so."""
    with RawListener() as listener:

        async def serve() -> None:
            while True:
                (await listener.accept()).reset()

        serving = asyncio.create_task(serve())
        assert isinstance(await _refused(listener), RejectedError)
        serving.cancel()
        await asyncio.wait([serving])


async def test_glued_to_the_reply() -> None:
    """FPDUs glued to the Reply are taken: messages, and a READ's request, in order."""
    glued = raw_peer.send(1, b"one") + raw_peer.send(2, b"t" * 300) + raw_peer.read_request(1, 0, 0, 0)
    async with against_raw(raw_peer.reply() + glued) as (conn, peer):
        assert [await conn.recv(), await conn.recv()] == [b"one", b"t" * 300]
        assert (await peer.fpdu()).opcode == raw_peer.READ_RESPONSE


async def test_glued_in_pieces() -> None:
    """A Reply cut anywhere, with the cut of the glued FPDU behind it anywhere too, is taken."""
    whole = raw_peer.reply(private_data=b"data") + raw_peer.send(1, b"glued")
    for cut in range(1, len(whole), 5):
        with RawListener() as listener:

            async def serve(listener: RawListener, cut: int) -> RawPeer:
                peer = await listener.accept()
                await peer.frame()
                await peer.send(whole[:cut])
                await asyncio.sleep(0)
                await peer.send(whole[cut:])
                return peer

            serving = asyncio.create_task(serve(listener, cut))
            async with asyncio.timeout(20), aiordma.connect("127.0.0.1", listener.port) as conn:
                assert conn.peer_private_data == b"data"
                assert await conn.recv() == b"glued"
                (await serving).close()


@pytest.mark.parametrize("leave", [RawPeer.close, RawPeer.reset])
async def test_reply_then_gone(leave: Callable[[RawPeer], None]) -> None:
    """A server that leaves right behind its Reply: the connection is there, and broken; nothing hangs."""
    async with against_raw() as (conn, peer):
        leave(peer)
        with pytest.raises(BrokenError) as caught:
            await conn.recv()
        assert caught.value.orderly == (leave is RawPeer.close)
        with pytest.raises((BrokenError, FlushedError)):
            await conn.read(REMOTE[:8])


async def test_data_and_reset_at_once() -> None:
    """The last data and a reset that come together: the data is received, then the end is noticed, on every loop."""
    async with against_raw() as (conn, peer):
        for _ in range(3):  # let the loop wait for the socket
            await asyncio.sleep(0.01)
        peer.sock.send(raw_peer.send(1, b"last"))
        peer.reset()
        assert await conn.recv() == b"last"
        with pytest.raises(BrokenError) as caught:
            await conn.recv()
        assert not caught.value.orderly


async def test_ends_between_two_segments() -> None:
    """A stream that ends behind a segment that isn't its message's last doesn't end in order."""
    for part in (raw_peer.send(1, b"half", last=False), raw_peer.tagged(raw_peer.WRITE, 0, 0, b"", last=False)):
        async with against_raw() as (conn, peer):
            await peer.send(part)
            peer.close()
            with pytest.raises(BrokenError) as caught:
                await conn.recv()
            assert caught.value.orderly == (b"half" not in part)


async def test_ends_in_the_middle_of_a_response() -> None:
    """A stream that ends within a READ's response: the READ ends as flushed, and the end isn't called orderly."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(1 << 20)
        reading = conn.read(REMOTE[: 1 << 20], into=local)
        await peer.fpdu()
        await peer.send(
            raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, bytes(30000), last=False)[:20000]
        )
        peer.close()
        with pytest.raises(FlushedError) as caught:
            await reading
        assert isinstance(caught.value.__cause__, BrokenError)
        assert not caught.value.__cause__.orderly
        assert "in the middle of a message" in str(caught.value.__cause__)
        with pytest.raises(BrokenError, match="in the middle of a message"):
            await conn.recv()


async def test_answers_what_nobody_asked() -> None:
    """A Read Response without a READ: a Terminate is the answer, and the connection breaks with the reason."""
    async with against_raw() as (conn, peer):
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, 1, 0, b"x"))
        ended = await peer.fpdu()
        assert (ended.opcode, ended.payload[:2]) == (raw_peer.TERMINATE, b"\x02\x06")
        with pytest.raises(BrokenError, match="unexpected opcode"):
            await conn.recv()


@pytest.mark.parametrize(
    ("stag", "shift", "size", "code"),
    [(1, 0, 64, 0), (0, 1, 64, 1), (0, -1, 64, 1), (0, 0, 65, 1), (0, 0, 63, 1)],
    ids=["key", "above", "below", "long", "short"],
)
async def test_response_that_does_not_fit(stag: int, shift: int, size: int, code: int) -> None:
    """A response with another key, address or length than was asked for places nothing outside of the sink."""
    async with against_raw() as (conn, peer):
        memory = conn.alloc(192)
        memory.view[:] = b"g" * 192
        sink = memory[64:128]
        reading = conn.read(REMOTE[:64], into=sink)
        await peer.fpdu()
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, sink.lkey ^ stag, sink.addr + shift, b"x" * size))
        ended = await peer.fpdu()
        assert (ended.opcode, ended.payload[:2]) == (raw_peer.TERMINATE, bytes([0x11, code]))
        with pytest.raises(FlushedError):
            await reading
        assert memory.view[:64] == b"g" * 64
        assert memory.view[128:] == b"g" * 64


async def test_terminates_a_read() -> None:
    """A Terminate with a reason fails the connection with that reason, whether or not it names a request."""
    async with against_raw() as (conn, peer):
        reading = conn.read(REMOTE[:8])
        await peer.fpdu()
        await peer.send(raw_peer.terminate(0, 2, 7))
        with pytest.raises((RemoteError, FlushedError)) as caught:
            await reading
        peer.close()
        with pytest.raises(BrokenError, match="catastrophic error on this stream"):
            await conn.recv()
        assert caught.value.qp_num == conn.qp.qp_num


async def test_version_of_a_send_in_pieces() -> None:
    """A faulty DDP version is refused in a long message whose first part comes alone, as in one that comes whole."""
    async with against_raw() as (conn, peer):
        bad = raw_peer.untagged(raw_peer.SEND, 0, 1, bytes(20_000), control=0x4243)
        await peer.send(bad[:1000])
        endpoint = conn.qp.driver.endpoint  # type: ignore[attr-defined]
        await until(lambda: bool(endpoint.placement or endpoint.refused))
        with contextlib.suppress(ConnectionError):
            await peer.send(bad[1000:])
        ended = await peer.fpdu()
        assert (ended.opcode, ended.payload[:2]) == (raw_peer.TERMINATE, b"\x12\x06")
        with pytest.raises(BrokenError, match="invalid DDP version"):
            await conn.recv()


def _altered(seed: int, conn: Connection, sink: aiordma.MemoryRegion) -> bytes:
    """A valid answer of a server's, with something wrong in it."""
    rng = random.Random(seed)
    stream = bytearray(
        raw_peer.tagged(raw_peer.READ_RESPONSE, sink.lkey, sink.addr, bytes(100), last=False)
        + raw_peer.send(1, b"between")
        + raw_peer.tagged(raw_peer.READ_RESPONSE, sink.lkey, sink.addr + 100, bytes(156))
        + raw_peer.read_request(1, 1, 0, 0)
    )
    for _ in range(rng.randrange(1, 5)):
        stream[rng.randrange(len(stream))] = rng.randrange(256)
    return bytes(stream[: rng.randrange(1, len(stream) + 1)])


async def test_altered_answers() -> None:
    """Whatever a server answers, every operation ends, in an exception of ours or a result; no byte outside changes."""
    for seed in range(60):
        async with against_raw() as (conn, peer):
            sink, guard = conn.alloc(256), conn.alloc(256)
            guard.view[:] = b"g" * 256
            futures = [conn.read(REMOTE[:256], into=sink), conn.barrier()]
            await peer.fpdu()
            await peer.send(_altered(seed, conn, sink))
            peer.sock.shutdown(1)
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert all(result is None or isinstance(result, RDMAError) for result in results)
            with contextlib.suppress(BrokenError):
                while True:
                    await conn.recv()
            assert guard.view[:] == b"g" * 256


@pytest.mark.parametrize("seed", range(8))
async def test_altered_replies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes for a Reply, connect gives a connection or a ConnectError."""
    monkeypatch.setattr(cm, "REPLY_TIMEOUT", 0.05)
    rng = random.Random(seed)
    for _ in range(12):
        answer = bytearray(raw_peer.reply(private_data=b"p" * 20) + raw_peer.send(1, b"first"))
        for _ in range(rng.randrange(1, 4)):
            answer[rng.randrange(len(answer))] = rng.randrange(256)
        with RawListener() as listener:
            peers: list[RawPeer] = []

            async def serve(listener: RawListener, answer: bytes, peers: list[RawPeer]) -> None:
                while True:
                    peers.append(await listener.accept())
                    await peers[-1].frame()
                    await peers[-1].send(answer)
                    peers[-1].sock.shutdown(1)

            serving = asyncio.create_task(serve(listener, bytes(answer), peers))
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectError):
                    conn = await aiordma.connect("127.0.0.1", listener.port)
                    with contextlib.suppress(BrokenError):
                        await conn.recv()
                    await conn.close()
            serving.cancel()
            await asyncio.wait([serving])
            for peer in peers:
                peer.close()
