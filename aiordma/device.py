"""Devices, contexts and protection domains, and what aiordma keeps for each event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Final, Protocol, get_args

from attrs import frozen

from aiordma.completion import CompletionQueue
from aiordma.domain import ProtectionDomain
from aiordma.drivers.base import CMEvent, Driver, DriverCMChannel, DriverCMID, DriverContext
from aiordma.drivers.soft.driver import SoftDriver
from aiordma.enums import AsyncEventType, CMEventType
from aiordma.errors import AddressError, BrokenError, BusyError, ClosedError, DeviceError, RDMAError, UnsupportedError
from aiordma.spinning import CompletionMode, SpinningQueue
from aiordma.types import Capabilities, DeviceInfo, GIDEntry, PortAttr

__all__ = ["AsyncEvent", "Context", "ProtectionDomain", "devices", "open_device"]

_logger = logging.getLogger("aiordma")

#: The software device: its name, and its driver's.
SOFT: Final = "soft"
#: Demands any RDMA device.
RDMA: Final = "rdma"

_SOFT_DRIVER: Final = SoftDriver()
#: Where the kernel lists its RDMA devices.
_SYSFS: Final = Path("/sys/class/infiniband")


@functools.cache
def _verbs_driver() -> Driver:
    """Give the verbs driver. What it needs is loaded when a device is asked for, not here."""
    from aiordma.drivers.verbs.driver import VerbsDriver  # noqa: PLC0415 - the price is paid where it is of use

    return VerbsDriver()


def _kernel_has_devices() -> bool:
    """Whether there is any RDMA device: costs one look, where listing them costs a library."""
    try:
        return any(_SYSFS.iterdir())
    except OSError:
        return False


def soft_driver() -> Driver:
    """Give the driver of the software device."""
    return _SOFT_DRIVER


def rdma_driver() -> Driver | None:
    """Give the driver of the kernel's RDMA devices, if there is any device."""
    return _verbs_driver() if _kernel_has_devices() else None


def drivers() -> list[Driver]:
    """The drivers there are."""
    return [_SOFT_DRIVER, _verbs_driver()]


def devices() -> list[DeviceInfo]:
    """List this machine's RDMA devices, and those it could have with the line that says how (ibv_get_device_list)."""
    return [device for driver in drivers() for device in driver.list_devices()]


def rdma_devices() -> list[DeviceInfo]:
    """List the RDMA devices that can be used."""
    driver = rdma_driver()
    return [] if driver is None else [device for device in driver.list_devices() if device.available]


@frozen
class AsyncEvent:
    """What a device reports outside of completions (struct ibv_async_event)."""

    event_type: AsyncEventType
    #: Number of the queue pair or port it is about.
    element: int
    #: In words, where the device knows.
    reason: str = ""


