"""Cancelling and timing out what a connection's operations return: the waiter goes, nothing is lost, it works on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aiordma
from aiordma import Access, ClosedError, Connection, ConnParam, MemoryRegion, RemoteRegion
from aiordma.testing import Pair, connected_pair
from tests.faults import raw_peer
from tests.faults.support import REMOTE, against_raw

_ALL = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


@contextlib.asynccontextmanager
async def _pair(**param: Any) -> AsyncIterator[tuple[Pair, MemoryRegion]]:
    async with asyncio.timeout(30), connected_pair(client_param=ConnParam(**param)) as pair:
        yield pair, pair.server.alloc(4096, access=_ALL)


async def _works(pair: Pair, remote: RemoteRegion) -> None:
    """Each kind of operation still does what it should."""
    await pair.client.write(remote[:8], b"works on")
    assert await pair.client.read(remote[:8]) == b"works on"
    await pair.client.write(remote[8:16], bytes(8))
    assert await pair.client.fetch_add(remote[8:16], 7) == 0
    assert await pair.client.compare_swap(remote[8:16], 7, 8) == 7
    await pair.client.send(b"to the server")
    assert await pair.server.recv() == b"to the server"
    await pair.server.send(b"to the client")
    assert await pair.client.recv() == b"to the client"


_OPERATIONS: dict[str, Callable[[Connection, RemoteRegion], asyncio.Future[Any]]] = {
    "read": lambda conn, remote: conn.read(remote[:64]),
    "read into": lambda conn, remote: conn.read(remote[:64], into=conn.alloc(64)),
    "write": lambda conn, remote: conn.write(remote[64:128], bytes(64)),
    "long write": lambda conn, remote: conn.write(remote, conn.alloc(4096)),
    "fetch_add": lambda conn, remote: conn.fetch_add(remote[:8], 1),
    "compare_swap": lambda conn, remote: conn.compare_swap(remote[:8], 0, 0),
    "barrier": lambda conn, _: conn.barrier(),
}


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("name", _OPERATIONS)
async def test_operation_cancelled_after_turns(name: str, turns: int) -> None:
    """An operation cancelled at once, and after some turns of the loop, leaves the connection as it was."""
    async with _pair() as (pair, region):
        future = _OPERATIONS[name](pair.client, region.remote())
        for _ in range(turns):
            await asyncio.sleep(0)
        future.cancel()
        await asyncio.wait([future])
        await _works(pair, region.remote())


@pytest.mark.parametrize("name", _OPERATIONS)
async def test_operation_times_out(name: str) -> None:
    """An operation under a time-out that is over already raises TimeoutError, or was done at once; then all works."""
    async with _pair() as (pair, region):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await _OPERATIONS[name](pair.client, region.remote())
        await _works(pair, region.remote())


async def test_cancelled_after_it_is_done() -> None:
    """Cancelling a future that is done has no effect."""
    async with _pair() as (pair, region):
        future = pair.client.read(region.remote()[:4])
        await future
        assert not future.cancel()
        assert future.result() == bytes(4)
        await _works(pair, region.remote())


async def test_response_and_cancel_in_one_turn() -> None:
    """A response that comes in the turn of the cancel goes to nobody, and the next operations are answered rightly."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(128)
        first = conn.read(REMOTE[:64], into=local[:64])
        second = conn.read(REMOTE[:64], into=local[64:])

        async def wait() -> None:
            await first

        waiting = asyncio.create_task(wait())
        await peer.fpdu()
        await peer.fpdu()
        first.add_done_callback(lambda _: waiting.cancel())  # runs in the turn in which it completes
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, b"1" * 64))
        await asyncio.wait([waiting])
        assert first.result() is None
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr + 64, b"2" * 64))
        await second
        assert local.view[:] == b"1" * 64 + b"2" * 64


async def test_buffer_in_flight_after_a_cancel() -> None:
    """A cancelled READ's buffer is in use until the response is in, and `idle()` of it, or a slice, waits for that."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(128)
        reading = conn.read(REMOTE[:64], into=local[:64])
        await peer.fpdu()
        reading.cancel()
        async with asyncio.timeout(5):
            await local[64:].idle()  # nothing names the other half
        idle = [asyncio.create_task(memory.idle()) for memory in (local, local[:8], local[63:65])]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in idle)
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, b"r" * 32, last=False))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in idle)
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr + 32, b"r" * 32))
        await asyncio.gather(*idle)
        assert local.view[:64] == b"r" * 64


async def test_buffer_of_a_dropped_region_in_flight() -> None:
    """Memory of the pool that a cancelled READ names isn't given out again before the response is in."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(64)
        key, addr = local.lkey, local.addr
        reading = conn.read(REMOTE[:64], into=local)
        await peer.fpdu()
        reading.cancel()
        del local, reading
        others = [conn.alloc(64) for _ in range(200)]
        assert addr not in {other.addr for other in others}
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, key, addr, b"r" * 64))
        await peer.send(raw_peer.send(1, b"behind it"))
        assert await conn.recv() == b"behind it"
        assert conn.alloc(64).addr == addr


async def test_idle_cancelled() -> None:
    """A cancelled `idle()` drops its wait; another one goes on."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(64)
        reading = conn.read(REMOTE[:64], into=local)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await local.idle()
        await peer.fpdu()
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, bytes(64)))
        await local.idle()
        await reading


async def test_idle_ends_with_the_connection() -> None:
    """`idle()` returns when the connection ended, and the buffer isn't written afterwards."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(64)
        reading = conn.read(REMOTE[:64], into=local)
        idle = asyncio.create_task(local.idle())
        await peer.fpdu()
        peer.close()
        await idle
        await asyncio.wait([reading])


