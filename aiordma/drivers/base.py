"""The seam: what an RDMA device and its connection manager offer, drawn from verbs and rdma_cm.

A driver posts, polls, arms and reports. It holds no futures, no credits, no retries and no unbounded buffers; all
that is policy and lives above. Everything runs on the thread of the event loop a context was opened for, nothing
here blocks, and no callback is ever made from inside a call that the user above the seam is making.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from attrs import frozen

from aiordma.enums import AsyncEventType, CMEventType, QPState
from aiordma.errors import DeviceError
from aiordma.types import (
    Buffer,
    Capabilities,
    ConnParam,
    DeviceInfo,
    GIDEntry,
    PortAttr,
    QPAddress,
    QPPath,
    RecvWR,
    RunWR,
    SendWR,
    SocketAddress,
)

__all__ = [
    "CMEvent",
    "Completion",
    "Driver",
    "DriverCMChannel",
    "DriverCMID",
    "DriverCQ",
    "DriverContext",
    "DriverMR",
    "DriverPD",
    "DriverQP",
    "PostError",
]

#: struct ibv_wc as a plain tuple, since one is made per completion on the hot path:
#: wr_id, status, opcode, byte_len, qp_num, imm_data or invalidated rkey (host order), wc_flags, vendor_err.
#: As in verbs, an unsuccessful one is only valid in wr_id, status, qp_num and vendor_err.
Completion: TypeAlias = tuple[int, int, int, int, int, int, int, int]


class PostError(DeviceError):
    """A list of work requests was taken in part (bad_wr): the first `posted` are in flight, the rest are not."""

    def __init__(self, errno: int, message: str, *, posted: int, verb: str = "ibv_post_send", hint: str = "") -> None:
        super().__init__(errno, message, verb=verb, hint=hint)
        self.posted = posted


@frozen(kw_only=True)
class CMEvent:
    """An event of the connection manager (struct rdma_cm_event), already acknowledged."""

    event: CMEventType
    id: DriverCMID
    #: CONNECT_REQUEST only: the listener it came in by; `id` is the new one.
    listen_id: DriverCMID | None = None
    #: 0, a negative errno, or a RejectReason.
    status: int = 0
    private_data: bytes = b""
    #: CONNECT_REQUEST: what the peer may have outstanding. ESTABLISHED: this side's IRD.
    responder_resources: int = 0
    #: CONNECT_REQUEST: what the peer accepts at once. ESTABLISHED: this side's ORD.
    initiator_depth: int = 0
    #: In words, where the driver knows more than the status says.
    reason: str = ""


class DriverMR(Protocol):
    """A registered memory region (ibv_mr)."""

    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    def close(self) -> None:
        """Deregister (ibv_dereg_mr). The keys are invalid at once."""


class DriverPD(Protocol):
    """A protection domain (ibv_pd)."""

    def reg_mr(self, buffer: Buffer, addr: int, length: int, access: int) -> DriverMR:
        """Register (ibv_reg_mr). `buffer` exports the memory at `addr`; the caller keeps the export."""

    def close(self) -> None: ...


class DriverCQ(Protocol):
    """A completion queue with its completion channel (ibv_cq, ibv_comp_channel)."""

    def arm(self, *, solicited_only: bool = False) -> None:
        """Ask for one call of on_ready at the next completion (ibv_req_notify_cq).

        A completion that is there already doesn't count: arm, then poll, closes the race.
        """

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions (ibv_poll_cq); fewer than asked means it was empty."""

    def close(self) -> None: ...


