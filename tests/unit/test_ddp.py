"""DDP and RDMAP headers: layouts, segmentation, the Terminate in both encodings, a capture of siw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.ddp import Terminate, decode_terminate, describe, encode_terminate, fault
from aiordma.enums import Access, Opcode, QPState
from aiordma.errors import ProtocolError
from aiordma.types import SGE
from tests.unit.wire import End, agreed, read_request, tagged, untagged

# Captured on loopback between two siw devices: an rping of 64 bytes, and a WRITE to an unknown STag.
SEND = bytes.fromhex("0022 4143 00000000 00000000 00000001 00000000 000055d75e26daa0 6ec0d800 00000040 00000000")
READ_REQUEST = bytes.fromhex(
    "002e 4141 00000000 00000001 00000001 0000000081ddfd00 000055f37db33bc0 00000040 6ec0d800 000055d75e26daa0 00000000"
)
READ_RESPONSE = bytes.fromhex("004e c142 81ddfd00 000055f37db33bc0" + "a5" * 64 + "00000000")
WRITE = bytes.fromhex("004e c140 15b9d500 000055d75e261bc0" + "5a" * 64 + "00000000")
TERMINATE = bytes.fromhex(
    "0026 4147 00000000 00000002 00000001 00000000 11000300 0008 c140 deadbe00 0000000000001000 00000000"
)


def started(*, initiator: bool = True) -> End:
    """Make an endpoint in full operation."""
    end = End()
    end.endpoint.start(agreed(), initiator=initiator, mulpdu=1428)
    return end


def rekey(end: End, key: int, length: int, addr: int, access: int) -> memoryview:
    """Register memory at the address and under the key that the capture has."""
    memory = end.memory(length, access, addr=addr)
    del end.stags.regions[memory.key]
    end.stags.regions[key] = memory.region
    memory.region.rkey = memory.region.lkey = key
    memory.key = key
    return memory.view


# -- the capture ---------------------------------------------------------------------------------------------


def test_captured_send() -> None:
    """A SEND of the capture's payload is the capture's FPDU, and receiving that delivers the payload."""
    end = started()
    end.send(SEND[20:36])
    assert end.output() == [SEND]
    inbox = end.memory(16)
    end.receive(inbox.sge())
    end.feed(SEND)
    assert inbox.content == SEND[20:36]


def test_captured_read() -> None:
    """A READ with the capture's keys and addresses is its Read Request; its Read Response fills the sink."""
    end = started()
    view = rekey(end, 0x81DDFD00, 64, 0x55F37DB33BC0, Access.LOCAL_WRITE)
    sink = next(region for region in end.stags.regions.values() if region.rkey == 0x81DDFD00)
    source = end.memory(64, addr=0x55D75E26DAA0)
    source.key = 0x6EC0D800
    from_capture = SGE(sink.addr, 64, sink.lkey)
    end.post(Opcode.RDMA_READ, [from_capture], to=source)
    assert end.output() == [READ_REQUEST]
    end.feed(READ_RESPONSE)
    assert [c[1] for c in end.sent()] == [0]
    assert view == b"\xa5" * 64


def test_captured_read_is_answered() -> None:
    """The capture's Read Request is answered by its Read Response."""
    end = started()
    rekey(end, 0x6EC0D800, 64, 0x55D75E26DAA0, Access.REMOTE_READ)[:] = b"\xa5" * 64
    end.feed(READ_REQUEST)
    assert end.output() == [READ_RESPONSE]


def test_captured_write() -> None:
    """A WRITE is the capture's FPDU, and receiving that places it."""
    end = started()
    view = rekey(end, 0x15B9D500, 64, 0x55D75E261BC0, Access.REMOTE_WRITE)
    end.feed(WRITE)
    assert view == b"\x5a" * 64
    target = end.memory(64, addr=0x55D75E261BC0)
    target.key = 0x15B9D500
    end.post(Opcode.RDMA_WRITE, to=target, inline=b"\x5a" * 64)
    assert end.output() == [WRITE]


def test_captured_terminate() -> None:
    """Siw's Terminate for a WRITE to an unknown STag is read: DDP, tagged, invalid STag."""
    assert decode_terminate(TERMINATE[20:-4]) == Terminate(1, 1, 0, refused_request=False, msn=0)
    end = started()
    end.feed(TERMINATE)
    assert end.endpoint.state is QPState.ERR
    assert "invalid STag" in end.endpoint.refused


