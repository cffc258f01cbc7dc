"""What waits in the kernel doesn't hold up the loop; a device that goes is let go."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import aiordma
from aiordma.drivers.verbs.context import VerbsContext
from aiordma.enums import CMEventType
from tests.conformance.support import until
from tests.rdma.support import DEVICE, HOST, IWARP, PARAM, connection_manager, driver

#: An address of the device's network that nobody has: the test network's interfaces resolve no neighbours, so
#: packets to it leave, and nothing answers.
BLACK_HOLE = str(ipaddress.ip_address(HOST) + 97)


@pytest.fixture
def few_syns() -> Iterator[None]:
    """Have TCP give up soon."""
    setting = Path("/proc/sys/net/ipv4/tcp_syn_retries")
    before = setting.read_text()
    setting.write_text("1")
    yield
    setting.write_text(before)


async def test_loop_goes_on_while_a_connect_waits(few_syns: None) -> None:
    """A connect to a peer that isn't there leaves the loop free: a ticker of 50 ms goes on ticking.

    And destroying the identifier meanwhile returns at once, with the kernel's part following when its call returned.
    """
    if not IWARP:
        pytest.skip("InfiniBand and RoCE connect without waiting")
    async with connection_manager() as cm:
        client = await cm.resolved(1, BLACK_HOLE)
        threads = set(threading.enumerate())
        client.connect(driver(cm.qp()), PARAM, b"")
        (thread,) = set(threading.enumerate()) - threads
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert thread.is_alive()
        client.destroy()
        assert thread.is_alive()
        assert cm.channel._users == 1
        await asyncio.to_thread(thread.join)
        assert cm.channel._users == 0
        assert cm.queue(client).empty()


async def test_unreachable(few_syns: None) -> None:
    """A peer that isn't there is reported as unreachable, without words of a protocol it doesn't speak."""
    if not IWARP:
        pytest.skip("how long InfiniBand's and RoCE's CM asks is no setting: a minute and more")
    async with connection_manager() as cm:
        client = await cm.resolved(1, BLACK_HOLE)
        client.connect(driver(cm.qp()), PARAM, b"")
        event = await cm.next(client, CMEventType.UNREACHABLE)
        assert event.status < 0
        assert "MPA" not in event.reason


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[int, asyncio.Queue[asyncio.StreamWriter]]]:
    """Take TCP connections, and owe each an MPA Reply; gives the port, and what connected."""
    if not IWARP:
        pytest.skip("InfiniBand and RoCE have no MPA")
    connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    async with await asyncio.start_server(lambda _, writer: connected.put_nowait(writer), "0.0.0.0") as tcp:
        yield tcp.sockets[0].getsockname()[1], connected


async def test_destroy_while_the_reply_is_awaited() -> None:
    """Destroying an identifier whose peer owes an MPA Reply doesn't wait for that."""
    async with silent_server() as (port, connected), connection_manager() as cm:
        client = await cm.resolved(port)
        client.connect(driver(cm.qp()), PARAM, b"")
        writer = await connected.get()
        await until(lambda: not client.in_call)
        client.destroy()
        assert cm.channel._users == 1, "the kernel didn't wait: no reason for a thread"
        writer.transport.abort()
        await until(lambda: not cm.channel._users)


async def test_cancelled_while_the_reply_is_awaited() -> None:
    """Cancelling a connect whose peer owes an MPA Reply returns at once; the queue pair goes with the handshake."""
    async with silent_server() as (port, connected):
        connecting = asyncio.ensure_future(aiordma.connect(HOST, port, device=DEVICE))
        writer = await connected.get()
        context = aiordma.open_device(DEVICE).driver
        assert isinstance(context, VerbsContext)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert len(context.qps) == 1, "the cancel waited for the kernel, and the loop with it"
        writer.transport.abort()
        await until(lambda: not context.qps)


@pytest.fixture
def device_of_its_own() -> Iterator[dict[str, str]]:
    """Make a device that a test may remove; gives the environment of a program that uses it."""
    kind = DEVICE.rstrip("0123456789")
    name = f"{kind}cm"
    for command in (
        "ip link add aiocm type dummy",
        "ip address add 10.99.0.1/24 dev aiocm",
        "ip link set aiocm up",
        f"rdma link add {name} type {kind} netdev aiocm",
    ):
        subprocess.run(command.split(), check=True)
    yield {**os.environ, "AIORDMA_TEST_DEVICE": name, "AIORDMA_TEST_HOST": "10.99.0.1"}
    subprocess.run(["ip", "link", "delete", "aiocm"], check=True)


async def test_device_removed(device_of_its_own: dict[str, str]) -> None:
    """An identifier of a removed device is told, can be destroyed, and the removal comes to its end."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.rdma.removal", env=device_of_its_own, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()
    name = device_of_its_own["AIORDMA_TEST_DEVICE"]
    assert output.decode().splitlines() == [
        f"the RDMA device {name} was removed",
        "rdma link delete returned 0",
        f"found anew: {name}",
    ]
    assert program.returncode == 0
