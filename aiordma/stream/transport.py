"""asyncio's Transport over an rsocket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from aiordma.enums import Access
from aiordma.errors import BrokenError, ProtocolError
from aiordma.memory import MemoryRegion
from aiordma.stream.socket import RSocket
from aiordma.types import Buffer

__all__ = ["StreamTransport"]

#: Seconds that a close waits for the peer's device to take what was sent last.
_CLOSE_TIMEOUT: Final = 5.0
_HIGH_WATER: Final = 64 * 1024


class StreamTransport(asyncio.Transport):
    """A byte stream over RDMA, with the whole contract of `asyncio.Transport`. Any asyncio protocol runs on it.

    `get_extra_info` knows peername, sockname, device, qp and connection; there is no socket.
    """

    #: loop.start_tls() of asyncio's own loop asks for it.
    _start_tls_compatible = True

    def __init__(
        self,
        sock: RSocket,
        protocol: asyncio.BaseProtocol,
        on_lost: Callable[[StreamTransport], object] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        conn = sock.conn
        super().__init__(
            {
                "peername": conn.peer_addr, "sockname": conn.local_addr, "device": conn.device, "qp": conn.qp,
                "connection": conn,
            }
        )  # fmt: skip
        self._loop = loop
        self._sock = sock
        self._stream = sock.protocol
        self._buffer: deque[memoryview] = deque()
        self._buffer_size = 0
        self._high, self._low = _HIGH_WATER, _HIGH_WATER // 4
        self._writing_paused = False
        self._paused = False
        self._eof = False
        self._eof_told = False
        self._closing = False
        self._leave_by: asyncio.TimerHandle | None = None
        self._lost: asyncio.Task[None] | None = None
        self._on_lost = on_lost
        self.set_protocol(protocol)
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._call("connection_made", self)
        self._sock.on_progress = self._on_progress
        self._on_progress()

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<{type(self).__name__} {state} {self._sock.conn!r} write buffer {self._buffer_size}>"

    # -- the protocol -------------------------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set a new protocol; what comes from now on is its."""
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Give the protocol."""
        return self._protocol

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the protocol; what it raises ends the connection, as with asyncio's transports."""
        try:
            return getattr(self._protocol, method)(*arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a protocol raises
            self._fatal(error, f"Fatal error: protocol.{method}() call failed.")
            return None

    # -- reading ------------------------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Whether data is delivered."""
        return not self._closing and not self._paused

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading()`; the peer may send until its window is full."""
        if not self._closing:
            self._paused = True

    def resume_reading(self) -> None:
        """Deliver again."""
        if self._paused and not self._closing:
            self._paused = False
            self._loop.call_soon(self._on_progress)

    def _deliver(self) -> None:
        sock, stream = self._sock, self._stream
        while stream.unread and not self._paused and not self._closing:
            piece = sock.peek()
            if self._eof_told:
                sock.consume(len(piece))  # rdma-core may send after its SHUTDOWN
            elif self._buffered:
                self._fill(piece)
            else:
                # Copied and given back first: the peer goes on while the protocol works.
                data = bytes(piece)
                sock.consume(len(data))
                self._call("data_received", data)

    def _fill(self, piece: memoryview) -> None:
        """Let a BufferedProtocol's buffer be filled straight from the receive memory."""
        buffer = self._call("get_buffer", len(piece))
        if self._lost is not None:
            return
        view = memoryview(buffer).cast("B")
        length = min(len(view), len(piece))
        if not length:
            self._fatal(RuntimeError("get_buffer() returned an empty buffer"), "Fatal error: get_buffer() call failed.")
            return
        view[:length] = piece[:length]
        view.release()
        self._sock.consume(length)
        self._call("buffer_updated", length)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Write; what can't go at once is copied, and waits. Data of a closed transport is dropped, as asyncio does."""
        view = _checked(data)
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not view or self._lost is not None or self._closing:
            return
        sent = 0 if self._buffer else self._sock.send(data if type(data) is bytes else view)
        if sent < len(view):
            self._buffer.append(memoryview(bytes(view[sent:])))
            self._buffer_size += len(view) - sent
            self._maybe_pause()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Write all of these, one behind the other."""
        self.write(b"".join([_checked(data) for data in list_of_data]))

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def write_eof(self) -> None:
        """Send no more: the peer sees the end when it has read the rest (SHUTDOWN). Reading goes on."""
        if self._closing or self._eof:
            return
        self._eof = True
        if not self._buffer:
            self._sock.shutdown()

    def _flush(self) -> None:
        buffer = self._buffer
        while buffer:
            piece = buffer[0]
            sent = self._sock.send(piece)
            self._buffer_size -= sent
            if sent < len(piece):
                if sent:
                    buffer[0] = piece[sent:]
                break
            buffer.popleft()
        self._maybe_resume()
        if not buffer:
            if self._closing:
                self._leave()
            elif self._eof:
                self._sock.shutdown()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Bound what waits to be sent, in bytes: above `high` the protocol's pause_writing() is called."""
        if high is None:
            high = _HIGH_WATER if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low
        self._maybe_pause()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Give the low and the high limit."""
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        """Give the bytes that wait to be sent; what is in the send buffer is on its way."""
        return self._buffer_size

    def _maybe_pause(self) -> None:
        if self._buffer_size > self._high and not self._writing_paused:
            self._writing_paused = True
            self._flow("pause_writing")

    def _maybe_resume(self) -> None:
        if self._writing_paused and self._buffer_size <= self._low:
            self._writing_paused = False
            self._flow("resume_writing")

    def _flow(self, method: str) -> None:
        try:
            getattr(self._protocol, method)()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio's transports do
            self._report(error, f"protocol.{method}() failed")

    # -- the end ------------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Whether it is closed or being closed."""
        return self._closing

    def close(self) -> None:
        """Close: what waits is sent first, nothing is received any more; then connection_lost(None)."""
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self._leave()

    def abort(self) -> None:
        """Close at once; what waits is dropped."""
        self._end(None, abort=True)

    def _force_close(self, error: BaseException | None) -> None:
        """As abort(), with a cause for connection_lost(): asyncio's TLS layer calls it."""
        self._end(error, abort=True)

    def _leave(self) -> None:
        """Everything was sent: say goodbye."""
        if self._leave_by is None:
            self._leave_by = self._loop.call_later(_CLOSE_TIMEOUT, self.abort)
            self._sock.disconnect()
            self._loop.call_soon(self._on_progress)

    def _on_progress(self) -> None:
        """Something changed: send, deliver, and see whether it ends."""
        if self._lost is not None:
            return
        if self._buffer or self._eof or self._closing or self._writing_paused:
            self._flush()
        self._deliver()
        if self._lost is not None:
            return
        stream, error = self._stream, self._sock.error
        # What came before the connection broke can still be read, unless the peer is out of its mind, or this side has
        # something to say.
        if error is not None and (
            self._buffer or self._closing or not stream.unread or isinstance(error, ProtocolError)
        ):
            self._end(None if self._leave_by else error, abort=True)
            return
        if stream.eof and not stream.unread and not self._eof_told and not self._closing:
            self._eof_told = True
            if not self._call("eof_received") and self._lost is None:
                self.close()
        if not stream.disconnected:
            return
        if self._buffer:
            self._end(BrokenError("the peer closed the stream", orderly=True), abort=True)
        elif self._closing or self._eof_told:
            self._end(None)

    def _fatal(self, error: BaseException, message: str) -> None:
        if not isinstance(error, OSError):
            self._report(error, message)
        self._end(error, abort=True)

    def _report(self, error: BaseException, message: str) -> None:
        self._loop.call_exception_handler(
            {"message": message, "exception": error, "transport": self, "protocol": self._protocol}
        )

    def _end(self, error: BaseException | None, *, abort: bool = False) -> None:
        """Close the connection, then call connection_lost()."""
        if self._lost is not None:
            return
        self._closing = True
        if self._leave_by is not None:
            self._leave_by.cancel()
        self._buffer.clear()
        self._buffer_size = 0
        self._lost = self._loop.create_task(self._lose(error, abort=abort))

    async def _lose(self, error: BaseException | None, *, abort: bool) -> None:
        try:
            conn = self._sock.conn
            if abort:
                conn.abort()
            else:
                with suppress(BrokenError):  # how it ends that was read to its end concerns nobody
                    await conn.close(timeout=_CLOSE_TIMEOUT)
        finally:
            if self._on_lost is not None:
                self._on_lost(self)
            self._protocol.connection_lost(error if error is None or isinstance(error, Exception) else None)

    # -- direct placement ---------------------------------------------------------------------------------------------

    def map_region(self, region: MemoryRegion, offset: int | None = None) -> int:
        """Offer a region to the peer, to be written to directly (riomap); gives its offset, by default its address.

        It needs REMOTE_WRITE, and stays offered until it or the stream is closed: the peer isn't told, and a write to
        what is gone ends the stream. The peer learns of it before anything that is written after this.

        Raises:
            ValueError: the peer takes no more: see `StreamParam.iomap_size`.
        """
        if not region.access & Access.REMOTE_WRITE:
            raise ValueError(f"{region!r} can't be written to by a peer: it is registered without REMOTE_WRITE")
        return self._sock.map(region, offset)

    async def write_at(self, offset: int, data: Buffer) -> None:
        """Write to memory that the peer offers at an offset of its choice (riowrite); see `Connection.write`.

        The peer's program isn't told. It is placed before what is written to the stream after this is read there.

        Raises:
            ValueError: the peer offers nothing there.
        """
        await self._sock.write_at(offset, data)


def _checked(data: Buffer) -> memoryview:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")
