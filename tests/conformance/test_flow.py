"""A full send queue, drain(), and fairness."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma import BrokenError, ClosedError, ConnParam, FlushedError
from tests.conformance.support import offer, pair, pattern


async def test_full_queue_keeps_order() -> None:
    """With a send queue of two, hundreds of operations posted at once are executed in order."""
    async with pair(client_param=ConnParam(max_send_wr=2)) as ends:
        _, remote = offer(ends.server, 4)
        futures: list[asyncio.Future[Any]] = []
        for number in range(200):
            futures += [
                ends.client.write(remote, number.to_bytes(4, "big")), ends.client.read(remote),
                ends.client.send(b"%d" % number),
            ]  # fmt: skip
        for number in range(200):
            assert await ends.server.recv() == b"%d" % number
        results = await asyncio.gather(*futures)
        assert [int.from_bytes(data, "big") for data in results[1::3]] == list(range(200))


async def test_full_queue_across_tasks() -> None:
    """Requests of several tasks wait in the order they came."""
    async with pair(client_param=ConnParam(max_send_wr=1)) as ends:
        _, remote = offer(ends.server, 8 * 50)

        async def run(number: int) -> None:
            for step in range(10):
                data = await ends.client.read(remote[8 * number : 8 * number + 8])
                assert data == pattern(400)[8 * number : 8 * number + 8]
                await ends.client.send(b"%d %d" % (number, step))

        running = asyncio.gather(*[run(number) for number in range(50)])
        steps = [0] * 50
        for _ in range(500):
            number, step = map(int, (await ends.server.recv()).split())
            assert step == steps[number]
            steps[number] += 1
        await running


async def test_drain_with_nothing() -> None:
    """drain() returns at once where nothing waits."""
    async with pair() as ends:
        await ends.client.drain()
        ends.client.write(offer(ends.server, 8)[1], bytes(8))
        await ends.client.drain()


async def test_drain_bounds() -> None:
    """A producer that drains never has more waiting than the high limit and one request."""
    size = 50_000
    async with pair(client_param=ConnParam(max_send_wr=16)) as ends:
        ends.client.set_write_buffer_limits(high=4 * size, low=size)
        _, remote = offer(ends.server, size)
        sink = ends.client.alloc(size)
        most = 0
        for _ in range(300):
            ends.client.read(remote, into=sink)
            most = max(most, ends.client.qp.get_write_buffer_size())
            await ends.client.drain()
            assert ends.client.qp.get_write_buffer_size() <= 4 * size
        assert 4 * size < most <= 5 * size
        await ends.client.barrier()


async def test_drain_counts_requests() -> None:
    """Requests of no bytes count too: drain() waits when more of them wait than the queue has places."""
    async with pair(client_param=ConnParam(max_send_wr=4)) as ends:
        barriers = []
        for _ in range(200):
            barriers.append(ends.client.barrier())
            await ends.client.drain()
            assert sum(not future.done() for future in barriers) <= 9
        await asyncio.gather(*barriers)


async def test_drain_to_low() -> None:
    """drain() returns when what waits is down to the low limit."""
    size = 200_000
    async with pair(client_param=ConnParam(max_send_wr=16)) as ends:
        ends.client.set_write_buffer_limits(high=40 * size, low=30 * size)
        _, remote = offer(ends.server, size)
        reads = [ends.client.read(remote) for _ in range(60)]
        await ends.client.drain()
        assert ends.client.qp.get_write_buffer_size() <= 30 * size
        assert not reads[-1].done()
        await asyncio.gather(*reads)


async def test_limits() -> None:
    """Limits follow asyncio's rules."""
    async with pair() as ends:
        client = ends.client
        client.set_write_buffer_limits()
        client.set_write_buffer_limits(high=0)
        client.set_write_buffer_limits(low=100)
        client.set_write_buffer_limits(high=100, low=100)
        for high, low in ((1, 2), (-1, None), (10, -1)):
            with pytest.raises(ValueError, match="high"):
                client.set_write_buffer_limits(high, low)


