"""The receive queue of a soft QP: posted receives, and messages that came before their receive. No I/O."""

from __future__ import annotations

from collections import deque
from typing import Final

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.ddp import DDP_UNTAGGED, RDMAP_OPERATION, fault
from aiordma.drivers.soft.send_queue import CompletionSink
from aiordma.drivers.soft.stag import StagTable
from aiordma.enums import Access, WCFlags, WCOpcode, WCStatus
from aiordma.types import RecvWR

_UNTAGGED: Final = ddp.UNTAGGED_HEADER.unpack_from
_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
_RECV: Final = int(WCOpcode.RECV)
_RECV_IMM: Final = int(WCOpcode.RECV_RDMA_WITH_IMM)
_WITH_IMM: Final = int(WCFlags.WITH_IMM)
_WITH_INV: Final = int(WCFlags.WITH_INV)

#: Bytes charged for each message that waits, besides its own: empty ones aren't free.
_MESSAGE_COST: Final = 128


class Message:
    """A message of queue 0 on its way in: placed in a receive's memory, or kept until one is posted."""

    __slots__ = ("complete", "imm_data", "kept", "opcode", "placed", "views", "wr", "written")

    def __init__(self, opcode: int, imm_data: int) -> None:
        self.opcode = opcode
        self.imm_data = imm_data
        self.placed = 0
        self.complete = False
        self.wr: RecvWR | None = None
        self.views: list[memoryview] = []
        self.kept = bytearray()
        self.written = 0


