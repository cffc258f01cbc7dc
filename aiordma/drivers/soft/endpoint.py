"""The protocol state of one soft QP: what arrives is checked, placed, answered and delivered. No I/O, no clock.

The link feeds it bytes and sends what is in its outbox. The rules are those of RFC 5040, 5041 and 7306.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.ddp import DDP_UNTAGGED, RDMAP_OPERATION, RDMAP_PROTECTION, fault
from aiordma.drivers.soft.mpa import RTR, TRAILERS, Negotiated, check_crc
from aiordma.drivers.soft.outbox import Outbox
from aiordma.drivers.soft.receive_queue import Message, ReceiveQueue, TooLong
from aiordma.drivers.soft.send_queue import COPY_LIMIT, CompletionSink, ReadRun, SendFault, SendQueue
from aiordma.drivers.soft.stag import LocalFault, Region, StagTable
from aiordma.enums import Access, AsyncEventType, QPState, WCStatus
from aiordma.errors import ProtocolError
from aiordma.types import RecvWR, RunWR, SendWR

_PREFIX: Final = ddp.PREFIX.unpack_from
_TAGGED: Final = ddp.TAGGED_HEADER.unpack_from
_UNTAGGED: Final = ddp.UNTAGGED_HEADER.unpack_from
_READ_REQUEST: Final = ddp.READ_REQUEST.unpack_from

#: The smallest FPDU, a tagged one of nothing.
_SMALLEST: Final = 20
# An attribute of an Enum costs a look-up through its metaclass.
_RTS: Final = QPState.RTS
_ERR: Final = QPState.ERR

_WRITE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_WRITE
_WRITE_MORE: Final = ddp.TAGGED | ddp.OP_WRITE
_RESPONSE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_READ_RESPONSE
_RESPONSE_MORE: Final = ddp.TAGGED | ddp.OP_READ_RESPONSE
_PACK_TAGGED: Final = ddp.TAGGED_HEADER.pack
_SEND_LAST: Final = ddp.UNTAGGED_LAST | ddp.OP_SEND
_READ: Final = ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST

_REMOTE_READ: Final = int(Access.REMOTE_READ)
#: Bytes behind a Read Request that make it worth looking for a run.
_RUN_SIZE: Final = (runs.SHORTEST - 1) * runs.REQUEST_SIZE


class Placement:
    """The rest of an FPDU that goes from the socket straight into registered memory."""

    __slots__ = ("control", "left", "message", "size", "tail", "views")

    def __init__(
        self, control: int, views: list[memoryview], size: int, tail: int, message: Message | None = None
    ) -> None:
        self.control = control
        self.views = views
        self.left = sum(map(len, views))
        #: Payload of the whole FPDU.
        self.size = size
        #: Pad and CRC field behind the payload.
        self.tail = tail
        self.message = message


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
        self.receive_queue = ReceiveQueue(qp_num, stags, pd, recv_sink, recv_bound)
        self.state = QPState.INIT
        self.placement: Placement | None = None
        self.refused = ""
        self.orderly = False
        self.terminating = False
        self.draining = False
        self._crc = False
        self._joined = False
        self._payload_limit = 0
        self._small_limit = 0
        self._first = True
        self._send_rtr_expected = False
        self._responder_resources = 0
        self._responses: list[int] = []
        self._response_got = 0
        self._written = 0
        self._last_write = 0
        # Message sequence numbers expected next, and of the last Atomic Response sent (RFC 5041 section 5.1).
        self._recv_msn = 1
        self._request_msn = 1
        self._atomic_msn = 1
        self._atomic_msn_sent = 0

    # -- from above -------------------------------------------------------------------------------------------------

    def start(self, agreed: Negotiated, *, initiator: bool, mulpdu: int, joined: bool = False) -> None:
        """The MPA handshake is done: enter full operation (RFC 5044 section 4, RFC 6581 section 6).

        Args:
            agreed: what the handshake settled.
            initiator: this side sent the Request.
            mulpdu: the largest ULPDU towards this peer.
            joined: FPDUs leave as they are made, several in one buffer: no CRC, no markers, no record boundaries.
        """
        self._joined = joined
        self._crc = agreed.crc
        self._payload_limit = mulpdu - ddp.TAGGED_ULPDU & ~3
        self._small_limit = min(COPY_LIMIT, self._payload_limit)
        self._responder_resources = agreed.ird
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
            self._send_rtr_expected = bool(agreed.rtr & RTR.SEND)

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
            except TooLong:
                self._fail_recv(WCStatus.LOC_LEN_ERR, fault(DDP_UNTAGGED, 5))

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
                if control == _READ:
                    if self._joined and end - after >= _RUN_SIZE and (count := self._read_run(buf, pos, end)):
                        after = pos + count * runs.REQUEST_SIZE
                    else:
                        self._read_request(buf, pos, length)
                elif control == _WRITE_LAST and length > 14:
                    size = length - 14
                    self._stags.write_target(self._pd, stag, to, size)[:] = buf[pos + 16 : pos + 16 + size]
                    self._last_write, self._written = self._written + size, 0
                elif control == _SEND_LAST and self._send_whole(buf, pos, length):
                    pass
                elif control == _RESPONSE_LAST or control == _WRITE_LAST:
                    outstanding = self.send_queue.outstanding
                    if control == _RESPONSE_LAST and outstanding and type(outstanding[0]) is ReadRun:
                        after = self._response_run(outstanding[0], buf, pos, end)
                    else:
                        self._tagged_whole(buf, pos, control, stag, to, length - 14)
                else:
                    self._other(buf, pos, length, control)
                pos = after
                if self._first:
                    self._first_fpdu()
            if pos < end < pos + _SMALLEST and self.state is _RTS:
                self._check_start(buf, pos, end)
        except ProtocolError as error:
            self._terminate(error, bytes(buf[pos : min(end, pos + 48)]))
            return end
        except SendFault as error:
            self._fail(error)
            return end
        except LocalFault as error:
            self._fail_recv(error.status)
            return end
        except TooLong:
            self._fail_recv(WCStatus.LOC_LEN_ERR, fault(DDP_UNTAGGED, 5), bytes(buf[pos : min(end, pos + 20)]))
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
        self.placement = None
        try:
            if placement.message is None:
                self._tagged_done(placement.control, placement.size)
            elif placement.control & ddp.LAST:
                self._deliver(placement.message)
            if self._first:
                self._first_fpdu()
        except ProtocolError as error:
            self._terminate(error, b"")
        except SendFault as error:
            self._fail(error)
        return placement.tail

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
        self.placement = None
        self.send_queue.flush(None, 0, 0)
        self.outbox.cut(0)

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
            if length < COPY_LIMIT:
                return 0  # so little isn't worth it, and may belong to a run
            size = length - ddp.TAGGED_ULPDU
            _, _, stag, to = _TAGGED(buf, pos)
            views = list(self._tagged(control, stag, to, size))
            placement = Placement(control, views, size, pad_and_crc)
            head = 16
        elif ddp.OP_SEND <= opcode <= ddp.OP_SEND_SE_INV and length > ddp.UNTAGGED_ULPDU + COPY_LIMIT:
            if not self.receive_queue.receive_posted:
                return 0  # a kept message grows by whole FPDUs that are here
            ddp.check_control(control)
            message = self._send_segment(buf, pos, control)
            size = length - ddp.UNTAGGED_ULPDU
            placement = Placement(control, self.receive_queue.place(message, size), size, pad_and_crc, message)
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

    def _response_run(self, run: ReadRun, buf: memoryview, pos: int, end: int) -> int:
        """Place responses of a run, as many as are whole; gives the position behind them."""
        wr = run.wr
        step = runs.response_size(wr.size)
        sinks = wr.local_addrs[run.start : run.start + min((end - pos) // step, runs.LONGEST)]
        payloads = runs.decode_responses(buf, pos, wr.lkey, sinks, wr.size) if sinks else ()
        if not payloads:
            # Not what is expected: let it be judged as the response to a single READ.
            self.send_queue.unroll()
            return pos
        run.place(payloads)
        self.send_queue.responded_run(run, len(payloads))
        return pos + step * len(payloads)

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
        if outstanding and isinstance(outstanding[0], ReadRun):
            self.send_queue.unroll()
            outstanding = self.send_queue.outstanding
        if not outstanding or outstanding[0][5]:  # type: ignore[index]
            raise fault(RDMAP_OPERATION, 6)
        _, views, read_stag, read_to, total, _ = outstanding[0]  # type: ignore[misc]
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

    def _read_request(self, buf: memoryview, pos: int, length: int) -> None:
        """Answer a Read Request from registered memory, without a copy where it is large."""
        if length != ddp.READ_REQUEST_ULPDU:
            raise fault(DDP_UNTAGGED, 5 if length > ddp.READ_REQUEST_ULPDU else 4)
        _, _, _, qn, msn, mo, sink_stag, sink_to, size, stag, to = _READ_REQUEST(buf, pos)
        if qn != 1 or msn != self._request_msn or mo or len(self._responses) >= self._responder_resources:
            self._check_request(qn, msn, mo)
        self._request_msn = msn + 1 & 0xFFFFFFFF
        outbox = self.outbox
        limit = self._small_limit
        if 0 < size <= limit:
            view = self._stags.read_source(self._pd, stag, to, size)[1]
            ulpdu = size + 14
            header = _PACK_TAGGED(ulpdu, _RESPONSE_LAST, sink_stag, sink_to)
            outbox.put(b"".join((header, view, TRAILERS[ulpdu & 3])))
        elif size:
            region, view = self._stags.read_source(self._pd, stag, to, size)
            limit = self._payload_limit
            segments = ddp.tagged_segments(ddp.OP_READ_RESPONSE, sink_stag, sink_to, [view], size, limit)
            outbox.put_message(_while_registered(region, segments), -(-size // limit))
        else:  # the source of an empty READ must not be checked
            outbox.put(_PACK_TAGGED(14, _RESPONSE_LAST, sink_stag, sink_to) + TRAILERS[2])
        self._responses.append(outbox.queued)

    def _read_run(self, buf: memoryview, pos: int, end: int) -> int:
        """Answer many Read Requests at once, if they are alike; gives their number, or 0."""
        step = runs.REQUEST_SIZE
        # Size and source STag: without a look at the next one, requests that aren't alike would be taken apart in vain.
        if buf[pos + 32 : pos + 40] != buf[pos + step + 32 : pos + step + 40]:
            return 0
        msn = self._request_msn
        found = runs.Requests(buf, pos, min((end - pos) // step, runs.LONGEST), msn)
        count = found.count
        if count < runs.SHORTEST or not 0 < found.size <= self._small_limit or msn + count > ddp.MASK32:
            return 0
        if len(self._responses) + count > self._responder_resources:
            self._drop_sent_responses()
            if len(self._responses) + count > self._responder_resources:
                return 0
        region = self._stags.find(self._pd, found.stag, found.sources, found.size, _REMOTE_READ)
        if region is None:
            return 0
        outbox = self.outbox
        outbox.put(found.answer(region.whole, region.addr))
        self._request_msn = msn + count
        self._responses.extend((outbox.queued,) * count)
        return count

    def _drop_sent_responses(self) -> None:
        """Forget the numbers of responses that left: done seldom, and many at once."""
        # Of a run's responses, joined in one buffer, some are there before it has left as a whole.
        sent = self.outbox.sent + self.outbox.partial
        self._responses = [number for number in self._responses if number > sent]

    def _check_request(self, qn: int, msn: int, mo: int) -> None:
        """Check queue, sequence and count of a Read or Atomic Request."""
        if qn != ddp.QN_REQUEST:
            raise fault(DDP_UNTAGGED, 1)
        if msn != self._request_msn:
            raise fault(DDP_UNTAGGED, 3)
        if mo:
            raise fault(DDP_UNTAGGED, 4)
        if len(self._responses) >= self._responder_resources:
            self._drop_sent_responses()
            if len(self._responses) >= self._responder_resources:
                raise fault(DDP_UNTAGGED, 2)

    def _other(self, buf: memoryview, pos: int, length: int, control: int) -> None:
        """Process a whole FPDU that isn't one of the three most frequent ones."""
        ddp.check_control(control)
        opcode = control & 0xF
        if control & 0x8000:
            _, _, stag, to = _TAGGED(buf, pos)
            self._tagged_whole(buf, pos, control, stag, to, length - ddp.TAGGED_ULPDU)
            return
        if length < ddp.UNTAGGED_ULPDU:
            raise fault(DDP_UNTAGGED, 4)
        if opcode in (ddp.OP_SEND, ddp.OP_SEND_SE, ddp.OP_SEND_INV, ddp.OP_SEND_SE_INV):
            if self._send_rtr_expected and length == ddp.UNTAGGED_ULPDU and control & ddp.LAST:
                self._send_rtr(buf, pos)
                return
            message = self._send_segment(buf, pos, control)
            self.receive_queue.store(message, buf[pos + 20 : pos + 2 + length])
            if control & ddp.LAST:
                self._deliver(message)
        elif opcode == ddp.OP_IMMEDIATE or opcode == ddp.OP_IMMEDIATE_SE:
            self._immediate(buf, pos, length, control)
        elif opcode == ddp.OP_ATOMIC_REQUEST:
            self._atomic_request(buf, pos, length, control)
        elif opcode == ddp.OP_ATOMIC_RESPONSE:
            self._atomic_response(buf, pos, length, control)
        elif opcode == ddp.OP_TERMINATE:
            self._terminated(buf, pos, length)
        else:  # a Read Request without the last flag, or with reserved bits set
            if not control & ddp.LAST:
                raise fault(DDP_UNTAGGED, 4)
            self._read_request(buf, pos, length)

    def _send_rtr(self, buf: memoryview, pos: int) -> None:
        """Take the ready-to-receive message: a Send with nothing to deliver."""
        _, _, _, qn, msn, mo = _UNTAGGED(buf, pos)
        if qn != ddp.QN_SEND or msn != self._recv_msn or mo:
            raise fault(DDP_UNTAGGED, 1 if qn != ddp.QN_SEND else 4 if mo else 3)
        self._recv_msn += 1

    def _send_whole(self, buf: memoryview, pos: int, length: int) -> bool:
        """Deliver a Send that is one FPDU to its receive, if nothing is special about it."""
        _, _, _, qn, msn, mo = _UNTAGGED(buf, pos)
        if qn or mo or msn != self._recv_msn or length < 18 or self._send_rtr_expected:
            return False
        if not self.receive_queue.take(buf[pos + 20 : pos + 2 + length]):
            return False
        self._recv_msn = msn + 1 & ddp.MASK32
        return True

    def _send_segment(self, buf: memoryview, pos: int, control: int) -> Message:
        """Check a header of queue 0, and give the message it belongs to."""
        _, _, invalidate, qn, msn, mo = _UNTAGGED(buf, pos)
        if qn != ddp.QN_SEND:
            raise fault(DDP_UNTAGGED, 1)
        if msn != self._recv_msn:
            raise fault(DDP_UNTAGGED, 3)
        queue = self.receive_queue
        message = queue.current
        if message is None:
            if mo:
                raise fault(DDP_UNTAGGED, 4)
            message = queue.begin(control & 0xF, invalidate)
        elif mo != message.placed:
            raise fault(DDP_UNTAGGED, 4)
        elif message.opcode != control & 0xF:
            raise fault(RDMAP_OPERATION, 6)
        return message

    def _deliver(self, message: Message) -> None:
        """The last segment of a message of queue 0 is placed: deliver it, in order."""
        if message.opcode in (ddp.OP_SEND_INV, ddp.OP_SEND_SE_INV):
            self._stags.invalidate(self._pd, message.imm_data)
        self._recv_msn = self._recv_msn + 1 & ddp.MASK32
        self.receive_queue.deliver(message)

    def _immediate(self, buf: memoryview, pos: int, length: int, control: int) -> None:
        if length != ddp.UNTAGGED_ULPDU + 8 or not control & ddp.LAST:
            raise fault(DDP_UNTAGGED, 5)
        message = self._send_segment(buf, pos, control)
        message.imm_data = int.from_bytes(buf[pos + 20 : pos + 24], "big")
        message.written = self._last_write
        self._deliver(message)

    def _atomic_request(self, buf: memoryview, pos: int, length: int, control: int) -> None:
        if length != ddp.ATOMIC_REQUEST_ULPDU or not control & ddp.LAST:
            raise fault(DDP_UNTAGGED, 5 if length > ddp.ATOMIC_REQUEST_ULPDU else 4)
        (_, _, _, qn, msn, mo, operation, request, stag, to, data, mask, compare, compare_mask) = (
            ddp.ATOMIC_REQUEST.unpack_from(buf, pos)
        )
        self._check_request(qn, msn, mo)
        self._request_msn = msn + 1 & ddp.MASK32
        old = self._stags.atomic(self._pd, operation & 0xF, stag, to, data, mask, compare, compare_mask)
        self._atomic_msn_sent = self._atomic_msn_sent + 1 & ddp.MASK32
        self.outbox.put(
            ddp.ATOMIC_RESPONSE_FPDU.pack(
                ddp.ATOMIC_RESPONSE_ULPDU, ddp.UNTAGGED_LAST | ddp.OP_ATOMIC_RESPONSE, 0,
                ddp.QN_ATOMIC_RESPONSE, self._atomic_msn_sent, 0, request, old,
            )
        )  # fmt: skip
        self._responses.append(self.outbox.queued)

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
        self._send_rtr_expected = False
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
        self.refused = f"a request of this side failed: {error.status.name}"

    def _fail_recv(self, status: WCStatus, error: ProtocolError | None = None, offender: bytes = b"") -> None:
        """A receive can't take its message."""
        self.receive_queue.flush(status)
        if error is not None:
            self._terminate(error, offender)
        else:
            self._flush(None, 0, 0, keep=self.send_queue.stable_output)
        self.refused = f"a receive of this side failed: {status.name}"

    def _flush(self, failed: SendWR | None, status: int, vendor_err: int, *, keep: int = 0) -> None:
        """Enter IBV_QPS_ERR. Of the FPDUs that haven't left, those up to number `keep` still may."""
        self.state = QPState.ERR
        self.draining = False
        self.placement = None
        self.send_queue.flush(failed, status, vendor_err)
        self.receive_queue.flush(0)
        self.outbox.cut(keep)


def _while_registered(region: Region, segments: Iterator[ddp.FPDU]) -> Iterator[ddp.FPDU]:
    """Make the segments of a response as long as its source is registered."""
    for segment in segments:
        if not region.registered:
            raise fault(RDMAP_PROTECTION, ddp.BAD_STAG)
        yield segment
