"""What an idle connection costs, and whether a thousand of them work."""

from __future__ import annotations

import asyncio
import gc
import resource
import tracemalloc
from typing import Any

import uvloop

import aiordma
from aiordma import Connection, ConnParam

COUNT = 1000
#: Receive buffers of 1 MiB slabs would drown what is measured: these are small, and taken off.
PARAM = ConnParam(recv_size=256, recv_depth=4)


async def _measure() -> tuple[float, int]:
    """Connect COUNT clients to one server in this process; gives KiB per connection and end, and replies received."""

    async def echo(conn: Connection) -> None:
        async for message in conn:
            await conn.send(message)

    async with aiordma.serve(echo, "127.0.0.1", 0, device="soft", param=PARAM, backlog=1024) as server:
        async with aiordma.connect("127.0.0.1", server.port, device="soft", param=PARAM) as first:
            await first.send(b"warm")
            await first.recv()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        connections = []
        for _ in range(COUNT // 50):
            opening = (_connect(server.port) for _ in range(50))
            connections += await asyncio.gather(*opening)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        replies = 0
        for conn in connections:
            await conn.send(b"hello")
            replies += await conn.recv() == b"hello"
        await asyncio.gather(*(conn.close() for conn in connections))
    return used / 1024 / (2 * COUNT), replies


async def _connect(port: int) -> Connection:
    return await aiordma.connect("127.0.0.1", port, device="soft", param=PARAM)


def footprint() -> list[dict[str, Any]]:
    """Measure, as entries for bench.json."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * COUNT)), hard))
    kib, replies = uvloop.run(_measure())
    return [
        {"name": "idle connection, KiB of Python memory per end", "ours": round(kib, 1), "theirs": None,
         "ratio": None, "goal": "< 64", "met": kib < 64},
        {"name": "connections to one server that work", "ours": replies, "theirs": None,
         "ratio": None, "goal": f"= {COUNT}", "met": replies == COUNT},
    ]  # fmt: skip
