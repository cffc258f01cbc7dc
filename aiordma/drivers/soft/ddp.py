"""DDP and RDMAP headers (RFC 5041, 5040, 7306): layouts, segmentation, the Terminate message. No I/O.

An FPDU is a gather list: the first buffer begins with MPA's 2-byte length, the last ends with the pad and four
bytes for the CRC. Headers are packed together with the length, in one struct, since that is one call per FPDU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from aiordma.drivers.soft.mpa import trailer
from aiordma.errors import ProtocolError

#: One FPDU as a gather list.
FPDU: TypeAlias = "tuple[bytes | memoryview, ...]"
#: A message cut into FPDUs when their turn comes.
Segments: TypeAlias = "Iterator[FPDU]"

# RDMAP opcodes, RFC 5040 figure 4 and RFC 7306 section 8.
OP_WRITE: Final = 0
OP_READ_REQUEST: Final = 1
OP_READ_RESPONSE: Final = 2
OP_SEND: Final = 3
OP_SEND_INV: Final = 4
OP_SEND_SE: Final = 5
OP_SEND_SE_INV: Final = 6
OP_TERMINATE: Final = 7
OP_IMMEDIATE: Final = 8
OP_IMMEDIATE_SE: Final = 9
OP_ATOMIC_REQUEST: Final = 10
OP_ATOMIC_RESPONSE: Final = 11

# The control field: DDP's T and L flags and version 01, then RDMAP's version 01 and the opcode.
TAGGED: Final = 0x8140
TAGGED_LAST: Final = 0xC140
UNTAGGED: Final = 0x0140
UNTAGGED_LAST: Final = 0x4140
_T: Final = 0x8000
LAST: Final = 0x4000
_VERSIONS: Final = 0x03C0
_GOOD_VERSIONS: Final = 0x0140

QN_SEND: Final = 0
QN_REQUEST: Final = 1
QN_TERMINATE: Final = 2
QN_ATOMIC_RESPONSE: Final = 3

#: A verbs atomic's old value lies in the host's byte order.
NATIVE_U64: Final = struct.Struct("=Q")

MASK32: Final = 0xFFFFFFFF
MASK64: Final = 0xFFFFFFFFFFFFFFFF

#: MPA length and control field: enough to know what follows.
PREFIX: Final = struct.Struct(">HH")
#: length, control, STag, TO.
TAGGED_HEADER: Final = struct.Struct(">HHIQ")
#: length, control, invalidate STag, QN, MSN, MO.
UNTAGGED_HEADER: Final = struct.Struct(">HHIIII")
#: Untagged header, then sink STag, sink TO, size, source STag, source TO; with its CRC field it is a whole FPDU.
READ_REQUEST: Final = struct.Struct(">HHIIIIIQIIQ")
READ_REQUEST_FPDU: Final = struct.Struct(">HHIIIIIQIIQ4x")
#: Untagged header, then AOpCode, request id, STag, TO, add or swap, its mask, compare, its mask.
ATOMIC_REQUEST: Final = struct.Struct(">HHIIIIIIIQQQQQ")
ATOMIC_REQUEST_FPDU: Final = struct.Struct(">HHIIIIIIIQQQQQ4x")
#: Untagged header, then request id, old value.
ATOMIC_RESPONSE: Final = struct.Struct(">HHIIIIIQ")
ATOMIC_RESPONSE_FPDU: Final = struct.Struct(">HHIIIIIQ4x")
#: Untagged header, then the 32 bits, and as many that nobody looks at.
IMMEDIATE_FPDU: Final = struct.Struct(">HHIIIII4x4x")

IMMEDIATE_ULPDU: Final = 26
READ_REQUEST_ULPDU: Final = 46
ATOMIC_REQUEST_ULPDU: Final = 70
ATOMIC_RESPONSE_ULPDU: Final = 30
TAGGED_ULPDU: Final = 14
UNTAGGED_ULPDU: Final = 18

FETCH_ADD: Final = 0
COMPARE_SWAP: Final = 2


class Layer(NamedTuple):
    """Layer and error type of a Terminate, RFC 5040 section 4.8."""

    layer: int
    etype: int


RDMAP_CATASTROPHIC: Final = Layer(0, 0)
RDMAP_PROTECTION: Final = Layer(0, 1)
RDMAP_OPERATION: Final = Layer(0, 2)
DDP_TAGGED: Final = Layer(1, 1)
DDP_UNTAGGED: Final = Layer(1, 2)

BAD_STAG: Final = 0
BOUNDS: Final = 1
ACCESS: Final = 2
FOREIGN_STAG: Final = 3
TO_WRAP: Final = 4
#: DDP numbers it otherwise than RDMAP.
DDP_TO_WRAP: Final = 3
CANNOT_INVALIDATE: Final = 9

_REASONS: Final = {
    (0, 0): {0: "a fault of its own"},
    (0, 1): {
        0: "invalid STag",
        1: "base or bounds violation",
        2: "access rights violation",
        3: "STag belongs to another stream or protection domain",
        4: "tagged offset wraps",
        9: "STag can't be invalidated",
        0xFF: "unspecified protection error",
    },
    (0, 2): {
        5: "invalid RDMAP version",
        6: "unexpected opcode",
        7: "catastrophic error on this stream",
        8: "catastrophic error of the device",
        9: "STag can't be invalidated",
        0xFF: "unspecified operation error",
    },
    (1, 0): {0: "local catastrophic error"},
    (1, 1): {
        0: "invalid STag",
        1: "base or bounds violation",
        2: "STag belongs to another stream or protection domain",
        3: "tagged offset wraps",
        4: "invalid DDP version",
    },
    (1, 2): {
        1: "invalid queue number",
        2: "no receive posted",
        3: "message sequence number out of range",
        4: "invalid message offset",
        5: "message too long for the posted receive",
        6: "invalid DDP version",
    },
    (2, 0): {
        1: "TCP connection lost",
        2: "CRC error",
        3: "marker and length mismatch",
        4: "invalid MPA request or reply",
        5: "local error in the handshake",
        6: "insufficient IRD",
        7: "no common ready-to-receive message",
    },
}
_LAYER_NAMES: Final = {
    (0, 0): "RDMAP local catastrophic",
    (0, 1): "RDMAP remote protection",
    (0, 2): "RDMAP remote operation",
    (1, 0): "DDP local catastrophic",
    (1, 1): "DDP tagged buffer",
    (1, 2): "DDP untagged buffer",
    (2, 0): "MPA",
}


def describe(layer: int, etype: int, code: int) -> str:
    """Put the error of a Terminate in words."""
    name = _LAYER_NAMES.get((layer, etype), f"layer {layer} type {etype}")
    reason = _REASONS.get((layer, etype), {}).get(code, f"code {code:#04x}")
    return f"{name}: {reason}"


def vendor_err(layer: int, etype: int, code: int) -> int:
    """Pack the error of a Terminate into a completion's vendor_err; 0 stays free for none."""
    return 0x10000 | layer << 12 | etype << 8 | code


