"""A payload on its way from the socket straight to where it belongs. No I/O: the link reads into its views."""

from __future__ import annotations

from aiordma.drivers.soft.receive_queue import Message
from aiordma.drivers.soft.stag import Region


class Placement:
    """The rest of an FPDU that goes from the socket straight into registered memory.

    Attributes:
        region: of a WRITE, that of the memory, while it is registered.
        revoked: it was deregistered meanwhile.
    """

    __slots__ = ("control", "left", "message", "region", "revoked", "size", "tail", "views")

    def __init__(
        self,
        control: int,
        views: list[memoryview],
        size: int,
        tail: int,
        *,
        message: Message | None = None,
        region: Region | None = None,
    ) -> None:
        self.control = control
        self.views = views
        self.left = sum(map(len, views))
        #: Payload of the whole FPDU.
        self.size = size
        #: Pad and CRC field behind the payload.
        self.tail = tail
        self.message = message
        self.region = region
        self.revoked = False
        if region is not None:
            region.borrowers.add(self)

    def end(self) -> None:
        """Nothing more is placed."""
        if self.region is not None:
            self.region.borrowers.discard(self)

    def revoke(self) -> None:
        """Let what still comes go nowhere."""
        self.views = [memoryview(bytearray(self.left))]
        self.region = None
        self.revoked = True
