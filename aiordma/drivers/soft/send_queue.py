"""The send queue of a soft QP: executes work requests, in order, into FPDUs, and completes them in order. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, TypeAlias

from aiordma.drivers.base import Completion
from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.mpa import TRAILERS, trailer
from aiordma.drivers.soft.outbox import Outbox
from aiordma.drivers.soft.stag import LocalFault, Region, StagTable
from aiordma.enums import Access, Opcode, SendFlags, WCOpcode, WCStatus
from aiordma.types import RunWR, SendWR

#: Payload up to this is copied at the post, so the request completes there and then: a memcpy of 4 KiB (0.1 us)
#: is cheaper than the bookkeeping of a zero-copy send.
COPY_LIMIT: Final = 4096

_FENCE: Final = int(SendFlags.FENCE)
_SIGNALED: Final = int(SendFlags.SIGNALED)
_SOLICITED: Final = int(SendFlags.SOLICITED)
_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
_READ_CONTROL: Final = ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST
_WRITE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_WRITE
_PACK_TAGGED: Final = ddp.TAGGED_HEADER.pack
_PACK_IMMEDIATE: Final = ddp.IMMEDIATE_FPDU.pack
_PACK_READ: Final = ddp.READ_REQUEST_FPDU.pack
_ATOMIC_CONTROL: Final = ddp.UNTAGGED_LAST | ddp.OP_ATOMIC_REQUEST

_WC_OPCODE: Final[dict[int, int]] = {
    Opcode.RDMA_WRITE: WCOpcode.RDMA_WRITE,
    Opcode.RDMA_WRITE_WITH_IMM: WCOpcode.RDMA_WRITE,
    Opcode.SEND: WCOpcode.SEND,
    Opcode.SEND_WITH_IMM: WCOpcode.SEND,
    Opcode.SEND_WITH_INV: WCOpcode.SEND,
    Opcode.RDMA_READ: WCOpcode.RDMA_READ,
    Opcode.ATOMIC_CMP_AND_SWP: WCOpcode.COMP_SWAP,
    Opcode.ATOMIC_FETCH_AND_ADD: WCOpcode.FETCH_ADD,
    Opcode.LOCAL_INV: WCOpcode.LOCAL_INV,
}


class SendFault(Exception):  # noqa: N818 - never leaves the driver: it becomes an unsuccessful completion
    """A posted request can't be executed; it is queued, as the one that fails."""

    def __init__(self, wr: SendWR, status: WCStatus) -> None:
        super().__init__(status)
        self.wr = wr
        self.status = status


class CompletionSink:
    """Where completions wait to be polled: what a queue pair knows of its CQ."""

    __slots__ = ("pending", "solicited")

    def __init__(self) -> None:
        self.pending: list[Completion] = []
        #: A completion that counts for an arm with solicited_only is among the pending.
        self.solicited = False


#: A READ or atomic whose response hasn't come, as a plain tuple since one is made for each: the request (None for an
#: RTR), its memory, sink STag (an atomic's request id), sink TO, length, and whether it is an atomic.
Outstanding: TypeAlias = tuple[SendWR | None, Sequence[memoryview], int, int, int, bool]

_Execute: TypeAlias = Callable[[SendWR], bool]


class ReadRun:
    """The outstanding READs of a run: those from `start` on; `msn` is the sequence number of the first of all."""

    __slots__ = ("base", "memory", "msn", "start", "wr")

    def __init__(self, wr: RunWR, region: Region, msn: int) -> None:
        self.wr = wr
        self.memory = region.whole
        self.base = region.addr
        self.msn = msn
        self.start = 0

    def place(self, data: memoryview, count: int) -> None:
        """Put the payload of the next `count` READs where it belongs."""
        end = self.start + count
        runs.scatter(data, self.memory, self.base, self.wr.local_addrs[self.start : end], self.wr.size)
        self.start = end


