"""A peer whose host vanishes without a word is noticed by keep-alive. The hosts are network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

import aiordma
from aiordma import BrokenError, ConnectError, Connection, ConnParam, FlushedError, RemoteRegion, UnreachableError
from tests.faults.peers import BIG, peer
from tests.faults.support import closed, until

_NUMBERS = itertools.count()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Host:
    """A network namespace with one link to ours."""

    def __init__(self) -> None:
        name = f"aio{os.getpid() % 100_000}x{next(_NUMBERS)}"
        self.netns = name
        self._ours = f"{name}a"
        # Addresses for tests (RFC 2544), no real network has them; of each process its own: runs may be side by side.
        number = os.getpid() & 0x3FFF
        net = f"198.18.{number >> 6}"
        ours, self.address = (f"{net}.{(number & 0x3F) * 4 + end}" for end in (1, 2))
        _ip("netns", "add", name)
        try:
            _ip("link", "add", self._ours, "type", "veth", "peer", "name", f"{name}b", "netns", name)
            _ip("address", "add", f"{ours}/30", "dev", self._ours)
            _ip("link", "set", self._ours, "up")
            _ip("-n", name, "address", "add", f"{self.address}/30", "dev", f"{name}b")
            _ip("-n", name, "link", "set", f"{name}b", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def vanish(self) -> None:
        """Cut the link: from now on every packet is lost, and nobody is told.

        The far end goes down, so that ours still has its address and its route.
        """
        _ip("-n", self.netns, "link", "set", f"{self.netns}b", "down")

    def close(self) -> None:
        """Take it away. Its link goes with it."""
        with contextlib.suppress(OSError):
            _ip("link", "delete", self._ours)
        _ip("netns", "delete", self.netns)


@pytest.fixture
def host() -> Iterator[Host]:
    """Another host, for as long as the test lasts."""
    try:
        made = Host()
    except OSError as error:
        pytest.skip(f"network namespaces can't be made here ({error}): they need iproute2 and CAP_NET_ADMIN")
    yield made
    made.close()


@contextlib.asynccontextmanager
async def _connected(host: Host, param: ConnParam) -> AsyncIterator[tuple[Connection, RemoteRegion]]:
    """A connection to a server on that host."""
    async with peer("serving-anywhere", netns=host.netns) as process:
        conn = await aiordma.connect(host.address, int(await process.said()), param=param)
        yield conn, RemoteRegion.from_bytes(conn.peer_private_data)
        await closed(conn, timeout=0.1)


async def test_idle(host: Host) -> None:
    """An idle connection ends some keep-alive intervals after its peer's host vanished, and says why."""
    async with _connected(host, ConnParam(keepalive=1)) as (conn, remote):
        assert await conn.read(remote[:8]) == b"r" * 8
        host.vanish()
        async with asyncio.timeout(20):
            with pytest.raises(BrokenError) as caught:
                await conn.recv()
        assert not caught.value.orderly
        assert host.address in str(caught.value)


async def test_read_in_flight(host: Host) -> None:
    """A READ that was asked for before the host vanished ends too."""
    async with _connected(host, ConnParam(keepalive=1)) as (conn, remote):
        local = conn.alloc(BIG)
        reading = conn.read(remote, into=local)
        await until(lambda: local.view[0] == ord("r"))
        host.vanish()
        async with asyncio.timeout(20):
            with pytest.raises(FlushedError) as caught:
                await reading
        assert isinstance(caught.value.__cause__, BrokenError)
        assert local.view[BIG - 1] == 0
        with pytest.raises(BrokenError):
            await conn.recv()


async def test_write_in_flight(host: Host) -> None:
    """Data that isn't acknowledged any more ends the connection as keep-alive does, which TCP holds back meanwhile."""
    async with _connected(host, ConnParam(keepalive=1)) as (conn, remote):
        host.vanish()
        writing = conn.write(remote, conn.alloc(BIG))
        async with asyncio.timeout(20):
            with pytest.raises(FlushedError):
                await writing
            with pytest.raises(BrokenError):
                await conn.recv()


async def test_without_keepalive(host: Host) -> None:
    """With keepalive=None nobody asks; a close with a request in flight still ends at its time-out."""
    async with _connected(host, ConnParam(keepalive=None)) as (conn, remote):
        host.vanish()
        reading = conn.read(remote[:8])
        async with asyncio.timeout(20):
            await conn.close(timeout=0.1)
            with pytest.raises(FlushedError):
                await reading


async def test_connect_to_a_vanished_host(host: Host) -> None:
    """A connect to a host that isn't there ends by the time limit of the program, or as unreachable."""
    host.vanish()
    with pytest.raises((TimeoutError, UnreachableError)):
        async with asyncio.timeout(0.2):
            await aiordma.connect(host.address, 7471)


async def test_no_route() -> None:
    """An address that nothing leads to is unreachable, in words."""
    with pytest.raises(ConnectError) as caught:
        async with asyncio.timeout(20):
            await aiordma.connect("255.255.255.255", 7471)
    assert "255.255.255.255" in str(caught.value)
