"""Cancelling receives loses no message; loops of operations that are done at once leave others their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from aiordma import Access, BrokenError, Connection
from aiordma.testing import connected_pair
from tests.faults.support import until


async def _recv(conn: Connection) -> bytes:
    return await conn.recv()


async def _recv_message(conn: Connection) -> bytes:
    with await conn.recv_message() as message:
        return bytes(message.data)


async def _recv_into(conn: Connection) -> bytes:
    buffer = bytearray(100)
    return bytes(buffer[: await conn.recv_into(buffer)])


async def _next(conn: Connection) -> bytes:
    return await anext(conn)


_RECEIVERS = [_recv, _recv_message, _recv_into, _next]
_Receiver = Callable[[Connection], Awaitable[bytes]]


async def _run(receive: _Receiver, conn: Connection) -> bytes:
    return await receive(conn)


@pytest.mark.parametrize("receive", _RECEIVERS)
async def test_receive_cancelled_while_it_waits(receive: _Receiver) -> None:
    """A cancelled receive leaves the next message to the next one."""
    async with connected_pair() as pair, asyncio.timeout(20):
        waiting = asyncio.create_task(_run(receive, pair.server))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await pair.client.send(b"one")
        assert await receive(pair.server) == b"one"


@pytest.mark.parametrize("receive", _RECEIVERS)
async def test_message_and_cancel_in_one_turn(receive: _Receiver) -> None:
    """A message that comes in the turn of the cancel is received by that receive, or by the next: never lost."""
    async with connected_pair() as pair, asyncio.timeout(20):
        for number in range(10):
            waiting = asyncio.create_task(_run(receive, pair.server))
            await asyncio.sleep(0)
            await pair.client.send(str(number).encode())
            await until(lambda: bool(pair.server._inbox._messages) or waiting.done())  # noqa: B023 - it is called here
            waiting.cancel()  # it is woken, but hasn't run
            await asyncio.wait([waiting])
            got = await receive(pair.server) if waiting.cancelled() else waiting.result()
            assert got == str(number).encode()


@pytest.mark.parametrize("receive", _RECEIVERS)
async def test_messages_under_timeouts(receive: _Receiver) -> None:
    """A receiver that times out over and over gets every message, once and in order."""
    async with connected_pair() as pair, asyncio.timeout(30):
        count = 300

        async def send() -> None:
            for number in range(count):
                await pair.client.send(number.to_bytes(4, "big"))
                if not number % 7:
                    await asyncio.sleep(0.0005)

        sending = asyncio.create_task(send())
        got: list[bytes] = []
        while len(got) < count:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0002):
                    while True:
                        got.append(await receive(pair.server))
        assert got == [number.to_bytes(4, "big") for number in range(count)]
        await sending


async def test_cancelled_while_others_have_their_turn() -> None:
    """A receive that gives others a turn before it takes what is there can be cancelled then, and loses nothing."""
    async with connected_pair() as pair, asyncio.timeout(20):
        count = 200
        for number in range(count):
            await pair.client.send(bytes([number]))
        await until(lambda: len(pair.server._inbox._messages) >= 16)
        got: list[bytes] = []
        while len(got) < count:
            task = asyncio.create_task(pair.server.recv())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                got.append(task.result())
        assert got == [bytes([number]) for number in range(count)]


async def test_recv_ends_under_timeout_as_broken() -> None:
    """The end of the connection that comes with the time-out is still there for the next receive."""
    async with connected_pair() as pair, asyncio.timeout(20):
        receiving = asyncio.create_task(pair.server.recv())
        await asyncio.sleep(0)
        await pair.client.close()
        receiving.cancel()
        await asyncio.wait([receiving])
        with pytest.raises(BrokenError):
            await pair.server.recv()


# -- loops that never wait ----------------------------------------------------------------------------------------


async def _progress(operation: Callable[[], Awaitable[object]]) -> tuple[int, int]:
    """Repeat an operation under a time-out beside a task that counts turns: both counts."""
    ticks = done = 0
    stop = False

    async def tick() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            while True:
                await operation()
                done += 1
    stop = True
    await ticking
    return done, ticks


async def test_writes_that_complete_at_once() -> None:
    """WRITEs in a tight loop, each done when it returns, let a time-out and another task through."""
    async with connected_pair() as pair:
        remote = pair.server.alloc(64, access=Access.REMOTE_WRITE).remote()
        done, ticks = await _progress(lambda: pair.client.write(remote[:8], b"8 bytes!"))
        assert done > 32
        assert ticks > 1
        await pair.client.barrier()


async def test_sends_that_complete_at_once() -> None:
    """SENDs in a tight loop, to a peer that receives, let a time-out and another task through."""
    async with connected_pair() as pair:
        received = 0

        async def receive() -> None:
            nonlocal received
            async for _ in pair.server:
                received += 1

        receiving = asyncio.create_task(receive())
        done, ticks = await _progress(lambda: pair.client.send(b"x"))
        assert done > 32
        assert ticks > 1
        await pair.client.close()
        await receiving
        assert received >= done


@pytest.mark.parametrize("receive", _RECEIVERS)
async def test_receives_of_what_is_there(receive: _Receiver) -> None:
    """Receives from a queue that never empties let another task through: it counts turns meanwhile."""
    async with connected_pair() as pair, asyncio.timeout(30):
        count = 2000
        for _ in range(count):
            await pair.client.send(b"x")
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        for _ in range(count):
            await receive(pair.server)
        ticking.cancel()
        await asyncio.wait([ticking])
        assert ticks >= count // 32


async def test_reads_under_a_timeout() -> None:
    """READs in a tight loop let a time-out and another task through."""
    async with connected_pair() as pair:
        remote = pair.server.alloc(64, access=Access.REMOTE_READ).remote()
        done, ticks = await _progress(lambda: pair.client.read(remote[:8]))
        assert done > 0
        assert ticks > done
