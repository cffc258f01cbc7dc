"""MPA: start-up frames, negotiation, CRCs and markers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.drivers.soft import mpa
from aiordma.drivers.soft.mpa import (
    NOT_NEGOTIATED,
    RTR,
    Framer,
    Initiator,
    MPAConfig,
    Negotiated,
    Rejected,
    Responder,
    StartupFrame,
    check_crc,
    mulpdu,
    parse_frame,
    trailer,
)
from aiordma.errors import ProtocolError

needs_crc = pytest.mark.skipif(not mpa.CRC32C_AVAILABLE, reason="needs the package crc32c")

T = TypeVar("T")

NO_RTR = RTR(0)
ANY_RTR = RTR.SEND | RTR.WRITE | RTR.READ
CONFIG = MPAConfig(crc_available=True)
REVISION_1 = MPAConfig(crc_available=True, revision=1)

# Captured on the loopback interface between two siw devices: rping, and a WRITE to an unknown STag.
SIW_REQUEST = bytes.fromhex("4d504120494420526571204672616d65 10 02 0004 0001 0001")
SIW_REPLY = bytes.fromhex("4d504120494420526570204672616d65 10 02 0004 0001 0001")
SIW_SEND = "0022 4143 00000000 00000000 00000001 00000000 000055d75e26daa0 6ec0d800 00000040 00000000"
SIW_READ_REQUEST = (
    "002e 4141 00000000 00000001 00000001 0000000081ddfd00 000055f37db33bc0 00000040 6ec0d800 000055d75e26daa0 00000000"
)
SIW_READ_RESPONSE = "004e c142 81ddfd00 000055f37db33bc0" + "a5" * 64 + "00000000"
SIW_WRITE = "004e c140 15b9d500 000055d75e261bc0" + "5a" * 64 + "00000000"
SIW_TERMINATE = "0026 4147 00000000 00000002 00000001 00000000 11000300 0008 c140 deadbe00 0000000000001000 00000000"
RFC_SEND = bytes.fromhex("002a4143 00000000 00000000 00000001 00000000") + bytes(24)
RTR_WRITE = bytes.fromhex("000ec140 00000001 0000000000000000")


@contextmanager
def fault(code: int, match: str | None = None) -> Iterator[None]:
    """Demand a ProtocolError of MPA with this code."""
    with pytest.raises(ProtocolError, match=match) as caught:
        yield
    assert (caught.value.layer, caught.value.etype, caught.value.code) == (2, 0, code)


def outcome(act: Callable[[], T]) -> T | ProtocolError:
    """Give what a call returns, or the ProtocolError that it raises."""
    try:
        return act()
    except ProtocolError as error:
        return error


def parsed(data: bytes, *, reply: bool) -> StartupFrame:
    """Parse a frame that is there to its last byte."""
    result = parse_frame(data, reply=reply)
    assert result is not None
    frame, consumed = result
    assert consumed == len(data)
    return frame


def completed(initiator: Initiator, reply: StartupFrame) -> Negotiated:
    """Complete a handshake that isn't rejected."""
    agreed = initiator.complete(reply)
    assert isinstance(agreed, Negotiated)
    return agreed


def responder(request: StartupFrame, config: MPAConfig = CONFIG) -> Responder:
    """Make a responder that got this Request."""
    made = Responder(config)
    made.request(request)
    return made


def accepted(request: StartupFrame, config: MPAConfig = CONFIG) -> tuple[StartupFrame, Negotiated]:
    """Accept a Request."""
    data, agreed = responder(request, config).accept(b"", config.ird, config.ord)
    return parsed(data, reply=True), agreed


def reply_with(initiator: Initiator, **changes: Any) -> StartupFrame:
    """Make a Reply to an initiator's Request, in siw's way, which echoes the reserved flags."""
    request = parsed(initiator.request(), reply=False)
    return attrs.evolve(request, reply=True, **changes)


depths = st.integers(0, 0x3FFF)
kinds = st.sampled_from([RTR(b | c | d) for b in (0, RTR.SEND) for c in (0, RTR.WRITE) for d in (0, RTR.READ)])
plain_frames = st.builds(
    StartupFrame,
    reply=st.booleans(),
    revision=st.sampled_from([1, 2]),
    markers=st.booleans(),
    crc=st.booleans(),
    rejected=st.booleans(),
    flags=st.integers(0, 15),
    private_data=st.binary(max_size=512),
)
enhanced_frames = st.builds(
    StartupFrame,
    reply=st.booleans(),
    revision=st.just(2),
    markers=st.booleans(),
    crc=st.booleans(),
    rejected=st.booleans(),
    enhanced=st.just(True),
    flags=st.integers(0, 15),
    private_data=st.binary(max_size=508),
    peer_to_peer=st.booleans(),
    rtr=kinds,
    ird=depths,
    ord=depths,
)
frames = plain_frames | enhanced_frames
configs = st.builds(
    MPAConfig,
    ird=st.integers(0, 20) | st.just(0x3FFE),
    ord=st.integers(0, 20) | st.just(0x3FFE),
    crc=st.booleans(),
    crc_available=st.sampled_from([True, True, True, False]),
    peer_to_peer=st.booleans(),
    rtr=kinds,
    rtr_offer=kinds,
    revision=st.sampled_from([2, 2, 2, 1]),
    announce=st.booleans(),
)