# -- Terminate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("02020000", (2, 0, 2)),  # CRC error
        ("20060000", (0, 2, 6)),  # unexpected opcode
        ("21020300", (1, 2, 2)),  # no buffer
        ("10000700", (0, 1, 0)),  # protection error of a READ
    ],
)
def test_terminate_of_siw(payload: str, expected: tuple[int, int, int]) -> None:
    """Siw's own encoding, nibbles swapped and flags at the other end of the byte, is understood."""
    data = bytes.fromhex(payload)
    if data[2]:
        data += bytes.fromhex("0040 4141 00000000 00000001 00000009 00000000") + bytes(28)
    message = decode_terminate(data)
    assert message[:3] == expected
    assert message.refused_request == (data[2] in (3, 7))


def test_terminate_of_the_handshake() -> None:
    """As the first FPDU 2/0/6 is about our Reply; later it is siw's for an unexpected opcode."""
    payload = bytes.fromhex("20060000")
    assert decode_terminate(payload, first=True)[:3] == (2, 0, 6)
    for initiator, reason in ((False, "insufficient IRD"), (True, "unexpected opcode")):
        end = started(initiator=initiator)
        end.feed(untagged(ddp.OP_TERMINATE, payload, qn=2))
        assert reason in end.endpoint.refused


def codes() -> list[tuple[int, int, int]]:
    """Every layer, type and code of the RFCs."""
    table = {
        (0, 0): [0], (0, 1): [0, 1, 2, 3, 4, 9, 0xFF], (0, 2): [5, 6, 7, 8, 9, 0xFF], (1, 0): [0],
        (1, 1): [0, 1, 2, 3, 4], (1, 2): [1, 2, 3, 4, 5, 6], (2, 0): [1, 2, 3, 4, 5, 6, 7],
    }  # fmt: skip
    return [(*where, code) for where, all_codes in table.items() for code in all_codes]


OFFENDERS = {
    "nothing": b"",
    "a write": tagged(ddp.OP_WRITE, 7, 8, b"payload")[:48],
    "a send": untagged(ddp.OP_SEND, b"payload" * 9)[:48],
    "a read": read_request(1, 2, 3, msn=77)[:48],
    "an atomic": untagged(ddp.OP_ATOMIC_REQUEST, bytes(52), qn=1, msn=78)[:48],
    "half a header": untagged(ddp.OP_SEND)[:17],
}


@pytest.mark.parametrize("offender", OFFENDERS)
@pytest.mark.parametrize("code", codes())
def test_terminate_round_trip(code: tuple[int, int, int], offender: str) -> None:
    """What is encoded is decoded; the request that is to blame is named by its sequence number."""
    error = ProtocolError("", layer=code[0], etype=code[1], code=code[2])
    fpdu = encode_terminate(error, OFFENDERS[offender])
    length = int.from_bytes(fpdu[:2], "big")
    message = decode_terminate(fpdu[20 : 2 + length], first=True)
    assert message[:3] == code
    quoted = code[0] < 2
    assert message.refused_request == (quoted and offender in ("a read", "an atomic"))
    assert message.msn == ({"a read": 77, "an atomic": 78}.get(offender, 0) if quoted else 0)


@pytest.mark.parametrize(
    ("offender", "flags", "quoted"),
    [
        ("nothing", 0, 0),
        ("a write", 0xC0, 16),
        ("a send", 0xC0, 20),
        ("a read", 0xE0, 48),
        ("an atomic", 0xC0, 20),
    ],
)
def test_terminate_encoding(offender: str, flags: int, quoted: int) -> None:
    """A Terminate is number 1 of queue 2; it quotes the length, the DDP header, a Read Request's header."""
    fpdu = encode_terminate(fault(ddp.RDMAP_PROTECTION, ddp.BOUNDS), OFFENDERS[offender])
    payload = bytes((0x01, 0x01, flags, 0)) + OFFENDERS[offender][:quoted]
    assert fpdu == untagged(ddp.OP_TERMINATE, payload, qn=2)


@given(st.binary(max_size=80))
def test_arbitrary_terminates(payload: bytes) -> None:
    """Any payload of at least four bytes is a Terminate, and can be put in words."""
    if len(payload) < 4:
        with pytest.raises(ProtocolError):
            decode_terminate(payload)
    else:
        message = decode_terminate(payload)
        assert describe(*message[:3])


@pytest.mark.parametrize("code", codes())
def test_described(code: tuple[int, int, int]) -> None:
    """Each code of the RFCs has words of its own, and survives the way through a completion's vendor_err."""
    text = describe(*code)
    others = {describe(*other) for other in codes() if other != code}
    assert text not in others
    value = ddp.vendor_err(*code)
    assert value
    assert value < 1 << 32
    assert ddp.describe_vendor_err(value) == text


