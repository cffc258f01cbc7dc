"""Listeners: `listen()` gives connection requests."""

from __future__ import annotations

import asyncio
import errno
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Self

from aiordma.binding import Bound, Endpoint, bind
from aiordma.cm import CMID
from aiordma.connection import Connection, PrivateData, check_private_data
from aiordma.device import RDMA, Context, LoopState, ProtectionDomain, demanded, loop_state, rdma_devices
from aiordma.drivers.base import CMEvent
from aiordma.enums import Access
from aiordma.errors import BrokenError, ClosedError, DeviceError
from aiordma.memory import MemoryRegion
from aiordma.opening import Opening
from aiordma.types import Buffer, ConnParam, SocketAddress

__all__ = ["ConnectRequest", "Listener", "listen"]

_logger = logging.getLogger("aiordma")


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

    async def accept(self, *, private_data: PrivateData = b"", param: ConnParam | None = None) -> Connection:
        """Accept (rdma_accept): gives the connection once it is established.

        `private_data` is what the peer gets along, or a function that makes it of the connection to be.

        Cancellation: closes what it had; the peer is disconnected.

        Raises:
            ConnectError: the peer left meanwhile.
            ValueError: the private data is too long; the request can still be answered.
            ClosedError: it was answered before.
        """
        self._check_unanswered()
        limit = self.context.capabilities.max_accept_private_data
        if not callable(private_data):
            check_private_data(private_data, limit)
        self._answered = True
        try:
            # Before what it is made of: a device that is gone is no want of memory.
            self.pd.check_open()
            connection = Connection(self._cm_id, self.pd, param or self._param)
        except BaseException:
            self._drop()
            raise
        for region in self._regions:
            connection.memory.keep(region)
        self._regions = []
        connection.peer_private_data = self.private_data
        await connection.establish(self._cm_id.accept, private_data, limit)
        return connection

    async def reject(self, private_data: bytes = b"") -> None:
        """Say no (rdma_reject); the peer gets a RejectedError with `private_data`."""
        self._check_unanswered()
        check_private_data(private_data, self.context.capabilities.max_reject_private_data)
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

    Where a device is removed, requests go on coming by the others. A wildcard of RDMA's (its endpoint's device is
    "rdma") stays, and serves the device again when it is back; an endpoint at an address of the device's is lost. With
    the last one the iteration and `get_request()` end with BrokenError.

    Attributes:
        endpoints: where it listens: address, port, device and, if it is bound to one, network interface of each.
    """

    def __init__(self, bound: list[Bound], device: str | None, param: ConnParam, pd: ProtectionDomain | None) -> None:
        self._bound = bound
        self._device = device
        self._own_pd = pd
        self._state = loop_state()
        self._loop = asyncio.get_running_loop()
        self.port = bound[0].endpoint.port
        self.endpoints: list[Endpoint] = [endpoint for _, endpoint in bound]
        self._queue: asyncio.Queue[ConnectRequest | None] = asyncio.Queue()
        self._closed = False
        self._broken: BrokenError | None = None
        weak = weakref.ref(self)
        for one in bound:
            one.cm_id.on_request = _into(self._queue, one.cm_id, self._state, device, pd, param)
            one.cm_id.on_disconnected = _losing(weak, one)

    @property
    def context(self) -> Context:
        """The device it listens on.

        Raises:
            DeviceError: it listens on several; each request has its own.
        """
        if self._own_pd is not None:
            return self._own_pd.context
        names = {endpoint.device for endpoint in self.endpoints}
        if RDMA in names:
            names = names - {RDMA} | {device.name for device in rdma_devices()}
        if len(names) != 1:
            raise DeviceError(
                errno.EINVAL, f"{self!r} listens on {', '.join(sorted(names)) or 'no device'}: which one is meant?",
                verb="Listener.context",
                hint="use request.context and request.pd of each request, or listen with device= or pd=",
            )  # fmt: skip
        return self._state.context(names.pop())

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain that accepted connections use.

        Raises:
            DeviceError: it listens on several devices, and each has its own: see `ConnectRequest.pd`.
        """
        return self._own_pd or self.context.pd

    async def get_request(self) -> ConnectRequest:
        """Wait for the next request. Cancellation: safe, no request is lost.

        Raises:
            ClosedError: the listener is closed.
            BrokenError: the devices of all its endpoints are gone.
        """
        request = None if self._closed and self._queue.empty() else await self._queue.get()
        if request is None:
            self._queue.put_nowait(None)
            if self._broken is not None and not self._closed:
                raise BrokenError(f"{self!r} has no endpoint left: {self._broken}") from self._broken
            raise ClosedError(f"{self!r} is closed")
        return request

    def _lost(self, one: Bound, reason: str) -> None:
        """The device of an endpoint is gone."""
        self._bound.remove(one)
        self.endpoints = [endpoint for _, endpoint in self._bound]
        _logger.warning("listening no more at %s port %d by %s: %s", *one.endpoint[:3], reason)
        if not self._bound:
            self._broken = BrokenError(reason)
            self._queue.put_nowait(None)

    def __aiter__(self) -> Self:
        """Iterate over requests, until it is closed; BrokenError ends it where the devices are gone."""
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
        _destroy(self._bound, self._queue)
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
            _destroy(self._bound, self._queue)
        else:  # the collector may run in any thread
            self._loop.call_soon_threadsafe(_destroy, self._bound, self._queue)

    def __repr__(self) -> str:
        where = ", ".join(f"{endpoint.host} port {endpoint.port} by {endpoint.device}" for endpoint in self.endpoints)
        return f"<Listener {where or 'nowhere'}{' closed' if self._closed else ''}>"