# -- start-up frames ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "reply"), [(SIW_REQUEST, False), (SIW_REPLY, True)])
def test_captured_frames(data: bytes, reply: bool) -> None:
    """The captured Request and Reply parse to what they mean, and encode to the same bytes."""
    frame = StartupFrame(reply=reply, enhanced=True, ird=1, ord=1)
    assert parsed(data, reply=reply) == frame
    assert frame.encode() == data


def test_captured_peer_to_peer_request() -> None:
    """The Request of siw in peer-to-peer mode offers WRITE and READ; its private flag is no harm."""
    frame = parsed(SIW_REQUEST[:16] + bytes.fromhex("58 02 0004 8001 c001"), reply=False)
    assert frame == StartupFrame(
        reply=False,
        crc=True,
        enhanced=True,
        flags=8,
        peer_to_peer=True,
        rtr=RTR.WRITE | RTR.READ,
        ird=1,
        ord=1,
    )


def test_captured_reject() -> None:
    """A Reply with R of siw's is a rejection."""
    frame = parsed(SIW_REPLY[:16] + bytes.fromhex("30 02 0004 0001 0001"), reply=True)
    assert Initiator(CONFIG).complete(frame) == Rejected(b"")


@given(frame=frames, glued=st.binary(max_size=8), view=st.sampled_from([bytes, bytearray, memoryview]))
def test_frame_round_trip(frame: StartupFrame, glued: bytes, view: type) -> None:
    """What is encoded is parsed to the same frame, whatever the buffer's type and whatever follows."""
    data = frame.encode()
    assert parse_frame(view(data + glued), reply=frame.reply) == (frame, len(data))


@given(frame=frames, data=st.data())
def test_frame_in_pieces(frame: StartupFrame, data: st.DataObject) -> None:
    """A frame that is cut anywhere is incomplete, never a fault."""
    encoded = frame.encode()
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert parse_frame(encoded[:cut], reply=frame.reply) is None


@given(prefix=st.sampled_from([b"", SIW_REQUEST[:16], SIW_REPLY[:16]]), rest=st.binary(max_size=600))
def test_arbitrary_bytes(prefix: bytes, rest: bytes) -> None:
    """Arbitrary bytes give a frame, a request for more, or a ProtocolError; more bytes don't mend a fault."""
    data = prefix + rest
    for reply in (False, True):
        failed = False
        for size in (*range(len(prefix), len(prefix) + 24), len(data)):
            result = outcome(lambda: parse_frame(data[:size], reply=reply))  # noqa: B023
            if isinstance(result, ProtocolError):
                failed = True
                assert (result.layer, result.etype, result.code) == (2, 0, 4)
            else:
                assert not failed


@pytest.mark.parametrize(
    ("data", "at"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 1, id="another protocol"),
        pytest.param(SIW_REPLY, 10, id="a Reply for a Request"),
        pytest.param(SIW_REQUEST[:15] + b"\0\0\2\0\0", 16, id="last byte of the key"),
        pytest.param(SIW_REQUEST[:16] + b"\0\0\0\0", 18, id="revision 0"),
        pytest.param(SIW_REQUEST[:16] + b"\0\3\0\0", 18, id="revision 3"),
        pytest.param(SIW_REQUEST[:16] + b"\0\xff\0\0", 18, id="revision 255"),
        pytest.param(SIW_REQUEST[:16] + b"\0\2\3\0", 19, id="768 bytes of private data"),
        pytest.param(SIW_REQUEST[:16] + b"\0\1\xff\xff", 19, id="65535 bytes of private data"),
        pytest.param(SIW_REQUEST[:16] + b"\0\2\2\1", 20, id="513 bytes of private data"),
        pytest.param(SIW_REQUEST[:16] + b"\x10\2\0\3", 20, id="enhanced with three bytes"),
        pytest.param(SIW_REQUEST[:16] + b"\x10\2\0\0", 20, id="enhanced with none"),
    ],
)
def test_fault_is_seen_at_once(data: bytes, at: int) -> None:
    """A fault is reported with the byte that makes it one, not later."""
    assert parse_frame(data[: at - 1], reply=False) is None
    with fault(4):
        parse_frame(data[:at], reply=False)


def test_largest_private_data() -> None:
    """512 bytes of private data are the most, 508 in an enhanced frame."""
    for size, enhanced in ((512, False), (508, True)):
        frame = StartupFrame(reply=True, enhanced=enhanced, private_data=bytes(size), ird=0, ord=0)
        assert len(frame.encode()) == 532
        with pytest.raises(ValueError, match=f"limit of {size}"):
            attrs.evolve(frame, private_data=bytes(size + 1)).encode()


