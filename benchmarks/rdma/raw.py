"""The opponent: the same operations by hand in pyverbs, on a queue pair connected without rdma_cm, without a loop.

Requests are built once and changed as needed, each operation is signalled, and the completion of each is waited for
before the next: by the completion channel (sleep in ibv_get_cq_event, ask for the next event, poll), or by polling.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import mmap
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypedDict

from attrs import frozen
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

# pyverbs calls logging.basicConfig() when it is imported.
logging.getLogger().handlers.clear()

__all__ = ["LENGTH", "OPCODES", "Address", "RawQP", "WaitMode"]

WaitMode = Literal["event", "polling"]

#: Registered by either side: one-sided operations at its start, what is sent and received at its end.
LENGTH: Final = 1 << 16
OPCODES: Final = {"WRITE": 0, "SEND": 2, "READ": 4, "FETCH_ADD": 6}
_SIGNALED: Final = 2
_RECEIVED: Final = 128
_ACCESS: Final = 1 | 2 | 4 | 8
_DEPTH: Final = 16
_SEND_AT: Final = LENGTH - 8
_RECEIVE_AT: Final = LENGTH - 8 - 8 * _DEPTH
#: Events acknowledged together, as it takes a mutex.
_ACK_BATCH: Final = 64
_U64: Final = struct.Struct("=Q")


class Address(TypedDict):
    """What the other side must know."""

    qpn: int
    psn: int
    gid: str
    addr: int
    rkey: int


@frozen
class _Port:
    gid: str
    gid_index: int
    mtu: int


def _port(context: Context, host: str) -> _Port:
    """Find the GID that is an IP address of the device's."""
    address = ipaddress.ip_address(host)
    wanted = ipaddress.ip_address(f"::ffff:{host}") if address.version == 4 else address
    attr = context.query_port(1)
    for entry in context.query_gid_table(attr.gid_tbl_len):
        gid = bytes.fromhex(str(entry.gid_str()).replace(":", ""))
        if entry.port_num == 1 and ipaddress.ip_address(gid) == wanted:
            return _Port(gid.hex(), entry.gid_index, attr.active_mtu)
    raise SystemExit(f"the device has no GID of {host}")


