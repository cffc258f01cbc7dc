"""A device of which the test decides everything: what a post does, when and how a request completes.

It does what verbs promise and nothing beyond: completions come in order, an unsuccessful one moves the queue
pair to error and flushes what is behind it, unsignalled requests complete silently if they succeed.
"""

# ruff: noqa: ARG002 - arguments that the seam prescribes

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs

from aiordma.completion import CompletionQueue
from aiordma.device import Context, ProtectionDomain
from aiordma.drivers.base import Completion, DriverCQ, DriverPD, PostError
from aiordma.drivers.soft.rnic import CAPABILITIES
from aiordma.enums import AsyncEventType, Opcode, QPState, SendFlags, WCOpcode, WCStatus
from aiordma.memory import MemoryRegion
from aiordma.queue_pair import QueuePair
from aiordma.types import (
    SGE,
    Buffer,
    Capabilities,
    ConnParam,
    GIDEntry,
    PortAttr,
    QPAddress,
    QPPath,
    RecvWR,
    RunWR,
    SendWR,
)

FLUSHED = WCStatus.WR_FLUSH_ERR


class FakeMR:
    """A memory region; the device keeps no reference to its buffer."""

    def __init__(self, pd: FakePD, addr: int, length: int, access: int, key: int) -> None:
        self._pd = pd
        self.addr = addr
        self.length = length
        self.access = access
        self.lkey = key
        self.rkey = key + 1

    def close(self) -> None:
        self._pd.regions.remove(self)


class FakePD:
    """A protection domain that knows its regions."""

    def __init__(self) -> None:
        self.regions: list[FakeMR] = []
        self.closed = False
        self.error: OSError | None = None
        self._keys = itertools.count(100, 2)

    def reg_mr(self, buffer: Buffer, addr: int, length: int, access: int) -> FakeMR:
        if self.error is not None:
            raise self.error
        mr = FakeMR(self, addr, length, access, next(self._keys))
        self.regions.append(mr)
        return mr

    def close(self) -> None:
        self.closed = True


class FakeCQ:
    """A completion queue; its channel is rung by the test."""

    def __init__(self, cqe: int, on_ready: Callable[[], None]) -> None:
        self.cqe = cqe
        self._on_ready = on_ready
        self.armed = False
        self.pending: list[Completion] = []
        self.polls: list[int] = []
        self.closed = False

    def arm(self, *, solicited_only: bool = False) -> None:
        self.armed = True

    def poll(self, limit: int) -> list[Completion]:
        self.polls.append(limit)
        taken = self.pending[:limit]
        del self.pending[:limit]
        return taken

    def close(self) -> None:
        self.closed = True

    def ring(self) -> None:
        """Let the channel have an event, if it is armed and there is a completion."""
        if self.armed and self.pending:
            self.armed = False
            self._on_ready()


class FakeQP:
    """A queue pair. What is posted stays in `sends` and `recvs` until the test completes it.

    Attributes:
        sends: posted send requests, oldest first.
        recvs: posted receives.
        posts: how many requests each call of post_send had.
        immediate: requests complete within the post.
        refuse: the next posts fail: at which request, or None for one that is taken.
    """

    def __init__(self, qp_num: int, send_cq: FakeCQ, recv_cq: FakeCQ, max_send_wr: int, max_recv_wr: int) -> None:
        self.qp_num = qp_num
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.max_send_wr = max_send_wr
        self.max_recv_wr = max_recv_wr
        self.state = QPState.RTS
        self.reason = ""
        self.disconnected = False
        self.sends: deque[SendWR] = deque()
        self.recvs: deque[RecvWR] = deque()
        self.posts: list[int] = []
        self.immediate = False
        self.refuse: deque[int | None] = deque()
        self.refuse_recv: deque[int | None] = deque()
        self.closed = False
        self.flush_now = True
        self.connected_to: tuple[QPAddress, QPPath] | None = None

    def post_send(self, wrs: Sequence[SendWR]) -> bool:
        self.posts.append(len(wrs))
        bad = self.refuse.popleft() if self.refuse else None
        for index, wr in enumerate(wrs):
            if index == bad:
                raise PostError(errno.ENOMEM, "the queue is full", posted=index)
            assert len(self.sends) < self.max_send_wr, "more posted than the queue has places"
            self.sends.append(wr)
        if self.state is QPState.ERR:
            self._flush()
        elif self.immediate:
            self.complete(len(self.sends))
        return bool(self.send_cq.pending)

    def post_run(self, run: RunWR) -> bool:
        return self.post_send(run.expand())

    def post_recv(self, wrs: Sequence[RecvWR]) -> bool:
        bad = self.refuse_recv.popleft() if self.refuse_recv else None
        for index, wr in enumerate(wrs):
            if index == bad:
                raise PostError(errno.ENOMEM, "the queue is full", posted=index, verb="ibv_post_recv")
            self.recvs.append(wr)
        if self.state is QPState.ERR:
            self._flush()
        return bool(self.recv_cq.pending)

    def complete(self, count: int = 1, status: int = WCStatus.SUCCESS, *, vendor_err: int = 0) -> None:
        """Execute the oldest `count` send requests; the last of them ends with `status`."""
        for left in reversed(range(count)):
            wr = self.sends.popleft()
            if not left and status:
                self._end(self.send_cq, wr.wr_id, status, vendor_err=vendor_err)
                self.to_error()
            elif wr.send_flags & SendFlags.SIGNALED:
                self._end(self.send_cq, wr.wr_id, 0)

    def receive(self, byte_len: int = 0, *, status: int = WCStatus.SUCCESS, imm_data: int = 0) -> None:
        """Let a message take the oldest receive."""
        self._end(self.recv_cq, self.recvs.popleft().wr_id, status, WCOpcode.RECV, byte_len, imm_data)
        if status:
            self.to_error()

    def _end(
        self, cq: FakeCQ, wr_id: int, status: int, opcode: int = 0, byte_len: int = 0, imm_data: int = 0,
        vendor_err: int = 0,
    ) -> None:  # fmt: skip
        cq.pending.append((wr_id, int(status), int(opcode), byte_len, self.qp_num, imm_data, 0, vendor_err))

    def connect_raw(self, remote: QPAddress, path: QPPath) -> None:
        self.connected_to = (remote, path)
        self.state = QPState.RTS

    def to_error(self) -> None:
        self.state = QPState.ERR
        if self.flush_now:
            self._flush()

    def _flush(self) -> None:
        while self.sends:
            self._end(self.send_cq, self.sends.popleft().wr_id, FLUSHED)
        while self.recvs:
            self._end(self.recv_cq, self.recvs.popleft().wr_id, FLUSHED)

    def close(self) -> None:
        self.closed = True
        self.sends.clear()
        self.recvs.clear()


