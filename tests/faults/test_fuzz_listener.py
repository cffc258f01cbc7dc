"""A live listener under arbitrary bytes, cut and altered streams, lengths that lie and peers that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import struct
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import pytest

import aiordma
from aiordma import Access, BrokenError, Connection, FlushedError, RemoteRegion, Server
from aiordma.drivers.soft import cm
from tests.faults import raw_peer
from tests.faults.raw_peer import RawPeer
from tests.faults.support import until

_ALL = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


async def _echo(conn: Connection) -> None:
    with contextlib.suppress(BrokenError, FlushedError):
        async for message in conn:
            await conn.send(message)


@contextlib.asynccontextmanager
async def _served() -> AsyncIterator[tuple[Server, RemoteRegion]]:
    """A server that echoes messages and offers a region."""
    async with aiordma.serve(_echo, "127.0.0.1") as server, server.pd.alloc(4096, access=_ALL) as region:
        yield server, region.remote()


async def _use(conn: Connection, remote: RemoteRegion, number: int) -> None:
    """What a well-behaved client does: each kind of operation, with checked results."""
    data = number.to_bytes(8, "big")
    conn.write(remote[:8], data)
    assert await conn.read(remote[:8]) == data
    await conn.send(data)
    assert await conn.recv() == data


async def _left_alone(server: Server, connections: int) -> None:
    """Wait until the server has no more connections than these."""
    await until(lambda: len(server.connections) <= connections)


def _session(remote: RemoteRegion) -> list[bytes]:
    """The parts of a stream that is valid from its first byte to its last."""
    addr, key = remote.addr + 2048, remote.rkey
    atomic = struct.pack(">IIIQQQQQ", 0, 1, key, addr, 1, 0, 0, (1 << 64) - 1)
    return [
        raw_peer.request(),
        raw_peer.tagged(raw_peer.WRITE, 1, 0),
        raw_peer.tagged(raw_peer.WRITE, key, addr, b"w" * 100, last=False),
        raw_peer.tagged(raw_peer.WRITE, key, addr + 100, b"w" * 27),
        raw_peer.send(1, b"s" * 64),
        raw_peer.read_request(1, key, addr, 512),
        raw_peer.send(2, b"t" * 100, last=False),
        raw_peer.send(2, b"t" * 33, offset=100),
        raw_peer.untagged(10, 1, 2, atomic),
        raw_peer.untagged(8, 0, 3, bytes(8)),
        raw_peer.read_request(3, key, addr, 0),
        raw_peer.send(4),
        raw_peer.terminate(0, 0, 0),
    ]


def _hostile(seed: int, remote: RemoteRegion, count: int) -> Iterator[bytes]:
    """Streams of every bad kind, the same ones for the same seed."""
    rng = random.Random(seed)
    whole = b"".join(_session(remote))
    start = len(raw_peer.request())
    for _ in range(count):
        parts = _session(remote)
        kind = rng.randrange(7)
        if kind == 0:
            yield rng.randbytes(rng.randrange(1, 3000))
        elif kind == 1:  # a good handshake, then anything
            yield parts[0] + rng.randbytes(rng.randrange(1, 3000))
        elif kind == 2:
            yield whole[: rng.randrange(len(whole))]
        elif kind == 3:
            altered = bytearray(whole)
            for _ in range(rng.randrange(1, 6)):
                altered[rng.randrange(start, len(altered))] ^= 1 << rng.randrange(8)
            yield bytes(altered)
        elif kind == 4:  # lengths driven to what they can be
            altered = bytearray(whole)
            part = rng.randrange(1, len(parts))
            at = len(b"".join(parts[:part]))
            altered[at : at + 2] = struct.pack(">H", rng.choice([0, 1, 13, 14, 17, 18, 19, 45, 47, 0x7FFF, 0xFFFF]))
            yield bytes(altered)
        elif kind == 5:
            body = parts[1:]
            rng.shuffle(body)
            yield parts[0] + b"".join(body)
        else:
            parts.insert(rng.randrange(len(parts)), rng.choice(parts))
            yield b"".join(parts)


async def _throw(port: int, stream: bytes, rng: random.Random) -> None:
    """Send a stream in pieces, then leave in one of the ways there are."""
    peer = await RawPeer.connect(port)
    with peer:
        with contextlib.suppress(OSError):  # the server may be gone at any of these
            cut = rng.randrange(len(stream) + 1)
            await peer.send(stream[:cut])
            await asyncio.sleep(0)
            await peer.send(stream[cut:])
            if rng.random() < 0.3:
                peer.sock.shutdown(1)
                await peer.ended()
        if rng.random() < 0.3:
            peer.reset()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_hostile_streams_while_another_is_served(seed: int) -> None:
    """A client is served, every result right, while hostile connections come and go; none of them stays."""
    async with _served() as (server, remote), aiordma.connect("127.0.0.1", server.port) as conn:
        rng = random.Random(seed)

        async def throw(streams: Iterator[bytes]) -> None:
            for stream in streams:
                async with asyncio.timeout(20):
                    await _throw(server.port, stream, rng)

        streams = _hostile(seed, remote, 120)
        throwers = [asyncio.create_task(throw(streams)) for _ in range(4)]
        number = 0
        while not all(task.done() for task in throwers):
            number += 1
            await _use(conn, remote, number)
            await asyncio.sleep(0)
        await asyncio.gather(*throwers)
        for number in range(20):
            await _use(conn, remote, number)
        await _left_alone(server, 1)


async def test_valid_session() -> None:
    """The stream that the fuzz alters is valid: unaltered, all of it is executed."""
    async with _served() as (server, remote):
        parts = _session(remote)
        with await RawPeer.connect(server.port) as peer:
            await peer.send(parts[0])
            await peer.frame()
            await peer.send(b"".join(parts[1:-1]))
            async with asyncio.timeout(20):
                # The responses come in order among themselves, and so do the messages sent back.
                got = [await peer.fpdu() for _ in range(7)]
            responses = [part for part in got if part.opcode != raw_peer.SEND]
            assert [(part.opcode, part.last) for part in responses] == [(2, True), (11, True), (2, True)]
            assert responses[0].payload[:128] == b"w" * 127 + b"\0"
            sends = [part.payload for part in got if part.opcode == raw_peer.SEND]
            assert sends == [b"s" * 64, b"t" * 133, b"", b""]
        await _left_alone(server, 0)


async def test_truncated_handshakes() -> None:
    """A connection that ends at any byte of its Request is forgotten, and the next one is served."""
    async with _served() as (server, remote):
        whole = raw_peer.request(private_data=b"p" * 20)
        for size in range(len(whole)):
            with await RawPeer.connect(server.port) as peer:
                await peer.send(whole[:size])
        async with aiordma.connect("127.0.0.1", server.port) as conn:
            await _use(conn, remote, 1)
            assert len(server.connections) == 1


async def test_byte_by_byte() -> None:
    """A handshake and an FPDU that come one byte at a time are the same as at once."""
    async with _served() as (server, _), asyncio.timeout(20):
        with await RawPeer.connect(server.port) as peer:
            for byte in raw_peer.request():
                await peer.send(bytes([byte]))
                await asyncio.sleep(0)
            await peer.frame()
            for byte in raw_peer.send(1, b"slow"):
                await peer.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await peer.fpdu()).payload == b"slow"


async def test_glued_to_the_request() -> None:
    """FPDUs glued to the Request are executed once the connection is accepted."""
    async with _served() as (server, _), asyncio.timeout(20):
        with await RawPeer.connect(server.port) as peer:
            await peer.send(raw_peer.request() + raw_peer.send(1, b"glued") + raw_peer.send(2, b"x" * 2000))
            await peer.frame()
            assert (await peer.fpdu()).payload == b"glued"
            assert b"".join([(await peer.fpdu()).payload for _ in range(1)])[:1] == b"x"


async def test_silent_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects and says nothing is closed after the time-out, and holds up nobody meanwhile."""
    async with _served() as (server, remote):
        silent = [await RawPeer.connect(server.port) for _ in range(20)]
        await silent[0].send(raw_peer.request()[:10])
        async with aiordma.connect("127.0.0.1", server.port) as conn:
            await _use(conn, remote, 1)
        monkeypatch.setattr(cm, "REQUEST_TIMEOUT", 0.05)
        late = await RawPeer.connect(server.port)
        async with asyncio.timeout(20):
            assert await late.ended()
        late.close()
        for peer in silent:
            peer.close()


