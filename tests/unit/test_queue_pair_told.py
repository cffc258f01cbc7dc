"""Which failure a queue pair reports, and whether somebody was told of it."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.enums import AsyncEventType, Opcode, QPState, SendFlags, WCStatus
from aiordma.errors import BrokenError, ClosedError, FlushedError, LocalError, RemoteError
from tests.unit.fake_driver import FLUSHED, Rig, rig, state

# -- a flush that comes before the failure it is due to ------------------------------------------------------------


def _end(r: Rig, ends: dict[int, int]) -> None:
    """Let all requests end at once, in this order and with these statuses, as no simple device would."""
    r.device.sends.clear()
    r.device.recvs.clear()
    r.cq.pending += [(wr_id, int(status), 0, 0, r.qp.qp_num, 0, 0, 0) for wr_id, status in ends.items()]


async def test_flushes_before_the_failure() -> None:
    """Requests that are flushed before the completion of the one that failed have its failure as their cause."""
    async with rig() as r:
        futures = [r.post() for _ in range(4)]
        waiting = r.post()
        _end(r, {2: FLUSHED, 4: FLUSHED, 6: WCStatus.LOC_PROT_ERR, 8: FLUSHED})
        r.cq.ring()
        errors = [future.exception() for future in (*futures, waiting)]
        failure = errors.pop(2)
        assert isinstance(failure, LocalError)
        assert (failure.status, failure.opcode) == (WCStatus.LOC_PROT_ERR, Opcode.SEND)
        assert r.qp.failure is failure
        assert all(isinstance(error, FlushedError) and error.__cause__ is failure for error in errors)


async def test_a_receive_that_failed_behind_flushes() -> None:
    """The failure that is looked for may be a receive's."""
    async with rig() as r:
        receive, send = r.qp.post_recv(()), r.post()
        _end(r, {2: FLUSHED, next(iter(r.device.recvs)).wr_id: WCStatus.LOC_LEN_ERR})
        r.cq.ring()
        failure = receive.exception()
        assert isinstance(failure, LocalError)
        assert r.qp.failure is failure
        flushed = send.exception()
        assert flushed is not None
        assert flushed.__cause__ is failure


async def test_a_request_of_a_run_that_failed_behind_flushes() -> None:
    """The failure that is looked for may be in the middle of a run."""
    async with rig(max_send_wr=8) as r:
        memory = r.memory()
        futures = [r.qp.post_read(memory[:8], n, 0) for n in range(5)]
        await asyncio.sleep(0)  # the first one went alone, the others as a run
        _end(r, {2: FLUSHED, 4: FLUSHED, 6: WCStatus.LOC_PROT_ERR, 8: FLUSHED, 10: FLUSHED})
        r.cq.ring()
        failure = futures[2].exception()
        assert isinstance(failure, LocalError)
        assert failure.opcode == Opcode.RDMA_READ
        assert [state(future) for future in futures] == [
            "FlushedError", "FlushedError", "LocalError", "FlushedError", "FlushedError",
        ]  # fmt: skip
        causes = [error.__cause__ for error in (futures[n].exception() for n in (0, 1, 3, 4)) if error is not None]
        assert causes == [failure] * 4


async def test_a_failure_of_another_queue_pair() -> None:
    """A failure that comes behind a flush is taken for its cause only where it is of the same queue pair."""
    async with rig() as r:
        other = r.create_qp()
        mine, theirs = r.post(), other.post_send(Opcode.SEND, ())
        r.device.reason = "the peer left"
        _end(r, {2: FLUSHED})
        r.fake.qps[1].complete(1, WCStatus.REM_OP_ERR)
        r.cq.ring()
        assert str(r.qp.failure) == "the peer left"
        assert isinstance(mine.exception(), FlushedError)
        assert isinstance(theirs.exception(), RemoteError)
        assert other.failure is theirs.exception()
        other.close()


# -- told, or not yet ----------------------------------------------------------------------------------------------


def _report(r: Rig, event: AsyncEventType = AsyncEventType.QP_FATAL) -> None:
    assert r.fake.handler is not None
    r.fake.handler(event, r.qp.qp_num, "the reason")
    r.cq.ring()


