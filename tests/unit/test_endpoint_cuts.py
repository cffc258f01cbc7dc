"""Large FPDUs that come in pieces: their payload goes straight to where it belongs, cut wherever it may be."""

from __future__ import annotations

import pytest

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.send_queue import COPY_LIMIT
from aiordma.enums import Access, Opcode, QPState
from aiordma.types import SGE
from tests.unit.wire import End, Memory, Pipe, Terminated, Wire, agreed, tagged, untagged

KINDS = ("write", "response", "send")


class Receiver:
    """An endpoint that is sent one large FPDU, then a small Write."""

    def __init__(self, kind: str, size: int) -> None:
        self.end = End()
        self.end.endpoint.start(agreed(), initiator=True, mulpdu=65_518)
        self.memory = self.end.memory(size, addr=0x1000)
        self.small = self.end.memory(8, addr=0x9_0000)
        self.data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        if kind == "send":
            self.large = untagged(ddp.OP_SEND, self.data)
            self.end.receive(*pieces(self.memory))
        elif kind == "response":
            self.large = tagged(ddp.OP_READ_RESPONSE, self.memory.key, 0x1000, self.data)
            self.end.post(Opcode.RDMA_READ, pieces(self.memory))
            self.end.output()
        else:
            self.large = tagged(ddp.OP_WRITE, self.memory.key, 0x1000, self.data)
        self.stream = self.large + tagged(ddp.OP_WRITE, self.small.key, 0x9_0000, b"followed")
        self.pipe = Pipe(self.end.endpoint, self.end.endpoint)
        self.pipe.stream += self.stream


def pieces(memory: Memory) -> list[SGE]:
    """Name memory in three pieces."""
    return [memory.sge(0, 100), memory.sge(100, 0), memory.sge(100)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(COPY_LIMIT + 100, COPY_LIMIT + 104))
def test_cut_once(kind: str, size: int) -> None:
    """One cut, behind any of the first and the last bytes, pad and CRC field included, changes nothing."""
    length = len(Receiver(kind, size).large)
    for cut in (*range(1, 60), *range(100, 140), *range(length - 20, length + 20)):
        receiver = Receiver(kind, size)
        receiver.pipe.deliver(cut)
        while receiver.pipe.stream:
            receiver.pipe.deliver(1 << 20)
        assert receiver.memory.content == receiver.data
        assert receiver.small.content == b"followed"
        assert receiver.end.endpoint.state is QPState.RTS


@pytest.mark.parametrize("kind", KINDS)
def test_cut_everywhere(kind: str) -> None:
    """Pieces of one byte are as good as one piece."""
    receiver = Receiver(kind, COPY_LIMIT + 101)
    while receiver.pipe.stream:
        receiver.pipe.deliver(1)
    assert receiver.memory.content == receiver.data
    assert receiver.small.content == b"followed"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_delivered_early(kind: str) -> None:
    """Nothing completes before the last byte of the payload is here."""
    receiver = Receiver(kind, COPY_LIMIT + 100)
    end = receiver.end
    for _ in range(len(receiver.large) - 5):
        receiver.pipe.deliver(1)
        assert not end.recvs.pending
        assert not end.sends.pending
    receiver.pipe.deliver(5)
    assert len(end.recvs.pending) + len(end.sends.pending) == (kind != "write")


@pytest.mark.parametrize(
    ("control", "code"), [(0x4243, (1, 2, 6)), (0x4043, (1, 2, 6)), (0x4183, (0, 2, 5)), (0x4103, (0, 2, 5))]
)
def test_versions_of_a_large_send(control: int, code: tuple[int, int, int]) -> None:
    """A large Send of a wrong version is refused when its header is here, and nothing of it is placed."""
    receiver = Receiver("send", COPY_LIMIT + 100)
    receiver.pipe.stream[2:4] = control.to_bytes(2, "big")
    receiver.pipe.deliver(200)
    assert receiver.end.terminated() == Terminated(*code)
    assert not any(receiver.memory.content)


def test_lengths_of_immediates_behind_large_writes() -> None:
    """An immediate tells the length of its own Write, also when Writes were placed as they came."""
    wire = Wire(mulpdu=65_518, sizes=[3000])
    target = wire.server.memory(100_000)
    source = wire.client.memory(bytes(100_000), Access(0))
    sizes = [20_000, 70_000, 5000, 10, 0]
    for size in sizes:
        wire.server.receive()
        wire.client.post(Opcode.RDMA_WRITE_WITH_IMM, [source.sge(0, size)], to=target)
    wire.pump()
    assert [c[3] for c in wire.server.received()] == sizes
