"""Two endpoints joined in memory: what link.py does with a socket, done with a queue of bytes.

A `Pipe` is one direction. It takes FPDUs from an outbox, in part too, and gives their bytes to the other
endpoint in pieces of any size, as the link does: into `placement` where there is one, else through a staging
buffer that is overwritten after each call, as other links of a device would.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from aiordma.drivers.base import Completion
from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.endpoint import Endpoint
from aiordma.drivers.soft.mpa import NOT_NEGOTIATED, RTR, Framer, Negotiated, trailer
from aiordma.drivers.soft.send_queue import CompletionSink, ReadRun
from aiordma.drivers.soft.stag import Region, StagTable
from aiordma.enums import Access, AsyncEventType, Opcode, QPState, SendFlags
from aiordma.types import SGE, RecvWR, RunWR, SendWR

NO_RTR = RTR(0)
ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
GUARD = 64
_GUARD_BYTE = b"\xa5"
_POISON = b"\xdd"
#: The link's: bytes read behind a payload that is placed directly.
_LOOKAHEAD = 2048


def agreed(*, crc: bool = False, ird: int = 4, ord: int = 4, rtr: RTR = NO_RTR) -> Negotiated:  # noqa: A002
    """What the MPA handshake would have agreed on."""
    return Negotiated(
        crc=crc,
        send_markers=False,
        ird=ird,
        ord=ord,
        revision=2,
        enhanced=True,
        ours=True,
        rtr=rtr,
        peer_ird=NOT_NEGOTIATED,
        peer_ord=NOT_NEGOTIATED,
        private_data=b"",
    )


class Terminated(NamedTuple):
    """The code of a Terminate."""

    layer: int
    etype: int
    code: int


class Memory:
    """Registered memory between guard bytes, at an address of the test's choice."""

    def __init__(
        self, end: End, data: int | bytes, access: int = ALL, *, addr: int = 0x10_0000, pd: object = None
    ) -> None:
        content = bytes(data) if isinstance(data, int) else data
        self._raw = bytearray(_GUARD_BYTE * GUARD + content + _GUARD_BYTE * GUARD)
        self.view = memoryview(self._raw)[GUARD : GUARD + len(content)]
        self.addr = addr
        self.length = len(content)
        self.region = Region(end.stags, pd or end.pd, self.view, addr, len(content), int(access))
        # Real keys are random: a test that fails must fail again.
        del end.stags.regions[self.region.rkey]
        self.key = self.region.lkey = self.region.rkey = next(end.keys)
        end.stags.regions[self.key] = self.region

    def sge(self, start: int = 0, length: int | None = None) -> SGE:
        """Name a piece of it."""
        return SGE(self.addr + start, self.length - start if length is None else length, self.key)

    @property
    def content(self) -> bytes:
        """What it holds; fails if a guard byte changed."""
        assert self._raw[:GUARD] == self._raw[GUARD + self.length :] == _GUARD_BYTE * GUARD, "a guard byte changed"
        return bytes(self.view)


