"""What the tests of this folder share: waiting for a condition, and what a loop has open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiordma
from aiordma import BrokenError, Connection, ConnParam, Listener, RemoteRegion
from aiordma.device import loop_state
from tests.faults.raw_peer import RawListener, RawPeer

#: A region of a raw peer's: what its address and key are is up to the test.
REMOTE = RemoteRegion(0x1000, 1 << 30, 0x1234)


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until something is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - it shows in the state of what is tested, which knows no events
            await asyncio.sleep(0)


async def dial(port: int, host: str = "127.0.0.1") -> Connection:
    """Connect, as a coroutine that a task can be made of."""
    return await aiordma.connect(host, port)


async def both(listener: Listener) -> tuple[Connection, Connection]:
    """Connect to a listener of this process: the end that connected, and the one that accepted."""
    connecting = asyncio.create_task(dial(listener.port))
    server = await (await listener.get_request()).accept()
    return await connecting, server


async def closed(conn: Connection, *, timeout: float = 5.0) -> None:
    """Close, where it doesn't matter that the connection broke, and whether an operation told so before."""
    with contextlib.suppress(BrokenError):
        await conn.close(timeout=timeout)


@contextlib.asynccontextmanager
async def against_raw(answer: bytes | None = None, **param: Any) -> AsyncIterator[tuple[Connection, RawPeer]]:
    """A connection to a raw server, which has answered the Request and does nothing more by itself."""
    async with asyncio.timeout(30):
        with RawListener() as listener:
            answering = asyncio.create_task(listener.respond(answer))
            conn = await aiordma.connect("127.0.0.1", listener.port, param=ConnParam(**param))
            peer = await answering
        with peer:
            yield conn, peer
        await closed(conn)


def opened() -> tuple[int, int]:
    """Count what this loop has open: identifiers of the connection manager, and queue pairs."""
    state = loop_state()
    ids = [cm_id for channel in state._channels.values() for cm_id in channel.ids]  # type: ignore[attr-defined]
    qps = [qp for context in state._contexts.values() for cq in context._cqs for qp in cq.qps]
    return len(ids), len(qps)
