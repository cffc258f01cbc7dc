"""Work requests made once and changed in place: the path of every post.

Building pyverbs' SendWR and SGE costs more than everything else of a post (30 to 50 us in an emulated guest, where
changing them takes 6). The device has copied a request when ibv_post_send returns, so one chain serves all queue pairs
of a context: its requests are linked once and for all, and a list of n is its last n.
"""

from __future__ import annotations

import ctypes
import errno
import socket
from collections.abc import Sequence
from typing import Final

from aiordma.drivers.base import PostError
from aiordma.drivers.verbs.api import SGE, RecvWR, SendWR
from aiordma.enums import Opcode, SendFlags
from aiordma.types import RecvWR as Receive
from aiordma.types import RunWR
from aiordma.types import SendWR as Request

__all__ = ["CHAIN_LENGTH", "INLINE_ROOM", "BuiltReceive", "SendChain", "built", "receive_of"]

#: Requests in one ibv_post_send; longer lists go in parts. As long as the runs of the ledger.
CHAIN_LENGTH: Final = 64
#: Bytes of inline data that a request of the chain can hold; no device is asked for more.
INLINE_ROOM: Final = 256

_INLINE: Final = int(SendFlags.INLINE)
_FENCE: Final = int(SendFlags.FENCE)
_READ: Final = int(Opcode.RDMA_READ)
#: The two atomics are the highest opcodes that this driver knows; those with immediate data are the odd ones below.
_FIRST_ATOMIC: Final = int(Opcode.ATOMIC_CMP_AND_SWP)
_LAST: Final = int(Opcode.ATOMIC_FETCH_AND_ADD)


class _Link:
    """One request of the chain, its one element, and the memory of its inline data."""

    __slots__ = ("_export", "inline", "inline_addr", "sge", "siw", "wr")

    def __init__(self) -> None:
        #: Whether the device is siw.
        self.siw = False
        self.sge = SGE(0, 0, 0)
        self.wr = SendWR(num_sge=1, sg=[self.sge])
        # pyverbs copies the element; the request shall point to ours, whose fields can be set.
        self.wr.close()
        self.wr.sg_list = self.sge
        self.inline = bytearray(INLINE_ROOM)
        self._export = (ctypes.c_char * INLINE_ROOM).from_buffer(self.inline)
        self.inline_addr = ctypes.addressof(self._export)


class SendChain:
    """Linked send requests; each method sets as many of the last as it needs, and gives the first of these."""

    def __init__(self) -> None:
        self._links = [_Link() for _ in range(CHAIN_LENGTH)]
        for link, following in zip(self._links, self._links[1:], strict=False):
            link.wr.next_wr = following.wr
        self._last = self._links[-1]
        #: Takes a copy of the request that was refused, whose element belongs to that one.
        self.bad = SendWR(num_sge=1, sg=[SGE(0, 0, 0)])
        self.siw = False

    def use_for(self, *, siw: bool) -> None:
        """Prepare for a device.

        siw completes a WRITE or SEND when it is handed to TCP, before READs in front of it that still wait for their
        data; a completion tells of all requests before it, so each of these gets the fence, that is, waits for those
        READs. A READ must not have one, and needs none: the peer executes READs in order. And siw's READ of nothing
        gets an empty element: without one it asks for as much as the request did whose place in the queue it takes.
        (All seen on Linux 6.12.)
        """
        self.siw = siw
        for link in self._links:
            link.siw = siw

    def single(self, request: Request) -> SendWR:
        """Set a list of one request, of one element at most."""
        link = self._last
        _set(link, request)
        return link.wr

    def several(self, requests: Sequence[Request]) -> SendWR:
        """Set a list of at most CHAIN_LENGTH requests, each of one element at most."""
        links = self._links[-len(requests) :]
        for link, request in zip(links, requests, strict=True):
            _set(link, request)
        return links[0].wr

    def run(self, run: RunWR, start: int, count: int) -> SendWR:
        """Set a list of `count` requests of a run, from number `start` on."""
        links = self._links[-count:]
        opcode, size, lkey, rkey = int(run.opcode), run.size, run.lkey, run.rkey
        fence = _siw_flags(opcode, 0) if self.siw else 0
        wr_id = run.wr_id - 2 * (run.count - 1 - start)
        stop = start + count
        for link, local, remote in zip(links, run.local_addrs[start:stop], run.remote_addrs[start:stop], strict=True):
            sge = link.sge
            sge.addr = local
            sge.length = size
            sge.lkey = lkey
            wr = link.wr
            wr.num_sge = 1
            wr.wr_id = wr_id
            wr.opcode = opcode
            wr.send_flags = fence
            wr.set_wr_rdma(rkey, remote)
            wr_id += 2
        if stop == run.count:
            flags = run.send_flags
            links[-1].wr.send_flags = _siw_flags(opcode, flags) if self.siw else flags
        return links[0].wr


