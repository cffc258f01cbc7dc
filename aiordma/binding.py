"""Where a listener listens: one port number, on the RDMA devices and on the soft device beside them.

InfiniBand and RoCE have ports of their own, so the soft device's ordinary socket stands beside. An iWARP device takes
TCP's port on its interfaces, and serves the soft device's peers itself: the soft device then listens on each other
interface.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from typing import Final, NamedTuple

from attrs import define, field

from aiordma.cm import CMID, resolve_host
from aiordma.connector import is_loopback
from aiordma.device import RDMA, LoopState, driver_of, loop_state, rdma_driver, soft_driver
from aiordma.drivers.base import Driver
from aiordma.errors import DeviceError, RDMAError
from aiordma.types import DeviceInfo, SocketAddress

__all__ = ["Bound", "Endpoint", "bind"]

_logger = logging.getLogger("aiordma")

#: Tries to find one port number that is free on every endpoint.
_PORT_TRIES: Final = 20
#: A kernel without IPv6 resolves it all the same; asyncio's servers pass over it too.
_NO_FAMILY: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
#: An address that no RDMA device has.
_NOT_THERE: Final = _NO_FAMILY | {errno.ENODEV}
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to

_BIND_HINTS: Final = {
    errno.EADDRINUSE: "another program listens there; take another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "this address isn't one of this machine's",
    errno.EACCES: "ports below 1024 need privileges",
}


class Endpoint(NamedTuple):
    """Where a listener listens."""

    #: The address, as text; a wildcard is every address of its family.
    host: str
    port: int
    #: The device; "rdma" is every RDMA device there is, and those to come.
    device: str
    #: The network interface it is bound to, or empty: any.
    interface: str = ""


class Bound(NamedTuple):
    """An identifier that listens, and where."""

    cm_id: CMID
    endpoint: Endpoint


async def bind(host: str | None, port: int, device: str | None, backlog: int) -> list[Bound]:
    """Listen at one port number on every endpoint; with port 0, at one that is free on all of them.

    Args:
        host: None is every address.
        port: the number.
        device: the one that is demanded, if any.
        backlog: of each.

    Raises:
        DeviceError: the number is taken on one of them, or nothing can be bound, for one since `device` doesn't have
            the address; or there is no such device.
        AddressError: the name doesn't resolve.
    """
    if device is None:
        drivers = [driver for driver in (rdma_driver(), soft_driver()) if driver is not None]
    else:
        drivers = [driver_of(device)]
    addresses = await resolve_host(host or None, port, passive=True)
    state = loop_state()
    for tries in range(_PORT_TRIES):
        binder = _Binder(state, device, port, backlog)
        try:
            for driver in drivers:
                if driver is soft_driver():
                    binder.bind_soft(driver, addresses)
                else:
                    binder.bind_rdma(driver, addresses)
                    binder.open_devices(driver)
            return binder.finish()
        except BaseException as error:
            binder.drop()
            if not isinstance(error, OSError):
                raise
            if error.errno == errno.EADDRINUSE and not port and tries < _PORT_TRIES - 1:
                continue
            if isinstance(error, RDMAError):
                raise
            raise DeviceError(
                error.errno or errno.EIO, f"can't listen at {host or '*'} port {binder.port}: {error.strerror}",
                verb="rdma_bind_addr", hint=_BIND_HINTS.get(error.errno or 0, ""),
            ) from error  # fmt: skip
    raise AssertionError("unreachable: the last try raises")


@define
class _Binder:
    """One try: what is bound so far, and to which number."""

    state: LoopState
    demand: str | None
    port: int
    backlog: int
    bound: list[Bound] = field(factory=list)
    #: Why addresses were passed over.
    skipped: list[OSError] = field(factory=list)
    #: The RDMA devices, listed if needed.
    devices: list[DeviceInfo] = field(factory=list)

    def bind_rdma(self, driver: Driver, addresses: list[SocketAddress]) -> None:
        """Listen on the RDMA devices that have the addresses; where they aren't demanded, as far as that goes."""
        try:
            self.devices = [device for device in driver.list_devices() if device.available]
            if self.demand is None and not self.devices:
                return  # what comes in by one couldn't be accepted, without pyverbs for one
        except OSError as error:
            self._pass_over(error, "the RDMA devices can't be listed")
        for address in addresses:
            if self.demand is None and is_loopback(address) and address[0] not in _WILDCARDS:
                continue  # no RDMA device has it
            try:
                self._listen(driver, address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE or (self.demand is not None and error.errno not in _NOT_THERE):
                    raise
                self._pass_over(error, f"RDMA isn't offered at {address[0]} port {self.port}")
                if address[0] in _WILDCARDS and error.errno not in _NOT_THERE:
                    self._each_address(driver, address)

    def open_devices(self, driver: Driver) -> None:
        """Open what requests may come in by: the peer of the first one shall not wait for that."""
        names = {endpoint.device for _, endpoint in self.bound}
        for device in self.devices:
            if not names & {RDMA, device.name}:
                continue
            try:
                self.state.context(device.name, driver)
            except OSError as error:
                if self.demand is not None:
                    raise
                self._pass_over(error, f"device {device.name} can't be opened, and its requests will be rejected")

    def _each_address(self, driver: Driver, wildcard: SocketAddress) -> None:
        """Where the wildcard failed, perhaps of one device only: listen at every address of every device."""
        for device in self.devices:
            for address in device.addresses:
                if (":" in address) != (":" in wildcard[0]):
                    continue
                try:
                    self._listen(driver, (address, *wildcard[1:]))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise
                    self._pass_over(error, f"device {device.name} isn't offered at {address} port {self.port}")

    def bind_soft(self, driver: Driver, addresses: list[SocketAddress]) -> None:
        """Listen on the soft device, wherever no iWARP device does that listens already."""
        rdma = [endpoint for _, endpoint in self.bound]
        for address in addresses:
            for interface in self._interfaces(address, rdma):
                try:
                    self._listen(driver, address, interface)
                except OSError as error:
                    if error.errno not in _NO_FAMILY and not (interface and error.errno in _NO_INTERFACE):
                        raise
                    self._pass_over(error, f"soft isn't offered at {address[0]} port {self.port} {interface}")

    def _interfaces(self, address: SocketAddress, rdma: list[Endpoint]) -> list[str]:
        """Give the interfaces that the soft device shall listen on; an empty name is all of them at once."""
        beside = [endpoint for endpoint in rdma if (":" in endpoint.host) == (":" in address[0])]
        names = {endpoint.device for endpoint in beside}
        iwarp = [device for device in self.devices if device.takes_tcp_ports and names & {RDMA, device.name}]
        if not iwarp:
            return [""]
        if address[0] not in _WILDCARDS:
            own = any(endpoint.host == address[0] for endpoint in beside if endpoint.device in {d.name for d in iwarp})
            return [] if own else [""]
        taken = {name for device in iwarp for name in device.interfaces}
        return [name for _, name in socket.if_nameindex() if name not in taken]

    def _listen(self, driver: Driver, address: SocketAddress, interface: str = "") -> None:
        """Bind one identifier, and listen."""
        cm_id = CMID(self.state, driver)
        try:
            cm_id.bind_addr((address[0], self.port, *address[2:]), interface=interface)
            name = cm_id.driver.device_name
            self._check(name, address)
            cm_id.listen(self.backlog)
        except BaseException:
            cm_id.destroy()
            raise
        self.port = int(cm_id.local_addr[1])
        endpoint = Endpoint(str(address[0]), self.port, name or self.demand or RDMA, interface)
        self.bound.append(Bound(cm_id, endpoint))

    def _check(self, name: str | None, address: SocketAddress) -> None:
        if self.demand not in (None, RDMA, name) and name is not None:
            text = f"{address[0]} is an address of device {name}, and {self.demand} is asked for"
            raise DeviceError(errno.EADDRNOTAVAIL, text, verb="rdma_bind_addr")

    def _pass_over(self, error: OSError, what: str) -> None:
        """Go on without an endpoint."""
        self.skipped.append(error)
        expected = error.errno in _NOT_THERE
        _logger.log(logging.DEBUG if expected else logging.WARNING, "%s: %s", what, error)

    def finish(self) -> list[Bound]:
        """Give what listens.

        Raises:
            OSError: nothing does; the first reason.
        """
        if not self.bound:
            raise self.skipped[0] if self.skipped else OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        names = ", ".join(device.name for device in self.devices) or "none"
        for _, endpoint in self.bound:
            of = f" ({names})" if endpoint.device == RDMA else ""
            on = f" on {endpoint.interface}" if endpoint.interface else ""
            _logger.info("listening at %s port %d by %s%s%s", endpoint.host, endpoint.port, endpoint.device, of, on)
        return self.bound

    def drop(self) -> None:
        """Let go of what was bound."""
        for cm_id, _ in self.bound:
            cm_id.destroy()


#: An interface that went away, or a kernel that lets only the privileged bind to one.
_NO_INTERFACE: Final = frozenset({errno.ENODEV, errno.EPERM})