async def test_silent_clients_fill_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the backlog full of silent clients the next one waits for a time-out, and is served then."""
    monkeypatch.setattr(cm, "REQUEST_TIMEOUT", 0.1)
    async with aiordma.serve(_echo, "127.0.0.1", backlog=2) as server:
        silent = [await RawPeer.connect(server.port) for _ in range(3)]
        async with asyncio.timeout(20):
            async with aiordma.connect("127.0.0.1", server.port) as conn:
                await conn.send(b"in")
                assert await conn.recv() == b"in"
        for peer in silent:
            peer.close()


async def test_silent_after_the_handshake() -> None:
    """A peer that says nothing after its handshake is served no FPDU, and leaves nothing behind when it goes."""
    async with aiordma.listen("127.0.0.1") as listener:
        with await RawPeer.connect(listener.port) as peer:
            await peer.send(raw_peer.request())
            conn = await (await listener.get_request()).accept()
            future = conn.send(b"held back")
            await peer.frame()
            for _ in range(20):
                await asyncio.sleep(0)
            with pytest.raises(BlockingIOError):
                peer.sock.recv(1)
            assert not future.done()
            peer.close()
        async with asyncio.timeout(20):
            with pytest.raises(BrokenError):
                await conn.recv()
        await conn.close()


def _lying(remote: RemoteRegion) -> list[tuple[bool, bytes]]:
    """Starts of messages that announce much more than comes: with a handshake before them, or not."""
    addr, key = remote.addr, remote.rkey
    return [
        (False, b"MPA ID Req Frame" + struct.pack(">BBH", 0x10, 2, 0xFFFF)),
        (False, b"MPA ID Req Frame" + struct.pack(">BBH", 0x10, 2, 512)),
        (True, raw_peer.tagged(raw_peer.WRITE, key, addr, bytes(65521))[:40]),
        (True, raw_peer.tagged(raw_peer.WRITE, key, (1 << 64) - 8, bytes(16))),
        (True, raw_peer.send(1, bytes(65517))[:40]),
        (True, raw_peer.send(1, b"x", offset=0xFFFF_FFFE)),
        (True, raw_peer.send(0xFFFF_FFFF, b"x")),
        (True, raw_peer.read_request(1, key, addr, 0xFFFF_FFFF)),
        (True, raw_peer.read_request(1, 0, 0, 0xFFFF_FFFF)),
        (True, raw_peer.tagged(raw_peer.READ_RESPONSE, key, addr, bytes(60000))[:100]),
    ]


async def _cost(server: Server, shake: bool, stream: bytes) -> int:
    """Give the memory that twenty connections take at most, each of which sends this."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    peers = []
    for _ in range(20):
        peer = await RawPeer.connect(server.port)
        peers.append(peer)
        if shake:
            await peer.send(raw_peer.request())
            await peer.frame()
        await peer.send(stream)
    async with aiordma.connect("127.0.0.1", server.port) as conn:  # served behind them: what they sent was read
        await conn.send(b"")
        await conn.recv()
    cost = tracemalloc.get_traced_memory()[1] - before
    for peer in peers:
        peer.close()
    await _left_alone(server, 0)
    return cost


