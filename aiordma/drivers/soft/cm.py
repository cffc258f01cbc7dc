"""The soft device's connection manager: TCP and MPA start-up as rdma_cm's events (RFC 5044 section 7, RFC 6581)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Final

from aiordma.drivers.base import CMEvent, DriverQP
from aiordma.drivers.soft.acceptor import Acceptor
from aiordma.drivers.soft.handshake import mpa_config, receive_frame, refuse_reply, send_whole
from aiordma.drivers.soft.link import Link
from aiordma.drivers.soft.mpa import LOCAL_ERROR, NOT_NEGOTIATED, Initiator, Negotiated, Responder, StartupFrame
from aiordma.drivers.soft.rnic import NAME, SoftContext, SoftQP
from aiordma.drivers.soft.sockets import (
    bound_socket,
    open_socket,
    set_keepalive,
    set_tos,
)
from aiordma.drivers.watch import unwatch, watch_readable, watch_writable
from aiordma.enums import CMEventType, RejectReason
from aiordma.errors import ProtocolError
from aiordma.types import ConnParam, SocketAddress

#: Seconds for the Reply, and for the Request behind an accepted TCP connection: siw's own.
REPLY_TIMEOUT: Final = 10.0
REQUEST_TIMEOUT: Final = 5.0
#: Bytes behind a Request that are kept for after its answer. An initiator may send none (RFC 5044 section 7.1).
_EARLY_MAX: Final = 4096
_REFUSED: Final = frozenset({errno.ECONNREFUSED})


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
        #: Of a listener: what accepts, and the connections whose Request hasn't been reported.
        self._acceptor: Acceptor | None = None
        self._arriving: set[SoftCMID] = set()
        #: Of a connection that came in: its listener, and where it counts until its request is answered.
        self._listener: SoftCMID | None = None
        self._waits_at: Acceptor | None = None
        self._gone = "the peer left before it was accepted"

    # -- both sides -------------------------------------------------------------------------------------------------

    def _emit(self, event: CMEventType, *, status: int = 0, private_data: bytes = b"", reason: str = "") -> None:
        self._emit_event(CMEvent(event=event, id=self, status=status, private_data=private_data, reason=reason))

    def _emit_event(self, event: CMEvent) -> None:
        """Report later in the loop, never within a call of the user's; not after destroy()."""

        def report() -> None:
            if not self._destroyed:
                self._channel.on_event(event)

        self._soon(report)

    def _soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback, context=Context())

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        # A timer that is cancelled keeps its context until its time would have come.
        self._timer = self._loop.call_later(seconds, callback, context=Context())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_socket(self) -> None:
        self._stop_timer()
        sock, self._sock = self._sock, None
        if sock is not None:
            unwatch(self._loop, sock)
            sock.close()

    def _establish(self, agreed: Negotiated, *, initiator: bool) -> None:
        """The handshake is done: hand the socket over to a link."""
        self._stop_timer()
        sock, self._sock = self._sock, None
        qp = self._qp
        assert sock is not None
        assert qp is not None
        unwatch(self._loop, sock)
        set_keepalive(sock, self._param)
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
        self._soon(qp.progress)

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
        self._answered()
        if self._listener is not None:
            self._listener._arriving.discard(self)  # noqa: SLF001
        if self._acceptor is not None:
            self._acceptor.close()
        for arriving in list(self._arriving):
            arriving.destroy()
        if self._link is not None:
            self._link.release()
        self._channel.forget(self)

    # -- the active side --------------------------------------------------------------------------------------------

    def bind_addr(self, addr: SocketAddress, *, interface: str = "") -> None:
        """Bind a listener's or a client's address (rdma_bind_addr), on one network interface if one is named."""
        self._sock = bound_socket(addr, interface)
        self.local_addr = self._sock.getsockname()
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
        self._initiator = Initiator(mpa_config(param, self._revision))
        request = self._initiator.request(private_data)
        assert self._dst is not None
        sock = self._sock or open_socket(self._dst)
        self._sock = sock
        self._received.clear()
        if param.tos is not None:
            set_tos(sock, param.tos)
        if self._src is not None:
            sock.bind(self._src)
        status = sock.connect_ex(self._dst)
        if status in (0, errno.EINPROGRESS):
            watch_writable(self._loop, sock, partial(self._tcp_connected, request))
        else:
            self._failed(status)

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
                    watch_readable(self._loop, sock, self._reply_readable)
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
        assert self._sock is not None
        reply = None
        try:
            reply = receive_frame(self._sock, self._received, reply=True)
            if reply is None:
                return
            agreed = self._initiator.complete(reply)
        except ProtocolError as error:
            refuse_reply(self._sock, self._param, reply, error)
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

    # -- the passive side -------------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        """Accept TCP connections, and report each whose MPA Request came (rdma_listen).

        No more than `backlog` wait for their Request or for its answer; the others wait in the kernel.
        """
        assert self._sock is not None
        self._sock.listen(backlog)
        sock, self._sock = self._sock, None
        self._acceptor = Acceptor(self._loop, sock, backlog, self._arrived)

    def _arrived(self, sock: socket.socket, addr: SocketAddress) -> None:
        arriving = SoftCMID(self._channel)
        arriving.device_name = NAME
        arriving._arrive(self, sock, addr)

    def _arrive(self, listener: SoftCMID, sock: socket.socket, addr: SocketAddress) -> None:
        self._sock = sock
        self.peer_addr = addr
        self._listener = listener
        self._waits_at = listener._acceptor
        listener._arriving.add(self)
        self._channel.ids.add(self)
        try:
            self.local_addr = sock.getsockname()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it is gone already
            self.destroy()
            return
        watch_readable(self._loop, sock, self._request_readable)
        self._start_timer(REQUEST_TIMEOUT, self.destroy)

    def _request_readable(self) -> None:
        """Report the Request; who sends none worth the name is closed without a word (RFC 5044 section 7.1)."""
        sock, listener = self._sock, self._listener
        assert sock is not None
        assert listener is not None
        responder = Responder(mpa_config(self._param, self._revision))
        try:
            frame = receive_frame(sock, self._received, reply=False)
            if frame is None:
                return
            responder.request(frame)
        except ProtocolError as error:
            if error.code == LOCAL_ERROR:  # no CRC here: the peer may know
                self._responder = responder
                self.reject(str(error).encode())
            self.destroy()
            return
        except OSError:
            self.destroy()
            return
        self._stop_timer()
        self._responder = responder
        self._frame = frame
        unwatch(self._loop, sock)  # libuv watches a socket that was reset meanwhile only if told anew
        watch_readable(self._loop, sock, self._early_readable)
        # Right before the report, and not yet: a listener destroyed in between still has to destroy this one.
        self._soon(partial(listener._arriving.discard, self))  # noqa: SLF001
        self._emit_event(
            CMEvent(
                event=CMEventType.CONNECT_REQUEST,
                id=self,
                listen_id=listener,
                private_data=frame.private_data,
                # A peer that tells nothing is shown as 0, as siw does.
                responder_resources=frame.ord if frame.ord != NOT_NEGOTIATED else 0,
                initiator_depth=frame.ird if frame.ird != NOT_NEGOTIATED else 0,
            )
        )

    def _early_readable(self) -> None:
        """Notice a peer that leaves while its request waits for an answer; the answer finds out."""
        assert self._sock is not None
        try:
            while data := self._sock.recv(_EARLY_MAX):
                self._received += data
                if len(self._received) > _EARLY_MAX:
                    self._gone = "the peer sent data before it was accepted, which MPA forbids"
                    break
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self._received.clear()
        self._close_socket()

    def _answered(self) -> None:
        """Make room for another connection at the listener. Idempotent."""
        acceptor, self._waits_at = self._waits_at, None
        if acceptor is not None:
            acceptor.left()

    def accept(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        """Send the Reply and enter full operation (rdma_accept)."""
        assert isinstance(qp, SoftQP)
        assert self._frame is not None
        self._qp, self._param = qp, param
        config = mpa_config(param, self._revision)
        responder = Responder(config)
        responder.request(self._frame)
        reply, agreed = responder.accept(private_data, config.ird, config.ord)
        self._answered()
        if send_whole(self._sock, reply):
            self._establish(agreed, initiator=False)
        else:
            self._close_socket()
            self._emit(CMEventType.CONNECT_ERROR, status=-errno.ECONNRESET, reason=self._gone)

    def reject(self, private_data: bytes) -> None:
        """Send a Reply that says no, and close (rdma_reject)."""
        assert self._responder is not None
        reply = self._responder.reject(private_data)
        self._answered()
        if self._sock is not None:
            send_whole(self._sock, reply)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        self._close_socket()


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