class FakeContext:
    """The device."""

    name = "fake"

    def __init__(self, **capabilities: Any) -> None:
        self.capabilities: Capabilities = attrs.evolve(CAPABILITIES, **capabilities)
        self.cqs: list[FakeCQ] = []
        self.qps: list[FakeQP] = []
        self.gids: list[GIDEntry] = []
        self.handler: Callable[[AsyncEventType, int, str], None] | None = None
        self.closed = False

    def query_port(self, port_num: int) -> PortAttr:
        return PortAttr(state="down", max_mtu=port_num, active_mtu=port_num, link_layer="infiniband")

    def query_gids(self, port_num: int) -> list[GIDEntry]:
        return self.gids

    def alloc_pd(self) -> FakePD:
        return FakePD()

    def create_cq(self, cqe: int, on_ready: Callable[[], None]) -> FakeCQ:
        self.cqs.append(FakeCQ(cqe, on_ready))
        return self.cqs[-1]

    def create_qp(
        self,
        pd: DriverPD,
        send_cq: DriverCQ,
        recv_cq: DriverCQ,
        *,
        max_send_wr: int,
        max_recv_wr: int,
        max_sge: int,
    ) -> FakeQP:
        assert isinstance(send_cq, FakeCQ)
        assert isinstance(recv_cq, FakeCQ)
        self.qps.append(FakeQP(len(self.qps) + 1, send_cq, recv_cq, max_send_wr, max_recv_wr))
        return self.qps[-1]

    def set_async_handler(self, handler: Callable[[AsyncEventType, int, str], None]) -> None:
        self.handler = handler

    def describe_vendor_err(self, vendor_err: int) -> str:
        return f"reason {vendor_err}"

    def close(self) -> None:
        self.closed = True


class Rig:
    """A queue pair on the fake device, in the running loop.

    Attributes:
        qp: what is tested.
        device: its driver's queue pair.
        cq: the driver's completion queue.
        pd: a protection domain to register memory with.
    """

    def __init__(self, *, max_send_wr: int = 4, recv_depth: int = 4, **capabilities: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.fake = FakeContext(**capabilities)
        self.context = Context(self.fake, self.loop)
        self.pd = ProtectionDomain(self.context)
        self.param = ConnParam(max_send_wr=max_send_wr, recv_depth=recv_depth)
        self.qp = self.create_qp()
        self.device = self.fake.qps[0]
        self.cq = self.fake.cqs[0]

    def create_qp(self) -> QueuePair:
        """Create a further queue pair, on the same completion queue."""
        return self.pd.create_qp(self.param)

    def post(self, sge: SGE | None = None, *, flags: int = SendFlags.SIGNALED) -> asyncio.Future[Any]:
        """Post a SEND of one piece of memory or of nothing."""
        return self.qp.post_send(Opcode.SEND, () if sge is None else (sge,), send_flags=flags)

    def memory(self, size: int = 64) -> MemoryRegion:
        """Register memory."""
        return self.pd.register(bytearray(size))

    def complete(self, count: int = 1, status: int = WCStatus.SUCCESS, *, vendor_err: int = 0) -> None:
        """Complete the oldest requests and ring the channel."""
        self.device.complete(count, status, vendor_err=vendor_err)
        self.cq.ring()

    def batch(self, count: int, *, own_futures: bool = False) -> tuple[list[Any], list[BaseException]]:
        """Post a list of `count` requests; gives its slots and its list of failures."""
        slots = [self.qp.slot(Opcode.RDMA_WRITE, (), 0, 0, None, 0) for _ in range(count)]
        if own_futures:
            for slot in slots:
                slot.future = self.loop.create_future()
        failures: list[BaseException] = []
        self.last = self.qp.post_list(slots, failures)
        return slots, failures

    @property
    def completion_queue(self) -> CompletionQueue:
        """What joins the driver's queue to the loop."""
        return self.qp.cq

    def close(self) -> None:
        """Close everything."""
        self.qp.close()
        self.pd.close()
        self.context.close()


@asynccontextmanager
async def rig(**how: Any) -> AsyncIterator[Rig]:
    """Make a queue pair, and close it at the end."""
    made = Rig(**how)
    try:
        yield made
    finally:
        made.close()


def state(future: asyncio.Future[Any]) -> str:
    """Put a future's outcome in one word; marks its exception as retrieved."""
    if not future.done():
        return "pending"
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return "done" if error is None else type(error).__name__
