"""Private data and rejects."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma import ClosedError, ConnectRequest, RejectedError, RejectReason
from tests.conformance.support import DEVICE, HOST, accept_one, capabilities, pattern

SIZES = [0, 1, 4, 19, 20, 56, 57, 196, 197, 251, 252, 255, 256, 507, 508]


def check(received: bytes, sent: bytes) -> None:
    """Assert that private data arrived: raw on iWARP, maybe padded with zeros elsewhere."""
    assert received[: len(sent)] == sent
    if capabilities().transport == "iwarp":
        assert len(received) == len(sent)
    else:
        assert not received[len(sent) :].strip(b"\0")


@pytest.mark.parametrize("size", SIZES)
async def test_both_ways(size: int) -> None:
    """What fits goes both ways, as it is."""
    caps = capabilities()
    to_server = pattern(min(size, caps.max_connect_private_data), 1)
    to_client = pattern(min(size, caps.max_accept_private_data), 2)
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port, to_server))
        async with await accept_one(listener, to_client) as server, await connecting as client:
            check(server.peer_private_data, to_server)
            check(client.peer_private_data, to_client)


@pytest.mark.parametrize("size", SIZES)
async def test_reject(size: int) -> None:
    """A reject's private data and reason reach the client; both sides leave nothing behind."""
    data = pattern(min(size, capabilities().max_reject_private_data), 3)
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        await (await listener.get_request()).reject(data)
        with pytest.raises(RejectedError) as caught:
            await connecting
        assert caught.value.status == RejectReason.CONSUMER_DEFINED
        check(caught.value.private_data, data)


async def _connect(port: int, private_data: bytes = b"") -> aiordma.Connection:
    return await aiordma.connect(HOST, port, device=DEVICE, private_data=private_data)


async def test_too_long_to_connect() -> None:
    """One byte too much in connect() is a ValueError that says the limit, before anything is sent."""
    limit = capabilities().max_connect_private_data
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        with pytest.raises(ValueError, match=str(limit)):
            await _connect(listener.port, bytes(limit + 1))
        connecting = asyncio.ensure_future(_connect(listener.port, b"the first the server sees"))
        request = await listener.get_request()
        check(request.private_data, b"the first the server sees")
        async with await request.accept(), await connecting:
            pass


async def test_too_long_to_answer() -> None:
    """One byte too much in accept() or reject() is a ValueError, and the request can still be answered."""
    limit = capabilities().max_accept_private_data
    most = capabilities().max_reject_private_data
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        request = await listener.get_request()
        with pytest.raises(ValueError, match=str(limit)):
            await request.accept(private_data=bytes(limit + 1))
        with pytest.raises(ValueError, match=str(most)):
            await request.reject(bytes(most + 1))
        async with await request.accept(private_data=bytes(limit)), await connecting as client:
            check(client.peer_private_data, bytes(limit))


async def test_key_by_private_data() -> None:
    """The usual way to hand a region over: allocated on the request, its key in the accept."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        request = await listener.get_request()
        region = request.alloc(4096, access=aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE)
        async with (
            await request.accept(private_data=region.remote().to_bytes()) as server,
            await connecting as client,
        ):
            remote = aiordma.RemoteRegion.from_bytes(client.peer_private_data)
            await client.write(remote[:8], b"8 bytes!")
            await client.barrier()
            assert region.view[:8].tobytes() == b"8 bytes!"
            await client.close()
            await server.close()
        assert region.closed


async def test_request_says_who() -> None:
    """A request has the client's data and address, and the device and domain it came in by."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port, b"hello"))
        request = await listener.get_request()
        assert request.device == DEVICE
        assert request.pd is listener.pd
        assert request.local_addr[:2] == (HOST, listener.port)
        assert request.peer_addr[0] == HOST
        assert HOST in repr(request)
        async with await request.accept() as server, await connecting as client:
            assert server.pd is request.pd
            assert client.local_addr == server.peer_addr


@pytest.mark.parametrize("first", ["accept", "reject"])
async def test_answered_twice(first: str) -> None:
    """A second answer is a ClosedError."""

    async def answer(request: ConnectRequest, how: str) -> None:
        if how == "reject":
            await request.reject()
        else:
            await (await request.accept()).close()

    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        request = await listener.get_request()
        await answer(request, first)
        for how in ("accept", "reject"):
            with pytest.raises(ClosedError, match="before"):
                await answer(request, how)
        outcome = (await asyncio.gather(connecting, return_exceptions=True))[0]
        if isinstance(outcome, aiordma.Connection):
            await outcome.close()


async def test_rejected_request_frees_its_memory() -> None:
    """Regions made on a request are gone with a reject."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        connecting = asyncio.ensure_future(_connect(listener.port))
        request = await listener.get_request()
        region = request.register(bytearray(64), access=aiordma.Access.REMOTE_READ)
        await request.reject(b"no")
        assert region.closed
        with pytest.raises(RejectedError):
            await connecting


async def test_reject_then_accept_another() -> None:
    """A rejected client may try again at once."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        for turn in range(20):
            connecting = asyncio.ensure_future(_connect(listener.port, b"%d" % turn))
            request = await listener.get_request()
            check(request.private_data, b"%d" % turn)
            if turn % 2:
                async with await request.accept(), await connecting as client:
                    await client.barrier()
            else:
                await request.reject(b"later")
                with pytest.raises(RejectedError):
                    await connecting