async def test_region_closes_after_the_response() -> None:
    """Closing a region that a cancelled READ names waits for its response."""
    async with against_raw() as (conn, peer):
        buffer = bytearray(64)
        local = conn.register(buffer)
        reading = conn.read(REMOTE[:64], into=local)
        key, addr = local.lkey, local.addr
        await peer.fpdu()
        reading.cancel()
        closing = asyncio.create_task(local.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, key, addr, b"r" * 64))
        await closing
        assert buffer == b"r" * 64


async def test_waiting_request_is_withdrawn() -> None:
    """A cancelled request that waits in our own queue is never posted; those around it are, in order."""
    async with against_raw(max_send_wr=1) as (conn, peer):
        local = conn.alloc(64)
        reads = [conn.read(REMOTE[offset : offset + 8], into=local[:8]) for offset in range(0, 40, 8)]
        reads[1].cancel()
        reads[3].cancel()
        sources = []
        for _ in range(3):
            asked = await peer.fpdu()
            sources.append(int.from_bytes(asked.payload[-8:], "big") - REMOTE.addr)
            await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, bytes(8)))
        await asyncio.wait(reads)
        assert sources == [0, 16, 32]
        barrier = conn.barrier()  # nothing else went out before it
        assert (await peer.fpdu()).payload[12:16] == bytes(4)
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, 0, 0))
        await barrier


async def test_all_waiting_requests_are_withdrawn() -> None:
    """With everything that waits cancelled, idle() returns at the last posted one, and the queue goes on."""
    async with against_raw(max_send_wr=1) as (conn, peer):
        local = conn.alloc(64)
        reads = [conn.read(REMOTE[:8], into=local[at : at + 8]) for at in range(0, 64, 8)]
        for read in reads[1:]:
            read.cancel()
        await local[8:].idle()
        await peer.fpdu()
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, bytes(8)))
        await reads[0]
        sending = conn.send(b"next")
        assert (await peer.fpdu()).payload == b"next"
        await sending


async def test_drain_cancelled() -> None:
    """A cancelled drain() leaves the queue as it was; another drain() returns when it is short again."""
    async with against_raw(max_send_wr=1) as (conn, peer):
        conn.set_write_buffer_limits(high=100, low=10)
        local = conn.alloc(64)
        reads = [conn.read(REMOTE[:64], into=local) for _ in range(4)]
        draining = [asyncio.create_task(conn.drain()) for _ in range(2)]
        await asyncio.sleep(0)
        draining[0].cancel()
        await asyncio.wait(draining[:1])
        assert draining[0].cancelled()
        for _ in range(4):
            assert not draining[1].done()
            await peer.fpdu()
            await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, bytes(64)))
        await draining[1]
        await asyncio.gather(*reads)


async def test_drain_ends_with_the_connection() -> None:
    """drain() raises the connection's end, from inside too."""
    async with against_raw(max_send_wr=1) as (conn, peer):
        conn.set_write_buffer_limits(high=0)
        futures = [conn.read(REMOTE[:64]) for _ in range(4)]
        draining = asyncio.create_task(conn.drain())
        await peer.fpdu()
        peer.reset()
        with pytest.raises(aiordma.BrokenError):
            await draining
        await asyncio.wait(futures)


async def test_batch_exit_cancelled() -> None:
    """A cancel at the end of a batch drops the wait, not the requests: all are executed; the connection works on."""
    async with _pair(max_send_wr=4) as (pair, region):
        remote = region.remote()
        region.view[:64] = bytes(range(64))
        local = pair.client.alloc(64)

        async def batch() -> None:
            async with pair.client.batch() as b:
                for at in range(0, 64, 4):
                    b.read(remote[at : at + 4], local[at : at + 4])
                b.fetch_add(remote[512:520], 1)

        for turns in range(4):
            local.view[:] = bytes(64)
            task = asyncio.create_task(batch())
            for _ in range(turns + 1):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await local.idle()
            await pair.client.barrier()
            assert local.view[:] == bytes(range(64))
            assert await pair.client.fetch_add(remote[512:520], 0) == turns + 1
        await _works(pair, remote[1024:])


async def test_batch_body_cancelled() -> None:
    """A cancel in the body of a batch posts nothing of it."""
    async with _pair() as (pair, region):
        remote = region.remote()
        futures = []

        async def batch() -> None:
            async with pair.client.batch() as b:
                b.write(remote[:4], b"none")
                futures.append(b.fetch_add(remote[8:16], 1))
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(batch())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert futures[0].cancelled()
        await pair.client.barrier()
        assert region.view[:16] == bytes(16)
        await _works(pair, remote)


@pytest.mark.parametrize("turns", range(4))
async def test_close_cancelled(turns: int) -> None:
    """A cancelled close() goes on by itself, and another close() waits for its end."""
    async with _pair() as (pair, _):
        closing = asyncio.create_task(pair.client.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        if turns:
            with pytest.raises(ClosedError):
                pair.client.send(b"x")
        await pair.client.close()
        assert pair.client.qp.closed


async def test_atomic_cancelled_may_have_been_executed() -> None:
    """The result of a cancelled atomic doesn't reach the one behind it: each has its own."""
    async with _pair() as (pair, region):
        remote = region.remote()[:8]
        futures = [pair.client.fetch_add(remote, 1) for _ in range(20)]
        for future in futures[::2]:
            future.cancel()
        assert [await future for future in futures[1::2]] == list(range(1, 20, 2))
        assert await pair.client.fetch_add(remote, 0) == 20
