"""The software RNIC: context, protection domains, completion queues and queue pairs, as the seam wants them."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable, Sequence
from typing import Final

from aiordma.drivers.base import Completion, DriverCQ, DriverPD, PostError
from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.endpoint import Endpoint
from aiordma.drivers.soft.link import Link
from aiordma.drivers.soft.send_queue import CompletionSink
from aiordma.drivers.soft.stag import Region, StagTable
from aiordma.enums import AsyncEventType, Opcode, QPState
from aiordma.errors import UnsupportedError
from aiordma.types import Buffer, Capabilities, GIDEntry, PortAttr, QPAddress, QPPath, RecvWR, RunWR, SendWR

NAME: Final = "soft"

#: IRD and ORD offered: what siw has at most, and enough for 64 READs in flight with room.
MAX_READS: Final = 128
#: Bytes of messages kept for a QP without a posted receive, before its socket is paused.
KEPT_BYTES: Final = 1 << 20
#: All links of a device read into one buffer of this size; an FPDU is 65,544 bytes at most.
_STAGING: Final = 256 * 1024

CAPABILITIES: Final = Capabilities(
    transport="iwarp",
    unreceived_send_waits=True,
    rnr=False,
    write_with_imm=True,
    send_with_imm=False,
    send_with_invalidate=True,
    atomics=True,
    success_proves="handed",
    remote_fault_known=True,
    write_fault_known=False,
    read_sink_needs_remote_write=False,
    qp_fault_events=True,
    disconnect_flushes=True,
    max_inline_data=64 * 1024,
    max_send_wr=16_384,
    max_recv_wr=16_384,
    max_sge=32,
    max_read_sge=32,
    max_cqe=1 << 20,
    max_responder_resources=MAX_READS,
    max_initiator_depth=MAX_READS,
    max_msg_size=(1 << 32) - 1,
    max_connect_private_data=508,
    max_accept_private_data=508,
    max_reject_private_data=508,
)


class SoftPD:
    """A protection domain."""

    def __init__(self, context: SoftContext) -> None:
        self._context = context

    def reg_mr(self, buffer: Buffer, addr: int, length: int, access: int) -> Region:
        """Register memory: the key is good at once."""
        return Region(self._context.stags, self, buffer, addr, length, access)

    def close(self) -> None:
        """Nothing to free: regions and queue pairs hold what they need."""


class SoftCQ(CompletionSink):
    """A completion queue; its completion channel is a direct call."""

    __slots__ = ("_armed", "_on_ready", "_solicited_only")

    def __init__(self, on_ready: Callable[[], None]) -> None:
        super().__init__()
        self._on_ready = on_ready
        self._armed = False
        self._solicited_only = False

    def arm(self, *, solicited_only: bool = False) -> None:
        """Ask for one call of on_ready at the next completion."""
        self._armed = True
        self._solicited_only = solicited_only

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions."""
        pending = self.pending
        if len(pending) <= limit:
            taken = pending.copy()
            pending.clear()
            self.solicited = False
            return taken
        taken = pending[:limit]
        del pending[:limit]
        return taken

    def notify(self) -> None:
        """Call on_ready if armed. Called with something pending, by the loop's callbacks, never within a post."""
        if self._armed and (not self._solicited_only or self.solicited or self._failed()):
            self._armed = False
            self._on_ready()

    def _failed(self) -> bool:
        """An unsuccessful completion counts as solicited (ibv_req_notify_cq)."""
        return any(completion[1] for completion in self.pending)

    def close(self) -> None:
        """Drop what wasn't polled."""
        self._armed = False
        self.pending.clear()


