"""How connections end with their device or domain, and how a failure that nobody saw is reported at the close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aiordma
from aiordma import (
    BrokenError,
    ClosedError,
    Connection,
    FlushedError,
    LocalError,
    RDMAError,
    RemoteError,
    RemoteRegion,
    WCStatus,
)
from aiordma.testing import Pair
from tests.conformance.support import (
    DEVICE,
    HOST,
    accept_one,
    capabilities,
    offer,
    pair,
    pair_of_domains,
    refusal_reported,
    until,
)

#: A key that no device has given.
FORGED = RemoteRegion(4096, 64, 0x12345)

# -- the device or the domain is closed ----------------------------------------------------------------------------


def _close_device(ends: Pair) -> None:
    ends.client.context.close()


def _close_domain(ends: Pair) -> None:
    ends.client.pd.close()


@contextlib.asynccontextmanager
async def _domains() -> AsyncIterator[Pair]:
    """Connect two ends of which each has a domain of its own."""
    context = aiordma.open_device(DEVICE)
    domains = aiordma.ProtectionDomain(context), aiordma.ProtectionDomain(context)
    async with pair_of_domains(*domains) as ends:
        yield ends
    for domain in domains:
        domain.close()


@pytest.mark.parametrize("close", [_close_device, _close_domain])
async def test_closed_under_connections(close: Callable[[Pair], None]) -> None:
    """Everything in flight or waiting ends when its device or domain is closed, and the connection closes at once."""
    async with asyncio.timeout(20), _domains() as ends:
        client = ends.client
        _, remote = offer(ends.server, 1 << 20)
        sink = client.alloc(1 << 20)
        requests: list[asyncio.Future[Any]] = [client.read(remote, into=sink) for _ in range(300)]
        requests.append(client.barrier())
        receiving = asyncio.ensure_future(client.recv())
        waiting = [asyncio.ensure_future(wait) for wait in (sink.idle(), client.qp.settled(), client.qp.flushed())]
        await asyncio.sleep(0)
        close(ends)
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        # Some were with the device, which may have been faster than the end.
        assert {type(outcome) for outcome in outcomes} - {type(None)} == {FlushedError}
        assert isinstance(outcomes[-1], FlushedError)
        await asyncio.gather(*waiting)
        with pytest.raises(ClosedError):
            await receiving
        uses: list[Callable[[], object]] = [
            lambda: client.send(b"x"), lambda: client.write(remote, b"x"), client.barrier,
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(ClosedError):
                use()
        with pytest.raises(ClosedError):
            await client.recv()
        await client.close(timeout=1000)
        if close is _close_domain:
            with pytest.raises(BrokenError):
                await ends.server.recv()


async def test_device_opened_again() -> None:
    """After a device was closed it can be opened again in the same loop, and works."""
    async with pair() as ends:
        old = ends.client.context
        old.close()
        old.close()
    with pytest.raises(ClosedError):
        aiordma.ProtectionDomain(old)
    assert aiordma.open_device(DEVICE) is not old
    async with pair() as ends:
        await ends.client.send(b"works")
        assert await ends.server.recv() == b"works"


async def test_regions_end_with_their_domain() -> None:
    """Closing a domain deregisters its regions; another domain's go on."""
    context = aiordma.open_device(DEVICE)
    mine, other = aiordma.ProtectionDomain(context), aiordma.ProtectionDomain(context)
    regions = [mine.register(bytearray(8), access=aiordma.Access.REMOTE_WRITE), mine.register(bytearray(8))]
    theirs = other.register(bytearray(8))
    mine.close()
    mine.close()
    assert [region.closed for region in (*regions, theirs)] == [True, True, False]
    other.close()


# -- a failure that nobody was told --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _served() -> AsyncIterator[int]:
    """Listen with a peer that receives until the connection ends, whatever way; gives the port."""

    async def handle(conn: Connection) -> None:
        with contextlib.suppress(BrokenError):
            await conn.recv()

    async with aiordma.serve(handle, HOST, 0, device=DEVICE) as server:
        yield server.port


async def _write_refused(conn: Connection) -> None:
    """Do a WRITE that the peer's device refuses; some devices fail it, on others it succeeds all the same."""
    with contextlib.suppress(RemoteError if conn.capabilities.remote_fault_known else RDMAError):
        await conn.write(FORGED, b"lost")


async def test_refused_write_is_reported_at_the_end_of_the_block() -> None:
    """A block that ends with a refused WRITE that nobody was told of raises."""
    async with _served() as port:
        with refusal_reported():
            async with aiordma.connect(HOST, port, device=DEVICE) as conn:
                await _write_refused(conn)
        assert conn.qp.closed


