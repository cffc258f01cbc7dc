"""Listeners: `listen()` gives connection requests, `serve()` runs a handler for each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import warnings
from collections.abc import Awaitable, Callable
from typing import Final, Self, TypeAlias

from aiordma.cm import CMID, resolve_host
from aiordma.connection import Connection
from aiordma.connector import check_private_data
from aiordma.device import Context, LoopState, ProtectionDomain, choose_device, driver_of, loop_state
from aiordma.drivers.base import CMEvent
from aiordma.enums import Access
from aiordma.errors import BrokenError, ClosedError, DeviceError, RDMAError
from aiordma.memory import MemoryRegion
from aiordma.opening import Opening
from aiordma.types import Buffer, ConnParam, SocketAddress

__all__ = ["ConnectRequest", "Listener", "Server", "listen", "serve"]

#: What a handler is: a coroutine function that takes the connection.
Handler: TypeAlias = Callable[[Connection], Awaitable[object]]
#: Private data of an accept: fixed, or made for each request.
PrivateData: TypeAlias = "bytes | Callable[[ConnectRequest], bytes]"

#: Tries to find one port number that is free on every endpoint.
_PORT_TRIES: Final = 20


class ConnectRequest:
    """A peer that wants to connect (RDMA_CM_EVENT_CONNECT_REQUEST): accept or reject it.

    Attributes:
        private_data: what the peer sent along, as it arrived: on IB and RoCE padded with zeros.
        context: the device it came in by.
        pd: the protection domain that a connection of it will use.
    """

    def __init__(self, cm_id: CMID, event: CMEvent, pd: ProtectionDomain, param: ConnParam) -> None:
        self._cm_id = cm_id
        self._loop = asyncio.get_running_loop()
        self._param = param
        self._answered = False
        self._regions: list[MemoryRegion] = []
        self.private_data = event.private_data
        self.context: Context = pd.context
        self.pd = pd

    @property
    def device(self) -> str:
        """The device's name."""
        return self.context.name

    @property
    def peer_addr(self) -> SocketAddress:
        """The peer's address."""
        return self._cm_id.peer_addr

    @property
    def local_addr(self) -> SocketAddress:
        """The address it came to."""
        return self._cm_id.local_addr

    def alloc(self, length: int, *, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Allocate registered memory for the connection to be; see `Connection.alloc`."""
        region = self.pd.alloc(length, access=access)
        self._regions.append(region)
        return region

    def register(self, buffer: Buffer, *, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for the connection to be; see `Connection.register`."""
        region = self.pd.register(buffer, access=access)
        self._regions.append(region)
        return region

    async def accept(self, *, private_data: bytes = b"", param: ConnParam | None = None) -> Connection:
        """Accept (rdma_accept): gives the connection once it is established.

        Cancellation: closes what it had; the peer is disconnected.

        Raises:
            ConnectError: the peer left meanwhile.
            ValueError: the private data is too long; the request can still be answered.
            ClosedError: it was answered before.
        """
        self._check_unanswered()
        check_private_data(private_data, self.context.capabilities.max_accept_private_data)
        self._answered = True
        try:
            connection = Connection(self._cm_id, self.pd, param or self._param)
        except BaseException:
            self._drop()
            raise
        connection.adopt(self._regions)
        self._regions = []
        connection.peer_private_data = self.private_data
        await connection.establish(self._cm_id.accept, private_data)
        return connection

    async def reject(self, private_data: bytes = b"") -> None:
        """Say no (rdma_reject); the peer gets a RejectedError with `private_data`."""
        self._check_unanswered()
        check_private_data(private_data, self.context.capabilities.max_accept_private_data)
        self._answered = True
        self._cm_id.reject(private_data)
        self._drop()

    def abandon(self) -> None:
        """Reject it at once, if it has no answer yet. Idempotent."""
        if not self._answered:
            self._answered = True
            self._drop()

    def _check_unanswered(self) -> None:
        if self._answered:
            raise ClosedError(f"{self!r} was answered before")

    def _drop(self) -> None:
        self._cm_id.destroy()
        for region in self._regions:
            region.deregister()
        self._regions.clear()

    def __del__(self) -> None:
        if getattr(self, "_answered", True):
            return
        warnings.warn(f"{self!r} was neither accepted nor rejected", ResourceWarning, stacklevel=2, source=self)
        if self._loop.is_closed():
            self._cm_id.destroy()
        else:  # the collector may run in any thread
            self._loop.call_soon_threadsafe(self._cm_id.destroy)

    def __repr__(self) -> str:
        return f"<ConnectRequest from {self.peer_addr} on {self.device}>"


class Listener:
    """Listens on one or several endpoints: `async for request in listener`.

    Attributes:
        endpoints: the addresses it listens at.
    """

    def __init__(self, cm_ids: list[CMID], param: ConnParam, pd: ProtectionDomain | None) -> None:
        self._cm_ids = cm_ids
        self._param = param
        self._own_pd = pd
        self._state = loop_state()
        self._loop = asyncio.get_running_loop()
        self.endpoints = [cm_id.local_addr for cm_id in cm_ids]
        self._queue: asyncio.Queue[ConnectRequest | None] = asyncio.Queue()
        self._closed = False
        for cm_id in cm_ids:
            cm_id.on_request = _into(self._queue, cm_id, self._state, pd, param)

    @property
    def port(self) -> int:
        """The port, the same on every endpoint."""
        return int(self.endpoints[0][1])

    @property
    def context(self) -> Context:
        """The device of the first endpoint."""
        return self._state.context(self._cm_ids[0].device_name)

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain that accepted connections use, on the first endpoint's device."""
        return self._own_pd or self.context.pd

    async def get_request(self) -> ConnectRequest:
        """Wait for the next request. Cancellation: safe, no request is lost.

        Raises:
            ClosedError: the listener is closed.
        """
        request = None if self._closed and self._queue.empty() else await self._queue.get()
        if request is None:
            self._queue.put_nowait(None)
            raise ClosedError(f"{self!r} is closed")
        return request

    def __aiter__(self) -> Self:
        """Iterate over requests, until it is closed."""
        return self

    async def __anext__(self) -> ConnectRequest:
        try:
            return await self.get_request()
        except ClosedError:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """Stop listening. Requests nobody took are rejected; accepted connections go on. Idempotent.

        Cancellation: it doesn't wait for anything, so it is done whole or not begun.
        """
        if self._closed:
            return
        self._closed = True
        _destroy(self._cm_ids, self._queue)
        self._queue.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        if self._loop.is_closed():
            _destroy(self._cm_ids, self._queue)
        else:  # the collector may run in any thread
            self._loop.call_soon_threadsafe(_destroy, self._cm_ids, self._queue)

    def __repr__(self) -> str:
        return f"<Listener {self.endpoints}{' closed' if self._closed else ''}>"


def _into(
    queue: asyncio.Queue[ConnectRequest | None],
    cm_id: CMID,
    state: LoopState,
    pd: ProtectionDomain | None,
    param: ConnParam,
) -> Callable[[CMEvent], None]:
    """Make what puts a listener's requests into its queue; it doesn't keep the listener itself alive."""

    def take(event: CMEvent) -> None:
        child = cm_id.child(event)
        queue.put_nowait(ConnectRequest(child, event, pd or state.context(child.device_name).pd, param))

    return take


def _destroy(cm_ids: list[CMID], queue: asyncio.Queue[ConnectRequest | None]) -> None:
    """Stop listening, and reject what nobody took."""
    for cm_id in cm_ids:
        cm_id.destroy()
    while not queue.empty():
        request = queue.get_nowait()
        if request is not None:
            request.abandon()


def listen(
    host: str | None = None,
    port: int = 0,
    *,
    device: str | None = None,
    backlog: int = 512,
    param: ConnParam | None = None,
    pd: ProtectionDomain | None = None,
) -> Opening[Listener]:
    """Listen for connections: `async with aiordma.listen(host, port) as listener`, or await it.

    Args:
        host: name or address to listen at; None or "" is every address, IPv4 and IPv6.
        port: 0 for any that is free, the same on every endpoint; see `Listener.port`.
        device: "soft", "rdma" or a device's name; by default AIORDMA_DEVICE, else every device there is.
        backlog: requests that may wait for an answer at once, connections that have not sent theirs included. More wait
            in the kernel, until you accept or reject one; those of peers that left count until then too.
        param: of the connections to be; `accept` may take others.
        pd: a protection domain of your own for their memory; by default the device's.

    Raises:
        DeviceError: the address is in use or not this machine's; or there is no such device.
        AddressError: the name doesn't resolve.
    """

    async def make() -> Listener:
        return Listener(await _bind(host, port, device, backlog), param or ConnParam(), pd)

    return Opening(make)


async def _bind(host: str | None, port: int, device: str | None, backlog: int) -> list[CMID]:
    """Bind all endpoints to one port number; with port 0, to one that is free on all of them."""
    driver = driver_of(choose_device(device))
    addresses = await resolve_host(host or None, port, passive=True)
    state = loop_state()
    for tries in range(_PORT_TRIES):
        cm_ids: list[CMID] = []
        number = port
        try:
            for address in addresses:
                cm_id = CMID(state, driver)
                cm_ids.append(cm_id)
                try:
                    cm_id.bind_addr((address[0], number, *address[2:]))
                except OSError as error:
                    # A kernel without IPv6 resolves it all the same; asyncio's servers pass over it too.
                    if error.errno not in _NO_FAMILY or (len(cm_ids) == 1 and address is addresses[-1]):
                        raise
                    cm_ids.pop().destroy()
                    continue
                number = int(cm_id.local_addr[1])
            for cm_id in cm_ids:
                cm_id.listen(backlog)
        except OSError as error:
            for cm_id in cm_ids:
                cm_id.destroy()
            if error.errno == errno.EADDRINUSE and not port and tries < _PORT_TRIES - 1:
                continue
            if isinstance(error, RDMAError):
                raise
            raise DeviceError(
                error.errno or errno.EIO, f"can't listen at {host or '*'} port {number}: {error.strerror}",
                verb="rdma_bind_addr", hint=_BIND_HINTS.get(error.errno or 0, ""),
            ) from error  # fmt: skip
        else:
            return cm_ids
    raise AssertionError("unreachable: the last try raises")


_NO_FAMILY: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})

_BIND_HINTS: Final = {
    errno.EADDRINUSE: "another program listens there; take another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "this address isn't one of this machine's",
    errno.EACCES: "ports below 1024 need privileges",
}


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
        self._acceptor = self._loop.create_task(self._accept())
        self._done: asyncio.Future[None] = self._loop.create_future()

    @property
    def port(self) -> int:
        """The port it listens at."""
        return self.listener.port

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain its connections use: register here what they shall serve."""
        return self.listener.pd

    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        return self._closing is None

    async def _accept(self) -> None:
        async for request in self.listener:
            task = self._loop.create_task(self._handle(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, request: ConnectRequest) -> None:
        """Accept one request, and run its handler."""
        connection = None
        try:
            data = self._private_data
            connection = await request.accept(private_data=data(request) if callable(data) else data)
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
        """Serve until cancelled or closed; then close."""
        try:
            await asyncio.shield(self._done)
        finally:
            await self.close()

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
        return f"<Server {self.listener.endpoints} connections={len(self.connections)}>"


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
        private_data: what each peer gets with the accept: bytes, or a function of the request.
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