async def test_drain_of_several_tasks() -> None:
    """Every task that drains is woken."""
    async with pair(client_param=ConnParam(max_send_wr=1)) as ends:
        _, remote = offer(ends.server, 50_000)
        reads = [ends.client.read(remote) for _ in range(50)]
        await asyncio.gather(*[ends.client.drain() for _ in range(10)])
        await asyncio.gather(*reads)


@pytest.mark.parametrize("own", [False, True])
async def test_drain_ends_with_the_connection(own: bool) -> None:
    """drain() raises when the connection ends while it waits."""
    async with pair(client_param=ConnParam(max_send_wr=1)) as ends:
        _, remote = offer(ends.server, 4 << 20)
        reads = [ends.client.read(remote) for _ in range(5)]
        draining = asyncio.create_task(ends.client.drain())
        await asyncio.sleep(0)
        (ends.client if own else ends.server).abort()
        with pytest.raises(ClosedError if own else BrokenError):
            await draining
        # One at a time is with the device, which may have been faster than the end, with the next one too.
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(outcome, (FlushedError, bytes)) for outcome in outcomes[:2])
        assert all(isinstance(outcome, FlushedError) for outcome in outcomes[2:])


async def test_cancelled_while_waiting() -> None:
    """A request that is cancelled while it waits is withdrawn; those behind it move up, in order."""
    async with pair(client_param=ConnParam(max_send_wr=1)) as ends:
        _, remote = offer(ends.server, 1 << 20)
        reading = ends.client.read(remote)
        sends = [ends.client.send(b"%d" % number) for number in range(50)]
        for number in range(0, 50, 2):
            sends[number].cancel()
        assert [await ends.server.recv() for _ in range(25)] == [b"%d" % number for number in range(1, 50, 2)]
        await asyncio.gather(reading, *sends, return_exceptions=True)
        await ends.client.barrier()


async def test_all_waiting_cancelled() -> None:
    """When everything that waited is cancelled, the connection works on, and drain returns."""
    async with pair(client_param=ConnParam(max_send_wr=1)) as ends:
        _, remote = offer(ends.server, 1 << 20)
        reads = [ends.client.read(remote) for _ in range(20)]
        for read in reads:
            read.cancel()
        await ends.client.drain()
        assert await ends.client.read(remote[:8]) == pattern(1 << 20)[:8]


@pytest.mark.parametrize("operation", ["read", "write", "send", "batch"])
async def test_tight_loop_lets_others_run(operation: str) -> None:
    """A tight loop of awaited operations doesn't starve other tasks, nor a time-out."""
    async with pair(server_param=ConnParam(recv_depth=64)) as ends:
        region, remote = offer(ends.server, 8)
        sink = ends.client.alloc(8)
        done = 0

        async def work() -> None:
            nonlocal done
            while True:
                if operation == "read":
                    await ends.client.read(remote, into=sink)
                elif operation == "write":
                    await ends.client.write(remote, b"12345678")
                elif operation == "send":
                    await ends.client.send(b"x")
                else:
                    async with ends.client.batch() as batch:
                        batch.write(remote, b"12345678")
                done += 1

        async def receive() -> None:
            async for _ in ends.server:
                pass

        working, receiving = asyncio.create_task(work()), asyncio.create_task(receive())
        for _ in range(100):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.Event().wait()
        assert done >= 10
        for task in (working, receiving):
            task.cancel()
        await asyncio.wait([working, receiving])
        await region.idle()


async def test_tight_loop_of_recv_lets_others_run() -> None:
    """Receiving what is already there doesn't starve other tasks."""
    async with pair(server_param=ConnParam(recv_depth=1000)) as ends:
        for number in range(1000):
            ends.client.send(b"%d" % number)
        await ends.client.barrier()
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        ticking = asyncio.create_task(tick())
        for number in range(1000):
            assert await ends.server.recv() == b"%d" % number
        assert turns >= 5
        ticking.cancel()
        await asyncio.wait([ticking])
