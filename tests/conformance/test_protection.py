"""What the peer may not do: the table of DESIGN.md section 8, row by row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from attrs import frozen

import aiordma
from aiordma import (
    Access,
    BrokenError,
    Connection,
    FlushedError,
    ProtectionDomain,
    RDMAError,
    RemoteError,
    RemoteRegion,
    WCStatus,
)
from aiordma.testing import Pair
from tests.conformance.support import (
    ALL,
    DEVICE,
    HOST,
    Guarded,
    capabilities,
    check_write_refused,
    offer,
    pair,
    pattern,
    refused,
    require,
)

LENGTH = 4096
_TOP = 1 << 64


@frozen
class Bad:
    """A key that isn't good."""

    #: Made of the key of a good region.
    change: Callable[[RemoteRegion], RemoteRegion]
    #: Words of the reason that an iWARP peer gives.
    words: str
    access: Access = ALL
    other_domain: bool = False
    stale: bool = False


def same(remote: RemoteRegion) -> RemoteRegion:
    """Give the key as it is."""
    return remote


def shifted(by: int) -> Callable[[RemoteRegion], RemoteRegion]:
    """Make a change of the address."""
    return lambda remote: RemoteRegion(remote.addr + by, remote.length, remote.rkey)


CASES = {
    "wrong key": Bad(lambda remote: RemoteRegion(remote.addr, LENGTH, remote.rkey ^ 0x100), "invalid STag"),
    "key zero": Bad(lambda remote: RemoteRegion(remote.addr, LENGTH, 0), "invalid STag"),
    "stale key": Bad(same, "invalid STag", stale=True),
    "other domain": Bad(same, "protection domain", other_domain=True),
    "below by one": Bad(shifted(-1), "base or bounds"),
    "above by one": Bad(shifted(1), "base or bounds"),
    "below by its length": Bad(shifted(-LENGTH), "base or bounds"),
    "above by its length": Bad(shifted(LENGTH), "base or bounds"),
    "address zero": Bad(lambda remote: RemoteRegion(0, LENGTH, remote.rkey), "base or bounds"),
    "end of the address space": Bad(lambda remote: RemoteRegion(_TOP - LENGTH, LENGTH, remote.rkey), "base or bounds"),
    "local key only": Bad(same, "access rights", access=Access.LOCAL_WRITE),
}
READS = CASES | {
    "no right": Bad(same, "access rights", access=Access.REMOTE_WRITE | Access.REMOTE_ATOMIC),
}
WRITES = CASES | {
    "no right": Bad(same, "access rights", access=Access.REMOTE_READ | Access.REMOTE_ATOMIC),
    "read only": Bad(same, "access rights", access=Access.REMOTE_READ),
}
ATOMICS = {name: case for name, case in CASES.items() if "by one" not in name} | {
    "no right": Bad(same, "access rights", access=Access.REMOTE_READ | Access.REMOTE_WRITE),
    "below by eight": Bad(shifted(-8), "base or bounds"),
    "above by eight": Bad(shifted(LENGTH), "base or bounds"),
}


@asynccontextmanager
async def misused(case: Bad) -> AsyncIterator[tuple[Pair, RemoteRegion]]:
    """Offer a guarded region and its bad key; in the end nothing has changed, and others work on."""
    async with pair() as other, pair() as ends:
        domain = ProtectionDomain(ends.server.context) if case.other_domain else ends.server.pd
        guarded = Guarded(domain, LENGTH, case.access)
        bad = case.change(guarded.remote)
        _, good = offer(other.server, 100)
        if case.stale:
            guarded.region.deregister()
        yield ends, bad
        guarded.check(pattern(LENGTH))
        assert await other.client.read(good) == pattern(100)
        await other.client.write(good, b"goes on")
        await other.client.send(b"goes on")
        assert await other.server.recv() == b"goes on"
        await guarded.region.close()
        if case.other_domain:
            domain.close()


async def check_ended(ends: Pair) -> None:
    """Both ends of the connection at fault know that it ended, and close."""
    for end in (ends.client, ends.server):
        with pytest.raises(BrokenError):
            await end.recv()
        with pytest.raises(BrokenError):
            end.send(b"")
        with pytest.raises(BrokenError):
            await end.drain()
        await end.close()


