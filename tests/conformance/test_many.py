"""Many connections, several loops."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

import pytest

import aiordma
from aiordma import Access, Connection, ConnParam
from tests.conformance.support import DEVICE, HOST, MANY, capabilities, pattern, until

SMALL = ConnParam(recv_size=64, recv_depth=2, max_send_wr=4)


async def echo(conn: Connection) -> None:
    """Send back every message."""
    async for message in conn:
        await conn.send(message)


async def _connect(port: int) -> Connection:
    return await aiordma.connect(HOST, port, device=DEVICE, param=SMALL)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files to what a thousand connections' two ends take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the limit of open files can't be raised to {wanted}: {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_two_hundred_at_once() -> None:
    """200 clients that connect in one moment are all served."""

    async def client(number: int) -> bytes:
        async with await _connect(server.port) as conn:
            await conn.send(b"%d" % number)
            return await conn.recv()

    async with aiordma.serve(echo, HOST, 0, device=DEVICE, param=SMALL) as server:
        count = min(200, MANY)
        assert await asyncio.gather(*[client(number) for number in range(count)]) == [b"%d" % n for n in range(count)]


async def test_a_thousand(many_files: None) -> None:
    """1,000 connections to one server are open at once (in a guest fewer); each reads its own bytes, and counts."""
    async with (
        aiordma.serve(echo, HOST, 0, device=DEVICE, param=SMALL, backlog=256) as server,
        server.pd.alloc(8 + 8 * MANY, access=Access.REMOTE_READ | Access.REMOTE_ATOMIC) as region,
    ):
        region.view[8:] = pattern(8 * MANY)
        remote = region.remote()
        clients: list[Connection] = []
        while len(clients) < MANY:
            clients += await asyncio.gather(*[_connect(server.port) for _ in range(min(100, MANY - len(clients)))])
        await until(lambda: len(server.connections) == MANY, 60.0)
        slots = [slice(8 + 8 * index, 16 + 8 * index) for index in range(MANY)]
        data = await asyncio.gather(*[conn.read(remote[slot]) for conn, slot in zip(clients, slots, strict=True)])
        assert b"".join(data) == pattern(8 * MANY)
        if capabilities().atomics:
            tickets = await asyncio.gather(*[conn.fetch_add(remote[:8], 1) for conn in clients])
            assert sorted(tickets) == list(range(MANY))
        for number, conn in enumerate(clients):
            conn.send(b"%d" % number)
        assert [await conn.recv() for conn in clients] == [b"%d" % number for number in range(MANY)]
        await asyncio.gather(*[conn.close() for conn in clients])


async def test_many_one_after_the_other() -> None:
    """Connecting and closing again and again leaves nothing behind."""
    async with aiordma.serve(echo, HOST, 0, device=DEVICE, param=SMALL) as server:
        for number in range(min(300, MANY)):
            async with await _connect(server.port) as conn:
                await conn.send(b"%d" % number)
                assert await conn.recv() == b"%d" % number


async def test_a_loop_in_another_thread() -> None:
    """Loops of one process are independent: each opens the device for itself, and they talk to each other."""

    async def client(port: int) -> tuple[bytes, bytes]:
        async with aiordma.connect(HOST, port, device=DEVICE) as conn:
            await conn.send(b"from another thread")
            return await conn.recv(), await conn.read(aiordma.RemoteRegion.from_bytes(conn.peer_private_data))

    region: aiordma.MemoryRegion
    async with aiordma.serve(echo, HOST, 0, device=DEVICE, private_data=lambda _: region.remote().to_bytes()) as server:
        async with server.pd.register(bytearray(pattern(100_000)), access=Access.REMOTE_READ) as region:
            outcomes = await asyncio.gather(*[asyncio.to_thread(asyncio.run, client(server.port)) for _ in range(3)])
        assert outcomes == [(b"from another thread", pattern(100_000))] * 3


def test_one_loop_after_the_other() -> None:
    """A loop's end leaves nothing that the next one trips over."""

    async def main() -> None:
        async with aiordma.serve(echo, HOST, 0, device=DEVICE) as server, await _connect(server.port) as conn:
            await conn.send(b"x")
            assert await conn.recv() == b"x"

    for _ in range(3):
        asyncio.run(main())
