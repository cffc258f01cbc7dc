"""Devices, contexts and protection domains, and what aiordma keeps for each event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import weakref
from collections.abc import AsyncGenerator
from typing import Any

from attrs import frozen

from aiordma.completion import CompletionQueue
from aiordma.drivers.base import CMEvent, Driver, DriverCMChannel, DriverContext, DriverPD
from aiordma.drivers.soft.driver import SoftDriver
from aiordma.enums import Access, AsyncEventType
from aiordma.errors import ClosedError, DeviceError
from aiordma.memory import MemoryPool, MemoryRegion, anonymous, exported
from aiordma.queue_pair import QueuePair
from aiordma.types import SGE, Buffer, Capabilities, ConnParam, DeviceInfo, PortAttr

__all__ = ["AsyncEvent", "Context", "ProtectionDomain", "devices", "open_device"]

_SOFT = SoftDriver()


def drivers() -> list[Driver]:
    """The drivers that this machine can use."""
    return [_SOFT]


def devices() -> list[DeviceInfo]:
    """List this machine's RDMA devices, and those it could have with the line that says how (ibv_get_device_list)."""
    found = [device for driver in drivers() for device in driver.list_devices()]
    found.append(
        DeviceInfo(
            name="rdma",
            driver="verbs",
            transport="InfiniBand, RoCE, iWARP",
            available=False,
            detail="this version of aiordma has no verbs driver yet",
            hint="nothing to install: programs run on the soft device, unchanged",
        )
    )
    return found


@frozen
class AsyncEvent:
    """What a device reports outside of completions (struct ibv_async_event)."""

    event_type: AsyncEventType
    #: Number of the queue pair or port it is about.
    element: int
    #: In words, where the device knows.
    reason: str = ""


class Context:
    """An open device (ibv_context), for the event loop it was opened in."""

    def __init__(self, driver: DriverContext, loop: asyncio.AbstractEventLoop) -> None:
        self.driver = driver
        self.loop = loop
        self.name = driver.name
        self.capabilities: Capabilities = driver.capabilities
        self.closed = False
        self._pd: ProtectionDomain | None = None
        self._cqs: list[CompletionQueue] = []
        self._watchers: list[asyncio.Queue[AsyncEvent | None]] = []
        driver.set_async_handler(self._async_event)

    @property
    def pd(self) -> ProtectionDomain:
        """The protection domain that connections of this device and loop use unless told otherwise."""
        if self._pd is None or self._pd.closed:
            self._pd = ProtectionDomain(self)
        return self._pd

    def query_port(self, port_num: int = 1) -> PortAttr:
        """Ask for the state of a port (ibv_query_port)."""
        return self.driver.query_port(port_num)

    def cq_for(self, entries: int) -> CompletionQueue:
        """Give a completion queue with room for `entries` more requests; a further one is opened when all are full."""
        for cq in self._cqs:
            if cq.reserve(entries):
                return cq
        cq = CompletionQueue(self.driver, self.loop, max(entries, min(self.capabilities.max_cqe, 32_767)))
        self._cqs.append(cq)
        cq.reserve(entries)
        return cq

    async def events(self) -> AsyncGenerator[AsyncEvent, None]:
        """Iterate over the device's asynchronous events from now on (ibv_get_async_event)."""
        queue: asyncio.Queue[AsyncEvent | None] = asyncio.Queue()
        self._watchers.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.remove(queue)

    def _async_event(self, event_type: AsyncEventType, element: int, reason: str) -> None:
        for cq in self._cqs:
            qp = cq.qps.get(element)
            if qp is not None and event_type in _QP_FAULTS:
                cq.poll()  # a completion that waits says more: which request, and what is wrong with it
                qp.fault(reason, peers=event_type == AsyncEventType.QP_ACCESS_ERR)
        for queue in self._watchers:
            queue.put_nowait(AsyncEvent(event_type, element, reason))

    def close(self) -> None:
        """Close the device; its protection domains and queues go with it. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for queue in self._watchers:
            queue.put_nowait(None)
        for cq in self._cqs:
            for qp in list(cq.qps.values()):
                qp.refuse(ClosedError(f"{self!r} was closed"))
                qp.close()
            cq.close()
        if self._pd is not None:
            self._pd.close()
        self.driver.close()

    def __repr__(self) -> str:
        return f"<Context {self.name}>"


_QP_FAULTS = (AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR)


class ProtectionDomain:
    """A protection domain (ibv_pd): memory and queue pairs of one may be used together, and only they."""

    def __init__(self, context: Context) -> None:
        if context.closed:
            raise ClosedError(f"{context!r} is closed")
        self.context = context
        self.driver: DriverPD = context.driver.alloc_pd()
        self.pool = MemoryPool(self)
        self.closed = False
        self._qps: weakref.WeakSet[QueuePair] = weakref.WeakSet()
        self._regions: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()

    def register(self, buffer: Buffer, *, access: Access | None = None) -> MemoryRegion:
        """Register a buffer (ibv_reg_mr): bytearray, mmap, array, NumPy array, anything contiguous.

        Args:
            buffer: its export is held until the region is closed.
            access: LOCAL_WRITE by default, or nothing for a read-only buffer, which can then only be sent from.
                Remote access is given only by name.

        Raises:
            ValueError: the buffer is read-only, and `access` writes.
            TypeError: it isn't contiguous.
        """
        if self.closed:
            raise ClosedError("the protection domain is closed")
        if access is None:
            access = Access(0) if memoryview(buffer).readonly else Access.LOCAL_WRITE
        elif access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC):
            access |= Access.LOCAL_WRITE  # verbs demand it (ibv_reg_mr)
        region = MemoryRegion(self, exported(buffer, access), access)
        self._regions.add(region)
        return region

    def alloc(self, length: int, *, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Allocate registered memory: from the pool for local use, else a zeroed region with a key of its own."""
        if length < 0:
            raise ValueError(f"length is {length}")
        if access == Access.LOCAL_WRITE:
            return self.pool.alloc(length)
        return self.register(anonymous(length), access=access)

    def create_qp(self, param: ConnParam | None = None) -> QueuePair:
        """Create a queue pair (ibv_create_qp) whose completions resolve futures of this loop."""
        param = param or ConnParam()
        qp = QueuePair(self.context.driver, self.driver, self.context.cq_for, self.context.loop, param)
        self._qps.add(qp)
        return qp

    async def idle(self, memory: SGE) -> None:
        """Wait until no posted request of this domain names any of `memory`."""
        for qp in list(self._qps):
            await qp.idle(memory)

    def close(self) -> None:
        """Free the domain and its pool (ibv_dealloc_pd); its queue pairs end first, its regions with it. Idempotent."""
        if not self.closed:
            self.closed = True
            for qp in list(self._qps):
                qp.refuse(ClosedError("the protection domain was closed"))
                qp.close()
            self.pool.close()
            for region in list(self._regions):
                region.deregister()
            self.driver.close()


