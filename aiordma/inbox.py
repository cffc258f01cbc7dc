"""The receiving end of a connection: its posted receives, and the messages that came."""

from __future__ import annotations

import asyncio
import errno
import warnings
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from aiordma.domain import ProtectionDomain
from aiordma.drivers.base import Completion
from aiordma.enums import WCFlags, WCOpcode
from aiordma.errors import BusyError, DeviceError
from aiordma.memory import MemoryRegion
from aiordma.queue_pair import QueuePair
from aiordma.slots import RecvSlot
from aiordma.types import ConnParam

__all__ = ["Inbox", "Message", "receive_memory"]

_RECV: Final = int(WCOpcode.RECV)


def receive_memory(pd: ProtectionDomain, param: ConnParam) -> MemoryRegion:
    """Allocate the memory of all receives that an inbox posts."""
    try:
        return pd.alloc(param.recv_size * param.recv_depth)
    except (OSError, OverflowError) as error:
        hint = "make recv_size or recv_depth in ConnParam smaller"
        if isinstance(error, DeviceError) and error.hint:  # the memlock limit
            hint += f"; {error.hint}"
        raise DeviceError(
            getattr(error, "errno", errno.ENOMEM),
            f"no memory for {param.recv_depth} receives of {param.recv_size} bytes", verb="ibv_reg_mr", hint=hint,
        ) from error  # fmt: skip


class ReceiveSlot(RecvSlot):
    """A posted receive with the view of its memory."""

    __slots__ = ("view",)

    def __init__(self, memory: MemoryRegion, start: int, size: int) -> None:
        piece = memory[start : start + size]
        super().__init__((piece,))
        self.view = piece.view


class Message:
    """A received message, lent: its memory is the connection's, and is posted again after `release()`.

    Use it as a context manager. While it is held, its receive isn't available to the peer.

    Attributes:
        data: the message, as a memoryview of registered memory; empty for an immediate alone.
        imm_data: 32 bits that came with a write with immediate, or None.
        byte_len: the message's length; for a write with immediate, of what was written, where the device knows.
        invalidated: the key of this side's that the peer invalidated by this message, or None.
    """

    __slots__ = ("_inbox", "_slot", "byte_len", "data", "imm_data", "invalidated")

    def __init__(self, inbox: Inbox, slot: ReceiveSlot, completion: Completion) -> None:
        self._inbox = inbox
        self._slot: ReceiveSlot | None = slot
        _, _, opcode, self.byte_len, _, imm_data, flags, _ = completion
        self.imm_data = imm_data if flags & WCFlags.WITH_IMM else None
        self.invalidated = imm_data if flags & WCFlags.WITH_INV else None
        self.data = slot.view[: self.byte_len if opcode == _RECV else 0]

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self.data = memoryview(b"")
            self._inbox.repost(slot)

    def __del__(self) -> None:
        slot = getattr(self, "_slot", None)
        if slot is not None:
            warnings.warn("a received Message was dropped without release()", ResourceWarning, stacklevel=2)
            self._inbox.repost_later(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Inbox:
    """Posts the receives of a queue pair, keeps what came, and posts each again when its message is consumed."""

    def __init__(self, qp: QueuePair, memory: MemoryRegion, param: ConnParam) -> None:
        self._qp = qp
        self._loop = asyncio.get_running_loop()
        self._messages: deque[tuple[ReceiveSlot, Completion]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._busy = False
        self._ended = False
        self._taker: Callable[[memoryview | None], None] | None = None
        size = param.recv_size
        qp.on_receive = self._on_receive
        qp.post_recv_slots([ReceiveSlot(memory, start * size, size) for start in range(param.recv_depth)])

    async def recv(self) -> bytes:
        """Receive a message, as a copy."""
        if not self._messages or self._busy or not self._qp.cq.budget.take():
            await self._arrived()
        slot, completion = self._messages.popleft()
        data = slot.view[: completion[3]].tobytes() if completion[2] == _RECV else b""
        self.repost(slot)
        return data

    async def recv_message(self) -> Message:
        """Receive a message without a copy."""
        await self._arrived()
        return Message(self, *self._messages.popleft())

    async def recv_into(self, target: memoryview) -> int:
        """Receive a message into memory."""
        await self._arrived()
        slot, completion = self._messages[0]
        length = completion[3] if completion[2] == _RECV else 0
        if length > len(target):
            raise ValueError(f"the message has {length} bytes, the buffer {len(target)}")
        self._messages.popleft()
        target[:length] = slot.view[:length]
        self.repost(slot)
        return length

    async def _arrived(self) -> None:
        """Wait until a message is there; what follows pops it without an await in between."""
        if self._busy:
            raise BusyError("another task is receiving from this connection")
        self._busy = True
        try:
            if self._messages and not self._qp.cq.budget.take():
                # Receiving what is there doesn't suspend: other tasks must have their turn.
                await asyncio.sleep(0)
                self._qp.cq.budget.renew()
            while not self._messages:
                if self._ended:
                    raise self._qp.unusable()
                self._waiter = self._loop.create_future()
                await self._waiter
        finally:
            self._busy = False
            self._waiter = None

    def divert(self, taker: Callable[[memoryview | None], None]) -> None:
        """Hand every message to a function from now on, and at the end None; see `Connection.divert`."""
        if self._busy:
            raise BusyError("another task is receiving from this connection")
        self._busy = True  # for good
        self._taker = taker
        while self._messages:
            self._hand(*self._messages.popleft())
        if self._ended:
            taker(None)

    def _hand(self, slot: ReceiveSlot, completion: Completion) -> None:
        """Give a message to the taker, and post the receive again."""
        assert self._taker is not None
        self._taker(slot.view[: completion[3] if completion[2] == _RECV else 0])
        self.repost(slot)

    def _on_receive(self, slot: RecvSlot, completion: Completion) -> None:
        if completion[1]:
            self._ended = True
        else:
            assert isinstance(slot, ReceiveSlot)
            if self._taker is not None:
                self._hand(slot, completion)
                return
            self._messages.append((slot, completion))
        self._wake()

    def _wake(self) -> None:
        if self._taker is not None:
            self._taker(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def repost(self, slot: ReceiveSlot) -> None:
        """Post a receive again, its message was consumed."""
        if not self._ended:
            self._qp.post_recv_slots((slot,))

    def repost_later(self, slot: ReceiveSlot) -> None:
        """Post a receive again, from any thread: the collector found it."""
        if not self._ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.repost, slot)

    def end(self) -> None:
        """Nothing more comes; what came can still be received."""
        self._ended = True
        if not self._loop.is_closed():
            self._wake()