class Context:
    """An open device (ibv_context), for the event loop it was opened in.

    When the device is removed, or reports that it failed, everything of it ends: requests with BrokenError, its queue
    pairs, regions and protection domains are closed, and so is the context. `open_device()` and connections then open
    the device anew, once it is back.

    Attributes:
        name: the device's.
        capabilities: what it can do.
        closed: by `close()` or since the device is gone.
        removed: why, if the device is gone.
    """

    def __init__(
        self,
        driver: DriverContext,
        loop: asyncio.AbstractEventLoop,
        on_removed: Callable[[str, str], None] | None = None,
    ) -> None:
        self.driver = driver
        self.loop = loop
        self.name = driver.name
        self.capabilities: Capabilities = driver.capabilities
        self.closed = False
        self.removed: BrokenError | None = None
        self._on_removed = on_removed or self._removed_alone
        self._pd: ProtectionDomain | None = None
        self._pds: weakref.WeakSet[ProtectionDomain] = weakref.WeakSet()
        self._cqs: list[CompletionQueue] = []
        self._completion_mode: CompletionMode = "event"
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
        self.check_open()
        return self.driver.query_port(port_num)

    def query_gids(self, port_num: int = 1) -> list[GIDEntry]:
        """List the port's GID table (ibv_query_gid_table), without its empty entries; iWARP devices have none."""
        self.check_open()
        return self.driver.query_gids(port_num)

    def gid_for(self, address: str | None = None, *, port_num: int = 1) -> GIDEntry:
        """Choose the GID of an address of this side's, RoCE v2's where there are several.

        Args:
            address: IPv4 or IPv6, or a GID in IPv6's notation. None: a routable address's, IPv4's first.
            port_num: of the device.

        Raises:
            AddressError: there is none; the text lists what is there.
        """
        found = self.query_gids(port_num)
        wanted = [entry for entry in found if address is None or entry.address == str(ipaddress.ip_address(address))]
        if not wanted:
            here = ", ".join(sorted({entry.address for entry in found})) or "none"
            raise AddressError(f"{self.name} port {port_num} has no GID of {address or 'any address'}; it has: {here}")
        return min(wanted, key=_gid_rank)

    @property
    def completion_mode(self) -> CompletionMode:
        """How completions are noticed: "event" (the default), "busy" or "adaptive".

        "event" waits for the completion channel: idle connections cost nothing, each operation a wake-up. "busy" polls
        in every turn of the loop while requests are in flight: the shortest latency, for a whole core. "adaptive" polls
        for 20 us after each completion, then waits for an event; it is "event" where the process may use one core only.
        Set it before the device's first queue pair.

        Raises:
            BusyError: (setting it) there are queue pairs already.
            ValueError: (setting it) there is no such mode.
        """
        return self._completion_mode

    @completion_mode.setter
    def completion_mode(self, mode: CompletionMode) -> None:
        if mode not in get_args(CompletionMode):
            raise ValueError(f"a completion mode is one of {get_args(CompletionMode)}, not {mode!r}")
        if self._cqs:
            raise BusyError(f"{self!r} has queue pairs: set the completion mode before the first one")
        alone = mode == "adaptive" and len(os.sched_getaffinity(0)) == 1
        self._completion_mode = "event" if alone else mode

    def check_open(self) -> None:
        """Raise if it can't be used any more.

        Raises:
            BrokenError: the device is gone.
            ClosedError: it was closed.
        """
        if self.closed:
            raise self.unusable()

    def unusable(self) -> RDMAError:
        """Make the exception that says why it can't be used any more."""
        if self.removed is None:
            return ClosedError(f"{self!r} is closed")
        error = BrokenError(str(self.removed))
        error.__cause__ = self.removed
        return error

    def require(self, capability: str, what: str) -> None:
        """Raise UnsupportedError, which names the capability, where the device lacks it."""
        if not getattr(self.capabilities, capability):
            raise UnsupportedError(f"device {self.name} can't do {what}; see Capabilities.{capability}")

    def own(self, pd: ProtectionDomain) -> None:
        """A protection domain was made: it is closed with the context."""
        self._pds.add(pd)

    def cq_for(self, entries: int) -> CompletionQueue:
        """Give a completion queue with room for `entries` more requests; a further one is opened when all are full."""
        self.check_open()
        for cq in self._cqs:
            if cq.reserve(entries):
                return cq
        cqe = max(entries, min(self.capabilities.max_cqe, 32_767))
        if self._completion_mode == "event":
            cq = CompletionQueue(self.driver, self.loop, cqe)
        else:
            cq = SpinningQueue(self.driver, self.loop, cqe, self._completion_mode)
        self._cqs.append(cq)
        cq.reserve(entries)
        return cq

    async def events(self) -> AsyncGenerator[AsyncEvent, None]:
        """Iterate over the device's asynchronous events from now on (ibv_get_async_event).

        Ends when the context is closed. The last event of a device that is gone is DEVICE_FATAL, if it was removed too.
        """
        if self.closed:
            return
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
        if event_type == AsyncEventType.DEVICE_FATAL:
            # Not at once: this is a call of the driver's that is to be closed. fail() tells the watchers.
            self.loop.call_soon(self._on_removed, self.name, reason)
            return
        self._tell(AsyncEvent(event_type, element, reason))

    def _tell(self, event: AsyncEvent | None) -> None:
        for queue in self._watchers:
            queue.put_nowait(event)

    def _removed_alone(self, _: str, reason: str) -> None:
        self.fail(reason)
        self.close()

    def fail(self, reason: str) -> BrokenError:
        """The device is gone: end every request and queue pair; `close()` lets go of the rest. Idempotent.

        Completions aren't waited for: a device that goes need not give any.
        """
        if self.removed is None:
            self.removed = BrokenError(f"device {self.name} is gone: {reason or 'it was removed'}")
            _logger.warning("%s", self.removed)
            self._tell(AsyncEvent(AsyncEventType.DEVICE_FATAL, 0, reason))
            for cq in self._cqs:
                for qp in list(cq.qps.values()):
                    qp.vanish(self.removed)
        return self.removed

    def close(self) -> None:
        """Close the device; its protection domains and queues go with it. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._tell(None)
        for cq in self._cqs:
            for qp in list(cq.qps.values()):
                qp.refuse(ClosedError(f"{self!r} was closed"))
                qp.close()
        parts = [*[pd.close for pd in self._pds], *[cq.close for cq in self._cqs], self.driver.close]
        for close in parts:
            if self.removed is None:
                close()
                continue
            try:  # of a device that is gone something may fail, and the rest must go all the same
                close()
            except OSError as error:
                _logger.warning("%r, whose device is gone: %s", self, error)

    def __repr__(self) -> str:
        return f"<Context {self.name}>"


def _gid_rank(entry: GIDEntry) -> tuple[bool, bool, bool, int]:
    """Order GIDs: RoCE v2 before v1, addresses that are routed before link-local ones, IPv4's first."""
    address = ipaddress.ip_address(entry.address)
    return entry.kind == "roce1", entry.kind != "ib" and address.is_link_local, address.version != 4, entry.index