def length_vendor_err(size: int) -> int:
    """Pack the length of a message that was too long for its receive into a completion's vendor_err."""
    return _LENGTH | min(size, _LENGTH - 1)


_LENGTH: Final = 1 << 31


def describe_vendor_err(value: int) -> str:
    """Put a vendor_err made by `vendor_err` or `length_vendor_err` in words."""
    if value & _LENGTH:
        return f"the message has {value & (_LENGTH - 1)} bytes or more"
    return describe(value >> 12 & 0xF, value >> 8 & 0xF, value & 0xFF) if value & 0x10000 else ""


def fault(where: Layer, code: int) -> ProtocolError:
    """Make the ProtocolError that the peer's FPDU deserves."""
    return ProtocolError(describe(*where, code), layer=where.layer, etype=where.etype, code=code)


class RequestError(ProtocolError):
    """A fault of one of the READs that came in one message; `offender` is the Read Request that it would have been."""

    def __init__(self, error: ProtocolError, offender: bytes) -> None:
        super().__init__(str(error.args[0]), layer=error.layer, etype=error.etype, code=error.code)
        self.offender = offender


def check_control(control: int) -> None:
    """Check versions and opcode against the tagged flag.

    Raises:
        ProtocolError: as RFC 5041 section 7 and RFC 5040 section 7 name it.
    """
    if control & _VERSIONS != _GOOD_VERSIONS:
        if control & 0x0300 != 0x0100:
            raise fault(DDP_TAGGED, 4) if control & _T else fault(DDP_UNTAGGED, 6)
        raise fault(RDMAP_OPERATION, 5)
    opcode = control & 0xF
    tagged_opcode = opcode in (OP_WRITE, OP_READ_RESPONSE)
    if opcode > OP_ATOMIC_RESPONSE or tagged_opcode != bool(control & _T):
        raise fault(RDMAP_OPERATION, 6)


def gather(views: Sequence[memoryview], start: int, length: int) -> list[memoryview]:
    """Cut `length` bytes at offset `start` out of a gather list, without a copy."""
    parts: list[memoryview] = []
    for view in views:
        size = len(view)
        if start >= size:
            start -= size
            continue
        part = view[start : start + length]
        parts.append(part)
        length -= len(part)
        start = 0
        if not length:
            break
    return parts


