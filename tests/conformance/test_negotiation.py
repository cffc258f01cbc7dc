"""Connection parameters: READ depths, CRC, queue sizes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma import ConnParam, RDMAError
from tests.conformance.support import offer, pair, pattern


@pytest.mark.parametrize("client_depth", [1, 2, None, 100_000])
@pytest.mark.parametrize("server_resources", [1, 3, None, 100_000])
async def test_depths(client_depth: int | None, server_resources: int | None) -> None:
    """Whatever READ depth the two sides agree on, 50 READs in flight all get their data."""
    async with pair(
        client_param=ConnParam(initiator_depth=client_depth),
        server_param=ConnParam(responder_resources=server_resources),
    ) as ends:
        _, remote = offer(ends.server, 50 * 20_000)
        sizes = [8, 20_000]
        reads = [ends.client.read(remote[20_000 * at : 20_000 * at + sizes[at % 2]]) for at in range(50)]
        content = pattern(50 * 20_000)
        for at, data in enumerate(await asyncio.gather(*reads)):
            assert data == content[20_000 * at : 20_000 * at + sizes[at % 2]]


async def test_depths_of_the_accepting_side() -> None:
    """The accepting side's depth and the connecting side's resources are kept too."""
    async with pair(client_param=ConnParam(responder_resources=1), server_param=ConnParam(initiator_depth=64)) as ends:
        _, remote = offer(ends.client, 400)
        reads = [ends.server.read(remote[8 * at : 8 * at + 8]) for at in range(50)]
        assert b"".join(await asyncio.gather(*reads)) == pattern(400)


async def test_depth_of_one_with_everything_else() -> None:
    """READs that wait for the depth hold up nothing before them, and keep their place.

    With receives for all messages: rxe never goes on where one with a fence waits for a receive (docs/devices.md).
    """
    async with pair(client_param=ConnParam(initiator_depth=1), server_param=ConnParam(recv_depth=64)) as ends:
        _, remote = offer(ends.server, 4)
        reads = []
        for number in range(50):
            ends.client.write(remote, number.to_bytes(4, "big"))
            reads.append(ends.client.read(remote, fence=True))
            ends.client.send(b"%d" % number, fence=True)
        for number in range(50):
            assert await ends.server.recv() == b"%d" % number
        assert [int.from_bytes(data, "big") for data in await asyncio.gather(*reads)] == list(range(50))


async def test_no_resources() -> None:
    """Where the peer accepts no READs at all, a READ fails, or has the one place that there is on InfiniBand and RoCE.

    It doesn't wait for ever. Messages work.
    """
    async with pair(server_param=ConnParam(responder_resources=0)) as ends:
        _, remote = offer(ends.server, 8)
        await ends.client.send(b"messages work")
        assert await ends.server.recv() == b"messages work"
        outcomes = await asyncio.gather(ends.client.read(remote), return_exceptions=True)
        assert isinstance(outcomes[0], RDMAError) or outcomes[0] == pattern(8)


async def test_no_depth() -> None:
    """With a depth of none asked for, a READ fails, or has the one place that the transport insists on."""
    async with pair(client_param=ConnParam(initiator_depth=0)) as ends:
        _, remote = offer(ends.server, 8)
        outcomes = await asyncio.gather(ends.client.read(remote), return_exceptions=True)
        assert isinstance(outcomes[0], RDMAError) or outcomes[0] == pattern(8)


@pytest.mark.parametrize(("client", "server"), [(True, False), (False, True), (True, True)])
async def test_crc(client: bool, server: bool) -> None:
    """With a checksum asked for by either side or both, everything works, at all sizes."""
    async with pair(
        client_param=ConnParam(crc=client, recv_size=100_000),
        server_param=ConnParam(crc=server, recv_size=100_000),
    ) as ends:
        region, remote = offer(ends.server, 1_000_003)
        for size in (0, 1, 2, 3, 4, 5, 8191, 8192, 8193, 65_535, 65_537, 1_000_003):
            assert await ends.client.read(remote[:size]) == pattern(1_000_003)[:size]
        source = ends.client.register(pattern(1_000_003, 2))
        await ends.client.write(remote, source)
        await ends.client.barrier()
        assert region.view == source.view
        for size in (0, 1, 2, 3, 8193, 100_000):
            ends.client.send(pattern(size))
            ends.server.send(pattern(size, 2))
            assert await ends.server.recv() == pattern(size)
            assert await ends.client.recv() == pattern(size, 2)
        if ends.client.capabilities.atomics:
            region.view[:8] = bytes(8)
            assert await ends.client.fetch_add(remote[:8], 1) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"recv_size": -1}, {"recv_depth": 0}, {"max_send_wr": 0}, {"max_sge": 0}, {"responder_resources": -1},
        {"initiator_depth": -1}, {"retry_count": 8}, {"rnr_retry": -1}, {"tos": 256},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_parameters(arguments: dict[str, Any]) -> None:
    """Parameters that can't be are a ValueError where they are made."""
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ConnParam(**arguments)


@pytest.mark.parametrize(
    "param",
    [
        ConnParam(max_send_wr=1, recv_depth=1, max_sge=1), ConnParam(recv_size=0), ConnParam(tos=0x20),
        ConnParam(keepalive=None), ConnParam(keepalive=0.5), ConnParam(max_send_wr=10**9, max_sge=10**9),
        # Receives for all: rxe counts what it sends again after a receiver-not-ready, too.
        ConnParam(retry_count=0, rnr_retry=7, ack_timeout=2.0, recv_depth=64),
    ],
    ids=str,
)  # fmt: skip
async def test_parameters(param: ConnParam) -> None:
    """The smallest and the largest of each parameter, on both sides: reads, writes and messages work."""
    async with pair(client_param=param, server_param=param) as ends:
        region, remote = offer(ends.server, 100)
        reads = [ends.client.read(remote[at : at + 1]) for at in range(100)]
        ends.client.write(remote, bytes(100))
        message = bytes(min(1, param.recv_size))
        if ends.client.capabilities.unreceived_send_waits:
            sends = [ends.client.send(message) for _ in range(50)]
            assert [await ends.server.recv() for _ in range(50)] == [message] * 50
        else:
            sends = []
            for _ in range(50):
                sends.append(ends.client.send(message))
                assert await ends.server.recv() == message
        await asyncio.gather(*sends, ends.client.barrier())
        assert b"".join(await asyncio.gather(*reads)) == pattern(100)
        assert region.view == bytes(100)


async def test_sides_differ() -> None:
    """Each side has its own sizes: neither needs to know the other's."""
    async with pair(
        client_param=ConnParam(recv_size=10, recv_depth=1, max_send_wr=3, max_sge=1),
        server_param=ConnParam(recv_size=5000, recv_depth=50, max_send_wr=100, max_sge=16),
    ) as ends:
        ends.client.send(bytes(5000))
        assert await ends.server.recv() == bytes(5000)
        ends.server.send(bytes(10))
        assert await ends.client.recv() == bytes(10)
