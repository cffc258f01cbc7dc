"""Values: remote regions and their encoding, work requests, parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attrs import asdict, evolve, fields
from attrs.exceptions import FrozenInstanceError
from hypothesis import given
from hypothesis import strategies as st

from aiordma.drivers.soft.rnic import CAPABILITIES
from aiordma.enums import Opcode, SendFlags
from aiordma.types import SGE, Buffer, ConnParam, RecvWR, RemoteRegion, SendWR

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
REGION = RemoteRegion(0x1000, 100, 7)


# -- RemoteRegion --------------------------------------------------------------------------------------------


@given(addr=U64, length=U64, rkey=U32, behind=st.binary(max_size=40))
def test_codec(addr: int, length: int, rkey: int, behind: bytes) -> None:
    """20 bytes, big-endian; decoded from the front of more."""
    length = min(length, (1 << 64) - addr)
    length -= length == 1 << 64
    region = RemoteRegion(addr, length, rkey)
    data = region.to_bytes()
    assert data == addr.to_bytes(8, "big") + length.to_bytes(8, "big") + rkey.to_bytes(4, "big")
    assert len(data) == RemoteRegion.WIRE_SIZE
    for kind in (bytes, bytearray, memoryview):
        assert RemoteRegion.from_bytes(kind(data + behind)) == region


@pytest.mark.parametrize("size", [0, 1, 19])
def test_too_short(size: int) -> None:
    """Fewer than 20 bytes are refused, with the number."""
    with pytest.raises(ValueError, match=f"20 bytes, got {size}"):
        RemoteRegion.from_bytes(bytes(size))


@pytest.mark.parametrize(
    "values", [(-1, 0, 0), (1 << 64, 0, 0), (0, -1, 0), (0, 1 << 64, 0), (0, 0, -1), (0, 0, 1 << 32)]
)
def test_out_of_range(values: tuple[int, int, int]) -> None:
    """Numbers that don't fit the encoding are refused."""
    with pytest.raises(ValueError, match="must be"):
        RemoteRegion(*values)


@pytest.mark.parametrize(("addr", "length"), [((1 << 64) - 8, 9), (2, (1 << 64) - 1), (5, (1 << 64) - 4)])
def test_beyond_the_address_space(addr: int, length: int) -> None:
    """A region that leaves the address space is refused, also where a peer sent it."""
    data = addr.to_bytes(8, "big") + length.to_bytes(8, "big") + bytes(4)
    with pytest.raises(ValueError, match="address space"):
        RemoteRegion(addr, length, 0)
    with pytest.raises(ValueError, match="address space"):
        RemoteRegion.from_bytes(data)


def test_up_to_the_end_of_the_address_space() -> None:
    """A region may end where the address space does; its slices are inside."""
    region = RemoteRegion((1 << 64) - 24, 24, 1)
    assert region[16:].to_bytes() == ((1 << 64) - 8).to_bytes(8, "big") + (8).to_bytes(8, "big") + bytes((0, 0, 0, 1))


def test_not_a_number() -> None:
    """Other types are refused."""
    wrong: Buffer = b"1"
    with pytest.raises(TypeError):
        RemoteRegion(wrong, 0, 0)


@given(
    length=st.integers(0, 50),
    start=st.one_of(st.none(), st.integers(-60, 60)),
    stop=st.one_of(st.none(), st.integers(-60, 60)),
)
def test_slicing(length: int, start: int | None, stop: int | None) -> None:
    """A slice names what the same slice of a memoryview of that memory holds."""
    addresses = memoryview(bytes(range(100, 100 + length)))
    part = RemoteRegion(100, length, 7)[start:stop]
    expected = addresses[start:stop].tolist()
    assert len(part) == part.length == len(expected)
    assert not expected or part.addr == expected[0]
    assert 100 <= part.addr <= 100 + length
    assert part.rkey == 7


def test_slice_of_a_slice() -> None:
    """Slices are regions, equal to the same one made directly, and hash as it."""
    part = REGION[10:90][5:10]
    assert part == RemoteRegion(0x100F, 5, 7)
    assert hash(part) == hash(RemoteRegion(0x100F, 5, 7))
    assert part.to_bytes() == RemoteRegion(0x100F, 5, 7).to_bytes()


def test_no_step() -> None:
    """A step is refused: memory is contiguous."""
    with pytest.raises(ValueError, match="step"):
        REGION[::2]
    with pytest.raises(ValueError, match="step"):
        REGION[::-1]


def test_no_index() -> None:
    """A single index isn't a region."""
    index: Buffer = 3
    with pytest.raises((TypeError, AttributeError)):
        REGION[index]


def test_frozen() -> None:
    """A region is a value, a slice of one too."""
    for region in (REGION, REGION[1:2]):
        with pytest.raises(FrozenInstanceError):
            region.addr = 5  # type: ignore[misc]


