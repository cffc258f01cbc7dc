"""What a peer breaks in a Run Request, and where runs may be used at all: the Terminate that answers it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from aiordma.drivers.soft import ddp, runs
from aiordma.enums import Access, AsyncEventType, QPState
from tests.unit.wire import End, Memory, Pipe, Terminated, agreed, read_request, tagged, untagged

TOP = (1 << 64) - 8
IRD = 8


class Target:
    """A responder with memory of every kind, towards another aiordma device."""

    def __init__(self) -> None:
        self.end = End()
        self.good = self.end.memory(b"readable" * 8, Access.REMOTE_READ, addr=0x1000)
        self.none = self.end.memory(b"secret.." * 8, Access.LOCAL_WRITE, addr=0x2000)
        self.foreign = self.end.memory(b"foreign." * 8, addr=0x3000, pd=object())
        self.top = self.end.memory(b"the top.", Access.REMOTE_READ, addr=TOP)
        self.large = self.end.memory(1 << 16, Access.REMOTE_READ, addr=0x10_0000)
        self.end.endpoint.start(agreed(ird=IRD), initiator=True, mulpdu=65_518, joined=True)

    @property
    def memories(self) -> list[Memory]:
        return [self.good, self.none, self.foreign, self.top, self.large]


def asks(
    key: int, *sources: int, size: int = 4, qn: int = 1, msn: int = 1, mo: int = 0, more: bytes = b"",
    control: int = ddp.UNTAGGED_LAST, opcode: int = runs.OP_REQUEST,
) -> bytes:  # fmt: skip
    """Make a Run Request by its documented layout."""
    payload = struct.pack(f">II{len(sources)}Q", size, key, *sources) + more
    return untagged(opcode, payload, qn=qn, msn=msn, mo=mo, control=control)


def test_layout() -> None:
    """What the cases below are made with is what is sent."""
    assert asks(5, 1, 2, size=3, msn=7) == runs.encode_request(7, 3, 5, [1, 2])


CASES: dict[str, tuple[Callable[[Target], bytes], tuple[int, int, int]]] = {
    "nothing behind the header": (lambda _: untagged(12, b"", qn=1), (1, 2, 4)),
    "half of size and key": (lambda _: untagged(12, bytes(4), qn=1), (1, 2, 4)),
    "no source": (lambda t: asks(t.good.key), (1, 2, 4)),
    "half a source": (lambda t: asks(t.good.key, more=bytes(4)), (1, 2, 4)),
    "a source and a half": (lambda t: asks(t.good.key, 0x1000, more=bytes(4)), (1, 2, 5)),
    "a source and a byte": (lambda t: asks(t.good.key, 0x1000, more=b"x"), (1, 2, 5)),
    "size 0": (lambda t: asks(t.good.key, 0x1000, size=0), (1, 2, 5)),
    "size 4 GiB": (lambda t: asks(t.good.key, 0x1000, size=ddp.MASK32), (1, 2, 5)),
    "one larger than an answer": (lambda t: asks(t.large.key, 0x10_0000, size=runs.LARGEST + 1), (1, 2, 5)),
    "together larger than an answer": (
        lambda t: asks(t.large.key, *[0x10_0000] * 8, size=runs.LARGEST // 8 + 1), (1, 2, 5),
    ),
    "queue 0": (lambda t: asks(t.good.key, 0x1000, qn=0), (1, 2, 1)),
    "queue 2": (lambda t: asks(t.good.key, 0x1000, qn=2), (1, 2, 1)),
    "sequence 0": (lambda t: asks(t.good.key, 0x1000, msn=0), (1, 2, 3)),
    "sequence 2": (lambda t: asks(t.good.key, 0x1000, msn=2), (1, 2, 3)),
    "the same sequence again": (
        lambda t: asks(t.good.key, 0x1000, 0x1000) + asks(t.good.key, 0x1000, msn=2), (1, 2, 3),
    ),
    "a READ with a sequence number of the run's": (
        lambda t: asks(t.good.key, 0x1000, 0x1000) + read_request(t.good.key, 0x1000, 4, msn=2), (1, 2, 3),
    ),
    "offset 4": (lambda t: asks(t.good.key, 0x1000, mo=4), (1, 2, 4)),
    "nine of eight": (lambda t: asks(t.good.key, *[0x1000] * 9), (1, 2, 2)),
    "as many as fit a request": (lambda t: asks(t.good.key, *[0x1000] * 8188), (1, 2, 2)),
    "the ninth of eight behind READs": (
        lambda t: read_request(t.good.key, 0x1000, 4) + asks(t.good.key, *[0x1000] * 8, msn=2), (1, 2, 2),
    ),
    "not last": (lambda t: asks(t.good.key, 0x1000, control=ddp.UNTAGGED), (0, 2, 6)),
    "tagged": (lambda t: tagged(runs.OP_REQUEST, t.good.key, 0x1000, bytes(20)), (0, 2, 6)),
    "an answer, untagged": (lambda t: asks(t.good.key, 0x1000, opcode=runs.OP_RESPONSE), (0, 2, 6)),
    "an answer to nothing": (lambda t: tagged(runs.OP_RESPONSE, t.good.key, 1, bytes(8)), (0, 2, 6)),
    "a large answer to nothing": (lambda t: tagged(runs.OP_RESPONSE, t.large.key, 1, bytes(9000)), (0, 2, 6)),
    "DDP version 0": (lambda t: asks(t.good.key, 0x1000, control=0x4040), (1, 2, 6)),
    "RDMAP version 0": (lambda t: asks(t.good.key, 0x1000, control=0x4100), (0, 2, 5)),
    "unknown key": (lambda _: asks(0, 0x1000), (0, 1, 0)),
    "no right": (lambda t: asks(t.none.key, 0x2000), (0, 1, 2)),
    "other domain": (lambda t: asks(t.foreign.key, 0x3000), (0, 1, 3)),
    "below the region": (lambda t: asks(t.good.key, 0x1000, 0xFFF), (0, 1, 1)),
    "across the region's end": (lambda t: asks(t.good.key, 0x1000, 0x103D), (0, 1, 1)),
    "address 0": (lambda t: asks(t.good.key, 0, 0x1000), (0, 1, 1)),
    "offset wraps": (lambda t: asks(t.top.key, TOP, TOP + 5), (0, 1, 4)),
}  # fmt: skip


def outcome(build: Callable[[Target], bytes], step: int) -> tuple[Terminated | None, list[AsyncEventType]]:
    """Give a target these bytes, so many at once; fails if its memory changed or the stream goes on."""
    target = Target()
    before = [memory.content for memory in target.memories]
    pipe = Pipe(target.end.endpoint, target.end.endpoint)
    pipe.stream += build(target)
    while pipe.stream:
        pipe.deliver(step)
        assert target.end.endpoint.placement is None
    assert [memory.content for memory in target.memories] == before
    assert target.end.endpoint.state is QPState.ERR
    return target.end.terminated(), [event for event, _ in target.end.reports]


@pytest.mark.parametrize("step", [1 << 20, 1000, 1])
@pytest.mark.parametrize("name", CASES)
def test_code(name: str, step: int) -> None:
    """Each fault ends the stream by one Terminate of that layer, type and code, however the bytes come."""
    build, expected = CASES[name]
    if step == 1 and len(build(Target())) > 10_000:
        step = 997  # alone, so many bytes say nothing more
    assert outcome(build, step) == (Terminated(*expected), [AsyncEventType.QP_ACCESS_ERR])


def test_a_refused_run_is_not_answered() -> None:
    """A run that breaks a rule as a message is refused as a whole, and the Terminate quotes its header."""
    target = Target()
    request = asks(target.good.key, *[0x1000] * 9)
    target.end.feed(request)
    (answer,) = target.end.output()
    assert answer[20:-4] == bytes.fromhex("1202c000") + request[:20]


def test_a_refused_read_is_quoted() -> None:
    """The Terminate for one READ of a run quotes the Read Request it would have been, behind the others' answer."""
    target = Target()
    target.end.feed(asks(target.good.key, 0x1000, 0x1004, 0xFFF, 0x1000))
    answered, answer = target.end.output()
    assert answered[3] & 0xF == runs.OP_RESPONSE
    assert answered[8:24] == (1).to_bytes(8, "big") + b"readable"
    quoted = read_request(target.good.key, 0xFFF, 4, msn=3)
    length = int.from_bytes(answer[:2], "big")
    assert answer[20 : 2 + length] == bytes.fromhex("0101e000") + quoted[:20] + bytes(12) + quoted[32:48]


@pytest.mark.parametrize("opcode", [runs.OP_REQUEST, runs.OP_RESPONSE])
@pytest.mark.parametrize("step", [1 << 20, 777])
def test_large_ones_of_others(opcode: int, step: int) -> None:
    """From a peer that isn't known to be an aiordma device, large FPDUs with a run's opcode are unexpected too."""
    end = End()
    memory = end.memory(8000)
    end.endpoint.start(agreed(), initiator=True, mulpdu=65_518)
    data = (
        asks(memory.key, *[memory.addr] * 1000)
        if opcode == runs.OP_REQUEST
        else tagged(opcode, memory.key, memory.addr, b"x" * 8000)
    )
    pipe = Pipe(end.endpoint, end.endpoint)
    pipe.stream += data
    while pipe.stream:
        pipe.deliver(step)
    assert end.terminated() == Terminated(0, 2, 6)
    assert memory.content == bytes(8000)