async def test_an_untold_failure() -> None:
    """A failure that nobody was given is given by untold(), once, with its reason and cause."""
    async with rig() as r:
        r.qp.peer = ("10.0.0.5", 7471)
        assert r.qp.untold() is None
        _report(r)
        error = r.qp.untold()
        assert isinstance(error, BrokenError)
        assert "the reason" in str(error)
        assert "10.0.0.5" in str(error)
        assert error.__cause__ is r.qp.failure
        assert r.qp.untold() is None


@pytest.mark.parametrize("batch", [False, True])
async def test_told_by_a_future(batch: bool) -> None:
    """A future, or a batch, that got the failure told it."""
    async with rig() as r:
        if batch:
            r.batch(1)
        future = r.last if batch else r.post()
        r.complete(1, WCStatus.REM_ACCESS_ERR)
        assert isinstance(future.exception(), RemoteError)
        assert r.qp.untold() is None


async def test_told_by_a_receive() -> None:
    """A receive's future that got the failure told it."""
    async with rig() as r:
        future = r.qp.post_recv(())
        r.device.receive(status=WCStatus.LOC_LEN_ERR)
        r.cq.ring()
        assert isinstance(future.exception(), LocalError)
        assert r.qp.untold() is None


async def test_told_by_a_post() -> None:
    """A post that raised the failure told it."""
    async with rig() as r:
        _report(r)
        with pytest.raises(BrokenError, match="the reason"):
            r.post()
        assert r.qp.untold() is None


async def test_a_cancelled_future_is_told_nothing() -> None:
    """The failure of a request whose waiter has gone is still to be told."""
    async with rig() as r:
        r.post().cancel()
        r.complete(1, WCStatus.REM_ACCESS_ERR)
        error = r.qp.untold()
        assert error is not None
        assert isinstance(error.__cause__, RemoteError)


@pytest.mark.parametrize("count", [1, 6])
async def test_a_flush_tells_nothing(count: int) -> None:
    """Futures that were only flushed may have been dropped: the failure is still to be told."""
    async with rig() as r:
        futures = [r.post() for _ in range(count)]
        receive = r.qp.post_recv(())
        _report(r)
        assert {state(future) for future in (*futures, receive)} == {"FlushedError"}
        assert r.qp.untold() is not None


async def test_nothing_to_tell_after_an_orderly_end() -> None:
    """That the peer closed is no fault."""
    async with rig() as r:
        r.post()
        r.device.disconnected = True
        r.device.to_error()
        r.cq.ring()
        assert isinstance(r.qp.failure, BrokenError)
        assert r.qp.untold() is None


async def test_nothing_to_tell_after_the_own_close() -> None:
    """That this side closed is no fault."""
    async with rig() as r:
        r.post(flags=SendFlags.SIGNALED)
        r.qp.close()
        assert isinstance(r.qp.failure, ClosedError)
        assert r.qp.untold() is None


async def test_a_refused_request_of_the_peers() -> None:
    """What the peer did wrong is the peer's to be told."""
    async with rig() as r:
        _report(r, AsyncEventType.QP_ACCESS_ERR)
        assert r.qp.failure is not None
        assert r.qp.untold() is None


async def test_a_flush_by_our_disconnect() -> None:
    """What is flushed since this side disconnects is explained by that at once, and there is nothing to tell."""
    async with rig() as r:
        receive = r.qp.post_recv(())
        closed = ClosedError("the connection was closed")
        r.qp.refuse(closed)
        r.qp.expect_flush()
        r.device.state = QPState.ERR
        _end(r, {next(iter(r.device.recvs)).wr_id: FLUSHED})
        r.cq.ring()
        error = receive.exception()
        assert isinstance(error, FlushedError)
        assert error.__cause__ is closed
        assert r.qp.untold() is None


async def test_a_reason_counts_more_than_our_disconnect() -> None:
    """Where the device has a reason, that is the failure, though this side was about to disconnect."""
    async with rig() as r:
        receive = r.qp.post_recv(())
        r.qp.refuse(ClosedError("the connection was closed"))
        r.qp.expect_flush()
        r.device.reason = "the peer's host is gone"
        _end(r, {next(iter(r.device.recvs)).wr_id: FLUSHED})
        r.cq.ring()
        assert isinstance(receive.exception(), FlushedError)
        assert str(r.qp.failure) == "the peer's host is gone"
        assert r.qp.untold() is not None
