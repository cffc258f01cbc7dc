"""MPA: start-up negotiation and framing of iWARP over TCP (RFC 5044, RFC 6581). No I/O, no clock.

    initiator                                        responder
    Initiator.request()   ---- Request frame --->    parse_frame(), Responder.request()
    Initiator.complete()  <---- Reply frame -----    Responder.accept() or .reject()
    the RTR agreed on, or a first FPDU  -------->    only now may this side send

Every fault is a ProtocolError with layer 2, type 0 and the code of the Terminate that would tell the peer.
Only an initiator that has its Reply can send one: a responder that got no FPDU yet may send none, and closes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
from attrs.validators import ge, in_, le

from aiordma.errors import ProtocolError

try:
    from crc32c import crc32c
except ImportError:
    CRC32C_AVAILABLE = False
else:
    CRC32C_AVAILABLE = True

#: A part of a gather list.
Buffer: TypeAlias = "bytes | memoryview"

#: Private data of a start-up frame; an enhanced one spends four bytes of it on IRD and ORD.
MAX_PRIVATE_DATA: Final = 512
MAX_ENHANCED_PRIVATE_DATA: Final = 508
#: What an FPDU without markers is longer than its ULPDU, at most: length, pad, CRC.
HEADROOM: Final = 2 + 3 + 4

# Codes of the Terminate for layer 2, type 0. (1 is TCP's end, 3 is for those who receive markers.)
CRC_ERROR: Final = 2
BAD_STARTUP: Final = 4
LOCAL_ERROR: Final = 5
INSUFFICIENT_IRD: Final = 6
NO_COMMON_RTR: Final = 7

#: Flag of our Request: the initiator is an aiordma device.
OURS_REQUEST: Final = 0x04
#: Flag of our Reply to such a Request; another one, since siw's Reply echoes the flags it doesn't know.
OURS_REPLY: Final = 0x02

#: An IRD or ORD that the two programs see to themselves (RFC 6581), or that an unenhanced frame can't tell.
NOT_NEGOTIATED: Final = 0x3FFF

_REQUEST_KEY: Final = b"MPA ID Req Frame"
_REPLY_KEY: Final = b"MPA ID Rep Frame"
_HEADER: Final = struct.Struct(">16sBBH")
_REVISIONS: Final = (1, 2)
_M, _C, _R, _S = 0x80, 0x40, 0x20, 0x10
_RESERVED: Final = 0x0F

# The enhanced word, taken as one number: A, B, IRD in its upper half, C, D, ORD in its lower.
_WORD: Final = struct.Struct(">I")
_A: Final = 0x8000_0000
_DEPTH: Final = 0x3FFF


class RTR(enum.IntFlag):
    """Kinds of zero-length ready-to-receive message (RFC 6581); bits B, C, D of the enhanced word."""

    SEND = 0x4000_0000
    WRITE = 0x0000_8000
    READ = 0x0000_4000


_NO_RTR: Final = RTR(0)
_ANY_RTR: Final = RTR.SEND | RTR.WRITE | RTR.READ


def _fault(code: int, message: str) -> ProtocolError:
    return ProtocolError(f"MPA: {message}", layer=2, etype=0, code=code)


def _require_crc(*, available: bool) -> None:
    if not available:
        raise _fault(LOCAL_ERROR, "this connection needs CRC32C: pip install 'aiordma[crc]'")


# -- start-up ------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StartupFrame:
    """An MPA Request or Reply (RFC 5044 section 7.1, RFC 6581)."""

    reply: bool
    revision: int = attrs.field(default=2, validator=in_(_REVISIONS))
    markers: bool = False  #: M: the sender needs markers in what it receives.
    crc: bool = False  #: C: the sender wants CRCs; they are then used both ways.
    rejected: bool = False  #: R: the responder refuses. Without a meaning in a Request.
    enhanced: bool = False  #: S: `peer_to_peer` and all below it are told. Revision 2 only.
    flags: int = attrs.field(default=0, validator=[ge(0), le(_RESERVED)])  #: The four that the RFCs reserve.
    private_data: bytes = b""  #: The program's; on the wire behind the enhanced word.
    peer_to_peer: bool = False  #: A: an RTR is asked for, or granted.
    rtr: RTR = _NO_RTR  #: B, C, D: the kinds that the initiator can send, or that the responder takes.
    #: READs and atomics that the sender accepts at once, and that it may have outstanding.
    ird: int = attrs.field(default=NOT_NEGOTIATED, validator=[ge(0), le(_DEPTH)])
    ord: int = attrs.field(default=NOT_NEGOTIATED, validator=[ge(0), le(_DEPTH)])

    def encode(self) -> bytes:
        """Encode the frame; ValueError if it has too much private data, or is enhanced in revision 1."""
        if self.enhanced and self.revision < 2:
            raise ValueError("an enhanced frame needs MPA revision 2")
        data = self.private_data
        limit = MAX_ENHANCED_PRIVATE_DATA if self.enhanced else MAX_PRIVATE_DATA
        if len(data) > limit:
            raise ValueError(f"private data of {len(data)} bytes exceeds MPA's limit of {limit}")
        if self.enhanced:
            data = _WORD.pack(_A * self.peer_to_peer | self.rtr | self.ird << 16 | self.ord) + data
        flags = _M * self.markers | _C * self.crc | _R * self.rejected | _S * self.enhanced | self.flags
        key = _REPLY_KEY if self.reply else _REQUEST_KEY
        return _HEADER.pack(key, flags, self.revision, len(data)) + data


def parse_frame(buffer: bytes | bytearray | memoryview, *, reply: bool) -> tuple[StartupFrame, int] | None:
    """Parse the Reply or Request that `buffer` begins with: the frame and its length, or None if not whole.

    Reserved flags are kept and never refused; in revision 1, S is one of them and means nothing.

    Raises:
        ProtocolError: as soon as no further bytes could make this a valid frame.
    """
    head = bytes(buffer[: _HEADER.size])
    key = _REPLY_KEY if reply else _REQUEST_KEY
    if not key.startswith(head[:16]):
        raise _fault(BAD_STARTUP, f"expected {key.decode()!r}, got {head[:16]!r}")
    if len(head) > 17 and head[17] not in _REVISIONS:
        raise _fault(BAD_STARTUP, f"revision {head[17]} isn't supported")
    # Of a length that is half there, this is the least it can be.
    size = int.from_bytes(head[18:].ljust(2, b"\0"), "big")
    if size > MAX_PRIVATE_DATA:
        raise _fault(BAD_STARTUP, f"private data of {size} bytes exceeds the limit of {MAX_PRIVATE_DATA}")
    if len(head) < _HEADER.size:
        return None
    flags, revision = head[16], head[17]
    enhanced = bool(flags & _S) and revision >= 2
    if enhanced and size < _WORD.size:
        raise _fault(BAD_STARTUP, f"an enhanced frame's private data can't be of {size} bytes")
    end = _HEADER.size + size
    if len(buffer) < end:
        return None
    data = bytes(buffer[_HEADER.size : end])
    word = NOT_NEGOTIATED << 16 | NOT_NEGOTIATED
    if enhanced:
        word, data = int.from_bytes(data[: _WORD.size], "big"), data[_WORD.size :]
    frame = StartupFrame(
        reply=reply,
        revision=revision,
        markers=bool(flags & _M),
        crc=bool(flags & _C),
        rejected=bool(flags & _R),
        enhanced=enhanced,
        flags=flags & _RESERVED,
        private_data=data,
        peer_to_peer=bool(word & _A),
        rtr=RTR(word & _ANY_RTR),
        ird=word >> 16 & _DEPTH,
        ord=word & _DEPTH,
    )
    return frame, end


@attrs.frozen(kw_only=True)
class MPAConfig:
    """What one side brings to the negotiation."""

    #: READs and atomics accepted at once, and outstanding at once.
    ird: int = attrs.field(default=16, validator=[ge(0), le(NOT_NEGOTIATED - 1)])
    ord: int = attrs.field(default=16, validator=[ge(0), le(NOT_NEGOTIATED - 1)])
    crc: bool = False  #: Ask for CRCs; they are used if either side asks.
    crc_available: bool = CRC32C_AVAILABLE
    peer_to_peer: bool = True  #: Ask for an RTR, and grant it: the responder's program can then send first.
    rtr: RTR = _ANY_RTR  #: The kinds that the responder takes.
    #: The kinds that the initiator can send. Not SEND: that would use up one of the peer's receives.
    rtr_offer: RTR = RTR.WRITE | RTR.READ
    #: The initiator's revision, and the highest that the responder takes.
    revision: int = attrs.field(default=2, validator=in_(_REVISIONS))
    announce: bool = True  #: Tell the peer that this is an aiordma device.


@attrs.frozen(kw_only=True)
class Negotiated:
    """What both sides agreed on, seen from one of them."""

    crc: bool  #: FPDUs carry CRCs, both ways.
    send_markers: bool  #: The peer needs markers in what we send.
    ird: int  #: READs and atomics that we accept at once.
    ord: int  #: READs and atomics that we may have outstanding.
    revision: int
    enhanced: bool
    ours: bool  #: The peer is an aiordma device too.
    #: The one kind that the initiator must send first, or those that the responder may get; or none.
    rtr: RTR
    #: The peer's IRD and ORD as its frame has them; NOT_NEGOTIATED if unenhanced.
    peer_ird: int
    peer_ord: int
    private_data: bytes


@attrs.frozen
class Rejected:
    """The responder's program said no: an answer, not a fault."""

    private_data: bytes


