"""ibv_poll_cq called directly: all completions that are there in one call, without an object each.

pyverbs' CQ.poll makes one C call and one Python object per completion, with thirteen keyword arguments and a lookup of
a logger. In the emulated guest that is 61 us for each of 32 completions, where this is 14; one alone, after a sleep,
531 us against 228. The queue stays pyverbs': only this call goes past it, as C programs' do, since ibv_poll_cq is an
inline function of <infiniband/verbs.h> that calls through struct ibv_context, whose layout is part of the ABI.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from socket import ntohl
from typing import Final

from aiordma.drivers.base import Completion
from aiordma.enums import WCFlags

__all__ = ["ROOM", "DirectPoll", "acknowledge", "queue_of"]

#: struct ibv_wc: wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags; the rest is for UD.
_WC: Final = struct.Struct("=QiiIIIIII8x")
_unpack_one: Final = _WC.unpack_from
_unpack_all: Final = _WC.iter_unpack
#: Completions that one call takes at most.
ROOM: Final = 256
#: struct ibv_context is the device's address, then ops, a table of functions; poll_cq is its twelfth.
_POLL_CQ: Final = 8 + 11 * 8
_WITH_IMM: Final = int(WCFlags.WITH_IMM)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libibverbs.so.1")
    library.ibv_ack_cq_events.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.ibv_ack_cq_events.restype = None
    return library


def queue_of(event: bytes) -> int:
    """Give the address of the struct ibv_cq that an event of its channel is about (struct ib_uverbs_comp_event_desc).

    It is what ibv_create_cq gave the kernel as the queue's handle, and what ibv_get_cq_event reads it for.
    """
    return int.from_bytes(event[:8], sys.byteorder)


def acknowledge(queue: int, count: int) -> None:
    """Acknowledge events that were read by hand (ibv_ack_cq_events): ibv_destroy_cq waits for it."""
    _library().ibv_ack_cq_events(queue, count)


class DirectPoll:
    """Polls one completion queue, as long as that lives."""

    __slots__ = ("_arguments", "_poll", "_view", "_wcs")

    def __init__(self, queue: int) -> None:
        context = ctypes.c_uint64.from_address(queue).value
        # PYFUNCTYPE: the GIL stays, as letting go of it for a microsecond costs more than it gives.
        self._poll = ctypes.PYFUNCTYPE(ctypes.c_int)(ctypes.c_uint64.from_address(context + _POLL_CQ).value)
        self._wcs = ctypes.create_string_buffer(_WC.size * ROOM)
        self._view = memoryview(self._wcs)
        self._arguments = (ctypes.c_void_p(queue), ctypes.c_int(ROOM), self._wcs)

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions, and never more than 256."""
        queue, room, wcs = self._arguments
        count = self._poll(queue, room if limit >= ROOM else ctypes.c_int(limit), wcs)
        if count == 1:
            wr_id, status, opcode, vendor_err, byte_len, imm, qp_num, _, flags = _unpack_one(wcs)
            return [
                (wr_id, status, opcode, byte_len, qp_num, ntohl(imm) if flags & _WITH_IMM else imm, flags, vendor_err)
            ]
        if count <= 0:
            return []
        return [
            (wr_id, status, opcode, byte_len, qp_num, ntohl(imm) if flags & _WITH_IMM else imm, flags, vendor_err)
            for wr_id, status, opcode, vendor_err, byte_len, imm, qp_num, _, flags in _unpack_all(
                self._view[: count * _WC.size]
            )
        ]
