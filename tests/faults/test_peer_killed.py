"""A peer that is killed, in every state a connection can be in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import (
    Access,
    BrokenError,
    ConnectError,
    Connection,
    FlushedError,
    Listener,
    MemoryRegion,
    RejectedError,
    RemoteRegion,
)
from aiordma.testing import connected_pair
from tests.conftest import LoopErrors
from tests.faults.peers import BIG, Peer, peer
from tests.faults.support import both, closed, dial, until

_ALL = Access.REMOTE_READ | Access.REMOTE_WRITE


@contextlib.asynccontextmanager
async def _accepted(role: str, length: int = 0) -> AsyncIterator[tuple[Connection, MemoryRegion | None, Peer]]:
    """A connection from a process of that role, which is offered a region of that length."""
    async with aiordma.listen("127.0.0.1") as listener, peer(role, listener.port) as process:
        region = listener.pd.alloc(length, access=_ALL) if length else None
        request = await listener.get_request()
        conn = await request.accept(private_data=region.remote().to_bytes() if region else b"")
        try:
            assert await process.said() == "connected"
            yield conn, region, process
        finally:
            async with asyncio.timeout(20):
                await closed(conn)
            if region is not None:
                await region.close()


@contextlib.asynccontextmanager
async def _served() -> AsyncIterator[tuple[Connection, RemoteRegion, Peer]]:
    """A connection to a process that offers a region, and does nothing."""
    async with peer("serving") as process:
        conn = await aiordma.connect("127.0.0.1", int(await process.said()))
        try:
            yield conn, RemoteRegion.from_bytes(conn.peer_private_data), process
        finally:
            async with asyncio.timeout(20):
                await closed(conn)


async def _broken(conn: Connection) -> BrokenError:
    async with asyncio.timeout(20):
        try:
            while True:
                await conn.recv()
        except BrokenError as error:
            return error


async def _still_serves(listener: Listener) -> None:
    """The listener takes another connection."""
    async with asyncio.timeout(20):
        client, server = await both(listener)
        await client.send(b"still here")
        assert await server.recv() == b"still here"
        await client.close()
        await server.close()


async def test_before_accept() -> None:
    """A client killed before it was accepted: accept, or the connection it gives, says so; the listener goes on."""
    async with aiordma.listen("127.0.0.1") as listener, peer("requesting", listener.port) as process:
        assert await process.said() == "sent"
        request = await listener.get_request()
        assert request.private_data == b"waiting"
        process.kill()
        with contextlib.suppress(ConnectError):
            conn = await request.accept()
            await _broken(conn)
            await conn.close()
        await _still_serves(listener)


async def test_before_reject() -> None:
    """A client killed before it was rejected needs no answer."""
    async with aiordma.listen("127.0.0.1") as listener, peer("requesting", listener.port) as process:
        request = await listener.get_request()
        process.kill()
        await request.reject(b"too late")
        await _still_serves(listener)


async def test_server_killed_before_its_reply() -> None:
    """A server killed before it accepted: connect fails at once, and says what happened."""
    async with peer("unaccepting") as process:
        connecting = asyncio.create_task(dial(int(await process.said())))
        assert await process.said() == "requested"
        process.kill()
        async with asyncio.timeout(20):
            with pytest.raises(RejectedError):
                await connecting


async def test_after_accept_and_idle() -> None:
    """A client killed while nothing is under way: a pending recv ends, and whatever is posted next."""
    async with _accepted("idle") as (conn, _, process):
        receiving = asyncio.create_task(conn.recv())
        await asyncio.sleep(0)
        process.kill()
        async with asyncio.timeout(20):
            with pytest.raises(BrokenError):
                await receiving
        with pytest.raises(BrokenError):
            conn.send(b"x")
        with pytest.raises(BrokenError):
            await conn.drain()


async def test_server_killed_while_idle() -> None:
    """A server killed while nothing is under way: the client's pending recv ends."""
    async with _served() as (conn, remote, process):
        process.kill()
        await _broken(conn)
        with pytest.raises(BrokenError):
            conn.read(remote[:8])


async def test_server_killed_mid_read() -> None:
    """A server killed within a READ of 64 MiB: the READ ends, with the break as its cause, and its buffer is free."""
    async with _served() as (conn, remote, process):
        local = conn.alloc(BIG)
        reading = conn.read(remote, into=local)
        await until(lambda: local.view[0] == ord("r"))
        process.kill()
        async with asyncio.timeout(20):
            with pytest.raises(FlushedError) as caught:
                await reading
            assert isinstance(caught.value.__cause__, BrokenError)
            await local.idle()
        assert local.view[BIG - 1] == 0
        await _broken(conn)


