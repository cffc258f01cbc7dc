"""ucmatose of rdma-core at the other end: many connections, some messages each way on every one, disconnects.

Its server sends first, to all connections when all are there; its client answers. It posts receives for all messages
before it connects or accepts, never another, and connects with an RNR retry count of 0. The server disconnects.

Four of them make the hundred connections: one process with more than 36 gets no completion queue from siw (tried with
ucmatose at both ends, too: ENOSPC).
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import aiordma
from aiordma import Connection, ConnParam
from tests.conformance.support import DEVICE, HOST, pattern
from tests.interop.support import connect_when_up, free_port, needs_rdma, program

pytestmark = needs_rdma

PROGRAMS = 4
CONNECTIONS = 25
MESSAGES = 10
SIZE = 100
PARAM = ConnParam(recv_size=SIZE, recv_depth=MESSAGES, max_send_wr=MESSAGES, responder_resources=1, initiator_depth=1)
OPTIONS = ("-c", str(CONNECTIONS), "-C", str(MESSAGES), "-S", str(SIZE))


def check(written: tuple[str, str]) -> None:
    """Check what ucmatose wrote."""
    assert "data transfers complete" in written[0]
    assert "return status 0" in written[0]


async def receive(connection: Connection) -> None:
    """Receive the messages of one side."""
    for _ in range(MESSAGES):
        assert len(await connection.recv()) == SIZE


async def send(connection: Connection) -> None:
    """Send the messages of one side."""
    await asyncio.gather(*(connection.send(pattern(SIZE, number)) for number in range(MESSAGES)))


async def test_their_servers() -> None:
    """A hundred connections of ours to ucmatose's servers: they send, we answer, they disconnect every one orderly."""
    ports = [free_port() for _ in range(PROGRAMS)]

    async def converse(connection: Connection) -> None:
        async with connection:
            await receive(connection)
            await send(connection)
            assert [message async for message in connection] == []

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(program("ucmatose", "-b", HOST, "-p", str(port), *OPTIONS)) for port in ports]
        async with contextlib.AsyncExitStack() as connected:
            connections = [
                await connected.enter_async_context(await connect_when_up(port, PARAM))
                for _ in range(CONNECTIONS)
                for port in ports  # in turns: a server with all its connections polls, and takes a core for it
            ]
            await asyncio.gather(*map(converse, connections))
        for serving in servers:
            check(await serving.end())


@pytest.mark.skipif(
    DEVICE == "soft",
    reason="soft: a responder must not send before the initiator has (RFC 5044), and ucmatose's client waits for it to",
)
async def test_their_clients() -> None:
    """A hundred connections of ucmatose's clients to our server: we send, they answer, we disconnect every one."""
    async with aiordma.listen(HOST, 0, device=DEVICE, param=PARAM) as listener:
        with contextlib.ExitStack() as stack:
            command = ["ucmatose", "-s", HOST, "-p", str(listener.port), *OPTIONS]
            clients = [stack.enter_context(program(*command)) for _ in range(PROGRAMS)]
            async with contextlib.AsyncExitStack() as connected:
                connections = [
                    await connected.enter_async_context(await (await listener.get_request()).accept())
                    for _ in range(PROGRAMS * CONNECTIONS)
                ]
                await asyncio.gather(*map(send, connections))
                await asyncio.gather(*map(receive, connections))
                await asyncio.gather(*(connection.close() for connection in connections))
            for connecting in clients:
                check(await connecting.end())