class DriverQP(Protocol):
    """A reliable connected queue pair (ibv_qp, IBV_QPT_RC)."""

    @property
    def qp_num(self) -> int: ...
    @property
    def state(self) -> QPState: ...
    @property
    def reason(self) -> str:
        """In IBV_QPS_ERR: why, in words, where the driver knows; else empty."""

    @property
    def disconnected(self) -> bool:
        """In IBV_QPS_ERR: whether that is since the peer disconnected in order."""

    def post_send(self, wrs: Sequence[SendWR]) -> bool:
        """Post a list in one call (ibv_post_send).

        Returns:
            True if a completion can be polled already; the caller polls before it gives the turn back.

        Raises:
            PostError: a part was not taken.
        """

    def post_run(self, run: RunWR) -> bool:
        """Post a run: the same as `post_send(run.expand())`, at a better price where the device has one."""

    def post_recv(self, wrs: Sequence[RecvWR]) -> bool:
        """Post receives (ibv_post_recv). Returns and raises as `post_send`."""

    def connect_raw(self, remote: QPAddress, path: QPPath) -> None:
        """Move from INIT to RTR and RTS by ibv_modify_qp, without rdma_cm: InfiniBand and RoCE.

        Raises:
            DeviceError: the device refuses an attribute; the queue pair is of no use then.
            UnsupportedError: an iWARP device.
        """

    def to_error(self) -> None:
        """Move to IBV_QPS_ERR: everything posted completes, flushed. Idempotent."""

    def close(self) -> None:
        """Destroy (ibv_destroy_qp). Its completions that were not polled are gone."""


class DriverContext(Protocol):
    """An open device (ibv_context), for one event loop."""

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    def query_port(self, port_num: int) -> PortAttr: ...
    def query_gids(self, port_num: int) -> list[GIDEntry]:
        """Give the entries of the port's GID table that aren't zero; none where GIDs don't address queue pairs."""

    def alloc_pd(self) -> DriverPD: ...
    def create_cq(self, cqe: int, on_ready: Callable[[], None]) -> DriverCQ: ...
    def create_qp(
        self, pd: DriverPD, send_cq: DriverCQ, recv_cq: DriverCQ, *, max_send_wr: int, max_recv_wr: int, max_sge: int
    ) -> DriverQP: ...
    def set_async_handler(self, handler: Callable[[AsyncEventType, int, str], None]) -> None:
        """Report asynchronous events: type, the number of the QP (or port) concerned, and a reason in words.

        DEVICE_FATAL is also reported when the device is being removed and no identifier of the connection manager is
        bound to it that would hear DEVICE_REMOVAL. The context is closed soon after it, not within the call.
        """

    def describe_vendor_err(self, vendor_err: int) -> str:
        """Put a completion's vendor_err in words, or answer with an empty string."""

    def close(self) -> None: ...


class DriverCMID(Protocol):
    """A connection identifier (rdma_cm_id). Each call starts a step; its outcome is an event."""

    @property
    def device_name(self) -> str | None:
        """The device, once the address is resolved or a request came in."""

    @property
    def local_addr(self) -> SocketAddress: ...
    @property
    def peer_addr(self) -> SocketAddress: ...
    def bind_addr(self, addr: SocketAddress, *, interface: str = "") -> None:
        """Bind to a local address (rdma_bind_addr): of IPv6, `::` too, without taking IPv4's.

        Args:
            addr: the address; port 0 is any.
            interface: take what comes in by this network interface only: the soft device's, others refuse it.
        """

    def resolve_addr(self, src: SocketAddress | None, dst: SocketAddress, timeout: float) -> None: ...
    def resolve_route(self, timeout: float) -> None: ...
    def listen(self, backlog: int) -> None: ...
    def connect(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None: ...
    def accept(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None: ...
    def reject(self, private_data: bytes) -> None: ...
    def disconnect(self) -> None: ...
    def destroy(self) -> None:
        """Destroy (rdma_destroy_id) from any state. No event of this id is reported afterwards."""


class DriverCMChannel(Protocol):
    """An event channel of the connection manager (rdma_event_channel)."""

    def create_id(self) -> DriverCMID: ...
    def close(self) -> None: ...


class Driver(Protocol):
    """A kind of device."""

    @property
    def name(self) -> str: ...
    def list_devices(self) -> list[DeviceInfo]: ...
    def open(self, name: str, loop: asyncio.AbstractEventLoop) -> DriverContext: ...
    def create_cm_channel(
        self, loop: asyncio.AbstractEventLoop, on_event: Callable[[CMEvent], None]
    ) -> DriverCMChannel: ...