class SoftQP:
    """A queue pair: an endpoint, and a link once it is connected."""

    def __init__(
        self, context: SoftContext, qp_num: int, pd: SoftPD, send_cq: SoftCQ, recv_cq: SoftCQ, max_sge: int
    ) -> None:
        self._context = context
        self.qp_num = qp_num
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        self._max_sge = max_sge
        self._closed = False
        self.link: Link | None = None
        self.endpoint = Endpoint(qp_num, context.stags, pd, send_cq, recv_cq, self._report, recv_bound=KEPT_BYTES)

    @property
    def state(self) -> QPState:
        """INIT, RTS or ERR."""
        return self.endpoint.state

    @property
    def reason(self) -> str:
        """Why the stream ended, in words."""
        return self.endpoint.refused

    @property
    def disconnected(self) -> bool:
        """Whether the peer closed the stream in order."""
        return self.endpoint.orderly

    def post_send(self, wrs: Sequence[SendWR]) -> bool:
        """Execute; True if a completion can be polled."""
        link = self.link
        if link is None:
            raise PostError(errno.EINVAL, "the queue pair isn't connected", posted=0)
        if len(wrs) > 1 or len(wrs[0].sg_list) > 1 or wrs[0].opcode not in _SUPPORTED:
            self._check(wrs)
        self.endpoint.post_send(wrs)
        link.kick(wrs[-1].opcode)
        return bool(self._send_cq.pending)

    def post_run(self, run: RunWR) -> bool:
        """Execute a run; True if a completion can be polled."""
        if self.link is None:
            raise PostError(errno.EINVAL, "the queue pair isn't connected", posted=0)
        self.endpoint.post_run(run)
        # A run is worth a send of its own: the peer works on it while the next one is made.
        self.link.flush()
        return bool(self._send_cq.pending)

    def _check(self, wrs: Sequence[SendWR]) -> None:
        """Refuse what verbs refuse at the post."""
        for index, wr in enumerate(wrs):
            if wr.opcode in _SUPPORTED and len(wr.sg_list) <= self._max_sge:
                continue
            if index:
                self.post_send(wrs[:index])
            if wr.opcode not in _SUPPORTED:
                text = f"{Opcode(wr.opcode).name} isn't offered by the soft device"
                raise PostError(errno.EOPNOTSUPP, text, posted=index)
            text = f"{len(wr.sg_list)} elements, the queue pair takes {self._max_sge}"
            raise PostError(errno.EINVAL, text, posted=index)

    def post_recv(self, wrs: Sequence[RecvWR]) -> bool:
        """Post receives; True if a message was waiting for one."""
        for index, wr in enumerate(wrs):
            if len(wr.sg_list) > self._max_sge:
                self.endpoint.post_recv(wrs[:index])
                raise PostError(
                    errno.EINVAL, f"{len(wr.sg_list)} elements, the queue pair takes {self._max_sge}",
                    posted=index, verb="ibv_post_recv",
                )  # fmt: skip
        self.endpoint.post_recv(wrs)
        if self.link is not None:
            self.link.posted_receives()
        return bool(self._recv_cq.pending)

    def connect_raw(self, remote: QPAddress, path: QPPath) -> None:
        """Not by iWARP: a connection is a TCP connection and its handshake."""
        raise UnsupportedError("the soft device connects by its connection manager only; InfiniBand and RoCE can")

    def to_error(self) -> None:
        """Flush everything posted. A connection with unsent requests is aborted."""
        endpoint = self.endpoint
        unsent = not endpoint.send_queue.idle
        draining = endpoint.draining
        if endpoint.state is not QPState.ERR or draining:
            endpoint.to_error()
        if self.link is not None:
            if unsent:
                self.link.abort()
            elif draining:
                self.link.posted_receives()  # nothing holds the end back any more
        if not self._context.loop.is_closed():
            self._context.loop.call_soon(self.progress)

    def progress(self) -> None:
        """Notify the completion queues. Called by the loop or the link, never within a post."""
        send_cq = self._send_cq
        if send_cq.pending:
            send_cq.notify()
        if self._recv_cq is not send_cq and self._recv_cq.pending:
            self._recv_cq.notify()

    def attach(self, link: Link) -> None:
        """Connected: the link is up."""
        self.link = link

    def _report(self, event: AsyncEventType, reason: str) -> None:
        self._context.loop.call_soon(self._context.report, event, self.qp_num, reason)

    def close(self) -> None:
        """Destroy. Without a disconnect before, the peer sees the connection break."""
        if self._closed:
            return
        self._closed = True
        if self.endpoint.state is not QPState.ERR:
            self.to_error()
        if self.link is not None:
            self.link.release()


_SUPPORTED: Final = frozenset(Opcode) - {Opcode.SEND_WITH_IMM, Opcode.BIND_MW}


class SoftContext:
    """The soft device, open for one event loop."""

    name = NAME
    capabilities = CAPABILITIES

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.stags = StagTable()
        self.staging = memoryview(bytearray(_STAGING))
        self._qp_numbers = itertools.count(1)
        self._handler: Callable[[AsyncEventType, int, str], None] | None = None

    def query_port(self, port_num: int) -> PortAttr:
        """One port, always up."""
        if port_num != 1:
            raise ValueError(f"the soft device has port 1 only, not {port_num}")
        return PortAttr(state="active", max_mtu=65_536, active_mtu=65_536, link_layer="ethernet")

    def query_gids(self, port_num: int) -> list[GIDEntry]:
        """None: addresses are TCP's."""
        return []

    def alloc_pd(self) -> SoftPD:
        """Allocate a protection domain."""
        return SoftPD(self)

    def create_cq(self, cqe: int, on_ready: Callable[[], None]) -> SoftCQ:
        """Create a completion queue; it holds as many as are posted, whatever `cqe` says."""
        return SoftCQ(on_ready)

    def create_qp(
        self, pd: DriverPD, send_cq: DriverCQ, recv_cq: DriverCQ, *, max_send_wr: int, max_recv_wr: int, max_sge: int
    ) -> SoftQP:
        """Create a queue pair, in INIT."""
        assert isinstance(pd, SoftPD)
        assert isinstance(send_cq, SoftCQ)
        assert isinstance(recv_cq, SoftCQ)
        return SoftQP(self, next(self._qp_numbers), pd, send_cq, recv_cq, max_sge)

    def set_async_handler(self, handler: Callable[[AsyncEventType, int, str], None]) -> None:
        """Report asynchronous events to `handler`."""
        self._handler = handler

    def report(self, event: AsyncEventType, qp_num: int, reason: str) -> None:
        """Report an asynchronous event."""
        if self._handler is not None:
            self._handler(event, qp_num, reason)

    def describe_vendor_err(self, vendor_err: int) -> str:
        """Put the error of a Terminate in words."""
        return ddp.describe_vendor_err(vendor_err)

    def close(self) -> None:
        """Close the device: every key is invalid."""
        self.stags.clear()
        self._handler = None
