"""What is to be sent, in order, as FPDUs: whole records, and long messages that are cut only when room is there.

No I/O: the link takes records from here and tells how many left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from aiordma.drivers.soft.ddp import FPDU

#: FPDUs made ahead of the socket from a long message: 64 of 64 KiB are more than a socket buffer takes.
_AHEAD: Final = 64


class Outbox:
    """A FIFO of FPDUs.

    Every FPDU has a number, given when its message is put in, so a message's last number says when all of it left.
    A long message waits as an iterator of its segments: the response to a READ of 4 GiB costs no more memory
    than one of 4 KiB.

    Attributes:
        ready: FPDUs in the order they leave.
        queued: number of the last FPDU put in.
        sent: number of the last FPDU that left.
        partial: of the first one in `ready`, the front left already.
        framed: so many of the first ones have their CRC and markers.
    """

    __slots__ = ("_messages", "framed", "partial", "queued", "ready", "sent")

    def __init__(self) -> None:
        self.ready: deque[FPDU] = deque()
        self._messages: deque[Iterator[FPDU]] = deque()
        self.queued = 0
        self.sent = 0
        self.partial = False
        self.framed = 0

    def __bool__(self) -> bool:
        return self.sent < self.queued

    def put(self, fpdu: FPDU) -> None:
        """Queue one FPDU."""
        self.queued += 1
        if self._messages:
            self._messages.append(iter((fpdu,)))
        else:
            self.ready.append(fpdu)

    def put_message(self, segments: Iterator[FPDU], count: int) -> None:
        """Queue a message of `count` FPDUs, which are made when their turn comes."""
        self.queued += count
        self._messages.append(segments)

    def fill(self) -> None:
        """Make FPDUs of waiting messages, as many as are worth having ready."""
        while self._messages and (room := _AHEAD - len(self.ready)) > 0:
            made = tuple(islice(self._messages[0], room))
            self.ready.extend(made)
            if len(made) < room:
                self._messages.popleft()

    def left(self, count: int) -> None:
        """Note that the first `count` FPDUs left."""
        ready = self.ready
        if count == len(ready):
            ready.clear()
        else:
            for _ in range(count):
                ready.popleft()
        self.sent += count
        self.partial = False
        if self.framed:
            self.framed = max(0, self.framed - count)

    def cut(self, keep: int) -> None:
        """Forget what didn't leave yet, but for FPDUs up to number `keep` that are made, and for one that left in part."""
        keep -= self.sent
        if self.partial:
            # The stream can't go on without its rest; its memory isn't ours any more.
            self.ready[0] = tuple(map(bytes, self.ready[0]))
            keep = max(keep, 1)
        while len(self.ready) > max(keep, 0):
            self.ready.pop()
        self._messages.clear()
        self.queued = self.sent + len(self.ready)
        self.framed = min(self.framed, len(self.ready))
