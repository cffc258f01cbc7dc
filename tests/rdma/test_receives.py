"""Messages that find no receive: rxe retries as often as it was told, siw ends the connection."""

from __future__ import annotations

import asyncio

import pytest

from aiordma import BrokenError, ConnParam, FlushedError, RNRError, WCStatus
from tests.conformance.support import DEVICE, capabilities, pair


async def _unreceived(client_param: ConnParam) -> tuple[list[BaseException | None], BrokenError]:
    """Send ten messages to two receives of which none is consumed: how they end, and what the next use says."""
    async with asyncio.timeout(60), pair(client_param=client_param, server_param=ConnParam(recv_depth=2)) as ends:
        sends = [ends.client.send(b"%d" % number) for number in range(10)]
        results = await asyncio.gather(*sends, return_exceptions=True)
        with pytest.raises(BrokenError) as caught:
            ends.client.send(b"another")
        # What was acknowledged before is there.
        assert [await ends.server.recv() for _ in range(2)] == [b"0", b"1"]
        with pytest.raises(BrokenError):
            await ends.server.recv()
        return results, caught.value


async def test_no_retry() -> None:
    """With rnr_retry=0 the first message without a receive is RNRError with the next step, those behind are flushed."""
    if not capabilities().rnr:
        pytest.skip(f"{DEVICE} has no receiver-not-ready (Capabilities.rnr)")
    results, after = await _unreceived(ConnParam(rnr_retry=0))
    assert results[:2] == [None, None]
    first = results[2]
    assert isinstance(first, RNRError)
    assert first.status == WCStatus.RNR_RETRY_EXC_ERR
    for part in ("SEND on QP", "RNR_RETRY_EXC_ERR", "recv_depth or rnr_retry"):
        assert part in str(first)
    for result in results[3:]:
        assert isinstance(result, FlushedError)
        assert result.__cause__ is first
    assert after.__cause__ is first


async def test_retries_until_there_is_a_receive() -> None:
    """With the default rnr_retry, which is for ever, messages wait for their receive, in order."""
    if not capabilities().rnr:
        pytest.skip(f"{DEVICE} has no receiver-not-ready (Capabilities.rnr)")
    async with asyncio.timeout(60), pair(server_param=ConnParam(recv_depth=2, rnr_timer=0.01)) as ends:
        sends = [ends.client.send(b"%d" % number) for number in range(10)]
        await asyncio.wait(sends, timeout=0.3)
        assert not sends[-1].done()
        assert [await ends.server.recv() for _ in range(10)] == [b"%d" % number for number in range(10)]
        await asyncio.gather(*sends)


async def test_connection_ends_where_it_can_not_wait() -> None:
    """On iWARP the connection ends, both ends are told so, and what had a receive is received."""
    if capabilities().unreceived_send_waits:
        pytest.skip(f"{DEVICE} lets messages wait (Capabilities.unreceived_send_waits)")
    async with asyncio.timeout(60), pair(server_param=ConnParam(recv_depth=2)) as ends:
        sends = [ends.client.send(b"%d" % number) for number in range(10)]
        await asyncio.wait(sends)
        with pytest.raises(BrokenError):
            await ends.client.recv()
        assert [await ends.server.recv() for _ in range(2)] == [b"0", b"1"]
        # Posted again for a message that doesn't come any more.
        with pytest.raises(BrokenError):
            await ends.server.recv()
        with pytest.raises(BrokenError):
            ends.client.send(b"another")
        for send in sends:
            send.exception()  # handed to TCP, or flushed
