"""Runs: many small READs of one size, asked for in one message and answered in one. No I/O.

Between aiordma devices only, which know each other by the MPA flags; with CRC or markers, or towards anybody else, the
READs of a run are Read Requests and Read Responses like any others. As messages of their own they are what bounds the
rate: 64 READs of 64 B cost 0.15 us each to ask for, 0.42 to answer and 0.14 to 0.29 to place when packed and unpacked
by one call of struct for all, several times that in a loop; as a run 0.04, 0.28 and 0.01 to 0.26 us.

A Run Request is an untagged message of queue 1, RDMAP opcode 12 (reserved in RFC 5040 and 7306). Behind the DDP header:
size of each READ (u32), source STag (u32), source TO of each (u64). It stands for as many Read Requests, with MSNs from
its own on. A Run Response is a tagged message, opcode 13; its TO is the MSN of the first READ it answers, its payload
theirs, one behind the other. A READ that is refused ends the stream by the Terminate that its Read Request would have
got; those before it are answered first.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.ddp import DDP_UNTAGGED, fault
from aiordma.drivers.soft.mpa import TRAILERS
from aiordma.types import bounds

OP_REQUEST: Final = 12
OP_RESPONSE: Final = 13
REQUEST: Final = ddp.UNTAGGED_LAST | OP_REQUEST
RESPONSE: Final = ddp.TAGGED_LAST | OP_RESPONSE

#: Bytes one response may carry, so that its FPDU fits: a longer run is asked for in parts.
LARGEST: Final = 60 * 1024
#: Header, size and STag; a request has 8 bytes more for each READ.
_FIXED: Final = ddp.UNTAGGED_ULPDU + 8


class Request(NamedTuple):
    """A Run Request, taken apart."""

    qn: int
    msn: int
    mo: int
    size: int
    stag: int
    sources: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def _request(count: int) -> struct.Struct:
    """Length, control, invalidate STag, QN, MSN, MO, size, source STag, source TOs, CRC field."""
    return struct.Struct(f">HHIIIIII{count}Q4x")


@functools.lru_cache(maxsize=256)
def _sources(count: int) -> struct.Struct:
    return struct.Struct(f">{count}Q")


def encode_request(msn: int, size: int, stag: int, sources: Sequence[int]) -> bytes:
    """Make the FPDU that asks for `size` bytes at each of `sources`; the MSNs from `msn` on must not wrap."""
    count = len(sources)
    length = _FIXED + 8 * count
    return _request(count).pack(length, REQUEST, 0, ddp.QN_REQUEST, msn, 0, size, stag, *sources)


def decode_request(buf: memoryview, pos: int, length: int) -> Request:
    """Take a Run Request apart; raises ProtocolError if its length isn't one."""
    count, rest = divmod(length - _FIXED, 8)
    if count < 1 or rest:
        raise fault(DDP_UNTAGGED, 4 if count < 1 else 5)
    _, _, _, qn, msn, mo, size, stag = _HEAD.unpack_from(buf, pos)
    return Request(qn, msn, mo, size, stag, _sources(count).unpack_from(buf, pos + _HEAD.size))


_HEAD: Final = struct.Struct(">HHIIIIII")


def encode_response(msn: int, size: int, sources: Sequence[int], memory: memoryview, base: int) -> bytes:
    """Make the FPDU that answers READs from `msn` on, from `memory` at address `base`, which holds all sources."""
    total = size * len(sources)
    low, high = bounds(sources)
    pieces: Sequence[bytes | memoryview]
    if high - low + size == total and tuple(sources) == tuple(range(low, high + 1, size)):
        pieces = (memory[low - base : high - base + size],)  # one behind the other, as in a scan
    elif high - low + size <= 4 * total:
        # One copy of all, cut as bytes, is cheaper than a memoryview each.
        near = bytes(memory[low - base : high - base + size])
        end = size - low
        pieces = [near[source - low : source + end] for source in sources]
    else:
        pieces = [bytes(memory[source - base : source - base + size]) for source in sources]
    length = ddp.TAGGED_ULPDU + total
    return b"".join((ddp.TAGGED_HEADER.pack(length, RESPONSE, 0, msn), *pieces, TRAILERS[length & 3]))


def scatter(data: memoryview, memory: memoryview, base: int, sinks: Sequence[int], size: int) -> None:
    """Put the payload of a response into `memory` at address `base`, a piece at each of `sinks`."""
    adjacent = range(sinks[0], sinks[0] + size * len(sinks), size)
    if sinks == adjacent or (sinks[-1] == adjacent[-1] and tuple(sinks) == tuple(adjacent)):
        start = sinks[0] - base
        memory[start : start + len(data)] = data
        return
    whole = bytes(data)
    offset = 0
    for sink in sinks:
        start = sink - base
        memory[start : start + size] = whole[offset : offset + size]
        offset += size
