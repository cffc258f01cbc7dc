"""rping's protocol: both sides of a ping by SEND, READ and WRITE, as the `rping` program of rdma-core speaks it.

A ping, once connected:

    client SENDs where its source is        server READs the source, SENDs its go-ahead
    client SENDs where its sink is          server WRITEs there what it read, SENDs its go-ahead

Every message has 16 bytes; of a go-ahead nothing but the length counts. The client speaks first, and it is the client
that disconnects.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from time import perf_counter
from typing import Final, TypeAlias

from aiordma import Access, BrokenError, Connection, ConnParam, RDMAError, RemoteRegion

__all__ = [
    "MAX_SIZE",
    "MIN_SIZE",
    "PARAM",
    "PORT",
    "Pinger",
    "Responder",
    "RpingError",
    "Trace",
    "check_data",
    "decode_advert",
    "encode_advert",
    "ping_data",
]

#: The port that rping takes unless it is given one.
PORT: Final = 7174
#: Bytes of a ping, at least: its header, with the largest number there is, and a NUL.
MIN_SIZE: Final = 23
MAX_SIZE: Final = 65_535
#: One READ at a time, few and short messages. The receives are longer than a message, so that a wrong one can be named.
PARAM: Final = ConnParam(recv_size=64, recv_depth=4, max_send_wr=16, responder_resources=1, initiator_depth=1)

_ADVERT: Final = struct.Struct(">QII")
_GO_AHEAD: Final = bytes(_ADVERT.size)
#: What a ping is filled with, from a letter on that moves with each ping: 'A' to 'z' of ASCII, again and again.
_FIRST: Final = ord("A")
_LETTERS: Final = ord("z") + 1 - _FIRST
_FILLING: Final = bytes(range(_FIRST, _FIRST + _LETTERS)) * (MAX_SIZE // _LETTERS + 2)

#: Takes a line for people who look for a fault.
Trace: TypeAlias = Callable[[str], None]


class RpingError(RDMAError):
    """The peer is connected, and doesn't speak rping's protocol; or its data is wrong."""


def encode_advert(region: RemoteRegion) -> bytes:
    """Encode where a buffer is: address 8, key 4, length 4 bytes, big-endian."""
    return _ADVERT.pack(region.addr, region.rkey, region.length)


def decode_advert(message: bytes) -> RemoteRegion:
    """Decode what `encode_advert` made.

    Raises:
        RpingError: it has another length, or names memory that can't be.
    """
    _check_length(message)
    addr, rkey, length = _ADVERT.unpack(message)
    try:
        return RemoteRegion(addr, length, rkey)
    except ValueError as error:
        raise RpingError(f"the peer advertises memory that can't be: {error}") from error


def ping_data(number: int, size: int) -> bytes:
    """Make the content of a ping: its number, letters that start one later with each ping, and a NUL at the end."""
    header = b"rdma-ping-%d: " % number
    first = number % _LETTERS
    return (header + _FILLING[first : first + size])[: size - 1] + b"\0"


def check_data(data: bytes | memoryview, number: int) -> None:
    """Check that a ping came as it was sent.

    Raises:
        RpingError: no; it says from which byte on.
    """
    expected = ping_data(number, len(data))
    data = bytes(data)
    if data != expected:
        at = next(index for index, (is_, was) in enumerate(zip(data, expected, strict=True)) if is_ != was)
        raise RpingError(
            f"ping {number} came with wrong data: byte {at} of {len(data)} is {data[at]:#04x}, not {expected[at]:#04x}"
        )


def _check_length(message: bytes) -> None:
    if len(message) != _ADVERT.size:
        raise RpingError(
            f"the peer sent {len(message)} bytes, a message of rping has {_ADVERT.size}: is it rping or `aiordma ping`?"
        )


class Pinger:
    """The client's side: pings of one size over a connection.

    Args:
        connection: made with `PARAM`; it stays the caller's.
        size: bytes of a ping, MIN_SIZE to MAX_SIZE.
        trace: takes a line for each step.
    """

    def __init__(self, connection: Connection, size: int, trace: Trace | None = None) -> None:
        self._connection = connection
        self._trace = trace
        self._size = size
        # Both rights on both, as rping has them: an iWARP device needs more rights than the steps suggest.
        access = Access.REMOTE_READ | Access.REMOTE_WRITE
        self._source = connection.alloc(size, access=access)
        self._sink = connection.alloc(size, access=access)

    async def ping(self, number: int) -> float:
        """Send a ping and have it back; gives the seconds that took.

        Raises:
            BrokenError, CompletionError: the connection ended meanwhile.
            RpingError: the peer doesn't speak the protocol.
        """
        self._source.view[:] = ping_data(number, self._size)
        start = perf_counter()
        await self._advertise("source", self._source.remote())
        await self._advertise("sink", self._sink.remote())
        return perf_counter() - start

    async def _advertise(self, what: str, region: RemoteRegion) -> None:
        if self._trace:
            self._trace(f"send the {what}: {region}")
        await self._connection.send(encode_advert(region))
        _check_length(await self._connection.recv())
        if self._trace:
            self._trace(f"go-ahead after the {what}")

    @property
    def returned(self) -> memoryview:
        """What came back with the last ping; the next one overwrites it."""
        return self._sink.view


class Responder:
    """The server's side: answers the pings of one client.

    Args:
        connection: made with `PARAM`; it stays the caller's.
        max_size: of a ping; a client that wants more is refused.
        trace: takes a line for each step.

    Attributes:
        answered: pings that went back; the next one's number.
    """

    def __init__(self, connection: Connection, max_size: int = MAX_SIZE, trace: Trace | None = None) -> None:
        self._connection = connection
        self._trace = trace
        self._buffer = connection.alloc(max_size)
        self.answered = 0

    async def answer(self, *, validate: bool = False) -> memoryview | None:
        """Answer the next ping; gives its data, which the next one overwrites, or None: the client has disconnected.

        Args:
            validate: check what was read, and answer only if it is right.

        Raises:
            BrokenError, CompletionError: the connection ended in the midst of a ping, or broke.
            RpingError: the client doesn't speak the protocol, or its data is wrong.
        """
        connection = self._connection
        try:
            message = await connection.recv()
        except BrokenError as error:
            if error.orderly:
                return None
            raise
        source = self._advertised("source", message)
        data = self._buffer[: source.length]
        await connection.read(source, into=data)
        if validate:
            check_data(data.view, self.answered)
        await connection.send(_GO_AHEAD)
        sink = self._advertised("sink", await connection.recv())
        if sink.length < source.length:
            raise RpingError(f"the client's sink has {sink.length} bytes, its source {source.length}")
        # The go-ahead stays behind the WRITE by itself: nothing to wait for in between.
        writing, telling = connection.write(sink, data), connection.send(_GO_AHEAD)
        await writing
        await telling
        if self._trace:
            self._trace(f"ping {self.answered} written back")
        self.answered += 1
        return data.view

    def _advertised(self, what: str, message: bytes) -> RemoteRegion:
        region = decode_advert(message)
        if self._trace:
            self._trace(f"{what} advertised: {region}")
        if what == "source" and region.length > len(self._buffer):
            raise RpingError(f"the client pings with {region.length} bytes, this server takes {len(self._buffer)}: -S")
        return region
