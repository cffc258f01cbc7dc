"""RDMA devices of the kernel, as a driver. pyverbs and librdmacm are loaded when one is used, not before."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiordma.drivers.base import CMEvent
from aiordma.drivers.verbs import sysfs
from aiordma.errors import DeviceError
from aiordma.types import DeviceInfo

if TYPE_CHECKING:
    from aiordma.drivers.verbs.cm_channel import VerbsCMChannel
    from aiordma.drivers.verbs.context import VerbsContext

__all__ = ["VerbsDriver"]

_FILES: Final = Path("/dev/infiniband")
_PYVERBS_HINT: Final = (
    "apt install python3-pyverbs (or dnf), and a virtual environment with --system-site-packages of the system's Python"
)
_FILES_HINT: Final = "modprobe ib_uverbs rdma_ucm; in a container: --device=/dev/infiniband"
_NONE_HINT: Final = (
    "a driver of an RDMA adapter, or in software: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
)


class VerbsDriver:
    """InfiniBand, RoCE and iWARP: hardware, and the kernel's rxe and siw."""

    name = "verbs"

    def list_devices(self) -> list[DeviceInfo]:
        """List them from /sys, without opening one; or say in one entry, named rdma, what is missing."""
        names = sysfs.names()
        if not names:
            return [
                DeviceInfo(
                    name="rdma", driver=self.name, transport="InfiniBand, RoCE, iWARP", available=False,
                    detail="the kernel has no RDMA device", hint=_NONE_HINT,
                )
            ]  # fmt: skip
        hint = _missing()
        return [self._info(name, hint) for name in names]

    def _info(self, name: str, hint: str) -> DeviceInfo:
        iwarp = sysfs.is_iwarp(name)
        link_layer = sysfs.port_text(name, 1, "link_layer")
        interfaces = sysfs.interfaces_of(name)
        states = [sysfs.port_text(name, port, "state").partition(": ")[2].lower() for port in sysfs.ports_of(name)]
        return DeviceInfo(
            name=name,
            driver=self.name,
            transport="iWARP" if iwarp else "InfiniBand" if link_layer == "InfiniBand" else "RoCE",
            available=not hint,
            detail=f"port {' '.join(states)}" + (f", on {' '.join(interfaces)}" if interfaces else ""),
            hint=hint,
            interfaces=interfaces,
            addresses=sysfs.addresses_of(interfaces),
            takes_tcp_ports=iwarp,
        )

    def open(self, name: str, loop: asyncio.AbstractEventLoop) -> VerbsContext:
        """Open a device for a loop (ibv_open_device).

        Raises:
            DeviceError: there is none of that name, no permission, or no pyverbs; the text says what to do.
        """
        if name not in sysfs.names():
            raise DeviceError(
                errno.ENODEV, f"no RDMA device is named {name!r}", verb="ibv_open_device", hint="`rdma link` lists them"
            )
        from aiordma.drivers.verbs.context import VerbsContext  # noqa: PLC0415 - imports pyverbs

        return VerbsContext(name, loop)

    def create_cm_channel(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[CMEvent], None]) -> VerbsCMChannel:
        """Create the connection manager's event channel for a loop (rdma_create_event_channel)."""
        from aiordma.drivers.verbs.cm_channel import VerbsCMChannel  # noqa: PLC0415 - loads librdmacm

        return VerbsCMChannel(loop, on_event)


def _missing() -> str:
    """Say what to install or do before a device can be used; empty if nothing."""
    if find_spec("pyverbs") is None:
        return _PYVERBS_HINT
    if not any(_FILES.glob("uverbs*")):
        return _FILES_HINT
    return ""