async def test_lengths_allocate_nothing() -> None:
    """What a header announces costs no memory before it came: no more than a fault of one byte."""
    async with _served() as (server, remote):
        tracemalloc.start()
        try:
            fault = raw_peer.tagged(raw_peer.WRITE, 1, 0, b"x")
            await _cost(server, True, fault)  # what is made once is made
            ordinary = await _cost(server, True, fault)
            for shake, lie in _lying(remote):
                # 65,535 bytes for each of the twenty would be 1,310,700.
                assert await _cost(server, shake, lie) < ordinary + 700_000, lie[:60]
        finally:
            tracemalloc.stop()


async def test_flood_without_a_receiver() -> None:
    """A peer that sends and sends, to a program that doesn't receive, is stopped at the bound."""
    async with aiordma.listen("127.0.0.1") as listener:
        with await RawPeer.connect(listener.port) as peer:
            await peer.send(raw_peer.request())
            conn = await (await listener.get_request()).accept()
            await peer.frame()
            sent, msn, limit, part = 0, 0, 64 << 20, b""
            tracemalloc.start()
            try:
                async with asyncio.timeout(30):
                    while conn.qp.driver.link._reading and sent < limit:  # type: ignore[attr-defined]
                        if not part:
                            msn += 1
                            part = raw_peer.send(msn, bytes(1400))
                            sent += len(part)
                        part = peer.offer(part)
                        await asyncio.sleep(0)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert sent < limit
            # The bound itself, what the pieces round up to, and one reading of the socket.
            assert peak < (4 << 20)
            for _ in range(msn // 2):
                assert len(await conn.recv()) == 1400
        await conn.close()


async def test_flood_of_read_requests() -> None:
    """More READs than were agreed on, by a peer that doesn't take the responses, end in a Terminate."""
    async with aiordma.listen("127.0.0.1") as listener:
        region = listener.pd.alloc(1 << 20, access=_ALL)
        with await RawPeer.connect(listener.port, rcvbuf=4096) as peer:
            await peer.send(raw_peer.request())
            conn = await (await listener.get_request()).accept()
            await peer.frame()
            for msn in range(1, 200):
                await peer.send(raw_peer.read_request(msn, region.rkey, region.addr, 1 << 20))
            async with asyncio.timeout(20):
                with pytest.raises(BrokenError, match="no receive posted"):
                    await conn.recv()
        await conn.close()
        await region.close()
