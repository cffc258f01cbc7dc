"""rdma_cm as awaitables: identifiers whose steps are awaited, and the translation of events to exceptions."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from aiordma.device import LoopState
from aiordma.drivers.base import CMEvent, Driver, DriverCMID
from aiordma.enums import CMEventType, RejectReason
from aiordma.errors import (
    AddressError,
    BrokenError,
    BusyError,
    ClosedError,
    ConnectError,
    ConnectTimeoutError,
    DeviceError,
    RejectedError,
    RouteError,
    UnreachableError,
)
from aiordma.queue_pair import QueuePair
from aiordma.types import ConnParam, SocketAddress

__all__ = ["CMID"]


#: What an iWARP peer that says nothing may be waiting for.
_CLIENT_FIRST: Final = (
    "; on iWARP the client speaks first: a server that sends before it received a message breaks the handshake"
)


def event_error(event: CMEvent, peer: object, hint: str = "") -> ConnectError:
    """Make the exception of an event that ends a step; `hint` is what to think of where no answer came."""
    reason = event.reason or event.event.name.lower().replace("_", " ")
    text = f"can't connect to {peer}: {reason}"
    kind = event.event
    if kind == CMEventType.ADDR_ERROR:
        return AddressError(f"{text}; no RDMA device reaches this address")
    if kind == CMEventType.ROUTE_ERROR:
        return RouteError(text)
    if kind == CMEventType.REJECTED:
        if event.status == RejectReason.INVALID_SERVICE_ID:
            text += "; is the server running, and on this port?"
        return RejectedError(text, status=event.status, private_data=event.private_data)
    if event.status == -errno.ETIMEDOUT:
        return ConnectTimeoutError(text + hint)
    if kind == CMEventType.UNREACHABLE:
        return UnreachableError(text)
    return ConnectError(text)


def _step_error(awaited: CMEventType, error: OSError, peer: object) -> ConnectError:
    """Make the exception of a step that the device or the system refused to begin."""
    words = error if isinstance(error, DeviceError) else error.strerror or error
    text = f"can't connect to {peer}: {words}"
    if awaited == CMEventType.ADDR_RESOLVED:
        return AddressError(text)
    if awaited == CMEventType.ROUTE_RESOLVED:
        return RouteError(text)
    if error.errno == errno.ECONNREFUSED:
        return RejectedError(
            f"{text}; is the server running, and on this port?", status=RejectReason.INVALID_SERVICE_ID
        )
    if error.errno in _UNREACHABLE:
        return UnreachableError(text)
    return ConnectTimeoutError(text) if error.errno == errno.ETIMEDOUT else ConnectError(text)


_UNREACHABLE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


class CMID:
    """A connection identifier (rdma_cm_id). Each step is awaited; only one at a time.

    Cancellation: a cancelled step leaves the identifier fit only to be destroyed.

    Attributes:
        driver: the driver's identifier.
        owner: the driver.
        on_disconnected: called once when the connection ended, with the reason in words.
        on_request: takes connection requests, if set before there are any; else `get_request()` gives them.
    """

    def __init__(self, state: LoopState, driver: Driver, existing: DriverCMID | None = None) -> None:
        self._state = state
        self.owner = driver
        self._loop = asyncio.get_running_loop()
        self.driver = existing or state.channel(driver).create_id()
        self._step: asyncio.Future[CMEvent] | None = None
        self._awaited: CMEventType | None = None
        self._requests: deque[CMEvent] = deque()
        self._request_waiter: asyncio.Future[None] | None = None
        self._hint = ""
        self._disconnected: asyncio.Future[str] = self._loop.create_future()
        self.on_disconnected: Callable[[str], None] | None = None
        self.on_request: Callable[[CMEvent], None] | None = None
        self.destroyed = False
        state.ids[self.driver] = self

    # -- events -----------------------------------------------------------------------------------------------------

    def on_event(self, event: CMEvent) -> None:
        """Take an event; the loop's state calls this."""
        kind = event.event
        if kind == CMEventType.CONNECT_REQUEST and self.on_request is not None:
            self.on_request(event)
        elif kind == CMEventType.CONNECT_REQUEST:
            self._requests.append(event)
            if self._request_waiter is not None and not self._request_waiter.done():
                self._request_waiter.set_result(None)
        elif kind == CMEventType.DISCONNECTED:
            self._ended(event.reason or "the peer disconnected")
        elif self._step is not None and not self._step.done():
            if kind == self._awaited:
                self._step.set_result(event)
            else:
                self._step.set_exception(event_error(event, self.peer_addr, self._hint))

    def _ended(self, reason: str) -> None:
        if self._step is not None and not self._step.done():
            self._step.set_exception(ConnectError(f"the connection to {self.peer_addr} ended: {reason}"))
        if not self._disconnected.done():
            self._disconnected.set_result(reason)
            if self.on_disconnected is not None:
                self.on_disconnected(reason)

    def device_removed(self, name: str, failure: BrokenError) -> None:
        """A device is gone: let go of what is bound to it, and tell who waits (RDMA_CM_EVENT_DEVICE_REMOVAL).

        The loop's state calls this for every identifier.
        """
        for event in [request for request in self._requests if request.id.device_name == name]:
            self._requests.remove(event)
            event.id.destroy()
        if self.driver.device_name == name and not self.destroyed:
            self._ended(str(failure))
            self.destroy()

    async def _await(self, awaited: CMEventType, start: Callable[[], None]) -> CMEvent:
        """Start a step, and wait for its event."""
        if self._step is not None:
            raise BusyError(f"{self!r}: a step is under way")
        if self.destroyed:
            raise ClosedError(f"{self!r} is destroyed")
        self._awaited = awaited
        self._step = self._loop.create_future()
        try:
            try:
                start()
            except OSError as error:
                if isinstance(error, ConnectError):
                    raise
                raise _step_error(awaited, error, self.peer_addr) from error
            return await self._step
        finally:
            self._step = None

    # -- steps ------------------------------------------------------------------------------------------------------

    async def resolve_addr(self, dst: SocketAddress, src: SocketAddress | None = None, *, timeout: float = 2.0) -> None:
        """Find the device that reaches an address (rdma_resolve_addr).

        Raises:
            AddressError: none does.
        """
        await self._await(CMEventType.ADDR_RESOLVED, lambda: self.driver.resolve_addr(src, dst, timeout))

    async def resolve_route(self, *, timeout: float = 2.0) -> None:
        """Find the way to the address (rdma_resolve_route).

        Raises:
            RouteError: there is none.
        """
        await self._await(CMEventType.ROUTE_RESOLVED, lambda: self.driver.resolve_route(timeout))

    async def connect(self, qp: QueuePair, param: ConnParam, private_data: bytes = b"") -> CMEvent:
        """Connect a queue pair to a listener (rdma_connect), and wait for the answer.

        Returns:
            The ESTABLISHED event, with the peer's private data.

        Raises:
            RejectedError, UnreachableError, ConnectTimeoutError, ConnectError.
        """
        self._hint = _CLIENT_FIRST if qp.transport == "iwarp" else ""
        return await self._await(CMEventType.ESTABLISHED, lambda: self.driver.connect(qp.driver, param, private_data))

    async def accept(self, qp: QueuePair, param: ConnParam, private_data: bytes = b"") -> CMEvent:
        """Accept a request (rdma_accept), and wait until the connection is established."""
        return await self._await(CMEventType.ESTABLISHED, lambda: self.driver.accept(qp.driver, param, private_data))

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse a request (rdma_reject)."""
        self.driver.reject(private_data)

    def bind_addr(self, addr: SocketAddress, *, interface: str = "") -> None:
        """Bind to a local address (rdma_bind_addr); on the soft device, to a network interface too."""
        self.driver.bind_addr(addr, interface=interface)

    def listen(self, backlog: int) -> None:
        """Take connection requests (rdma_listen)."""
        self.driver.listen(backlog)

    async def get_request(self) -> CMEvent:
        """Wait for a connection request (rdma_get_request). Cancellation: safe, no request is lost.

        Raises:
            ClosedError: the listener was destroyed.
        """
        while not self._requests:
            if self.destroyed:
                raise ClosedError(f"{self!r} is closed")
            if self._request_waiter is not None:
                raise BusyError("two tasks wait for this listener's requests")
            self._request_waiter = self._loop.create_future()
            try:
                await self._request_waiter
            finally:
                self._request_waiter = None
        return self._requests.popleft()

    def child(self, event: CMEvent) -> CMID:
        """Give the identifier that a connection request came with."""
        return CMID(self._state, self.owner, event.id)

    def disconnect(self) -> None:
        """Start to disconnect, or answer the peer's disconnect (rdma_disconnect)."""
        if not self.destroyed:
            self.driver.disconnect()

    async def disconnected(self) -> str:
        """Wait for the connection's end; gives the reason in words."""
        return await asyncio.shield(self._disconnected)

    def destroy(self) -> None:
        """Let go of it (rdma_destroy_id), from any state. Requests nobody took are rejected. Idempotent."""
        if self.destroyed:
            return
        self.destroyed = True
        self._state.ids.pop(self.driver, None)
        for event in self._requests:
            event.id.destroy()
        self._requests.clear()
        self.on_request = self.on_disconnected = None
        self.driver.destroy()
        if self._loop.is_closed():
            return  # nobody can be told
        for future in (self._request_waiter, self._step):
            if future is not None and not future.done():
                future.set_exception(ClosedError(f"{self!r} is closed"))
        if not self._disconnected.done():
            self._disconnected.set_result("destroyed")

    @property
    def device_name(self) -> str:
        """The device it is bound to."""
        name = self.driver.device_name
        if name is None:
            raise AddressError(f"{self!r} isn't bound to a device: resolve an address first")
        return name

    @property
    def local_addr(self) -> SocketAddress:
        """This side's address."""
        return self.driver.local_addr

    @property
    def peer_addr(self) -> SocketAddress:
        """The peer's address."""
        return self.driver.peer_addr

    def __repr__(self) -> str:
        return f"<CMID {self.local_addr} peer {self.peer_addr}>"


async def resolve_host(host: str | None, port: int, *, passive: bool = False) -> list[SocketAddress]:
    """Resolve a name to addresses, IPv4 and IPv6, in the resolver's order.

    Raises:
        AddressError: it doesn't resolve.
    """
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"a port is 0 to 65535, not {port}")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if passive else 0)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"{host!r} doesn't resolve: {error}") from error
    return list(dict.fromkeys(entry[4] for entry in found))
