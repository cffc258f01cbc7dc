"""The soft device at one end, the kernel's siw at the other, both ours, in one process: who connects, who asks, what.

Everything that iWARP has without RFC 7306's atomics and immediates. Connections are made one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

import attrs
import pytest
import uvloop

import aiordma
from aiordma import Connection, ConnParam, UnsupportedError
from tests.conformance.support import ALL, GUARD, HOST
from tests.interop.support import needs_rdma

pytestmark = needs_rdma

SIZES: Final = [1, 3, 4096, 65_537, 1 << 20]
LARGE: Final = 64 << 20
PERIOD: Final = 65_537
GUARDS: Final = bytes((GUARD,)) * 32

#: Which device connects; the other one accepts.
both_clients = pytest.mark.parametrize("client", ["soft", "siw"])


@attrs.frozen
class Ends:
    """A connection's two ends, on two devices."""

    #: Connected, and spoke first.
    client: Connection
    server: Connection

    def both_ways(self) -> Iterable[tuple[Connection, Connection]]:
        """Give which end asks, and which is asked: one way and the other."""
        return (self.client, self.server), (self.server, self.client)


def siw() -> str:
    """Give the name of the kernel's device that has the address."""
    return next(info.name for info in aiordma.devices() if info.driver == "verbs" and HOST in info.addresses)


@contextlib.asynccontextmanager
async def connected(
    client: str, *, recv_size: int = 4096, recv_depth: int = 4, back: bool = True
) -> AsyncIterator[Ends]:
    """Connect from the soft device or from siw to the other one; a first message came from the client, as it must.

    Args:
        client: the device that connects.
        recv_size: of both ends.
        recv_depth: of both ends.
        back: messages go from the server to the client, too.
    """
    devices = ("soft", siw())
    near, far = devices if client == "soft" else reversed(devices)
    param = ConnParam(recv_size=recv_size, recv_depth=recv_depth, max_sge=6)
    async with aiordma.listen(HOST, 0, device=far, param=param) as listener:
        client_param = param if back else attrs.evolve(param, recv_size=0)
        connecting = asyncio.create_task(_connect(listener.port, near, client_param))
        server = await (await listener.get_request()).accept()
        async with await connecting as connection, server:
            assert (connection.device, server.device) == (near, far)
            await connection.send(b"first")
            assert await server.recv() == b"first"
            yield Ends(connection, server)


async def _connect(port: int, device: str, param: ConnParam) -> Connection:
    return await aiordma.connect(HOST, port, device=device, param=param)