class LoopState:
    """What aiordma keeps for one event loop: open devices and connection manager channels."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._contexts: dict[str, Context] = {}
        self._channels: dict[str, DriverCMChannel] = {}
        #: Who takes the events of an identifier of a driver's.
        self.handlers: dict[Any, Any] = {}

    def context(self, name: str) -> Context:
        """Give the open device of this name, opening it at first."""
        context = self._contexts.get(name)
        if context is None or context.closed:
            context = self._contexts[name] = Context(driver_of(name).open(name, self._loop), self._loop)
        return context

    def channel(self, driver: Driver) -> DriverCMChannel:
        """Give the driver's event channel."""
        channel = self._channels.get(driver.name)
        if channel is None:
            channel = self._channels[driver.name] = driver.create_cm_channel(self._loop, self._cm_event)
        return channel

    def _cm_event(self, event: CMEvent) -> None:
        handler = self.handlers.get(event.listen_id or event.id)
        if handler is not None:
            handler(event)


_states: dict[asyncio.AbstractEventLoop, LoopState] = {}


def loop_state() -> LoopState:
    """Give the running loop's state."""
    loop = asyncio.get_running_loop()
    state = _states.get(loop)
    if state is None:
        # A state refers to its loop, so weak keys wouldn't free it: those of closed loops go when another one comes.
        for closed in [known for known in list(_states) if known.is_closed()]:
            _states.pop(closed, None)  # loops may live in several threads
        state = _states[loop] = LoopState(loop)
    return state


def driver_of(name: str) -> Driver:
    """Give the driver that has a device of this name.

    Raises:
        DeviceError: there is none.
    """
    for driver in drivers():
        if any(device.name == name and device.available for device in driver.list_devices()):
            return driver
    here = ", ".join(device.name for device in devices() if device.available)
    what = "no RDMA device is usable here" if name == "rdma" else f"no device is named {name!r}"
    raise DeviceError(
        errno.ENODEV, what, verb="open_device", hint=f"here: {here}; run `aiordma devices` for what is missing"
    )


def choose_device(device: str | None) -> str:
    """Give the name of the device to use: what was asked for, else AIORDMA_DEVICE, else the best there is."""
    name = device or os.environ.get("AIORDMA_DEVICE") or "soft"
    driver_of(name)
    return name


def open_device(name: str | None = None) -> Context:
    """Open a device for the running loop (ibv_open_device); a second call gives the same context.

    Raises:
        DeviceError: there is no device of this name; the text says which there are.
    """
    return loop_state().context(choose_device(name))
