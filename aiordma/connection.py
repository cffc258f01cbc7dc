"""Connection: a connected queue pair, its memory and its life."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import warnings
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import attrs

from aiordma.batch import Batch
from aiordma.cm import CMID
from aiordma.device import Context, ProtectionDomain
from aiordma.enums import Access, Opcode, QPState, SendFlags
from aiordma.errors import BrokenError, ClosedError
from aiordma.inbox import Inbox, Message, receive_memory
from aiordma.keep_alive import KeepAlive
from aiordma.local_memory import LOCAL, LocalMemory, Memory
from aiordma.memory import MemoryRegion, exported
from aiordma.queue_pair import QueuePair
from aiordma.slots import RunSlot, SendSlot
from aiordma.types import Buffer, Capabilities, ConnParam, RemoteRegion, SocketAddress

__all__ = ["Connection", "PrivateData", "check_private_data"]

_READ: Final = Opcode.RDMA_READ
_WRITE: Final = Opcode.RDMA_WRITE
_SEND: Final = Opcode.SEND
_SIGNALED: Final = int(SendFlags.SIGNALED)
_FENCE: Final = int(SendFlags.FENCE)
#: `fence: bool` is or-ed into the flags as it is.
assert int(SendFlags.FENCE) == int(True)
_SOLICITED: Final = int(SendFlags.SOLICITED)

#: Private data of a connect or an accept: fixed, or made of the connection to be, whose `alloc` gives what to put in.
PrivateData: TypeAlias = "bytes | Callable[[Connection], bytes]"


class Connection:
    """A connection to a peer: one-sided operations on its memory, atomics, and messages.

    `read`, `write`, `send`, the atomics and `barrier` post now and return a future: ten reads are ten calls and one
    `gather`. Requests of a connection are executed in the order of the calls; a READ's answer may come after a later
    WRITE was placed, unless that has `fence=True`.

    Made by `connect()` and by `ConnectRequest.accept()`, not directly.

    Attributes:
        qp: the queue pair.
        pd: the protection domain that its memory belongs to.
        context: the device.
        memory: what its requests read from and write to; batches and requests share it.
        peer_private_data: what the peer sent along with its connect or accept, as it arrived: on IB and RoCE
            padded with zeros.
    """

    def __init__(self, cm_id: CMID, pd: ProtectionDomain, param: ConnParam) -> None:
        self._cm_id = cm_id
        self._loop = asyncio.get_running_loop()
        self.pd = pd
        pd.check_open()
        self.context: Context = pd.context
        limits = self.context.capabilities
        self.param = param = attrs.evolve(
            param,
            recv_depth=min(param.recv_depth, limits.max_recv_wr),
            max_send_wr=min(param.max_send_wr, limits.max_send_wr),
            max_sge=min(param.max_sge, limits.max_sge),
        )
        receives = receive_memory(pd, param)
        self.qp: QueuePair = pd.create_qp(param)
        self._post_read = self.qp.post_read
        self.qp.peer = cm_id.peer_addr
        # The loop's tables reach queue pair and identifier: an unclosed connection is only collected, and complains,
        # if nothing in there refers to it.
        self.qp.on_failure = _weakly(self._on_failure)
        cm_id.on_disconnected = _weakly(self._on_disconnected)
        self.peer_private_data = b""
        self._max_msg_size = limits.max_msg_size
        self.memory = LocalMemory(pd, param.max_sge)
        self._source = self.memory.source
        self._landing = self.memory.landing
        self._closing: asyncio.Task[None] | None = None
        self._established = False
        self._keep_alive: KeepAlive | None = None
        self._inbox = Inbox(self.qp, receives, param)

    # -- one-sided operations -----------------------------------------------------------------------------------

    def read(
        self, remote: RemoteRegion, into: Memory | Sequence[Memory] | None = None, *, fence: bool = False
    ) -> asyncio.Future[Any]:
        """Read the peer's memory (IBV_WR_RDMA_READ). The peer's program takes no part.

        Success proves that the data is in `into`, and that every WRITE of this connection before it is placed.

        Ownership: `into` is the device's until the future is done; after a cancel, until `await into.idle()`.
        Cancellation: drops the waiter, not the request.

        Args:
            remote: where to read; it must be at least as long as `into`.
            into: registered memory, or a list of pieces filled in order; without it the future gives `bytes`.
            fence: start only when all READs and atomics before it are done.

        Returns:
            A future of None, or of the bytes read if there is no `into`.

        Raises:
            ValueError: `into` is longer than `remote`, or read-only.
            ClosedError, BrokenError: the connection ended.
            RemoteError: (the future) the peer's device refused: key, bounds, rights. See `reason`.
        """
        if into is None:
            if remote.length > self._max_msg_size:
                raise ValueError(f"{remote.length} bytes are more than one request of this device carries: slice it")
            own = self.pd.alloc(remote.length)
            flags = _SIGNALED | fence
            return self.qp.post_send(_READ, (own,), remote.addr, remote.rkey, None, flags, own.view.tobytes)
        if isinstance(into, LOCAL):
            if into.length > remote.length or not into.writable or into.length > self._max_msg_size:
                raise self.memory.unreadable(into, remote)
            if not fence:
                return self._post_read(into, remote.addr, remote.rkey)
            into = (into,)
        sg_list = self.memory.pieces(into)
        for memory in sg_list:
            if not memory.writable:
                raise self.memory.unreadable(memory, remote)
        length = sum([memory.length for memory in sg_list])
        if length > min(remote.length, self._max_msg_size):
            raise ValueError(
                f"{length} bytes to read: the remote region has {remote.length}, a request {self._max_msg_size}"
            )
        if len(sg_list) > self.capabilities.max_read_sge:
            return self._read_apart(remote, sg_list, _FENCE if fence else 0)
        return self.qp.post_send(_READ, sg_list, remote.addr, remote.rkey, None, _SIGNALED | fence)

    def _read_apart(self, remote: RemoteRegion, pieces: Sequence[Memory], flags: int) -> asyncio.Future[Any]:
        """Read into more pieces than one READ fills: a list of READs of one piece each."""
        addr = remote.addr
        slots: list[SendSlot | RunSlot] = []
        for piece in [piece for piece in pieces if piece.length] or pieces[:1]:
            slots.append(self.qp.slot(_READ, (piece,), addr, remote.rkey, None, flags))
            addr += piece.length
        return self.qp.post_list(slots)

    def write(
        self,
        remote: RemoteRegion,
        data: Memory | Buffer | Sequence[Memory],
        *,
        imm: int | None = None,
        fence: bool = False,
    ) -> asyncio.Future[None]:
        """Write the peer's memory (IBV_WR_RDMA_WRITE). The peer's program takes no part, unless `imm` is given.

        What success proves depends on the device (`capabilities.success_proves`): that the peer's device
        acknowledged, or only that the data was handed to TCP. `barrier()` proves placement on every device.

        Ownership: registered memory is the device's until the future is done; `bytes` are kept by reference; other
        buffers are copied at the call up to 64 KiB, above that they are registered for this operation and borrowed.
        Cancellation: drops the waiter, not the request.

        Args:
            remote: where to write; it must be at least as long as the data.
            data: registered memory or a list of it, or any contiguous buffer.
            imm: 32 bits delivered to the peer as a message when the data is placed; takes a receive there.
            fence: start only when all READs and atomics before it are done.

        Raises:
            ValueError: the data is longer than `remote`.
            UnsupportedError: `imm`, on a device that can't.
            ClosedError, BrokenError: the connection ended; a refused WRITE may show here on the next call only.
        """
        sg_list, inline, length = self._source(data)
        if length > remote.length:
            raise ValueError(f"{length} bytes to write, but the remote region has {remote.length}")
        flags = _SIGNALED | fence
        if imm is None:
            return self.qp.post_send(_WRITE, sg_list, remote.addr, remote.rkey, inline, flags)
        self.context.require("write_with_imm", "write with immediate")
        imm = _check_u32("imm", imm)
        opcode = Opcode.RDMA_WRITE_WITH_IMM
        return self.qp.post_send(opcode, sg_list, remote.addr, remote.rkey, inline, flags, imm_data=imm)

    def fetch_add(self, remote: RemoteRegion, value: int, *, fence: bool = False) -> asyncio.Future[int]:
        """Add to 8 bytes of the peer's memory, atomically (IBV_WR_ATOMIC_FETCH_AND_ADD).

        They are an unsigned integer in the peer's byte order; the sum wraps at 2**64, so a negative `value` subtracts.
        Atomic towards other atomics of the same device. The address must be a multiple of 8.

        Cancellation: drops the waiter; the addition may have been executed.

        Returns:
            A future of the value before.

        Raises:
            UnsupportedError: the device has no atomics.
            ValueError: `remote` is shorter than 8 bytes, or its address is no multiple of 8.
            RemoteError: (the future) refused: key, bounds, REMOTE_ATOMIC right.
        """
        landing = self._landing(remote)
        return self.qp.post_send(
            Opcode.ATOMIC_FETCH_AND_ADD, landing.memory, remote.addr, remote.rkey, None, _SIGNALED | fence,
            landing.take, compare_add=value & 0xFFFFFFFFFFFFFFFF,
        )  # fmt: skip

    def compare_swap(
        self, remote: RemoteRegion, compare: int, swap: int, *, fence: bool = False
    ) -> asyncio.Future[int]:
        """Replace 8 bytes of the peer's memory if they equal `compare` (IBV_WR_ATOMIC_CMP_AND_SWP).

        Returns:
            A future of the value before: it was replaced if that equals `compare`.

        As `fetch_add` in everything else.
        """
        landing = self._landing(remote)
        return self.qp.post_send(
            Opcode.ATOMIC_CMP_AND_SWP, landing.memory, remote.addr, remote.rkey, None, _SIGNALED | fence,
            landing.take, compare_add=compare & 0xFFFFFFFFFFFFFFFF, swap=swap & 0xFFFFFFFFFFFFFFFF,
        )  # fmt: skip

    def barrier(self) -> asyncio.Future[None]:
        """Wait for all WRITEs before it to be placed in the peer's memory: a READ of nothing, behind them.

        Its success proves placement on every device.
        """
        if not self.capabilities.empty_read_waits:
            return self.qp.post_send(_READ, ())
        fenced = self.qp.slot(_WRITE, (), 0, 0, None, _FENCE)  # its fence waits for the READs before it
        return self.qp.post_list((fenced, self.qp.slot(_READ, (), 0, 0, None, 0)))

    def batch(self) -> Batch:
        """Collect operations, and post them as one linked list: `async with conn.batch() as b: b.read(...)`."""
        return Batch(self)

    # -- messages -------------------------------------------------------------------------------------------------

    def send(
        self,
        data: Memory | Buffer | Sequence[Memory],
        *,
        imm: int | None = None,
        invalidate: int | None = None,
        solicited: bool = False,
        fence: bool = False,
    ) -> asyncio.Future[None]:
        """Send a message (IBV_WR_SEND). It takes one receive of the peer's.

        Success proves that it was handed to TCP, or acknowledged by the peer's device: not that a program saw it.
        Where the peer has no receive posted it waits (`capabilities.unreceived_send_waits`), else ends the connection.

        Ownership and cancellation: as for `write`.

        Args:
            data: the message; it may be empty.
            imm: 32 bits beside it (IBV_WR_SEND_WITH_IMM).
            invalidate: a key of the peer's to be invalidated at delivery (IBV_WR_SEND_WITH_INV).
            solicited: count for a peer that waits for solicited events only.
            fence: start only when all READs and atomics before it are done.

        Raises:
            UnsupportedError: `imm` or `invalidate`, on a device that can't.
        """
        sg_list, inline, _ = self._source(data)
        flags = _SIGNALED | fence | (_SOLICITED if solicited else 0)
        if imm is None and invalidate is None:
            return self.qp.post_send(_SEND, sg_list, 0, 0, inline, flags)
        if imm is not None and invalidate is not None:
            raise ValueError("imm and invalidate share one field of the message: give one of them")
        if invalidate is not None:
            self.context.require("send_with_invalidate", "send with invalidate")
            value, opcode = _check_u32("invalidate", invalidate), Opcode.SEND_WITH_INV
        else:
            self.context.require("send_with_imm", "send with immediate; write(..., imm=) does")
            value, opcode = _check_u32("imm", imm), Opcode.SEND_WITH_IMM
        return self.qp.post_send(opcode, sg_list, 0, 0, inline, flags, imm_data=value)

    async def recv(self) -> bytes:
        """Receive a message, as a copy. Messages come whole and in order.

        Cancellation: safe, no message is lost.

        Raises:
            BrokenError: the connection ended, and everything that came before was received.
            ClosedError: you closed it.
            BusyError: another task is receiving.
        """
        return await self._inbox.recv()

    async def recv_message(self) -> Message:
        """Receive a message without a copy: it is lent until its `release()`. As `recv` in everything else."""
        return await self._inbox.recv_message()

    async def recv_into(self, buffer: Memory | Buffer) -> int:
        """Receive a message into a buffer, registered or not, and give its length. As `recv` in everything else.

        Raises:
            ValueError: the message is longer than the buffer; it stays, and can be received again. Or the buffer is
                read-only.
        """
        if isinstance(buffer, LOCAL):
            buffer = buffer.view
        view = exported(buffer, Access.LOCAL_WRITE)
        return await self._inbox.recv_into(view)

    def divert(self, taker: Callable[[memoryview | None], None]) -> None:
        """Hand every message to a function, those included that came before: how a protocol is built on a connection.

        It is called with a view that is valid during the call, and once the connection has ended, perhaps several
        times, with None. It is called while completions are handed out, so it neither raises nor posts. From then on
        the `recv` methods raise BusyError. The connection doesn't keep the function's object alive.

        Args:
            taker: a bound method.
        """
        self._inbox.divert(_weakly(taker))

    def __aiter__(self) -> Self:
        """Iterate over messages, until the peer disconnects."""
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._inbox.recv()
        except BrokenError as error:
            if error.orderly:
                raise StopAsyncIteration from None
            raise

    # -- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, length: int, *, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Allocate registered memory: its content is undefined, or with remote rights zeroed, and its key its own.

        With remote rights it stays registered until the connection closes, unless you close it before.
        """
        return self.memory.keep(self.pd.alloc(length, access=access))

    def register(self, buffer: Buffer, *, access: Access | None = None) -> MemoryRegion:
        """Register a buffer of yours (ibv_reg_mr); see `ProtectionDomain.register`.

        With remote rights it stays registered until the connection closes, unless you close it before.
        """
        return self.memory.keep(self.pd.register(buffer, access=access))

    # -- flow control and the end -----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait while too much waits for room in the send queue; see `QueuePair.drain`.

        Raises:
            ClosedError, BrokenError: the connection ended.
        """
        await self.qp.drain()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Bound what waits for room in the send queue, in bytes, as asyncio's transports do."""
        self.qp.set_write_buffer_limits(high, low)

    def is_closing(self) -> bool:
        """Whether it is closed, being closed, or ended from outside."""
        return self.qp.refusal is not None

    async def close(self, *, timeout: float = 5.0) -> None:
        """Close: posted work finishes within `timeout` seconds, then disconnect, flush, free. Idempotent.

        From any state, and from several tasks at once. Everything still in flight after `timeout` ends as flushed.
        Regions with remote rights made through this connection are deregistered.

        Cancellation: drops the waiter; the closing itself goes on.

        Raises:
            BrokenError: the connection had failed, and nobody was told yet: a WRITE that the peer refused, for one.
                It is closed all the same. `async with` raises it only where its body ended without an exception.
        """
        if self._closing is None:
            self.qp.refuse(ClosedError(f"{self!r} was closed"))
            self._closing = self._loop.create_task(self._close(timeout))
        await asyncio.shield(self._closing)
        if (failure := self.qp.untold()) is not None:
            raise failure

    async def _close(self, timeout: float) -> None:
        deadline = self._loop.time() + timeout
        try:
            if self._established:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await self.qp.settled()
                        if self.qp.state is QPState.ERR:
                            self.qp.to_error()  # what came before the end and wasn't received is given up
                        self.qp.expect_flush()
                        self._cm_id.disconnect()
                        await self._cm_id.disconnected()
        finally:
            self._free()

    def abort(self) -> None:
        """End at once: everything in flight is flushed, the peer sees the connection break. Idempotent."""
        self.qp.refuse(ClosedError(f"{self!r} was aborted"))
        self._free()

    def _free(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        _free(self.qp, self._inbox, self._cm_id, self.memory)

    def _on_failure(self, failure: BaseException) -> None:
        """The queue pair failed: the device must let go of everything, and the peer must know."""
        if not isinstance(failure, ClosedError):
            # A queue pair that is in error already may still deliver what came before the end: a flush would lose it.
            if self.qp.state is not QPState.ERR:
                self.qp.driver.to_error()
            self._cm_id.disconnect()

    def _on_disconnected(self, reason: str) -> None:
        """The peer disconnected, or is gone: answer it, and flush."""
        if self._closing is None:
            self._cm_id.disconnect()
            if not self.qp.closed:
                self.qp.fail(BrokenError(reason, orderly=self.qp.driver.disconnected))
                self.qp.to_error()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except BrokenError:
            if exc is None:
                raise

    def __del__(self) -> None:
        if getattr(self, "_cm_id", None) is None or self._cm_id.destroyed:
            return
        warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        arguments = (self.qp, self._inbox, self._cm_id, self.memory)
        if self._loop.is_closed():
            _free(*arguments)
        else:  # the collector may run in any thread
            self._loop.call_soon_threadsafe(_free, *arguments)

    # -- who and where ----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the device can do."""
        return self.context.capabilities

    @property
    def device(self) -> str:
        """The device's name."""
        return self.context.name

    @property
    def local_addr(self) -> SocketAddress:
        """This side's address."""
        return self._cm_id.local_addr

    @property
    def peer_addr(self) -> SocketAddress:
        """The peer's address."""
        return self._cm_id.peer_addr

    def __repr__(self) -> str:
        state = "closed" if self.qp.closed else self.qp.state.name
        return f"<Connection to {self.peer_addr} on {self.device} QP {self.qp.qp_num} {state}>"

    # -- establishing -----------------------------------------------------------------------------------------------

    async def establish(
        self, step: Callable[[QueuePair, ConnParam, bytes], Awaitable[Any]], private_data: PrivateData, limit: int
    ) -> None:
        """Connect or accept; what was made is freed if that fails or is cancelled."""
        try:
            if callable(private_data):
                private_data = private_data(self)
            check_private_data(private_data, limit)
            event = await step(self.qp, self.param, private_data)
        except BaseException:
            self.qp.refuse(ClosedError("the connection was not established"))
            self._free()
            raise
        self._established = True
        self.qp.peer = self._cm_id.peer_addr
        self.peer_private_data = event.private_data or self.peer_private_data
        if self.qp.transport != "iwarp" and self.param.keepalive is not None:  # there TCP does it, or nothing can
            self._keep_alive = KeepAlive(self.qp, self.param.keepalive)


def check_private_data(private_data: bytes, limit: int) -> None:
    """Refuse private data that the transport can't carry, before anything is sent."""
    if len(private_data) > limit:
        raise ValueError(f"private data has {len(private_data)} bytes, this device carries {limit}")


def _check_u32(name: str, value: int | None) -> int:
    number = -1 if value is None else operator.index(value)
    if not 0 <= number <= 0xFFFFFFFF:
        raise ValueError(f"{name} is 32 bits, not {value}")
    return number


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make a callback that doesn't keep its object alive."""
    weak = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        if (target := weak()) is not None:
            target(argument)

    return call


def _free(qp: QueuePair, inbox: Inbox, cm_id: CMID, memory: LocalMemory) -> None:
    """Free what a connection has, in order: queue pair, identifier, memory. Idempotent."""
    qp.refuse(ClosedError("the connection was closed"))
    qp.close()
    cm_id.destroy()
    inbox.end()
    memory.close()