class TooLong(Exception):  # noqa: N818 - never leaves the driver
    """The message is longer than its receive.

    Attributes:
        size: bytes of it that came, so far.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class ReceiveQueue:
    """Receives in the order they were posted, consumed by messages in the order they came (one each, even if empty).

    A message without a posted receive is kept here while everything else goes on: pausing the stream at once would
    deadlock a peer that awaits a READ before its next SEND. Past `bound` bytes the link stops reading.

    Attributes:
        kept_bytes: what is kept, a charge per message included.
        bound: of `kept_bytes`.
        current: the message whose last segment hasn't come.
        failed: the receive that a message didn't fit in.
        msn: sequence number of the message that comes, or is coming (RFC 5041 section 5.1).
        rtr_expected: the first FPDU may be a Send that only says that the peer is ready (RFC 6581).
    """

    def __init__(self, qp_num: int, stags: StagTable, pd: object, sink: CompletionSink, bound: int) -> None:
        self._qp_num = qp_num
        self._stags = stags
        self._pd = pd
        self.sink = sink
        self.bound = bound
        self._posted: deque[RecvWR] = deque()
        self._kept: deque[Message] = deque()
        self.kept_bytes = 0
        self.current: Message | None = None
        self.failed: RecvWR | None = None
        self.msn = 1
        self.rtr_expected = False

    @property
    def full(self) -> bool:
        """Whether no more may be read from the peer until a receive is posted."""
        return self.kept_bytes > self.bound

    @property
    def drained(self) -> bool:
        """Whether no message is kept."""
        return not self._kept

    @property
    def receive_posted(self) -> bool:
        """Whether the next segment of queue 0 has its receive."""
        if self.current is not None:
            return self.current.wr is not None
        return bool(self._posted) and not self._kept

    def post_flushed(self, wr: RecvWR) -> None:
        """Post to a QP in IBV_QPS_ERR."""
        self.sink.pending.append((wr.wr_id, int(WCStatus.WR_FLUSH_ERR), 0, 0, self._qp_num, 0, 0, 0))

    def post(self, wr: RecvWR) -> None:
        """Post a receive, and give it the oldest message that waits.

        Raises:
            LocalFault: its memory doesn't fit.
            TooLong: the message doesn't.
        """
        self._posted.append(wr)
        if self._kept:
            message = self._kept.popleft()
            kept = message.kept
            self.kept_bytes -= len(kept) + _MESSAGE_COST
            message.kept = bytearray()
            message.placed = 0
            self._bind(message)
            self.store(message, memoryview(kept))
            if message.complete:
                self._complete(message)

    # -- from the peer: DDP's queue 0 -----------------------------------------------------------------------------

    def whole(self, buf: memoryview, pos: int, length: int) -> bool:
        """Deliver a Send that is one FPDU to its receive, if nothing is special about it."""
        _, _, _, qn, msn, mo = _UNTAGGED(buf, pos)
        if qn or mo or msn != self.msn or length < 18 or self.rtr_expected:
            return False
        if not self._take(buf[pos + 20 : pos + 2 + length]):
            return False
        self.msn = msn + 1 & ddp.MASK32
        return True

    def segment(self, buf: memoryview, pos: int, control: int) -> Message:
        """Check a header of queue 0, and give the message it belongs to."""
        _, _, invalidate, qn, msn, mo = _UNTAGGED(buf, pos)
        if qn != ddp.QN_SEND:
            raise fault(DDP_UNTAGGED, 1)
        if msn != self.msn:
            raise fault(DDP_UNTAGGED, 3)
        message = self.current
        if message is None:
            if mo:
                raise fault(DDP_UNTAGGED, 4)
            message = self._begin(control & 0xF, invalidate)
        elif mo != message.placed:
            raise fault(DDP_UNTAGGED, 4)
        elif message.opcode != control & 0xF:
            raise fault(RDMAP_OPERATION, 6)
        return message

    def last(self, message: Message) -> None:
        """The last segment of a message of queue 0 is placed: deliver it, in order."""
        if message.opcode in (ddp.OP_SEND_INV, ddp.OP_SEND_SE_INV):
            self._stags.invalidate(self._pd, message.imm_data)
        self.msn = self.msn + 1 & ddp.MASK32
        self._complete(message)

    def immediate(self, buf: memoryview, pos: int, length: int, control: int, written: int) -> None:
        """Deliver Immediate Data, behind a Write of `written` bytes (RFC 7306 section 6)."""
        if length != ddp.UNTAGGED_ULPDU + 8 or not control & ddp.LAST:
            raise fault(DDP_UNTAGGED, 5)
        message = self.segment(buf, pos, control)
        message.imm_data = int.from_bytes(buf[pos + 20 : pos + 24], "big")
        message.written = written
        self.last(message)

    def ready_to_receive(self, buf: memoryview, pos: int) -> None:
        """Take the ready-to-receive message: a Send with nothing to deliver."""
        _, _, _, qn, msn, mo = _UNTAGGED(buf, pos)
        if qn != ddp.QN_SEND or msn != self.msn or mo:
            raise fault(DDP_UNTAGGED, 1 if qn != ddp.QN_SEND else 4 if mo else 3)
        self.msn += 1

    def _take(self, data: memoryview) -> bool:
        """Deliver a whole message to the oldest receive; False if it needs a closer look."""
        if not self._posted or self._kept or self.current is not None:
            return False
        wr = self._posted[0]
        size = len(data)
        if len(wr.sg_list) != 1 or wr.sg_list[0].length < size:
            return False
        self.failed = wr  # if its memory isn't what it was
        self._stags.local(self._pd, wr.sg_list[0], _LOCAL_WRITE)[:size] = data
        self._posted.popleft()
        self.sink.pending.append((wr.wr_id, 0, _RECV, size, self._qp_num, 0, 0, 0))
        return True

    def _begin(self, opcode: int, imm_data: int) -> Message:
        """Start a message: in the oldest posted receive, or kept."""
        message = Message(opcode, imm_data)
        if self._posted and not self._kept:
            self._bind(message)
        else:
            self._kept.append(message)
            self.kept_bytes += _MESSAGE_COST
        self.current = message
        return message

    def _bind(self, message: Message) -> None:
        wr = self._posted[0]
        self.failed = wr
        message.views = [self._stags.local(self._pd, sge, _LOCAL_WRITE) for sge in wr.sg_list]
        message.wr = self._posted.popleft()

    def store(self, message: Message, data: memoryview) -> None:
        """Put the next bytes of a message where they belong.

        Raises:
            TooLong: its receive is shorter.
        """
        if message.wr is None:
            message.kept += data
            message.placed += len(data)
            self.kept_bytes += len(data)
            return
        start = 0
        for view in self.place(message, len(data)):
            end = start + len(view)
            view[:] = data[start:end]
            start = end

    def place(self, message: Message, size: int) -> list[memoryview]:
        """Give the memory for the next `size` bytes of a message that has its receive.

        Raises:
            TooLong: its receive is shorter.
        """
        start = message.placed
        if message.opcode >= ddp.OP_IMMEDIATE:
            return []
        message.placed = end = start + size
        views = message.views
        if len(views) == 1 and end <= len(views[0]):
            return [views[0][start:end]]
        if end > sum(map(len, views)):
            assert message.wr is not None
            self._posted.appendleft(message.wr)
            message.wr = None
            raise TooLong(end)
        return ddp.gather(views, start, size)

    def _complete(self, message: Message) -> None:
        """The last segment is placed: complete the receive, if it has one."""
        message.complete = True
        if self.current is message:
            self.current = None
        wr = message.wr
        if wr is None:
            return
        opcode = message.opcode
        if opcode in (ddp.OP_SEND_SE, ddp.OP_SEND_SE_INV, ddp.OP_IMMEDIATE_SE):
            self.sink.solicited = True
        kind, size, flags = _RECV, message.placed, 0
        if opcode >= ddp.OP_IMMEDIATE:
            kind, size, flags = _RECV_IMM, message.written, _WITH_IMM
        elif opcode in (ddp.OP_SEND_INV, ddp.OP_SEND_SE_INV):
            flags = _WITH_INV
        self.sink.pending.append((wr.wr_id, 0, kind, size, self._qp_num, message.imm_data, flags, 0))

    def flush(self, status: int, vendor_err: int = 0) -> None:
        """Complete everything posted as flushed; the receive that failed, if one did, with `status`."""
        queue = list(self._posted)
        if self.current is not None and self.current.wr is not None:
            queue.insert(0, self.current.wr)
        for wr in queue:
            failed = wr is self.failed and status
            error = status if failed else WCStatus.WR_FLUSH_ERR
            self.sink.pending.append((wr.wr_id, int(error), 0, 0, self._qp_num, 0, 0, vendor_err if failed else 0))
        self._posted.clear()
        self._kept.clear()
        self.kept_bytes = 0
        self.current = None
