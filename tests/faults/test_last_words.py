"""What came before the peer's end, when a send of this side is the first to notice the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from aiordma import Access, BrokenError, Connection, FlushedError
from tests.faults import raw_peer
from tests.faults.raw_peer import RawPeer
from tests.faults.support import REMOTE, against_raw, until

OURS = raw_peer.reply(flags=raw_peer.ENHANCED | raw_peer.OURS_REPLY)
both_replies = pytest.mark.parametrize("answer", [raw_peer.reply(), OURS], ids=["foreign", "ours"])


def notice(conn: Connection) -> asyncio.Future[list[BaseException | None]]:
    """Send until the end is noticed, without a turn of the loop in which it could be read."""
    return asyncio.gather(*(conn.send(b"x") for _ in range(3)), return_exceptions=True)


@both_replies
@pytest.mark.parametrize("leave", [RawPeer.close, RawPeer.reset])
async def test_messages(answer: bytes, leave: Callable[[RawPeer], None]) -> None:
    """Every message that arrived is received, those beyond the posted receives too; then BrokenError."""
    async with against_raw(answer, recv_depth=2, recv_size=64) as (conn, peer):
        texts = [b"why I go, part %d" % part for part in range(5)]
        peer.sock.sendall(b"".join(raw_peer.send(1 + index, text) for index, text in enumerate(texts)))
        leave(peer)
        await notice(conn)
        assert [await conn.recv() for _ in texts] == texts
        with pytest.raises(BrokenError, match="the connection broke"):
            await conn.recv()


@both_replies
async def test_more_than_may_be_kept(answer: bytes) -> None:
    """What the socket holds is received too, of a peer whose messages were too many to be read."""
    async with against_raw(answer, recv_depth=1, recv_size=1 << 16) as (conn, peer):
        text, count = bytes(60_000), 30
        stream = b"".join(raw_peer.send(1 + index, text) for index in range(count))
        sending = asyncio.create_task(peer.send(stream))
        link = conn.qp.driver.link  # type: ignore[attr-defined]
        await until(lambda: sending.done() and not link._reading)
        peer.reset()
        await notice(conn)
        assert [len(await conn.recv()) for _ in range(count)] == [len(text)] * count
        with pytest.raises(BrokenError):
            await conn.recv()


@both_replies
async def test_answers(answer: bytes) -> None:
    """A READ whose response arrived succeeds; one without a response doesn't."""
    async with against_raw(answer) as (conn, peer):
        sink = conn.alloc(8)
        reading, unanswered = conn.read(REMOTE[:8], into=sink), conn.read(REMOTE[:8])
        await peer.fpdu()
        peer.sock.sendall(raw_peer.tagged(raw_peer.READ_RESPONSE, sink.lkey, sink.addr, b"response"))
        peer.reset()
        await notice(conn)
        await reading
        assert bytes(sink.view) == b"response"
        with pytest.raises(FlushedError):
            await unanswered
        with pytest.raises(BrokenError):
            await conn.recv()


async def test_requests_are_not_answered() -> None:
    """A READ of the peer's that is read after its end does no harm: nothing is sent any more."""
    async with against_raw() as (conn, peer):
        region = conn.register(bytearray(1 << 20), access=Access.REMOTE_READ)
        peer.sock.sendall(raw_peer.read_request(1, region.rkey, region.addr, region.length) + raw_peer.send(1, b"bye"))
        peer.reset()
        await notice(conn)
        assert await conn.recv() == b"bye"
        await region.close()
        with pytest.raises(BrokenError):
            await conn.recv()