def test_unknown_codes_are_described() -> None:
    """Codes that no RFC knows are told as numbers; no vendor_err is no text."""
    assert describe(3, 4, 0x55) == "layer 3 type 4: code 0x55"
    assert describe(0, 1, 0x55) == "RDMAP remote protection: code 0x55"
    assert ddp.describe_vendor_err(0) == ""


# -- control field -------------------------------------------------------------------------------------------


@given(st.integers(0, 0xFFFF))
def test_control(control: int) -> None:
    """Exactly the combinations of version, opcode and T flag that the RFCs define pass."""
    is_tagged = bool(control & 0x8000)
    opcode = control & 0xF
    right = control >> 8 & 3 == 1 and control >> 6 & 3 == 1
    right = right and opcode <= 11 and is_tagged == (opcode in (0, 2))
    try:
        ddp.check_control(control)
    except ProtocolError as error:
        assert not right
        expected = (1, 1, 4) if is_tagged else (1, 2, 6)
        if control >> 8 & 3 == 1:
            expected = (0, 2, 5) if control >> 6 & 3 != 1 else (0, 2, 6)
        assert (error.layer, error.etype, error.code) == expected
    else:
        assert right


# -- segmentation --------------------------------------------------------------------------------------------


@given(parts=st.lists(st.binary(max_size=40), max_size=5), start=st.integers(0, 210), length=st.integers(0, 210))
def test_gather(parts: list[bytes], start: int, length: int) -> None:
    """Cutting a gather list is cutting what it joins to."""
    views = [memoryview(part) for part in parts]
    assert b"".join(ddp.gather(views, start, length)) == b"".join(parts)[start : start + length]


@given(
    parts=st.lists(st.binary(max_size=300), max_size=5),
    limit=st.integers(1, 200).map(lambda n: 4 * n),
    to=st.one_of(st.integers(0, 1 << 20), st.integers((1 << 64) - 100, (1 << 64) - 1)),
)
def test_tagged_segments(parts: list[bytes], limit: int, to: int) -> None:
    """Segments of a tagged message are contiguous, at most `limit` long, and only the last has the L flag."""
    data = b"".join(parts)
    segments = ddp.tagged_segments(ddp.OP_WRITE, 7, to, [memoryview(p) for p in parts], len(data), limit)
    fpdus = [b"".join(segment) for segment in segments]
    assert len(fpdus) == max(1, -(-len(data) // limit))
    offset = 0
    for index, record in enumerate(fpdus):
        payload = data[offset : offset + limit]
        last = ddp.LAST if index == len(fpdus) - 1 else 0
        assert record == tagged(ddp.OP_WRITE, 7, to + offset & ddp.MASK64, payload, control=ddp.TAGGED | last)
        offset += len(payload)
    assert offset == len(data)


@given(parts=st.lists(st.binary(max_size=300), max_size=5), limit=st.integers(1, 200).map(lambda n: 4 * n))
def test_untagged_segments(parts: list[bytes], limit: int) -> None:
    """Segments of an untagged message share its sequence number, and carry the offset of their bytes."""
    data = b"".join(parts)
    segments = ddp.untagged_segments(ddp.OP_SEND_INV, 9, 5, [memoryview(p) for p in parts], len(data), limit)
    fpdus = [b"".join(segment) for segment in segments]
    assert len(fpdus) == max(1, -(-len(data) // limit))
    for index, record in enumerate(fpdus):
        payload = data[index * limit : (index + 1) * limit]
        last = ddp.LAST if index == len(fpdus) - 1 else 0
        assert record == untagged(
            ddp.OP_SEND_INV, payload, msn=5, mo=index * limit, invalidate=9, control=ddp.UNTAGGED | last
        )


@pytest.mark.parametrize("mulpdu", [128, 129, 130, 131, 132, 1428, 65_518])
def test_mulpdu_is_kept(mulpdu: int) -> None:
    """No FPDU of any kind is longer than MULPDU allows, and tagged payloads need no pad but in the last."""
    end = End()
    source = end.memory(bytes(200_000))
    end.endpoint.start(agreed(), initiator=True, mulpdu=mulpdu)
    end.post(Opcode.RDMA_WRITE, [source.sge()], to=source)
    end.post(Opcode.SEND, [source.sge()])
    end.post(Opcode.RDMA_WRITE_WITH_IMM, [source.sge()], to=source)
    end.feed(read_request(source.key, source.addr, 200_000))
    fpdus = end.output()
    assert sum(len(record) for record in fpdus) > 800_000
    for record in fpdus:
        length = int.from_bytes(record[:2], "big")
        assert length <= mulpdu
        assert record[2] & 0x40 or length % 4 == 2
