"""The other end by hand, in a process of its own: pyverbs, its rdma_cm binding, and nothing of aiordma.

A reliable connected queue pair with one registered buffer, connected by rdma_cm from either side, or by the numbers
that the two programs tell each other. Each line on standard input is a command, a method of `Program` and its arguments
in JSON, and is answered by a line when it is done. The end of standard input ends the program, and so does any failure.
"""

from __future__ import annotations

import ctypes
import faulthandler
import ipaddress
import json
import mmap
import random
import socket
import struct
import sys
import time
import zlib
from typing import Any, Final

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ, WC
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

#: Bytes at the buffer's start that the peer may use, that messages are sent from, and as many for each receive behind.
SPACE: Final = 1 << 20
SLOTS: Final = 2
#: Local write, remote write, remote read; and atomics where there are any.
ACCESS: Final = 1 | 2 | 4
ATOMIC: Final = 8
OPCODES: Final = {
    "write": 0, "write_with_imm": 1, "send": 2, "send_with_imm": 3, "read": 4, "compare_swap": 5, "fetch_add": 6,
}  # fmt: skip
#: READs and atomics at once, each way.
DEPTH: Final = 4
#: Seconds for one command: what waits in C for what never comes can't be interrupted.
LIMIT: Final = 30.0

PS_TCP: Final = 0x106
PASSIVE: Final = 1
ADDR_RESOLVED, ROUTE_RESOLVED, CONNECT_REQUEST, CONNECT_RESPONSE, ESTABLISHED, DISCONNECTED = 0, 2, 4, 5, 9, 10
INIT, RTR, RTS = 1, 2, 3
ROCE_V2: Final = 2
#: IBV_QP_ACCESS_FLAGS; IBV_QP_RQ_PSN or IBV_QP_SQ_PSN.
WITH_ACCESS: Final = 1 << 3
WITH_PSN: Final = 1 << 12 | 1 << 16
WITH_IMM: Final = 2
NATIVE_U64: Final = struct.Struct("=Q")
#: How aiordma's RemoteRegion is on the wire: address, length, key.
REGION: Final = struct.Struct(">QQI")


