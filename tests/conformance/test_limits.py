"""More than a request, a device or a port number can hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import aiordma
from aiordma import Connection, ConnParam, DeviceError, MemoryRegion, RejectedError, RemoteRegion
from aiordma.queue_pair import QueuePair
from tests.conformance.support import DEVICE, HOST, offer, pair, pattern

#: A limit that memory can be allocated beyond.
LIMIT = 1 << 16


@contextlib.contextmanager
def _small_requests() -> Iterator[None]:
    """Let the device under test carry less in one request than it does."""
    context = aiordma.open_device(DEVICE)
    before = context.capabilities
    context.capabilities = attrs.evolve(before, max_msg_size=LIMIT)
    try:
        yield
    finally:
        context.capabilities = before


_Post = Callable[[Connection, RemoteRegion, MemoryRegion], Any]

_TOO_LARGE: dict[str, _Post] = {
    "read": lambda conn, remote, _: conn.read(remote),
    "read into": lambda conn, remote, memory: conn.read(remote, into=memory),
    "read into, fenced": lambda conn, remote, memory: conn.read(remote, into=memory, fence=True),
    "read into a piece": lambda conn, remote, memory: conn.read(remote, into=[memory]),
    "read into pieces": lambda conn, remote, memory: conn.read(remote, into=[memory[:LIMIT], memory[LIMIT:]]),
    "write": lambda conn, remote, memory: conn.write(remote, memory),
    "write bytes": lambda conn, remote, memory: conn.write(remote, bytes(len(memory))),
    "write pieces": lambda conn, remote, memory: conn.write(remote, [memory[:LIMIT], memory[LIMIT:]]),
    "send": lambda conn, _, memory: conn.send(memory),
    "send bytes": lambda conn, _, memory: conn.send(bytearray(len(memory))),
    "batch read": lambda conn, remote, memory: conn.batch().read(remote, into=memory),
    "batch write": lambda conn, remote, memory: conn.batch().write(remote, memory),
    "batch send": lambda conn, _, memory: conn.batch().send(memory),
    "read_many": lambda conn, remote, memory: conn.batch().read_many(remote, [0], len(memory), into=memory),
    "write_many": lambda conn, remote, memory: conn.batch().write_many(remote, [0], len(memory), data=memory),
}


@pytest.mark.parametrize("name", _TOO_LARGE)
async def test_more_than_a_request_carries(name: str) -> None:
    """What one request of the device can't carry is refused at the call; the connection is unharmed."""
    with _small_requests():
        async with pair() as ends:
            client = ends.client
            region, remote = offer(ends.server, LIMIT + 1)
            memory = client.alloc(LIMIT + 1)
            with pytest.raises(ValueError, match="request"):
                _TOO_LARGE[name](client, remote, memory)
            assert client.qp.in_flight == 0
            await client.read(remote[:LIMIT], into=memory[:LIMIT])
            await client.send(b"works")
            assert await ends.server.recv() == b"works"
            assert memory.view[:LIMIT] == pattern(LIMIT + 1)[:LIMIT]
            assert region.view == pattern(LIMIT + 1)


@pytest.mark.parametrize("where", ["connect", "accept"])
@pytest.mark.parametrize("recv_size", [1 << 50, 1 << 60, 1 << 70])
async def test_receives_that_no_memory_is_large_enough_for(where: str, recv_size: int) -> None:
    """Memory for the receives that can't be had is a DeviceError that says which parameters; nothing is left."""
    param = ConnParam(recv_size=recv_size)
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        before = _queue_pairs()
        for _ in range(3):
            if where == "connect":
                with pytest.raises(DeviceError, match="recv_size"):
                    await aiordma.connect(HOST, listener.port, device=DEVICE, param=param)
                continue
            connecting = asyncio.ensure_future(_connect(listener.port))
            with pytest.raises(DeviceError, match="recv_size"):
                await (await listener.get_request()).accept(param=param)
            with pytest.raises(RejectedError):
                await connecting
        assert _queue_pairs() == before


async def _connect(port: int) -> Connection:
    return await aiordma.connect(HOST, port, device=DEVICE)


def _queue_pairs() -> int:
    gc.collect()
    return sum(isinstance(thing, QueuePair) and not thing.closed for thing in gc.get_objects())


async def _nothing(_: Connection) -> None:
    """Handle a connection."""


@pytest.mark.parametrize("port", [-1, 65_536, 70_000, 1 << 40])
async def test_ports_that_cannot_be(port: int) -> None:
    """A port out of range is a ValueError that names it, wherever one is given; nothing is left open."""
    calls: list[Callable[[], Any]] = [
        lambda: aiordma.connect(HOST, port, device=DEVICE),
        lambda: aiordma.connect(HOST, 1, device=DEVICE, local_addr=(HOST, port)),
        lambda: aiordma.listen(HOST, port, device=DEVICE),
        lambda: aiordma.listen(None, port, device=DEVICE),
        lambda: aiordma.serve(_nothing, HOST, port, device=DEVICE),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=str(port)):
            await call()


@pytest.mark.parametrize("keepalive", [86_400.0, 1e9])
async def test_a_long_keepalive(keepalive: float) -> None:
    """A keep-alive longer than the system's longest is cut to that."""
    param = ConnParam(keepalive=keepalive)
    async with pair(client_param=param, server_param=param) as ends:
        await ends.client.send(b"works")
        assert await ends.server.recv() == b"works"