def _into(
    queue: asyncio.Queue[ConnectRequest | None],
    cm_id: CMID,
    state: LoopState,
    device: str | None,
    pd: ProtectionDomain | None,
    param: ConnParam,
) -> Callable[[CMEvent], None]:
    """Make what puts a listener's requests into its queue; it doesn't keep the listener itself alive."""

    def take(event: CMEvent) -> None:
        child = cm_id.child(event)
        if device not in (None, RDMA, child.device_name):
            child.destroy()  # rdma_cm has no wildcard of one device
            return
        try:
            own = pd or state.context(child.device_name, child.owner).pd
        except OSError as error:
            _logger.warning("a request from %s can't be taken: %s", child.peer_addr, error)
            child.destroy()
            return
        queue.put_nowait(ConnectRequest(child, event, own, param))

    return take


def _losing(listener: weakref.ref[Listener], one: Bound) -> Callable[[str], None]:
    """Make what tells a listener that a device is gone; it doesn't keep the listener alive."""

    def lost(reason: str) -> None:
        known = listener()
        if known is not None:
            known._lost(one, reason)  # noqa: SLF001 - its own function

    return lost


def _destroy(bound: list[Bound], queue: asyncio.Queue[ConnectRequest | None]) -> None:
    """Stop listening, and reject what nobody took."""
    for cm_id, _ in bound:
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

    Where no device is named, the address is offered by every RDMA device that has it, and by the soft device: see
    `Listener.endpoints`. Each request says by which device it came, and has that device's memory (`request.pd`). A
    loopback address is the soft device's. An RDMA device that fails is passed over, with a warning by the logger
    "aiordma"; a port number that is taken on one of them is an error.

    Args:
        host: name or address to listen at; None or "" is every address, IPv4 and IPv6.
        port: 0 for any that is free, the same on every endpoint; see `Listener.port`.
        device: "soft", "rdma" (every RDMA device) or a device's name is a demand: others don't listen. By default
            AIORDMA_DEVICE, which is a demand too; without that every device there is. A device's name with every
            address takes the port on the other RDMA devices too, and rejects what comes in by them: rdma_cm has no
            wildcard of one device.
        backlog: requests that may wait for an answer at once, connections that have not sent theirs included. More wait
            in the kernel, until you accept or reject one; those of peers that left count until then too.
        param: of the connections to be; `accept` may take others.
        pd: a protection domain of your own for their memory, which demands its device; by default each device's.

    Raises:
        DeviceError: the address is in use, or not this machine's or the device's; or there is no such device.
        AddressError: the name doesn't resolve.
        ValueError: `pd` isn't of `device`.
    """

    async def make() -> Listener:
        demand = demanded(device, pd)
        return Listener(await bind(host, port, demand, backlog), demand, param or ConnParam(), pd)

    return Opening(make)
