"""The other host is killed outright: each connection notices, whatever it is doing, and its successor is reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

import aiordma
from aiordma import BrokenError, ConnectError, Connection, ConnParam, FlushedError, RemoteRegion, RetryExceededError
from tests.two_hosts.serving import OFFERED
from tests.two_hosts.support import DEVICE, HOST, Peer, needs_peer

pytestmark = [needs_peer, pytest.mark.timeout(600)]

_PORT = 7311
#: Noticed after a second without traffic, or 0.3 s with some: each retry takes a little longer than the time-out.
_PARAM = ConnParam(keepalive=1.0, retry_count=3, ack_timeout=0.1)


def _serve(peer: Peer) -> None:
    job = peer.start(f"exec python3 -m tests.two_hosts.serving {HOST} {_PORT}")
    job.wait_started()
    while "serving" not in job.output:  # no event crosses 9p
        time.sleep(0.1)


async def _dial() -> Connection:
    return await aiordma.connect(HOST, _PORT, device=DEVICE, param=_PARAM)


async def _idle(conn: Connection) -> None:
    await conn.recv()


async def _reading(conn: Connection) -> None:
    remote = RemoteRegion.from_bytes(conn.peer_private_data)
    sink = conn.alloc(OFFERED)
    try:
        while True:
            await conn.read(remote, into=sink)
    finally:
        await sink.idle()


async def _echoing(conn: Connection) -> None:
    while True:
        await conn.send(b"echo")
        await conn.recv()


def test_every_connection_notices() -> None:
    """Idle, in READs, in messages: each ends with RetryExceededError or due to it; a host that is back serves."""
    # Not a coroutine test: conftest.py gives those 50 s, and the other host takes longer to boot.
    peer = Peer()
    _serve(peer)
    asyncio.run(_die(peer))
    peer.boot()
    _serve(peer)
    asyncio.run(_works())


async def _die(peer: Peer) -> None:
    conns = [await _dial() for _ in range(3)]
    noticed: dict[str, float] = {}

    async def watch(use: Callable[[Connection], Awaitable[None]], conn: Connection) -> None:
        try:
            await use(conn)
        finally:
            noticed[use.__name__] = time.monotonic()

    uses = (_idle, _reading, _echoing)
    watching = [asyncio.create_task(watch(use, conn)) for use, conn in zip(uses, conns, strict=True)]
    await asyncio.wait(watching, timeout=1.0)  # in which each does what it does
    assert not any(task.done() for task in watching)
    await asyncio.to_thread(peer.die)
    died = time.monotonic()
    async with asyncio.timeout(60):
        errors = await asyncio.gather(*watching, return_exceptions=True)
    print("noticed after", {use: f"{at - died:.1f} s" for use, at in noticed.items()})
    for conn, error in zip(conns, errors, strict=True):
        assert isinstance(error, (RetryExceededError, FlushedError, BrokenError))
        assert isinstance(conn.qp.failure, RetryExceededError)
        assert conn.qp.failure in (error, error.__cause__)
    async with asyncio.timeout(30):
        await asyncio.gather(*[conn.close(timeout=1) for conn in conns])
    with pytest.raises((TimeoutError, ConnectError)):
        async with asyncio.timeout(2):
            await _dial()


async def _works() -> None:
    async with asyncio.timeout(60), await _dial() as conn:
        await conn.send(b"back")
        assert await conn.recv() == b"back"
