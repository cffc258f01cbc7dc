"""A soft QP's TCP connection: bytes from the socket to the endpoint, FPDUs from its outbox to the socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from contextvars import Context
from itertools import chain, islice
from typing import Final

from aiordma.drivers.soft.endpoint import Endpoint
from aiordma.drivers.soft.mpa import Framer, Negotiated, mulpdu
from aiordma.drivers.watch import watch_readable, watch_writable
from aiordma.enums import Opcode

#: ULPDU towards our own kind: the length field's limit, less what would make a tagged payload end off a cache line.
OUR_MULPDU: Final = 65_518
#: FPDUs of one sendmsg. Each may have a header, a trailer and CAPABILITIES.max_sge pieces; IOV_MAX is 1,024.
_GATHER: Final = 30
#: While a payload is placed directly, bytes read beyond it: the next header, not a second copy of the data.
_LOOKAHEAD: Final = 2048
#: Seconds for the peer to close its side after we did.
LINGER: Final = 5.0
#: Seconds between looks at a socket that may not be read because too many messages wait.
_PEEK_INTERVAL: Final = 0.25
_TCP_ESTABLISHED: Final = 1
#: Seconds after a wake-up until the socket is looked at again, on a loop that may forget it.
_CHECK_AFTER: Final = 0.25
#: Reads at most of what came before the end that a send noticed.
_LAST_READS: Final = 1024
_WRITE: Final = int(Opcode.RDMA_WRITE)
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Link:
    """Joins an endpoint to its socket, on the event loop.

    One `recv_into` a wake-up into a staging buffer that all links of a device share, since an FPDU is processed before
    the next link reads; a payload in the middle goes from the socket straight to where it belongs. What is posted in
    one turn of the loop leaves together: towards our own kind in one gathered send, towards others one FPDU a
    `sendmsg(MSG_EOR)`, since siw corrupts its kernel's memory when a header is split between two segments.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        endpoint: Endpoint,
        agreed: Negotiated,
        staging: memoryview,
        on_progress: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._loop = loop
        #: Of what the loop calls: the opener's, or a poster's, isn't to live as long as the connection.
        self._context = Context()
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._endpoint = endpoint
        self._outbox = endpoint.outbox
        self._send_queue = endpoint.send_queue
        self._staging = staging
        self._on_progress = on_progress
        self._on_closed = on_closed
        self._framer = (
            Framer(crc=agreed.crc, markers=agreed.send_markers) if agreed.crc or agreed.send_markers else None
        )
        # Markers tie each FPDU to its place in the stream: then one is framed only when it is sent.
        self._gather = agreed.ours and not agreed.send_markers
        self._plain = self._gather and self._framer is None
        self._ours = agreed.ours
        self._carry = b""
        self._skip = 0
        self._reading = False
        self._writing = False
        self._flush_scheduled = False
        self._fresh = True
        self._shut = False
        self._fin = False
        self._timer: asyncio.TimerHandle | None = None
        self._forgetful = not isinstance(loop, asyncio.SelectorEventLoop)
        self._check: asyncio.TimerHandle | None = None
        self.error: OSError | None = None

    def start(self, initiator: bool, agreed: Negotiated, leftover: bytes) -> None:
        """Enter full operation; `leftover` came glued to the handshake."""
        assert self._sock is not None
        limit = OUR_MULPDU
        if not self._ours:
            # An FPDU of a peer that isn't known to be ours must fit a segment (RFC 5044 section 4.1).
            mss = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            limit = min(OUR_MULPDU, mulpdu(mss, agreed.send_markers))
        self._endpoint.start(agreed, initiator=initiator, mulpdu=limit, joined=self._plain)
        self._resume()
        if leftover:
            staging = self._staging
            staging[: len(leftover)] = leftover
            self._feed(0, len(leftover))
        self.flush()

    # -- receiving --------------------------------------------------------------------------------------------------

    def _readable(self) -> bool:
        """Read and process once; False if nothing was there."""
        sock = self._sock
        if sock is None:
            return False
        staging = self._staging
        endpoint = self._endpoint
        placement = endpoint.placement
        start = 0
        try:
            if placement is not None:
                count = sock.recvmsg_into([*placement.views, staging[:_LOOKAHEAD]])[0]
                start, end = self._placed(count)
            elif self._carry:
                here = len(self._carry)
                staging[:here] = self._carry
                count = sock.recv_into(staging[here:])
                end = here + count
            else:
                count = end = sock.recv_into(staging)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.error = error
            self._lost(f"the connection broke: {error.strerror}")
            return False
        if not count:
            if self.error is not None:  # a send met it first
                self._lost(f"the connection broke: {self.error.strerror}")
                return False
            whole = not self._carry and not self._skip and not endpoint.in_message
            if whole:
                self._lost("the peer closed the connection", orderly=True)
            else:
                self._lost("the peer closed the connection in the middle of a message")
            return False
        self._fresh = True
        self._feed(start, end)
        if self._outbox.sent < self._outbox.queued:
            self.flush()
        self._on_progress()
        if self._forgetful and self._check is None and self._sock is not None:
            self._check = self._loop.call_later(_CHECK_AFTER, self._check_again, context=self._context)
        return True

    def _check_again(self) -> None:
        """Look once more after data came, though nothing called for it.

        libuv stops to poll a socket at POLLERR. If the peer's reset is there in the same round as its last data, the
        reader is called for both together and never again.
        """
        self._check = None
        if self._reading:
            self._readable()

    def _placed(self, count: int) -> tuple[int, int]:
        """Note what went to the placement; gives the range of the staging buffer that holds what follows it."""
        endpoint = self._endpoint
        placement = endpoint.placement
        assert placement is not None
        direct = min(count, placement.left)
        if direct:
            self._skip = endpoint.placed(direct)
        return 0, count - direct

    def _feed(self, start: int, end: int) -> None:
        """Process what is in the staging buffer."""
        endpoint = self._endpoint
        staging = self._staging
        if self._skip:
            skipped = min(self._skip, end - start)
            self._skip -= skipped
            start += skipped
        done = start + endpoint.receive(staging[start:end] if start else staging, end - start)
        self._carry = bytes(staging[done:end]) if done < end else b""
        if endpoint.refused or endpoint.receive_queue.kept_bytes:
            self._mind()

    def _mind(self) -> None:
        """Messages are kept, or the stream has ended: see whether to go on reading."""
        endpoint = self._endpoint
        if endpoint.receive_queue.full and self._reading:
            if self._fin:
                endpoint.to_error()  # closing: nobody will receive them, and the peer's end must be seen
            else:
                self._pause()
        if endpoint.refused:
            self.shutdown()

    def posted_receives(self) -> None:
        """Receives were posted: go on reading if too many messages waited."""
        if self._sock is None:
            if not self._endpoint.draining:
                self._on_closed()
        elif not self._reading and not self._endpoint.receive_queue.full:
            self._resume()

    def _resume(self) -> None:
        self._cancel_timer()
        self._watch()

    def _watch(self) -> None:
        assert self._sock is not None
        self._reading = True
        watch_readable(self._loop, self._sock, self._readable)

    def _pause(self) -> None:
        self._loop.remove_reader(self._fd)
        self._reading = False
        self._timer = self._loop.call_later(_PEEK_INTERVAL, self._peek, context=self._context)

    def _peek(self) -> None:
        """Look whether the peer is still there while its data may not be read."""
        self._timer = None
        if self._sock is None or self._reading:
            return
        state = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state != _TCP_ESTABLISHED and not self._shut:
            # It is gone: what the kernel holds is all that will come, so it may be read whatever the bound.
            self._endpoint.receive_queue.bound = 1 << 62
            self._resume()
        else:
            self._timer = self._loop.call_later(_PEEK_INTERVAL, self._peek, context=self._context)

    # -- sending ----------------------------------------------------------------------------------------------------

    def kick(self, opcode: int) -> None:
        """A request was posted: send it.

        The first one since data came goes at once, since somebody probably waits for its answer; so does what was
        queued before it. Others, and WRITEs, which nobody answers, leave together at the end of the turn.
        """
        if self._fresh and opcode != _WRITE and not self._writing:
            self._fresh = False
            self.flush()
        elif not self._flush_scheduled and not self._writing:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_posted, context=self._context)

    def _flush_posted(self) -> None:
        self._flush_scheduled = False
        if not self._writing and self._outbox.sent < self._outbox.queued:
            self.flush()
            self._on_progress()

    def flush(self) -> None:
        """Send what the socket takes; the rest when it is writable again."""
        sock = self._sock
        if sock is None:
            return
        outbox = self._outbox
        try:
            small = outbox.small
            if small and not outbox.made and self._plain:
                # Joined: to copy so little is cheaper than a gather list.
                data = small[0] if len(small) == 1 else b"".join(small)
                sent = sock.send(data)
                if sent == len(data):
                    outbox.sent += len(small)
                    small.clear()
                else:
                    outbox.small_left(sent)
            while outbox.sent < outbox.queued and not self._writing:
                self._endpoint.fill()
                if not (self._send_gathered(sock) if self._gather else self._send_records(sock)):
                    self._wait_writable()
            if self._shut and not self._writing:
                self._shut_down()
        except (BlockingIOError, InterruptedError):
            self._wait_writable()
        except OSError as error:
            self._send_failed(error)
        if self._send_queue.leaving:
            self._send_queue.records_left()

    def _send_failed(self, error: OSError) -> None:
        """The peer is gone, but what it sent before may still be here: send nothing more, and read it first."""
        if self._loop.is_closed():
            self._lost("")  # nobody can read it
        elif self.error is None:
            self.error = error
            self._writing = self._outbox.blocked = True
            # Not here: this may be within a post.
            self._loop.call_soon(self._read_last, context=self._context)

    def _read_last(self) -> None:
        """Read what came before the end that a send noticed, then end."""
        # It is all that will come, so it is read whatever the bound on messages that wait.
        reads = _LAST_READS
        while reads and self._readable():
            reads -= 1
        assert self.error is not None
        self._lost(f"the connection broke: {self.error.strerror}")

    def _wait_writable(self) -> None:
        self._writing = self._outbox.blocked = True
        assert self._sock is not None
        watch_writable(self._loop, self._sock, self._writable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        self._writing = self._outbox.blocked = False
        self.flush()
        self._on_progress()

    def _frame(self, count: int) -> None:
        """Give the first `count` FPDUs their CRC and markers, in the order they leave."""
        outbox = self._outbox
        if self._framer is not None:
            for index in range(outbox.framed, count):
                # A copy: the peer may read memory that its owner changes meanwhile, and a CRC must fit what it is of.
                whole = b"".join(outbox.made[index])
                outbox.made[index] = tuple(self._framer.frame((whole,)))
                outbox.framed = index + 1

    def _send_gathered(self, sock: socket.socket) -> bool:
        """Send many FPDUs in one call; False if the socket is full."""
        wire = self._outbox.made
        count = min(len(wire), _GATHER)
        self._frame(count)
        buffers = list(chain.from_iterable(islice(wire, count)))
        try:
            sent = sock.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return False
        total = sum(map(len, buffers))
        if sent == total:
            self._outbox.left(count)
            return True
        self._left(sent)
        return False

    def _send_records(self, sock: socket.socket) -> bool:
        """Send one FPDU a call; False if the socket is full."""
        wire = self._outbox.made
        while wire:
            self._frame(1)
            record = wire[0]
            try:
                sent = sock.sendmsg(record, (), socket.MSG_EOR)
            except (BlockingIOError, InterruptedError):
                return False
            if sent < sum(map(len, record)):
                self._left(sent)
                return False
            self._outbox.left(1)
        return True

    def _left(self, sent: int) -> None:
        """Note a short write: drop what left, keep the rest of the FPDU it stopped in."""
        wire = self._outbox.made
        while sent >= (size := sum(map(len, wire[0]))):
            sent -= size
            self._outbox.left(1)
        if sent:
            rest: list[bytes | memoryview] = []
            for buffer in wire[0]:
                if sent < len(buffer):
                    rest.append(memoryview(buffer)[sent:])
                sent = max(0, sent - len(buffer))
            wire[0] = tuple(rest)
            self._outbox.partial = True

    # -- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Send what is in the outbox, then end our direction (FIN); the peer ends the other."""
        if self._shut or self._sock is None:
            return
        self._shut = True
        if not self._writing:
            self.flush()

    def _shut_down(self) -> None:
        if self._sock is None or self._fin:
            return
        self._fin = True
        self._cancel_timer()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        if not self._reading:
            self._watch()
        self._timer = self._loop.call_later(LINGER, self._lost, "the peer didn't close its side", context=self._context)

    def _lost(self, reason: str, *, orderly: bool = False) -> None:
        """The stream is over; the end is reported when the messages that came before it are delivered."""
        if self._sock is None:
            return
        self.close()
        if self._loop.is_closed():
            return  # nobody can be told
        self._endpoint.ended(reason, orderly=orderly)
        if self._shut and self._endpoint.draining:
            self._endpoint.to_error()  # this side is closing: nobody will receive what is left
        self._loop.call_soon(self._on_progress, context=self._context)
        if not self._endpoint.draining:
            self._on_closed()

    def abort(self) -> None:
        """End without waiting for anything; unsent data is dropped, and the peer sees a reset."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._lost("this side aborted the connection")

    def release(self) -> None:
        """Nobody uses it any more: end without waiting for the peer, in order if all is sent and the FIN too."""
        if self._fin:
            self._lost("this side closed the connection")
        else:
            self.abort()

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._cancel_timer()
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self._reading = self._writing = False
        sock.close()

    @property
    def closed(self) -> bool:
        """Whether the socket is gone."""
        return self._sock is None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
