"""What is to be sent, in order, as FPDUs: small ones whole, long messages cut only when there is room for them.

No I/O: the link takes FPDUs from here and tells how many left.
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
    """A FIFO of FPDUs: `small`, then `made`, then what the messages behind them will make.

    Every FPDU has a number, given when its message is put in, so a message's last number says when all of it left.
    A long message waits as an iterator of its segments: the response to a READ of 4 GiB costs no more memory
    than one of 4 KiB.

    Attributes:
        small: whole FPDUs of one buffer each, to be joined and sent in one call.
        made: FPDUs as gather lists.
        messages: the messages behind them, as iterators of their segments.
        queued: number of the last FPDU put in.
        sent: number of the last FPDU that left.
        blocked: the socket takes no more for now.
        partial: of the first one in `made`, the front left already.
        framed: so many of the first ones in `made` have their CRC and markers.
    """

    __slots__ = ("blocked", "framed", "made", "messages", "partial", "queued", "sent", "small")

    def __init__(self) -> None:
        self.small: list[bytes] = []
        self.made: deque[FPDU] = deque()
        self.messages: deque[Iterator[FPDU]] = deque()
        self.queued = 0
        self.sent = 0
        self.partial = False
        self.framed = 0
        self.blocked = False

    def __bool__(self) -> bool:
        return self.sent < self.queued

    def put(self, fpdu: bytes) -> None:
        """Queue one small FPDU, or several that count as one."""
        self.queued += 1
        if self.messages:
            self.messages.append(iter(((fpdu,),)))
        elif self.made:
            self.made.append((fpdu,))
        else:
            self.small.append(fpdu)

    def put_message(self, segments: Iterator[FPDU], count: int) -> None:
        """Queue a message of `count` FPDUs, which are made when their turn comes."""
        self.queued += count
        self.messages.append(segments)

    def fill(self) -> None:
        """Have as many FPDUs as are worth it in `made`, the small ones first."""
        made = self.made
        if self.small:
            small, self.small = self.small, []
            made.extend((fpdu,) for fpdu in small)
        while self.messages and (room := _AHEAD - len(made)) > 0:
            segments = tuple(islice(self.messages[0], room))
            made.extend(segments)
            if len(segments) < room:
                self.messages.popleft()

    def small_left(self, size: int) -> None:
        """Note that `size` bytes of the joined `small` left; the rest is now the first of `made`."""
        small = self.small
        left = 0
        for fpdu in small:
            if size < len(fpdu):
                break
            size -= len(fpdu)
            left += 1
        self.sent += left
        rest: list[FPDU] = [(fpdu,) for fpdu in small[left:]]
        if size:
            rest[0] = (memoryview(small[left])[size:],)
            self.partial = True
        self.made.extendleft(reversed(rest))
        self.small = []

    def left(self, count: int) -> None:
        """Note that the first `count` FPDUs of `made` left."""
        made = self.made
        if count == len(made):
            made.clear()
        else:
            for _ in range(count):
                made.popleft()
        self.sent += count
        self.partial = False
        if self.framed:
            self.framed = max(0, self.framed - count)

    def detach(self, first: int, last: int) -> bool:
        """Have FPDUs `first` to `last`, as far as they are made and didn't leave, refer to copies of their memory.

        Returns:
            Whether the last of them is made.
        """
        made = self.made
        for index in range(max(first - self.sent - 1, 0), min(last - self.sent, len(made))):
            made[index] = tuple(map(bytes, made[index]))
        return last <= self.sent + len(made)

    def cut(self, keep: int) -> None:
        """Forget what didn't leave yet, but for made FPDUs up to number `keep`, and for one that left in part."""
        keep -= self.sent
        if self.small:
            small, self.small = self.small, []
            self.made.extend((fpdu,) for fpdu in small)
        if self.partial:
            # The stream can't go on without its rest; its memory isn't ours any more.
            self.made[0] = tuple(map(bytes, self.made[0]))
            keep = max(keep, 1)
        while len(self.made) > max(keep, 0):
            self.made.pop()
        self.messages.clear()
        self.queued = self.sent + len(self.made)
        self.framed = min(self.framed, len(self.made))