class Program:
    """What the commands do. One connection at a time."""

    cq: CQ
    mr: MR
    qp: QP
    listener: CMID | None = None
    cm_id: CMID | None = None

    def __init__(self) -> None:
        self.buffer = mmap.mmap(-1, SPACE * (1 + SLOTS))
        self.export = ctypes.c_char.from_buffer(self.buffer)
        self.addr = ctypes.addressof(self.export)
        self.access = ACCESS
        #: The peer's memory: address and key.
        self.remote = (0, 0)

    # -- connecting ---------------------------------------------------------------------------------------------------

    def make(self, context: Context, pd: PD) -> None:
        """Make what a connection needs, but for the receives: a queue pair takes none before INIT."""
        self.buffer[:] = bytes(len(self.buffer))
        self.access = ACCESS | (ATOMIC if context.query_device().atomic_caps else 0)
        self.mr = MR(pd, len(self.buffer), self.access, address=self.addr)
        self.cq = CQ(context, 16, None, None, 0)
        cap = QPCap(max_send_wr=4, max_recv_wr=SLOTS)
        self.qp = QP(pd, QPInitAttr(qp_type=2, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))

    def modify(self, cm_id: CMID, state: int) -> None:
        """Change the state with what the connection manager knows. On iWARP the kernel does, but to INIT."""
        attr, mask = cm_id.init_qp_attr(state)
        if state != INIT and not mask & WITH_PSN:
            return
        if mask & WITH_ACCESS:
            attr.qp_access_flags |= self.access
        self.qp.modify(attr, mask)

    def event(self, *expected: int) -> int:
        """Wait for the next event, which is one of these."""
        event = CMEvent(self.channel)
        kind, name = event.event_type, event.event_str()
        if kind not in expected:
            raise SystemExit(f"{name} instead of one of {expected}")
        if kind == CONNECT_REQUEST:
            self.cm_id = CMID(creator=event, listen_id=self.listener)
        event.ack_cm_event()
        return kind

    def connect(self, host: str, port: int) -> None:
        """Connect by rdma_cm."""
        self.channel = CMEventChannel()
        cm_id = self.cm_id = CMID(creator=self.channel)
        cm_id.resolve_addr(AddrInfo(dst=host, dst_service=str(port), port_space=PS_TCP))
        self.event(ADDR_RESOLVED)
        cm_id.resolve_route()
        self.event(ROUTE_RESOLVED)
        self.make(cm_id.context, cm_id.pd)
        self.modify(cm_id, INIT)
        self.post_receives()
        cm_id.connect(ConnParam(DEPTH, DEPTH, retry=7, rnr_retry=7, qp_num=self.qp.qp_num))
        # On iWARP it is established now; elsewhere the answer is to be confirmed by who has the queue pair.
        if self.event(CONNECT_RESPONSE, ESTABLISHED) == CONNECT_RESPONSE:
            self.modify(cm_id, RTR)
            self.modify(cm_id, RTS)
            cm_id.establish()

    def listen(self, host: str, port: int) -> None:
        """Listen by rdma_cm."""
        self.channel = CMEventChannel()
        self.listener = CMID(creator=self.channel)
        self.listener.bind_addr(AddrInfo(src=host, src_service=str(port), port_space=PS_TCP, flags=PASSIVE))
        self.listener.listen(1)

    def accept(self) -> None:
        """Accept the next request."""
        self.event(CONNECT_REQUEST)
        assert self.cm_id is not None
        self.make(self.cm_id.context, self.cm_id.pd)
        self.modify(self.cm_id, INIT)
        self.post_receives()
        for state in (RTR, RTS):
            self.modify(self.cm_id, state)
        self.cm_id.accept(ConnParam(DEPTH, DEPTH, retry=7, rnr_retry=7, qp_num=self.qp.qp_num))
        self.event(ESTABLISHED)

    def by_hand(self, device: str, host: str, psn: int) -> dict[str, Any]:
        """Make a queue pair of a device; gives what its peer must know, to connect to it without rdma_cm."""
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.make(self.context, self.pd)
        self.psn = psn
        port = self.context.query_port(1)
        self.mtu = port.active_mtu
        wanted = ipaddress.ip_address(f"::ffff:{host}").packed
        for entry in self.context.query_gid_table(port.gid_tbl_len):
            gid = bytes.fromhex(entry.gid_str().replace(":", ""))
            if entry.port_num == 1 and entry.gid_type == ROCE_V2 and gid == wanted:
                self.gid_index = entry.gid_index
                return {"qpn": self.qp.qp_num, "psn": psn, "gid": gid.hex(), "mtu": 128 << self.mtu}
        raise SystemExit(f"{device} has no GID of {host}")

    def connect_by_hand(self, qpn: int, psn: int, gid: str) -> None:
        """Connect to the queue pair with these numbers: INIT, RTR, RTS."""
        attr = QPAttr(qp_state=INIT, port_num=1)
        attr.qp_access_flags = self.access
        self.qp.modify(attr, 0x39)  # state, pkey index, port, access
        self.post_receives()
        attr = QPAttr(qp_state=RTR, path_mtu=self.mtu)
        attr.dest_qp_num, attr.rq_psn, attr.max_dest_rd_atomic, attr.min_rnr_timer = qpn, psn, DEPTH, 12
        dgid = GID(bytes.fromhex(gid).hex(":", 2))
        route = GlobalRoute(dgid=dgid, sgid_index=self.gid_index, hop_limit=64)
        attr.ah_attr = AHAttr(is_global=1, port_num=1, gr=route)
        self.qp.modify(attr, 0x129181)  # + address vector, MTU, peer, PSN, depth, RNR timer
        attr = QPAttr(qp_state=RTS)
        attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = self.psn, 14, 7, 7, DEPTH
        self.qp.modify(attr, 0x12E01)  # + time-out, retries, RNR retries, PSN, depth

    def end(self, *, first: bool) -> None:
        """Disconnect, as the first or after the peer; then free everything, children first."""
        if self.cm_id is None:
            for item in (self.qp, self.cq, self.mr, self.pd, self.context):
                item.close()
            return
        if not first:
            self.event(DISCONNECTED)
        self.cm_id.disconnect()
        if first:
            self.event(DISCONNECTED)
        for thing in (self.qp, self.cq, self.mr, self.cm_id, self.listener, self.channel):
            if thing is not None:
                thing.close()
        self.cm_id = self.listener = None

    # -- data -----------------------------------------------------------------------------------------------------

    def fill(self, at: int, length: int, seed: int) -> int:
        """Fill own memory with random bytes; gives their CRC."""
        self.buffer[at : at + length] = data = random.Random(seed).randbytes(length)
        return zlib.crc32(data)

    def crc(self, at: int, length: int) -> int:
        """Give the CRC of own memory."""
        return zlib.crc32(self.buffer[at : at + length])

    def poke(self, at: int, value: int) -> None:
        """Put a number into own memory."""
        NATIVE_U64.pack_into(self.buffer, at, value)

    def peek(self, at: int) -> int:
        """Take a number out of own memory."""
        return int(NATIVE_U64.unpack_from(self.buffer, at)[0])

    # -- operations -----------------------------------------------------------------------------------------------

    def one_sided(self, name: str, at: int, remote_at: int, length: int, imm: int = 0) -> None:
        """READ or WRITE, of the same memory here and there but for the places."""
        wr = self.request(name, at, length, imm)
        wr.set_wr_rdma(self.remote[1], self.remote[0] + remote_at)
        self.execute(wr)

    def atomic(self, name: str, remote_at: int, compare_add: int, swap: int = 0) -> int:
        """FETCH_ADD or CMP_AND_SWAP on the peer's number; gives the value before."""
        landing = SPACE - 8
        wr = self.request(name, landing, 8)
        wr.set_wr_atomic(self.remote[1], self.remote[0] + remote_at, compare_add, swap)
        self.execute(wr)
        return self.peek(landing)

    def send(self, length: int, imm: int | None = None) -> None:
        """Send a message from the start of own memory."""
        self.execute(self.request("send" if imm is None else "send_with_imm", 0, length, imm or 0))

    def recv(self) -> dict[str, Any]:
        """Receive a message, or an immediate alone: gives its length, CRC and immediate."""
        data, found = self.take()
        imm = socket.ntohl(found.imm_data) if found.wc_flags & WITH_IMM else None
        return {"length": found.byte_len, "crc": zlib.crc32(data), "imm": imm}

    def send_region(self) -> None:
        """Tell the peer what memory it may use."""
        self.buffer[: REGION.size] = REGION.pack(self.addr, SPACE, self.mr.rkey)
        self.send(REGION.size)
        self.buffer[: REGION.size] = bytes(REGION.size)

    def recv_region(self) -> None:
        """Learn what memory of the peer's can be used."""
        addr, _, rkey = REGION.unpack(self.take()[0])
        self.remote = (addr, rkey)

    def request(self, name: str, at: int, length: int, imm: int = 0) -> SendWR:
        """Build a request."""
        sg = [SGE(self.addr + at, length, self.mr.lkey)]
        return SendWR(opcode=OPCODES[name], num_sge=1, sg=sg, imm_data=socket.htonl(imm))

    def execute(self, wr: SendWR) -> None:
        """Post a request, and wait until it is done."""
        wr.wr_id = SLOTS
        self.qp.post_send(wr)
        self.wait(receive=False)

    def post_receives(self) -> None:
        """Post all receives."""
        self.arrived: list[WC] = []
        for slot in range(SLOTS):
            self.post_receive(slot)

    def post_receive(self, slot: int) -> None:
        """Post a receive."""
        element = SGE(self.addr + SPACE * (1 + slot), SPACE, self.mr.lkey)
        self.qp.post_recv(RecvWR(wr_id=slot, num_sge=1, sg=[element]))

    def take(self) -> tuple[bytes, WC]:
        """Wait for a message, copy it out, and post its receive again."""
        if not self.arrived:
            self.wait(receive=True)
        found = self.arrived.pop(0)
        at = SPACE * (1 + found.wr_id)
        data = b"" if found.opcode == 129 else self.buffer[at : at + found.byte_len]  # 129: what came was written
        self.post_receive(found.wr_id)
        return data, found

    def wait(self, *, receive: bool) -> None:
        """Poll until the request is done, or a receive."""
        while True:
            for found in self.cq.poll()[1]:
                if found.status:
                    raise SystemExit(f"completion of {found.wr_id} with status {found.status}")
                if found.wr_id < SLOTS:
                    self.arrived.append(found)
                if receive == (found.wr_id < SLOTS):
                    return
            time.sleep(0.0002)


def main() -> None:
    """Do what standard input says."""
    program = Program()
    for line in sys.stdin:
        command = json.loads(line)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        answer = getattr(program, command.pop("do"))(**command)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
