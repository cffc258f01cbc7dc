"""`connect()`: find the peer's addresses, the device, and make a connection."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable
from typing import Final, TypeVar

from attrs import frozen

from aiordma.cm import CMID, resolve_host
from aiordma.connection import Connection, PrivateData, check_private_data
from aiordma.device import (
    RDMA,
    ProtectionDomain,
    demanded,
    driver_of,
    loop_state,
    rdma_driver,
    soft_driver,
)
from aiordma.drivers.base import Driver
from aiordma.enums import RejectReason
from aiordma.errors import (
    AddressError,
    ConnectError,
    ConnectTimeoutError,
    DeviceError,
    RejectedError,
    RouteError,
    UnreachableError,
)
from aiordma.opening import Opening
from aiordma.types import ConnParam, SocketAddress

__all__ = ["connect"]

_logger = logging.getLogger("aiordma")

_T = TypeVar("_T")

#: Tries where the peer still holds a connection that ours can't be told from, and seconds between them.
_STALE_TRIES: Final = 4
_STALE_PAUSE = 0.05


def connect(
    host: str,
    port: int,
    *,
    device: str | None = None,
    private_data: PrivateData = b"",
    param: ConnParam | None = None,
    local_addr: tuple[str, int] | None = None,
    pd: ProtectionDomain | None = None,
    fallback_delay: float | None = 1.0,
) -> Opening[Connection]:
    """Connect to a listener: `async with aiordma.connect(host, port) as conn`, or `conn = await aiordma.connect(...)`.

    Where no device is named, a loopback address is reached by the soft device. Any other is tried by RDMA first, if
    there is an RDMA device; and then by the soft device if RDMA doesn't get there: no device, no address or route,
    nothing listens there, or no answer within `fallback_delay`. What the peer's program rejects stays rejected. The
    logger "aiordma" says which device was taken, and why.

    Cancellation: closes what it had. For a time limit, use `asyncio.timeout`.

    Args:
        host: name or address, IPv4 or IPv6; each address it resolves to is tried in turn.
        port: the listener's.
        device: "soft", "rdma" (any RDMA device) or a device's name is a demand: no other is tried. By default
            AIORDMA_DEVICE, which is a demand too; without that whichever reaches the peer.
        private_data: bytes the listener's program sees with the request; the limit is the device's. Or a function that
            makes them of the connection to be, when its device is known: its `alloc` gives regions to put in.
        param: queue sizes, depths, time-outs.
        local_addr: address and port of this side, 0 for any port.
        pd: a protection domain of your own, which demands its device; by default the device's.
        fallback_delay: seconds for RDMA to find the way, and again for the peer to answer, before the soft device is
            tried; None: as long as that takes.

    Raises:
        AddressError: the name doesn't resolve, no device reaches it, or another one than demanded. Of several failures
            the first is raised, with the others as its notes.
        RejectedError: the peer's program said no, with its private data; or nothing listens there.
        UnreachableError, ConnectTimeoutError: the host didn't answer.
        DeviceError: there is no such device.
        ValueError: the private data is too long, or `pd` isn't of `device`.
    """

    async def make() -> Connection:
        what = _Wanted(demanded(device, pd), private_data, param or ConnParam(), local_addr, pd, fallback_delay)
        return await _connect(host, port, what)

    return Opening(make)


@frozen
class _Wanted:
    """What a call of `connect()` asks for."""

    #: A device's name, "rdma", or None.
    device: str | None
    private_data: PrivateData
    param: ConnParam
    local_addr: tuple[str, int] | None
    pd: ProtectionDomain | None
    fallback_delay: float | None


async def _connect(host: str, port: int, wanted: _Wanted) -> Connection:
    demand = driver_of(wanted.device) if wanted.device else None
    addresses = await resolve_host(host, port)
    soft = soft_driver()
    errors: list[ConnectError] = []
    left: list[SocketAddress] = []
    for address in addresses:
        if demand is not None:
            driver, why = demand, f"{wanted.device} is asked for"
        elif is_loopback(address):
            driver, why = soft, "the address is this host's own"
        elif (rdma := rdma_driver()) is None:
            driver, why = soft, "there is no RDMA device"
        else:
            driver, why = rdma, "RDMA reaches it"
        try:
            return await _try(driver, address, wanted, why, may_fall_back=demand is None and driver is not soft)
        except ConnectError as error:
            if _is_final(error):
                raise
            errors.append(error)
            if demand is None and driver is not soft and _lets_fall_back(error):
                left.append(address)
    for address in left:
        try:
            return await _try(soft, address, wanted, f"RDMA failed: {errors[0]}")
        except ConnectError as error:
            if _is_final(error):
                raise
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"and: {other}")
    raise errors[0]


def is_loopback(address: SocketAddress) -> bool:
    """Whether a connection to this address stays in this host, by an interface that no RDMA device has."""
    ip = ipaddress.ip_address(address[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified


def _is_final(error: ConnectError) -> bool:
    """Whether the peer's program has spoken."""
    return isinstance(error, RejectedError) and error.status == RejectReason.CONSUMER_DEFINED


