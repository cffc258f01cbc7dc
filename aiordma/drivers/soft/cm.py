"""The soft device's connection manager: TCP and MPA start-up as rdma_cm's events (RFC 5044 section 7, RFC 6581)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

from aiordma.drivers.base import CMEvent, DriverQP
from aiordma.drivers.soft.ddp import encode_terminate
from aiordma.drivers.soft.link import Link
from aiordma.drivers.soft.mpa import (
    CRC32C_AVAILABLE,
    INSUFFICIENT_IRD,
    LOCAL_ERROR,
    NO_COMMON_RTR,
    NOT_NEGOTIATED,
    Framer,
    Initiator,
    MPAConfig,
    Negotiated,
    Responder,
    StartupFrame,
    parse_frame,
)
from aiordma.drivers.soft.rnic import MAX_READS, NAME, SoftContext, SoftQP
from aiordma.enums import CMEventType, RejectReason
from aiordma.errors import ProtocolError, UnsupportedError
from aiordma.types import ConnParam, SocketAddress

#: Seconds for the Reply, and for the Request behind an accepted TCP connection: siw's own.
REPLY_TIMEOUT: Final = 10.0
REQUEST_TIMEOUT: Final = 5.0
#: The largest start-up frame: header and 512 bytes.
_FRAME_MAX: Final = 532
_ACCEPTS_PER_WAKEUP: Final = 64
_REFUSED: Final = frozenset({errno.ECONNREFUSED})


def _family(addr: SocketAddress) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in str(addr[0]) else socket.AF_INET


class SoftCMID:
    """A connection identifier: a listener, or one connection from its handshake to its end."""

    device_name: str | None = None

    def __init__(self, channel: SoftCMChannel) -> None:
        self._channel = channel
        self._loop = channel.loop
        self._sock: socket.socket | None = None
        self._src: SocketAddress | None = None
        self._dst: SocketAddress | None = None
        self.local_addr: SocketAddress = ()
        self.peer_addr: SocketAddress = ()
        self._destroyed = False
        self._timer: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._initiator: Initiator | None = None
        self._responder: Responder | None = None
        self._frame: StartupFrame | None = None
        self._revision = 2
        self._qp: SoftQP | None = None
        self._param = ConnParam()
        self._private_data = b""
        self._link: Link | None = None
        self._ended = False
        #: Of a listener: accepted connections whose Request hasn't come.
        self._arriving: set[SoftCMID] = set()
        self._backlog = 0

    # -- both sides -------------------------------------------------------------------------------------------------

    def _emit(self, event: CMEventType, *, status: int = 0, private_data: bytes = b"", reason: str = "") -> None:
        self._emit_event(CMEvent(event=event, id=self, status=status, private_data=private_data, reason=reason))

    def _emit_event(self, event: CMEvent) -> None:
        """Report later in the loop, never within a call of the user's; not after destroy()."""

        def report() -> None:
            if not self._destroyed:
                self._channel.on_event(event)

        self._loop.call_soon(report)

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_socket(self) -> None:
        self._stop_timer()
        sock, self._sock = self._sock, None
        if sock is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(sock.fileno())
                self._loop.remove_writer(sock.fileno())
            sock.close()

    def _open_socket(self, family: socket.AddressFamily) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        return sock

    def _receive_frame(self, *, reply: bool) -> StartupFrame | None:
        """Read what is there of a start-up frame; None if it isn't all there.

        Raises:
            ProtocolError: it isn't one.
            ConnectionError: the peer closed.
        """
        assert self._sock is not None
        try:
            data = self._sock.recv(_FRAME_MAX)
        except (BlockingIOError, InterruptedError):
            return None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        self._received += data
        parsed = parse_frame(self._received, reply=reply)
        if parsed is None:
            return None
        frame, size = parsed
        del self._received[:size]
        return frame

    def _establish(self, agreed: Negotiated, *, initiator: bool) -> None:
        """The handshake is done: hand the socket over to a link."""
        self._stop_timer()
        sock, self._sock = self._sock, None
        qp = self._qp
        assert sock is not None
        assert qp is not None
        self._loop.remove_reader(sock.fileno())
        self._loop.remove_writer(sock.fileno())
        _configure(sock, self._param)
        link = Link(
            self._loop, sock, qp.endpoint, agreed, self._channel.context.staging, qp.progress, self._link_closed
        )
        self._link = link
        qp.attach(link)
        self._emit_event(
            CMEvent(
                event=CMEventType.ESTABLISHED,
                id=self,
                private_data=agreed.private_data if initiator else b"",
                responder_resources=agreed.ird,
                initiator_depth=agreed.ord,
            )
        )
        link.start(initiator, agreed, bytes(self._received))
        self._received.clear()
        self._loop.call_soon(qp.progress)

    def _link_closed(self) -> None:
        if self._qp is not None and not self._ended:
            self._ended = True
            self._emit(CMEventType.DISCONNECTED, reason=self._qp.reason)

    def disconnect(self) -> None:
        """Send what is in the outbox, then FIN (rdma_disconnect)."""
        if self._link is not None:
            self._link.shutdown()

    def destroy(self) -> None:
        """Let go of everything (rdma_destroy_id). A request without an answer is rejected, as the kernel does.

        Closing it without a word would have the peer ask once more, in revision 1.
        """
        if self._destroyed:
            return
        self._destroyed = True
        if self._responder is not None and self._sock is not None:
            self.reject(b"")
        self._close_socket()
        for arriving in list(self._arriving):
            arriving.destroy()
        self._arriving.clear()
        if self._link is not None:
            self._link.release()
        self._channel.forget(self)

    # -- the active side --------------------------------------------------------------------------------------------

    def bind_addr(self, addr: SocketAddress) -> None:
        """Bind a listener's or a client's address (rdma_bind_addr)."""
        sock = self._open_socket(_family(addr))
        try:
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(addr)
        except OSError:
            sock.close()
            raise
        self._sock = sock
        self.local_addr = sock.getsockname()
        self.device_name = NAME

    def resolve_addr(self, src: SocketAddress | None, dst: SocketAddress, timeout: float) -> None:
        """Every address is reached by TCP, as far as is known before connecting."""
        self._src, self._dst = src, dst
        self.device_name = NAME
        self.peer_addr = dst
        self._emit(CMEventType.ADDR_RESOLVED)

    def resolve_route(self, timeout: float) -> None:
        """TCP finds its own."""
        self._emit(CMEventType.ROUTE_RESOLVED)

    def connect(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        """Connect TCP, then send the MPA Request (rdma_connect)."""
        assert isinstance(qp, SoftQP)
        self._qp, self._param, self._private_data = qp, param, private_data
        self._initiator = Initiator(self._config())
        request = self._initiator.request(private_data)
        assert self._dst is not None
        sock = self._sock or self._open_socket(_family(self._dst))
        self._sock = sock
        self._received.clear()
        if param.tos is not None:
            _set_tos(sock, param.tos)
        if self._src is not None:
            sock.bind(self._src)
        status = sock.connect_ex(self._dst)
        if status in (0, errno.EINPROGRESS):
            self._loop.add_writer(sock.fileno(), self._tcp_connected, request)
        else:
            self._failed(status)

    def _config(self) -> MPAConfig:
        param = self._param
        if param.crc and not CRC32C_AVAILABLE:
            raise UnsupportedError("ConnParam(crc=True) needs CRC32C, which isn't here: pip install 'aiordma[crc]'")
        depth = param.initiator_depth
        resources = param.responder_resources
        return MPAConfig(
            ird=MAX_READS if resources is None else min(resources, MAX_READS),
            ord=MAX_READS if depth is None else min(depth, MAX_READS),
            crc=param.crc,
            crc_available=CRC32C_AVAILABLE,
            revision=self._revision,
        )

    def _tcp_connected(self, request: bytes) -> None:
        sock = self._sock
        assert sock is not None
        self._loop.remove_writer(sock.fileno())
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not status:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sent = sock.send(request)  # at most 532 bytes, into an empty socket buffer
                if sent == len(request):
                    self.local_addr = sock.getsockname()
                    self._loop.add_reader(sock.fileno(), self._reply_readable)
                    self._start_timer(REPLY_TIMEOUT, self._no_reply)
                    return
                status = errno.ENOBUFS
            except OSError as error:
                status = error.errno or errno.EIO
        self._failed(status)

    def _no_reply(self) -> None:
        self._close_socket()
        self._emit(
            CMEventType.UNREACHABLE,
            status=-errno.ETIMEDOUT,
            reason=f"no MPA Reply within {REPLY_TIMEOUT:g} s: is it an RDMA server, and does it accept?",
        )

    def _failed(self, status: int) -> None:
        """TCP didn't connect, or broke before the Reply."""
        self._close_socket()
        reason = os.strerror(status)
        if status in _REFUSED:
            self._emit(
                CMEventType.REJECTED,
                status=RejectReason.INVALID_SERVICE_ID,
                reason=f"{reason}: nothing listens on TCP port {self.peer_addr[1]} there",
            )
        elif status in (errno.ECONNRESET, errno.EPIPE):
            self._emit(
                CMEventType.REJECTED, status=-status, reason="the peer reset the connection before its MPA Reply"
            )
        else:
            self._emit(CMEventType.UNREACHABLE, status=-status, reason=reason)

    def _reply_readable(self) -> None:
        assert self._initiator is not None
        reply = None
        try:
            reply = self._receive_frame(reply=True)
            if reply is None:
                return
            agreed = self._initiator.complete(reply)
        except ProtocolError as error:
            self._refuse_reply(reply, error)
            self._close_socket()
            self._emit(CMEventType.CONNECT_ERROR, status=-errno.EPROTO, reason=f"the MPA Reply is faulty: {error}")
        except OSError as error:
            if self._revision > 1 and not self._received:
                # A peer older than RFC 6581 closes on revision 2: once more, with revision 1.
                self._close_socket()
                self._revision = 1
                assert self._qp is not None
                try:
                    self.connect(self._qp, self._param, self._private_data)
                except OSError as again:
                    self._failed(again.errno or errno.EIO)
            else:
                self._failed(error.errno or errno.ECONNRESET)
        else:
            if isinstance(agreed, Negotiated):
                self._establish(agreed, initiator=True)
                return
            self._close_socket()
            self._emit(
                CMEventType.REJECTED,
                status=RejectReason.CONSUMER_DEFINED,
                private_data=agreed.private_data,
                reason="the peer's program rejected the connection",
            )

    def _refuse_reply(self, reply: StartupFrame | None, error: ProtocolError) -> None:
        """Tell the peer by a Terminate why its Reply won't do, if it was a Reply (RFC 6581 section 6)."""
        if reply is None or error.code not in (INSUFFICIENT_IRD, NO_COMMON_RTR):
            return
        framer = Framer(crc=self._param.crc or reply.crc, markers=reply.markers)
        self._send_reply(b"".join(framer.frame([encode_terminate(error, b"")])))

    # -- the passive side -------------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        """Accept TCP connections, and report each whose MPA Request came (rdma_listen)."""
        assert self._sock is not None
        self._backlog = max(1, backlog)
        self._sock.listen(backlog)
        self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKEUP):
            if self._sock is None or len(self._arriving) >= self._backlog:
                # More wait in the kernel; each Request that comes or doesn't makes room.
                if self._sock is not None:
                    self._loop.remove_reader(self._sock.fileno())
                return
            try:
                sock, addr = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._accept_failed(error)
                return
            sock.setblocking(False)
            arriving = SoftCMID(self._channel)
            arriving.device_name = NAME
            arriving._arrive(self, sock, addr)

    def _accept_failed(self, error: OSError) -> None:
        """Out of descriptors or memory: leave the queue alone for a second, as asyncio does, and say so."""
        assert self._sock is not None
        self._loop.call_exception_handler(
            {"message": f"the listener at {self.local_addr} can't accept; it tries again in 1 s", "exception": error}
        )
        self._loop.remove_reader(self._sock.fileno())
        self._start_timer(1.0, self._accept_again)

    def _accept_again(self) -> None:
        self._timer = None
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def _arrive(self, listener: SoftCMID, sock: socket.socket, addr: SocketAddress) -> None:
        self._sock = sock
        self.peer_addr = addr
        self._listener = listener
        listener._arriving.add(self)
        self._channel.ids.add(self)
        try:
            self.local_addr = sock.getsockname()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it is gone already
            self._not_arrived()
            return
        self._loop.add_reader(sock.fileno(), self._request_readable)
        self._start_timer(REQUEST_TIMEOUT, self._not_arrived)

    def _left_listener(self) -> None:
        listener = self._listener
        listener._arriving.discard(self)  # noqa: SLF001
        if listener._timer is None:  # noqa: SLF001
            listener._accept_again()  # noqa: SLF001

    def _not_arrived(self) -> None:
        """No Request, or none worth the name: close without a word (RFC 5044 section 7.1)."""
        self.destroy()
        self._left_listener()

    def _request_readable(self) -> None:
        responder = Responder(self._config())
        try:
            frame = self._receive_frame(reply=False)
            if frame is None:
                return
            responder.request(frame)
        except ProtocolError as error:
            if error.code == LOCAL_ERROR:  # no CRC here: the peer may know
                self._responder = responder
                self.reject(str(error).encode())
            self._not_arrived()
            return
        except OSError:
            self._not_arrived()
            return
        assert self._sock is not None
        self._stop_timer()
        self._responder = responder
        self._frame = frame
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_soon(self._left_listener)
        self._emit_event(
            CMEvent(
                event=CMEventType.CONNECT_REQUEST,
                id=self,
                listen_id=self._listener,
                private_data=frame.private_data,
                # A peer that tells nothing is shown as 0, as siw does.
                responder_resources=frame.ord if frame.ord != NOT_NEGOTIATED else 0,
                initiator_depth=frame.ird if frame.ird != NOT_NEGOTIATED else 0,
            )
        )

    def accept(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        """Send the Reply and enter full operation (rdma_accept)."""
        assert isinstance(qp, SoftQP)
        assert self._frame is not None
        self._qp, self._param = qp, param
        config = self._config()
        responder = Responder(config)
        responder.request(self._frame)
        reply, agreed = responder.accept(private_data, config.ird, config.ord)
        if self._send_reply(reply):
            self._establish(agreed, initiator=False)
        else:
            self._close_socket()
            self._emit(
                CMEventType.CONNECT_ERROR, status=-errno.ECONNRESET, reason="the peer left before it was accepted"
            )

    def reject(self, private_data: bytes) -> None:
        """Send a Reply that says no, and close (rdma_reject)."""
        assert self._responder is not None
        reply = self._responder.reject(private_data)
        if self._sock is not None:
            self._send_reply(reply)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        self._close_socket()

    def _send_reply(self, reply: bytes) -> bool:
        if self._sock is None:
            return False
        try:
            return self._sock.send(reply) == len(reply)
        except OSError:
            return False


class SoftCMChannel:
    """The event channel of one loop."""

    def __init__(self, context: SoftContext, on_event: Callable[[CMEvent], None]) -> None:
        self.context = context
        self.loop = context.loop
        self.on_event = on_event
        self.ids: set[SoftCMID] = set()

    def create_id(self) -> SoftCMID:
        """Create an identifier (rdma_create_id)."""
        cm_id = SoftCMID(self)
        self.ids.add(cm_id)
        return cm_id

    def forget(self, cm_id: SoftCMID) -> None:
        """An identifier was destroyed."""
        self.ids.discard(cm_id)

    def close(self) -> None:
        """Destroy what is left."""
        for cm_id in list(self.ids):
            cm_id.destroy()


def _set_tos(sock: socket.socket, tos: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)


def _configure(sock: socket.socket, param: ConnParam) -> None:
    """Set what the parameters ask for; a peer that vanished is noticed within twice the keep-alive."""
    if param.keepalive is None:
        return
    seconds = max(1, int(param.keepalive))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Three probes in as much time again as the idle time before them.
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", max(1, seconds // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", seconds * 2000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