class Initiator:
    """The side that connected: makes the Request, judges the Reply."""

    def __init__(self, config: MPAConfig) -> None:
        enhanced = config.revision >= 2
        offer = config.rtr_offer if enhanced and config.peer_to_peer else _NO_RTR
        self._config = config
        self._request = StartupFrame(
            reply=False,
            revision=config.revision,
            crc=config.crc,
            enhanced=enhanced,
            flags=OURS_REQUEST if config.announce else 0,
            peer_to_peer=bool(offer),
            rtr=offer,
            # siw takes 0 for "not told", and leaves its program without READs.
            ird=max(config.ird, 1),
            ord=max(config.ord, 1),
        )

    def request(self, private_data: bytes = b"") -> bytes:
        """Encode the Request.

        Raises:
            ValueError: the private data is too long.
            ProtocolError: CRCs are asked for, and can't be computed here.
        """
        _require_crc(available=self._config.crc_available or not self._request.crc)
        return attrs.evolve(self._request, private_data=private_data).encode()

    def complete(self, reply: StartupFrame) -> Negotiated | Rejected:
        """Judge the Reply: what is agreed on, or that the peer's program rejected.

        Raises:
            ProtocolError: the Reply doesn't answer the Request, wants more READs outstanding than we accept,
                or takes no RTR that was offered; or CRCs are needed, and can't be computed here.
        """
        request = self._request
        if reply.rejected:  # before all else: who can't speak our dialect may say no in its own
            return Rejected(reply.private_data)
        if (reply.revision, reply.enhanced) != (request.revision, request.enhanced):
            asked, got = (f"revision {f.revision}{', enhanced' * f.enhanced}" for f in (request, reply))
            raise _fault(BAD_STARTUP, f"a request of {asked} was answered by a reply of {got}")
        _require_crc(available=self._config.crc_available or not (request.crc or reply.crc))
        if request.ird < reply.ord != NOT_NEGOTIATED:
            raise _fault(INSUFFICIENT_IRD, f"we accept {request.ird} READs, the peer wants {reply.ord}")
        ours = self._config.announce and reply.flags & (OURS_REQUEST | OURS_REPLY) == OURS_REPLY
        rtr = _NO_RTR
        # Who declines an RTR altogether is left without one; the program on this side then has to send first.
        if request.peer_to_peer and reply.peer_to_peer:
            rtr = _choose_rtr(request.rtr & reply.rtr, reply.ird)
        return _agree(request, reply, ours=ours, rtr=rtr)


