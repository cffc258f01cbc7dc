"""Messages: send and the ways to receive."""

from __future__ import annotations

import array
import asyncio
import gc
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import BrokenError, BusyError, ClosedError, Connection, ConnParam, WCStatus
from tests.conformance.support import GUARD, ended, pair, pattern, require


async def test_order() -> None:
    """Messages arrive whole, in the order they were sent, in both directions at once."""
    roomy = ConnParam(recv_depth=256)
    async with pair(client_param=roomy, server_param=roomy) as ends:

        async def talk(end: Connection, name: bytes) -> None:
            for number in range(200):
                await end.send(b"%s%d" % (name, number))

        async def hear(end: Connection, name: bytes) -> None:
            for number in range(200):
                assert await end.recv() == b"%s%d" % (name, number)

        await asyncio.gather(
            talk(ends.client, b"c"), talk(ends.server, b"s"), hear(ends.client, b"s"), hear(ends.server, b"c")
        )


async def test_empty() -> None:
    """An empty message is a message."""
    async with pair() as ends:
        await ends.client.send(b"")
        await ends.client.send(ends.client.alloc(8)[:0])
        await ends.client.send([])
        await ends.client.send(b"end")
        assert [await ends.server.recv() for _ in range(4)] == [b"", b"", b"", b"end"]


@pytest.mark.parametrize("size", [0, 1, 100, 8192, 8193, 65_536, 1_000_001])
async def test_largest(size: int) -> None:
    """A message of exactly recv_size bytes is received."""
    async with pair(server_param=ConnParam(recv_size=size, recv_depth=2)) as ends:
        for seed in range(5):
            await ends.client.send(pattern(size, seed))
            assert await ends.server.recv() == pattern(size, seed)


@pytest.mark.parametrize("size", [0, 100, 10_000])
async def test_too_long(size: int) -> None:
    """A message one byte longer than recv_size ends the connection; the text says what to ask for."""
    async with pair(server_param=ConnParam(recv_size=size)) as ends:
        await ends.client.send(pattern(size))
        sending = ends.client.send(pattern(size + 1))
        assert await ends.server.recv() == pattern(size)
        with pytest.raises(BrokenError, match="recv_size") as caught:
            await ends.server.recv()
        assert isinstance(caught.value.__cause__, aiordma.LocalError)
        # rxe says of it what it says of every receive that it can't do.
        assert caught.value.__cause__.status in {WCStatus.LOC_LEN_ERR, WCStatus.LOC_QP_OP_ERR}
        if ends.client.capabilities.success_proves == "acknowledged":
            with pytest.raises(aiordma.RemoteError):
                await sending
        else:
            await sending
            with pytest.raises(BrokenError, match="too long" if ends.client.capabilities.remote_fault_known else None):
                await ends.client.recv()


async def test_sources() -> None:
    """Every kind of buffer is sent as its bytes."""
    values = [1, 2, 300]
    sources = [
        array.array("i", values), np.array(values, dtype=np.int32), memoryview(array.array("i", values)),
        bytearray(array.array("i", values).tobytes()), np.array([[1, 2, 300]], dtype=np.int32),
    ]  # fmt: skip
    async with pair() as ends:
        registered = ends.client.register(array.array("i", values))
        for source in [*sources, registered, registered[0:], [registered[:4], registered[4:]]]:
            await ends.client.send(source)
            assert await ends.server.recv() == array.array("i", values).tobytes()


async def test_data_is_taken_at_the_call() -> None:
    """A small unregistered buffer may change right after the call."""
    async with pair() as ends:
        data = bytearray(b"first")
        sending = ends.client.send(data)
        data[:] = b"other"
        await sending
        assert await ends.server.recv() == b"first"


