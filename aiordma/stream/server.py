"""`create_server()` and `start_server()`: asyncio's, over RDMA."""

from __future__ import annotations

import asyncio
import logging
import ssl as ssl_module
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiordma.binding import Endpoint
from aiordma.connection import Connection
from aiordma.domain import ProtectionDomain
from aiordma.errors import BrokenError, ClosedError, ProtocolError, UnsupportedError
from aiordma.listener import ConnectRequest, Listener, listen
from aiordma.stream.socket import RSocket, StreamParam
from aiordma.stream.tls import TLS
from aiordma.stream.transport import StreamTransport
from aiordma.stream.wire import Hello

__all__ = ["StreamServer", "create_server", "start_server"]

_logger = logging.getLogger("aiordma")

#: asyncio's bound of what a StreamReader holds.
_LIMIT = 2**16


class StreamServer(asyncio.AbstractServer):
    """Accepts streams, with the face of `asyncio.Server`, but without sockets. Made by `create_server()`.

    Attributes:
        port: where it listens.
        transports: of the streams that are open.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        param: StreamParam,
        tls: TLS | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._factory = protocol_factory
        self._param = param
        self._tls = tls
        self._acceptors: set[asyncio.Task[None]] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self.transports: set[StreamTransport] = set()
        self.port = listeners[0].port
        self._closing: asyncio.Task[None] | None = None
        self._forever: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where it listens."""
        return [endpoint for listener in self._listeners for endpoint in listener.endpoints]

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Give its loop."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether it accepts streams."""
        return bool(self._acceptors) and self._closing is None

    async def start_serving(self) -> None:
        """Accept from now on; what came before waited. Idempotent."""
        if self._closing is not None:
            raise RuntimeError(f"server {self!r} is closed")
        if not self._acceptors:
            self._acceptors = {self._loop.create_task(self._accept_all(listener)) for listener in self._listeners}

    async def serve_forever(self) -> None:
        """Accept until cancelled or closed; then close, and wait for its streams to end."""
        if self._forever is not None:
            raise RuntimeError(f"server {self!r} is already being awaited on serve_forever()")
        await self.start_serving()
        self._forever = self._loop.create_future()
        try:
            await self._forever
        except asyncio.CancelledError:
            self.close()
            await self.wait_closed()
            raise
        finally:
            self._forever = None

    def close(self) -> None:
        """Accept no more; streams that are open go on. Idempotent."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
            if self._forever is not None and not self._forever.done():
                self._forever.cancel()

    async def _close(self) -> None:
        for listener in self._listeners:
            await listener.close()
        for task in (*self._acceptors, *self._accepting):
            task.cancel()
        if pending := self._acceptors | self._accepting:
            await asyncio.wait(pending)

    async def wait_closed(self) -> None:
        """Wait until it is closed, and each of its streams has ended (as asyncio does from Python 3.12 on)."""
        if self._closing is None or self.transports:
            if self._idle is None:
                self._idle = self._loop.create_future()
            await asyncio.shield(self._idle)
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def close_clients(self) -> None:
        """Close every stream that is open."""
        for transport in list(self.transports):
            transport.close()

    def abort_clients(self) -> None:
        """Close every stream that is open at once; what waits to be sent is dropped."""
        for transport in list(self.transports):
            transport.abort()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._listeners!r} streams={len(self.transports)}>"

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        await self.wait_closed()

    # -- accepting ----------------------------------------------------------------------------------------------------

    async def _accept_all(self, listener: Listener) -> None:
        try:
            async for request in listener:
                task = self._loop.create_task(self._accept(request))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)
        except BrokenError as error:
            _logger.error("%r accepts no more: %s", self, error)  # noqa: TRY400 - the text says it

    async def _accept(self, request: ConnectRequest) -> None:
        made: list[RSocket] = []

        def private_data(conn: Connection) -> bytes:
            made.append(RSocket(conn, self._param))
            return made[0].hello()

        try:
            Hello.from_bytes(request.private_data)
            conn = await request.accept(private_data=private_data, param=self._param.connection())
        except ProtocolError as error:
            _logger.info("%s is rejected: %s", request, error)
            await request.reject()
            return
        except (ConnectionError, ClosedError):
            return  # it left before it was accepted: no fault of anyone's here
        except OSError as error:
            self._report(error, f"{request!r} can't be accepted")
            return
        finally:
            request.abandon()
        try:
            made[0].start(request.private_data, passive=True)
            protocol = self._factory()
            layer = protocol if self._tls is None else self._tls.layer(protocol, None)
            self.transports.add(StreamTransport(made[0], layer, self._ended))
        except Exception as error:  # noqa: BLE001 - whatever a factory raises concerns its stream only
            conn.abort()
            self._report(error, f"no protocol for {request!r}")

    def _report(self, error: Exception, message: str) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})

    def _ended(self, transport: StreamTransport) -> None:
        self.transports.discard(transport)
        if self._closing is not None and not self.transports and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


async def create_server(
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    host: str | Sequence[str] | None = None,
    port: int = 0,
    *,
    sock: None = None,
    backlog: int = 100,
    ssl: ssl_module.SSLContext | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    start_serving: bool = True,
    device: str | None = None,
    param: StreamParam | None = None,
    pd: ProtectionDomain | None = None,
) -> StreamServer:
    """Listen for streams, as `loop.create_server()`; the peers may be any programs that use rsockets.

    Args:
        protocol_factory: makes a protocol for each stream.
        host: address or addresses to listen at; None is every one.
        port: 0 for any that is free: see `StreamServer.port`.
        sock: there is none: only None is taken.
        backlog: see `listen`.
        ssl: a context, for TLS.
        ssl_handshake_timeout: in seconds.
        ssl_shutdown_timeout: in seconds.
        start_serving: accept at once, or first with `start_serving()`.
        device: see `listen`.
        param: sizes of buffers and queues.
        pd: see `listen`.

    Raises:
        DeviceError, AddressError: as `listen()`.
    """
    if sock is not None:
        raise UnsupportedError("a stream over RDMA has no socket: give host and port")
    tls = TLS.wanted(
        ssl, server_side=True, server_hostname=None, host=None,
        handshake_timeout=ssl_handshake_timeout, shutdown_timeout=ssl_shutdown_timeout,
    )  # fmt: skip
    listeners: list[Listener] = []
    try:
        for one in [host] if host is None or isinstance(host, str) else host:
            listeners.append(await listen(one, port, device=device, backlog=backlog, pd=pd))
            port = listeners[0].port
    except BaseException:
        for listener in listeners:
            await listener.close()
        raise
    server = StreamServer(listeners, protocol_factory, param or StreamParam(), tls)
    if start_serving:
        await server.start_serving()
    return server


async def start_server(
    client_connected_cb: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    host: str | Sequence[str] | None = None,
    port: int = 0,
    *,
    limit: int = _LIMIT,
    **kwds: Any,
) -> StreamServer:
    """Serve streams with a callback or coroutine function, as `asyncio.start_server()`.

    What else there is to give, `create_server` takes.
    """
    loop = asyncio.get_running_loop()

    def factory() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, client_connected_cb, loop=loop)

    return await create_server(factory, host, port, **kwds)
