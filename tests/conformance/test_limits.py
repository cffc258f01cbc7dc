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
from tests.conformance.support import DEVICE, HOST, capabilities, offer, pair, pattern

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


async def _in_batch(conn: Connection, add: Callable[[aiordma.Batch], None]) -> None:
    async with conn.batch() as batch:
        add(batch)


_TOO_LARGE: dict[str, Callable[[Connection, RemoteRegion, MemoryRegion], Any]] = {
    "read": lambda c, r, m: c.read(r),
    "read into": lambda c, r, m: c.read(r, into=m),
    "read into, fenced": lambda c, r, m: c.read(r, into=m, fence=True),
    "read into pieces": lambda c, r, m: c.read(r, into=[m]),
    "read into many pieces": lambda c, r, m: c.read(r, into=[m[: LIMIT // 2], m[LIMIT // 2 :]]),
    "write": lambda c, r, m: c.write(r, m),
    "write bytes": lambda c, r, m: c.write(r, bytes(len(m))),
    "write pieces": lambda c, r, m: c.write(r, [m[:LIMIT], m[LIMIT:]]),
    "write with immediate": lambda c, r, m: c.write(r, m, imm=1),
    "send": lambda c, r, m: c.send(m),
    "send bytes": lambda c, r, m: c.send(bytearray(len(m))),
    "batch read": lambda c, r, m: _in_batch(c, lambda b: b.read(r, into=m)),
    "batch write": lambda c, r, m: _in_batch(c, lambda b: b.write(r, m)),
    "batch send": lambda c, r, m: _in_batch(c, lambda b: b.send(m)),
    "batch read_many": lambda c, r, m: _in_batch(c, lambda b: b.read_many(r, [0], len(m), into=m)),
    "batch write_many": lambda c, r, m: _in_batch(c, lambda b: b.write_many(r, [0], len(m), data=m)),
}


@pytest.mark.parametrize("name", _TOO_LARGE)
async def test_more_than_a_request_carries(name: str) -> None:
    """What one request of the device can't carry is refused at the call; the connection is unharmed."""
    with _small_requests():
        async with pair() as ends:
            client = ends.client
            region, remote = offer(ends.server, LIMIT + 1)
            memory = client.alloc(LIMIT + 1)
            with pytest.raises(ValueError, match="carries|a request"):
                await _TOO_LARGE[name](client, remote, memory)
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
        async with aiordma.connect(HOST, listener.port, device=DEVICE) if False else contextlib.nullcontext():
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
        assert capabilities().transport
        await ends.client.send(b"works")
        assert await ends.server.recv() == b"works"