@pytest.mark.parametrize("changes", [{"ird": 0x4000}, {"ord": -1}, {"revision": 0}, {"revision": 3}, {"flags": 16}])
def test_frame_fields_are_bounded(changes: dict[str, Any]) -> None:
    """A field that doesn't fit its place on the wire is refused, not spilled into its neighbour."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        attrs.evolve(StartupFrame(reply=False, enhanced=True), **changes)


def test_all_bits_set() -> None:
    """Every flag set and every number at its maximum comes through."""
    data = SIW_REPLY[:16] + bytes.fromhex("ff 02 0004 ffff ffff")
    frame = parsed(data, reply=True)
    assert (frame.flags, frame.rtr, frame.ird, frame.ord) == (15, ANY_RTR, 0x3FFF, 0x3FFF)
    assert frame.encode() == data


def test_enhanced_means_nothing_in_revision_1() -> None:
    """In revision 1 the bit S is a reserved one: private data is all the program's."""
    frame = parsed(SIW_REQUEST[:16] + bytes.fromhex("10 01 0002 abcd"), reply=False)
    assert not frame.enhanced
    assert frame.private_data == b"\xab\xcd"
    with pytest.raises(ValueError, match="revision 2"):
        attrs.evolve(frame, enhanced=True).encode()


# -- negotiation --------------------------------------------------------------------------------------------


def expected_fault(ours: MPAConfig, theirs: MPAConfig) -> tuple[str, int] | None:
    """Say who must find what fault between an initiator and a responder, by the RFCs alone."""
    if ours.crc and not ours.crc_available:
        return "request", 5
    if ours.revision > theirs.revision:
        return "respond", 4
    crc = ours.crc or theirs.crc
    if crc and not theirs.crc_available:
        return "respond", 5
    if crc and not ours.crc_available:
        return "complete", 5
    takes = theirs.rtr & ~RTR.READ if not theirs.ird else theirs.rtr
    both = ours.revision == 2 and ours.peer_to_peer and theirs.peer_to_peer
    if both and ours.rtr_offer and takes and not ours.rtr_offer & takes:
        return "complete", 7
    return None


@given(ours=configs, theirs=configs, ird=st.none() | st.integers(0, 40), ord_=st.none() | st.integers(0, 40))
def test_any_two_configurations(ours: MPAConfig, theirs: MPAConfig, ird: int | None, ord_: int | None) -> None:
    """Any initiator and any responder agree on the same, or one of them names the RFC's fault."""
    ird = theirs.ird if ird is None else ird
    ord_ = theirs.ord if ord_ is None else ord_
    initiator, other = Initiator(ours), Responder(theirs)
    expected = expected_fault(ours, attrs.evolve(theirs, ird=ird, ord=ord_))
    if expected == ("request", 5):
        with fault(5):
            initiator.request(b"hello")
        return
    request = parsed(initiator.request(b"hello"), reply=False)
    if expected and expected[0] == "respond":
        with fault(expected[1]):
            other.request(request)
        return
    other.request(request)
    data, there = other.accept(b"welcome", ird, ord_)
    reply = parsed(data, reply=True)
    if expected:
        with fault(expected[1]):
            initiator.complete(reply)
        return
    here = completed(initiator, reply)
    assert here.crc == there.crc == (ours.crc or theirs.crc)
    assert here.revision == there.revision == ours.revision
    assert here.enhanced == there.enhanced == (ours.revision == 2)
    assert here.ours == there.ours == (ours.announce and theirs.announce)
    assert (here.private_data, there.private_data) == (b"welcome", b"hello")
    assert not here.send_markers
    assert not there.send_markers
    assert (here.ird, there.ird) == (max(ours.ird, 1), ird)
    if here.enhanced:
        assert (here.ord, there.ord) == (min(max(ours.ord, 1), there.ird), min(ord_, here.ird))
        assert (there.peer_ird, there.peer_ord) == (here.ird, max(ours.ord, 1))
        assert (here.peer_ird, here.peer_ord) == (there.ird, there.ord)
    else:
        assert (here.ord, there.ord) == (max(ours.ord, 1), ord_)
        assert {here.peer_ird, here.peer_ord, there.peer_ird, there.peer_ord} == {NOT_NEGOTIATED}
    assert here.rtr.bit_count() == bool(there.rtr)
    assert here.rtr in there.rtr & ours.rtr_offer
    assert here.ord or here.rtr != RTR.READ


