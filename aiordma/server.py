"""Servers: `serve()` accepts every connection request, and runs a handler for each connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Self, TypeAlias

from aiordma.connection import Connection
from aiordma.device import ProtectionDomain
from aiordma.errors import BrokenError, ClosedError, ProtocolError
from aiordma.listener import ConnectRequest, Listener, listen
from aiordma.opening import Opening
from aiordma.types import ConnParam

__all__ = ["Server", "serve"]

_logger = logging.getLogger("aiordma")

#: What a handler is: a coroutine function that takes the connection.
Handler: TypeAlias = Callable[[Connection], Awaitable[object]]
#: Private data of an accept: fixed, or made for each request.
PrivateData: TypeAlias = "bytes | Callable[[ConnectRequest], bytes]"


class Server:
    """Accepts every request, and runs a handler for each connection. Made by `serve()`.

    A handler's return closes its connection. Its exception goes to the loop's exception handler, and closes only that
    connection.

    Attributes:
        listener: what it listens with.
        connections: the connections whose handlers run.
    """

    def __init__(self, listener: Listener, handler: Handler, private_data: PrivateData) -> None:
        self.listener = listener
        self._handler = handler
        self._private_data = private_data
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()
        self._closing: asyncio.Task[None] | None = None
        self._broken: BrokenError | None = None
        self._stop: asyncio.Future[None] = self._loop.create_future()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._acceptor = self._loop.create_task(self._accept())

    @property
    def port(self) -> int:
        """The port it listens at."""
        return self.listener.port

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain its connections use: register here what they shall serve.

        Raises:
            DeviceError: it listens on several devices, and each has its own: register on each, as requests come, or
                serve with device= or pd=.
        """
        return self.listener.pd

    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        return self._closing is None and self._broken is None

    async def _accept(self) -> None:
        try:
            async for request in self.listener:
                task = self._loop.create_task(self._handle(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except BrokenError as error:
            self._broken = error
            self._stopped()
            _logger.error("%r accepts no more: %s", self, error)  # noqa: TRY400 - the text says it

    def _stopped(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)

    async def _handle(self, request: ConnectRequest) -> None:
        """Accept one request, and run its handler."""
        connection = None
        try:
            data = self._private_data
            try:
                hello = data(request) if callable(data) else data
            except ProtocolError as error:
                _logger.warning("%r is rejected: %s", request, error)
                await request.reject(str(error).encode()[: request.context.capabilities.max_reject_private_data])
                return
            connection = await request.accept(private_data=hello)
            self.connections.add(connection)
            try:
                await self._handler(connection)
            finally:
                # How a connection ends that its handler is done with concerns nobody.
                with contextlib.suppress(BrokenError):
                    await connection.close()
        except Exception as error:  # noqa: BLE001 - whatever a handler raises concerns its connection only
            if connection is None and isinstance(error, (ConnectionError, ClosedError)):
                return  # the peer left before it was accepted: no fault of anyone's here
            # Without the task: Python 3.12 would run the exception handler in its context, which is entered already.
            self._loop.call_exception_handler(
                {"message": f"the handler of {connection or request!r} failed", "exception": error}
            )
        finally:
            if connection is None:
                request.abandon()
            self.connections.discard(connection)

    async def serve_forever(self) -> None:
        """Serve until cancelled or closed; then close.

        Raises:
            BrokenError: the devices of all its endpoints are gone.
        """
        try:
            await asyncio.shield(self._stop)
        finally:
            await self.close()
        if self._broken is not None:
            raise self._broken

    async def close(self) -> None:
        """Close the listener, then cancel the handlers and close their connections. Idempotent.

        Cancellation: drops the waiter; the closing itself goes on.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.listener.close()
            await asyncio.wait((self._acceptor,))
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self._stopped()
            if not self._done.done():
                self._done.set_result(None)

    async def wait_closed(self) -> None:
        """Wait until it is closed, handlers included."""
        await asyncio.shield(self._done)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Server {self.listener!r} connections={len(self.connections)}>"


def serve(
    handler: Handler,
    host: str | None = None,
    port: int = 0,
    *,
    private_data: PrivateData = b"",
    device: str | None = None,
    backlog: int = 512,
    param: ConnParam | None = None,
    pd: ProtectionDomain | None = None,
) -> Opening[Server]:
    """Serve connections with a handler: `async with aiordma.serve(handle, host, port) as server`, or await it.

    Args:
        handler: a coroutine function that takes the connection; it is closed when the handler returns.
        host: see `listen`.
        port: see `listen`.
        private_data: what each peer gets with the accept: bytes, or a function of the request. A ProtocolError of the
            function's rejects the request, with its text.
        device: see `listen`.
        backlog: see `listen`.
        param: see `listen`.
        pd: see `listen`.

    Raises:
        DeviceError: the address is in use or not this machine's; or there is no such device.
        AddressError: the name doesn't resolve.
    """

    async def make() -> Server:
        return Server(
            await listen(host, port, device=device, backlog=backlog, param=param, pd=pd), handler, private_data
        )

    return Opening(make)