def _event_fds() -> set[int]:
    """Give this process's descriptors of verbs events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself, closed by now
            if str(entry.readlink()) == "anon_inode:[infinibandevent]":
                found.add(int(entry.name))
    return found


class RawQP:
    """A reliable connected queue pair, its completion queue and channel, and its memory."""

    def __init__(self, device: str, host: str) -> None:
        self.context = Context(name=device)
        self._port = _port(self.context, host)
        self.pd = PD(self.context)
        before = _event_fds()
        self.channel = CompChannel(self.context)
        #: pyverbs before 57 doesn't tell it: the one that is new.
        (self.channel_fd,) = _event_fds() - before
        self.cq = CQ(self.context, 512, None, self.channel, 0)
        self.buffer = mmap.mmap(-1, LENGTH)
        self._export = ctypes.c_char.from_buffer(self.buffer)
        self.addr = ctypes.addressof(self._export)
        self.mr = MR(self.pd, LENGTH, _ACCESS, address=self.addr)
        cap = QPCap(max_send_wr=128, max_recv_wr=_DEPTH)
        self.qp = QP(self.pd, QPInitAttr(qp_type=2, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0))
        self.psn = secrets.randbelow(1 << 24)
        self.remote: Address | None = None
        self._unacknowledged = 0

    def address(self) -> Address:
        """Give what the other side must know."""
        return {
            "qpn": self.qp.qp_num, "psn": self.psn, "gid": self._port.gid, "addr": self.addr, "rkey": self.mr.rkey
        }  # fmt: skip

    def connect(self, remote: Address) -> None:
        """Move to INIT, RTR, RTS; then post the receives, and ask for the first event."""
        self.remote = remote
        attr = QPAttr(qp_state=1, port_num=1)
        attr.qp_access_flags = _ACCESS
        self.qp.modify(attr, 0x39)  # state, pkey index, port, access
        gid = GID(bytes.fromhex(remote["gid"]).hex(":", 2))
        attr = QPAttr(qp_state=2, path_mtu=self._port.mtu)
        attr.dest_qp_num, attr.rq_psn, attr.max_dest_rd_atomic, attr.min_rnr_timer = (
            remote["qpn"],
            remote["psn"],
            16,
            12,
        )
        route = GlobalRoute(dgid=gid, sgid_index=self._port.gid_index, hop_limit=64)
        attr.ah_attr = AHAttr(is_global=1, port_num=1, gr=route)
        self.qp.modify(attr, 0x129181)  # + address vector, MTU, peer, PSN, depth, RNR timer
        attr = QPAttr(qp_state=3)
        attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = self.psn, 14, 7, 7, 16
        self.qp.modify(attr, 0x12E01)  # + time-out, retries, RNR retries, PSN, depth
        self.receives = []
        for slot in range(_DEPTH):
            element = SGE(self.addr + _RECEIVE_AT + 8 * slot, 8, self.mr.lkey)
            self.receives.append(RecvWR(wr_id=slot, num_sge=1, sg=[element]))
            self.qp.post_recv(self.receives[-1])
        self.cq.req_notify()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait_event(self) -> list[WC]:
        """Sleep until the channel has an event, ask for the next, and poll: in this order nothing is missed."""
        while True:
            self.channel.get_cq_event(self.cq)
            self._unacknowledged += 1
            if self._unacknowledged == _ACK_BATCH:
                self.cq.ack_events(_ACK_BATCH)
                self._unacknowledged = 0
            self.cq.req_notify()
            found = self.cq.poll(_DEPTH)[1]  # all there can be: for what is left no event would come
            if found:
                return found

    def wait_polling(self) -> list[WC]:
        """Poll until something is there."""
        poll = self.cq.poll
        while True:
            found = poll()[1]
            if found:
                return found

    def waiting(self, mode: WaitMode) -> Callable[[], list[WC]]:
        """Give the function that waits."""
        return self.wait_event if mode == "event" else self.wait_polling

    # -- operations ---------------------------------------------------------------------------------------------------

    def request(self, operation: str, length: int = 8, offset: int = 0, flags: int = _SIGNALED) -> SendWR:
        """Build a request."""
        assert self.remote is not None
        local = self.addr + (_SEND_AT if operation == "SEND" else offset)
        opcode = OPCODES[operation]
        wr = SendWR(opcode=opcode, num_sge=1, sg=[SGE(local, length, self.mr.lkey)], send_flags=flags)
        if operation == "FETCH_ADD":
            wr.set_wr_atomic(self.remote["rkey"], self.remote["addr"] + 64, 1)
        elif operation != "SEND":
            wr.set_wr_rdma(self.remote["rkey"], self.remote["addr"] + offset)
        return wr

    def one_sided(self, operation: str, mode: WaitMode, count: int) -> list[float]:
        """Post and wait, one at a time; gives the time of each in ns."""
        wr, post, wait, clock = self.request(operation), self.qp.post_send, self.waiting(mode), time.perf_counter_ns
        atomic, unpack, buffer = operation == "FETCH_ADD", _U64.unpack_from, self.buffer
        samples = []
        for number in range(count):
            start = clock()
            wr.wr_id = number
            post(wr)
            wc = wait()[0]
            if wc.status:
                raise SystemExit(f"raw {operation}: completion status {wc.status}")
            if atomic:
                unpack(buffer, 0)
            samples.append(float(clock() - start))
        return samples

    def ping_pong(self, mode: WaitMode, count: int) -> list[float]:
        """Send 8 bytes and receive the answer; the time of each round trip in ns."""
        wr, wait, clock = self.request("SEND"), self.waiting(mode), time.perf_counter_ns
        samples = []
        for _ in range(count):
            start = clock()
            self.qp.post_send(wr)
            left = 2
            while left:
                for wc in wait():
                    left -= 1
                    if self.is_receive(wc):
                        self.take(wc)
            samples.append(float(clock() - start))
        return samples

    def echo(self, mode: WaitMode, count: int) -> None:
        """Send back as many messages, and see the sends complete."""
        wr, wait = self.request("SEND"), self.waiting(mode)
        left = 2 * count
        while left:
            for wc in wait():
                left -= 1
                if self.is_receive(wc):
                    self.buffer[_SEND_AT:] = self.take(wc)
                    self.qp.post_send(wr)

    @staticmethod
    def is_receive(wc: WC) -> bool:
        """Whether it is the completion of a receive; it must be successful."""
        if wc.status:
            raise SystemExit(f"raw: completion status {wc.status}")
        return bool(wc.opcode & _RECEIVED)

    def take(self, wc: WC) -> bytes:
        """Copy a message out, and post its receive again."""
        slot = wc.wr_id
        start = _RECEIVE_AT + 8 * slot
        message = self.buffer[start : start + 8]
        self.qp.post_recv(self.receives[slot])
        return message

    def close(self) -> None:
        """Free everything, children first."""
        for item in (self.qp, self.cq, self.channel, self.mr, self.pd, self.context):
            item.close()
