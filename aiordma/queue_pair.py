"""Queue pairs and their ledger: post a work request, get a future.

The ledger is a FIFO per queue: a completion of request n retires every unsignalled request before n as successful.
Memory that a request names is referenced by its slot, from the post to its completion or flush, whatever becomes of
the future. What the device can't take yet waits here, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aiordma.completion import CompletionQueue
from aiordma.drivers.base import Completion, DriverContext, DriverPD, DriverQP, PostError
from aiordma.enums import Opcode, QPState, SendFlags, WCStatus
from aiordma.errors import BrokenError, ClosedError, CompletionError, FlushedError, RDMAError, completion_error
from aiordma.types import SGE, ConnParam, RecvWR, SendWR

__all__ = ["QueuePair"]

_SIGNALED: Final = int(SendFlags.SIGNALED)
_FLUSHED: Final = int(WCStatus.WR_FLUSH_ERR)


class SendSlot(SendWR):
    """A work request with what waits for it."""

    __slots__ = ("finish", "future", "group", "nbytes")

    def __init__(self) -> None:
        super().__init__()
        self.future: asyncio.Future[Any] | None = None
        #: Makes the future's value once the request succeeded; None: the value is None.
        self.finish: Callable[[], Any] | None = None
        #: Collects failures of a batch's requests.
        self.group: list[BaseException] | None = None
        self.nbytes = 0


class RecvSlot(RecvWR):
    """A posted receive with what waits for it."""

    __slots__ = ("future",)

    def __init__(self, sg_list: Sequence[SGE] = ()) -> None:
        super().__init__(sg_list)
        self.future: asyncio.Future[Completion] | None = None


class QueuePair:
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
        capabilities = context.capabilities
        self._context = context
        self._loop = loop
        self._create_future = loop.create_future
        self.max_send_wr = min(param.max_send_wr, capabilities.max_send_wr)
        max_recv_wr = min(param.recv_depth, capabilities.max_recv_wr)
        self._entries = self.max_send_wr + max_recv_wr
        self.cq = cq_for(self._entries)
        self.driver: DriverQP = context.create_qp(
            pd, self.cq.driver, self.cq.driver,
            max_send_wr=self.max_send_wr, max_recv_wr=max_recv_wr, max_sge=min(param.max_sge, capabilities.max_sge),
        )  # fmt: skip
        self._post_send = self.driver.post_send
        self.qp_num = self.driver.qp_num
        self.cq.qps[self.qp_num] = self
        self.peer: object = None
        self.on_receive: Callable[[RecvSlot, Completion], None] | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        self.closed = False
        #: The first failure: why the queue pair is in error.
        self.failure: BaseException | None = None
        #: Why nothing can be posted any more: the failure, or that it is being closed.
        self.refusal: BaseException | None = None
        self._ledger: deque[SendSlot] = deque()
        self._recv_ledger: deque[RecvSlot] = deque()
        self._free: list[SendSlot] = []
        self._credits = self.max_send_wr
        self._next_id = 0
        self._waiting: deque[SendSlot] = deque()
        self._waiting_bytes = 0
        self._high_bytes = 64 * 1024
        self._low_bytes = 16 * 1024
        self._drainers: list[asyncio.Future[None]] = []
        self._watchers: list[Callable[[], None]] = []
        #: Something waits for completions, besides futures: `pump()` is to be called after them.
        self.attention = False

    # -- posting ----------------------------------------------------------------------------------------------------

    def post_send(
        self,
        opcode: Opcode,
        sg_list: Sequence[SGE],
        remote_addr: int = 0,
        rkey: int = 0,
        inline_data: bytes | None = None,
        send_flags: int = _SIGNALED,
        finish: Callable[[], Any] | None = None,
        imm_data: int = 0,
        compare_add: int = 0,
        swap: int = 0,
    ) -> asyncio.Future[Any]:
        """Post a request now, or in order when there is room (ibv_post_send).

        Ownership: memory in `sg_list` belongs to the device until the future is done, or, if that was cancelled, until
        its `idle()` returns. Memory stays referenced here for as long.

        Cancellation: drops the waiter. A request that still waits for room is withdrawn; a posted one goes on.

        Returns:
            A future: `finish()`'s value or None at success.

        Raises:
            ClosedError, BrokenError: nothing can be posted any more. Failures of this request are the future's.
        """
        if self.refusal is not None:
            raise self.unusable()
        # As slot(), in line: it is on the path of every operation.
        slot = self._free.pop() if self._free else SendSlot()
        slot.opcode = opcode
        slot.sg_list = sg_list
        slot.remote_addr = remote_addr
        slot.rkey = rkey
        slot.inline_data = inline_data
        slot.send_flags = send_flags
        slot.finish = finish
        if imm_data or compare_add or swap:
            slot.imm_data = imm_data
            slot.compare_add = compare_add
            slot.swap = swap
        future = slot.future = self._create_future()
        if self._credits and not self._waiting:
            self._credits -= 1
            self._next_id = slot.wr_id = self._next_id + 2
            self._ledger.append(slot)
            try:
                if self._post_send((slot,)):
                    self.cq.posted()
            except OSError as error:
                self._post_failed([slot], error)
        else:
            self._enqueue(slot)
        return future

    def slot(
        self, opcode: Opcode, sg_list: Sequence[SGE], remote_addr: int, rkey: int,
        inline_data: bytes | None, send_flags: int,
    ) -> SendSlot:  # fmt: skip
        """Take a slot, used or new, and fill it in."""
        slot = self._free.pop() if self._free else SendSlot()
        slot.opcode = opcode
        slot.sg_list = sg_list
        slot.remote_addr = remote_addr
        slot.rkey = rkey
        slot.inline_data = inline_data
        slot.send_flags = send_flags
        return slot

    def give_back(self, slots: Sequence[SendSlot]) -> None:
        """Take back slots that were filled in and not posted."""
        for slot in slots:
            self._recycle(slot)

    def post_list(self, slots: Sequence[SendSlot], group: list[BaseException]) -> list[asyncio.Future[Any]]:
        """Post slots as one linked list, or in parts where the queue has less room; failures are put into `group`.

        Only the last of each part is signalled. A slot that has a future of its own already keeps it.

        Returns:
            The futures to wait for: one a part.
        """
        if self.refusal is not None:
            raise self.unusable()
        for slot in slots:
            slot.send_flags &= ~_SIGNALED
            slot.group = group
        futures = []
        start = 0
        part = self.max_send_wr
        room = 0 if self._waiting else self._credits
        while start < len(slots):
            end = start + (room if room and not start else part)
            last = slots[min(end, len(slots)) - 1]
            last.send_flags |= _SIGNALED
            if last.future is None:
                last.future = self._create_future()
            futures.append(last.future)
            if room and not start:
                self._post_now(slots[:end])
            else:
                for slot in slots[start:end]:
                    self._enqueue(slot)
            start = end
        return futures

    def _post_now(self, slots: Sequence[SendSlot]) -> None:
        """Post slots for which there are credits, in one call."""
        self._credits -= len(slots)
        wr_id = self._next_id
        for slot in slots:
            wr_id += 2
            slot.wr_id = wr_id
        self._next_id = wr_id
        self._ledger.extend(slots)
        try:
            if self._post_send(slots):
                self.cq.posted()
        except OSError as error:
            self._post_failed(slots, error)

    def _enqueue(self, slot: SendSlot) -> None:
        slot.nbytes = len(slot.inline_data) if slot.inline_data else sum([sge.length for sge in slot.sg_list])
        self._waiting_bytes += slot.nbytes
        self._waiting.append(slot)
        self.attention = True

    def pump(self) -> None:
        """Post what waits, as far as there is room; called after completions were handed out."""
        waiting = self._waiting
        while waiting and self._credits:
            ready: list[SendSlot] = []
            while waiting and len(ready) < self._credits:
                slot = waiting.popleft()
                self._waiting_bytes -= slot.nbytes
                if slot.future is not None and slot.future.cancelled() and slot.group is None:
                    self._recycle(slot)  # withdrawn: it was never posted
                else:
                    ready.append(slot)
            if ready:
                # The last one in the queue is never left unsignalled: it may be the middle of a batch.
                ready[-1].send_flags |= _SIGNALED
                self._post_now(ready)
        if self._drainers and self._below_low():
            self._wake_drainers()
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()
        self.attention = bool(self._waiting or self._drainers or self._watchers)

    def _post_failed(self, slots: Sequence[SendSlot], error: OSError) -> None:
        """The device refused a post, or the rest of a list: nothing leaks, and each request gets the reason."""
        posted = error.posted if isinstance(error, PostError) else 0
        for slot in reversed(slots[posted:]):
            assert self._ledger[-1] is slot
            self._ledger.pop()
            self._credits += 1
        for slot in slots[posted:]:
            self._settle(slot, error)
        if posted and not self._ledger[-1].send_flags & _SIGNALED:
            # Unsignalled ones in flight have nothing behind them that would retire them.
            self._ledger[-1].future = None
            self.post_send(Opcode.RDMA_WRITE, ())

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
        wr_id = self._next_id
        for slot in slots:
            wr_id += 2
            slot.wr_id = wr_id | 1
        self._next_id = wr_id
        self._recv_ledger.extend(slots)
        try:
            if self.driver.post_recv(slots):
                # Not at once: the caller is in the middle of taking a message.
                self.cq.defer()
        except OSError as error:
            posted = error.posted if isinstance(error, PostError) else 0
            for _ in slots[posted:]:
                self._recv_ledger.pop()
            raise

    # -- completing -------------------------------------------------------------------------------------------------

    def completed(self, completion: Completion) -> None:
        """Retire a request, and every unsignalled one before it."""
        wr_id = completion[0]
        status = completion[1]
        if wr_id & 1:
            slot = self._recv_ledger.popleft()
            if slot.wr_id != wr_id:
                raise AssertionError(f"QP {self.qp_num}: receive {wr_id} completed before {slot.wr_id}")
            self._received(slot, completion)
            return
        ledger = self._ledger
        while (done := ledger.popleft()).wr_id != wr_id:
            self._credits += 1
            self._settle(done, None)
        self._credits += 1
        if status:
            self._settle(done, self._failed(completion, Opcode(done.opcode)))
            return
        # The common case of _settle, in line: it is on the path of every operation.
        future = done.future
        if future is not None and not future.done():
            finish = done.finish
            future.set_result(None if finish is None else finish())
        done.future = done.finish = done.group = done.inline_data = None
        done.sg_list = ()
        self._free.append(done)

    def _settle(self, slot: SendSlot, error: BaseException | None) -> None:
        """Give a request's outcome to whoever waits for it, and let go of its memory."""
        future = slot.future
        if slot.group is not None and error is not None:
            slot.group.append(error)
        if future is not None and not future.done():
            if error is None:
                future.set_result(None if slot.finish is None else slot.finish())
            else:
                future.set_exception(error)
                if slot.group is not None or isinstance(error, FlushedError):
                    # Thousands may be flushed by one broken link: the first failure is the loud one.
                    future.exception()
        self._recycle(slot)

    def _recycle(self, slot: SendSlot) -> None:
        slot.future = slot.finish = slot.group = slot.inline_data = None
        slot.sg_list = ()
        self._free.append(slot)

    def _received(self, slot: RecvSlot, completion: Completion) -> None:
        error = self._failed(completion, None) if completion[1] else None
        future = slot.future
        if future is None:
            if self.on_receive is not None:
                self.on_receive(slot, completion)
        elif not future.done():
            if error is None:
                future.set_result(completion)
            else:
                future.set_exception(error)
                if isinstance(error, FlushedError):
                    future.exception()

    def _failed(self, completion: Completion, opcode: Opcode | None) -> CompletionError:
        """Make the exception of an unsuccessful completion; the first one ends the queue pair."""
        _, status, _, _, qp_num, _, _, vendor_err = completion
        reason = self._context.describe_vendor_err(vendor_err) if vendor_err else ""
        error = completion_error(
            status, opcode=opcode, vendor_err=vendor_err, qp_num=qp_num, peer=self.peer, reason=reason
        )
        if status != _FLUSHED:
            self.fail(error)
        else:
            if self.failure is None:
                self.fail(
                    BrokenError(
                        self.driver.reason or "the queue pair went to error", orderly=self.driver.disconnected
                    )
                )
            error.__cause__ = self.failure
        return error

    # -- failing and closing ----------------------------------------------------------------------------------------

    def unusable(self) -> RDMAError:
        """Make the exception that says why nothing can be posted."""
        failure = self.refusal
        if isinstance(failure, ClosedError):
            return ClosedError(*failure.args)
        orderly = isinstance(failure, BrokenError) and failure.orderly
        error = BrokenError(f"the connection to {self.peer or 'the peer'} ended: {failure}", orderly=orderly)
        error.__cause__ = failure
        return error

    def fault(self, reason: str) -> None:
        """The device reported that this queue pair is in error (an asynchronous event)."""
        self.fail(BrokenError(reason or "the device reports a fault of the queue pair"))
        self.driver.to_error()

    def fail(self, failure: BaseException) -> None:
        """Note the first failure: from now on every post raises it, and what waited unposted gets it."""
        if self.failure is not None:
            return
        self.failure = failure
        self.refusal = self.refusal or failure
        waiting, self._waiting = self._waiting, deque()
        self._waiting_bytes = 0
        for slot in waiting:
            error = FlushedError(WCStatus.WR_FLUSH_ERR, opcode=Opcode(slot.opcode), qp_num=self.qp_num, peer=self.peer)
            error.__cause__ = failure
            self._settle(slot, error)
        self._wake_drainers()
        if self.on_failure is not None:
            self.on_failure(failure)

    def refuse(self, why: BaseException) -> None:
        """Take no further posts; what is posted or waits goes on."""
        self.refusal = self.refusal or why

    @property
    def in_flight(self) -> int:
        """Send requests posted or waiting that have not completed."""
        return len(self._ledger) + len(self._waiting)

    def to_error(self) -> None:
        """Move to IBV_QPS_ERR: everything posted completes, flushed. Idempotent."""
        if not self.closed:
            self.driver.to_error()
            # The flush is there at once on the devices that do it in the call; the rest comes by the channel.
            self.cq.poll()

    async def flushed(self) -> None:
        """Wait until the ledger is empty: no request of this queue pair is with the device."""
        while (self._ledger or self._recv_ledger) and not self.closed:
            await self._watch()

    async def settled(self) -> None:
        """Wait until every send request posted so far, and those that wait, completed."""
        while self.in_flight and not self.closed:
            await self._watch()

    def _watch(self) -> asyncio.Future[None]:
        """Give a future that is done after the next completions."""
        future: asyncio.Future[None] = self._create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self._watchers.append(wake)
        self.attention = True
        return future

    async def idle(self, memory: SGE) -> None:
        """Wait until no posted request names any of `memory`."""
        start, end = memory.addr, memory.addr + memory.length

        def named() -> bool:
            queues: Iterable[Iterable[SendSlot | RecvSlot]] = (
                self._ledger, self._recv_ledger,
                [slot for slot in self._waiting if slot.future is None or not slot.future.cancelled()],
            )  # fmt: skip
            return any(
                sge.addr < end and start < sge.addr + sge.length
                for queue in queues
                for slot in queue
                for sge in slot.sg_list
            )

        while named() and not self.closed:
            await self._watch()

    def close(self) -> None:
        """Destroy (ibv_destroy_qp); what is still posted ends as flushed. Idempotent."""
        if self.closed:
            return
        self.fail(ClosedError("the queue pair is closed"))
        self.driver.to_error()
        self.cq.poll()
        self.closed = True
        self.cq.qps.pop(self.qp_num, None)
        self.cq.release(self._entries)
        self.driver.close()
        for slot in (*self._ledger, *self._recv_ledger):
            self._flush_slot(slot)
        self._ledger.clear()
        self._recv_ledger.clear()
        for watcher in self._watchers:
            watcher()
        self._watchers.clear()

    def _flush_slot(self, slot: SendSlot | RecvSlot) -> None:
        error = FlushedError(WCStatus.WR_FLUSH_ERR, qp_num=self.qp_num, peer=self.peer)
        error.__cause__ = self.failure
        if slot.future is not None and not slot.future.done():
            slot.future.set_exception(error)
            slot.future.exception()

    # -- flow control -----------------------------------------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Bound what waits for room in the send queue, as asyncio's transports do; `drain()` waits from high to low."""
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be at least low ({low}), and low at least 0")
        self._high_bytes, self._low_bytes = high, low
        if self._drainers and self._below_low():
            self._wake_drainers()

    def get_write_buffer_size(self) -> int:
        """Bytes of requests that wait for room in the send queue."""
        return self._waiting_bytes

    def _below_low(self) -> bool:
        return self._waiting_bytes <= self._low_bytes and len(self._waiting) <= self.max_send_wr

    async def drain(self) -> None:
        """Wait while too much waits for room in the send queue.

        Too much is more bytes than the high limit, or more requests than the queue has places; it returns at the low
        limit. Awaiting an operation is backpressure too; this bounds programs that don't.

        Raises:
            ClosedError, BrokenError: the connection's end.
        """
        if self.refusal is not None:
            raise self.unusable()
        if self._waiting_bytes <= self._high_bytes and len(self._waiting) <= self.max_send_wr:
            return
        future: asyncio.Future[None] = self._create_future()
        self._drainers.append(future)
        self.attention = True
        await future
        if self.refusal is not None:
            raise self.unusable()

    def _wake_drainers(self) -> None:
        drainers, self._drainers = self._drainers, []
        for future in drainers:
            if not future.done():
                future.set_result(None)

    @property
    def state(self) -> QPState:
        """The queue pair's state."""
        return self.driver.state

    def __repr__(self) -> str:
        return f"<QueuePair {self.qp_num} {self.state.name} in flight {self.in_flight}>"
