"""Messages that nobody has a receive for yet: the sender waits, and everything else goes on."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma import BrokenError, ConnParam
from tests.conformance.support import DEVICE, capabilities, ended, offer, pair, pattern


@pytest.fixture(autouse=True)
def _unreceived_send_waits() -> None:
    """Say so where a SEND without a receive ends the connection: there, programs use messages.py."""

    async def ask() -> bool:
        return capabilities().unreceived_send_waits

    if not asyncio.run(ask()):
        pytest.skip(f"on {DEVICE} a SEND without a receive ends the connection (Capabilities.unreceived_send_waits)")


async def test_read_between_send_and_recv() -> None:
    """The peer's messages wait for their recv while its READs, WRITEs and atomics are served."""
    if capabilities().rnr:
        pytest.skip(f"on {DEVICE} what is behind a SEND that waits for a receive waits too (Capabilities.rnr)")
    async with pair(server_param=ConnParam(recv_depth=1)) as ends:
        region, remote = offer(ends.server, 64)
        for number in range(20):
            ends.client.send(b"%d" % number)
            assert await ends.client.read(remote[8:]) == pattern(64)[8:]
            await ends.client.write(remote[:8], b"%08d" % number)
            await ends.client.barrier()
            assert region.view[:8] == b"%08d" % number
        assert [await ends.server.recv() for _ in range(20)] == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize("size", [0, 100, 4096])
async def test_hundreds(size: int) -> None:
    """Hundreds of messages beyond the receives posted are delivered in order, each in its own memory."""
    async with pair(server_param=ConnParam(recv_depth=4)) as ends:
        sends = [ends.client.send(pattern(size, seed)) for seed in range(500)]
        if size < 2000 and not capabilities().rnr:
            await ends.client.barrier()
        for seed in range(500):
            assert await ends.server.recv() == pattern(size, seed)
        await asyncio.gather(*sends)


async def test_sizes_mixed() -> None:
    """Large and small messages that wait keep their order and their bytes."""
    sizes = [0, 70_000, 1, 8192, 200_000, 3, 8193, 65_536, 0, 100_000]
    async with pair(server_param=ConnParam(recv_depth=1, recv_size=200_000)) as ends:
        sends = [ends.client.send(pattern(size, seed)) for seed, size in enumerate(sizes * 3)]
        for seed, size in enumerate(sizes * 3):
            assert await ends.server.recv() == pattern(size, seed)
        await asyncio.gather(*sends)


@pytest.mark.parametrize("size", [4000, 65_536])
async def test_sender_waits(size: int) -> None:
    """Beyond what the receiver's device and the network keep the sender waits; nothing is lost."""
    # With receiver-not-ready nothing is kept on the way.
    count = ((1 if capabilities().rnr else 24) << 20) // size
    async with pair(server_param=ConnParam(recv_depth=2, recv_size=size)) as ends:
        local = ends.client.register(bytearray(pattern(size)))

        async def produce() -> None:
            for _ in range(count):
                await ends.client.send(local)

        producing = asyncio.create_task(produce())
        await asyncio.wait([producing], timeout=0.5)
        assert not producing.done()
        for _ in range(count):
            with await ends.server.recv_message() as message:
                assert message.data == local.view
        await producing


async def test_a_waiting_message_too_long() -> None:
    """A message that waited, and doesn't fit its receive, ends the connection as any other."""
    async with pair(server_param=ConnParam(recv_depth=1, recv_size=10)) as ends:
        ends.client.send(b"fits")
        sending = ends.client.send(b"is too long")
        if not capabilities().rnr:
            await ends.client.barrier()
        assert await ends.server.recv() == b"fits"
        with pytest.raises(BrokenError, match="recv_size"):
            await ends.server.recv()
        with pytest.raises(BrokenError):
            await ends.client.recv()
        await ended(sending)


async def test_waiting_messages_outlive_the_sender() -> None:
    """Messages that wait when the peer closes are received, and then the end."""
    async with pair(server_param=ConnParam(recv_depth=1)) as ends:
        sends = [ends.client.send(b"%d" % number) for number in range(100)]
        if not capabilities().rnr:
            await asyncio.gather(*sends)
        closing = asyncio.create_task(ends.client.close())
        assert [message async for message in ends.server] == [b"%d" % number for number in range(100)]
        await closing


async def test_one_slow_receiver() -> None:
    """A connection nobody receives from doesn't hold up another one of the same device."""
    async with pair(server_param=ConnParam(recv_depth=1)) as slow, pair() as quick:
        for _ in range(400):
            slow.client.send(bytes(4096))
        for number in range(100):
            await quick.client.send(b"%d" % number)
            assert await quick.server.recv() == b"%d" % number
        for _ in range(400):
            assert await slow.server.recv() == bytes(4096)


async def test_held_messages_are_not_overwritten() -> None:
    """Messages lent out stay as they are, however many arrive behind them."""
    async with pair(server_param=ConnParam(recv_depth=3)) as ends:
        for number in range(100):
            ends.client.send(pattern(1000, number))
        held: list[aiordma.Message] = [await ends.server.recv_message() for _ in range(2)]
        for number in range(2, 100):
            assert await ends.server.recv() == pattern(1000, number)
        assert [message.data for message in held] == [pattern(1000, 0), pattern(1000, 1)]
        for message in held:
            message.release()