async def test_client_killed_mid_read() -> None:
    """A client killed within a READ of 64 MiB from us: the connection ends, and the region can be closed."""
    async with _accepted("reading", BIG) as (conn, region, process):
        await until(lambda: conn.qp.driver.link._writing)  # type: ignore[attr-defined]
        process.kill()
        await _broken(conn)
        assert region is not None
        async with asyncio.timeout(20):
            await region.close()


async def test_client_killed_mid_write() -> None:
    """A client killed within a WRITE of 64 MiB to us: the connection ends; what came is there, what didn't isn't."""
    async with _accepted("writing", BIG) as (conn, region, process):
        assert region is not None
        await until(lambda: region.view[0] == ord("w"))
        process.kill()
        error = await _broken(conn)
        assert not error.orderly
        assert region.view[BIG - 1] == 0


async def test_server_killed_mid_write() -> None:
    """A server killed within our WRITE of 64 MiB: the WRITE ends as flushed, and its buffer is free."""
    async with _served() as (conn, remote, process):
        process.stop()
        local = conn.alloc(BIG)
        writing = conn.write(remote, local)
        await until(lambda: conn.qp.driver.link._writing)  # type: ignore[attr-defined]
        process.kill()
        async with asyncio.timeout(20):
            with pytest.raises(FlushedError):
                await writing
            await local.idle()


async def test_killed_while_we_are_paused() -> None:
    """A peer killed while its messages wait for a receive: all that came is received, in order, then the end."""
    async with _accepted("sending") as (conn, _, process):
        await until(lambda: not conn.qp.driver.link._reading)  # type: ignore[attr-defined]
        process.kill()
        received = 0
        async with asyncio.timeout(20):
            with contextlib.suppress(BrokenError):
                while True:
                    message = await conn.recv()
                    assert int.from_bytes(message[:4], "big") == received
                    assert len(message) == 2004
                    received += 1
        assert received > 450


async def test_noticed_while_paused_without_a_receive() -> None:
    """A peer killed while too many of its messages wait: what is sent to it fails, though nothing is received."""
    async with _accepted("sending") as (conn, _, process):
        await until(lambda: not conn.qp.driver.link._reading)  # type: ignore[attr-defined]
        process.kill()
        async with asyncio.timeout(20):
            with contextlib.suppress(BrokenError, FlushedError):
                while True:
                    await conn.send(b"x")
                    await asyncio.sleep(0)


async def test_a_thousand_futures(loop_errors: LoopErrors) -> None:
    """A thousand operations on a link that breaks: each ends, one failure at most is logged, the next post raises."""
    async with _served() as (conn, remote, process):
        process.stop()
        futures = [conn.read(remote[:8]) for _ in range(600)]
        futures += [conn.write(remote[:8], b"8 bytes!") for _ in range(300)]
        futures += [conn.fetch_add(remote[:8], 1) for _ in range(100)]
        process.kill()
        async with asyncio.timeout(20):
            await asyncio.wait(futures)
        assert all(isinstance(future._exception, FlushedError) for future in futures)
        with pytest.raises(BrokenError) as caught:
            conn.read(remote[:8])
        assert isinstance(caught.value.__cause__, BrokenError)
        del futures
        gc.collect()
        await asyncio.sleep(0)
        logged = [context for context in loop_errors if "never retrieved" in context["message"]]
        assert len(logged) <= 1
        loop_errors.clear()


async def test_a_refused_request_is_loud_once(loop_errors: LoopErrors) -> None:
    """Of a thousand requests of which the first is refused, and which nobody awaits, one is logged: with the reason."""
    async with connected_pair() as pair:
        region = pair.server.alloc(8, access=Access.REMOTE_READ)
        remote = region.remote()
        futures = [pair.client.read(RemoteRegion(remote.addr, 8, remote.rkey ^ 1))]
        futures += [pair.client.read(remote) for _ in range(1000)]
        async with asyncio.timeout(20):
            await asyncio.wait(futures)
        futures.clear()
        gc.collect()
        await asyncio.sleep(0)
        assert [context["message"] for context in loop_errors] == ["Future exception was never retrieved"]
        assert "invalid STag" in str(loop_errors[0]["exception"])
        loop_errors.clear()
        with pytest.raises(BrokenError, match="invalid STag"):
            pair.client.read(remote)
