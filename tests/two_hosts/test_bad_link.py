"""A link that loses packets, and one that is cut: every byte arrives, or every request ends with why it can't."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import Access, BrokenError, Connection, ConnParam, FlushedError, RetryExceededError
from tests.two_hosts.support import DEVICE, FAR, HOST, needs_link, netem

pytestmark = needs_link

_ALL = Access.REMOTE_READ | Access.REMOTE_WRITE
_SIZES = (1, 1000, 4096, 65_536, 300_000)


async def _dial(port: int, param: ConnParam) -> Connection:
    return await aiordma.connect(HOST, port, device=DEVICE, param=param)


@asynccontextmanager
async def _across(param: ConnParam) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two ends across the link; gives the client and the server."""
    async with aiordma.listen(HOST, 0, device=FAR, param=param) as listener:
        connecting = asyncio.create_task(_dial(listener.port, param))
        server = await (await listener.get_request()).accept()
        client = await connecting
        try:
            yield client, server
        finally:
            for end in (client, server):
                with contextlib.suppress(BrokenError):  # the test looks at how it ends
                    await end.close(timeout=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("percent", [1, 10])
async def test_loss(percent: int) -> None:
    """With packets lost in both directions READs, WRITEs and SENDs of all sizes complete, and their checksums fit."""
    param = ConnParam(recv_size=max(_SIZES), recv_depth=8, ack_timeout=0.02, retry_count=7)
    async with _across(param) as (client, server):
        assert (client.device, server.device) == (DEVICE, FAR)
        region = server.alloc(max(_SIZES), access=_ALL)
        remote = region.remote()
        numbers = random.Random(percent)
        with netem("loss", f"{percent}%", interfaces=("va", "vb")):
            for size in _SIZES:
                data = numbers.randbytes(size)
                source, sink = client.register(bytearray(data)), client.alloc(size)
                await client.write(remote[:size], source)
                await client.read(remote[:size], into=sink)
                await client.send(source)
                message = await server.recv()
                want = zlib.crc32(data)
                assert [zlib.crc32(got) for got in (region.view[:size], sink.view, message)] == [want] * 3


async def test_short_cut() -> None:
    """A cut shorter than the retry time is no more than a delay."""
    async with _across(ConnParam(ack_timeout=0.5)) as (client, server):
        region = server.alloc(4096, access=_ALL)
        region.view[:] = b"r" * 4096
        with netem("loss", "100%"):
            reading = client.read(region.remote())
            await asyncio.wait([reading], timeout=1.0)
            assert not reading.done()
        assert await reading == b"r" * 4096


async def test_cut() -> None:
    """A cut longer than the retry time: RetryExceededError on the first request, flushes with it as cause behind."""
    async with _across(ConnParam(retry_count=1, ack_timeout=0.01)) as (client, server):
        remote = server.alloc(4096, access=_ALL).remote()
        sink = client.alloc(4096)
        with netem("loss", "100%"):
            futures: list[asyncio.Future[Any]] = [client.write(remote[:8], b"8 bytes!")]
            futures += [client.read(remote, into=sink) for _ in range(10)]
            futures += [client.send(b"x"), client.barrier()]
            first, *rest = await asyncio.gather(*futures, return_exceptions=True)
            assert isinstance(first, RetryExceededError)
            for part in ("RDMA_WRITE on QP", HOST, "RETRY_EXC_ERR", "reconnect"):
                assert part in str(first)
            for error in rest:
                assert isinstance(error, FlushedError)
                assert error.__cause__ is first
            await sink.idle()
            with pytest.raises(BrokenError) as caught:
                client.send(b"another")
            assert caught.value.__cause__ is first
            with pytest.raises(BrokenError):
                await client.recv()
    async with _across(ConnParam()) as (client, server):
        await client.send(b"the link is back")
        assert await server.recv() == b"the link is back"


async def test_connect_across_a_cut() -> None:
    """A connect into a cut link ends when the program's time limit says so, and leaves nothing."""
    async with aiordma.listen(HOST, 0, device=FAR) as listener:
        with netem("loss", "100%"), pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await _dial(listener.port, ConnParam())


async def test_idle_across_a_cut() -> None:
    """A connection on which nothing happens notices too: keep-alive is a WRITE of nothing, which isn't acknowledged."""
    async with _across(ConnParam(keepalive=0.2, retry_count=1, ack_timeout=0.01)) as (client, server):
        receiving = [asyncio.create_task(end.recv()) for end in (client, server)]
        await asyncio.wait(receiving, timeout=1.0)
        assert not any(task.done() for task in receiving)
        # Both directions: whoever notices first disconnects, and is not to be heard.
        with netem("loss", "100%", interfaces=("va", "vb")):
            for error in await asyncio.gather(*receiving, return_exceptions=True):
                assert isinstance(error, BrokenError)
                assert isinstance(error.__cause__, RetryExceededError)
