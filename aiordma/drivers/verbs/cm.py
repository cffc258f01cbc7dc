"""rdma_cm behind the seam: identifiers whose queue pair is not theirs. Their channel is in `cm_channel`.

| step | InfiniBand and RoCE | iWARP |
| --- | --- | --- |
| connect | QP to INIT, rdma_connect; CONNECT_RESPONSE: QP to RTR, RTS, rdma_establish | QP to INIT, rdma_connect in a thread; ESTABLISHED |
| accept | QP to INIT, RTR, RTS, rdma_accept; ESTABLISHED | QP to INIT, rdma_accept; ESTABLISHED |
"""  # noqa: E501 - a table

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Callable
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from aiordma.drivers.base import CMEvent, DriverQP
from aiordma.drivers.verbs.rdmacm import DEVICE_MAX, CMConnParam, IbvQPAttr, RawEvent, conn_param
from aiordma.drivers.verbs.timers import ack_timeout_code, rnr_timer_code
from aiordma.enums import CMEventType, QPState, RejectReason
from aiordma.errors import DeviceError, UnsupportedError
from aiordma.types import ConnParam, SocketAddress

if TYPE_CHECKING:
    from aiordma.drivers.verbs.cm_channel import VerbsCMChannel

__all__ = ["CMQueuePair", "VerbsCMID"]

#: Where ibacm listens: asking it for a route takes as long as it takes.
_ACM: Final = (Path("/run/ibacm.sock"), Path("/run/ibacm.port"))
#: Bits of enum ibv_qp_attr_mask.
_QP_AV: Final = 1 << 7
_QP_MAX_RD_ATOMIC: Final = 1 << 13
_QP_MAX_DEST_RD_ATOMIC: Final = 1 << 17
#: What a call says at once that would also come as an event.
_NO_ADDRESS: Final = frozenset(
    {errno.ENODEV, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EAFNOSUPPORT}
)
_UNREACHABLE: Final = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}
)
#: The peer's CM answered no: numbers of the InfiniBand specification, volume 1, section 12.6.7.
_REJECTED: Final = {
    1: "the peer has no queue pair left",
    3: "the peer has no resources left",
    4: "the peer had sent an answer, and waited too long for ours",
    8: "nothing listens on that port there",
    10: "the peer still holds a connection of this queue pair's number; try again",
    12: "the peer doesn't know its own address in the request (GID)",
    26: "the peer doesn't take this MTU",
    28: "the peer's program rejected the connection",
}
_WORDS: Final = {
    CMEventType.ADDR_ERROR: "address resolution failed",
    CMEventType.ROUTE_ERROR: "route resolution failed",
    CMEventType.CONNECT_ERROR: "the connection manager failed",
    CMEventType.DISCONNECTED: "the peer disconnected",
    CMEventType.ADDR_CHANGE: "the address moved to another device",
}


class CMQueuePair(DriverQP, Protocol):
    """What the connection manager needs of a queue pair besides the seam."""

    @property
    def transport_is_iwarp(self) -> bool:
        """Whether its device speaks iWARP."""

    def modify(self, attr: IbvQPAttr, mask: int) -> None:
        """Change attributes (ibv_modify_qp); its own access rights come on top where the mask has those."""

    def set_disconnected(self, reason: str) -> None:
        """The peer disconnected in order."""

    def hold(self, held: Callable[[], bool]) -> None:
        """Ask `held` at the close: while the identifier holds it, destroying it would wait."""

    def release(self) -> None:
        """The identifier is gone."""


class _Phase(enum.Enum):
    #: Not connected, and nothing under way towards that.
    IDLE = enum.auto()
    #: A connect was started, or an accept, and has no outcome yet.
    OPENING = enum.auto()
    ESTABLISHED = enum.auto()
    #: Disconnected, rejected or failed: no connection comes of it any more.
    ENDED = enum.auto()


