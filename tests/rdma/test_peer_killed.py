"""A peer's process that is killed, in every state of a connection, and a server that comes back on its port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import Access, BrokenError, ConnectError, Connection, FlushedError, MemoryRegion, RemoteRegion
from tests.conformance.support import DEVICE, HOST, accept_one, until
from tests.faults.peers import BIG, Peer, peer

_ALL = Access.REMOTE_READ | Access.REMOTE_WRITE


async def _dial(port: int) -> Connection:
    return await aiordma.connect(HOST, port, device=DEVICE)


async def _closed(conn: Connection) -> None:
    async with asyncio.timeout(20):
        with contextlib.suppress(BrokenError):
            await conn.close()


@contextlib.asynccontextmanager
async def _served() -> AsyncIterator[tuple[Connection, RemoteRegion, Peer]]:
    """A connection to a process that offers much, and does nothing."""
    async with peer("serving") as process:
        conn = await _dial(int(await process.said()))
        try:
            yield conn, RemoteRegion.from_bytes(conn.peer_private_data), process
        finally:
            await _closed(conn)


@contextlib.asynccontextmanager
async def _accepted(role: str, length: int = 0) -> AsyncIterator[tuple[Connection, MemoryRegion | None, Peer]]:
    """A connection from a process of that role, which is offered a region of that length."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener, peer(role, listener.port) as process:
        region = listener.pd.alloc(length, access=_ALL) if length else None
        conn = await accept_one(listener, region.remote().to_bytes() if region else b"")
        try:
            assert await process.said() == "connected"
            yield conn, region, process
        finally:
            await _closed(conn)
            if region is not None:
                await region.close()


async def _broken(conn: Connection) -> None:
    """The connection ends, says so, and takes nothing any more."""
    async with asyncio.timeout(20):
        with pytest.raises(BrokenError):
            await conn.recv()
        with pytest.raises(BrokenError):
            conn.send(b"x")
        with pytest.raises(BrokenError):
            await conn.drain()


async def test_idle_client() -> None:
    """A client killed while idle: the server's pending recv ends."""
    async with _accepted("idle") as (conn, _, process):
        receiving = asyncio.create_task(_broken(conn))
        await asyncio.sleep(0)
        process.kill()
        await receiving


async def test_idle_server() -> None:
    """A server killed while idle: the client's pending recv ends."""
    async with _served() as (conn, _, process):
        receiving = asyncio.create_task(_broken(conn))
        await asyncio.sleep(0)
        process.kill()
        await receiving


async def test_server_within_reads() -> None:
    """A server killed while READs of 64 MiB are in flight: each ends as flushed, with a cause; buffers are free."""
    async with _served() as (conn, remote, process):
        local = conn.alloc(BIG)
        reads = [conn.read(remote, into=local) for _ in range(3)]
        await until(lambda: local.view[0] == ord("r"))
        process.kill()
        async with asyncio.timeout(20):
            errors = await asyncio.gather(*reads, return_exceptions=True)
            await local.idle()
        assert isinstance(errors[-1], FlushedError)
        assert errors[-1].__cause__ is conn.qp.failure
        await _broken(conn)


async def test_server_within_writes() -> None:
    """A server killed while WRITEs of 64 MiB are in flight: those that weren't done end as flushed."""
    async with _served() as (conn, remote, process):
        local = conn.alloc(BIG)
        writes = [conn.write(remote, local) for _ in range(8)]
        await asyncio.wait(writes, timeout=0.1)
        process.kill()
        async with asyncio.timeout(40):
            errors = await asyncio.gather(*writes, return_exceptions=True)
            await local.idle()
        assert isinstance(errors[-1], FlushedError)
        await _broken(conn)


@pytest.mark.parametrize("role", ["reading", "writing"])
async def test_client_within_an_operation_of_its_own(role: str) -> None:
    """A client killed while it reads 64 MiB from us, or writes them: the connection ends, and the region closes."""
    async with _accepted(role, BIG) as (conn, region, process):
        assert region is not None
        if role == "writing":
            await until(lambda: region.view[0] == ord("w"))
        process.kill()
        await _broken(conn)
        async with asyncio.timeout(20):
            await region.close()


async def test_client_that_sends() -> None:
    """A client killed in the midst of messages: what came is received, whole and in order, then the end."""
    async with _accepted("sending") as (conn, _, process):
        received = 0
        async with asyncio.timeout(40):
            with contextlib.suppress(BrokenError):
                while True:
                    message = await conn.recv()
                    assert int.from_bytes(message[:4], "big") == received
                    assert len(message) == 2004
                    received += 1
                    if received == 20:
                        process.kill()
        assert received >= 20


async def test_server_that_does_not_accept() -> None:
    """A server killed before it accepted: connect fails, and says so; nothing hangs."""
    async with peer("unaccepting") as process:
        connecting = asyncio.create_task(_dial(int(await process.said())))
        assert await process.said() == "requested"
        process.kill()
        async with asyncio.timeout(20):
            with pytest.raises(ConnectError) as caught:
                await connecting
        assert HOST in str(caught.value)


async def test_client_that_waits_to_be_accepted() -> None:
    """A client killed before it was accepted: accept fails, or its connection ends; the listener goes on."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener, asyncio.timeout(40):
        async with peer("idle", listener.port) as process:
            request = await listener.get_request()
            process.kill()
            with contextlib.suppress(ConnectError):
                conn = await request.accept()
                with pytest.raises(BrokenError):
                    await conn.recv()
                await _closed(conn)
        connecting = asyncio.create_task(_dial(listener.port))
        server = await accept_one(listener)
        client = await connecting
        await client.send(b"still here")
        assert await server.recv() == b"still here"
        await client.close()
        await server.close()


async def test_server_restarted_on_its_port() -> None:
    """A server killed, and started again on the same port: the old connection ends, a new one works at once."""
    async with peer("serving-again") as process:
        port = int(await process.said())
        old = await _dial(port)
        await old.send(b"first")
        assert await old.recv() == b"first"
        process.kill()
        await _broken(old)
        with pytest.raises(ConnectError, match="is the server running"):
            await _dial(port)
    async with peer("serving-again", port) as process, asyncio.timeout(40):
        assert int(await process.said()) == port
        async with await _dial(port) as new:
            await new.send(b"second")
            assert await new.recv() == b"second"
    await _closed(old)


async def test_both_close_at_once() -> None:
    """Both ends closed in one turn, with messages under way both ways: both closes return, without an error."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener, asyncio.timeout(40):
        for _ in range(10):
            connecting = asyncio.create_task(_dial(listener.port))
            server = await accept_one(listener)
            client = await connecting
            client.send(b"to the server")
            server.send(b"to the client")
            await asyncio.gather(client.close(), server.close())
            assert client.qp.closed
            assert server.qp.closed
