"""`create_connection()` and `open_connection()`: asyncio's, over RDMA."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Callable
from typing import Any, TypeVar, cast

from aiordma.connection import Connection
from aiordma.connector import connect
from aiordma.domain import ProtectionDomain
from aiordma.errors import UnsupportedError
from aiordma.stream.socket import RSocket, StreamParam
from aiordma.stream.tls import TLS
from aiordma.stream.transport import StreamTransport

__all__ = ["create_connection", "open_connection"]

_P = TypeVar("_P", bound=asyncio.BaseProtocol)

#: asyncio's bound of what a StreamReader holds.
_LIMIT = 2**16


async def create_connection(
    protocol_factory: Callable[[], _P],
    host: str | None = None,
    port: int | None = None,
    *,
    ssl: ssl_module.SSLContext | bool | None = None,
    sock: None = None,
    local_addr: tuple[str, int] | None = None,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    device: str | None = None,
    param: StreamParam | None = None,
    pd: ProtectionDomain | None = None,
) -> tuple[asyncio.Transport, _P]:
    """Open a stream to a host and port, as `loop.create_connection()`; the peer may be any program that uses rsockets.

    Its addresses are tried in turn, by the rules of `connect()`.

    Cancellation: closes what it had.

    Args:
        protocol_factory: makes the protocol.
        host: name or address.
        port: the server's.
        ssl: a context, or True for the default one.
        sock: there is none: only None is taken.
        local_addr: address and port of this side.
        server_hostname: the name that the server's certificate must have; `host` by default.
        ssl_handshake_timeout: in seconds.
        ssl_shutdown_timeout: in seconds.
        device: see `connect`.
        param: sizes of buffers and queues.
        pd: see `connect`.

    Raises:
        ConnectError: as `connect()`.
        ProtocolError: the peer doesn't speak rsockets' protocol.
    """
    if sock is not None:
        raise UnsupportedError("a stream over RDMA has no socket: give host and port")
    if host is None or port is None:
        raise ValueError("host and port must be given")
    tls = TLS.wanted(
        ssl, server_side=False, server_hostname=server_hostname, host=host,
        handshake_timeout=ssl_handshake_timeout, shutdown_timeout=ssl_shutdown_timeout,
    )  # fmt: skip
    param = param or StreamParam()
    rsocket = await _connect(host, port, param, device=device, local_addr=local_addr, pd=pd)
    loop = asyncio.get_running_loop()
    try:
        protocol = protocol_factory()
        waiter: asyncio.Future[None] = loop.create_future()
        layer = tls.layer(protocol, waiter) if tls else None
        transport: asyncio.Transport = StreamTransport(rsocket, layer or protocol)
    except BaseException:
        rsocket.conn.abort()
        raise
    if layer is None:
        loop.call_soon(waiter.set_result, None)  # behind connection_made()
    try:
        await waiter
    except BaseException:
        transport.close()
        raise
    return (transport if layer is None else cast("asyncio.Transport", layer._app_transport)), protocol  # noqa: SLF001


async def _connect(host: str, port: int, param: StreamParam, **where: Any) -> RSocket:
    made: list[RSocket] = []

    def private_data(conn: Connection) -> bytes:
        made.append(RSocket(conn, param))
        return made[-1].hello()

    conn = await connect(host, port, private_data=private_data, param=param.connection(), **where)
    try:
        made[-1].start(conn.peer_private_data, passive=False)
    except BaseException:
        conn.abort()
        raise
    return made[-1]


async def open_connection(
    host: str | None = None, port: int | None = None, *, limit: int = _LIMIT, **kwds: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream, as `asyncio.open_connection()`: gives a StreamReader and a StreamWriter.

    What else there is to give, `create_connection` takes.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await create_connection(lambda: protocol, host, port, **kwds)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