class Responder:
    """The side that was connected to: judges the Request, answers in the dialect it came in."""

    def __init__(self, config: MPAConfig) -> None:
        self._config = config
        self._request: StartupFrame | None = None

    def request(self, frame: StartupFrame) -> None:
        """Judge the Request, and keep it.

        Raises:
            ProtocolError: its revision is above ours: close, the initiator may come back with revision 1. Or
                CRCs are needed, and can't be computed here: `reject` can still tell the peer so.
        """
        if frame.revision > self._config.revision:
            raise _fault(BAD_STARTUP, f"revision {frame.revision} isn't supported")
        self._request = frame
        _require_crc(available=self._config.crc_available or not (self._config.crc or frame.crc))

    def accept(self, private_data: bytes, ird: int, ord: int) -> tuple[bytes, Negotiated]:  # noqa: A002
        """Encode the Reply that accepts, and say what is agreed on by it.

        `ird` and `ord` replace the configuration's. Our ORD is cut to the initiator's IRD; our IRD is told as
        it is, and the initiator cuts its ORD to it.

        Raises:
            ValueError: the private data is too long, or a number is out of range.
        """
        request, reply = self._answer(attrs.evolve(self._config, ird=ird, ord=ord), private_data)
        own = attrs.evolve(reply, ird=ird, ord=ord)
        return reply.encode(), _agree(own, request, ours=bool(reply.flags & OURS_REPLY), rtr=reply.rtr)

    def reject(self, private_data: bytes = b"") -> bytes:
        """Encode the Reply that rejects; ValueError if the private data is too long."""
        _, reply = self._answer(self._config, private_data)
        return attrs.evolve(reply, rejected=True).encode()

    def _answer(self, config: MPAConfig, private_data: bytes) -> tuple[StartupFrame, StartupFrame]:
        request = self._request
        if request is None:
            raise RuntimeError("there is no Request to answer")
        rtr = _NO_RTR
        if request.peer_to_peer and config.peer_to_peer:
            takes = config.rtr if config.ird else config.rtr & ~RTR.READ
            # With none in common name what we take, and the initiator sends the Terminate: this side can't.
            rtr = request.rtr & takes or takes
        reply = StartupFrame(
            reply=True,
            revision=request.revision,
            crc=request.crc or config.crc,
            enhanced=request.enhanced,
            flags=OURS_REPLY if config.announce and request.flags & OURS_REQUEST else 0,
            private_data=private_data,
            peer_to_peer=bool(rtr),
            rtr=rtr,
            # What the initiator leaves open is answered by the same: our IRD meets its ORD, our ORD its IRD.
            ird=NOT_NEGOTIATED if request.ord == NOT_NEGOTIATED else config.ird,
            ord=NOT_NEGOTIATED if request.ird == NOT_NEGOTIATED else min(config.ord, request.ird),
        )
        return request, reply


