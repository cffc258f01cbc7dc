"""Steering tags: keys, the check of each access, and atomics by RFC 7306."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma.drivers.soft import ddp
from aiordma.drivers.soft.stag import LocalFault, Region, StagTable
from aiordma.enums import Access, WCStatus
from aiordma.errors import ProtocolError
from aiordma.types import SGE

U64 = st.one_of(st.integers(0, ddp.MASK64), st.sampled_from([0, 1, 1 << 63, ddp.MASK64, 0xFF << 8]))
PD = object()
ADDR = 0x1000
ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


def _region(table: StagTable, size: int = 16, access: int = ALL, pd: object = PD) -> Region:
    return Region(table, pd, bytearray(size), ADDR, size, access)


def _code(error: ProtocolError) -> tuple[int, int, int]:
    return error.layer, error.etype, error.code


# -- keys ----------------------------------------------------------------------------------------------------


def test_keys_are_unpredictable() -> None:
    """Keys are never 0, are all different, and differ between tables: nobody guesses one from another."""
    keys = []
    for _ in range(2):
        table = StagTable()
        keys += [_region(table).rkey for _ in range(500)]
    assert 0 not in keys
    assert len(set(keys)) > 990
    steps = {b - a for a, b in pairwise(keys)}
    assert len(steps) > 900


def test_a_taken_key_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random key that is 0 or in use is drawn again."""
    drawn = iter([5, 0, 5, 6])
    monkeypatch.setattr("secrets.randbits", lambda _: next(drawn))
    table = StagTable()
    assert [_region(table).rkey, _region(table).rkey] == [5, 6]


def test_one_key_is_local_and_remote() -> None:
    """An STag serves as both keys."""
    made = _region(StagTable())
    assert made.lkey == made.rkey


def test_close() -> None:
    """A deregistered key is unknown at once; closing twice leaves a later region of that key alone."""
    table = StagTable()
    first = _region(table)
    first.close()
    assert not first.registered
    other = _region(table)
    table.regions[first.rkey] = other
    other.rkey = first.rkey
    first.close()
    assert other.registered


# -- local access --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "length", "fits"),
    [(0, 16, True), (0, 0, True), (16, 0, True), (5, 3, True), (-1, 1, False), (16, 1, False), (0, 17, False),
     (17, 0, False), (-1, 0, False)],
)  # fmt: skip
def test_local_bounds(start: int, length: int, fits: bool) -> None:
    """An element of this side's own must lie in its region."""
    table = StagTable()
    made = _region(table)
    sge = SGE(ADDR + start, length, made.lkey)
    if fits:
        assert len(table.local(PD, sge)) == length
    else:
        with pytest.raises(LocalFault) as caught:
            table.local(PD, sge)
        assert caught.value.status is WCStatus.LOC_PROT_ERR


@pytest.mark.parametrize("access", [0, Access.REMOTE_READ, Access.LOCAL_WRITE])
def test_local_rights(access: int) -> None:
    """Local reading needs no right, local writing LOCAL_WRITE."""
    table = StagTable()
    made = _region(table, access=access)
    sge = SGE(ADDR, 16, made.lkey)
    assert len(table.local(PD, sge)) == 16
    if access & Access.LOCAL_WRITE:
        assert not table.local(PD, sge, Access.LOCAL_WRITE).readonly
    else:
        with pytest.raises(LocalFault):
            table.local(PD, sge, Access.LOCAL_WRITE)


@pytest.mark.parametrize("key", ["unknown", "foreign"])
def test_local_keys(key: str) -> None:
    """An unknown key or another domain's is refused, but for an element of nothing."""
    table = StagTable()
    lkey = _region(table, pd=object()).lkey if key == "foreign" else 12345
    with pytest.raises(LocalFault):
        table.local(PD, SGE(ADDR, 1, lkey))
    empty = table.local(PD, SGE(ADDR, 0, lkey), Access.LOCAL_WRITE)
    assert len(empty) == 0
    assert not empty.readonly


@pytest.mark.parametrize("size", [0, 16])
def test_memory_of_nothing_can_be_written(size: int) -> None:
    """Nothing can be written to a region of nothing, and to an element of nothing without a right."""
    table = StagTable()
    made = Region(table, PD, bytes(size), ADDR, size, 0)
    table.local(PD, SGE(ADDR, 0, made.lkey), Access.LOCAL_WRITE)[:] = b""


# -- remote access -------------------------------------------------------------------------------------------


@given(start=st.integers(-40, 40), length=st.integers(1, 40), size=st.integers(1, 24))
def test_remote_bounds(start: int, length: int, size: int) -> None:
    """A remote access is in bounds in whole, or refused."""
    table = StagTable()
    made = _region(table, size)
    inside = start >= 0 and start + length <= size
    for check in (table.write_target, table.read_source):
        try:
            check(PD, made.rkey, ADDR + start, length)
        except ProtocolError as error:
            assert not inside
            assert _code(error)[1:] == (1, 1)
        else:
            assert inside