@given(request=frames, config=configs)
def test_any_request(request: StartupFrame, config: MPAConfig) -> None:
    """Any Request is refused by its code, or answered in its own dialect within RFC 6581's rules."""
    result = outcome(lambda: accepted(request, config))
    if isinstance(result, ProtocolError):
        assert result.code == (4 if request.revision > config.revision else 5)
        return
    reply, agreed = result
    assert (reply.revision, reply.enhanced) == (request.revision, request.enhanced)
    assert reply.crc >= request.crc
    assert agreed.send_markers == request.markers
    if request.enhanced:
        assert (reply.ord == NOT_NEGOTIATED) == (request.ird == NOT_NEGOTIATED)
        assert (reply.ird == NOT_NEGOTIATED) == (request.ord == NOT_NEGOTIATED)
        assert agreed.ord <= request.ird
        assert reply.peer_to_peer == bool(reply.rtr)
        assert reply.peer_to_peer <= request.peer_to_peer


@given(reply=frames, config=configs)
def test_any_reply(reply: StartupFrame, config: MPAConfig) -> None:
    """Any Reply completes, rejects, or is refused by one of the four codes that the RFCs have for it."""
    agreed = outcome(lambda: Initiator(config).complete(reply))
    if isinstance(agreed, ProtocolError):
        assert agreed.code in {4, 5, 6, 7}
        return
    if isinstance(agreed, Rejected):
        assert reply.rejected
        return
    assert agreed.ird == max(config.ird, 1)
    assert agreed.ord <= min(max(config.ord, 1), reply.ird)
    assert agreed.rtr in config.rtr_offer & reply.rtr


def test_request_to_siw() -> None:
    """Our Request is revision 2, enhanced, offers WRITE and READ as RTR, and says that it is ours."""
    data = Initiator(attrs.evolve(CONFIG, ird=16, ord=8)).request(b"hi")
    assert data == SIW_REQUEST[:16] + bytes.fromhex("14 02 0006 8010 c008") + b"hi"


def test_request_always_offers_one() -> None:
    """An IRD and ORD of 0 go out as 1, since siw's programs can't read at all otherwise."""
    frame = parsed(Initiator(attrs.evolve(CONFIG, ird=0, ord=0)).request(), reply=False)
    assert (frame.ird, frame.ord) == (1, 1)


def test_answer_to_siw() -> None:
    """Stock siw gets no RTR and none of our flags; we never have more outstanding than the one it accepts."""
    reply, agreed = accepted(parsed(SIW_REQUEST, reply=False))
    assert reply == StartupFrame(reply=True, enhanced=True, ird=16, ord=1)
    assert (agreed.ird, agreed.ord, agreed.rtr, agreed.ours) == (16, 1, NO_RTR, False)


def test_bounds_of_depths() -> None:
    """IRD and ORD of an accept and of a configuration have to fit the wire; all ones isn't a number."""
    request = parsed(SIW_REQUEST, reply=False)
    for depth in (-1, NOT_NEGOTIATED):
        with pytest.raises(ValueError, match="ird"):
            MPAConfig(ird=depth)
        with pytest.raises(ValueError, match="ord"):
            responder(request).accept(b"", 1, depth)


def test_responder_cuts_its_ord() -> None:
    """The responder's ORD is cut to the initiator's IRD; its IRD is told as it is."""
    request = StartupFrame(reply=False, enhanced=True, ird=3, ord=100)
    reply, agreed = accepted(request, attrs.evolve(CONFIG, ird=7, ord=9))
    assert (reply.ird, reply.ord) == (agreed.ird, agreed.ord) == (7, 3)


def test_initiator_cuts_its_ord() -> None:
    """The initiator's ORD is cut to the responder's IRD, down to nothing."""
    initiator = Initiator(CONFIG)
    assert completed(initiator, reply_with(initiator, ird=5)).ord == 5
    assert completed(initiator, reply_with(initiator, ird=0)).ord == 0
    assert completed(initiator, reply_with(initiator, ird=128)).ord == 16


def test_insufficient_ird() -> None:
    """A responder that wants more READs outstanding than we accept is refused with code 6."""
    initiator = Initiator(CONFIG)
    assert completed(initiator, reply_with(initiator, ord=16)).ird == 16
    with fault(6):
        initiator.complete(reply_with(initiator, ord=17))


@pytest.mark.parametrize(("ird", "ord_"), [(NOT_NEGOTIATED, 5), (5, NOT_NEGOTIATED), (NOT_NEGOTIATED,) * 2])
def test_not_negotiated(ird: int, ord_: int) -> None:
    """0x3FFF is answered by 0x3FFF in the field that meets it, and leaves the local number in force."""
    reply, agreed = accepted(StartupFrame(reply=False, enhanced=True, ird=ird, ord=ord_))
    assert reply.ord == (NOT_NEGOTIATED if ird == NOT_NEGOTIATED else 5)
    assert reply.ird == (NOT_NEGOTIATED if ord_ == NOT_NEGOTIATED else 16)
    assert (agreed.ird, agreed.ord) == (16, 16 if ird == NOT_NEGOTIATED else 5)
    initiator = Initiator(CONFIG)
    here = completed(initiator, reply_with(initiator, ird=ird, ord=ord_))
    assert (here.ird, here.ord) == (16, 16 if ird == NOT_NEGOTIATED else 5)


