"""The send side of a queue pair: posts work requests, and retires them as completions come.

A FIFO: a completion of request n retires every unsignalled request before n as successful. Memory that a request names
is referenced by its slot, from the post to its completion or flush, whatever becomes of the future. What the device
can't take yet waits here, in order.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Final, cast

from aiordma.completion import CompletionQueue
from aiordma.drivers.base import Completion, DriverQP, PostError
from aiordma.enums import Opcode, SendFlags, WCStatus
from aiordma.errors import CompletionError, FlushedError, RDMAError
from aiordma.slots import Collected, RecvSlot, RunSlot, SendSlot, is_single, reject
from aiordma.types import SGE
from aiordma.write_buffer import WriteBuffer

__all__ = ["SendLedger"]

_SIGNALED: Final = int(SendFlags.SIGNALED)
_READ: Final = Opcode.RDMA_READ


class SendLedger(ABC):
    """What a queue pair knows of its send requests: in flight, waiting for room, collected in this turn.

    Attributes:
        driver: the driver's queue pair.
        cq: the completion queue.
        qp_num: its number.
        peer: whom it is connected to, for messages.
        max_send_wr: requests the device takes at once.
        failure: the first failure: why the queue pair is in error.
        refusal: why nothing can be posted any more: the failure, or that it is being closed.
        told: the failure was given to somebody: to a future that wasn't cancelled, or by `unusable()`.
        attention: something waits for completions, besides futures: `pump()` is to be called after them.
    """

    def __init__(
        self, driver: DriverQP, cq: CompletionQueue, loop: asyncio.AbstractEventLoop, max_send_wr: int
    ) -> None:
        self.driver = driver
        self.cq = cq
        self._loop = loop
        self._create_future = loop.create_future
        self._post_send = cq.posting(self, driver.post_send)
        self._post_run = cq.posting(self, driver.post_run)
        self.qp_num = driver.qp_num
        self.peer: object = None
        self.max_send_wr = max_send_wr
        self.failure: BaseException | None = None
        self.refusal: BaseException | None = None
        self.told = False
        self._ledger: deque[SendSlot | RunSlot] = deque()
        self._free: list[SendSlot] = []
        self._credits = max_send_wr
        self._next_id = 0
        self._waiting = WriteBuffer(max_send_wr)
        #: READs of this turn that will be posted as a run.
        self._collected: Collected | None = None
        #: No READ was posted since the last completion: the next one goes at once.
        self._fresh = True
        self._watchers: list[asyncio.Future[None]] = []
        self.attention = False

    @abstractmethod
    def unusable(self) -> RDMAError:
        """Make the exception that says why nothing can be posted."""

    @abstractmethod
    def fault(self, reason: str, *, peers: bool = False) -> None:
        """The device reported that this queue pair is in error."""

    @abstractmethod
    def _failed(self, completion: Completion, opcode: Opcode | None) -> CompletionError:
        """Make the exception of an unsuccessful completion; the first one ends the queue pair."""

    @abstractmethod
    def _receive_completed(self, completion: Completion) -> None:
        """Hand out the completion of a receive."""

    @property
    def in_flight(self) -> int:
        """Send requests posted or waiting that have not completed; a run counts as one."""
        return len(self._ledger) + len(self._waiting) + (self._collected is not None)

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
        group: list[BaseException] | None = None,
    ) -> asyncio.Future[Any]:
        """Post a request now, or in order when there is room (ibv_post_send); a failure is put into `group`, if any.

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
        slot.group = group
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

    def post_list(
        self, slots: Sequence[SendSlot | RunSlot], group: list[BaseException] | None = None
    ) -> asyncio.Future[Any]:
        """Post slots as one linked list, in parts where the queue has less room; failures are put into `group`, if any.

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
                    ready |= self._post_run(slot)
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

    # -- completing -------------------------------------------------------------------------------------------------

    def completed(self, completion: Completion) -> None:
        """Retire a request, and every unsignalled one before it."""
        wr_id = completion[0]
        status = completion[1]
        if wr_id & 1:
            self._receive_completed(completion)
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

    def _flushed_error(self, slot: SendSlot | RunSlot | RecvSlot) -> RDMAError:
        """Make the exception of a request that ends without a completion, since the queue pair failed."""
        opcode = None if isinstance(slot, RecvSlot) else Opcode(slot.opcode)
        error = FlushedError(WCStatus.WR_FLUSH_ERR, opcode=opcode, qp_num=self.qp_num, peer=self.peer)
        error.__cause__ = self.failure
        return error

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


def _finish(future: asyncio.Future[Any], finish: Callable[[], Any]) -> None:
    """Resolve a future with what `finish` makes; its failure is this future's, not that of others in the same poll."""
    try:
        future.set_result(finish())
    except Exception as error:  # noqa: BLE001 - MemoryError, or whatever a caller's function raises
        future.set_exception(error)
