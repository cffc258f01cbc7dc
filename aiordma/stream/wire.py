"""What rsocket's ends tell each other: private data, 32-bit messages, and the entries of target SGL and iomap.

Names are rdma-core's. A message is `op << 29 | data`.
"""

from __future__ import annotations

import enum
import struct
import sys
from typing import Final, Literal, NamedTuple

from attrs import frozen

from aiordma.errors import ProtocolError

__all__ = [
    "CREDITS_MASK", "DATA_MASK", "ENTRY_SIZE", "IOMAP_SIZE", "MAX_QUEUE", "OP_SHIFT", "ByteOrder", "Ctrl", "Entry",
    "Hello", "Mapping", "Op",
]  # fmt: skip

OP_SHIFT: Final = 29
DATA_MASK: Final = (1 << OP_SHIFT) - 1
#: Credits are counted modulo 2**16.
CREDITS_MASK: Final = 0xFFFF
#: rdma-core's upper bound of a queue's size.
MAX_QUEUE: Final = 0xFFFE
#: Bytes of a target SGL entry: address 8, key 4, length 4.
ENTRY_SIZE: Final = 16
#: Bytes of an iomap entry: offset 8, address 8, key 4, length 4.
IOMAP_SIZE: Final = 24

_VERSION: Final = 1
_BIG_ENDIAN: Final = 0x01
_IOMAP: Final = 0x02
#: Of ours, and nothing to rdma-core, which looks at no flag it doesn't know.
_IMMEDIATE: Final = 0x80
_HELLO: Final = struct.Struct(">BBH3xBQIIQII")
_TOP: Final = 1 << 64


class Op(enum.IntEnum):
    """The top three bits of a message."""

    #: So many bytes were written to the target; takes a credit.
    DATA = 0
    #: A tag of rdma-core's own work requests: never sent.
    WRITE = 2
    #: A new limit of credits, and perhaps an entry of the target SGL.
    SGL = 4
    #: The iomap entry of this index was written; takes a credit that is never given back.
    IOMAP = 6
    CTRL = 7


class Ctrl(enum.IntEnum):
    """The data of a CTRL message."""

    DISCONNECT = 0
    KEEPALIVE = 1
    #: The sender will send no more.
    SHUTDOWN = 2


ByteOrder = Literal["little", "big"]


class Entry(NamedTuple):
    """Memory that the other end may write to; in the byte order of whose memory the entry lies in."""

    addr: int
    rkey: int
    length: int

    def to_bytes(self, order: ByteOrder) -> bytes:
        """Encode for an end of that byte order."""
        return _entry(order).pack(*self)

    @classmethod
    def from_buffer(cls, memory: memoryview, start: int) -> Entry:
        """Decode from this end's own memory."""
        return cls(*_entry(sys.byteorder).unpack_from(memory, start))


class Mapping(NamedTuple):
    """A region of the other end's at an offset of its choice (riomap)."""

    offset: int
    addr: int
    rkey: int
    length: int

    def to_bytes(self, order: ByteOrder) -> bytes:
        """Encode for an end of that byte order."""
        return _mapping(order).pack(*self)

    @classmethod
    def from_buffer(cls, memory: memoryview, start: int) -> Mapping:
        """Decode from this end's own memory."""
        return cls(*_mapping(sys.byteorder).unpack_from(memory, start))


_ENTRIES: Final = {"little": struct.Struct("<QII"), "big": struct.Struct(">QII")}
_MAPPINGS: Final = {"little": struct.Struct("<QQII"), "big": struct.Struct(">QQII")}


def _entry(order: ByteOrder) -> struct.Struct:
    return _ENTRIES[order]


def _mapping(order: ByteOrder) -> struct.Struct:
    return _MAPPINGS[order]


@frozen(kw_only=True)
class Hello:
    """The private data of either side: 40 bytes, the same in request and reply."""

    #: Of the sender's processor.
    order: ByteOrder = sys.byteorder
    #: Size of its receive queue: what it grants to begin with.
    credits: int
    sgl_addr: int
    sgl_rkey: int
    #: Entries of its target SGL.
    sgl_length: int
    #: Entries of its iomap table, right behind the target SGL.
    iomap_length: int = 0
    #: Its first receive segment.
    first: Entry
    #: Its iWARP device knows immediate data (RFC 7306): where both do, a message goes as that, and not as a SEND.
    immediate: bool = False

    #: Length of `to_bytes()`.
    WIRE_SIZE = _HELLO.size

    def to_bytes(self) -> bytes:
        """Encode; a large iomap is rounded down to a multiple of 256, as its size has one byte."""
        size = self.iomap_length
        flags = _IOMAP | (_BIG_ENDIAN if self.order == "big" else 0) | (_IMMEDIATE if self.immediate else 0)
        return _HELLO.pack(
            _VERSION, flags, self.credits,
            size if size <= 128 else 0x80 | size >> 8,
            self.sgl_addr, self.sgl_rkey, self.sgl_length, *(self.first.addr, self.first.rkey, self.first.length),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """Decode from the front of private data; what pads it is ignored.

        Raises:
            ProtocolError: too short, another version, or memory that can't be.
        """
        if len(data) < _HELLO.size:
            raise ProtocolError(f"the peer is no rsocket: {len(data)} bytes of private data, not {_HELLO.size}")
        version, flags, credits_, scale, sgl_addr, sgl_rkey, sgl_length, *first = _HELLO.unpack_from(data)
        if version != _VERSION:
            raise ProtocolError(f"the peer is no rsocket of version {_VERSION}: its private data says {version}")
        iomap_length = scale if scale <= 128 else (scale & 0x7F) << 8
        if not sgl_length:
            raise ProtocolError("the peer's target SGL has no entries")
        if sgl_addr + ENTRY_SIZE * sgl_length + IOMAP_SIZE * iomap_length > _TOP:
            raise ProtocolError(f"the peer's target SGL of {sgl_length} entries at {sgl_addr:#x} isn't memory")
        return cls(
            order="big" if flags & _BIG_ENDIAN else "little", credits=credits_,
            sgl_addr=sgl_addr, sgl_rkey=sgl_rkey, sgl_length=sgl_length, iomap_length=iomap_length,
            first=Entry(*first), immediate=bool(flags & _IMMEDIATE),
        )  # fmt: skip
