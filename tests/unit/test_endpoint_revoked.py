"""A region that is deregistered while a peer is in the middle of it: nothing comes in, nothing goes out any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.stag import Region
from aiordma.enums import Opcode, QPState
from aiordma.types import SGE, SendWR
from tests.unit.wire import ALL, End, Pipe, Terminated, agreed, read_request, tagged, untagged

ADDR = 0x10_0000
SIZE = 60_000
MULPDU = 1000
#: The payload of a full FPDU of a response then.
PAYLOAD = 984


class Target:
    """An end with registered memory whose export can be seen to end: the device alone holds the region."""

    def __init__(self, size: int = SIZE, *, mulpdu: int = MULPDU) -> None:
        self.end = End()
        self.endpoint = self.end.endpoint
        self.endpoint.start(agreed(), initiator=True, mulpdu=mulpdu)
        self.size = size
        self.buffer = bytearray(b"a" * size)
        self.key = Region(self.end.stags, self.end.pd, self.buffer, ADDR, size, int(ALL)).rkey

    @property
    def borrowers(self) -> int:
        """How many hold the region's memory for a peer."""
        return len(self.end.stags.regions[self.key].borrowers)

    def ask(self, *, msn: int = 1, size: int = 0) -> None:
        """Have the peer READ from it: all of it, unless told otherwise."""
        self.end.feed(read_request(self.key, ADDR, size or self.size, msn=msn))

    def revoke(self, how: str = "close") -> None:
        """Deregister it, see that the export is over, and put a secret into the buffer."""
        _HOW[how](self)
        self.buffer.append(0)
        self.buffer[:] = b"S" * len(self.buffer)


_HOW: dict[str, Callable[[Target], None]] = {
    "close": lambda target: target.end.stags.regions[target.key].close(),
    "local invalidate": lambda target: target.endpoint.post_send([SendWR(Opcode.LOCAL_INV, wr_id=9, rkey=target.key)]),
    "a peer's invalidate": lambda target: target.end.stags.invalidate(target.end.pd, target.key),
    "device closed": lambda target: target.end.stags.clear(),
}


def payload(fpdu: bytes) -> bytes:
    """Give what a tagged FPDU carries."""
    return fpdu[16 : 2 + int.from_bytes(fpdu[:2], "big")]


# -- WRITEs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", _HOW)
@pytest.mark.parametrize("here", [21, 30_000, 15 + SIZE])
def test_write_in_progress(here: int, how: str) -> None:
    """The rest of a WRITE whose region vanished is skipped; then the peer learns that its STag is bad."""
    target = Target()
    pipe = Pipe(target.endpoint, target.endpoint)
    target.end.output()
    pipe.stream += tagged(ddp.OP_WRITE, target.key, ADDR, b"b" * SIZE)
    pipe.deliver(here)
    assert target.endpoint.placement is not None
    target.revoke(how)
    while pipe.stream:
        assert not target.endpoint.terminating
        pipe.deliver(25_001)
    assert target.buffer == b"S" * (SIZE + 1)
    assert target.end.terminated() == Terminated(1, 1, 0)


def test_what_follows_a_revoked_write_is_not_executed() -> None:
    """Behind a WRITE that was revoked nothing of the peer's is executed, though it came in the same read."""
    target = Target()
    other = target.end.memory(8)
    pipe = Pipe(target.endpoint, target.endpoint)
    target.end.output()
    pipe.stream += tagged(ddp.OP_WRITE, target.key, ADDR, b"b" * SIZE)
    pipe.stream += tagged(ddp.OP_WRITE, other.key, other.addr, b"bbbbbbbb")
    pipe.deliver(1000)
    target.revoke()
    pipe.deliver(1 << 20)
    assert other.content == bytes(8)
    assert target.end.terminated() == Terminated(1, 1, 0)


def test_writes_that_are_over_hold_nothing() -> None:
    """A WRITE holds its region from its first part to its last, or to the end of the stream."""
    target = Target()
    pipe = Pipe(target.endpoint, target.endpoint)
    write = tagged(ddp.OP_WRITE, target.key, ADDR, b"b" * SIZE)
    pipe.stream += write
    pipe.deliver(1000)
    assert target.borrowers == 1
    pipe.deliver(len(write))
    assert target.borrowers == 0
    assert target.buffer == b"b" * SIZE
    pipe.stream += write
    pipe.deliver(1000)
    target.endpoint.ended("it broke")
    assert target.borrowers == 0
    target.revoke()


# -- Read Responses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", _HOW)
def test_response_in_progress(how: str) -> None:
    """Of a response whose region vanished nothing is sent that the buffer got afterwards; it ends in a Terminate."""
    target = Target(1 << 20)
    target.ask()
    target.endpoint.fill()
    outbox = target.endpoint.outbox
    outbox.left(10)
    _, view, trailer = outbox.made[0]
    outbox.made[0] = (memoryview(view)[100:], trailer)
    outbox.partial = True
    del view
    target.revoke(how)
    *rest, last = target.end.output()
    assert b"S" not in b"".join(rest)
    assert rest[0] == b"a" * (PAYLOAD - 100) + trailer
    assert last[3] & 0xF == ddp.OP_TERMINATE
    assert ddp.decode_terminate(last[20:])[:3] == (0, 1, 0)


@pytest.mark.parametrize("size", [5000, 63 * PAYLOAD, 64 * PAYLOAD])
def test_response_that_is_made(size: int) -> None:
    """A response of which everything is made when its region vanishes is sent as it was."""
    target = Target(size)
    target.end.output()
    target.ask()
    target.endpoint.fill()
    target.endpoint.outbox.left(2)
    target.revoke()
    assert b"".join(map(payload, target.end.output())) == b"a" * (size - 2 * PAYLOAD)
    assert target.endpoint.state is QPState.RTS


def test_response_that_waits() -> None:
    """A response behind another region's, none of it made yet, is refused in its turn, and not before."""
    target = Target()
    other = target.end.memory(b"o" * 64 * PAYLOAD)
    target.end.output()
    target.end.feed(read_request(other.key, other.addr, other.length))
    target.ask(msn=2)
    target.endpoint.fill()
    target.revoke()
    target.endpoint.outbox.left(64)
    assert target.end.terminated() == Terminated(0, 1, 0)


def test_response_kept_for_a_failed_stream() -> None:
    """What is made of a response may still leave when a request of this side fails: then too only as it was."""
    target = Target()
    target.end.output()
    target.ask()
    target.endpoint.fill()
    target.end.post(Opcode.SEND, [SGE(0, 8, 12345)])
    assert target.endpoint.state is QPState.ERR
    assert target.borrowers == 0
    target.revoke()
    sent = target.end.output()
    assert sent
    assert b"S" not in b"".join(sent)


def test_responses_that_left_hold_nothing() -> None:
    """What left is forgotten when the next long response is asked for; short ones hold nothing at all."""
    target = Target()
    target.ask(size=PAYLOAD)
    assert target.borrowers == 0
    for msn in range(2, 10):
        target.ask(msn=msn)
        target.end.output()
        assert target.borrowers == 1
    target.endpoint.ended("it broke")
    assert target.borrowers == 0


def test_response_before_messages_that_wait() -> None:
    """When the stream ends nothing is borrowed any more, though messages are still to be delivered."""
    target = Target()
    target.ask()
    target.end.feed(untagged(ddp.OP_SEND, b"kept"))
    target.endpoint.ended("it broke")
    assert target.endpoint.draining
    assert target.borrowers == 0