class SendQueue:
    """Work requests in the order they were posted.

    A request is stalled (behind the handshake, a fence or the ORD) or executed; executed ones wait in `_posted`
    until they are done and everything before them is.

    Attributes:
        outstanding: READs and atomics without a response, oldest first.
        leaving: requests sent from their own memory, whose FPDUs haven't all left.
        hold: nothing may be sent yet: no handshake, or a responder that hasn't seen the first FPDU.
    """

    def __init__(self, qp_num: int, stags: StagTable, pd: object, outbox: Outbox, sink: CompletionSink) -> None:
        self._qp_num = qp_num
        self._stags = stags
        self._pd = pd
        self._outbox = outbox
        self._sink = sink
        self._put = outbox.put
        self._local = stags.local
        self._posted: deque[SendWR] = deque()
        self._stalled: deque[SendWR] = deque()
        self.leaving: deque[tuple[int, int, SendWR]] = deque()
        self.outstanding: deque[Outstanding | ReadRun] = deque()
        #: READs in the outstanding runs beyond one each, so that with the deque's length they count to the ORD.
        self._more = 0
        self._joined = False
        self.hold = True
        self.initiator_depth = 0
        self._payload_limit = 0
        self._untagged_limit = 0
        self._small_limit = 0
        self._send_msn = 0
        self._request_msn = 0
        self._execute: dict[int, _Execute] = {
            Opcode.RDMA_READ: self._read,
            Opcode.RDMA_WRITE: self._write,
            Opcode.RDMA_WRITE_WITH_IMM: self._write_with_imm,
            Opcode.SEND: self._send,
            Opcode.SEND_WITH_INV: self._send,
            Opcode.ATOMIC_CMP_AND_SWP: self._atomic,
            Opcode.ATOMIC_FETCH_AND_ADD: self._atomic,
            Opcode.LOCAL_INV: self._local_inv,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing is posted that isn't complete."""
        return not self._posted and not self._stalled

    def start(self, initiator_depth: int, mulpdu: int, *, joined: bool) -> None:
        """Take the negotiated ORD, the largest ULPDU towards this peer, and whether FPDUs may leave joined."""
        self.initiator_depth = initiator_depth
        self._joined = joined
        # Multiples of 4 need no pad, and a tagged payload in between no realignment.
        self._payload_limit = (mulpdu - ddp.TAGGED_ULPDU) & ~3
        self._untagged_limit = (mulpdu - ddp.UNTAGGED_ULPDU) & ~3
        self._small_limit = min(COPY_LIMIT, self._untagged_limit)

    def release(self) -> None:
        """The handshake is over: send what was posted meanwhile."""
        self.hold = False
        self._advance()

    def post(self, wrs: Sequence[SendWR]) -> None:
        """Execute requests, or queue them behind what must come first.

        Raises:
            SendFault: the memory of one doesn't fit; those behind it are queued.
        """
        for index, wr in enumerate(wrs):
            wr.driver_data = False
            if self._stalled or self.hold or (wr.send_flags & _FENCE and self.outstanding):
                self._stalled.append(wr)
                continue
            try:
                if not self._execute[wr.opcode](wr):
                    self._stalled.append(wr)
            except LocalFault as error:
                self._posted.append(wr)
                self._stalled.extend(wrs[index + 1 :])
                raise SendFault(wr, error.status) from error

    def post_run(self, run: RunWR) -> None:
        """Execute a run, or queue it; as `post` in everything else."""
        if run.opcode != Opcode.RDMA_READ or not self._joined or not 0 < run.size <= self._small_limit:
            self.post(run.expand())
            return
        run.driver_data = False
        if self._stalled or self.hold or not self._run(run):
            self._stalled.append(run)

    def _run(self, wr: SendWR) -> bool:
        """Execute; False if it must wait for responses."""
        if isinstance(wr, RunWR):
            return self._read_run(wr)
        if wr.send_flags & _FENCE and self.outstanding:
            return False
        try:
            return self._execute[wr.opcode](wr)
        except LocalFault as error:
            self._posted.append(wr)
            raise SendFault(wr, error.status) from error

    def _advance(self) -> None:
        """Execute what waited, as far as it goes."""
        stalled = self._stalled
        while stalled and not self.hold:
            wr = stalled.popleft()
            if not self._run(wr):
                stalled.appendleft(wr)
                return

    # -- the operations, RFC 5040 section 5 ---------------------------------------------------------------------

    def _source(self, wr: SendWR) -> tuple[list[memoryview], int]:
        """Give the payload of a request as views, and its length."""
        if wr.inline_data is not None:
            return [memoryview(wr.inline_data)], len(wr.inline_data)
        views = [self._local(self._pd, sge) for sge in wr.sg_list]
        return views, sum(map(len, views))

    def _write(self, wr: SendWR) -> bool:
        data = wr.inline_data
        if data is not None and len(data) <= self._small_limit:
            length = ddp.TAGGED_ULPDU + len(data)
            header = _PACK_TAGGED(length, _WRITE_LAST, wr.rkey, wr.remote_addr)
            self._put(b"".join((header, data, TRAILERS[length & 3])))
            self._copied(wr)
            return True
        views, total = self._source(wr)
        if total <= self._small_limit:
            length = ddp.TAGGED_ULPDU + total
            header = _PACK_TAGGED(length, _WRITE_LAST, wr.rkey, wr.remote_addr)
            self._put(b"".join((header, *views, TRAILERS[length & 3])))
            self._copied(wr)
        else:
            self._posted.append(wr)
            limit = self._payload_limit
            segments = ddp.tagged_segments(ddp.OP_WRITE, wr.rkey, wr.remote_addr, views, total, limit)
            self._send_message(wr, segments, -(-total // limit))
        return True

    def _write_with_imm(self, wr: SendWR) -> bool:
        """RFC 7306 section 6: an RDMA Write, then Immediate Data, whose first four bytes are the verbs' 32 bits."""
        views, total = self._source(wr)
        opcode = ddp.OP_IMMEDIATE_SE if wr.send_flags & _SOLICITED else ddp.OP_IMMEDIATE
        self._send_msn = msn = self._send_msn + 1 & ddp.MASK32
        if total <= self._small_limit:
            length = ddp.TAGGED_ULPDU + total
            header = _PACK_TAGGED(length, _WRITE_LAST, wr.rkey, wr.remote_addr)
            self._put(b"".join((header, *views, TRAILERS[length & 3])))
            control = ddp.UNTAGGED_LAST | opcode
            self._put(_PACK_IMMEDIATE(ddp.IMMEDIATE_ULPDU, control, 0, ddp.QN_SEND, msn, 0, wr.imm_data))
            self._copied(wr)
            return True
        self._posted.append(wr)
        limit = self._payload_limit
        written = ddp.tagged_segments(ddp.OP_WRITE, wr.rkey, wr.remote_addr, views, total, limit)
        data = memoryview(wr.imm_data.to_bytes(4, "big") + bytes(4))
        immediate = ddp.untagged_segments(opcode, 0, msn, [data], 8, 8)
        self._send_message(wr, chain(written, immediate), max(1, -(-total // limit)) + 1)
        return True

    def _send(self, wr: SendWR) -> bool:
        views, total = self._source(wr)
        self._send_msn = msn = self._send_msn + 1 & ddp.MASK32
        solicited = wr.send_flags & _SOLICITED
        invalidate = 0
        if wr.opcode == Opcode.SEND_WITH_INV:
            opcode = ddp.OP_SEND_SE_INV if solicited else ddp.OP_SEND_INV
            invalidate = wr.imm_data
        else:
            opcode = ddp.OP_SEND_SE if solicited else ddp.OP_SEND
        if total <= self._small_limit:
            length = ddp.UNTAGGED_ULPDU + total
            header = ddp.UNTAGGED_HEADER.pack(length, ddp.UNTAGGED_LAST | opcode, invalidate, ddp.QN_SEND, msn, 0)
            self._put(b"".join((header, *views, TRAILERS[length & 3])))
            self._copied(wr)
        else:
            self._posted.append(wr)
            segments = ddp.untagged_segments(opcode, invalidate, msn, views, total, self._untagged_limit)
            self._send_message(wr, segments, -(-total // self._untagged_limit))
        return True

    def _copied(self, wr: SendWR) -> None:
        """Complete a request whose payload was copied; behind a full socket or a long message, only when it has left.

        So the outbox is bounded by the send queue towards a peer that doesn't read.
        """
        if self._outbox.blocked or self._outbox.messages:
            self._posted.append(wr)
            self.leaving.append((self._outbox.queued, 1, wr))
        elif self._posted:
            wr.driver_data = True
            self._posted.append(wr)
        elif wr.send_flags & _SIGNALED:
            self._sink.pending.append((wr.wr_id, 0, _WC_OPCODE[wr.opcode], 0, self._qp_num, 0, 0, 0))

    def _send_message(self, wr: SendWR, segments: ddp.Segments, count: int) -> None:
        """Send from the request's own memory: it is done when the last segment was handed to TCP."""
        count = max(1, count)
        self._outbox.put_message(segments, count)
        self.leaving.append((self._outbox.queued, count, wr))

    def _read(self, wr: SendWR) -> bool:
        outstanding = self.outstanding
        if len(outstanding) + self._more >= self.initiator_depth:
            return self._wait_for_depth()
        sg_list = wr.sg_list
        if len(sg_list) == 1:
            sge = sg_list[0]
            stag, to, total = sge.lkey, sge.addr, sge.length
            views: tuple[memoryview, ...] = (self._local(self._pd, sge, _LOCAL_WRITE),)
        elif not sg_list:
            views = ()
            stag = to = total = 0
        else:
            # One sink goes on the wire. The response is matched with this request, so of a longer scatter list the
            # first element's key and address stand for all of it.
            views = tuple([self._local(self._pd, sge, _LOCAL_WRITE) for sge in sg_list])
            total = sum(map(len, views))
            stag, to = sg_list[0].lkey, sg_list[0].addr
        self._posted.append(wr)
        outstanding.append((wr, views, stag, to, total, False))
        self._request_msn = msn = self._request_msn + 1 & 0xFFFFFFFF
        self._put(_PACK_READ(46, _READ_CONTROL, 0, 1, msn, 0, stag, to, total, wr.rkey, wr.remote_addr))
        return True

    def _wait_for_depth(self) -> bool:
        """A READ or atomic has no place among the outstanding ones: it waits, unless there never is one."""
        if not self.initiator_depth:
            raise LocalFault(WCStatus.LOC_QP_OP_ERR)
        return False

    def _read_run(self, run: RunWR) -> bool:
        free = self.initiator_depth - len(self.outstanding) - self._more
        first = self._request_msn + 1
        region = self._stags.find(self._pd, run.lkey, run.local_addrs, run.size, _LOCAL_WRITE)
        if region is None or run.count > self.initiator_depth or first + run.count > ddp.MASK32:
            # One of them fails, or they can't all go at once: in the order of the posts, one by one.
            requests = run.expand()
            for wr in requests:
                wr.driver_data = False
            self._stalled.extendleft(reversed(requests))
            self._advance()
            return True
        if run.count > free:
            return False
        self._posted.append(run)
        self.outstanding.append(ReadRun(run, region, first))
        self._more += run.count - 1
        self._request_msn += run.count
        step = max(1, runs.LARGEST // run.size)
        for start in range(0, run.count, step):
            sources = run.remote_addrs[start : start + step]
            self._put(runs.encode_request(first + start, run.size, run.rkey, sources))
        return True

    def _atomic(self, wr: SendWR) -> bool:
        if len(self.outstanding) + self._more >= self.initiator_depth:
            return self._wait_for_depth()
        views = [self._local(self._pd, sge, _LOCAL_WRITE) for sge in wr.sg_list]
        if len(views) != 1 or len(views[0]) != 8:
            raise LocalFault(WCStatus.LOC_LEN_ERR)
        self._posted.append(wr)
        self._request_msn = msn = self._request_msn + 1 & ddp.MASK32
        if wr.opcode == Opcode.ATOMIC_FETCH_AND_ADD:
            operands = (wr.compare_add, 0, 0, ddp.MASK64)
            operation = ddp.FETCH_ADD
        else:
            operands = (wr.swap, ddp.MASK64, wr.compare_add, ddp.MASK64)
            operation = ddp.COMPARE_SWAP
        self.outstanding.append((wr, views, msn, 0, 8, True))
        self._put(
            ddp.ATOMIC_REQUEST_FPDU.pack(
                ddp.ATOMIC_REQUEST_ULPDU, _ATOMIC_CONTROL, 0, ddp.QN_REQUEST, msn, 0,
                operation, msn, wr.rkey, wr.remote_addr, *operands,
            )
        )  # fmt: skip
        return True

    def _local_inv(self, wr: SendWR) -> bool:
        region = self._stags.regions.get(wr.rkey)
        if region is None or region.pd is not self._pd:
            raise LocalFault(WCStatus.LOC_PROT_ERR)
        region.close()
        self._posted.append(wr)
        self._finish(wr)
        return True

    # -- ready to receive, RFC 6581 section 6 -------------------------------------------------------------------

    def send_rtr_write(self) -> None:
        """Send a zero-length Write; its STag and offset aren't checked by anyone."""
        header = ddp.TAGGED_HEADER.pack(ddp.TAGGED_ULPDU, ddp.TAGGED_LAST, 1, 0)
        self._put(header + trailer(ddp.TAGGED_ULPDU))

    def send_rtr_read(self) -> None:
        """Send a zero-length Read Request; its response completes nothing."""
        self.outstanding.append((None, (), 0, 0, 0, False))
        self._request_msn += 1
        self._put(_PACK_READ(46, _READ_CONTROL, 0, 1, self._request_msn, 0, 0, 0, 0, 1, 0))

    def send_rtr_send(self) -> None:
        """Send a zero-length Send; it consumes a receive of the peer's."""
        self._send_msn += 1
        self._put(b"".join(next(ddp.untagged_segments(ddp.OP_SEND, 0, self._send_msn, [], 0, 4))))

    # -- completions ----------------------------------------------------------------------------------------------

    def records_left(self) -> None:
        """Complete what was waiting for its FPDUs to be handed to TCP."""
        leaving = self.leaving
        sent = self._outbox.sent
        while leaving and leaving[0][0] <= sent:
            self._finish(leaving.popleft()[2])

    def responded_run(self, run: ReadRun, count: int) -> None:
        """The oldest `count` READs of the oldest run have their responses in place."""
        if run.start < run.wr.count:
            self._more -= count
            return
        self._more -= count - 1
        self.outstanding.popleft()
        self._finish(run.wr)
        if self._stalled:
            self._advance()

    def unroll(self) -> None:
        """Replace outstanding runs by the requests that are left of them."""
        entries, self.outstanding = list(self.outstanding), deque()
        self._more = 0
        posted = self._posted
        for entry in entries:
            if not isinstance(entry, ReadRun):
                self.outstanding.append(entry)
                continue
            place = posted.index(entry.wr)
            # Behind one that isn't done those with a response haven't completed either.
            requests = entry.wr.expand(0 if place else entry.start)
            del posted[place]
            for wr in reversed(requests):
                wr.driver_data = False
                posted.insert(place, wr)
            for wr in requests[entry.start - entry.wr.count :]:
                sge = wr.sg_list[0]
                start = sge.addr - entry.base
                view = entry.memory[start : start + sge.length]
                self.outstanding.append((wr, (view,), sge.lkey, sge.addr, sge.length, False))

    def responded(self) -> None:
        """The oldest READ or atomic has its response in place."""
        wr = self.outstanding.popleft()[0]  # type: ignore[index]  # a run was unrolled before
        if wr is not None:
            if len(self._posted) == 1:  # as _finish(), in line
                self._posted.clear()
                if wr.send_flags & _SIGNALED:
                    self._sink.pending.append((wr.wr_id, 0, _WC_OPCODE[wr.opcode], 0, self._qp_num, 0, 0, 0))
            else:
                self._finish(wr)
        if self._stalled:
            self._advance()

    def requested(self, msn: int) -> SendWR | None:
        """Give the request that Read or Atomic Request number `msn` was of; the oldest if there is no such number."""
        self.unroll()
        outstanding = self.outstanding
        if not outstanding:
            return None
        index = msn - (self._request_msn - len(outstanding) + 1) & ddp.MASK32
        return outstanding[index if index < len(outstanding) else 0][0]  # type: ignore[index]

    def _finish(self, wr: SendWR) -> None:
        """Note a request as done; completions surface in the order of the posts."""
        wr.driver_data = True
        posted = self._posted
        pending = self._sink.pending
        while posted and posted[0].driver_data:
            done = posted.popleft()
            if done.send_flags & _SIGNALED:
                pending.append((done.wr_id, 0, _WC_OPCODE[done.opcode], 0, self._qp_num, 0, 0, 0))

    @property
    def stable_output(self) -> int:
        """Number of the last FPDU before the first that is sent from a request's own memory.

        Up to there the outbox may still be sent when the requests are flushed and their memory is the user's again.
        """
        if not self.leaving:
            return self._outbox.queued
        last, count, _ = self.leaving[0]
        return last - count

    def post_flushed(self, wrs: Sequence[SendWR]) -> None:
        """Post to a QP in IBV_QPS_ERR."""
        flushed = int(WCStatus.WR_FLUSH_ERR)
        self._sink.pending.extend((wr.wr_id, flushed, 0, 0, self._qp_num, 0, 0, 0) for wr in wrs)

    def flush(self, failed: SendWR | None, status: int, vendor_err: int) -> None:
        """Complete everything as flushed, but `failed` with `status` (the move to IBV_QPS_ERR)."""
        self.hold = True
        self.unroll()
        pending = self._sink.pending
        for queue in (self._posted, self._stalled):
            for wr in chain.from_iterable(wr.expand() if isinstance(wr, RunWR) else (wr,) for wr in queue):
                error = status if wr is failed else WCStatus.WR_FLUSH_ERR
                pending.append((wr.wr_id, int(error), 0, 0, self._qp_num, 0, 0, vendor_err if wr is failed else 0))
            queue.clear()
        self.outstanding.clear()
        self.leaving.clear()
