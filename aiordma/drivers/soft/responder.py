"""The responder's side of a soft QP: Read and Atomic Requests (DDP's queue 1), and what answers them. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.ddp import DDP_UNTAGGED, RDMAP_PROTECTION, fault
from aiordma.drivers.soft.mpa import TRAILERS
from aiordma.drivers.soft.outbox import Outbox
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.drivers.soft.stag import Region, StagTable
from aiordma.enums import Access

_READ_REQUEST: Final = ddp.READ_REQUEST.unpack_from
_PACK_TAGGED: Final = ddp.TAGGED_HEADER.pack
_RESPONSE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_READ_RESPONSE
_REMOTE_READ: Final = int(Access.REMOTE_READ)
#: Bytes behind a Read Request that make it worth looking for a run.
_RUN_SIZE: Final = (runs.SHORTEST - 1) * runs.REQUEST_SIZE


class Responder:
    """Executes the peer's requests as they come, in order, and puts the responses into the outbox.

    Attributes:
        request_msn: sequence number the next request must have.
        atomic_msn: of the last Atomic Response sent.
    """

    def __init__(self, stags: StagTable, pd: object, outbox: Outbox) -> None:
        self._stags = stags
        self._pd = pd
        self._outbox = outbox
        self._joined = False
        self._payload_limit = 0
        self._small_limit = 0
        self._resources = 0
        #: Number in the outbox of each response that may not have left yet.
        self._responses: list[int] = []
        self.request_msn = 1
        self.atomic_msn = 0

    def start(self, resources: int, mulpdu: int, *, joined: bool) -> None:
        """Take the negotiated IRD, the largest ULPDU towards this peer, and whether FPDUs may leave joined."""
        self._resources = resources
        self._joined = joined
        # Multiples of 4 need no pad.
        self._payload_limit = mulpdu - ddp.TAGGED_ULPDU & ~3
        self._small_limit = min(COPY_LIMIT, self._payload_limit)

    def read_request(self, buf: memoryview, pos: int, end: int, length: int) -> int:
        """Answer a Read Request, and those alike behind it; gives the position after them.

        From registered memory, without a copy where it is large.
        """
        if self._joined and end - pos > _RUN_SIZE and (count := self._read_run(buf, pos, end)):
            return pos + count * runs.REQUEST_SIZE
        if length != ddp.READ_REQUEST_ULPDU:
            raise fault(DDP_UNTAGGED, 5 if length > ddp.READ_REQUEST_ULPDU else 4)
        _, _, _, qn, msn, mo, sink_stag, sink_to, size, stag, to = _READ_REQUEST(buf, pos)
        if qn != 1 or msn != self.request_msn or mo or len(self._responses) >= self._resources:
            self._check_request(qn, msn, mo)
        self.request_msn = msn + 1 & 0xFFFFFFFF
        outbox = self._outbox
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
        return pos + runs.REQUEST_SIZE

    def _read_run(self, buf: memoryview, pos: int, end: int) -> int:
        """Answer many Read Requests at once, if they are alike; gives their number, or 0."""
        step = runs.REQUEST_SIZE
        # Size and source STag: without a look at the next one, requests that aren't alike would be taken apart in vain.
        if buf[pos + 32 : pos + 40] != buf[pos + step + 32 : pos + step + 40]:
            return 0
        msn = self.request_msn
        found = runs.Requests(buf, pos, min((end - pos) // step, runs.LONGEST), msn)
        count = found.count
        if count < runs.SHORTEST or not 0 < found.size <= self._small_limit or msn + count > ddp.MASK32:
            return 0
        if len(self._responses) + count > self._resources:
            self._drop_sent_responses()
            if len(self._responses) + count > self._resources:
                return 0
        region = self._stags.find(self._pd, found.stag, found.sources, found.size, _REMOTE_READ)
        if region is None:
            return 0
        outbox = self._outbox
        outbox.put(found.answer(region.whole, region.addr))
        self.request_msn = msn + count
        self._responses.extend((outbox.queued,) * count)
        return count

    def atomic_request(self, buf: memoryview, pos: int, length: int, control: int) -> None:
        """Execute an Atomic Request (RFC 7306 section 5)."""
        if length != ddp.ATOMIC_REQUEST_ULPDU or not control & ddp.LAST:
            raise fault(DDP_UNTAGGED, 5 if length > ddp.ATOMIC_REQUEST_ULPDU else 4)
        (_, _, _, qn, msn, mo, operation, request, stag, to, data, mask, compare, compare_mask) = (
            ddp.ATOMIC_REQUEST.unpack_from(buf, pos)
        )
        self._check_request(qn, msn, mo)
        self.request_msn = msn + 1 & ddp.MASK32
        old = self._stags.atomic(self._pd, operation & 0xF, stag, to, data, mask, compare, compare_mask)
        self.atomic_msn = self.atomic_msn + 1 & ddp.MASK32
        self._outbox.put(
            ddp.ATOMIC_RESPONSE_FPDU.pack(
                ddp.ATOMIC_RESPONSE_ULPDU, ddp.UNTAGGED_LAST | ddp.OP_ATOMIC_RESPONSE, 0,
                ddp.QN_ATOMIC_RESPONSE, self.atomic_msn, 0, request, old,
            )
        )  # fmt: skip
        self._responses.append(self._outbox.queued)

    def _check_request(self, qn: int, msn: int, mo: int) -> None:
        """Check queue, sequence and count of a Read or Atomic Request."""
        if qn != ddp.QN_REQUEST:
            raise fault(DDP_UNTAGGED, 1)
        if msn != self.request_msn:
            raise fault(DDP_UNTAGGED, 3)
        if mo:
            raise fault(DDP_UNTAGGED, 4)
        if len(self._responses) >= self._resources:
            self._drop_sent_responses()
            if len(self._responses) >= self._resources:
                raise fault(DDP_UNTAGGED, 2)

    def _drop_sent_responses(self) -> None:
        """Forget the numbers of responses that left: done seldom, and many at once."""
        # Of a run's responses, joined in one buffer, some are there before it has left as a whole.
        sent = self._outbox.sent + self._outbox.partial
        self._responses = [number for number in self._responses if number > sent]


def _while_registered(region: Region, segments: Iterator[ddp.FPDU]) -> Iterator[ddp.FPDU]:
    """Make the segments of a response as long as its source is registered."""
    for segment in segments:
        if not region.registered:
            raise fault(RDMAP_PROTECTION, ddp.BAD_STAG)
        yield segment