def test_reply_in_another_dialect() -> None:
    """A Reply that isn't of the Request's revision, or isn't enhanced as it is, is refused with code 4."""
    enhanced, plain = Initiator(CONFIG), Initiator(REVISION_1)
    for initiator, changes in (
        (enhanced, {"enhanced": False}),
        (enhanced, {"enhanced": False, "revision": 1}),
        (plain, {"revision": 2}),
        (plain, {"revision": 2, "enhanced": True}),
    ):
        with fault(4):
            initiator.complete(reply_with(initiator, **changes))


def test_revision_1() -> None:
    """With revision 1 nothing is negotiated, and either side goes by its own numbers."""
    initiator = Initiator(attrs.evolve(REVISION_1, ird=3, ord=4))
    data = initiator.request(b"x" * 512)
    assert data[:20] == SIW_REQUEST[:16] + bytes.fromhex("04 01 0200")
    reply, agreed = accepted(parsed(data, reply=False))
    assert reply.encode() == SIW_REPLY[:16] + bytes.fromhex("02 01 0000")
    assert (agreed.ird, agreed.ord, agreed.peer_ird, agreed.rtr) == (16, 16, NOT_NEGOTIATED, NO_RTR)
    here = completed(initiator, reply)
    assert (here.ird, here.ord, here.peer_ord, here.rtr, here.ours) == (3, 4, NOT_NEGOTIATED, NO_RTR, True)


def test_responder_of_revision_1() -> None:
    """A responder held to revision 1 refuses revision 2, so that the initiator comes back with 1."""
    with fault(4):
        Responder(REVISION_1).request(parsed(SIW_REQUEST, reply=False))


@pytest.mark.parametrize("flags", ["00 02", "30 01"])
def test_rejected(flags: str) -> None:
    """A rejection is a result with the peer's private data, in whatever dialect it comes."""
    reply = parsed(SIW_REPLY[:16] + bytes.fromhex(flags) + b"\0\3why", reply=True)
    assert Initiator(CONFIG).complete(attrs.evolve(reply, rejected=True)) == Rejected(b"why")


@pytest.mark.parametrize("config", [CONFIG, REVISION_1])
def test_reject(config: MPAConfig) -> None:
    """A reject answers in the dialect of the Request and carries private data."""
    initiator = Initiator(config)
    request = parsed(initiator.request(), reply=False)
    reply = parsed(responder(request).reject(b"full"), reply=True)
    assert (reply.revision, reply.enhanced, reply.rejected) == (request.revision, request.enhanced, True)
    assert initiator.complete(reply) == Rejected(b"full")


def test_rejected_flag_of_a_request_is_ignored() -> None:
    """R means nothing in a Request."""
    assert accepted(StartupFrame(reply=False, rejected=True))[0].rejected is False


@pytest.mark.parametrize(("config", "limit"), [(CONFIG, 508), (REVISION_1, 512)])
def test_private_data_limit(config: MPAConfig, limit: int) -> None:
    """Private data beyond the limit is a ValueError before anything is sent, on both sides."""
    initiator = Initiator(config)
    other = responder(parsed(initiator.request(bytes(limit)), reply=False))
    other.accept(bytes(limit), 1, 1)
    other.reject(bytes(limit))
    for send in (initiator.request, lambda data: other.accept(data, 1, 1), other.reject):
        with pytest.raises(ValueError, match=f"{limit + 1} bytes"):
            send(bytes(limit + 1))


def test_answer_without_a_request() -> None:
    """A responder has nothing to say before it was asked."""
    with pytest.raises(RuntimeError):
        Responder(CONFIG).reject()


def test_markers_for_the_peer() -> None:
    """A peer that sets M gets markers from us; we never ask for them."""
    initiator = Initiator(CONFIG)
    request = attrs.evolve(parsed(initiator.request(), reply=False), markers=True)
    reply, agreed = accepted(request)
    assert agreed.send_markers
    assert not reply.markers
    assert completed(initiator, reply_with(initiator, markers=True)).send_markers


