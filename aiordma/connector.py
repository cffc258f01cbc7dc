"""`connect()`: find the peer's addresses, the device, and make a connection."""

from __future__ import annotations

from aiordma.cm import CMID, resolve_host
from aiordma.connection import Connection
from aiordma.device import ProtectionDomain, choose_device, driver_of, loop_state
from aiordma.enums import RejectReason
from aiordma.errors import AddressError, ConnectError, RejectedError
from aiordma.opening import Opening
from aiordma.types import ConnParam, SocketAddress

__all__ = ["connect"]


def connect(
    host: str,
    port: int,
    *,
    device: str | None = None,
    private_data: bytes = b"",
    param: ConnParam | None = None,
    local_addr: tuple[str, int] | None = None,
    pd: ProtectionDomain | None = None,
) -> Opening[Connection]:
    """Connect to a listener: `async with aiordma.connect(host, port) as conn`, or `conn = await aiordma.connect(...)`.

    Cancellation: closes what it had. For a time limit, use `asyncio.timeout`.

    Args:
        host: name or address, IPv4 or IPv6; each address it resolves to is tried in turn.
        port: the listener's.
        device: "soft", "rdma" or a device's name; by default AIORDMA_DEVICE, else the best there is.
        private_data: bytes the listener's program sees with the request; the limit is the device's.
        param: queue sizes, depths, time-outs.
        local_addr: address and port of this side, 0 for any port.
        pd: a protection domain of your own; by default the device's.

    Raises:
        AddressError: the name doesn't resolve, or no device reaches it.
        RejectedError: the peer's program said no, with its private data; or nothing listens there.
        UnreachableError, ConnectTimeoutError: the host didn't answer.
        DeviceError: there is no such device.
        ValueError: the private data is too long.
    """

    async def make() -> Connection:
        return await _connect(host, port, device, private_data, param or ConnParam(), local_addr, pd)

    return Opening(make)


async def _connect(
    host: str,
    port: int,
    device: str | None,
    private_data: bytes,
    param: ConnParam,
    local_addr: tuple[str, int] | None,
    pd: ProtectionDomain | None,
) -> Connection:
    name = choose_device(device)
    errors: list[ConnectError] = []
    for address in await resolve_host(host, port):
        source = await _local_address(local_addr, address) if local_addr else None
        try:
            return await _connect_address(name, address, source, private_data, param, pd)
        except RejectedError as error:
            if error.status == RejectReason.CONSUMER_DEFINED:  # the peer's program has spoken
                raise
            errors.append(error)
        except ConnectError as error:
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"and: {other}")
    raise errors[0]


async def _local_address(local_addr: tuple[str, int], address: SocketAddress) -> SocketAddress:
    """Resolve this side's address, in the family of the peer's."""
    found = await resolve_host(*local_addr)
    for candidate in found:
        if len(candidate) == len(address):
            return candidate
    raise AddressError(f"{local_addr[0]} has no address of the family of {address[0]}")


async def _connect_address(
    device: str,
    address: SocketAddress,
    source: SocketAddress | None,
    private_data: bytes,
    param: ConnParam,
    pd: ProtectionDomain | None,
) -> Connection:
    state = loop_state()
    cm_id = CMID(state, driver_of(device))
    try:
        await cm_id.resolve_addr(address, source)
        await cm_id.resolve_route()
        context = state.context(cm_id.device_name)
        check_private_data(private_data, context.capabilities.max_connect_private_data)
        connection = Connection(cm_id, pd or context.pd, param)
    except BaseException:
        cm_id.destroy()
        raise
    await connection.establish(cm_id.connect, private_data)
    return connection


def check_private_data(private_data: bytes, limit: int) -> None:
    """Refuse private data that the transport can't carry, before anything is sent."""
    if len(private_data) > limit:
        raise ValueError(f"private data has {len(private_data)} bytes, this device carries {limit}")