_QP_FAULTS = (AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR)


class _Identifier(Protocol):
    """What is kept of an identifier of the connection manager: `aiordma.cm.CMID`, one floor up."""

    def on_event(self, event: CMEvent) -> None: ...
    def device_removed(self, name: str, failure: BrokenError) -> None: ...


class LoopState:
    """What aiordma keeps for one event loop: open devices and connection manager channels."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._contexts: dict[str, Context] = {}
        self._channels: dict[str, DriverCMChannel] = {}
        #: The identifiers, by the driver's.
        self.ids: dict[DriverCMID, _Identifier] = {}
        #: Its end is the loop's.
        self.until_shutdown: AsyncGenerator[None, None] | None = None

    def context(self, name: str, driver: Driver | None = None) -> Context:
        """Give the open device of this name, opening it at first.

        Raises:
            DeviceError: there is no such device, or it can't be opened.
        """
        context = self._contexts.get(name)
        if context is None or context.closed or context.removed is not None:
            opened = (driver or driver_of(name)).open(name, self._loop)
            context = self._contexts[name] = Context(opened, self._loop, self._device_removed)
        return context

    def channel(self, driver: Driver) -> DriverCMChannel:
        """Give the driver's event channel."""
        channel = self._channels.get(driver.name)
        if channel is None:
            channel = self._channels[driver.name] = driver.create_cm_channel(self._loop, self._cm_event)
        return channel

    def _cm_event(self, event: CMEvent) -> None:
        if event.event == CMEventType.DEVICE_REMOVAL and event.id.device_name is not None:
            # Not at once: the channel may have more for identifiers that are destroyed then.
            self._loop.call_soon(self._device_removed, event.id.device_name, event.reason)
            return
        cm_id = self.ids.get(event.listen_id or event.id)
        if cm_id is not None:
            cm_id.on_event(event)

    def _device_removed(self, name: str, reason: str) -> None:
        """A device is gone: end everything of it, and let go of all of it, so that the kernel can finish."""
        context = self._contexts.pop(name, None)
        failure = BrokenError(f"device {name} is gone") if context is None else context.fail(reason)
        for cm_id in list(self.ids.values()):
            cm_id.device_removed(name, failure)
        if context is not None:
            context.close()

    def close(self) -> None:
        """Close the devices and channels: the loop ends."""
        for context in list(self._contexts.values()):
            context.close()
        for channel in self._channels.values():
            channel.close()
        self._contexts.clear()
        self._channels.clear()