class VerbsCMID:
    """A connection identifier (rdma_cm_id): a listener, or one connection from its first step to its end."""

    def __init__(self, channel: VerbsCMChannel, handle: int) -> None:
        self._channel = channel
        self._library = channel.library
        self._handle = handle
        self._phase = _Phase.IDLE
        self._passive = False
        self._qp: CMQueuePair | None = None
        self._param = ConnParam()
        #: This side's IRD and ORD: as agreed, or on iWARP, where drivers tell it differently, as asked for.
        self._depths = (0, 0)
        #: What a connection request asked for.
        self._requested = (0, 0)
        self._disconnecting = False
        self.destroyed = False
        #: Under the channel's lock: a thread is in a call with it.
        self.in_call = False
        self.device_name: str | None = None
        self.local_addr: SocketAddress = ()
        self.peer_addr: SocketAddress = ()

    # -- events -----------------------------------------------------------------------------------------------------

    def on_raw(self, raw: RawEvent, kind: CMEventType, listener: VerbsCMID | None) -> None:
        """Take an event of this identifier, or the request that it came with."""
        status, data, reason = raw.status, raw.private_data, ""
        match kind:
            case CMEventType.ADDR_RESOLVED:
                self._refresh()
                if self.device_name is None:
                    kind, status = CMEventType.ADDR_ERROR, -errno.ENODEV
            case CMEventType.CONNECT_REQUEST:
                self._passive = True
                self._requested = (raw.responder_resources, raw.initiator_depth)
                self._depths = self._requested
                self._refresh()
            case CMEventType.CONNECT_RESPONSE:
                kind, status, reason = self._responded()
            case CMEventType.ESTABLISHED:
                self._phase = _Phase.ESTABLISHED
                self._refresh()
            case CMEventType.REJECTED:
                self._phase = _Phase.ENDED
                status, reason = self._rejected(status, data)
            case CMEventType.UNREACHABLE | CMEventType.CONNECT_ERROR:
                self._phase = _Phase.ENDED
            case CMEventType.DISCONNECTED:
                if self._phase is _Phase.ENDED:
                    return
                self._phase = _Phase.ENDED
                if self._qp is not None and not self._disconnecting:
                    self._qp.set_disconnected(_WORDS[kind])
            case CMEventType.DEVICE_REMOVAL:
                self._library.release_removed(self._handle)
                reason = f"the RDMA device {self.device_name} was removed"
        self._report(kind, status, data, reason or self._words(kind, status), listener)

    def _report(
        self,
        kind: CMEventType,
        status: int = 0,
        private_data: bytes = b"",
        reason: str = "",
        listener: VerbsCMID | None = None,
    ) -> None:
        self._channel.on_event(
            CMEvent(
                event=kind,
                id=self,
                listen_id=listener,
                status=status,
                private_data=private_data,
                responder_resources=self._depths[0],
                initiator_depth=self._depths[1],
                reason=reason,
            )
        )

    def _report_soon(self, kind: CMEventType, status: int, reason: str) -> None:
        """Report what a call of the user's found out, later in the loop; not after destroy()."""

        def report() -> None:
            if not self.destroyed:
                self._report(kind, status, b"", reason)

        self._channel.loop.call_soon(report, context=Context())

    def _words(self, kind: CMEventType, status: int) -> str:
        words = _WORDS.get(kind, "")
        if kind == CMEventType.UNREACHABLE:
            words = "the peer's host didn't answer the request to connect"
            if self._qp is not None and self._qp.transport_is_iwarp:
                words = "TCP connected, but there was no MPA Reply: is it an RDMA server, and does it accept?"
        return f"{words}: {os.strerror(-status)}" if words and status < 0 and status != -errno.ETIMEDOUT else words

    def _rejected(self, status: int, private_data: bytes) -> tuple[int, str]:
        # An MPA Reply that says no is either of the two; to siw, so is a peer that closes without one. That TCP refused
        # is known within rdma_connect.
        if status in (-errno.ECONNREFUSED, -errno.ECONNRESET):
            words = "" if private_data or status == -errno.ECONNREFUSED else ", or closed it without an answer"
            return RejectReason.CONSUMER_DEFINED, _REJECTED[RejectReason.CONSUMER_DEFINED] + words
        if status < 0:
            return status, f"the peer broke off the handshake: {os.strerror(-status)}"
        return status, _REJECTED.get(status, f"the peer's connection manager rejected it, reason {status}")

    def _refresh(self) -> None:
        """Look up addresses and device anew."""
        self.local_addr = self._library.local_addr(self._handle)
        self.peer_addr = self._library.peer_addr(self._handle) or self.peer_addr
        self.device_name = self._library.device_name(self._handle)

    # -- the active side --------------------------------------------------------------------------------------------

    def bind_addr(self, addr: SocketAddress, *, interface: str = "") -> None:
        """Bind a listener's or a client's address (rdma_bind_addr)."""
        if interface:
            raise UnsupportedError("rdma_cm binds to addresses, not to network interfaces")
        self._library.bind_addr(self._handle, addr)
        self._refresh()

    def resolve_addr(self, src: SocketAddress | None, dst: SocketAddress, timeout: float) -> None:
        """Find the device that reaches an address (rdma_resolve_addr)."""
        self.peer_addr = dst
        try:
            self._library.resolve_addr(self._handle, src, dst, _milliseconds(timeout))
        except OSError as error:
            if error.errno not in _NO_ADDRESS:
                raise
            self._report_soon(CMEventType.ADDR_ERROR, -error.errno, os.strerror(error.errno))

    def resolve_route(self, timeout: float) -> None:
        """Find the way there (rdma_resolve_route)."""
        call = partial(self._library.resolve_route, self._handle, _milliseconds(timeout))
        if not self._library.is_iwarp(self._handle) and any(path.exists() for path in _ACM):
            self._channel.call_in_thread(self, self._handle, call, self._route_asked)
            return
        try:
            call()
        except DeviceError as error:
            self._route_asked(error)

    def _route_asked(self, error: DeviceError | None) -> None:
        if error is not None:
            self._report_soon(CMEventType.ROUTE_ERROR, -(error.errno or errno.EIO), str(error))

    def connect(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        """Bring the queue pair to INIT, and send the request (rdma_connect)."""
        self._qp = pair = cast("CMQueuePair", qp)
        self._param = param
        if param.tos is not None:
            self._library.set_tos(self._handle, param.tos)
        self._depths = self._limited(param)
        conn = self._conn_param(private_data)
        self._modify(QPState.INIT)
        self._phase = _Phase.OPENING
        call = partial(self._library.connect, self._handle, conn)
        if pair.transport_is_iwarp:
            # From here on until the handshake's end the kernel waits where either of the two is destroyed: siw for the
            # ten seconds that it gives the peer to answer.
            pair.hold(self._opening)
            self._channel.call_in_thread(self, self._handle, call, self._connect_called)
            return
        try:
            call()
        except DeviceError as error:
            self._connect_called(error)

    def _opening(self) -> bool:
        return self._phase is _Phase.OPENING

    def _connect_called(self, error: DeviceError | None) -> None:
        """Report what rdma_connect found out within the call; else an event comes, or came already."""
        if error is None or self._phase is not _Phase.OPENING:
            return
        self._phase = _Phase.ENDED
        number = error.errno or errno.EIO
        words = os.strerror(number)
        if number == errno.ECONNREFUSED:
            self._report_soon(
                CMEventType.REJECTED,
                RejectReason.INVALID_SERVICE_ID,
                f"{words}: nothing listens on TCP port {self.peer_addr[1]} there",
            )
        elif number == errno.ECONNRESET:
            self._report_soon(CMEventType.REJECTED, -number, "the peer reset the connection before its MPA Reply")
        elif number in _UNREACHABLE:
            self._report_soon(CMEventType.UNREACHABLE, -number, words)
        else:
            self._report_soon(CMEventType.CONNECT_ERROR, -number, str(error))

    def _responded(self) -> tuple[CMEventType, int, str]:
        """The peer accepted: bring the queue pair up, and tell it."""
        try:
            self._to_rts()
            self._library.establish(self._handle)
        except OSError as error:
            self._phase = _Phase.ENDED
            return CMEventType.CONNECT_ERROR, -(error.errno or errno.EIO), str(error)
        self._phase = _Phase.ESTABLISHED
        self._refresh()
        return CMEventType.ESTABLISHED, 0, ""

    # -- the passive side -------------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        """Take connection requests (rdma_listen)."""
        self._library.listen(self._handle, backlog)
        self._refresh()

    def accept(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        """Bring the queue pair up, and send the answer (rdma_accept)."""
        self._qp = pair = cast("CMQueuePair", qp)
        self._param = param
        if param.tos is not None:
            self._library.set_tos(self._handle, param.tos)
        limited = self._limited(param)
        asked = self._requested
        self._depths = (max(1, min(limited[0], asked[0])), max(1, min(limited[1], asked[1])))
        conn = self._conn_param(private_data)
        self._phase = _Phase.OPENING
        try:
            self._modify(QPState.INIT)
            if not pair.transport_is_iwarp:
                self._to_rts()
            self._library.accept(self._handle, conn)
        except OSError as error:
            self._phase = _Phase.ENDED
            self._report_soon(
                CMEventType.CONNECT_ERROR,
                -(error.errno or errno.EIO),
                f"{error} (has the peer left before it was accepted?)",
            )

    def reject(self, private_data: bytes) -> None:
        """Say no (rdma_reject); a peer that left needs no answer."""
        self._phase = _Phase.ENDED
        with contextlib.suppress(DeviceError):
            self._library.reject(self._handle, private_data)

    # -- both sides -------------------------------------------------------------------------------------------------

    def _limited(self, param: ConnParam) -> tuple[int, int]:
        """IRD and ORD as asked for, within the device's limits; one at least, as without any a READ waits for ever."""
        limits = self._library.read_limits(self._handle)
        wanted = (param.responder_resources, param.initiator_depth)
        ird, ord_ = (
            limit if depth is None else max(1, min(depth, limit)) for depth, limit in zip(wanted, limits, strict=True)
        )
        return ird, ord_

    def _conn_param(self, private_data: bytes) -> CMConnParam:
        assert self._qp is not None
        return conn_param(
            self._qp.qp_num,
            private_data,
            responder_resources=min(self._depths[0], DEVICE_MAX),
            initiator_depth=min(self._depths[1], DEVICE_MAX),
            retry_count=self._param.retry_count,
            rnr_retry=self._param.rnr_retry,
        )

    def _modify(self, state: QPState) -> None:
        """Bring the queue pair to a state, as the connection manager has it and ConnParam asks for."""
        assert self._qp is not None
        attr, mask = self._library.init_qp_attr(self._handle, state)
        if not self._qp.transport_is_iwarp:
            self._adjust(attr, mask, state)
        self._qp.modify(attr, mask)
        # What this side asked for is by now what both sides agreed on.
        if mask & _QP_MAX_DEST_RD_ATOMIC:
            self._depths = (attr.max_dest_rd_atomic, self._depths[1])
        if mask & _QP_MAX_RD_ATOMIC:
            self._depths = (self._depths[0], attr.max_rd_atomic)

    def _adjust(self, attr: IbvQPAttr, mask: int, state: QPState) -> None:
        """Set what each side's ConnParam decides for its own queue pair."""
        param = self._param
        if state is QPState.RTR:
            attr.min_rnr_timer = rnr_timer_code(param.rnr_timer)
            if self._passive:
                attr.max_dest_rd_atomic = self._depths[0]
            if param.tos is not None and mask & _QP_AV:
                attr.ah_attr.grh.traffic_class = param.tos
        elif state is QPState.RTS:
            attr.retry_cnt = param.retry_count
            attr.rnr_retry = param.rnr_retry
            if self._passive:
                attr.max_rd_atomic = self._depths[1]
            if param.ack_timeout is not None:
                attr.timeout = ack_timeout_code(param.ack_timeout)

    def _to_rts(self) -> None:
        self._modify(QPState.RTR)
        self._modify(QPState.RTS)

    def disconnect(self) -> None:
        """Start to disconnect, or answer the peer's disconnect (rdma_disconnect); nothing where not connected."""
        if self.destroyed or self._qp is None or self._phase in (_Phase.IDLE, _Phase.OPENING):
            return
        self._disconnecting = True
        try:
            self._library.disconnect(self._handle)
        except DeviceError as error:
            if self._phase is _Phase.ESTABLISHED:  # no event will come of it
                self._phase = _Phase.ENDED
                self._report_soon(CMEventType.DISCONNECTED, 0, f"the connection is gone: {error.strerror}")

    def destroy(self) -> None:
        """Destroy (rdma_destroy_id). A request without an answer is rejected, as the kernel does. Idempotent."""
        if not self.destroyed:
            slow = self._opening() and self._qp is not None and self._qp.transport_is_iwarp
            self._channel.destroy(self, self._handle, slow=slow)

    def released(self) -> None:
        """The struct is gone: so may be the queue pair."""
        if self._qp is not None:
            self._qp.release()


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), 0x7FFFFFFF)
