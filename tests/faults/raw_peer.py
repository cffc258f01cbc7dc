"""An iWARP peer of struct and sockets: what a faulty or foreign device puts on the wire.

It shares nothing with aiordma's own codecs, so a test with it is an independent check of them. It speaks MPA without
markers and CRC, and says only what the test tells it to. The layouts are those of RFC 5044, 6581, 5041 and 5040.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType
from typing import NamedTuple, Self

#: Flags of a Request or Reply.
MARKERS, CRC, REJECT, ENHANCED = 0x80, 0x40, 0x20, 0x10
#: Flag of a Request and of a Reply of aiordma's own devices.
OURS_REQUEST, OURS_REPLY = 0x04, 0x02
#: Bits of the enhanced word: peer to peer, and ready to receive by Write, by Read.
PEER_TO_PEER, RTR_WRITE, RTR_READ = 0x8000_0000, 0x8000, 0x4000

WRITE, READ_REQUEST, READ_RESPONSE, SEND, TERMINATE = 0, 1, 2, 3, 7


class Frame(NamedTuple):
    """A Request or Reply."""

    key: bytes
    flags: int
    revision: int
    private_data: bytes


class FPDU(NamedTuple):
    """A DDP segment; `body` is all behind the control byte."""

    tagged: bool
    last: bool
    opcode: int
    body: bytes

    @property
    def payload(self) -> bytes:
        """What follows the DDP header."""
        return self.body[12 if self.tagged else 16 :]


# -- bytes ------------------------------------------------------------------------------------------------------------


def frame(key: bytes, flags: int, revision: int, private_data: bytes) -> bytes:
    """Encode a start-up frame."""
    return b"MPA ID " + key + b" Frame" + struct.pack(">BBH", flags, revision, len(private_data)) + private_data


def request(*, flags: int = ENHANCED, revision: int = 2, word: int = 0x0010_0010, private_data: bytes = b"") -> bytes:
    """Encode a Request: revision 2, IRD and ORD 16, no ready-to-receive message, unless told otherwise."""
    head = struct.pack(">I", word) if flags & ENHANCED else b""
    return frame(b"Req", flags, revision, head + private_data)


def reply(*, flags: int = ENHANCED, revision: int = 2, word: int = 0x0010_0010, private_data: bytes = b"") -> bytes:
    """Encode a Reply, as `request`."""
    head = struct.pack(">I", word) if flags & ENHANCED else b""
    return frame(b"Rep", flags, revision, head + private_data)


def fpdu(ulpdu: bytes) -> bytes:
    """Frame a ULPDU, with a CRC field of zeros."""
    return struct.pack(">H", len(ulpdu)) + ulpdu + bytes(-(len(ulpdu) + 2) % 4) + bytes(4)


def tagged(opcode: int, stag: int, to: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    """Make an FPDU of a tagged message."""
    return fpdu(struct.pack(">BBIQ", 0xC1 if last else 0x81, 0x40 | opcode, stag, to) + payload)


def untagged(
    opcode: int,
    queue: int,
    msn: int,
    payload: bytes = b"",
    *,
    offset: int = 0,
    last: bool = True,
    control: int | None = None,
) -> bytes:
    """Make an FPDU of an untagged message; `control` replaces both control bytes."""
    if control is None:
        control = (0x4100 if last else 0x0100) | 0x40 | opcode
    return fpdu(struct.pack(">HIIII", control, 0, queue, msn, offset) + payload)


def send(msn: int, payload: bytes = b"", *, offset: int = 0, last: bool = True) -> bytes:
    """Make an FPDU of a Send."""
    return untagged(SEND, 0, msn, payload, offset=offset, last=last)


def read_request(msn: int, stag: int, to: int, size: int, *, sink: tuple[int, int] = (1, 0)) -> bytes:
    """Make the FPDU of a Read Request."""
    return untagged(READ_REQUEST, 1, msn, struct.pack(">IQIIQ", *sink, size, stag, to))


def terminate(layer: int, etype: int, code: int) -> bytes:
    """Make the FPDU of a Terminate without headers."""
    return untagged(TERMINATE, 2, 1, struct.pack(">BBBB", layer << 4 | etype, code, 0, 0))


# -- sockets ----------------------------------------------------------------------------------------------------------


class RawPeer:
    """One end of a TCP connection, driven by a test."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1", *, rcvbuf: int = 0) -> Self:
        """Connect TCP, and say nothing yet."""
        sock = socket.socket()
        sock.setblocking(False)
        if rcvbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @classmethod
    async def initiate(cls, port: int, *, rtr: bool = True, first: bytes = b"") -> Self:
        """Connect, shake hands as an initiator, and send `first` or an empty Write so that the peer may send too."""
        peer = await cls.connect(port)
        await peer.send(request())
        await peer.frame()
        if rtr:
            await peer.send(first or tagged(WRITE, 1, 0))
        return peer

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await self._loop.sock_sendall(self.sock, data)

    def offer(self, data: bytes) -> bytes:
        """Send what the socket takes now, and give the rest."""
        try:
            return data[self.sock.send(data) :]
        except BlockingIOError:
            return data

    async def exactly(self, count: int) -> bytes:
        """Receive `count` bytes.

        Raises:
            EOFError: the peer closed before.
        """
        data = b""
        while len(data) < count:
            part = await self._loop.sock_recv(self.sock, count - len(data))
            if not part:
                raise EOFError(f"{len(data)} bytes of {count} came, then the end")
            data += part
        return data

    async def frame(self) -> Frame:
        """Receive a Request or Reply."""
        head = await self.exactly(20)
        flags, revision, length = struct.unpack(">BBH", head[16:])
        return Frame(head[:16], flags, revision, await self.exactly(length))

    async def fpdu(self) -> FPDU:
        """Receive an FPDU."""
        (length,) = struct.unpack(">H", await self.exactly(2))
        ulpdu = await self.exactly(length)
        await self.exactly(-(length + 2) % 4 + 4)
        return FPDU(bool(ulpdu[0] & 0x80), bool(ulpdu[0] & 0x40), ulpdu[1] & 0xF, ulpdu[2:])

    async def ended(self) -> bool:
        """Read to the end of the stream: True if the peer closed it, False if it was reset."""
        try:
            while await self._loop.sock_recv(self.sock, 65536):
                pass
        except ConnectionError:
            return False
        return True

    def reset(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        """Close. Idempotent."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RawListener:
    """Takes TCP connections, and says nothing by itself."""

    def __init__(self, host: str = "127.0.0.1", *, backlog: int = 16) -> None:
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.bind((host, 0))
        self.sock.listen(backlog)
        self.port: int = self.sock.getsockname()[1]

    async def accept(self) -> RawPeer:
        """Take a connection."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self.sock)
        return RawPeer(sock)

    async def respond(self, answer: bytes | None = None) -> RawPeer:
        """Take a connection and its Request, and answer it: with a Reply that fits, unless told otherwise."""
        peer = await self.accept()
        await peer.frame()
        await peer.send(reply() if answer is None else answer)
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sock.close()
