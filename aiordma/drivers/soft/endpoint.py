"""The protocol state of one soft QP: what arrives is checked, placed, answered and delivered. No I/O, no clock.

The link feeds it bytes and sends what is in its outbox. The rules are those of RFC 5040, 5041 and 7306.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.ddp import DDP_UNTAGGED, RDMAP_OPERATION, RDMAP_PROTECTION, fault
from aiordma.drivers.soft.mpa import RTR, Negotiated, check_crc
from aiordma.drivers.soft.outbox import Outbox
from aiordma.drivers.soft.placement import Placement
from aiordma.drivers.soft.receive_queue import ReceiveQueue, TooLong
from aiordma.drivers.soft.responder import Responder
from aiordma.drivers.soft.send_queue import COPY_LIMIT, CompletionSink, ReadRun, SendFault, SendQueue
from aiordma.drivers.soft.stag import LocalFault, StagTable
from aiordma.enums import AsyncEventType, QPState, WCStatus
from aiordma.errors import ProtocolError
from aiordma.types import RecvWR, RunWR, SendWR

_PREFIX: Final = ddp.PREFIX.unpack_from
_TAGGED: Final = ddp.TAGGED_HEADER.unpack_from
_UNTAGGED: Final = ddp.UNTAGGED_HEADER.unpack_from

#: The smallest FPDU, a tagged one of nothing.
_SMALLEST: Final = 20
# An attribute of an Enum costs a look-up through its metaclass.
_RTS: Final = QPState.RTS
_ERR: Final = QPState.ERR

_WRITE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_WRITE
_WRITE_MORE: Final = ddp.TAGGED | ddp.OP_WRITE
_RESPONSE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_READ_RESPONSE
_RESPONSE_MORE: Final = ddp.TAGGED | ddp.OP_READ_RESPONSE
_SEND_LAST: Final = ddp.UNTAGGED_LAST | ddp.OP_SEND
_READ: Final = ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST


class Endpoint:
    """One QP's protocol, from RDMA Stream start to Terminate.

    Attributes:
        state: INIT until `start`, then RTS, then ERR.
        outbox: what is to be sent.
        placement: where the next bytes from the peer belong, if in the middle of a payload.
        refused: why the stream ended, in words; empty while it goes on.
        orderly: it ended since the peer closed it, between two FPDUs and without a fault.
        terminating: a Terminate is in the outbox; nothing may follow it.
        draining: the stream ended; messages that came before are still waiting for their receive.
    """

    def __init__(
        self,
        qp_num: int,
        stags: StagTable,
        pd: object,
        send_sink: CompletionSink,
        recv_sink: CompletionSink,
        report: Callable[[AsyncEventType, str], None],
        *,
        recv_bound: int,
    ) -> None:
        self._stags = stags
        self._pd = pd
        self._report = report
        self.outbox = Outbox()
        self.send_queue = SendQueue(qp_num, stags, pd, self.outbox, send_sink)
        self.responder = Responder(stags, pd, self.outbox)
        self.receive_queue = ReceiveQueue(qp_num, stags, pd, recv_sink, recv_bound)
        self.state = QPState.INIT
        self.placement: Placement | None = None
        self.refused = ""
        self.orderly = False
        self.terminating = False
        self.draining = False
        self._crc = False
        self._joined = False
        self._first = True
        self._response_got = 0
        self._written = 0
        self._last_write = 0
        #: Sequence number of the next Atomic Response (RFC 5041 section 5.1).
        self._atomic_msn = 1

    # -- from above -------------------------------------------------------------------------------------------------

    def start(self, agreed: Negotiated, *, initiator: bool, mulpdu: int, joined: bool = False) -> None:
        """The MPA handshake is done: enter full operation (RFC 5044 section 4, RFC 6581 section 6).

        Args:
            agreed: what the handshake settled.
            initiator: this side sent the Request.
            mulpdu: the largest ULPDU towards this peer.
            joined: FPDUs leave as they are made, several in one buffer: no CRC, no markers, no record boundaries.
        """
        self._crc = agreed.crc
        self.responder.start(agreed.ird, mulpdu)
        self._joined = joined
        self.state = QPState.RTS
        queue = self.send_queue
        queue.start(agreed.ord, mulpdu, joined=joined)
        if initiator:
            if agreed.rtr & RTR.WRITE:
                queue.send_rtr_write()
            elif agreed.rtr & RTR.READ:
                queue.send_rtr_read()
            elif agreed.rtr & RTR.SEND:
                queue.send_rtr_send()
            self._first = False
            queue.release()
        else:
            # A responder sends no FPDU before it has received one.
            self.receive_queue.rtr_expected = bool(agreed.rtr & RTR.SEND)

    def post_send(self, wrs: Sequence[SendWR]) -> None:
        """Execute send work requests in order."""
        queue = self.send_queue
        if self.state is _ERR:
            queue.post_flushed(wrs)
            return
        try:
            queue.post(wrs)
        except SendFault as error:
            self._fail(error)

    def post_run(self, run: RunWR) -> None:
        """Execute a run of work requests."""
        if self.state is _ERR:
            self.send_queue.post_flushed(run.expand())
            return
        try:
            self.send_queue.post_run(run)
        except SendFault as error:
            self._fail(error)

    def post_recv(self, wrs: Sequence[RecvWR]) -> None:
        """Post receives in order."""
        queue = self.receive_queue
        for wr in wrs:
            if self.state is _ERR and not self.draining:
                queue.post_flushed(wr)
                continue
            try:
                queue.post(wr)
                if self.draining and queue.drained:
                    self.draining = False
                    queue.flush(0)
            except LocalFault as error:
                self._fail_recv(error.status)
            except TooLong as error:
                self._too_long(error, b"")

    def to_error(self) -> None:
        """Move to IBV_QPS_ERR: flush."""
        self._flush(None, 0, 0)

    # -- from the peer ----------------------------------------------------------------------------------------------

    def receive(self, buf: memoryview, end: int) -> int:
        """Process the whole FPDUs in `buf[:end]`, and give the number of bytes that are done with.

        What is left is the start of an FPDU; if its payload can be placed already, `placement` says where the
        rest goes. Nothing is ever allocated by a length in a header.
        """
        pos = 0
        try:
            while end - pos >= _SMALLEST and self.state is _RTS:
                length, control, stag, to = _TAGGED(buf, pos)
                after = pos + (length + 9 & ~3)
                if after > end:
                    return pos + self._receive_part(buf, pos, end, length, control)
                if self._crc:
                    check_crc(buf[pos:after], after - pos - 4)
                if control == _RESPONSE_LAST:
                    self._response(buf, pos, length, stag, to)
                elif control == _READ:
                    self.responder.read_request(buf, pos, length)
                elif control == _WRITE_LAST and length > 14:
                    size = length - 14
                    self._stags.write_target(self._pd, stag, to, size)[:] = buf[pos + 16 : pos + 16 + size]
                    self._last_write, self._written = self._written + size, 0
                elif control != _SEND_LAST or not self.receive_queue.whole(buf, pos, length):
                    self._other(buf, pos, length, control)
                pos = after
                if self._first:
                    self._first_fpdu()
            if pos < end < pos + _SMALLEST and self.state is _RTS:
                self._check_start(buf, pos, end)
        except ddp.RequestError as error:
            self._terminate(error, error.offender)
            return end
        except ProtocolError as error:
            self._terminate(error, bytes(buf[pos : min(end, pos + 48)]))
            return end
        except SendFault as error:
            self._fail(error)
            return end
        except LocalFault as error:
            self._fail_recv(error.status)
            return end
        except TooLong as error:
            self._too_long(error, bytes(buf[pos : min(end, pos + 20)]))
            return end
        return pos if self.state is _RTS else end

    def _check_start(self, buf: memoryview, pos: int, end: int) -> None:
        """See whether the first bytes of an FPDU can become one, before a header is here."""
        if end - pos >= 4:
            length, control = _PREFIX(buf, pos)
            if length < ddp.TAGGED_ULPDU:
                if self._crc:  # nothing in it may be believed before it is checked
                    after = pos + (length + 9 & ~3)
                    if after > end:
                        return
                    check_crc(buf[pos:after], after - pos - 4)
                if not self._joined or control not in (runs.REQUEST, runs.RESPONSE):
                    ddp.check_control(control)
                raise fault(ddp.DDP_TAGGED, ddp.BOUNDS) if control & 0x8000 else fault(DDP_UNTAGGED, 4)

    def placed(self, count: int) -> int:
        """`count` bytes were put at `placement`: note it. Gives the bytes of pad and CRC field to skip, or 0."""
        placement = self.placement
        assert placement is not None
        placement.left -= count
        views = placement.views
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
        if placement.left:
            return 0
        self._end_placement()
        try:
            if placement.revoked:
                raise fault(ddp.DDP_TAGGED, ddp.BAD_STAG)
            if placement.message is None:
                self._tagged_done(placement.control, placement.size)
            elif placement.control & ddp.LAST:
                self.receive_queue.last(placement.message)
            if self._first:
                self._first_fpdu()
        except ProtocolError as error:
            self._terminate(error, b"")
        except SendFault as error:
            self._fail(error)
        return placement.tail

    def _end_placement(self) -> None:
        placement, self.placement = self.placement, None
        if placement is not None:
            placement.end()

    def ended(self, reason: str, *, orderly: bool = False) -> None:
        """The stream's end came: whatever is outstanding has no answer any more.

        Messages that came before it and wait for a receive are still delivered: `draining` until they are.
        """
        if not self.refused:
            self.refused = reason
            self.orderly = orderly
        if self.state is _ERR:
            return
        if self.receive_queue.drained:
            self._flush(None, 0, 0)
            return
        self.draining = True
        self.state = QPState.ERR
        self._end_placement()
        self.send_queue.flush(None, 0, 0)
        self.outbox.cut(0)
        self.responder.flush()

    @property
    def in_message(self) -> bool:
        """Whether the last segment that came wasn't the last of its message."""
        return bool(
            self.placement is not None or self._written or self._response_got or self.receive_queue.current is not None
        )

    def fill(self) -> None:
        """Make FPDUs of the messages that wait in the outbox."""
        try:
            self.outbox.fill()
        except ProtocolError as error:
            # The source of a response was deregistered halfway: what follows it can't be sent either.
            self.outbox.cut(0)
            self._terminate(error, b"")

    def _receive_part(self, buf: memoryview, pos: int, end: int, length: int, control: int) -> int:
        """Start to place an FPDU that isn't all here; gives the bytes taken.

        Without CRC only: with it, nothing may be placed before it is checked.
        """
        here = end - pos
        opcode = control & 0xF
        pad_and_crc = (-length - 2 & 3) + 4
        # A payload that is all here waits for its CRC field: then the FPDU is whole.
        if self._crc or here >= length + 2:
            return 0
        if control & 0x8000:
            if length < COPY_LIMIT or opcode == runs.OP_RESPONSE:
                return 0  # so little isn't worth it, and a run's is scattered
            size = length - ddp.TAGGED_ULPDU
            _, _, stag, to = _TAGGED(buf, pos)
            views = list(self._tagged(control, stag, to, size))
            region = self._stags.regions[stag] if opcode == ddp.OP_WRITE else None
            placement = Placement(control, views, size, pad_and_crc, region=region)
            head = 16
        elif ddp.OP_SEND <= opcode <= ddp.OP_SEND_SE_INV and length > ddp.UNTAGGED_ULPDU + COPY_LIMIT:
            if not self.receive_queue.receive_posted:
                return 0  # a kept message grows by whole FPDUs that are here
            ddp.check_control(control)
            message = self.receive_queue.segment(buf, pos, control)
            size = length - ddp.UNTAGGED_ULPDU
            views = self.receive_queue.place(message, size)
            placement = Placement(control, views, size, pad_and_crc, message=message)
            head = 20
        else:
            return 0
        taken = here - head
        start = pos + head
        self.placement = placement
        for view in placement.views:
            stop = min(start + len(view), end)
            view[: stop - start] = buf[start:stop]
            start = stop
        self.placed(taken)
        return head + taken

    # -- tagged: Write and Read Response ----------------------------------------------------------------------------

    def _response(self, buf: memoryview, pos: int, length: int, stag: int, to: int) -> None:
        """Place the last segment of a Read Response."""
        size = length - ddp.TAGGED_ULPDU
        queue = self.send_queue
        if queue.outstanding:
            oldest = queue.outstanding[0]
            if isinstance(oldest, tuple):
                _, views, read_stag, read_to, total, atomic = oldest
                if (
                    stag == read_stag and to == read_to and size == total
                    and len(views) < 2 and not self._response_got and not atomic
                ):  # fmt: skip
                    if size:
                        views[0][:] = buf[pos + 16 : pos + 16 + size]
                    queue.responded()
                    return
        self._tagged_whole(buf, pos, _RESPONSE_LAST, stag, to, size)

    def _run_response(self, buf: memoryview, pos: int, length: int) -> None:
        """Place the answer to READs of the oldest run."""
        _, _, _, msn = _TAGGED(buf, pos)
        outstanding = self.send_queue.outstanding
        run = outstanding[0] if outstanding else None
        if not isinstance(run, ReadRun):
            raise fault(RDMAP_OPERATION, 6)
        count, rest = divmod(length - ddp.TAGGED_ULPDU, run.wr.size)
        if rest or not 0 < count <= run.wr.count - run.start or msn != run.msn + run.start:
            raise fault(ddp.DDP_TAGGED, ddp.BOUNDS)
        run.place(buf[pos + 16 : pos + 2 + length], count)
        self.send_queue.responded_run(run, count)

    def _tagged_whole(self, buf: memoryview, pos: int, control: int, stag: int, to: int, size: int) -> None:
        """Process a tagged FPDU that is all here."""
        start = pos + 16
        views = self._tagged(control, stag, to, size)
        if len(views) == 1:
            views[0][:] = buf[start : start + size]
        else:
            for view in views:
                stop = start + len(view)
                view[:] = buf[start:stop]
                start = stop
        self._tagged_done(control, size)

    def _tagged(self, control: int, stag: int, to: int, size: int) -> Sequence[memoryview]:
        """Check a tagged header, and give the memory its payload goes to."""
        if size < 0:
            raise fault(ddp.DDP_TAGGED, ddp.BOUNDS)
        if control == _WRITE_LAST or control == _WRITE_MORE:
            return [self._stags.write_target(self._pd, stag, to, size)] if size else []
        if control != _RESPONSE_LAST and control != _RESPONSE_MORE:
            ddp.check_control(control)
            # Only DDP's reserved bits are left to differ; they are ignored on receipt.
            return self._tagged(control & 0xC3CF, stag, to, size)
        outstanding = self.send_queue.outstanding
        oldest = outstanding[0] if outstanding else None
        if not isinstance(oldest, tuple) or oldest[5]:
            raise fault(RDMAP_OPERATION, 6)
        _, views, read_stag, read_to, total, _ = oldest
        got = self._response_got
        if size or got:
            if stag != read_stag:
                raise fault(ddp.DDP_TAGGED, ddp.BAD_STAG)
            if to != read_to + got & ddp.MASK64:
                raise fault(ddp.DDP_TAGGED, ddp.BOUNDS)
        if size == total and not got and control == _RESPONSE_LAST:
            return views
        if got + size > total or (control == _RESPONSE_LAST and got + size != total):
            raise fault(ddp.DDP_TAGGED, ddp.BOUNDS)
        return ddp.gather(views, got, size) if size else []

    def _tagged_done(self, control: int, size: int) -> None:
        """The payload of a tagged FPDU is placed."""
        if control & 0xF == ddp.OP_WRITE:
            self._written += size
            if control & ddp.LAST:
                self._last_write, self._written = self._written, 0
        elif control & ddp.LAST:
            self._response_got = 0
            self.send_queue.responded()
        else:
            self._response_got += size

    # -- untagged -----------------------------------------------------------------------------------------------------

    def _other(self, buf: memoryview, pos: int, length: int, control: int) -> None:
        """Process a whole FPDU that isn't one of the most frequent ones, or isn't what it should be."""
        if self._joined and control == runs.RESPONSE:
            self._run_response(buf, pos, length)
            return
        if self._joined and control == runs.REQUEST:
            self.responder.run_request(buf, pos, length)
            return
        ddp.check_control(control)
        opcode = control & 0xF
        if control & 0x8000:
            _, _, stag, to = _TAGGED(buf, pos)
            self._tagged_whole(buf, pos, control, stag, to, length - ddp.TAGGED_ULPDU)
            return
        if length < ddp.UNTAGGED_ULPDU:
            raise fault(DDP_UNTAGGED, 4)
        if opcode in (ddp.OP_SEND, ddp.OP_SEND_SE, ddp.OP_SEND_INV, ddp.OP_SEND_SE_INV):
            if self.receive_queue.rtr_expected and length == ddp.UNTAGGED_ULPDU and control & ddp.LAST:
                self.receive_queue.ready_to_receive(buf, pos)
                return
            message = self.receive_queue.segment(buf, pos, control)
            self.receive_queue.store(message, buf[pos + 20 : pos + 2 + length])
            if control & ddp.LAST:
                self.receive_queue.last(message)
        elif opcode == ddp.OP_IMMEDIATE or opcode == ddp.OP_IMMEDIATE_SE:
            self.receive_queue.immediate(buf, pos, length, control, self._last_write)
        elif opcode == ddp.OP_ATOMIC_REQUEST:
            self.responder.atomic_request(buf, pos, length, control)
        elif opcode == ddp.OP_ATOMIC_RESPONSE:
            self._atomic_response(buf, pos, length, control)
        elif opcode == ddp.OP_TERMINATE:
            self._terminated(buf, pos, length)
        else:  # a Read Request without the last flag, or with reserved bits set
            if not control & ddp.LAST:
                raise fault(DDP_UNTAGGED, 4)
            self.responder.read_request(buf, pos, length)

    def _atomic_response(self, buf: memoryview, pos: int, length: int, control: int) -> None:
        if length != ddp.ATOMIC_RESPONSE_ULPDU or not control & ddp.LAST:
            raise fault(DDP_UNTAGGED, 5 if length > ddp.ATOMIC_RESPONSE_ULPDU else 4)
        _, _, _, qn, msn, mo, request, old = ddp.ATOMIC_RESPONSE.unpack_from(buf, pos)
        if qn != ddp.QN_ATOMIC_RESPONSE:
            raise fault(DDP_UNTAGGED, 1)
        if msn != self._atomic_msn or mo:
            raise fault(DDP_UNTAGGED, 4 if mo else 3)
        self._atomic_msn = msn + 1 & ddp.MASK32
        outstanding = self.send_queue.outstanding
        if (
            not outstanding
            or isinstance(outstanding[0], ReadRun)
            or not outstanding[0][5]
            or outstanding[0][2] != request
        ):
            raise fault(RDMAP_OPERATION, 6)
        # Verbs deliver the old value in the host's byte order.
        ddp.NATIVE_U64.pack_into(outstanding[0][1][0], 0, old)
        self.send_queue.responded()

    def _first_fpdu(self) -> None:
        """The responder has received its first FPDU: from now on it may send."""
        self._first = False
        self.receive_queue.rtr_expected = False
        self.send_queue.release()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _terminated(self, buf: memoryview, pos: int, length: int) -> None:
        """The peer sent a Terminate: fail what it refused, flush the rest."""
        _, _, _, qn, _, _ = _UNTAGGED(buf, pos)
        if qn != ddp.QN_TERMINATE:
            raise fault(DDP_UNTAGGED, 1)
        message = ddp.decode_terminate(bytes(buf[pos + 20 : pos + 2 + length]), first=self._first)
        self.refused = f"the peer's device ended the connection: {ddp.describe(*message[:3])}"
        failed = self.send_queue.requested(message.msn) if message.refused_request else None
        status = WCStatus.REM_OP_ERR
        if (message.layer, message.etype) == RDMAP_PROTECTION:
            status = WCStatus.REM_ACCESS_ERR
        elif (message.layer, message.etype, message.code) in ((0, 2, 7), (1, 2, 2)):
            status = WCStatus.REM_INV_REQ_ERR
        self._flush(failed, status, ddp.vendor_err(*message[:3]))
        self._report(AsyncEventType.QP_FATAL, self.refused)

    def _terminate(self, error: ProtocolError, offender: bytes) -> None:
        """The peer broke a rule: tell it by a Terminate, and end the stream."""
        self._flush(None, 0, 0, keep=self.send_queue.stable_output)
        self.outbox.put(ddp.encode_terminate(error, offender))
        self.terminating = True
        self.refused = f"this side ended the connection, since the peer's request was refused: {error}"
        kind = AsyncEventType.QP_ACCESS_ERR if error.layer < 2 else AsyncEventType.QP_FATAL
        self._report(kind, self.refused)

    def _fail(self, error: SendFault) -> None:
        """A request of our own can't be executed: it fails, the rest flushes. What completed before still leaves."""
        self._flush(error.wr, error.status, 0, keep=self.send_queue.stable_output)
        self._own_fault(f"a request of this side failed: {error.status.name}")

    def _fail_recv(self, status: WCStatus) -> None:
        """A receive can't take its message."""
        self.receive_queue.flush(status)
        self._flush(None, 0, 0, keep=self.send_queue.stable_output)
        self._own_fault(f"a receive of this side failed: {status.name}")

    def _own_fault(self, reason: str) -> None:
        """End the stream for a fault of our own, which to the peer is no end in order (RFC 5040 section 4.8)."""
        self.outbox.put(ddp.encode_terminate(fault(ddp.RDMAP_CATASTROPHIC, 0), b""))
        self.terminating = True
        self.refused = reason

    def _too_long(self, error: TooLong, offender: bytes) -> None:
        """A message is longer than its receive: both sides learn of it."""
        self.receive_queue.flush(WCStatus.LOC_LEN_ERR, ddp.length_vendor_err(error.size))
        self._terminate(fault(DDP_UNTAGGED, 5), offender)
        self.refused = f"a message of {error.size} bytes or more came, longer than its receive"

    def _flush(self, failed: SendWR | None, status: int, vendor_err: int, *, keep: int = 0) -> None:
        """Enter IBV_QPS_ERR. Of the FPDUs that haven't left, those up to number `keep` still may."""
        self.state = QPState.ERR
        self.draining = False
        self._end_placement()
        self.send_queue.flush(failed, status, vendor_err)
        self.receive_queue.flush(0)
        self.outbox.cut(keep)
        self.responder.flush()