class End:
    """An endpoint with the surroundings that a device gives it."""

    def __init__(self, qp_num: int = 1, *, recv_bound: int = 1 << 20) -> None:
        self.qp_num = qp_num
        self.stags = StagTable()
        self.pd: object = object()
        self.sends = CompletionSink()
        self.recvs = CompletionSink()
        self.reports: list[tuple[AsyncEventType, str]] = []
        self.endpoint = Endpoint(
            qp_num, self.stags, self.pd, self.sends, self.recvs, self._report, recv_bound=recv_bound
        )
        self.keys = itertools.count(0x5A00_0001)
        self._wr_ids = itertools.count(1)

    def _report(self, event: AsyncEventType, reason: str) -> None:
        self.reports.append((event, reason))

    def memory(self, data: int | bytes, access: int = ALL, *, addr: int = 0x10_0000, pd: object = None) -> Memory:
        """Register memory."""
        return Memory(self, data, access, addr=addr, pd=pd)

    def post(
        self,
        opcode: Opcode,
        sg_list: Sequence[SGE] = (),
        *,
        to: Memory | None = None,
        at: int = 0,
        flags: int = SendFlags.SIGNALED,
        inline: bytes | None = None,
        imm: int = 0,
        compare_add: int = 0,
        swap: int = 0,
    ) -> SendWR:
        """Post one send request."""
        wr = SendWR(
            opcode,
            sg_list,
            wr_id=next(self._wr_ids),
            send_flags=flags,
            inline_data=inline,
            remote_addr=to.addr + at if to else 0,
            rkey=to.key if to else 0,
            imm_data=imm,
            compare_add=compare_add,
            swap=swap,
        )
        self.endpoint.post_send((wr,))
        return wr

    def post_run(
        self, opcode: Opcode, local: Memory, locals_: Sequence[int], to: Memory, at: Sequence[int], size: int,
        *, flags: int = SendFlags.SIGNALED,
    ) -> RunWR:  # fmt: skip
        """Post a run: so many requests of `size` bytes, at these offsets of both memories."""
        run = RunWR(
            opcode,
            size,
            local.key,
            to.key,
            [local.addr + offset for offset in locals_],
            [to.addr + offset for offset in at],
        )
        run.send_flags = flags
        run.wr_id = [next(self._wr_ids) for _ in range(2 * run.count)][-1]
        self.endpoint.post_run(run)
        return run

    def send(self, data: bytes) -> SendWR:
        """Post a SEND of inline data."""
        return self.post(Opcode.SEND, inline=data)

    def receive(self, *pieces: SGE) -> RecvWR:
        """Post one receive."""
        wr = RecvWR(pieces, wr_id=next(self._wr_ids))
        self.endpoint.post_recv((wr,))
        return wr

    def sent(self) -> list[Completion]:
        """Take the completions of send requests."""
        taken = self.sends.pending.copy()
        self.sends.pending.clear()
        return taken

    def received(self) -> list[Completion]:
        """Take the completions of receives."""
        taken = self.recvs.pending.copy()
        self.recvs.pending.clear()
        return taken

    def output(self) -> list[bytes]:
        """Take every FPDU of the outbox, whole, as if it were sent."""
        taken = []
        outbox = self.endpoint.outbox
        while outbox:
            self.endpoint.fill()
            if outbox.made:
                taken += fpdus(b"".join(outbox.made[0])) if not outbox.partial else [b"".join(outbox.made[0])]
                outbox.left(1)
        self.endpoint.send_queue.records_left()
        return taken

    def feed(self, data: bytes) -> None:
        """Receive bytes in one piece."""
        pipe = Pipe(self.endpoint, self.endpoint)
        pipe.stream += data
        pipe.deliver(len(data))

    def terminated(self) -> Terminated | None:
        """Give the code of the Terminate that ends the outbox, or None."""
        found = None
        for fpdu in self.output():
            assert found is None, "something follows a Terminate"
            if fpdu[3] & 0xF == ddp.OP_TERMINATE:
                found = ddp.decode_terminate(fpdu[20 : 2 + int.from_bytes(fpdu[:2], "big")])
        assert self.endpoint.terminating == (found is not None)
        return found and Terminated(*found[:3])