def data(size: int, seed: int) -> bytes:
    """Give bytes in which a shift, a swap or a repeat shows: the period is prime to every buffer's size."""
    return (random.Random(seed).randbytes(PERIOD) * (size // PERIOD + 1))[:size]


class Guarded:
    """Memory between guard bytes, in one region."""

    def __init__(self, end: Connection, size: int, seed: int | None = None) -> None:
        self.region = end.alloc(size + 64, access=ALL)
        self.region.view[:32] = self.region.view[-32:] = GUARDS
        self.part = self.region[32 : 32 + size]
        self.remote = self.region.remote()[32 : 32 + size]
        if seed is not None:
            self.put(seed)

    def put(self, seed: int) -> int:
        """Fill it with other data; gives their CRC."""
        view, crc = self.part.view, 0
        block = data(PERIOD, seed)
        # In pieces: a second piece of memory that large takes longer than to transfer it.
        for at in range(0, len(view), PERIOD):
            piece = block[: len(view) - at]
            view[at : at + len(piece)] = piece
            crc = zlib.crc32(piece, crc)
        return crc

    def crc(self) -> int:
        """Give its CRC; and nothing came beside it."""
        assert self.region.view[:32] == GUARDS == self.region.view[-32:]
        return zlib.crc32(self.part.view)


async def check(near: Connection, far: Connection, size: int) -> None:
    """WRITE, READ and SEND from one region to another; see what is there then."""
    here, there = Guarded(near, size), Guarded(far, size)
    crc = here.put(3)
    await near.write(there.remote, here.part)
    await near.barrier()
    assert there.crc() == here.crc() == crc
    crc = there.put(4)
    await near.read(there.remote, into=here.part)
    assert here.crc() == there.crc() == crc
    crc = here.put(5)
    await near.send(here.part)
    with await far.recv_message() as message:
        assert len(message.data) == size
        assert zlib.crc32(message.data) == crc
    await here.region.close()
    await there.region.close()


@both_clients
async def test_sizes(client: str) -> None:
    """Bytes of every size arrive with their checksum, whichever device connected, whichever asks."""
    async with connected(client, recv_size=max(SIZES)) as ends:
        for size in SIZES:
            await check(ends.client, ends.server, size)
            await check(ends.server, ends.client, size)


@both_clients
def test_large(client: str) -> None:
    """64 MiB arrive with their checksum, asked for by either device."""

    # On one loop only: it takes as long as all others do.
    async def run() -> None:
        async with connected(client, recv_size=LARGE, recv_depth=1, back=False) as ends:
            await check(ends.client, ends.server, LARGE)

    uvloop.run(run())


@both_clients
async def test_both_directions_at_once(client: str) -> None:
    """Each end writes, reads and sends at the same time as the other one."""
    size = 65_537

    async def converse(near: Connection, far: Connection, seed: int) -> None:
        here, written, read = (Guarded(end, size, seed + place) for place, end in enumerate((near, far, far)))
        sink = near.alloc(size)
        near.write(written.remote, here.part)
        # No barrier: siw answers a READ of nothing wrongly if it is sending.
        await asyncio.gather(near.read(read.remote, into=sink), near.send(here.part))
        assert sink.view == data(size, seed + 2)
        assert await far.recv() == data(size, seed)
        assert written.crc() == here.crc()

    async with connected(client, recv_size=size) as ends:
        await asyncio.gather(converse(ends.client, ends.server, 10), converse(ends.server, ends.client, 20))


@both_clients
async def test_pieces(client: str) -> None:
    """A READ fills several pieces, a WRITE and a message are made of several, of whatever lengths and alignments."""
    size = 100_000
    async with connected(client, recv_size=size) as ends:
        for near, far in ends.both_ways():
            there = Guarded(far, size, 1)
            local = near.alloc(size)
            pieces = [local[70_001:70_002], local[3:60_003], local[90_000:90_007], local[60_010:70_000]]
            total = sum(piece.length for piece in pieces)
            await near.read(there.remote[5:], into=pieces)
            assert joined(pieces) == data(size, 1)[5 : 5 + total]
            local.view[:] = data(size, 2)
            await near.write(there.remote[9:], pieces)
            await near.barrier()
            assert there.part.view == data(size, 1)[:9] + joined(pieces) + data(size, 1)[9 + total :]
            await near.send(pieces)
            assert await far.recv() == joined(pieces)


def joined(pieces: list[aiordma.MemorySlice]) -> bytes:
    """Give what is in the pieces."""
    return b"".join(piece.view.tobytes() for piece in pieces)


@both_clients
async def test_nothing(client: str) -> None:
    """READs, WRITEs and messages of nothing do nothing, and the connection goes on."""
    async with connected(client) as ends:
        for near, far in ends.both_ways():
            there = Guarded(far, 0)
            assert await near.read(there.remote) == b""
            await near.write(there.remote, b"")
            await near.barrier()
            await near.send(b"")
            assert await far.recv() == b""
            there.crc()


@both_clients
async def test_invalidate(client: str) -> None:
    """SEND with invalidate ends the key it names, if the asking device can; else it is refused, and nothing sent."""
    async with connected(client) as ends:
        soft, kernel = sorted((ends.client, ends.server), key=lambda end: end.device != "soft")
        there = Guarded(soft, 64, 1)
        with pytest.raises(UnsupportedError, match="send_with_invalidate"):
            kernel.send(b"done", invalidate=there.remote.rkey)
        assert await kernel.read(there.remote) == data(64, 1)
        there = Guarded(kernel, 64, 2)
        assert await soft.read(there.remote) == data(64, 2)
        await soft.send(b"done", invalidate=there.remote.rkey)
        assert await kernel.recv() == b"done"
        with pytest.raises(aiordma.RemoteError):
            await soft.read(there.remote)


@both_clients
async def test_solicited(client: str) -> None:
    """A message that asks for an event is a message, both ways; the messages around it keep their order."""
    async with connected(client, recv_depth=16) as ends:
        for near, far in ends.both_ways():
            await asyncio.gather(*(near.send(b"%d" % number, solicited=number % 2 == 0) for number in range(10)))
            assert [await far.recv() for _ in range(10)] == [b"%d" % number for number in range(10)]


@both_clients
async def test_requests_in_flight(client: str) -> None:
    """A hundred and fifty requests posted at once each do what they say, in order."""
    async with connected(client, recv_depth=64) as ends:
        for near, far in ends.both_ways():
            target = Guarded(far, 50 * 1000)
            blocks = [data(1000, number) for number in range(50)]
            reads = []
            for number, block in enumerate(blocks):
                there = target.remote[1000 * number : 1000 * number + 1000]
                near.write(there, block)
                reads.append(near.read(there))
                near.send(block)
            assert await asyncio.gather(*reads) == blocks
            assert [await far.recv() for _ in blocks] == blocks
            assert target.crc() == zlib.crc32(b"".join(blocks))


@both_clients
@pytest.mark.parametrize("first", ["client", "server"])
async def test_orderly_end(client: str, first: str) -> None:
    """The end that is left gets everything that was sent, then the end of the messages: an orderly one."""
    async with connected(client, recv_depth=16) as ends:
        near, far = (ends.client, ends.server) if first == "client" else (ends.server, ends.client)
        for number in range(10):
            near.send(b"%d" % number)
        await near.close()
        assert [message async for message in far] == [b"%d" % number for number in range(10)]