def _agree(own: StartupFrame, peer: StartupFrame, *, ours: bool, rtr: RTR) -> Negotiated:
    return Negotiated(
        crc=own.crc or peer.crc,
        send_markers=peer.markers,
        ird=own.ird,
        ord=own.ord if peer.ird == NOT_NEGOTIATED else min(own.ord, peer.ird),
        revision=peer.revision,
        enhanced=peer.enhanced,
        ours=ours,
        rtr=rtr,
        peer_ird=peer.ird,
        peer_ord=peer.ord,
        private_data=peer.private_data,
    )


def _choose_rtr(common: RTR, peer_ird: int) -> RTR:
    """Choose the RTR to send: a WRITE needs nothing of the peer, a READ one of its IRD, a SEND a receive."""
    for kind in (RTR.WRITE, RTR.READ, RTR.SEND):
        if kind in common and (peer_ird or kind is not RTR.READ):
            return kind
    raise _fault(NO_COMMON_RTR, "the peer takes no ready-to-receive message that was offered")


# -- framing -------------------------------------------------------------------------------------------------

#: Pad and empty CRC field of an FPDU, by the last two bits of its ULPDU_Length.
TRAILERS: Final = tuple(bytes((-2 - length) % 4 + 4) for length in range(4))

_CRC: Final = struct.Struct("<I")
#: An FPDU's CRC takes microseconds, getting the GIL back from a busy thread takes milliseconds.
_KEEP_GIL: Final = 0
_MARKER: Final = struct.Struct(">HH")
_SPACING: Final = 512