async def test_recv_into() -> None:
    """recv_into places a message in any writable buffer, gives its length, and changes nothing behind it."""
    async with pair() as ends:
        registered = ends.server.alloc(16)
        numbers = np.zeros((2, 8), dtype=np.uint8)
        targets: list[Any] = [
            bytearray(16),
            memoryview(bytearray(20))[2:18],
            registered,
            registered[:],
            numbers,
        ]
        for target in targets:
            view = (
                memoryview(target).cast("B")
                if not isinstance(target, aiordma.MemoryRegion | aiordma.MemorySlice)
                else target.view
            )
            view[:] = bytes((GUARD,)) * 16
            await ends.client.send(b"0123456789")
            assert await ends.server.recv_into(target) == 10
            assert view == b"0123456789" + bytes((GUARD,)) * 6


async def test_recv_into_too_short() -> None:
    """A buffer one byte too short is a ValueError; the message stays, and is received with a larger one."""
    async with pair() as ends:
        await ends.client.send(b"0123456789")
        with pytest.raises(ValueError, match="10 bytes"):
            await ends.server.recv_into(bytearray(9))
        target = bytearray(10)
        assert await ends.server.recv_into(target) == 10
        assert target == b"0123456789"


async def test_recv_into_nothing() -> None:
    """An empty message fits a buffer of no bytes."""
    async with pair() as ends:
        for target in (bytearray(), ends.server.alloc(0), np.zeros((0, 4))):
            await ends.client.send(b"")
            assert await ends.server.recv_into(target) == 0


async def test_recv_into_read_only() -> None:
    """A read-only buffer is a ValueError, and the message stays."""
    async with pair() as ends:
        await ends.client.send(b"data")
        for target in (bytes(16), ends.server.register(bytes(16))):
            with pytest.raises(ValueError, match="read-only"):
                await ends.server.recv_into(target)
        assert await ends.server.recv() == b"data"


async def test_recv_message_is_lent() -> None:
    """A lent message keeps its receive: with one receive, the next message comes after the release."""
    require("unreceived_send_waits")
    async with pair(server_param=ConnParam(recv_depth=1, recv_size=64)) as ends:
        ends.client.send(b"first")
        ends.client.send(b"second")
        message = await ends.server.recv_message()
        assert message.data.tobytes() == b"first"
        assert message.byte_len == 5
        assert message.imm_data is None
        assert message.invalidated is None
        waiting = asyncio.create_task(ends.server.recv())
        # On the soft device the READ passes by the message that waits for its receive; with RNR it waits behind it.
        if not ends.client.capabilities.rnr:
            await ends.client.barrier()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert message.data.tobytes() == b"first"
        message.release()
        message.release()
        assert len(message.data) == 0
        assert await waiting == b"second"


async def test_recv_message_as_context() -> None:
    """Leaving the block releases: more messages than receives are taken one by one."""
    require("unreceived_send_waits")
    async with pair(server_param=ConnParam(recv_depth=2)) as ends:
        for number in range(20):
            ends.client.send(b"%d" % number)
        for number in range(20):
            with await ends.server.recv_message() as message:
                assert message.data.tobytes() == b"%d" % number


async def test_dropped_message() -> None:
    """A message that is dropped without release() is a warning; its receive is posted again all the same."""
    async with pair(server_param=ConnParam(recv_depth=2)) as ends:
        for number in range(8):
            sending = ends.client.send(b"%d" % number)
            message = await ends.server.recv_message()
            assert message.data == b"%d" % number
            with pytest.warns(ResourceWarning, match="release"):
                del message
            await sending


async def test_dropped_message_of_a_closed_connection() -> None:
    """A message that outlives its connection is dropped with a warning, and no harm."""
    async with pair() as ends:
        await ends.client.send(b"late")
        message = await ends.server.recv_message()
        await ends.server.close()
        assert bytes(message.data) == b"late"
        with pytest.warns(ResourceWarning, match="release"):
            del message
        await asyncio.sleep(0)


async def test_released_message_is_silent() -> None:
    """A message that was released is dropped without a warning."""
    async with pair() as ends:
        await ends.client.send(b"x")
        (await ends.server.recv_message()).release()
        gc.collect()