def _set(link: _Link, request: Request) -> None:
    wr = link.wr
    flags = request.send_flags
    opcode = request.opcode
    if request.inline_data is not None:
        data = request.inline_data
        length = len(data)
        link.inline[:length] = data
        sge = link.sge
        sge.addr = link.inline_addr
        sge.length = length
        wr.num_sge = 1
        flags |= _INLINE
    elif request.sg_list:
        source = request.sg_list[0]
        sge = link.sge
        sge.addr = source.addr
        sge.length = source.length
        sge.lkey = source.lkey
        wr.num_sge = 1
    elif link.siw and opcode == _READ:  # the empty element
        sge = link.sge
        sge.addr = sge.length = sge.lkey = 0
        wr.num_sge = 1
    else:
        wr.num_sge = 0
    if link.siw:
        flags = _siw_flags(opcode, flags)
    wr.wr_id = request.wr_id
    wr.opcode = opcode
    wr.send_flags = flags
    if opcode < _FIRST_ATOMIC:
        wr.set_wr_rdma(request.rkey, request.remote_addr)
        if opcode & 1:
            wr.imm_data = socket.htonl(request.imm_data)
    elif opcode <= _LAST:
        wr.set_wr_atomic(request.rkey, request.remote_addr, request.compare_add, request.swap)
    else:
        raise PostError(errno.EOPNOTSUPP, f"{Opcode(opcode).name} isn't offered by RDMA devices here", posted=0)


def _siw_flags(opcode: int, flags: int) -> int:
    """Give a request's flags on siw; see `SendChain.use_for`."""
    return flags & ~_FENCE if opcode == _READ else flags | _FENCE


def built(request: Request, *, siw: bool = False) -> SendWR:
    """Build a request of several elements, to be closed after its post.

    Empty ones are left out, but for one at the front that pyverbs insists on: siw follows a null pointer in the kernel
    over one that isn't the first (Linux 6.12).
    """
    flags = _siw_flags(request.opcode, request.send_flags) if siw else request.send_flags
    filled = [element for element in request.sg_list if element.length] or request.sg_list[:1]
    elements = [SGE(element.addr, element.length, element.lkey) for element in filled]
    wr = SendWR(
        wr_id=request.wr_id, opcode=int(request.opcode), num_sge=len(elements), sg=elements,
        send_flags=flags, imm_data=socket.htonl(request.imm_data),
    )  # fmt: skip
    wr.set_wr_rdma(request.rkey, request.remote_addr)
    for element in elements:
        element.close()
    return wr


class BuiltReceive:
    """pyverbs' request of a receive, kept with its slot: only its wr_id changes when it is posted again."""

    __slots__ = ("sg_list", "wr")

    def __init__(self, receive: Receive) -> None:
        elements = [SGE(element.addr, element.length, element.lkey) for element in receive.sg_list]
        self.wr = RecvWR(num_sge=len(elements), sg=elements)
        for element in elements:
            element.close()
        self.sg_list = receive.sg_list

    def __del__(self) -> None:
        self.wr.close()  # pyverbs doesn't free it by itself


def receive_of(receive: Receive) -> RecvWR:
    """Give a receive's request: kept from its last post, if the memory is the same."""
    kept = receive.driver_data
    if not isinstance(kept, BuiltReceive) or kept.sg_list is not receive.sg_list:
        kept = receive.driver_data = BuiltReceive(receive)
    kept.wr.wr_id = receive.wr_id
    return kept.wr