def trailer(ulpdu_length: int) -> bytes:
    """Give the pad and the empty CRC field behind a ULPDU of this length (RFC 5044 section 4.1)."""
    return TRAILERS[ulpdu_length & 3]


def mulpdu(emss: int, markers: bool) -> int:
    """Compute the longest ULPDU whose FPDU fits `emss` bytes, never below 128 (RFC 5044 section 4.5)."""
    emss = min(emss, 0xFFFF)  # no more than the length field and a marker's pointer can say
    marked = _MARKER.size * -(-emss // _SPACING) if markers else 0
    return max(emss - 6 - emss % 4 - marked, 128)


def check_crc(view: memoryview, crc_offset: int) -> None:
    """Raise ProtocolError unless an FPDU fits its CRC field, at `crc_offset` (RFC 5044 section 4.4)."""
    (received,) = _CRC.unpack_from(view, crc_offset)
    computed = crc32c(view[:crc_offset], 0, _KEEP_GIL)
    if computed != received:
        raise _fault(CRC_ERROR, f"CRC error: computed {computed:#010x}, received {received:#010x}")


class Framer:
    """Completes the FPDUs of one direction: fills in CRCs, inserts markers.

    With markers an FPDU depends on all that was sent before it, so frame each once, in the order they leave.
    Asked for CRCs that can't be computed here, it raises ProtocolError.
    """

    __slots__ = ("_crc", "_markers", "_position")

    def __init__(self, crc: bool, markers: bool) -> None:
        _require_crc(available=CRC32C_AVAILABLE or not crc)
        self._crc = crc
        self._markers = markers
        #: Bytes of the stream so far, markers included.
        self._position = 0

    def frame(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Complete one FPDU, given as a gather list from its length to its empty CRC field.

        Nothing but the pad is copied. The list grows by markers, and by one if the FPDU was in a single part.

        Raises:
            ValueError: a marker can't point back so far; it always can within `mulpdu`.
        """
        *pieces, last = parts
        pieces += memoryview(last)[:-4], bytes(4)
        if self._markers:
            pieces = self._mark(pieces)
        if self._crc:
            crc = 0
            for piece in pieces[:-1]:
                crc = crc32c(piece, crc, _KEEP_GIL)
            pieces[-1] = _CRC.pack(crc)
        if len(pieces[-2]) < 4:  # the pad, if any: not worth a buffer of its own
            pieces[-2:] = [b"".join(pieces[-2:])]
        return pieces

    def _mark(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Insert the markers of one FPDU, at multiples of 512 in the stream (RFC 5044 section 4.3).

        Every FPDU is a multiple of four long, so no marker splits a length or a CRC field. One between two
        FPDUs belongs to the second and says 0; any other gives its distance from the length field.
        """
        position = self._position
        start = position if position % _SPACING else position + _MARKER.size
        marked: list[Buffer] = []
        for part in parts:
            view = memoryview(part)
            while view:
                if position % _SPACING == 0:
                    distance = max(position - start, 0)
                    if distance > 0xFFFF:
                        raise ValueError("an FPDU with markers must be shorter than 64 KiB")
                    marked.append(_MARKER.pack(0, distance))
                    position += _MARKER.size
                piece = view[: _SPACING - position % _SPACING]
                marked.append(piece)
                position += len(piece)
                view = view[len(piece) :]
        self._position = position
        return marked