@pytest.mark.parametrize("name", READS)
async def test_read(name: str) -> None:
    """A READ that isn't allowed fails with the reason, brings nothing, and ends that connection only."""
    case = READS[name]
    if not case.access & Access.REMOTE_READ:
        require("read_access_checked")
    async with misused(case) as (ends, bad):
        sink = ends.client.alloc(LENGTH)
        sink.view[:] = bytes(LENGTH)
        with refused(ends.client.capabilities, WCStatus.REM_ACCESS_ERR, case.words):
            await ends.client.read(bad, into=sink)
        assert sink.view == bytes(LENGTH)
        await check_ended(ends)


@pytest.mark.parametrize("name", WRITES)
async def test_write(name: str) -> None:
    """A WRITE that isn't allowed changes nothing; the writer learns of it as its device can tell."""
    case = WRITES[name]
    writable = case.access & (Access.LOCAL_WRITE | Access.REMOTE_ATOMIC)
    if writable and not case.access & Access.REMOTE_WRITE and capabilities().read_sink_needs_remote_write:
        pytest.skip(f"on {DEVICE} what may be read into may be written to (Capabilities.read_sink_needs_remote_write)")
    async with misused(case) as (ends, bad):
        writing = ends.client.write(bad, pattern(LENGTH, 7))
        await check_write_refused(ends.client, writing, WCStatus.REM_ACCESS_ERR, case.words)
        await check_ended(ends)


@pytest.mark.parametrize("name", ATOMICS)
async def test_atomic(name: str) -> None:
    """An atomic that isn't allowed fails with the reason, and changes nothing."""
    case = ATOMICS[name]
    async with misused(case) as (ends, bad):
        if not ends.client.capabilities.atomics:
            return  # test_device asserts what happens then
        with refused(ends.client.capabilities, WCStatus.REM_ACCESS_ERR, case.words):
            await ends.client.fetch_add(bad, 1)
        await check_ended(ends)


@pytest.mark.parametrize("size", [LENGTH, 100_000])
@pytest.mark.parametrize("past", [1, 8, 10_000])
async def test_read_past_the_end(size: int, past: int) -> None:
    """A READ that starts within the region and ends behind it brings nothing, not even what is within."""
    async with pair() as ends:
        guarded = Guarded(ends.server, size)
        bad = RemoteRegion(guarded.remote.addr, size + past, guarded.remote.rkey)
        with refused(ends.client.capabilities, WCStatus.REM_ACCESS_ERR, "base or bounds"):
            await ends.client.read(bad)
        guarded.check(pattern(size))


@pytest.mark.parametrize("past", [1, 4096])
async def test_write_past_the_end(past: int) -> None:
    """A WRITE that ends behind the region changes nothing behind it."""
    async with pair() as ends:
        guarded = Guarded(ends.server, 200_000)
        bad = RemoteRegion(guarded.remote.addr, 200_000 + past, guarded.remote.rkey)
        writing = ends.client.write(bad, ends.client.register(pattern(200_000 + past, 5)))
        await asyncio.gather(writing, return_exceptions=True)
        with pytest.raises(BrokenError):
            await ends.client.recv()
        # What of it is within may have been placed, packet by packet.
        guarded.check(guarded.region.view.tobytes())


async def test_zero_length_is_not_checked() -> None:
    """READ and WRITE of nothing name no memory: any key will do."""
    async with pair() as ends:
        nothing = RemoteRegion(12345, 0, 0xDEAD)
        assert await ends.client.read(nothing) == b""
        await ends.client.write(nothing, b"")
        await ends.client.barrier()


