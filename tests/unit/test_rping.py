"""rping's messages and data, without a connection; and the statistics of `aiordma ping`."""

from __future__ import annotations

import pytest

from aiordma import RemoteRegion
from aiordma.tools.ping import Statistics
from aiordma.tools.rping import MAX_SIZE, MIN_SIZE, RpingError, check_data, decode_advert, encode_advert, ping_data

#: Taken from a capture of rping's client.
CAPTURED = bytes.fromhex("000055d75e26daa0 6ec0d800 00000040")


def test_advert() -> None:
    """An advert is what rping sends: address, key, length."""
    region = RemoteRegion(0x55D75E26DAA0, 64, 0x6EC0D800)
    assert encode_advert(region) == CAPTURED
    assert decode_advert(CAPTURED) == region


@pytest.mark.parametrize("length", [0, 15, 17, 64])
def test_advert_of_another_length(length: int) -> None:
    """A message that isn't rping's is refused, with its length."""
    with pytest.raises(RpingError, match=f"sent {length} bytes"):
        decode_advert(bytes(length))


def test_advert_beyond_the_address_space() -> None:
    """An advert of memory that can't be is the peer's fault, not a ValueError."""
    with pytest.raises(RpingError, match="can't be"):
        decode_advert(b"\xff" * 16)


def test_data() -> None:
    """The data is rping's: number, letters from one that moves on, a NUL."""
    assert ping_data(0, 23) == b"rdma-ping-0: ABCDEFGHI\0"
    assert ping_data(1, 23) == b"rdma-ping-1: BCDEFGHIJ\0"
    assert ping_data(57, 23) == b"rdma-ping-57: zABCDEFG\0"
    assert ping_data(58, 23) == b"rdma-ping-58: ABCDEFGH\0"
    letters = bytes(range(ord("A"), ord("z") + 1))
    assert ping_data(0, 80) == b"rdma-ping-0: " + letters + letters[:8] + b"\0"


@pytest.mark.parametrize("size", [MIN_SIZE, 64, MAX_SIZE])
@pytest.mark.parametrize("number", [0, 57, 2**31 - 1])
def test_data_fills_its_size(size: int, number: int) -> None:
    """Of every size and number the data has that size, and one NUL: rping's server writes back up to that."""
    data = ping_data(number, size)
    assert len(data) == size
    assert data.index(0) == size - 1


def test_check_data() -> None:
    """Wrong data is found, and where."""
    data = bytearray(ping_data(7, 100))
    check_data(memoryview(data), 7)
    data[42] ^= 0xFF
    with pytest.raises(RpingError, match=f"ping 7 .* byte 42 of 100 is {data[42]:#04x}, not {data[42] ^ 0xFF:#04x}"):
        check_data(memoryview(data), 7)


def test_check_data_of_another_ping() -> None:
    """What the ping before left in the buffer doesn't pass."""
    with pytest.raises(RpingError):
        check_data(ping_data(6, 100), 7)


def test_statistics() -> None:
    """They are ping's: count, loss, least, mean, greatest, deviation, and the rate of the data."""
    statistics = Statistics()
    statistics.sent = 4
    for milliseconds in (1, 2, 6):
        statistics.add(milliseconds / 1e3)
    assert statistics.lines(1000, 0.01) == [
        "4 pings of 1000 bytes sent, 3 came back, 25% lost, in 10 ms",
        "round trip min/avg/max/mdev = 1.000/3.000/6.000/2.160 ms",
        "data 300 kB/s each way",
    ]


def test_statistics_of_nothing() -> None:
    """Where nothing came back there are no times, and where nothing was sent no loss."""
    statistics = Statistics()
    assert statistics.lines(64, 1.0) == ["0 pings of 64 bytes sent, 0 came back, 0% lost, in 1000 ms"]
    statistics.sent = 1
    assert statistics.lines(64, 1.0) == ["1 ping of 64 bytes sent, 0 came back, 100% lost, in 1000 ms"]


@pytest.mark.parametrize(
    ("rate", "text"),
    [(5, "5 B/s"), (999.4, "999 B/s"), (999.6, "1 kB/s"), (2.5e6, "2.5 MB/s"), (3e9, "3 GB/s")],
)
def test_rate(rate: float, text: str) -> None:
    """A rate is told in a unit that fits it, with three digits."""
    statistics = Statistics()
    statistics.sent = 1
    statistics.add(1.0)
    assert statistics.lines(1, 1 / rate)[-1] == f"data {text} each way"
