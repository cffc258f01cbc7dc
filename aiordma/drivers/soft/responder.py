"""The responder's side of a soft QP: Read and Atomic Requests (DDP's queue 1), and what answers them. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Self

from aiordma.drivers.soft import ddp, runs
from aiordma.drivers.soft.ddp import DDP_UNTAGGED, RDMAP_PROTECTION, fault
from aiordma.drivers.soft.mpa import TRAILERS
from aiordma.drivers.soft.outbox import Outbox
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.drivers.soft.stag import Region, StagTable
from aiordma.enums import Access
from aiordma.errors import ProtocolError

_READ_REQUEST: Final = ddp.READ_REQUEST.unpack_from
_PACK_TAGGED: Final = ddp.TAGGED_HEADER.pack
_RESPONSE_LAST: Final = ddp.TAGGED_LAST | ddp.OP_READ_RESPONSE
_REMOTE_READ: Final = int(Access.REMOTE_READ)


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
        self._payload_limit = 0
        self._small_limit = 0
        self._resources = 0
        #: Number in the outbox of each response that may not have left yet.
        self._responses: list[int] = []
        #: Those sent from registered memory, until they are known to have left.
        self._lent: deque[_Response] = deque()
        self.request_msn = 1
        self.atomic_msn = 0

    def start(self, resources: int, mulpdu: int) -> None:
        """Take the negotiated IRD, and the largest ULPDU towards this peer."""
        self._resources = resources
        # Multiples of 4 need no pad.
        self._payload_limit = mulpdu - ddp.TAGGED_ULPDU & ~3
        self._small_limit = min(COPY_LIMIT, self._payload_limit)

    def read_request(self, buf: memoryview, pos: int, length: int) -> None:
        """Answer a Read Request from registered memory, without a copy where it is large."""
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
            self._respond(region, view, sink_stag, sink_to, size)
        else:  # the source of an empty READ must not be checked
            outbox.put(_PACK_TAGGED(14, _RESPONSE_LAST, sink_stag, sink_to) + TRAILERS[2])
        self._responses.append(outbox.queued)

    def _respond(self, region: Region, view: memoryview, stag: int, to: int, size: int) -> None:
        """Answer a READ from its source's own memory."""
        outbox = self._outbox
        limit = self._payload_limit
        segments = ddp.tagged_segments(ddp.OP_READ_RESPONSE, stag, to, [view], size, limit)
        first = outbox.queued + 1
        response = _Response(region, segments, outbox, first, outbox.queued - (-size // limit))
        outbox.put_message(response, response.last + 1 - first)
        # Those before it that left: forgotten here, so that nothing needs to watch what leaves.
        lent = self._lent
        while lent and lent[0].last <= outbox.sent:
            lent.popleft().give_back()
        lent.append(response)

    def flush(self) -> None:
        """The outbox was cut: what is left of the responses in it needs no registered memory any more."""
        for response in self._lent:
            response.give_back()
            response.revoke()  # the cut leaves what is begun, and may leave more
        self._lent.clear()

    def run_request(self, buf: memoryview, pos: int, length: int) -> None:
        """Answer a run of READs in one message, as far as none of them is refused."""
        qn, msn, mo, size, stag, asked = runs.decode_request(buf, pos, length)
        count = len(asked)
        sources: Sequence[int] = asked
        self._check_request(qn, msn, mo, count)
        if not size or size * count > runs.LARGEST or msn + count > ddp.MASK32:
            raise fault(DDP_UNTAGGED, 5)
        region = self._stags.find(self._pd, stag, sources, size, _REMOTE_READ)
        refused = None
        if region is None:
            region, sources, refused = self._allowed(msn, size, stag, sources)
        if region is not None and sources:
            self._outbox.put(runs.encode_response(msn, size, sources, region.whole, region.addr))
            self.request_msn = msn + len(sources)
            self._responses.extend((self._outbox.queued,) * len(sources))
        if refused is not None:
            raise refused

    def _allowed(
        self, msn: int, size: int, stag: int, sources: Sequence[int]
    ) -> tuple[Region | None, Sequence[int], ddp.RequestError | None]:
        """Give the READs before the first that is refused, with their region, and why that one is."""
        region = None
        for index, source in enumerate(sources):
            try:
                region, _ = self._stags.read_source(self._pd, stag, source, size)
            except ProtocolError as error:
                offender = ddp.READ_REQUEST.pack(
                    ddp.READ_REQUEST_ULPDU, ddp.UNTAGGED_LAST | ddp.OP_READ_REQUEST, 0,
                    ddp.QN_REQUEST, msn + index, 0, 0, 0, size, stag, source,
                )  # fmt: skip
                return region, sources[:index], ddp.RequestError(error, offender)
        return region, sources, None

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

    def _check_request(self, qn: int, msn: int, mo: int, count: int = 1) -> None:
        """Check queue, sequence and count of a Read or Atomic Request."""
        if qn != ddp.QN_REQUEST:
            raise fault(DDP_UNTAGGED, 1)
        if msn != self.request_msn:
            raise fault(DDP_UNTAGGED, 3)
        if mo:
            raise fault(DDP_UNTAGGED, 4)
        if len(self._responses) + count > self._resources:
            self._drop_sent_responses()
            if len(self._responses) + count > self._resources:
                raise fault(DDP_UNTAGGED, 2)

    def _drop_sent_responses(self) -> None:
        """Forget the numbers of responses that left: done seldom, and many at once."""
        # A large payload is placed, and its READ done, before the CRC field behind it has left.
        sent = self._outbox.sent + self._outbox.partial
        self._responses = [number for number in self._responses if number > sent]


class _Response:
    """The segments of a response that is sent from its source's own memory, as long as that is registered.

    Attributes:
        last: number of its last FPDU in the outbox.
    """

    __slots__ = ("_first", "_outbox", "_region", "_segments", "last")

    def __init__(self, region: Region, segments: Iterator[ddp.FPDU], outbox: Outbox, first: int, last: int) -> None:
        self._region: Region | None = region
        self._segments: Iterator[ddp.FPDU] | None = segments
        self._outbox = outbox
        self._first = first
        self.last = last
        region.borrowers.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ddp.FPDU:
        if self._segments is None:
            raise fault(RDMAP_PROTECTION, ddp.BAD_STAG)
        return next(self._segments)

    def give_back(self) -> None:
        """Nothing of it refers to the region any more."""
        if self._region is not None:
            self._region.borrowers.discard(self)

    def revoke(self) -> None:
        """Send what is made as it is now; the rest, if there is any, isn't made."""
        self._region = None
        self._segments = iter(()) if self._outbox.detach(self._first, self.last) else None
