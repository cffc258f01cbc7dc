"""The device under test, and what each file of this folder needs of it.

The suite is written against the public face only. Which device it runs on is said by the environment:
AIORDMA_TEST_DEVICE (soft), AIORDMA_TEST_HOST (127.0.0.1) and AIORDMA_TEST_HOST6 (::1), addresses at which
this process reaches itself through that device. Where devices differ, the expectation follows Capabilities.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, Final

import numpy as np
import pytest

import aiordma
from aiordma import Access, Capabilities, Connection, ConnParam, MemoryRegion, RemoteRegion, WCStatus
from aiordma.testing import Pair, connected_pair

DEVICE: Final = os.environ.get("AIORDMA_TEST_DEVICE", "soft")
HOST: Final = os.environ.get("AIORDMA_TEST_HOST", "127.0.0.1")
HOST6: Final = os.environ.get("AIORDMA_TEST_HOST6", "::1")

#: Every remote right.
ALL: Final = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
#: Connections of the tests that open many. Where processors are emulated each takes a third of a second.
MANY: Final = int(os.environ.get("AIORDMA_TEST_MANY", "1000"))
#: A value that guard bytes have, and a pattern never ends with.
GUARD: Final = 0xA5


def capabilities() -> Capabilities:
    """Give the capabilities of the device under test; needs a running loop."""
    return aiordma.open_device(DEVICE).capabilities


def pair(
    *,
    client_param: ConnParam | None = None,
    server_param: ConnParam | None = None,
    host: str = HOST,
) -> AbstractAsyncContextManager[Pair]:
    """Connect two ends through the device under test."""
    return connected_pair(host=host, device=DEVICE, client_param=client_param, server_param=server_param)


@asynccontextmanager
async def pair_of_domains(
    client_pd: aiordma.ProtectionDomain | None = None, server_pd: aiordma.ProtectionDomain | None = None
) -> AsyncIterator[Pair]:
    """Connect two ends that have protection domains of their own."""
    async with aiordma.listen(HOST, 0, device=DEVICE, pd=server_pd) as listener:
        accepting = asyncio.create_task(accept_one(listener))
        connecting = aiordma.connect(HOST, listener.port, device=DEVICE, pd=client_pd)
        async with connecting as client, await accepting as server:
            yield Pair(client, server, listener)


async def accept_one(listener: aiordma.Listener, private_data: bytes = b"") -> Connection:
    """Accept the next request."""
    return await (await listener.get_request()).accept(private_data=private_data)


def require(capability: str) -> None:
    """Skip, and say so, where the device under test lacks what the test is about; needs a running loop."""
    if not getattr(capabilities(), capability):
        pytest.skip(f"{DEVICE} lacks Capabilities.{capability}")


def refusal_reported() -> AbstractContextManager[object]:
    """Expect a refused WRITE's failure at the close, where the WRITE succeeded and the peer's reason is known."""
    if capabilities().write_fault_known:
        return contextlib.nullcontext()
    if not capabilities().remote_fault_known:
        return contextlib.suppress(aiordma.BrokenError)
    return pytest.raises(aiordma.BrokenError, match="ended")


def require_ipv6() -> None:
    """Skip, and say so, on a machine without the IPv6 address of the device under test."""
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind((HOST6, 0))
        except OSError as error:
            pytest.skip(f"no IPv6 address {HOST6} here: {error.strerror}")


def pattern(length: int, seed: int = 1) -> bytes:
    """Make bytes in which a shift, a swap or a repeat shows: its period is prime to every buffer's size."""
    index = np.arange(min(length, 65_537))
    block = ((index * 167 + seed * 59 + (index >> 8)) & 0xFF).astype(np.uint8).tobytes()
    return (block * (length // max(1, len(block)) + 1))[:length]


def offer(end: Connection, length: int, *, access: Access = ALL, seed: int = 1) -> tuple[MemoryRegion, RemoteRegion]:
    """Register memory filled with a pattern; gives it and its key."""
    region = end.alloc(length, access=access)
    region.view[:] = pattern(length, seed)
    return region, region.remote()


class Guarded:
    """A region between two stretches of guard bytes that aren't registered, in one piece of memory."""

    SIZE: Final = 512

    def __init__(self, end: Connection | aiordma.ProtectionDomain, length: int, access: Access = ALL) -> None:
        self.memory = mmap.mmap(-1, length + 2 * self.SIZE)
        self.memory[:] = bytes((GUARD,)) * len(self.memory)
        self.region = end.register(memoryview(self.memory)[self.SIZE : self.SIZE + length], access=access)
        self.region.view[:] = pattern(length)
        self.remote = self.region.remote()

    def check(self, content: bytes) -> None:
        """Assert that the region has this content, and the guards are as they were."""
        guard = bytes((GUARD,)) * self.SIZE
        assert self.memory[: self.SIZE] == guard
        assert self.memory[-self.SIZE :] == guard
        assert self.region.view == content


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Let the loop turn until a condition holds; it has no event of its own to wait for."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@contextlib.contextmanager
def refused(caps: Capabilities, status: WCStatus, words: str) -> Iterator[None]:
    """Expect that awaiting a READ or atomic in the block fails as DESIGN.md section 8 has it for this device.

    Args:
        caps: the requester's.
        status: of its completion, where the device knows.
        words: of the reason that an iWARP peer's Terminate gives.
    """
    if not caps.remote_fault_known:
        with pytest.raises((aiordma.FlushedError, aiordma.BrokenError)):
            yield
        return
    with pytest.raises(aiordma.RemoteError) as caught:
        yield
    assert caught.value.status == status
    if caps.transport == "iwarp":
        assert words in caught.value.reason
        assert words in str(caught.value)


async def ended(request: asyncio.Future[Any]) -> None:
    """Wait for a request whose failure only some devices know."""
    await asyncio.wait([request])
    request.exception()


async def check_write_refused(conn: Connection, writing: asyncio.Future[None], status: WCStatus, words: str) -> None:
    """Expect that a WRITE posted just now fails as DESIGN.md section 8 has it for this device."""
    caps = conn.capabilities
    if caps.write_fault_known:
        with refused(caps, status, words):
            await writing
        return
    with contextlib.suppress(*() if caps.remote_fault_known else (aiordma.RDMAError,)):
        await writing
    with pytest.raises(aiordma.BrokenError) as caught:
        await conn.recv()
    if caps.remote_fault_known:
        assert words in str(caught.value)
    with pytest.raises(aiordma.BrokenError):
        conn.write(RemoteRegion(0, 0, 0), b"")