def tagged_segments(
    opcode: int, stag: int, to: int, views: Sequence[memoryview], total: int, limit: int
) -> Iterator[FPDU]:
    """Segment a tagged message of `total` bytes; `limit` is the largest payload of one FPDU (RFC 5041 section 5)."""
    offset = 0
    while True:
        size = min(total - offset, limit)
        control = (TAGGED if offset + size < total else TAGGED_LAST) | opcode
        length = TAGGED_ULPDU + size
        header = TAGGED_HEADER.pack(length, control, stag, (to + offset) & MASK64)
        yield (header, *gather(views, offset, size), trailer(length))
        offset += size
        if offset >= total:
            return


def untagged_segments(
    opcode: int, invalidate: int, msn: int, views: Sequence[memoryview], total: int, limit: int
) -> Iterator[FPDU]:
    """Segment an untagged message to queue 0; `limit` is the largest payload of one FPDU."""
    offset = 0
    while True:
        size = min(total - offset, limit)
        control = (UNTAGGED if offset + size < total else UNTAGGED_LAST) | opcode
        length = UNTAGGED_ULPDU + size
        header = UNTAGGED_HEADER.pack(length, control, invalidate, QN_SEND, msn, offset)
        yield (header, *gather(views, offset, size), trailer(length))
        offset += size
        if offset >= total:
            return


class Terminate(NamedTuple):
    """A Terminate message, RFC 5040 section 4.8.

    `refused_request` tells whether the offending message was a Read or Atomic Request; `msn` is its sequence number
    where the message carries its header, else 0.
    """

    layer: int
    etype: int
    code: int
    refused_request: bool
    msn: int


_TERMINATE_HEAD: Final = struct.Struct(">BBBx")
_M: Final = 0x80
_D: Final = 0x40
_R: Final = 0x20


def encode_terminate(error: ProtocolError, offender: bytes) -> bytes:
    """Encode the Terminate FPDU that answers `error`; `offender` is the head of the offending FPDU, or empty."""
    flags = 0
    body = b""
    if error.layer < 2 and len(offender) >= TAGGED_HEADER.size:  # no headers for errors of the layer below
        tagged = offender[2] & 0x80
        size = TAGGED_ULPDU if tagged else UNTAGGED_ULPDU
        if len(offender) >= 2 + size:
            flags = _M | _D
            body = offender[:2] + offender[2 : 2 + size]
            if not tagged and offender[3] & 0xF == OP_READ_REQUEST and len(offender) >= READ_REQUEST.size:
                flags |= _R
                body += offender[20:48]
    payload = _TERMINATE_HEAD.pack(error.layer << 4 | error.etype, error.code, flags) + body
    length = UNTAGGED_ULPDU + len(payload)
    header = UNTAGGED_HEADER.pack(length, UNTAGGED_LAST | OP_TERMINATE, 0, QN_TERMINATE, 1, 0)
    return header + payload + trailer(length)


def decode_terminate(payload: bytes, *, first: bool = False) -> Terminate:
    """Decode a Terminate's payload, in the RFC's encoding or in siw's.

    siw packs its bit fields in host order: on little-endian hosts the nibbles of byte 0 are swapped and the three
    flags lie in bits 0 to 2 of byte 2 (seen on the wire). With no flag set the two can't be told apart; the RFC's
    reading is taken then, unless only the swapped one has a meaning.

    Args:
        payload: of the message.
        first: it is the first FPDU of an initiator, the only one that can say what is wrong with our Reply.

    Raises:
        ProtocolError: fewer than four bytes.
    """
    if len(payload) < _TERMINATE_HEAD.size:
        raise fault(DDP_UNTAGGED, 5)
    head, code, flags = _TERMINATE_HEAD.unpack_from(payload)
    layer, etype = head >> 4, head & 0xF
    with_header, with_request = flags & _D, flags & _R
    if flags & 0x07 and not flags & 0xE0:
        layer, etype = etype, layer
        with_header, with_request = flags & 2, flags & 4
    elif not flags and not _meant(layer, etype, code, first) and _meant(etype, layer, code, first):
        layer, etype = etype, layer
    refused = bool(with_request)
    msn = 0
    if with_header and len(payload) >= 8:
        control = payload[6] << 8 | payload[7]
        refused = refused or (not control & _T and control & 0xF in (OP_READ_REQUEST, OP_ATOMIC_REQUEST))
        if refused and len(payload) >= 24:
            msn = int.from_bytes(payload[16:20], "big")
    return Terminate(layer, etype, code, refused, msn)


def _meant(layer: int, etype: int, code: int, first: bool) -> bool:
    """Whether a peer can mean this error."""
    # 5 to 7 of MPA are about the handshake.
    return code in _REASONS.get((layer, etype), {}) and (first or layer != 2 or code < 5)
