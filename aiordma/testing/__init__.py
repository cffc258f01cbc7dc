"""For tests of aiordma and of programs that use it: a pair of connected endpoints in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from attrs import frozen

from aiordma.connection import Connection
from aiordma.connector import connect
from aiordma.errors import BrokenError
from aiordma.listener import Listener, listen
from aiordma.types import ConnParam

__all__ = ["Pair", "connected_pair"]


@frozen
class Pair:
    """Two ends of one connection."""

    #: The end that connected.
    client: Connection
    #: The end that accepted.
    server: Connection
    #: The listener it was accepted from, still listening.
    listener: Listener


@asynccontextmanager
async def connected_pair(
    *,
    host: str = "127.0.0.1",
    device: str | None = None,
    client_param: ConnParam | None = None,
    server_param: ConnParam | None = None,
) -> AsyncIterator[Pair]:
    """Connect two endpoints in this process; both are closed at the end of the block."""
    async with listen(host, 0, device=device, param=server_param) as listener:

        async def dial() -> Connection:
            return await connect(host, listener.port, device=device, param=client_param)

        connecting = asyncio.create_task(dial())
        try:
            request = await listener.get_request()
            server = await request.accept()
            client = await connecting
        except BaseException:
            connecting.cancel()
            raise
        try:
            yield Pair(client, server, listener)
        finally:
            for end in (client, server):
                with suppress(BrokenError):  # how it ends is the test's to look at, in the block
                    await end.close()
