"""Slots of a queue pair's ledger: work requests, with what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from aiordma.drivers.base import Completion
from aiordma.enums import Opcode
from aiordma.errors import BrokenError, FlushedError
from aiordma.types import SGE, RecvWR, RunWR, SendWR

#: READs collected into one run: few enough that the peer starts on one while the next is made.
RUN_LENGTH: Final = 64


class SendSlot(SendWR):
    """A work request with what waits for it."""

    __slots__ = ("finish", "future", "group", "nbytes")

    #: How many requests it is, as a run's.
    count = 1

    def __init__(self) -> None:
        super().__init__()
        self.future: asyncio.Future[Any] | None = None
        #: Makes the future's value once the request succeeded; None: the value is None.
        self.finish: Callable[[], Any] | None = None
        #: Collects failures of a batch's requests.
        self.group: list[BaseException] | None = None
        self.nbytes = 0


class RunSlot(RunWR):
    """A run with what waits for it: a future for each of its requests, or one for the last."""

    __slots__ = ("future", "futures", "group", "nbytes", "retired")

    def __init__(
        self, opcode: Opcode, size: int, lkey: int, rkey: int, local_addrs: Sequence[int], remote_addrs: Sequence[int]
    ) -> None:
        super().__init__(opcode, size, lkey, rkey, local_addrs, remote_addrs)
        self.future: asyncio.Future[Any] | None = None
        self.futures: Sequence[asyncio.Future[Any]] = ()
        self.group: list[BaseException] | None = None
        self.nbytes = 0
        #: So many of its requests have completed.
        self.retired = 0

    def cut(self, count: int) -> RunSlot:
        """Keep the first `count` requests, unsignalled since the last isn't among them; gives a run of the others."""
        rest = RunSlot(
            self.opcode, self.size, self.lkey, self.rkey, self.local_addrs[count:], self.remote_addrs[count:]
        )
        rest.future, self.future = self.future, None
        rest.futures, self.futures = self.futures[count:], self.futures[:count]
        rest.group = self.group
        self.local_addrs, self.remote_addrs = self.local_addrs[:count], self.remote_addrs[:count]
        self.wr_id -= 2 * rest.count
        self.count = count
        self.send_flags = 0
        return rest


class RecvSlot(RecvWR):
    """A posted receive with what waits for it."""

    __slots__ = ("future",)

    def __init__(self, sg_list: Sequence[SGE] = ()) -> None:
        super().__init__(sg_list)
        self.future: asyncio.Future[Completion] | None = None


class Collected:
    """READs of one turn that are alike, on the way to a run."""

    __slots__ = ("futures", "lkey", "local_addrs", "memory", "remote_addrs", "rkey", "room", "size")

    def __init__(self, size: int, lkey: int, rkey: int) -> None:
        self.size = size
        self.lkey = lkey
        self.rkey = rkey
        self.room = RUN_LENGTH
        self.memory: list[SGE] = []
        self.local_addrs: list[int] = []
        self.remote_addrs: list[int] = []
        self.futures: list[asyncio.Future[Any]] = []


def withdrawn(slot: SendSlot | RunSlot) -> bool:
    """Whether a request that waits was cancelled. One of a batch can't be: others depend on it."""
    return slot.group is None and slot.future is not None and slot.future.cancelled()


def is_single(slot: SendSlot | RunSlot) -> bool:
    """Whether it isn't a run."""
    return not isinstance(slot, RunSlot)


def reject(future: asyncio.Future[Any] | None, error: BaseException, *, quiet: bool = False) -> bool:
    """Set a future's exception, if somebody may wait for it; tells whether a failure was told by that, no mere flush.

    A flush is marked as retrieved: one broken link, or device that is gone, may flush thousands, and the first failure
    is the loud one. So is one that is reported otherwise.
    """
    if future is None or future.done():
        return quiet
    future.set_exception(error)
    flushed = isinstance(error, (FlushedError, BrokenError))
    if quiet or flushed:
        future.exception()
    return quiet or not flushed
