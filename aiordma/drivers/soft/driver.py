"""The soft device as a driver."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from aiordma.drivers.base import CMEvent
from aiordma.drivers.soft.cm import SoftCMChannel
from aiordma.drivers.soft.mpa import CRC32C_AVAILABLE
from aiordma.drivers.soft.rnic import NAME, SoftContext
from aiordma.errors import DeviceError
from aiordma.types import DeviceInfo


class SoftDriver:
    """One device, named soft, on every machine."""

    name = "soft"

    def __init__(self) -> None:
        self._contexts: dict[asyncio.AbstractEventLoop, SoftContext] = {}

    def list_devices(self) -> list[DeviceInfo]:
        """It is always here."""
        crc = "CRC32C in hardware" if CRC32C_AVAILABLE else "no CRC32C: pip install 'aiordma[crc]'"
        return [
            DeviceInfo(
                name=NAME,
                driver=self.name,
                transport="iWARP over TCP, in software",
                available=True,
                detail=f"MPA revisions 1 and 2, {crc}",
            )
        ]

    def open(self, name: str, loop: asyncio.AbstractEventLoop) -> SoftContext:
        """Open the device for a loop; a second open of the same loop is the same device."""
        if name != NAME:
            raise DeviceError(
                errno.ENODEV, f"no soft device is named {name!r}", verb="open", hint=f"its name is {NAME!r}"
            )
        context = self._contexts.get(loop)
        if context is None:
            for closed in [known for known in list(self._contexts) if known.is_closed()]:
                self._contexts.pop(closed, None)
            context = self._contexts[loop] = SoftContext(loop)
        return context

    def create_cm_channel(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[CMEvent], None]) -> SoftCMChannel:
        """Create the connection manager's event channel for a loop."""
        return SoftCMChannel(self.open(NAME, loop), on_event)
