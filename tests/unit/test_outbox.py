"""The outbox: a FIFO of FPDUs of which long messages are made only when there is room for them."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from aiordma.drivers.soft.ddp import FPDU
from aiordma.drivers.soft.outbox import Outbox


def message(name: bytes, count: int, made: list[bytes] | None = None) -> Iterator[FPDU]:
    """Make the FPDUs of a message, each of two buffers, and note when."""
    for index in range(count):
        if made is not None:
            made.append(name)
        yield (name, b"%04d" % index)


@given(
    puts=st.lists(st.one_of(st.just(0), st.integers(1, 200)), max_size=12),
    takes=st.lists(st.integers(1, 50), min_size=1),
)
def test_order(puts: list[int], takes: list[int]) -> None:
    """FPDUs leave in the order of their messages, however they are taken meanwhile, and are counted."""
    outbox = Outbox()
    expected: list[bytes] = []
    taken: list[bytes] = []

    def take(most: int) -> None:
        outbox.fill()
        count = min(most, len(outbox.made))
        taken.extend(b"".join(fpdu) for fpdu in list(outbox.made)[:count])
        outbox.left(count)

    for number, count in enumerate(puts):
        name = b"%02d" % number
        if count:
            outbox.put_message(message(name, count), count)
            expected += [b"".join(fpdu) for fpdu in message(name, count)]
        else:
            outbox.put(name)
            expected.append(name)
        assert outbox.queued == len(expected)
        take(takes[number % len(takes)])
    while outbox:
        take(1000)
    assert taken == expected
    assert outbox.sent == len(expected)
    assert not outbox.made
    assert not outbox.small


def test_made_only_when_there_is_room() -> None:
    """Of a message of a million FPDUs some are ready, the rest isn't made."""
    outbox = Outbox()
    made: list[bytes] = []
    outbox.put_message(message(b"x", 1_000_000, made), 1_000_000)
    assert not made
    outbox.fill()
    assert 0 < len(outbox.made) == len(made) <= 64
    outbox.left(10)
    outbox.fill()
    outbox.fill()
    assert len(outbox.made) <= 64
    assert outbox.queued == 1_000_000


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
def test_small_left(sizes: list[int], data: st.DataObject) -> None:
    """Of small FPDUs sent joined, what didn't leave comes next, from the byte where it stopped."""
    outbox = Outbox()
    small = [bytes((65 + index,)) * size for index, size in enumerate(sizes)]
    for fpdu in small:
        outbox.put(fpdu)
    joined = b"".join(small)
    sent = data.draw(st.integers(0, len(joined) - 1))
    outbox.small_left(sent)
    outbox.put(b"behind")
    whole = sum(len(b"".join(small[: index + 1])) <= sent for index in range(len(small)))
    assert outbox.sent == whole
    assert outbox.partial == (sent > len(b"".join(small[:whole])))
    outbox.fill()
    assert b"".join(b"".join(fpdu) for fpdu in outbox.made) == joined[sent:] + b"behind"
    outbox.left(len(outbox.made))
    assert not outbox
    assert not outbox.partial


def test_cut_keeps_what_was_begun() -> None:
    """Of an FPDU that left in part the rest is kept, copied: its memory may be another's then."""
    outbox = Outbox()
    memory = bytearray(b"memory")
    outbox.put_message(iter([(b"head", memoryview(memory)), (b"second",)]), 2)
    outbox.fill()
    outbox.partial = True
    outbox.cut(0)
    memory[:] = b"change"
    assert [b"".join(fpdu) for fpdu in outbox.made] == [b"headmemory"]
    assert outbox.queued == 1


def test_cut_keeps_small_ones_behind_a_full_socket() -> None:
    """Small FPDUs put in while others didn't all leave stay up to the number too."""
    outbox = Outbox()
    outbox.put(b"first")
    outbox.small_left(2)
    for fpdu in (b"second", b"third", b"fourth"):
        outbox.put(fpdu)
    outbox.cut(3)
    assert [b"".join(fpdu) for fpdu in outbox.made] == [b"rst", b"second", b"third"]


@given(sent=st.integers(0, 5), keep=st.integers(0, 12), small=st.integers(0, 3), framed=st.integers(0, 3))
def test_cut(sent: int, keep: int, small: int, framed: int) -> None:
    """Made FPDUs up to the number stay, and what isn't made is forgotten."""
    outbox = Outbox()
    for number in range(5):
        outbox.put_message(iter([(b"%d" % number,)]), 1)
    outbox.fill()
    outbox.left(sent)
    outbox.framed = min(framed, 5 - sent)
    if sent == 5:
        for number in range(small):
            outbox.put(b"%d" % (5 + number))
    outbox.put_message(message(b"x", 1000), 1000)
    outbox.cut(keep)
    kept = [b"".join(fpdu) for fpdu in outbox.made]
    total = 5 + (small if sent == 5 else 0)
    assert kept == [b"%d" % number for number in range(sent, min(keep, total))]
    assert outbox.queued == outbox.sent + len(kept)
    assert outbox.framed <= len(kept)
    outbox.put(b"last")
    outbox.fill()
    assert b"".join(outbox.made[-1]) == b"last"