def test_crc_that_cannot_be_computed() -> None:
    """Without the package, a connection that needs CRCs fails with the command that helps, on both sides."""
    without = attrs.evolve(CONFIG, crc_available=False)
    initiator, other = Initiator(without), Responder(without)
    request = StartupFrame(reply=False, enhanced=True, crc=True, ird=1, ord=1)
    for act in (
        Initiator(attrs.evolve(without, crc=True)).request,
        lambda: initiator.complete(reply_with(initiator, crc=True)),
        lambda: other.request(request),
        lambda: Responder(attrs.evolve(without, crc=True)).request(attrs.evolve(request, crc=False)),
    ):
        with fault(5, r"pip install 'aiordma\[crc\]'"):
            act()
    assert parsed(other.reject(b"no CRC here"), reply=True).rejected


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        pytest.param(0x02, True, id="aiordma"),
        pytest.param(0x0A, True, id="aiordma and an unknown flag"),
        pytest.param(0x00, False, id="a plain device"),
        pytest.param(0x04, False, id="siw, which echoes"),
        pytest.param(0x06, False, id="a device that sets everything"),
        pytest.param(0x08, False, id="siw with its private flag"),
    ],
)
def test_ours_by_the_reply(flags: int, ours: bool) -> None:
    """Only a Reply with our answer and without our question is from an aiordma device."""
    initiator = Initiator(CONFIG)
    reply = reply_with(initiator, flags=flags)
    assert completed(initiator, reply).ours is ours
    assert completed(Initiator(attrs.evolve(CONFIG, announce=False)), reply).ours is False


@pytest.mark.parametrize(("flags", "ours"), [(0x04, True), (0x0C, True), (0x00, False), (0x08, False), (0x02, False)])
def test_ours_by_the_request(flags: int, ours: bool) -> None:
    """Only a Request with our question is answered, by our own flag alone."""
    request = StartupFrame(reply=False, enhanced=True, flags=flags, ird=1, ord=1)
    reply, agreed = accepted(request)
    assert (reply.flags, agreed.ours) == (0x02 if ours else 0, ours)
    reply, agreed = accepted(request, attrs.evolve(CONFIG, announce=False))
    assert (reply.flags, agreed.ours) == (0, False)


# -- ready to receive ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offer", "taken", "sent"),
    [
        (RTR.WRITE | RTR.READ, RTR.WRITE | RTR.READ, RTR.WRITE),
        (RTR.WRITE | RTR.READ, RTR.READ, RTR.READ),
        (ANY_RTR, RTR.SEND, RTR.SEND),
        (ANY_RTR, ANY_RTR, RTR.WRITE),
    ],
)
def test_initiator_sends_one_kind(offer: RTR, taken: RTR, sent: RTR) -> None:
    """Of the kinds offered and taken the initiator sends one, a WRITE if it can."""
    initiator = Initiator(attrs.evolve(CONFIG, rtr_offer=offer))
    assert completed(initiator, reply_with(initiator, rtr=taken)).rtr is sent


@pytest.mark.parametrize("changes", [{"rtr": RTR.SEND}, {"rtr": NO_RTR}, {"rtr": RTR.READ, "ird": 0}])
def test_no_common_rtr(changes: dict[str, object]) -> None:
    """A Reply that grants an RTR but none that we can send is refused with code 7."""
    initiator = Initiator(CONFIG)
    with fault(7):
        initiator.complete(reply_with(initiator, **changes))


def test_rtr_declined_or_not_asked_for() -> None:
    """An RTR is sent only if both frames have A."""
    initiator = Initiator(CONFIG)
    assert completed(initiator, reply_with(initiator, peer_to_peer=False)).rtr == NO_RTR
    silent = Initiator(attrs.evolve(CONFIG, peer_to_peer=False))
    reply = reply_with(silent, peer_to_peer=True, rtr=ANY_RTR)
    assert completed(silent, reply).rtr == NO_RTR


def test_responder_grants_what_is_common() -> None:
    """The responder grants the kinds it shares with the initiator."""
    request = StartupFrame(reply=False, enhanced=True, peer_to_peer=True, rtr=RTR.READ | RTR.SEND, ird=1, ord=1)
    for takes, granted in ((ANY_RTR, RTR.READ | RTR.SEND), (RTR.READ | RTR.WRITE, RTR.READ)):
        reply, agreed = accepted(request, attrs.evolve(CONFIG, rtr=takes))
        assert reply.peer_to_peer
        assert reply.rtr == agreed.rtr == granted


def test_responder_names_what_it_takes() -> None:
    """With no kind in common the responder names its own: the Terminate is the initiator's to send."""
    request = StartupFrame(reply=False, enhanced=True, peer_to_peer=True, rtr=RTR.SEND, ird=1, ord=1)
    reply, agreed = accepted(request, attrs.evolve(CONFIG, rtr=RTR.WRITE))
    assert reply.peer_to_peer
    assert reply.rtr == agreed.rtr == RTR.WRITE


def test_responder_without_ird_takes_no_read() -> None:
    """A zero-length READ is a READ: a responder that accepts none doesn't take one as RTR."""
    request = StartupFrame(reply=False, enhanced=True, peer_to_peer=True, rtr=RTR.WRITE | RTR.READ, ird=1, ord=1)
    reply, _ = accepted(request, attrs.evolve(CONFIG, ird=0))
    assert reply.rtr == RTR.WRITE
    reply, agreed = accepted(request, attrs.evolve(CONFIG, ird=0, rtr=RTR.READ))
    assert (reply.peer_to_peer, agreed.rtr) == (False, NO_RTR)