def _lets_fall_back(error: ConnectError) -> bool:
    """Whether a failure says that RDMA doesn't get there, rather than that something went wrong there."""
    if isinstance(error, RejectedError):
        return error.status == RejectReason.INVALID_SERVICE_ID
    return isinstance(error, (AddressError, RouteError, UnreachableError, ConnectTimeoutError))


async def _try(
    driver: Driver, address: SocketAddress, wanted: _Wanted, why: str, *, may_fall_back: bool = False
) -> Connection:
    """Connect by one driver to one address; a stale connection at the peer is waited out."""
    for tries in range(1, _STALE_TRIES + 1):
        try:
            connection = await _connect_address(driver, address, wanted, may_fall_back=may_fall_back)
        except RejectedError as error:
            if error.status != RejectReason.STALE_CONNECTION or tries == _STALE_TRIES:
                raise
            _logger.info("%s: the peer still holds an old connection, once more", address[0])
            await asyncio.sleep(_STALE_PAUSE)
        else:
            took = _logger.info if driver is soft_driver() and not is_loopback(address) else _logger.debug
            took("connected to %s by %s: %s", address[0], connection.device, why)
            return connection
    raise AssertionError("unreachable: the last try returns or raises")


async def _connect_address(
    driver: Driver, address: SocketAddress, wanted: _Wanted, *, may_fall_back: bool
) -> Connection:
    state = loop_state()
    patience = wanted.fallback_delay if may_fall_back else None
    try:
        state.channel(driver)  # loads a library at first, which is no time of the peer's
        cm_id = await _within(patience, address, _resolve(driver, address, wanted))
        try:
            context = state.context(cm_id.device_name, driver)
        except BaseException:
            cm_id.destroy()
            raise
    except DeviceError as error:
        if may_fall_back:  # no device is usable: the peer isn't reached by RDMA
            raise AddressError(f"can't use RDMA: {error}") from error
        raise
    try:
        limit = context.capabilities.max_connect_private_data
        if not callable(wanted.private_data):
            check_private_data(wanted.private_data, limit)
        connection = Connection(cm_id, wanted.pd or context.pd, wanted.param)
    except BaseException:
        cm_id.destroy()
        raise
    await _within(patience, address, connection.establish(cm_id.connect, wanted.private_data, limit))
    return connection


async def _within(seconds: float | None, address: SocketAddress, step: Awaitable[_T]) -> _T:
    """Wait for a step, so long if a limit is given.

    Raises:
        ConnectTimeoutError: it took longer, and was cancelled.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await step
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ConnectTimeoutError(f"can't connect to {address}: no answer by RDMA within {seconds:g} s") from error


async def _resolve(driver: Driver, address: SocketAddress, wanted: _Wanted) -> CMID:
    """Find the device that reaches an address; if it isn't the one asked for, once more from that one's address.

    Raises:
        DeviceError: the connection manager can't be used.
        AddressError, RouteError: none reaches it, or another one does.
    """
    state = loop_state()
    source = await _local_address(wanted.local_addr, address) if wanted.local_addr else None
    timeout = wanted.param.resolve_timeout
    cm_id = CMID(state, driver)
    try:
        await cm_id.resolve_addr(address, source, timeout=timeout)
        name = wanted.device
        if name not in (None, RDMA, cm_id.device_name):
            reached_by = cm_id.device_name
            other = None if source else _address_of(driver, name, address)
            if other is not None:
                cm_id.destroy()
                cm_id = CMID(state, driver)
                await cm_id.resolve_addr(address, other, timeout=timeout)
            if cm_id.device_name != name:
                raise AddressError(f"{address[0]} is reached by device {reached_by}, and {name} is asked for")  # noqa: TRY301
        await cm_id.resolve_route(timeout=timeout)
    except BaseException:
        cm_id.destroy()
        raise
    return cm_id


def _address_of(driver: Driver, name: str | None, peer: SocketAddress) -> SocketAddress | None:
    """Give an address of a device's that a connection to `peer` can come from."""
    for device in driver.list_devices():
        if device.name == name:
            for address in device.addresses:
                if (":" in address) == (":" in peer[0]):
                    return (address, 0, *peer[2:])
    return None


async def _local_address(local_addr: tuple[str, int], address: SocketAddress) -> SocketAddress:
    """Resolve this side's address, in the family of the peer's."""
    found = await resolve_host(*local_addr)
    for candidate in found:
        if len(candidate) == len(address):
            return candidate
    raise AddressError(f"{local_addr[0]} has no address of the family of {address[0]}")
