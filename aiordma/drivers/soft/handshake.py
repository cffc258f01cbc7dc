"""MPA's start-up frames at a socket, before a link takes it over: what is read, what is sent, and what is asked for."""

from __future__ import annotations

import errno
import socket
from typing import Final

from aiordma.drivers.soft.ddp import encode_terminate
from aiordma.drivers.soft.mpa import (
    CRC32C_AVAILABLE,
    INSUFFICIENT_IRD,
    NO_COMMON_RTR,
    Framer,
    MPAConfig,
    StartupFrame,
    parse_frame,
)
from aiordma.drivers.soft.rnic import MAX_READS
from aiordma.errors import ProtocolError, UnsupportedError
from aiordma.types import ConnParam

#: The largest start-up frame: header and 512 bytes.
_FRAME_MAX: Final = 532


def mpa_config(param: ConnParam, revision: int) -> MPAConfig:
    """Give what this side brings to the negotiation.

    Raises:
        UnsupportedError: CRCs are asked for, and can't be computed here.
    """
    if param.crc and not CRC32C_AVAILABLE:
        raise UnsupportedError("ConnParam(crc=True) needs CRC32C, which isn't here: pip install 'aiordma[crc]'")
    depth = param.initiator_depth
    resources = param.responder_resources
    return MPAConfig(
        ird=MAX_READS if resources is None else min(resources, MAX_READS),
        ord=MAX_READS if depth is None else min(depth, MAX_READS),
        crc=param.crc,
        crc_available=CRC32C_AVAILABLE,
        revision=revision,
    )


def receive_frame(sock: socket.socket, received: bytearray, *, reply: bool) -> StartupFrame | None:
    """Read what is there of a start-up frame; None if it isn't all there.

    `received` holds what came of it so far, and in the end what came behind it.

    Raises:
        ProtocolError: it isn't one.
        ConnectionError: the peer closed.
    """
    try:
        data = sock.recv(_FRAME_MAX)
    except (BlockingIOError, InterruptedError):
        return None
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
    received += data
    parsed = parse_frame(received, reply=reply)
    if parsed is None:
        return None
    frame, size = parsed
    del received[:size]
    return frame


def send_whole(sock: socket.socket | None, data: bytes) -> bool:
    """Send a frame, for which an idle socket has room; False if the peer is gone."""
    if sock is None:
        return False
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False


def refuse_reply(
    sock: socket.socket | None, param: ConnParam, reply: StartupFrame | None, error: ProtocolError
) -> None:
    """Tell the peer by a Terminate why its Reply won't do, if it was a Reply (RFC 6581 section 6)."""
    if reply is None or error.code not in (INSUFFICIENT_IRD, NO_COMMON_RTR):
        return
    framer = Framer(crc=param.crc or reply.crc, markers=reply.markers)
    send_whole(sock, b"".join(framer.frame([encode_terminate(error, b"")])))