@pytest.mark.parametrize(
    ("access", "allowed"),
    [(0, ""), (Access.LOCAL_WRITE, ""), (Access.REMOTE_READ, "r"), (Access.REMOTE_WRITE, "w"),
     (Access.REMOTE_ATOMIC, "a"), (ALL, "rwa")],
)  # fmt: skip
def test_remote_rights(access: int, allowed: str) -> None:
    """Each kind of remote access has a right of its own."""
    table = StagTable()
    made = _region(table, access=access)
    attempts: dict[str, Callable[[], object]] = {
        "w": lambda: table.write_target(PD, made.rkey, ADDR, 1),
        "r": lambda: table.read_source(PD, made.rkey, ADDR, 1),
        "a": lambda: table.atomic(PD, ddp.FETCH_ADD, made.rkey, ADDR, 0, 0, 0, 0),
    }
    for kind, attempt in attempts.items():
        if kind in allowed:
            attempt()
        else:
            with pytest.raises(ProtocolError) as caught:
                attempt()
            assert _code(caught.value) == (0, 1, 2)


def test_invalidate() -> None:
    """A peer can invalidate a region of its own domain, once."""
    table = StagTable()
    made, foreign = _region(table), _region(table, pd=object())
    table.invalidate(PD, made.rkey)
    for key in (made.rkey, foreign.rkey):
        with pytest.raises(ProtocolError) as caught:
            table.invalidate(PD, key)
        assert _code(caught.value) == (0, 1, 9)
    assert foreign.registered


# -- atomics -------------------------------------------------------------------------------------------------


def fields(mask: int) -> list[tuple[int, int]]:
    """Cut 64 bits at the set bits of a mask, each the top bit of a field: lowest bit and width of each."""
    tops = [bit for bit in range(64) if mask >> bit & 1]
    if not tops or tops[-1] != 63:
        tops.append(63)
    lows = [0, *[top + 1 for top in tops[:-1]]]
    return [(low, top - low + 1) for low, top in zip(lows, tops, strict=True)]


def execute(old: int, opcode: int, data: int, mask: int, compare: int, compare_mask: int) -> tuple[int, int]:
    """Execute an atomic on 8 bytes between others; gives the value before and after."""
    table = StagTable()
    buffer = bytearray(struct.pack("=QQQ", 1, old, 2))
    made = Region(table, PD, buffer, ADDR, 24, ALL)
    before = table.atomic(PD, opcode, made.rkey, ADDR + 8, data, mask, compare, compare_mask)
    low, after, high = struct.unpack("=QQQ", buffer)
    assert (low, high) == (1, 2)
    return before, after


@given(old=U64, data=U64, mask=U64)
@example(old=ddp.MASK64, data=1, mask=0)
@example(old=ddp.MASK64, data=1, mask=1 << 63)
@example(old=ddp.MASK64, data=ddp.MASK64, mask=ddp.MASK64)
@example(old=0xFF, data=0x01, mask=0x80)
def test_masked_fetch_add(old: int, data: int, mask: int) -> None:
    """FETCH_ADD adds field by field; a field's carry goes nowhere (RFC 7306 section 5.1.1)."""
    expected = 0
    for low, width in fields(mask):
        ones = (1 << width) - 1
        expected |= ((old >> low & ones) + (data >> low & ones) & ones) << low
    assert execute(old, ddp.FETCH_ADD, data, mask, 0, ddp.MASK64) == (old, expected)


@given(old=U64, data=U64)
def test_plain_fetch_add(old: int, data: int) -> None:
    """With an add mask of 0 it is an addition modulo 2**64."""
    assert execute(old, ddp.FETCH_ADD, data, 0, 0, ddp.MASK64) == (old, (old + data) % (1 << 64))


@given(old=U64, swap=U64, swap_mask=U64, compare=U64, compare_mask=U64, equal=st.booleans())
def test_masked_compare_swap(old: int, swap: int, swap_mask: int, compare: int, compare_mask: int, equal: bool) -> None:
    """CMP_AND_SWP compares under one mask, bit by bit, and swaps under the other (RFC 7306 section 5.1.2)."""
    if equal:
        compare = compare & ~compare_mask | old & compare_mask
    same = all(not compare_mask >> bit & 1 or compare >> bit & 1 == old >> bit & 1 for bit in range(64))
    expected = sum((swap if same and swap_mask >> bit & 1 else old) & 1 << bit for bit in range(64))
    assert execute(old, ddp.COMPARE_SWAP, swap, swap_mask, compare, compare_mask) == (old, expected)


@pytest.mark.parametrize("opcode", [1, 3, 15])
def test_unknown_atomics(opcode: int) -> None:
    """An operation that RFC 7306 doesn't define changes nothing."""
    with pytest.raises(ProtocolError) as caught:
        execute(1, opcode, 2, 0, 1, ddp.MASK64)
    assert _code(caught.value) == (0, 2, 6)
