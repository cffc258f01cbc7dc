"""Large messages: the receiver READs them from the sender's memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from aiordma.connection import Connection
from aiordma.enums import Access
from aiordma.errors import BrokenError, RDMAError
from aiordma.local_memory import LOCAL, Memory
from aiordma.messages.protocol import Offer
from aiordma.types import Buffer

__all__ = ["Rendezvous", "settled"]

_T = TypeVar("_T")

#: Bytes of one READ, and READs in flight for one message.
_READ_SIZE: Final = 4 << 20
_READS: Final = 4


class Rendezvous:
    """READs what a peer offers, each message in a task of its own: it goes on whoever waits for it.

    Attributes:
        tasks: that are READing.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._read_size = min(_READ_SIZE, connection.capabilities.max_msg_size)
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[Any]] = set()

    def fetch(self, offer: Offer) -> asyncio.Task[bytes]:
        """Begin to READ a message into the very bytes that are the task's result."""
        return self._spawn(self._fetch(offer))

    def fetch_into(self, offer: Offer, buffer: Memory | Buffer, view: memoryview) -> asyncio.Task[None]:
        """Begin to READ a message into a buffer, of which this is the view; it is registered if it isn't yet."""
        return self._spawn(self._fetch_into(offer, buffer, view))

    async def _fetch(self, offer: Offer) -> bytes:
        region = self._connection.pd.alloc_bytes(offer.length)
        try:
            await self._read(offer, region)
        finally:
            region.deregister()
        return region.data

    async def _fetch_into(self, offer: Offer, buffer: Memory | Buffer, view: memoryview) -> None:
        pd = self._connection.pd
        if isinstance(buffer, LOCAL):
            region = buffer.region
            if region.writable and region.pd is pd and not region.closed:
                await self._read(offer, buffer[: offer.length])
                return
        sink = pd.register(view, access=Access.LOCAL_WRITE)
        try:
            await self._read(offer, sink)
        finally:
            sink.deregister()

    async def _read(self, offer: Offer, sink: Memory) -> None:
        """READ a message in pieces, several at once; at its end no READ is in flight."""
        reads: deque[asyncio.Future[Any]] = deque()
        start = 0
        try:
            for remote in offer.regions:
                for begin in range(0, remote.length, self._read_size):
                    piece = remote[begin : begin + self._read_size]
                    if len(reads) == _READS:
                        await reads.popleft()
                    reads.append(self._connection.read(piece, into=sink[start : start + piece.length]))
                    start += piece.length
            while reads:
                await reads.popleft()
        except (OSError, RDMAError) as error:
            await asyncio.gather(*reads, return_exceptions=True)
            raise BrokenError(
                f"a message of {offer.length} bytes couldn't be READ from the memory of "
                f"{self._connection.peer_addr}: {error}"
            ) from error

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it may have been cancelled


async def settled(task: asyncio.Task[_T]) -> _T:
    """Wait for a task without cancelling it."""
    await asyncio.wait((task,))
    return task.result()
