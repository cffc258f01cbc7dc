"""rping of rdma-core at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time

import pytest

import aiordma
from aiordma import Connection
from aiordma.tools import rping
from aiordma.tools.rping import Pinger, Responder, check_data, ping_data
from tests.conformance.support import DEVICE, HOST
from tests.interop.support import connect_when_up, free_port, needs_rdma, program

pytestmark = needs_rdma

SIZES = [23, 64, 1000, 4096, 65535]
COUNT = 5
CLIENTS = 20


def shown(out: str) -> list[bytes]:
    """Give the data of the pings that rping's -v showed."""
    return [line.encode() + b"\0" for line in re.findall(r"^(?:server )?ping data: (.*)$", out, re.MULTILINE)]


def data(size: int) -> list[bytes]:
    """Give the data of the pings that there should be."""
    return [ping_data(number, size) for number in range(COUNT)]


async def answer(connection: Connection) -> int:
    """Answer a client until it disconnects, with its data checked; gives how many pings that were."""
    responder = Responder(connection)
    while await responder.answer(validate=True) is not None:
        pass
    return responder.answered


@pytest.mark.parametrize("size", SIZES)
async def test_their_server(size: int) -> None:
    """Our client's pings go to rping's server and back, and it shows what they carried."""
    port = free_port()
    with program("rping", "-s", "-a", HOST, "-p", str(port), "-S", str(size), "-v") as serving:
        async with await connect_when_up(port, rping.PARAM) as connection:
            pinger = Pinger(connection, size)
            for number in range(COUNT):
                assert await pinger.ping(number) > 0
                check_data(pinger.returned, number)
        out, _ = await serving.end()
    assert shown(out) == data(size)


@pytest.mark.parametrize("size", SIZES)
async def test_their_client(size: int) -> None:
    """Rping's client pings our server, with its data right on both sides (-V), and disconnects orderly."""
    async with aiordma.listen(HOST, 0, device=DEVICE, param=rping.PARAM) as listener:
        with program(
            "rping", "-c", "-a", HOST, "-p", str(listener.port), "-S", str(size), "-C", str(COUNT), "-v", "-V"
        ) as pinging:
            async with await (await listener.get_request()).accept() as connection:
                assert await answer(connection) == COUNT
            out, _ = await pinging.end()
    assert shown(out) == data(size)


async def test_their_persistent_server() -> None:
    """Twenty clients of ours, all connected before the first ping, ping rping's persistent server at once."""
    port = free_port()
    with program("rping", "-s", "-P", "-a", HOST, "-p", str(port)):
        async with contextlib.AsyncExitStack() as stack:
            # One after the other: rping listens with a backlog of 3.
            connections = [
                await stack.enter_async_context(await connect_when_up(port, rping.PARAM)) for _ in range(CLIENTS)
            ]

            async def ping(connection: Connection) -> None:
                pinger = Pinger(connection, 64)
                for number in range(COUNT):
                    await pinger.ping(number)
                    check_data(pinger.returned, number)

            await asyncio.gather(*map(ping, connections))


async def test_their_clients_at_once() -> None:
    """Our persistent server serves twenty rping clients at once: none gets an answer before all are connected."""
    answered: list[int] = []
    all_here = asyncio.Event()

    async def handle(connection: Connection) -> None:
        if len(server.connections) == CLIENTS:
            all_here.set()
        await all_here.wait()
        answered.append(await answer(connection))

    async with aiordma.serve(handle, HOST, 0, device=DEVICE, param=rping.PARAM) as server:
        with contextlib.ExitStack() as stack:
            command = ["rping", "-c", "-a", HOST, "-p", str(server.port), "-C", str(COUNT), "-V"]
            clients = [stack.enter_context(program(*command)) for _ in range(CLIENTS)]
            for client in clients:
                await client.end()
    assert answered == [COUNT] * CLIENTS


def ping_command(*arguments: str) -> list[str]:
    """Give the command line of `aiordma ping`."""
    return [sys.executable, "-m", "aiordma", "ping", "--device", DEVICE, *arguments]


def test_command_to_their_server() -> None:
    """`aiordma ping -c` and `rping -s`, as a person types them."""
    port = free_port()
    command = ping_command("-c", "-a", HOST, "-p", str(port), "-C", str(COUNT), "-V")
    with program("rping", "-s", "-a", HOST, "-p", str(port)) as serving:
        # rping listens within a fraction of the time that a Python takes to start.
        with program(*command) as pinging:
            out, err = pinging.wait()
        serving.wait()
    assert not err
    assert f"{COUNT} pings of 64 bytes sent, {COUNT} came back, 0% lost" in out


def test_their_client_to_command() -> None:
    """`rping -c` and `aiordma ping -s`, as a person types them."""
    port = free_port()
    with program(*ping_command("-s", "-a", HOST, "-p", str(port), "-V")) as serving:
        while "listening" not in serving.read()[0]:
            assert serving.process.poll() is None
            time.sleep(0.05)
        with program("rping", "-c", "-a", HOST, "-p", str(port), "-C", str(COUNT), "-V") as pinging:
            pinging.wait()
        out, err = serving.wait()
    assert out.endswith(f": {COUNT} pings answered\n")
    assert not err