async def test_recv_message_out_of_order_release() -> None:
    """Messages may be released in any order; none is overwritten while it is held."""
    require("unreceived_send_waits")
    async with pair(server_param=ConnParam(recv_depth=3)) as ends:
        for number in range(9):
            ends.client.send(b"%d" % number)
        held = [await ends.server.recv_message() for _ in range(3)]
        held[2].release()
        fourth = await ends.server.recv_message()
        assert [message.data.tobytes() for message in (held[0], held[1], fourth)] == [b"0", b"1", b"3"]
        for message in (fourth, held[0], held[1]):
            message.release()
        assert [await ends.server.recv() for _ in range(5)] == [b"4", b"5", b"6", b"7", b"8"]


async def test_iteration_ends_with_the_peer() -> None:
    """`async for` gives every message, and ends when the peer has closed."""
    async with pair(server_param=ConnParam(recv_depth=64)) as ends:
        for number in range(50):
            ends.client.send(b"%d" % number)
        await asyncio.gather(ends.client.close(), received := asyncio.ensure_future(_all(ends.server)))
        assert received.result() == [b"%d" % number for number in range(50)]


async def _all(end: Connection) -> list[bytes]:
    return [message async for message in end]


async def test_iteration_raises_after_a_fault() -> None:
    """`async for` raises when the connection broke: what came may not be everything."""
    async with pair(server_param=ConnParam(recv_size=4)) as ends:
        await ends.client.send(b"good")
        sending = ends.client.send(b"too long")
        assert await anext(ends.server) == b"good"
        with pytest.raises(BrokenError):
            await anext(ends.server)
        await ended(sending)


async def test_recv_after_peer_close() -> None:
    """What came before the peer's close is received; then recv raises an orderly BrokenError each time."""
    async with pair() as ends:
        ends.client.send(b"last")
        closing = asyncio.create_task(ends.client.close())
        assert await ends.server.recv() == b"last"
        for _ in range(2):
            with pytest.raises(BrokenError) as caught:
                await ends.server.recv()
            assert caught.value.orderly
        await closing


async def test_recv_after_own_close() -> None:
    """After close(), every way to receive and to send raises ClosedError."""
    async with pair() as ends:
        await ends.server.close()
        for receive in (ends.server.recv, ends.server.recv_message):
            with pytest.raises(ClosedError):
                await receive()
        with pytest.raises(ClosedError):
            await ends.server.recv_into(bytearray(8))
        with pytest.raises(ClosedError):
            ends.server.send(b"")
        with pytest.raises(ClosedError):
            await ends.server.drain()


async def test_close_ends_a_waiting_recv() -> None:
    """close() ends a recv of another task with ClosedError."""
    async with pair() as ends:
        waiting = asyncio.create_task(ends.server.recv())
        await asyncio.sleep(0)
        await ends.server.close()
        with pytest.raises(ClosedError):
            await waiting


async def test_two_receivers() -> None:
    """A second task that receives gets a BusyError; the first one gets the message."""
    async with pair() as ends:
        first = asyncio.create_task(ends.server.recv())
        await asyncio.sleep(0)
        for receive in (ends.server.recv, ends.server.recv_message):
            with pytest.raises(BusyError):
                await receive()
        await ends.client.send(b"for the first")
        assert await first == b"for the first"


async def test_cancelled_recv_loses_nothing() -> None:
    """A recv that is cancelled while it waits, or in the turn its message comes, loses no message."""
    async with pair() as ends:
        received = []
        for number in range(100):
            waiting = asyncio.create_task(ends.server.recv())
            await asyncio.sleep(0)
            ends.client.send(b"%d" % number)
            for _ in range(number % 10):
                await asyncio.sleep(0)
            waiting.cancel()
            result = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(result, bytes):
                received.append(result)
        await ends.client.send(b"end")
        async for message in ends.server:
            if message == b"end":
                break
            received.append(message)
        assert received == [b"%d" % number for number in range(100)]


async def test_send_before_the_peer_has_read() -> None:
    """A message sent by the accepting side at once reaches the connecting side."""
    async with pair() as ends:
        await ends.server.send(b"welcome")
        assert await ends.client.recv() == b"welcome"