# -- framing ------------------------------------------------------------------------------------------------


def reference_crc(data: bytes) -> bytes:
    """Compute CRC32c bit by bit, as it stands on the wire."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def fpdu(ulpdu: bytes) -> bytes:
    """Make an FPDU with an empty CRC field."""
    return len(ulpdu).to_bytes(2, "big") + ulpdu + trailer(len(ulpdu))


def split_fpdus(stream: bytes) -> Iterator[tuple[int, int]]:
    """Give start and end of each FPDU in a stream without markers, by its length field alone."""
    start = 0
    while start < len(stream):
        end = start + 2 + int.from_bytes(stream[start : start + 2], "big")
        end += -end % 4 + 4
        yield start, end
        start = end
    assert start == len(stream)


def strip_markers(stream: bytes, *, crc: bool) -> list[bytes]:
    """Check a stream's markers and CRCs, and give its FPDUs without either.

    This is arithmetic over the whole stream, where the Framer walks it: every 512 octets begin with a marker,
    so what is at offset n without markers is at n + 4 * (n // 508 + 1) with them.
    """
    plain = b"".join(stream[at + 4 : at + 512] for at in range(0, len(stream), 512))
    fpdus = list(split_fpdus(plain))
    starts = {start for start, _ in fpdus}
    for at in range(0, len(stream), 512):
        offset = at // 512 * 508
        start = max(s for s in starts if s <= offset)
        distance = 0 if start == offset else at - (start + 4 * (start // 508 + 1))
        assert stream[at : at + 4] == bytes(2) + distance.to_bytes(2, "big")
    result = []
    for start, end in fpdus:
        first = start + 4 * (start // 508 + (start % 508 != 0))  # with the marker right before it, if there is one
        field = end - 4 + 4 * ((end - 4) // 508 + 1)
        expected = reference_crc(stream[first:field]) if crc else bytes(4)
        assert stream[field : field + 4] == expected
        result.append(plain[start : end - 4] + bytes(4))
    return result


def cut(data: bytes, at: Sequence[int]) -> list[bytes | memoryview]:
    """Cut an FPDU at any places but inside its pad and CRC field, which a gather list ends with."""
    bounds = sorted({0, len(data), *(place % (len(data) - 7) for place in at)})
    view = memoryview(data)
    return [view[a:b] for a, b in pairwise(bounds)]


@needs_crc
def test_crc_vectors() -> None:
    """CRCs of zeros, of RFC 5044's example with and without its marker, and of an RTR seen on the wire."""
    check_crc(memoryview(bytes(32) + bytes.fromhex("aa36918a")), 32)
    for markers, data, crc in (
        (False, RFC_SEND, "b7243ec3"),
        (True, RFC_SEND, "52239983"),
        (False, RTR_WRITE, "ebd34c5f"),
    ):
        framed = b"".join(Framer(crc=True, markers=markers).frame([data, bytes(4)]))
        assert framed == bytes(4 * markers) + data + bytes.fromhex(crc)
    assert reference_crc(RFC_SEND) == bytes.fromhex("b7243ec3")


@pytest.mark.parametrize("text", [SIW_SEND, SIW_READ_REQUEST, SIW_READ_RESPONSE, SIW_WRITE, SIW_TERMINATE])
def test_captured_fpdus(text: str) -> None:
    """The captured FPDUs have the trailer their length asks for, and leave as they are without CRCs."""
    data = bytes.fromhex(text)
    length = int.from_bytes(data[:2], "big")
    assert data[2 + length :] == trailer(length)
    assert b"".join(Framer(crc=False, markers=False).frame([data])) == data


@given(length=st.integers(0, 0xFFFF))
def test_trailer(length: int) -> None:
    """The trailer is zeros, and at most three more than the CRC field needs to end on a word."""
    made = trailer(length)
    assert (2 + length + len(made)) % 4 == 0
    assert made in (bytes(4), bytes(5), bytes(6), bytes(7))
    assert 2 + length + len(made) <= length + mpa.HEADROOM


@pytest.mark.parametrize(
    ("emss", "markers", "expected"),
    [
        (1448, False, 1442),
        (1448, True, 1430),
        (1460, False, 1454),
        (1461, False, 1454),
        (1463, True, 1442),
        (8960, False, 8954),
        (8960, True, 8882),
        (65_483, False, 65_474),
        (65_483, True, 64_962),
        (65_535, False, 65_526),
        (100_000, False, 65_526),
        (512, True, 502),
        (513, True, 498),
        (134, False, 128),
        (100, True, 128),
        (0, False, 128),
    ],
)
def test_mulpdu(emss: int, markers: bool, expected: int) -> None:
    """MULPDU by RFC 5044's formula, never below 128 nor beyond what the length field can say."""
    assert mulpdu(emss, markers) == expected


@needs_crc
@given(data=st.binary(min_size=2, max_size=40), bit=st.integers(0))
def test_damage_is_found(data: bytes, bit: int) -> None:
    """An FPDU passes as it was sent, and one flipped bit is a CRC error."""
    sent = bytearray(b"".join(Framer(crc=True, markers=False).frame([fpdu(data)])))
    check_crc(memoryview(sent), len(sent) - 4)
    bit %= len(sent) * 8
    sent[bit // 8] ^= 1 << bit % 8
    with fault(2):
        check_crc(memoryview(sent), len(sent) - 4)


@needs_crc
@given(data=st.binary(max_size=300), at=st.lists(st.integers(0, 400), max_size=4))
def test_crc_over_any_parts(data: bytes, at: list[int]) -> None:
    """The CRC is the same however the FPDU was gathered."""
    whole = fpdu(data)
    framed = Framer(crc=True, markers=False).frame(cut(whole, at))
    assert b"".join(framed) == whole[:-4] + reference_crc(whole[:-4])


@pytest.mark.parametrize("crc", [False, pytest.param(True, marks=needs_crc)])
@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_payload_is_not_copied(crc: bool, pad: int) -> None:
    """The list has as many parts as before, and all but the trailer are the very same objects."""
    payload = memoryview(bytearray(10_002 - pad))
    header = len(payload).to_bytes(2, "big")
    framed = Framer(crc=crc, markers=False).frame((header, payload, trailer(len(payload))))
    assert len(framed) == 3
    assert framed[0] is header
    assert framed[1] is payload
    assert len(framed[2]) == pad + 4


def test_payload_is_not_copied_between_markers() -> None:
    """With markers the payload leaves as slices of its own memory."""
    payload = bytearray(2000)
    views = Framer(crc=False, markers=True).frame([b"\x07\xd0", memoryview(payload), trailer(2000)])
    slices = [v for v in views if isinstance(v, memoryview) and v.obj is payload]
    assert sum(map(len, slices)) == 2000


@pytest.mark.parametrize("crc", [False, pytest.param(True, marks=needs_crc)])
@given(
    sizes=st.lists(st.integers(0, 1100) | st.sampled_from([498, 502, 506, 1010, 1014]), min_size=1, max_size=5),
    at=st.lists(st.integers(0, 1200), max_size=3),
)
def test_markers_against_reference(crc: bool, sizes: list[int], at: list[int]) -> None:
    """Whatever the FPDUs' sizes and parts, each marker is in its place and points to its FPDU."""
    framer = Framer(crc=crc, markers=True)
    fpdus = [fpdu(bytes(index % 256 for index in range(size))) for size in sizes]
    stream = b"".join(b"".join(framer.frame(cut(data, at))) for data in fpdus)
    assert strip_markers(stream, crc=crc) == fpdus


def test_marker_between_fpdus() -> None:
    """A marker between two FPDUs leads the second, and says 0; the next one counts from behind it."""
    framer = Framer(crc=False, markers=True)
    first = b"".join(framer.frame([fpdu(bytes(502))]))  # 508 bytes, so that they end where a marker is due
    second = b"".join(framer.frame([fpdu(bytes(600))]))
    assert len(first) == 512
    assert second[:6] == bytes.fromhex("00000000 0258")
    assert second[512:516] == bytes.fromhex("000001fc")


def test_marker_before_the_crc_field() -> None:
    """A marker that falls between an FPDU's payload and its CRC field is part of it."""
    framed = b"".join(Framer(crc=False, markers=True).frame([fpdu(bytes(506))]))
    assert framed[512:] == bytes.fromhex("000001fc 00000000")


@given(emss=st.integers(256, 65_535), filler=st.integers(0, 600))
def test_mulpdu_fits_with_markers(emss: int, filler: int) -> None:
    """An FPDU of MULPDU fits the segment, wherever in the stream it begins."""
    framer = Framer(crc=False, markers=True)
    framer.frame([fpdu(bytes(filler))])
    assert sum(map(len, framer.frame([fpdu(bytes(mulpdu(emss, True)))]))) <= emss


def test_fpdu_too_long_for_markers() -> None:
    """An FPDU that a marker can't point across is a ValueError, and leaves the stream where it was."""
    framer = Framer(crc=False, markers=True)
    with pytest.raises(ValueError, match="64 KiB"):
        framer.frame([fpdu(bytes(65_535))])
    assert b"".join(framer.frame([fpdu(bytes(10))])) == bytes(4) + fpdu(bytes(10))


def test_without_the_crc_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without crc32c the module imports, says so, and refuses to make a Framer with CRCs only."""
    monkeypatch.setitem(sys.modules, "crc32c", None)
    spec = importlib.util.spec_from_file_location("mpa_without_crc", mpa.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.CRC32C_AVAILABLE
    assert not module.MPAConfig().crc_available
    module.Framer(crc=False, markers=True)
    with fault(5):
        module.Framer(crc=True, markers=False)
