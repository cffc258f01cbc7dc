"""Closing: in every order, from both sides, twice, under way, with data in flight; and what is used afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import Access, BrokenError, ClosedError, Connection, ConnParam, FlushedError
from aiordma.testing import connected_pair
from tests.faults import raw_peer
from tests.faults.raw_peer import RawPeer
from tests.faults.support import REMOTE, against_raw, both, opened, until


async def _close(conn: Connection, *, aborted: bool) -> None:
    """Close; where one end was aborted the other may be told by its close that the connection broke."""
    try:
        await conn.close()
    except BrokenError as error:
        assert aborted
        assert not error.orderly


@pytest.mark.parametrize("order", list(itertools.product(range(4), repeat=3)))
async def test_every_order(order: tuple[int, ...]) -> None:
    """Close and abort, of both ends in every order, one behind the other and all at once: nothing is left."""
    aborted = max(order) > 1
    async with asyncio.timeout(30), aiordma.listen("127.0.0.1") as listener:
        for at_once in (False, True):
            client, server = await both(listener)
            remote = server.alloc(8, access=Access.REMOTE_READ).remote()
            pending = [client.read(remote), server.send(b"x")] if order[0] % 2 else []
            receiving = [asyncio.create_task(conn.recv()) for conn in (client, server)]
            await asyncio.sleep(0)
            started = []
            for step in order:
                conn = (client, server)[step % 2]
                if step > 1:
                    conn.abort()
                elif not at_once:
                    await _close(conn, aborted=aborted)
                else:
                    started.append(asyncio.create_task(_close(conn, aborted=aborted)))
                    await asyncio.sleep(0)
            await asyncio.gather(*started)
            await asyncio.gather(_close(client, aborted=aborted), _close(server, aborted=aborted))
            results = await asyncio.gather(*receiving, *pending, return_exceptions=True)
            expected = (bytes, type(None), BrokenError, ClosedError, FlushedError)
            assert all(isinstance(result, expected) for result in results)
            assert client.qp.closed
            assert server.qp.closed
            assert opened() == (1, 0)  # the listener


async def _broken(conn: Connection, body: BaseException | None) -> None:
    """Leave the block of a connection that broke, with an exception or without."""
    async with conn:
        await until(lambda: conn.qp.failure is not None)
        if body is not None:
            raise body


async def test_close_tells_a_failure_once() -> None:
    """close() raises the failure that no operation told: once, and not over an exception of the block's body."""
    for body in (None, LookupError()):
        async with against_raw() as (conn, peer):
            peer.reset()
            with pytest.raises(LookupError if body else BrokenError):
                await _broken(conn, body)
            await conn.close()


async def test_both_ends_at_once() -> None:
    """Both ends closed in one turn: both closes return, each as orderly as if it were alone."""
    async with asyncio.timeout(30), aiordma.listen("127.0.0.1") as listener:
        client, server = await both(listener)
        await asyncio.gather(client.close(), server.close())
        assert opened() == (1, 0)  # the listener


async def test_twice() -> None:
    """Closing what is closed does nothing; abort after close, and close after abort, neither."""
    async with connected_pair() as pair:
        for conn in (pair.client, pair.server):
            await conn.close()
            await conn.close()
            conn.abort()
            conn.abort()
            await conn.close()
    await pair.listener.close()
    await pair.listener.close()


async def test_from_several_tasks() -> None:
    """close() from several tasks at once: all return when it is closed."""
    async with connected_pair() as pair:
        await asyncio.gather(*[pair.client.close() for _ in range(10)])
        assert pair.client.qp.closed