class Pipe:
    """One direction of a connection."""

    def __init__(
        self,
        source: Endpoint,
        sink: Endpoint,
        *,
        crc: bool = False,
        joined: bool = False,
        mulpdu: int = 65_518,
    ) -> None:
        self._source = source
        self._joined = joined
        self._sink = sink
        self._mulpdu = mulpdu
        self._framer = Framer(crc=True, markers=False) if crc else None
        self._carry = b""
        self._skip = 0
        #: Bytes that left the source and didn't reach the sink.
        self.stream = bytearray()

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, nor half an FPDU at the sink."""
        return not self.stream and not self._source.outbox and not self._carry and not self._skip

    def send(self, room: int) -> int:
        """Let a socket with so much room take FPDUs; gives the bytes that left."""
        outbox = self._source.outbox
        outbox.blocked = False
        taken = 0
        if outbox.small and not outbox.made and self._framer is None:
            for record in outbox.small:
                self._check(record)
            data = b"".join(outbox.small)
            self.stream += data[:room]
            taken = min(room, len(data))
            if taken == len(data):
                outbox.sent += len(outbox.small)
                outbox.small.clear()
            else:
                outbox.small_left(taken)
        while outbox and taken < room:
            self._source.fill()
            if not outbox.made:
                break
            if self._framer is not None and not outbox.framed:
                outbox.made[0] = tuple(self._framer.frame(outbox.made[0]))
                outbox.framed = 1
            record = b"".join(outbox.made[0])
            if not outbox.partial:
                self._check(record)
            part = record[: room - taken]
            self.stream += part
            taken += len(part)
            if len(part) == len(record):
                outbox.left(1)
            else:
                outbox.made[0] = _behind(outbox.made[0], len(part))
                outbox.partial = True
        outbox.blocked = bool(outbox)
        self._source.send_queue.records_left()
        return taken

    def _check(self, record: bytes) -> None:
        """Fail unless this is one FPDU and not too long, or several where they may be joined."""
        found = fpdus(record)
        assert len(found) == 1 or self._joined
        for fpdu in found:
            length = int.from_bytes(fpdu[:2], "big")
            assert length <= self._mulpdu, "the ULPDU is longer than MULPDU"

    def deliver(self, count: int) -> int:
        """Give the sink up to `count` bytes, as one read of its socket; gives how many."""
        sink = self._sink
        if sink.receive_queue.full:
            return 0  # the link doesn't read then
        placement = sink.placement
        if placement is None:
            data = bytes(self.stream[:count])
            staging = self._carry + data
        else:
            data = bytes(self.stream[: min(count, placement.left + _LOOKAHEAD)])
            direct = data[: placement.left]
            start = 0
            for view in placement.views:
                piece = direct[start : start + len(view)]
                view[: len(piece)] = piece
                start += len(piece)
            staging = data[len(direct) :]
            if direct:
                self._skip = sink.placed(len(direct))
        del self.stream[: len(data)]
        skipped = min(self._skip, len(staging))
        self._skip -= skipped
        self._feed(staging[skipped:])
        return len(data)

    def _feed(self, staging: bytes) -> None:
        if not staging:
            self._carry = b""
            return
        end = len(staging)
        buffer = bytearray(staging + _POISON * 64)
        done = self._sink.receive(memoryview(buffer), end)
        assert 0 <= done <= end
        assert buffer[:end] == staging, "the staging buffer was changed"
        assert done == end or self._sink.placement is None
        self._carry = staging[done:]
        buffer[:] = _POISON * len(buffer)


def _behind(record: ddp.FPDU, count: int) -> ddp.FPDU:
    """Give the buffers of an FPDU behind its first `count` bytes."""
    rest: list[bytes | memoryview] = []
    for buffer in record:
        if count < len(buffer):
            rest.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return tuple(rest)


class Wire:
    """A connection: `client` is the initiator, `server` the responder."""

    def __init__(
        self,
        *,
        crc: bool = False,
        joined: bool = False,
        mulpdu: int = 1000,
        reads: int = 4,
        rtr: RTR = RTR.WRITE,
        recv_bound: int = 1 << 20,
        seed: int = 0,
        sizes: Iterable[int] = (1 << 16,),
    ) -> None:
        self.client = End(1, recv_bound=recv_bound)
        self.server = End(2, recv_bound=recv_bound)
        self.reads = reads
        near, far = self.client.endpoint, self.server.endpoint
        self.to_server = Pipe(near, far, crc=crc, joined=joined, mulpdu=mulpdu)
        self.to_client = Pipe(far, near, crc=crc, joined=joined, mulpdu=mulpdu)
        self._random = random.Random(seed)
        self._sizes = itertools.cycle(sizes)
        self._steps = 0
        parameters = agreed(crc=crc, ird=reads, ord=reads, rtr=rtr)
        far.start(parameters, initiator=False, mulpdu=mulpdu, joined=joined)
        near.start(parameters, initiator=True, mulpdu=mulpdu, joined=joined)

    def step(self) -> int:
        """Let one side send or receive once; gives the bytes that moved."""
        pipes = [self.to_server, self.to_client]
        self._random.shuffle(pipes)
        actions: list[Callable[[int], int]] = [action for pipe in pipes for action in (pipe.send, pipe.deliver)]
        if self._random.random() < 0.5:
            actions.reverse()
        # A long program in small pieces would take for ever; its end comes in large ones.
        self._steps += 1
        size = next(self._sizes) if self._steps < 300 else 1 << 17
        for action in actions:
            if moved := action(size):
                for end in (self.client, self.server):
                    assert outstanding(end) <= self.reads, "more READs than ORD"
                return moved
        return 0

    def pump(self) -> None:
        """Let everything go over that is to be sent."""
        while self.step():
            pass

    @property
    def idle(self) -> bool:
        """Whether both sides are up, and nothing is on its way."""
        states = {self.client.endpoint.state, self.server.endpoint.state}
        return states == {QPState.RTS} and self.to_server.idle and self.to_client.idle


def fpdu(ulpdu: bytes) -> bytes:
    """Frame a ULPDU, with an empty CRC field."""
    return len(ulpdu).to_bytes(2, "big") + ulpdu + trailer(len(ulpdu))


def tagged(opcode: int, stag: int, to: int, payload: bytes = b"", *, control: int = ddp.TAGGED_LAST) -> bytes:
    """Make a tagged FPDU."""
    return ddp.TAGGED_HEADER.pack(14 + len(payload), control | opcode, stag, to) + payload + trailer(14 + len(payload))


def untagged(
    opcode: int, payload: bytes = b"", *, qn: int = 0, msn: int = 1, mo: int = 0, invalidate: int = 0,
    control: int = ddp.UNTAGGED_LAST,
) -> bytes:  # fmt: skip
    """Make an untagged FPDU."""
    length = 18 + len(payload)
    return ddp.UNTAGGED_HEADER.pack(length, control | opcode, invalidate, qn, msn, mo) + payload + trailer(length)


def read_request(
    stag: int, to: int, size: int, *, msn: int = 1, mo: int = 0, qn: int = 1, control: int = ddp.UNTAGGED_LAST
) -> bytes:
    """Make a Read Request whose sink is STag 0x51, TO 0x1000."""
    payload = (
        (0x51).to_bytes(4, "big") + (0x1000).to_bytes(8, "big") + size.to_bytes(4, "big")
        + stag.to_bytes(4, "big") + to.to_bytes(8, "big")
    )  # fmt: skip
    return untagged(ddp.OP_READ_REQUEST, payload, qn=qn, msn=msn, mo=mo, control=control)


def atomic_request(
    stag: int, to: int, *, operation: int = ddp.FETCH_ADD, msn: int = 1, mo: int = 0, qn: int = 1,
    request: int = 1, data: int = 1, mask: int = 0, compare: int = 0, compare_mask: int = ddp.MASK64,
    control: int = ddp.UNTAGGED_LAST,
) -> bytes:  # fmt: skip
    """Make an Atomic Request."""
    words = [
        (operation, 4),
        (request, 4),
        (stag, 4),
        (to, 8),
        (data, 8),
        (mask, 8),
        (compare, 8),
        (compare_mask, 8),
    ]
    payload = b"".join(value.to_bytes(size, "big") for value, size in words)
    return untagged(ddp.OP_ATOMIC_REQUEST, payload, qn=qn, msn=msn, mo=mo, control=control)


def fpdus(data: bytes) -> list[bytes]:
    """Cut bytes into FPDUs; fails unless they are whole."""
    found = []
    while data:
        length = int.from_bytes(data[:2], "big")
        size = 2 + length + len(trailer(length))
        assert len(data) >= size, "not a whole FPDU"
        found.append(data[:size])
        data = data[size:]
    return found


def outstanding(end: End) -> int:
    """Count READs and atomics without a response."""
    return sum(
        entry.wr.count - entry.start if isinstance(entry, ReadRun) else 1
        for entry in end.endpoint.send_queue.outstanding
    )