def test_an_empty_region_is_true() -> None:
    """`if remote:` asks whether there is one, not how long it is."""
    assert RemoteRegion(0, 0, 0)


def test_the_key_is_not_shown() -> None:
    """The key is a capability: it doesn't get into logs by repr."""
    region = RemoteRegion(0x1000, 5, 0xC0FFEE11)
    assert repr(region) == "RemoteRegion(addr=0x1000, length=5)"
    assert str(0xC0FFEE11) not in repr(region)


# -- work requests -------------------------------------------------------------------------------------------


def test_send_wr_defaults() -> None:
    """A send work request is a signalled SEND of nothing, until told otherwise."""
    wr = SendWR()
    assert (wr.opcode, wr.send_flags, list(wr.sg_list)) == (Opcode.SEND, SendFlags.SIGNALED, [])
    assert wr.inline_data is None
    assert (wr.wr_id, wr.remote_addr, wr.rkey, wr.imm_data, wr.compare_add, wr.swap) == (0,) * 6


def test_work_requests_have_no_dict() -> None:
    """They are made and kept by the thousand: slots only, and a misspelt field is an error."""
    for wr in (SendWR(), RecvWR(), SGE(0, 0, 0)):
        with pytest.raises(AttributeError):
            wr.remote_address = 1  # type: ignore[union-attr]


def test_reprs() -> None:
    """What a debugger shows tells what was asked for."""
    sge = SGE(0x10, 5, 0xAB)
    assert repr(sge) == "SGE(addr=0x10, length=5, lkey=0xab)"
    assert repr(SendWR(Opcode.RDMA_READ, [sge], wr_id=4)) == f"<SendWR 4 RDMA_READ [{sge!r}]>"
    assert repr(RecvWR([sge], wr_id=5)) == f"<RecvWR 5 [{sge!r}]>"


# -- parameters ----------------------------------------------------------------------------------------------


def _param(name: str, value: object) -> ConnParam:
    """Make parameters of which one isn't the default, whatever its type."""
    given_: dict[str, Any] = {name: value}
    return ConnParam(**given_)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("recv_size", 0, None),
        ("recv_depth", 1, None),
        ("max_send_wr", 1, None),
        ("max_sge", 1, None),
        ("responder_resources", 0, None),
        ("initiator_depth", 0, None),
        ("retry_count", 0, 7),
        ("rnr_retry", 0, 7),
        ("tos", 0, 255),
    ],
)
def test_ranges(name: str, low: int, high: int | None) -> None:
    """Each parameter takes its range, its ends included, and nothing beyond; nothing but an int."""
    for value in (low, high if high is not None else 1 << 20):
        assert getattr(_param(name, value), name) == value
    for value in (low - 1, *([] if high is None else [high + 1])):
        with pytest.raises(ValueError, match=name):
            _param(name, value)
    for wrong in ("5", 5.0):
        with pytest.raises(TypeError, match=name):
            _param(name, wrong)


@pytest.mark.parametrize("name", ["responder_resources", "initiator_depth", "tos", "keepalive"])
def test_may_be_none(name: str) -> None:
    """None leaves it to the device or the system."""
    assert getattr(_param(name, None), name) is None


@pytest.mark.parametrize("seconds", [0, -1, -0.5, math.inf, -math.inf, math.nan])
def test_no_keepalive(seconds: float) -> None:
    """A keep-alive is a time: more than nothing, and finite."""
    with pytest.raises(ValueError, match="keepalive"):
        ConnParam(keepalive=seconds)


def test_parameters_are_a_value() -> None:
    """Parameters are frozen, equal by value, changed by evolve, which checks again."""
    param = ConnParam(recv_size=10)
    assert param == ConnParam(recv_size=10)
    assert evolve(param, max_sge=2) == ConnParam(recv_size=10, max_sge=2)
    with pytest.raises(ValueError, match="max_sge"):
        evolve(param, max_sge=0)
    with pytest.raises(FrozenInstanceError):
        param.recv_size = 5  # type: ignore[misc]


def test_parameters_by_name_only() -> None:
    """Eleven numbers in a row can't be read: they go by name."""
    with pytest.raises(TypeError):
        ConnParam(4096)  # type: ignore[call-arg]


def test_the_soft_devices_capabilities() -> None:
    """The soft device's limits are positive, its private data is what RFC 6581 leaves."""
    for name, value in asdict(CAPABILITIES).items():
        if name.startswith("max_"):
            assert value > 0, name
    assert CAPABILITIES.max_connect_private_data == CAPABILITIES.max_accept_private_data == 508
    assert CAPABILITIES.transport == "iwarp"
    assert len(fields(type(CAPABILITIES))) == len(asdict(CAPABILITIES))
