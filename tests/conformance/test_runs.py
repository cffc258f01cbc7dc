"""Many alike READs at once, which a device may handle as one: each has its own outcome all the same."""

from __future__ import annotations

import asyncio

import pytest

from aiordma import Access, BrokenError, CompletionError, ConnParam, FlushedError, RemoteError, RemoteRegion, WCStatus
from tests.conformance.support import Guarded, offer, pair, pattern

COUNT = 64
SIZE = 64
LENGTH = COUNT * SIZE


def lying(remote: RemoteRegion) -> RemoteRegion:
    """Claim that a region is longer than it is."""
    return RemoteRegion(remote.addr, 2 * remote.length, remote.rkey)


@pytest.mark.parametrize("bad", [0, 1, 2, 31, 62, 63])
@pytest.mark.parametrize("past", [1, 8, SIZE, LENGTH // 2])
async def test_one_of_many_reads_is_refused(bad: int, past: int) -> None:
    """Of READs at once the refused one fails with the peer's reason; before it are data, behind it flushes."""
    async with pair() as ends:
        guarded = Guarded(ends.server, LENGTH, Access.REMOTE_READ)
        sink = ends.client.alloc(LENGTH)
        sink.view[:] = bytes(LENGTH)
        claimed = lying(guarded.remote)
        starts = [(COUNT - 1 - index) * SIZE for index in range(COUNT)]
        starts[bad] = LENGTH - SIZE + past
        outcomes = await asyncio.gather(
            *(
                ends.client.read(claimed[start : start + SIZE], into=sink[index * SIZE : (index + 1) * SIZE])
                for index, start in enumerate(starts)
            ),
            return_exceptions=True,
        )
        guarded.check(pattern(LENGTH))
        # What failed brought nothing.
        assert not any(sink.view[bad * SIZE :])
        if not ends.client.capabilities.remote_fault_known:
            assert all(outcome is None or isinstance(outcome, FlushedError | BrokenError) for outcome in outcomes)
            return
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes[:bad])
        content = pattern(LENGTH)
        assert sink.view[: bad * SIZE] == b"".join(content[start : start + SIZE] for start in starts[:bad])
        refused = outcomes[bad]
        assert isinstance(refused, RemoteError)
        assert refused.status == WCStatus.REM_ACCESS_ERR
        if ends.client.capabilities.transport == "iwarp":
            assert "base or bounds violation" in refused.reason
        for outcome in outcomes[bad + 1 :]:
            assert isinstance(outcome, FlushedError)
            assert outcome.__cause__ is refused
        with pytest.raises(BrokenError) as caught:
            ends.client.read(guarded.remote)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert str(caught.value.__cause__) == str(refused)


@pytest.mark.parametrize("bad", [0, 1, 31, 63])
@pytest.mark.parametrize("max_send_wr", [16, 256])
async def test_one_of_read_many_is_refused(bad: int, max_send_wr: int) -> None:
    """A batch one piece of which is refused raises that one failure; the pieces before it are there, none behind it."""
    async with pair(client_param=ConnParam(max_send_wr=max_send_wr)) as ends:
        guarded = Guarded(ends.server, LENGTH, Access.REMOTE_READ)
        sink = ends.client.alloc(LENGTH)
        sink.view[:] = bytes(LENGTH)
        offsets = [index * 8 for index in range(COUNT)]
        offsets[bad] = LENGTH - 1
        with pytest.raises(CompletionError) as caught:
            async with ends.client.batch() as batch:
                batch.read_many(lying(guarded.remote), offsets, SIZE, into=sink)
        guarded.check(pattern(LENGTH))
        assert not any(sink.view[bad * SIZE :])
        if not ends.client.capabilities.remote_fault_known:
            assert isinstance(caught.value, FlushedError)
            return
        content = pattern(LENGTH)
        assert sink.view[: bad * SIZE] == b"".join(content[at : at + SIZE] for at in offsets[:bad])
        assert isinstance(caught.value, RemoteError)
        assert caught.value.status == WCStatus.REM_ACCESS_ERR
        if ends.client.capabilities.transport == "iwarp":
            assert "base or bounds violation" in caught.value.reason


@pytest.mark.parametrize("size", [1, 64, 1000, 4096, 5000])
async def test_many_reads_of_any_size(size: int) -> None:
    """READs at once of one size into scattered places, and a batch of them, bring what is there."""
    async with pair() as ends:
        content = pattern(size + 999)
        _, remote = offer(ends.server, len(content), access=Access.REMOTE_READ)
        single, batched = ends.client.alloc(200 * size), ends.client.alloc(200 * size)
        starts = [index * 331 % 1000 for index in range(200)]
        places = [(index * 77 % 200) * size for index in range(200)]
        await asyncio.gather(
            *(
                ends.client.read(remote[start : start + size], into=single[place : place + size])
                for start, place in zip(starts, places, strict=True)
            )
        )
        async with ends.client.batch() as batch:
            batch.read_many(remote, starts, size, into=batched)
        for index, (start, place) in enumerate(zip(starts, places, strict=True)):
            expected = content[start : start + size]
            assert single.view[place : place + size] == expected
            assert batched.view[index * size : (index + 1) * size] == expected
