"""The verbs driver's connection manager over a librdmacm of Python: threads, destruction, order."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from aiordma.drivers.base import CMEvent, DriverQP
from aiordma.drivers.verbs.cm import VerbsCMID
from aiordma.drivers.verbs.cm_channel import VerbsCMChannel
from aiordma.drivers.verbs.rdmacm import IbvQPAttr, Library, RawEvent
from aiordma.enums import CMEventType, RejectReason
from aiordma.errors import DeviceError
from aiordma.types import ConnParam
from tests.conformance.support import until


class FakeLibrary:
    """Counts what is made and destroyed; `connect` waits until it is let go."""

    def __init__(self) -> None:
        self.channels = 0
        self.ids: set[int] = set()
        self._next = 100
        self._pipe: tuple[int, int] = (-1, -1)
        self.events: list[RawEvent] = []
        self.let_go = threading.Event()
        self.connect_error: int | None = None
        self.iwarp = True
        self.removed: list[int] = []

    def create_event_channel(self) -> tuple[int, int]:
        self.channels += 1
        self._pipe = os.pipe()
        return 1, self._pipe[0]

    def destroy_event_channel(self, _channel: int) -> None:
        assert not self.ids
        self.channels -= 1
        for fd in self._pipe:
            os.close(fd)

    def new_id(self) -> int:
        self._next += 1
        self.ids.add(self._next)
        return self._next

    def create_id(self, _channel: int) -> int:
        return self.new_id()

    def destroy_id(self, cm_id: int) -> None:
        self.ids.remove(cm_id)

    def put(self, cm_id: int, event: int, *, status: int = 0, listen_id: int = 0, private_data: bytes = b"") -> None:
        self.events.append(RawEvent(cm_id, listen_id, event, status, private_data, 0, 0))
        os.write(self._pipe[1], b"!")

    def get_event(self, _channel: int) -> RawEvent | None:
        if not self.events:
            return None
        os.read(self._pipe[0], 1)
        return self.events.pop(0)

    def local_addr(self, _cm_id: int) -> tuple[str, int]:
        return ("10.0.0.1", 1)

    def peer_addr(self, _cm_id: int) -> tuple[str, int]:
        return ("10.0.0.2", 2)

    def device_name(self, _cm_id: int) -> str:
        return "fake0"

    def is_iwarp(self, _cm_id: int) -> bool:
        return self.iwarp

    def read_limits(self, _cm_id: int) -> tuple[int, int]:
        return (16, 16)

    def init_qp_attr(self, _cm_id: int, state: int) -> tuple[IbvQPAttr, int]:
        return IbvQPAttr(qp_state=state), 1

    def connect(self, _cm_id: int, _param: object) -> None:
        self.let_go.wait()
        if self.connect_error is not None:
            raise DeviceError(self.connect_error, os.strerror(self.connect_error), verb="rdma_connect")

    def disconnect(self, _cm_id: int) -> None:
        raise DeviceError(errno.EINVAL, "Invalid argument", verb="rdma_disconnect")

    def release_removed(self, cm_id: int) -> None:
        self.removed.append(cm_id)


class FakeQP:
    qp_num = 17
    transport_is_iwarp = True
    reason = ""
    released = False
    held: Callable[[], bool] | None = None

    def modify(self, attr: IbvQPAttr, mask: int) -> None:
        pass

    def set_disconnected(self, reason: str) -> None:
        self.reason = reason

    def hold(self, held: Callable[[], bool]) -> None:
        self.held = held

    def release(self) -> None:
        self.released = True


class Bench:
    def __init__(self) -> None:
        self.library = FakeLibrary()
        self.events: asyncio.Queue[CMEvent] = asyncio.Queue()
        self.channel = VerbsCMChannel(asyncio.get_running_loop(), self.events.put_nowait, cast("Library", self.library))

    def connecting(self, qp: FakeQP | None = None) -> tuple[VerbsCMID, threading.Thread]:
        """Start a connect that waits in its thread."""
        cm_id = self.channel.create_id()
        cm_id.peer_addr = ("10.0.0.2", 2)
        before = set(threading.enumerate())
        cm_id.connect(cast("DriverQP", qp or FakeQP()), ConnParam(), b"")
        (thread,) = set(threading.enumerate()) - before
        return cm_id, thread


async def test_channel_is_open_as_long_as_identifiers_are() -> None:
    """The first identifier opens the channel, the last one closes it, and so again."""
    bench = Bench()
    for _ in range(2):
        assert bench.library.channels == 0
        first, second = bench.channel.create_id(), bench.channel.create_id()
        first.destroy()
        assert bench.library.channels == 1
        second.destroy()
        second.destroy()
    assert bench.library.channels == 0


async def test_destroy_during_a_call() -> None:
    """An identifier in a call that waits is destroyed by that call's thread, and nothing is reported."""
    bench = Bench()
    cm_id, thread = bench.connecting()
    cm_id.destroy()
    assert bench.library.ids
    bench.library.let_go.set()
    await asyncio.to_thread(thread.join)
    assert not bench.library.ids
    assert bench.library.channels == 0
    assert bench.events.empty()


async def test_queue_pair_of_a_handshake() -> None:
    """While an iWARP handshake is under way its queue pair is held; it is released when the identifier is gone."""
    bench = Bench()
    qp = FakeQP()
    cm_id, thread = bench.connecting(qp)
    assert qp.held is not None
    assert qp.held()
    cm_id.destroy()
    bench.library.let_go.set()
    await asyncio.to_thread(thread.join)
    await until(lambda: qp.released)
    assert not bench.library.ids


