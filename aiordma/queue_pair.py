"""Queue pairs: receives, failures, flow control and closing; what is sent is the ledger's they inherit from."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, ParamSpec, TypeVar

from aiordma.completion import CompletionQueue
from aiordma.drivers.base import Completion, DriverContext, DriverPD
from aiordma.enums import Opcode, QPState, SendFlags, WCStatus
from aiordma.errors import BrokenError, ClosedError, CompletionError, RDMAError, completion_error
from aiordma.raw_connect import RawConnect
from aiordma.recv_ledger import RecvLedger
from aiordma.send_ledger import SendLedger
from aiordma.slots import RecvSlot, RunSlot, SendSlot, reject, withdrawn
from aiordma.types import SGE, ConnParam

__all__ = ["QueuePair"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SIGNALED: Final = int(SendFlags.SIGNALED)
_READ: Final = Opcode.RDMA_READ
_FLUSHED: Final = int(WCStatus.WR_FLUSH_ERR)
#: Seconds that the cause of a flush may come after it: more than one where a hundred connections end together, in a
#: guest whose processors are emulated.
_EXPLAINED_WITHIN: Final = 4.0


class QueuePair(RawConnect, SendLedger):
    """A reliable connected queue pair (ibv_qp) whose posts return futures.

    A full send queue never raises: requests wait in order, and count against the write buffer limits.

    Attributes:
        qp_num: its number.
        driver: the driver's object.
        peer: whom it is connected to, for messages.
        on_receive: takes completed receives that have no future of their own: slot and completion.
        on_failure: called once, with the first failure.
    """

    def __init__(
        self,
        context: DriverContext,
        pd: DriverPD,
        cq_for: Callable[[int], CompletionQueue],
        loop: asyncio.AbstractEventLoop,
        param: ConnParam,
    ) -> None:
        limits = context.capabilities
        max_send_wr = min(param.max_send_wr, limits.max_send_wr)
        max_recv_wr = min(param.recv_depth, limits.max_recv_wr)
        self._context = context
        self._param = param
        #: "iwarp", "roce" or "ib".
        self.transport = limits.transport
        self._entries = max_send_wr + max_recv_wr
        cq = cq_for(self._entries)
        try:
            driver = context.create_qp(
                pd, cq.driver, cq.driver,
                max_send_wr=max_send_wr, max_recv_wr=max_recv_wr, max_sge=min(param.max_sge, limits.max_sge),
            )  # fmt: skip
        except BaseException:
            cq.release(self._entries)
            raise
        super().__init__(driver, cq, loop, max_send_wr)
        if loop.get_debug():
            self.post_send = _only_in(loop, self.post_send)  # type: ignore[method-assign]
            self.post_read = _only_in(loop, self.post_read)  # type: ignore[method-assign]
            self.post_list = _only_in(loop, self.post_list)  # type: ignore[method-assign]
        cq.qps[self.qp_num] = self
        self.on_receive: Callable[[RecvSlot, Completion], None] | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        self.closed = False
        self._receives = RecvLedger(self.driver)
        #: The last request when `probe()` looked.
        self._probed = 0
        #: The device is gone: requests end with that, not as flushed.
        self._gone: BrokenError | None = None
        #: The first failure, seen before it was its completion's turn: its wr_id and exception.
        self._foreseen: tuple[int, CompletionError] | None = None
        #: Flushes that came before what caused them, and when they are handed out without a cause.
        self._unexplained: list[Completion] = []
        self._explaining: asyncio.TimerHandle | None = None
        #: This side moved it to error: that is the cause.
        self._ours = False

    # -- receives -------------------------------------------------------------------------------------------------

    def post_recv(self, sg_list: Sequence[SGE]) -> asyncio.Future[Completion]:
        """Post a receive (ibv_post_recv): the future's value is its completion, a plain tuple.

        Ownership: as for `post_send`. Cancellation: the receive stays posted and takes its message all the same.
        """
        slot = RecvSlot(sg_list)
        slot.future = self._create_future()
        self.post_recv_slots((slot,))
        return slot.future

    def post_recv_slots(self, slots: Sequence[RecvSlot]) -> None:
        """Post receives made by the caller, which may be posted again when they have completed."""
        if self.closed:
            raise self.unusable()
        if self._receives.post(slots):
            # Not at once: the caller is in the middle of taking a message.
            self.cq.defer()
        if self.failure is not None and not self._context.capabilities.late_requests_flush:
            self._loop.call_soon(self._flush_late)

    def _flush_late(self) -> None:
        """Flush in the device's stead what was posted when it had flushed already."""
        if self.closed or self.driver.state is not QPState.ERR:
            return
        while self.cq.poll():
            pass  # what came before the end, and what the device flushed
        if not self.closed:
            self._settle_all(alive=True)

    def _receive_completed(self, completion: Completion) -> None:
        slot = self._receives.completed(completion)
        if slot is not None:  # else it was flushed here already
            self._received(slot, completion)

    def _received(self, slot: RecvSlot, completion: Completion) -> None:
        error = self._failed(completion, None) if completion[1] else None
        future = slot.future
        if future is None:
            if self.on_receive is not None:
                self.on_receive(slot, completion)
        elif error is not None:
            self.told |= reject(future, error)
        elif not future.done():
            future.set_result(completion)

    def _failed(self, completion: Completion, opcode: Opcode | None) -> CompletionError:
        """Make the exception of an unsuccessful completion; the first one ends the queue pair."""
        wr_id, status, _, _, qp_num, _, _, vendor_err = completion
        if self._foreseen is not None and self._foreseen[0] == wr_id:
            return self._foreseen[1]
        reason = self._context.describe_vendor_err(vendor_err) if vendor_err else ""
        error = completion_error(
            status, opcode=opcode, vendor_err=vendor_err, qp_num=qp_num, peer=self.peer, reason=reason
        )
        if status != _FLUSHED:
            self.fail(error)
        else:
            if self.failure is None:
                self.fail(self._why())
            error.__cause__ = self.failure
        return error

    def unexplained(self, completions: Sequence[Completion]) -> bool:
        """Look for the cause of an unsuccessful completion, the first of `completions`; True: there is none yet.

        What flushes may be polled before the request that failed, or before the connection manager or an asynchronous
        event tells of the end (seen on siw and on rxe). In the first case the failure counts at once; in the others the
        completion is kept here until the cause comes, or some seconds went by.
        """
        for completion in completions:
            wr_id, status, _, _, qp_num, _, _, _ = completion
            if qp_num == self.qp_num and status not in (0, _FLUSHED):
                slot = None if wr_id & 1 else next((slot for slot in self._ledger if slot.wr_id >= wr_id), None)
                self._foreseen = (wr_id, self._failed(completion, Opcode(slot.opcode) if slot else None))
                return False
        if self._ours or self.driver.reason or self.driver.disconnected:
            if self._unexplained:  # these came first
                self.fail(self._why())
            return False
        if not self._unexplained:
            self._explaining = self._loop.call_later(_EXPLAINED_WITHIN, self._unexplained_end)
        self._unexplained.append(completions[0])
        return True

    def _unexplained_end(self) -> None:
        self.fail(self._why())

    def _why(self) -> RDMAError:
        """Make the failure of a queue pair of which only flushes are seen."""
        if self._ours and not self.driver.reason and isinstance(self.refusal, ClosedError):
            return self.refusal
        return BrokenError(self.driver.reason or "the queue pair went to error", orderly=self.driver.disconnected)

    # -- failing and closing ----------------------------------------------------------------------------------------

    def unusable(self) -> RDMAError:
        """Make the exception that says why nothing can be posted."""
        failure = self.refusal
        if isinstance(failure, ClosedError):
            return ClosedError(*failure.args)
        orderly = isinstance(failure, BrokenError) and failure.orderly
        self.told = True
        error = BrokenError(f"the connection to {self.peer or 'the peer'} ended: {failure}", orderly=orderly)
        error.__cause__ = failure
        return error

    def untold(self) -> BrokenError | None:
        """Give the failure of a connection that ended by a fault, if nobody was told yet; then it counts as told."""
        failure = self.failure
        if self.told or failure is None or isinstance(failure, ClosedError):
            return None
        if isinstance(failure, BrokenError) and failure.orderly:
            return None
        self.told = True
        error = BrokenError(f"the connection to {self.peer or 'the peer'} ended: {failure}")
        error.__cause__ = failure
        return error

    def fault(self, reason: str, *, peers: bool = False) -> None:
        """The device reported that this queue pair is in error (an asynchronous event).

        Where it was a request of the peer's that this side refused, nobody here need be told at the close.
        """
        self.told |= peers
        self.fail(BrokenError(reason or "the device reports a fault of the queue pair"))
        self.driver.to_error()

    def fail(self, failure: BaseException) -> None:
        """Note the first failure: from now on every post raises it, and what waited unposted gets it."""
        if self.failure is not None:
            return
        self.failure = failure
        self.refusal = self.refusal or failure
        for slot in self._waiting.clear():
            self._settle(slot, self._flushed_error(slot))
        if self._explaining is not None:
            self._explaining.cancel()
            self._explaining = None
        unexplained, self._unexplained = self._unexplained, []
        for completion in unexplained:
            self.completed(completion)
        if self.on_failure is not None:
            self.on_failure(failure)
        if not self._context.capabilities.late_requests_flush:
            self._loop.call_soon(self._flush_late)
        if unexplained:
            self.pump()

    def refuse(self, why: BaseException) -> None:
        """Take no further posts; what is posted or waits goes on. Of what the user does, the first counts."""
        if not isinstance(self.refusal, ClosedError):
            self.refusal = why

    def expect_flush(self) -> None:
        """This side is about to disconnect: what is flushed from now on needs no other explanation."""
        self._ours = True

    def to_error(self) -> None:
        """Move to IBV_QPS_ERR: everything posted completes, flushed. Idempotent."""
        if not self.closed:
            if self._collected is not None:
                self._post_collected()
            self._ours = True
            self.driver.to_error()
            # The flush is there at once on the devices that do it in the call; the rest comes by the channel.
            self.cq.poll()

    def probe(self) -> None:
        """Post a WRITE of nothing, if nothing was posted since the last call and nothing is in flight.

        The peer's device acknowledges it without the program; where that is gone, the queue pair fails.
        """
        if self._next_id == self._probed and not self.in_flight and self.refusal is None:
            self._retire()
        self._probed = self._next_id

    async def flushed(self) -> None:
        """Wait until the ledger is empty: no request of this queue pair is with the device."""
        while (self._ledger or self._receives) and not self.closed:
            await self._progress()

    async def settled(self) -> None:
        """Wait until every send request posted so far, and those that wait, completed."""
        while self.in_flight and not self.closed:
            await self._progress()

    async def _progress(self) -> None:
        """Wait for the next completions; unsignalled requests at the end get what retires them."""
        if self._ledger and not self._ledger[-1].send_flags & _SIGNALED and self.failure is None:
            self._retire()
            return  # to be asked again: it may have completed in the post
        watcher: asyncio.Future[None] = self._create_future()
        self._watchers.append(watcher)
        self.attention = True
        try:
            await watcher
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    async def idle(self, memory: SGE) -> None:
        """Wait until no posted request names any of `memory`."""
        start, end = memory.addr, memory.addr + memory.length
        if self._collected is not None:
            self._post_collected()

        def named() -> bool:
            queues: Iterable[Iterable[SendSlot | RunSlot | RecvSlot]] = (
                self._ledger, self._receives,
                [slot for slot in self._waiting if not withdrawn(slot)],
            )  # fmt: skip
            return any(
                sge.addr < end and start < sge.addr + sge.length
                for queue in queues
                for slot in queue
                for sge in slot.sg_list
            )

        while named() and not self.closed:
            await self._progress()

    def close(self) -> None:
        """Destroy (ibv_destroy_qp); what is still posted ends as flushed. Idempotent."""
        if self.closed:
            return
        alive = not self._loop.is_closed()
        if alive:
            self.fail(ClosedError("the queue pair is closed"))
            self.to_error()
        self._destroy(alive=alive)

    def vanish(self, failure: BrokenError) -> None:
        """The device is gone: every request ends with a BrokenError, not as flushed; then destroy. Idempotent."""
        if self.closed:
            return
        if self._collected is not None:
            self._post_collected()
        self._gone = failure
        self._unexplained.clear()  # this explains them: they end as all others do
        # What failed a moment before, for the same reason (siw's WRITEs, with LOC_QP_OP_ERR), explains less.
        self.refuse(failure)
        try:
            self.fail(failure)
            self.driver.to_error()
            self._destroy(alive=True)
        except OSError:
            # What is gone may refuse to be told; what is here has ended all the same.
            self._destroy(alive=True)

    def _flushed_error(self, slot: SendSlot | RunSlot | RecvSlot) -> RDMAError:
        if self._gone is None:
            return super()._flushed_error(slot)
        error = BrokenError(f"the connection to {self.peer or 'the peer'} ended: {self._gone}")
        error.__cause__ = self._gone
        return error

    def _destroy(self, *, alive: bool) -> None:
        if self.closed:
            return
        self.closed = True
        self.cq.qps.pop(self.qp_num, None)
        self.cq.release(self._entries)
        try:
            self.driver.close()
        finally:
            self._settle_all(alive=alive)

    def _settle_all(self, *, alive: bool) -> None:
        """Let go of what was still with the device, and tell who waits for it."""
        if not alive:  # nobody can be told
            self._ledger.clear()
            self._receives.clear()
            self._waiting.clear()
            return
        for slot in self._ledger:
            self._settle(slot, self._flushed_error(slot))
        for receive in self._receives.clear():
            if receive.future is None and self.on_receive is not None:
                # More was in flight than one poll takes.
                self.on_receive(receive, (receive.wr_id, _FLUSHED, 0, 0, self.qp_num, 0, 0, 0))
            else:
                reject(receive.future, self._flushed_error(receive))
        self._ledger.clear()
        self._wake_watchers()

    # -- flow control -----------------------------------------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Bound what waits for room in the send queue, as asyncio's transports do; `drain()` waits from high to low."""
        self._waiting.set_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Give the low and the high limit, in asyncio's order."""
        return self._waiting.low, self._waiting.high

    def get_write_buffer_size(self) -> int:
        """Bytes of requests that wait for room in the send queue."""
        return self._waiting.size

    async def drain(self) -> None:
        """Wait while too much waits for room in the send queue.

        Too much is more bytes than the high limit, or more requests than the queue has places; it returns at the low
        limit. Awaiting an operation is backpressure too; this bounds programs that don't.

        Raises:
            ClosedError, BrokenError: the connection's end.
        """
        if self.refusal is None:
            self.attention = True
            await self._waiting.drain()
        if self.refusal is not None:
            raise self.unusable()

    @property
    def state(self) -> QPState:
        """The queue pair's state."""
        return self.driver.state

    def __repr__(self) -> str:
        return f"<QueuePair {self.qp_num} {self.state.name} in flight {self.in_flight}>"


def _only_in(loop: asyncio.AbstractEventLoop, method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a method so that its use from another loop or thread raises (asyncio's debug mode)."""

    @functools.wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if asyncio._get_running_loop() is not loop:  # noqa: SLF001 - as asyncio's own check does it
            raise RuntimeError(f"{method.__qualname__} is called from another loop or thread than the queue pair's")
        return method(*args, **kwargs)

    return checked