async def test_abort_while_closing() -> None:
    """abort() during a close that waits for its peer: the close returns at once, without an exception."""
    async with against_raw() as (conn, peer):
        closing = [asyncio.create_task(conn.close(timeout=60)) for _ in range(2)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing[0].done()
        conn.abort()
        assert await asyncio.gather(*closing) == [None, None]
        await peer.ended()


async def test_abort_is_a_break() -> None:
    """abort() isn't an orderly end to the peer, also when nothing is in flight."""
    async with connected_pair() as pair, asyncio.timeout(30):
        pair.client.abort()
        with pytest.raises(BrokenError) as caught:
            await pair.server.recv()
        assert not caught.value.orderly


async def test_abort_leaves_no_socket() -> None:
    """abort() lets go of the socket at once, whatever the peer does."""
    async with against_raw() as (conn, peer):
        conn.abort()
        assert conn.qp.driver.link.closed  # type: ignore[attr-defined]
        assert not await peer.ended()


async def test_identifier_destroyed_alone() -> None:
    """Destroying the identifier of a connection lets go of its socket, and flushes what is posted."""
    async with against_raw() as (conn, peer):
        reading = conn.read(REMOTE[:8])
        conn._cm_id.destroy()
        assert conn.qp.driver.link.closed  # type: ignore[attr-defined]
        with pytest.raises(FlushedError):
            await reading
        assert not await peer.ended()


async def test_close_times_out() -> None:
    """close() of a connection whose peer doesn't answer ends at its time-out, and leaves no socket."""
    async with against_raw() as (conn, peer):
        await conn.close(timeout=0.05)
        assert conn.qp.driver.link.closed  # type: ignore[attr-defined]
        assert await peer.ended()


async def test_close_times_out_with_a_read_in_flight() -> None:
    """close() waits for what is posted as long as its time-out; then it ends as flushed, since it was closed."""
    async with against_raw() as (conn, peer):
        reading = conn.read(REMOTE[:8])
        await peer.fpdu()
        await conn.close(timeout=0.05)
        with pytest.raises(FlushedError) as caught:
            await reading
        assert isinstance(caught.value.__cause__, ClosedError)
        assert not await peer.ended()


async def test_close_waits_for_a_read() -> None:
    """A READ in flight when its connection is closed still completes."""
    async with against_raw() as (conn, peer):
        local = conn.alloc(8)
        reading = conn.read(REMOTE[:8], into=local)
        await peer.fpdu()
        closing = asyncio.create_task(conn.close(timeout=60))
        for _ in range(5):
            await asyncio.sleep(0)
        await peer.send(raw_peer.tagged(raw_peer.READ_RESPONSE, local.lkey, local.addr, b"in time!"))
        await reading
        assert await peer.ended()
        peer.close()
        await closing


async def test_close_with_a_peer_that_takes_nothing() -> None:
    """close() with more than the socket takes, to a peer that doesn't read, ends at its time-out: all flushed."""
    async with against_raw() as (conn, _):
        local = conn.alloc(32 << 20)
        writing = conn.write(REMOTE[: 32 << 20], local)
        await conn.close(timeout=0.05)
        with pytest.raises(FlushedError):
            await writing
        assert conn.qp.driver.link.closed  # type: ignore[attr-defined]


async def test_close_ends_a_pending_recv() -> None:
    """A task that receives while its connection is closed gets what still comes, then ClosedError."""
    async with against_raw() as (conn, peer):
        receiving = asyncio.create_task(conn.recv())
        await asyncio.sleep(0)
        closing = asyncio.create_task(conn.close(timeout=60))
        assert await peer.ended()
        await peer.send(raw_peer.send(1, b"on its way"))
        assert await receiving == b"on its way"
        receiving = asyncio.create_task(conn.recv())
        await asyncio.sleep(0)
        peer.close()
        with pytest.raises(ClosedError):
            await receiving
        await closing


async def test_iteration_ends_when_the_peer_closes() -> None:
    """`async for` over messages ends at the peer's close, and raises at its abort."""
    async with connected_pair() as pair, asyncio.timeout(30):
        await pair.client.send(b"last")
        await pair.client.close()
        assert [message async for message in pair.server] == [b"last"]
    async with connected_pair() as pair, asyncio.timeout(30):
        pair.client.abort()
        with pytest.raises(BrokenError):
            await anext(pair.server)


def _uses(conn: Connection) -> list[Callable[[], Any]]:
    local = conn.alloc(8)
    return [
        lambda: conn.read(REMOTE[:8]),
        lambda: conn.read(REMOTE[:8], into=local),
        lambda: conn.write(REMOTE[:8], b"x"),
        lambda: conn.write(REMOTE[:8], b"x", imm=1),
        lambda: conn.send(b"x"),
        lambda: conn.send(local, invalidate=1),
        lambda: conn.fetch_add(REMOTE[:8], 1),
        lambda: conn.compare_swap(REMOTE[:8], 0, 1),
        conn.barrier,
        conn.drain,
        conn.recv,
        conn.recv_message,
        lambda: conn.recv_into(local),
        lambda: _batch(conn, local),
    ]


async def _batch(conn: Connection, local: aiordma.MemoryRegion) -> None:
    async with conn.batch() as b:
        b.read(REMOTE[:8], local)


async def test_use_after_close() -> None:
    """Every use of a closed connection raises ClosedError that names it."""
    async with connected_pair() as pair:
        uses = _uses(pair.client)
        await pair.client.close()
        for use in uses:
            with pytest.raises(ClosedError, match="Connection to"):
                await use()
        assert pair.client.is_closing()


async def test_use_after_the_peer_closed() -> None:
    """Every use of a connection whose peer closed raises an orderly BrokenError."""
    async with connected_pair() as pair, asyncio.timeout(30):
        uses = _uses(pair.client)
        await pair.server.close()
        for use in uses:
            with pytest.raises(BrokenError) as caught:
                await use()
            assert caught.value.orderly
            assert "the peer closed" in str(caught.value)
        assert pair.client.is_closing()


async def test_use_of_a_closed_listener() -> None:
    """A closed listener raises ClosedError, and ends an iteration."""
    listener = await aiordma.listen("127.0.0.1")
    await listener.close()
    with pytest.raises(ClosedError, match="Listener"):
        await listener.get_request()
    assert [request async for request in listener] == []


@pytest.mark.parametrize("size", [8, 4000, 60_000])
async def test_close_delivers_what_was_sent(size: int) -> None:
    """A hundred messages sent, and the connection closed at once: a slow peer receives all of them."""
    param = ConnParam(recv_size=size, recv_depth=2)
    async with connected_pair(server_param=param) as pair, asyncio.timeout(50):
        for number in range(100):
            pair.client.send(number.to_bytes(8, "big") + bytes(size - 8))
        closing = asyncio.create_task(pair.client.close(timeout=40))
        for number in range(100):
            await asyncio.sleep(0.001)
            assert int.from_bytes((await pair.server.recv())[:8], "big") == number
        with pytest.raises(BrokenError) as caught:
            await pair.server.recv()
        assert caught.value.orderly
        await closing


async def test_messages_before_a_close_outlive_failed_sends() -> None:
    """What came before the peer's close is received, even if this side's own requests fail meanwhile."""
    async with connected_pair(server_param=ConnParam(recv_depth=1)) as pair, asyncio.timeout(30):
        for number in range(50):
            await pair.client.send(bytes([number]))
        await pair.client.close()
        for number in range(50):
            with contextlib.suppress(BrokenError, FlushedError):
                await pair.server.send(b"an answer")
            assert await pair.server.recv() == bytes([number])
        with pytest.raises(BrokenError):
            await pair.server.recv()


async def test_close_with_unreceived_messages() -> None:
    """close() of a connection with messages that nobody received doesn't wait for a receiver."""
    async with connected_pair(server_param=ConnParam(recv_depth=1)) as pair, asyncio.timeout(20):
        for _ in range(50):
            await pair.client.send(b"x" * 100)
        await pair.client.close()
        await pair.server.close(timeout=60)


async def test_close_with_messages_behind_it() -> None:
    """close() that is answered with more messages than there are receives doesn't wait for a receiver."""
    async with against_raw(recv_depth=1) as (conn, peer):
        closing = asyncio.create_task(conn.close(timeout=60))
        assert await peer.ended()
        for msn in range(1, 6):
            await peer.send(raw_peer.send(msn, b"late"))
        peer.close()
        await closing


async def test_close_while_too_much_is_unreceived(monkeypatch: pytest.MonkeyPatch) -> None:
    """close() of a connection that is paused for unreceived messages sees its peer's end."""
    monkeypatch.setattr("aiordma.drivers.soft.link.LINGER", 60.0)
    async with asyncio.timeout(20), aiordma.listen("127.0.0.1") as listener:
        with await RawPeer.connect(listener.port) as peer:
            await peer.send(raw_peer.request())
            conn = await (await listener.get_request()).accept()
            await peer.frame()
            msn, part = 0, b""
            while conn.qp.driver.link._reading:  # type: ignore[attr-defined]
                if not part:
                    msn += 1
                    part = raw_peer.send(msn, bytes(2000))
                part = peer.offer(part)
                await asyncio.sleep(0)
            closing = asyncio.create_task(conn.close(timeout=60))
            await peer.send(part)
            for _ in range(500):
                msn += 1
                await peer.send(raw_peer.send(msn, bytes(2000)))
            peer.close()
            await closing


async def test_regions_end_with_their_connection() -> None:
    """Regions with remote rights made through a connection are deregistered when it closes."""
    async with connected_pair() as pair:
        regions = [pair.server.alloc(64, access=Access.REMOTE_READ) for _ in range(3)]
        await regions[0].close()
        await pair.server.close()
        assert all(region.closed for region in regions)