_DROPPED: dict[str, Callable[[Connection, aiordma.MemoryRegion], object]] = {
    "read": lambda conn, sink: conn.read(FORGED, into=sink),
    "send": lambda conn, _: conn.send(b""),
    "barrier": lambda conn, _: conn.barrier(),
}


@pytest.mark.parametrize("then", _DROPPED)
async def test_refused_write_behind_which_others_are_dropped(then: str) -> None:
    """Requests behind it whose futures were dropped are only flushed: the failure is reported all the same."""
    async with _served() as port:
        with refusal_reported():
            async with aiordma.connect(HOST, port, device=DEVICE) as conn:
                sink = conn.alloc(8)
                await _write_refused(conn)
                if not conn.capabilities.write_fault_known:
                    _DROPPED[then](conn, sink)


async def test_refused_write_is_reported_by_close() -> None:
    """close() raises it too, once; the connection is closed all the same."""
    async with _served() as port:
        conn = await aiordma.connect(HOST, port, device=DEVICE)
        await _write_refused(conn)
        with refusal_reported():
            await conn.close()
        assert conn.qp.closed
        await conn.close()


async def test_refused_write_does_not_hide_an_exception() -> None:
    """An exception of the body is what a block raises, whatever its close has to say."""
    async with _served() as port:
        conn = await aiordma.connect(HOST, port, device=DEVICE)

        async def body() -> None:
            async with conn:
                await _write_refused(conn)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await body()
        assert conn.qp.closed
        await conn.close()


async def test_failure_that_was_told() -> None:
    """A failure that a call raised isn't raised again by the close."""
    async with _served() as port, aiordma.connect(HOST, port, device=DEVICE) as conn:
        await _write_refused(conn)
        with pytest.raises(BrokenError):
            await conn.recv()
    async with _served() as port, aiordma.connect(HOST, port, device=DEVICE) as conn:
        with pytest.raises((RemoteError, FlushedError)):
            await conn.read(FORGED)
        with contextlib.suppress(BrokenError) if not capabilities().remote_fault_known else contextlib.nullcontext():
            await conn.close()


async def test_batch_that_failed_was_told() -> None:
    """A failure that a batch raised isn't raised again by the close."""
    async with _served() as port, aiordma.connect(HOST, port, device=DEVICE) as conn:
        with pytest.raises((RemoteError, FlushedError, ExceptionGroup)):
            async with conn.batch() as batch:
                batch.read(FORGED[:8], into=conn.alloc(8))
        if not capabilities().remote_fault_known:
            with contextlib.suppress(BrokenError):
                await conn.close()


async def test_end_without_a_fault() -> None:
    """A connection that its peer closed is closed without an error, and one that had no trouble too."""
    async with pair() as ends:
        await ends.server.close()
        await until(ends.client.is_closing)
        await ends.client.close()


async def test_refused_peer_is_the_peers_fault() -> None:
    """The side that refused a request of its peer's has nothing to report."""
    async with aiordma.listen(HOST, 0, device=DEVICE) as listener:
        accepting = asyncio.create_task(accept_one(listener))
        async with aiordma.connect(HOST, listener.port, device=DEVICE) as client:
            server = await accepting
            await _write_refused(client)
            await until(server.is_closing)
            await server.close()
            with contextlib.suppress(BrokenError):
                await client.close()


async def test_handler_is_done_with_its_connection() -> None:
    """A server's handler that returned isn't told how its connection ended: nobody is there to listen."""
    done = asyncio.Event()

    async def handle(conn: Connection) -> None:
        await _write_refused(conn)
        done.set()

    async with (
        aiordma.serve(handle, HOST, 0, device=DEVICE) as server,
        aiordma.connect(HOST, server.port, device=DEVICE) as client,
    ):
        await done.wait()
        await until(lambda: not server.connections)
        with contextlib.suppress(BrokenError):
            await client.recv()


async def test_cause_of_a_flush_is_the_failure() -> None:
    """A request that is flushed because one behind it failed names that failure as its cause."""
    async with pair() as ends:
        _, remote = offer(ends.server, 1 << 20)
        client = ends.client
        sink, gone = client.alloc(1 << 20), client.register(bytearray(64))
        into = gone[:]
        gone.deregister()
        flushed, bad = client.read(remote, into=sink), client.read(remote[:64], into=into, fence=True)
        errors = await asyncio.gather(flushed, bad, return_exceptions=True)
        failure = client.qp.failure
        assert isinstance(failure, LocalError)
        assert failure.status == WCStatus.LOC_PROT_ERR
        assert errors[1] is failure
        # Where the device had done the first one before, there is nothing to name.
        assert errors[0] is None or (isinstance(errors[0], FlushedError) and errors[0].__cause__ is failure)