_states: dict[asyncio.AbstractEventLoop, LoopState] = {}


async def _until_shutdown(loop: asyncio.AbstractEventLoop, state: LoopState) -> AsyncGenerator[None, None]:
    """Close a loop's state with it: asyncio.run() and its like close the asynchronous generators that are left."""
    try:
        yield
    finally:
        state.close()
        _states.pop(loop, None)


def loop_state() -> LoopState:
    """Give the running loop's state."""
    loop = asyncio.get_running_loop()
    state = _states.get(loop)
    if state is None:
        # A state refers to its loop, so weak keys wouldn't free it: those of closed loops go when another one comes.
        for closed in [known for known in list(_states) if known.is_closed()]:
            _states.pop(closed, None)  # loops may live in several threads
        state = _states[loop] = LoopState(loop)
        state.until_shutdown = _until_shutdown(loop, state)
        with contextlib.suppress(StopIteration):  # runs to its yield, which needs no turn of the loop
            state.until_shutdown.asend(None).send(None)
    return state


def driver_of(name: str) -> Driver:
    """Give the driver that has a usable device of this name; "rdma" is any RDMA device.

    Raises:
        DeviceError: there is none; the text says which there are, and what is missing.
    """
    if name == SOFT:
        return _SOFT_DRIVER
    for device in rdma_devices():
        if name in (device.name, RDMA):
            return _verbs_driver()
    known = devices()
    here = ", ".join(device.name for device in known if device.available)
    what = "no RDMA device is usable here" if name == RDMA else f"no device is named {name!r}"
    hint = f"here: {here}; run `aiordma devices` for what is missing"
    for device in known:
        if not device.available and name in (device.name, RDMA):
            what = f"device {name!r} can't be used" if name == device.name != RDMA else what
            hint = f"{device.hint}; {hint}" if device.hint else hint
            break
    raise DeviceError(errno.ENODEV, what, verb="open_device", hint=hint)


def demanded(device: str | None, pd: ProtectionDomain | None = None) -> str | None:
    """Give the device that must be used: a name or "rdma", as asked for, else AIORDMA_DEVICE; None: whichever fits.

    Args:
        device: what the caller asks for.
        pd: memory of the caller's own: its device is the only one that can use it.

    Raises:
        ValueError: `device` and `pd` contradict each other.
    """
    if pd is None:
        return device or os.environ.get("AIORDMA_DEVICE") or None
    name = pd.context.name
    if device and device != name and (device != RDMA or name == SOFT):
        raise ValueError(f"the protection domain is of {name}, but device is {device!r}")
    return name


def open_device(name: str | None = None) -> Context:
    """Open a device for the running loop (ibv_open_device); a second call gives the same context.

    Args:
        name: of the device, or "rdma"; by default AIORDMA_DEVICE, else the first RDMA device, else "soft".

    Raises:
        DeviceError: there is no device of this name; the text says which there are.
    """
    wanted = demanded(name)
    if wanted in (None, RDMA):
        usable = rdma_devices()
        wanted = usable[0].name if usable else wanted or SOFT
    return loop_state().context(wanted, driver_of(wanted))