async def test_what_is_before_and_behind() -> None:
    """Requests before the refused one succeed; those behind it flush, the failure is their cause."""
    async with pair() as ends:
        _, remote = offer(ends.server, LENGTH)
        bad = RemoteRegion(remote.addr, 8, remote.rkey ^ 1)
        before = [ends.client.read(remote[:8]) for _ in range(20)]
        failing = ends.client.read(bad)
        behind = [ends.client.read(remote[:8]) for _ in range(400)]
        outcomes = await asyncio.gather(*before, failing, *behind, return_exceptions=True)
        if ends.client.capabilities.remote_fault_known:
            assert outcomes[:20] == [pattern(8)] * 20
            assert isinstance(outcomes[20], RemoteError)
        for outcome in outcomes[21:]:
            assert isinstance(outcome, FlushedError)
            assert outcome.status == WCStatus.WR_FLUSH_ERR
            assert isinstance(outcome.__cause__, RDMAError)
        if ends.client.capabilities.remote_fault_known:
            assert {outcome.__cause__ for outcome in outcomes[21:] if isinstance(outcome, FlushedError)} == {
                outcomes[20]
            }
        with pytest.raises(BrokenError) as caught:
            ends.client.read(remote)
        assert isinstance(caught.value.__cause__, RDMAError)


async def test_error_fields() -> None:
    """The error says what was posted, on which queue pair, to whom, and what to do."""
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        with pytest.raises((RemoteError, FlushedError)) as caught:
            await ends.client.read(RemoteRegion(remote.addr, 8, remote.rkey ^ 1))
        error = caught.value
        assert error.opcode == aiordma.Opcode.RDMA_READ
        assert error.qp_num == ends.client.qp.qp_num
        assert error.peer == ends.client.peer_addr
        if isinstance(error, RemoteError):
            assert "key, bounds and access rights" in str(error)
            assert str(ends.client.peer_addr) in str(error)


async def test_both_ends_misbehave_at_once() -> None:
    """Two refused requests that cross end both directions, without a hang."""
    async with pair() as ends:
        _, at_server = offer(ends.server, 8)
        _, at_client = offer(ends.client, 8)
        outcomes = await asyncio.gather(
            ends.client.read(RemoteRegion(at_server.addr, 8, at_server.rkey ^ 1)),
            ends.server.read(RemoteRegion(at_client.addr, 8, at_client.rkey ^ 1)),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, RDMAError) for outcome in outcomes)
        await check_ended(ends)


async def test_region_freed_while_the_peer_reads() -> None:
    """A region deregistered in the middle of the peer's READs: each gives its data or fails."""
    async with pair() as ends:
        region, remote = offer(ends.server, 4 << 20)
        sinks = [ends.client.alloc(4 << 20) for _ in range(4)]
        reads = [ends.client.read(remote, into=sink) for sink in sinks]
        await reads[0]
        await region.close()
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        for outcome, sink in zip(outcomes, sinks, strict=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, RDMAError)
            else:
                assert sink.view == pattern(4 << 20)


async def test_server_goes_on() -> None:
    """A server whose clients misbehave one after the other serves the next one, and tells no one but them."""
    handled = []

    async def handle(conn: Connection) -> None:
        async for message in conn:
            await conn.send(message)

    async def guarded(conn: Connection) -> None:
        try:
            await handle(conn)
        except BrokenError as error:
            handled.append(error)

    async with aiordma.serve(guarded, HOST, 0, device=DEVICE) as server:
        target = Guarded(server.pd, LENGTH, Access.REMOTE_READ)
        remote = target.remote
        crimes: list[Callable[[Connection], Awaitable[object]]] = [
            lambda conn: conn.read(RemoteRegion(remote.addr - 1, 8, remote.rkey)),
            lambda conn: conn.write(remote, bytes(LENGTH)),
            lambda conn: conn.read(RemoteRegion(remote.addr, LENGTH, remote.rkey ^ 1)),
            lambda conn: conn.send(bytes(5000)),
        ]
        async with aiordma.connect(HOST, server.port, device=DEVICE) as witness:
            for number, crime in enumerate(crimes):
                async with aiordma.connect(HOST, server.port, device=DEVICE) as conn:
                    await asyncio.gather(crime(conn), return_exceptions=True)
                    with pytest.raises(BrokenError):
                        await conn.recv()
                await witness.send(b"%d" % number)
                assert await witness.recv() == b"%d" % number
                assert await witness.read(remote) == pattern(LENGTH)
        target.check(pattern(LENGTH))
        await target.region.close()
    if capabilities().qp_fault_events:  # else the program that serves sees no more than that the client left
        assert len(handled) == len(crimes)