async def test_queue_pair_after_a_handshake() -> None:
    """When it failed the queue pair isn't held, and released within destroy()."""
    bench = Bench()
    qp = FakeQP()
    bench.library.connect_error = errno.ETIMEDOUT
    cm_id, _ = bench.connecting(qp)
    bench.library.let_go.set()
    await bench.events.get()
    assert qp.held is not None
    assert not qp.held()
    cm_id.destroy()
    assert qp.released


async def test_destroy_between_a_call_and_its_report() -> None:
    """What a call found out isn't reported of an identifier that was destroyed before the loop's turn."""
    bench = Bench()
    bench.library.connect_error = errno.EHOSTUNREACH
    cm_id, thread = bench.connecting()
    bench.library.let_go.set()
    thread.join()
    cm_id._phase = type(cm_id._phase).ENDED  # else destroying takes a thread
    cm_id.destroy()
    await asyncio.sleep(0)
    assert bench.library.channels == 0
    assert bench.events.empty()


@pytest.mark.parametrize(
    ("number", "kind", "status"),
    [
        (errno.ECONNREFUSED, CMEventType.REJECTED, RejectReason.INVALID_SERVICE_ID),
        (errno.ECONNRESET, CMEventType.REJECTED, -errno.ECONNRESET),
        (errno.EHOSTUNREACH, CMEventType.UNREACHABLE, -errno.EHOSTUNREACH),
        (errno.ETIMEDOUT, CMEventType.UNREACHABLE, -errno.ETIMEDOUT),
        (errno.ENOMEM, CMEventType.CONNECT_ERROR, -errno.ENOMEM),
    ],
)
async def test_errors_of_a_connect(number: int, kind: CMEventType, status: int) -> None:
    """What rdma_connect fails with is reported as the event that it stands for."""
    bench = Bench()
    bench.library.connect_error = number
    cm_id, _ = bench.connecting()
    bench.library.let_go.set()
    event = await bench.events.get()
    assert (event.event, event.status, event.id) == (kind, status, cm_id)
    cm_id.destroy()


async def test_closed_channel_makes_none() -> None:
    """After close() there are no identifiers, and none can be made."""
    bench = Bench()
    bench.channel.create_id()
    bench.channel.close()
    assert not bench.library.ids
    with pytest.raises(DeviceError, match="closed"):
        bench.channel.create_id()


async def test_unknown_events_pass() -> None:
    """An event of a newer librdmacm, or of nobody, is acknowledged and dropped; the next one arrives."""
    bench = Bench()
    cm_id = bench.channel.create_id()
    bench.library.put(cm_id._handle, 99)
    bench.library.put(12345, CMEventType.ADDR_RESOLVED)
    bench.library.put(cm_id._handle, CMEventType.ADDR_RESOLVED)
    event = await bench.events.get()
    assert (event.event, event.id, cm_id.device_name) == (CMEventType.ADDR_RESOLVED, cm_id, "fake0")
    cm_id.destroy()


async def test_receiver_that_closes_the_channel() -> None:
    """A receiver may destroy what it is told of, and the rest too: events behind are dropped."""
    bench = Bench()
    cm_id = bench.channel.create_id()
    seen: list[Any] = []

    def close(event: CMEvent) -> None:
        seen.append(event.event)
        bench.channel.close()

    bench.channel.on_event = close
    bench.library.put(cm_id._handle, CMEventType.ADDR_RESOLVED)
    bench.library.put(cm_id._handle, CMEventType.ROUTE_RESOLVED)
    await until(lambda: not bench.library.channels)
    assert seen == [CMEventType.ADDR_RESOLVED]


async def test_budget_per_turn() -> None:
    """At most sixteen events are taken in one turn of the loop."""
    bench = Bench()
    cm_id = bench.channel.create_id()
    for _ in range(20):
        bench.library.put(cm_id._handle, CMEventType.ADDR_CHANGE)
    await bench.events.get()
    assert bench.events.qsize() == 15
    await until(lambda: bench.events.qsize() == 19)
    cm_id.destroy()


async def test_disconnect_that_fails_is_the_end() -> None:
    """Where rdma_disconnect fails, the connection's end is reported by us: no event will come."""
    bench = Bench()
    cm_id, thread = bench.connecting()
    bench.library.let_go.set()
    thread.join()
    bench.library.put(cm_id._handle, CMEventType.ESTABLISHED)
    assert (await bench.events.get()).event == CMEventType.ESTABLISHED
    cm_id.disconnect()
    assert (await bench.events.get()).event == CMEventType.DISCONNECTED
    cm_id.disconnect()
    await asyncio.sleep(0)
    assert bench.events.empty()
    cm_id.destroy()


async def test_device_removal_lets_go_of_the_device() -> None:
    """On DEVICE_REMOVAL librdmacm's own context is given up, and the event names the device."""
    bench = Bench()
    cm_id = bench.channel.create_id()
    bench.library.put(cm_id._handle, CMEventType.ADDR_RESOLVED)
    bench.library.put(cm_id._handle, CMEventType.DEVICE_REMOVAL)
    await bench.events.get()
    event = await bench.events.get()
    assert event.reason == "the RDMA device fake0 was removed"
    assert bench.library.removed == [cm_id._handle]
    cm_id.destroy()


async def test_readers_context_is_empty() -> None:
    """The channel's reader doesn't keep the context of whoever made the first identifier."""
    import contextvars  # noqa: PLC0415

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("kept")
    bench = Bench()
    cm_id = bench.channel.create_id()
    seen: asyncio.Queue[str] = asyncio.Queue()
    bench.channel.on_event = lambda _: seen.put_nowait(variable.get("empty"))
    bench.library.put(cm_id._handle, CMEventType.ADDR_RESOLVED)
    assert await seen.get() == "empty"
    cm_id.destroy()
