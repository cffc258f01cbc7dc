"""Queue pairs and their ledger: post a work request, get a future.

The ledger is a FIFO per queue: a completion of request n retires every unsignalled request before n as successful.
Memory that a request names is referenced by its slot, from the post to its completion or flush, whatever becomes of
the future. What the device can't take yet waits here, in order.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Final, ParamSpec, TypeVar, cast

from aiordma.completion import CompletionQueue
from aiordma.drivers.base import Completion, DriverContext, DriverPD, DriverQP, PostError
from aiordma.enums import Opcode, QPState, SendFlags, WCStatus
from aiordma.errors import BrokenError, ClosedError, CompletionError, FlushedError, RDMAError, completion_error
from aiordma.recv_ledger import RecvLedger
from aiordma.slots import Collected, RecvSlot, RunSlot, SendSlot, is_single, reject, withdrawn
from aiordma.types import SGE, ConnParam
from aiordma.write_buffer import WriteBuffer

__all__ = ["QueuePair"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SIGNALED: Final = int(SendFlags.SIGNALED)
_READ: Final = Opcode.RDMA_READ
_FLUSHED: Final = int(WCStatus.WR_FLUSH_ERR)


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
        try:
            self.driver: DriverQP = context.create_qp(
                pd, self.cq.driver, self.cq.driver,
                max_send_wr=self.max_send_wr, max_recv_wr=max_recv_wr, max_sge=min(param.max_sge, capabilities.max_sge),
            )  # fmt: skip
        except BaseException:
            self.cq.release(self._entries)
            raise
        if loop.get_debug():
            self.post_send = _only_in(loop, self.post_send)  # type: ignore[method-assign]
            self.post_read = _only_in(loop, self.post_read)  # type: ignore[method-assign]
            self.post_list = _only_in(loop, self.post_list)  # type: ignore[method-assign]
        self._post_send = self.driver.post_send
        self.qp_num = self.driver.qp_num
        self.cq.qps[self.qp_num] = self
        self.peer: object = None
        self.on_receive: Callable[[RecvSlot, Completion], None] | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        self.closed = False
        #: The first failure: why the queue pair is in error.
        self.failure: BaseException | None = None
        #: The failure was given to somebody: to a future that wasn't cancelled, or by `unusable()`.
        self.told = False
        #: Why nothing can be posted any more: the failure, or that it is being closed.
        self.refusal: BaseException | None = None
        self._ledger: deque[SendSlot | RunSlot] = deque()
        self._receives = RecvLedger(self.driver)
        self._free: list[SendSlot] = []
        self._credits = self.max_send_wr
        self._next_id = 0
        self._waiting = WriteBuffer(self.max_send_wr)
        #: READs of this turn that will be posted as a run.
        self._collected: Collected | None = None
        #: No READ was posted since the last completion: the next one goes at once.
        self._fresh = True
        self._watchers: list[asyncio.Future[None]] = []
        #: The first failure, seen before it was its completion's turn: its wr_id and exception.
        self._foreseen: tuple[int, CompletionError] | None = None
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
        if self._collected is not None:
            self._post_collected()
        # As slot(), in line: it is on the path of every operation.
        slot = self._free.pop() if self._free else SendSlot()
        slot.opcode = opcode
        slot.sg_list = sg_list
        slot.remote_addr = remote_addr
        slot.rkey = rkey
        slot.inline_data = inline_data
        slot.send_flags = send_flags
        slot.finish = finish
        slot.imm_data = imm_data
        slot.compare_add = compare_add
        slot.swap = swap
        future = slot.future = self._create_future()
        if self._credits and (not self.attention or not self._waiting):
            self._credits -= 1
            if not self._credits:
                slot.send_flags |= _SIGNALED  # else nothing would ever give the places back
            self._next_id = slot.wr_id = self._next_id + 2
            self._ledger.append(slot)
            try:
                if self._post_send((slot,)):
                    self.cq.posted()
            except Exception as error:  # noqa: BLE001 - whatever a driver raises, nothing may stay half posted
                self._post_failed([slot], error)
        else:
            self._enqueue(slot)
        return future

    def post_read(self, memory: SGE, remote_addr: int, rkey: int) -> asyncio.Future[Any]:
        """Post a READ into one piece of memory; as `post_send` in everything else.

        The first one goes to the device at once. Those that follow in the same turn of the loop are collected, and go
        as runs where they are alike: the device handles a run for a fraction of the price.
        """
        if self._fresh or not self._credits or self.refusal is not None or (self.attention and self._waiting):
            self._fresh = False
            return self.post_send(_READ, (memory,), remote_addr, rkey)
        run = self._collected
        if run is None or run.size != memory.length or run.rkey != rkey or run.lkey != memory.lkey or not run.room:
            if run is None:
                self._loop.call_soon(self._post_collected)
            else:
                self._post_collected()
            run = self._collected = Collected(memory.length, memory.lkey, rkey)
        self._credits -= 1
        run.room -= 1
        run.memory.append(memory)
        run.local_addrs.append(memory.addr)
        run.remote_addrs.append(remote_addr)
        future = self._create_future()
        run.futures.append(future)
        return future

    def _post_collected(self) -> None:
        """Post what was collected: as a run, or as single READs if it is too short."""
        run, self._collected = self._collected, None
        if run is None:
            return
        self._credits += len(run.futures)
        if len(run.futures) > 2:
            slot = RunSlot(_READ, run.size, run.lkey, run.rkey, run.local_addrs, run.remote_addrs)
            slot.sg_list = run.memory
            slot.futures = run.futures
            if self._post_now((slot,)):
                self.cq.posted()
            return
        slots = []
        for memory, remote_addr, future in zip(run.memory, run.remote_addrs, run.futures, strict=True):
            single = self.slot(_READ, (memory,), remote_addr, run.rkey, None, _SIGNALED)
            single.future = future
            slots.append(single)
        if self._post_now(slots):
            self.cq.posted()

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

    def give_back(self, slots: Sequence[SendSlot | RunSlot]) -> None:
        """Take back slots that were filled in and not posted."""
        for slot in slots:
            self._recycle(slot)

    def post_list(self, slots: Sequence[SendSlot | RunSlot], group: list[BaseException]) -> asyncio.Future[Any]:
        """Post slots as one linked list, in parts where the queue has less room; failures are put into `group`.

        Only the last of each part is signalled. A slot that has a future of its own already keeps it.

        Returns:
            The future of the last one: when it is done, all are.
        """
        if self.refusal is not None:
            raise self.unusable()
        if self._collected is not None:
            self._post_collected()
        room = 0 if self._waiting else self._credits
        ready = 0
        for slot in slots:
            slot.send_flags &= ~_SIGNALED
            slot.group = group
            room -= slot.count
            ready += room >= 0
        last = slots[-1]
        last.send_flags |= _SIGNALED
        future = last.future = last.future or self._create_future()
        if ready:
            slots[ready - 1].send_flags |= _SIGNALED
            if self._post_now(slots[:ready]):
                self.cq.posted()
        for slot in slots[ready:]:
            if self.failure is None:
                self._enqueue(slot)
            else:
                self._settle(slot, self._flushed_error(slot))
        if self._credits and self._waiting:
            self.pump()  # what was posted has completed already: nothing else would post the rest
        return future

    def _post_now(self, slots: Sequence[SendSlot | RunSlot]) -> bool:
        """Post slots for which there are credits: the runs one by one, what is between them as one list.

        Returns:
            True if a completion can be polled.
        """
        wr_id = self._next_id
        for slot in slots:
            wr_id += 2 * slot.count
            slot.wr_id = wr_id
            self._credits -= slot.count
        self._next_id = wr_id
        self._ledger.extend(slots)
        start = 0
        ready = False
        try:
            while start < len(slots):
                slot = slots[start]
                if isinstance(slot, RunSlot):
                    ready |= self.driver.post_run(slot)
                    start += 1
                else:
                    part = cast("list[SendSlot]", list(takewhile(is_single, slots[start:])))
                    ready |= self._post_send(part)
                    start += len(part)
        except Exception as error:  # noqa: BLE001 - as in post_send
            self._post_failed(slots[start:], error)
        return ready

    def _enqueue(self, slot: SendSlot | RunSlot) -> None:
        self._waiting.add(slot)
        self.attention = True

    def pump(self) -> None:
        """Post what waits, as far as there is room; called after completions were handed out."""
        ready, gone = self._waiting.take(self._credits)
        for slot in gone:
            self._recycle(slot)  # it was never posted
        if ready:
            # The last one in the queue is never left unsignalled: it may be the middle of a batch.
            ready[-1].send_flags |= _SIGNALED
            if self._post_now(ready):
                self.cq.defer()  # in the next turn: completing here would pump again, deeper and deeper
        self._wake_watchers()
        self.attention = bool(self._waiting.watched or self._watchers)

    def _post_failed(self, slots: Sequence[SendSlot | RunSlot], error: Exception) -> None:
        """The device refused a post, or the rest of a list: nothing leaks, and each request gets the reason."""
        if not isinstance(error, OSError):
            self.fault(f"the driver failed: {error!r}")  # what it has of these requests is anybody's guess
        posted = error.posted if isinstance(error, PostError) else 0
        taken = 0
        while posted >= slots[taken].count:
            posted -= slots[taken].count
            taken += 1
        refused = list(slots[taken:])
        for _ in refused:
            self._ledger.pop()
        if posted:
            run = refused[0]
            assert isinstance(run, RunSlot)
            refused[0] = run.cut(posted)
            self._ledger.append(run)
        for slot in refused:
            self._credits += slot.count
            self._settle(slot, error)
        if self._ledger and not self._ledger[-1].send_flags & _SIGNALED:
            self._retire()

    def _retire(self) -> None:
        """Post what retires the unsignalled requests in flight that have nothing behind them which would."""
        slot = self.slot(Opcode.RDMA_WRITE, (), 0, 0, None, _SIGNALED)
        self._next_id = slot.wr_id = self._next_id + 2
        try:
            ready = self._post_send((slot,))
        except OSError as error:
            self._recycle(slot)
            self.fault(f"the device takes no more requests: {error}")
            return
        self._credits -= 1
        self._ledger.append(slot)
        if ready:
            self.cq.posted()

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

    # -- completing -------------------------------------------------------------------------------------------------

    def completed(self, completion: Completion) -> None:
        """Retire a request, and every unsignalled one before it."""
        wr_id = completion[0]
        status = completion[1]
        if wr_id & 1:
            self._received(self._receives.completed(completion), completion)
            return
        ledger = self._ledger
        try:
            while (done := ledger.popleft()).wr_id < wr_id:
                self._credits += done.count
                self._settle(done, None)
        except IndexError:
            return  # of a request whose post raised all the same; the others of this poll shall not suffer
        self._fresh = True
        if isinstance(done, RunSlot):
            self._run_completed(done, completion)
            return
        self._credits += 1
        if status:
            self._settle(done, self._failed(completion, Opcode(done.opcode)))
            return
        # The common case of _settle, in line: it is on the path of every operation.
        future = done.future
        if future is not None and not future.done():
            if done.finish is None:
                future.set_result(None)
            else:
                _finish(future, done.finish)
        done.future = done.finish = done.group = done.inline_data = None
        done.sg_list = ()
        self._free.append(done)

    def _run_completed(self, run: RunSlot, completion: Completion) -> None:
        """Retire a run, or its requests up to the one that failed."""
        if not completion[1]:
            self._credits += run.count - run.retired
            self._settle(run, None)
            return
        index = run.count - 1 - (run.wr_id - completion[0]) // 2
        self._credits += index + 1 - run.retired
        for future in run.futures[run.retired : index]:
            if not future.done():
                future.set_result(None)
        error = self._failed(completion, Opcode(run.opcode))
        last = run.future if index == run.count - 1 else None
        if run.group is not None:
            run.group.append(error)
        self.told |= reject(run.futures[index] if run.futures else last, error, quiet=run.group is not None)
        run.retired = index + 1
        if run.retired < run.count:
            self._ledger.appendleft(run)  # those behind it complete by themselves
        else:
            self._recycle(run)

    def _settle(self, slot: SendSlot | RunSlot, error: BaseException | None) -> None:
        """Give a request's outcome to whoever waits for it, and let go of its memory."""
        if slot.group is not None and error is not None:
            slot.group.append(error)
        futures: Iterable[asyncio.Future[Any]] = () if slot.future is None else (slot.future,)
        finish = None
        if isinstance(slot, RunSlot):
            futures = (*slot.futures[slot.retired :], *futures)
        else:
            finish = slot.finish
        for future in futures:
            if error is not None:
                self.told |= reject(future, error, quiet=slot.group is not None)
            elif not future.done():
                if finish is None:
                    future.set_result(None)
                else:
                    _finish(future, finish)
        self._recycle(slot)

    def _recycle(self, slot: SendSlot | RunSlot) -> None:
        slot.future = slot.group = None
        slot.sg_list = ()
        if isinstance(slot, RunSlot):
            slot.futures = ()
        else:
            slot.finish = slot.inline_data = None
            self._free.append(slot)

    def _flushed_error(self, slot: SendSlot | RunSlot | RecvSlot) -> FlushedError:
        """Make the exception of a request that ends without a completion, since the queue pair failed."""
        opcode = None if isinstance(slot, RecvSlot) else Opcode(slot.opcode)
        error = FlushedError(WCStatus.WR_FLUSH_ERR, opcode=opcode, qp_num=self.qp_num, peer=self.peer)
        error.__cause__ = self.failure
        return error

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
                self.fail(
                    BrokenError(self.driver.reason or "the queue pair went to error", orderly=self.driver.disconnected)
                )
            error.__cause__ = self.failure
        return error

    def foresee(self, completions: Sequence[Completion]) -> None:
        """Look among completions to come for the one that failed: what flushes before it in the queue is its doing."""
        for completion in completions:
            wr_id, status, _, _, qp_num, _, _, _ = completion
            if qp_num == self.qp_num and status not in (0, _FLUSHED):
                slot = None if wr_id & 1 else next(slot for slot in self._ledger if slot.wr_id >= wr_id)
                self._foreseen = (wr_id, self._failed(completion, Opcode(slot.opcode) if slot else None))
                return

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
        if self.on_failure is not None:
            self.on_failure(failure)

    def refuse(self, why: BaseException) -> None:
        """Take no further posts; what is posted or waits goes on. Of what the user does, the first counts."""
        if not isinstance(self.refusal, ClosedError):
            self.refusal = why

    @property
    def in_flight(self) -> int:
        """Send requests posted or waiting that have not completed; a run counts as one."""
        return len(self._ledger) + len(self._waiting) + (self._collected is not None)

    def to_error(self) -> None:
        """Move to IBV_QPS_ERR: everything posted completes, flushed. Idempotent."""
        if not self.closed:
            if self._collected is not None:
                self._post_collected()
            self.driver.to_error()
            # The flush is there at once on the devices that do it in the call; the rest comes by the channel.
            self.cq.poll()

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

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

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
        self.closed = True
        self.cq.qps.pop(self.qp_num, None)
        self.cq.release(self._entries)
        self.driver.close()
        if not alive:  # nobody can be told
            self._ledger.clear()
            self._receives.clear()
            self._waiting.clear()
            return
        for slot in self._ledger:
            self._settle(slot, self._flushed_error(slot))
        for receive in self._receives.clear():
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


def _finish(future: asyncio.Future[Any], finish: Callable[[], Any]) -> None:
    """Resolve a future with what `finish` makes; its failure is this future's, not that of others in the same poll."""
    try:
        future.set_result(finish())
    except Exception as error:  # noqa: BLE001 - MemoryError, or whatever a caller's function raises
        future.set_exception(error)


def _only_in(loop: asyncio.AbstractEventLoop, method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a method so that its use from another loop or thread raises (asyncio's debug mode)."""

    @functools.wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if asyncio._get_running_loop() is not loop:  # noqa: SLF001 - as asyncio's own check does it
            raise RuntimeError(f"{method.__qualname__} is called from another loop or thread than the queue pair's")
        return method(*args, **kwargs)

    return checked
