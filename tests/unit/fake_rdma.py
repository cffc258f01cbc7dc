"""A kernel with RDMA devices of which the test decides everything: who is reached, who listens, and what a step says.

Two devices, roce0 and iwarp0, beside the soft device, which is the real one. Their addresses are this host's, in
127.0.0.0/8, of which 127.0.0.1 alone counts as loopback here: so the soft device can stand in. Their ports are the
fake's own, iwarp0's too: that it takes TCP's is told by its DeviceInfo.
"""

# ruff: noqa: ARG002 - arguments that the seam prescribes

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiordma import device as device_module
from aiordma.drivers.base import CMEvent, DriverQP
from aiordma.enums import CMEventType, QPState, RejectReason
from aiordma.errors import DeviceError
from aiordma.types import ConnParam, DeviceInfo, SocketAddress
from tests.unit.fake_driver import FakeContext, FakeQP

ROCE = "127.0.77.1"
ROCE6 = "fd77::1"
IWARP = "127.0.79.1"
WILDCARDS = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "::1")


def info(name: str, address: str, **fields: Any) -> DeviceInfo:
    """Describe a device."""
    return DeviceInfo(
        name=name, driver="verbs", transport="fake", available=True, interfaces=(f"if-{name}",), addresses=(address,),
        **fields,
    )  # fmt: skip


def _free(port: int) -> bool:
    """Whether nobody of this machine has a TCP port."""
    with socket.socket() as sock:
        try:
            sock.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


class FakeRDMAContext(FakeContext):
    """A device, opened."""

    def __init__(self, name: str, transport: str) -> None:
        super().__init__(transport=transport, max_connect_private_data=56)
        self.name = name


class FakeCMID:
    """An identifier. What a step answers is its driver's script; a connection to a listener of the fake comes there."""

    def __init__(self, channel: FakeCMChannel) -> None:
        self._channel = channel
        self.driver = channel.driver
        self.device_name: str | None = None
        self.local_addr: SocketAddress = ()
        self.peer_addr: SocketAddress = ()
        self.destroyed = False
        self.listening = False
        self.accepted = False
        self.qp: FakeQP | None = None
        self.peer: FakeCMID | None = None

    def __repr__(self) -> str:
        return f"<FakeCMID {self.local_addr} {self.device_name}>"

    def emit(self, event: CMEventType, **fields: Any) -> None:
        """Report an event, later."""

        def report() -> None:
            if not self.destroyed:
                self._channel.on_event(CMEvent(event=event, id=self, **fields))

        self._channel.loop.call_soon(report)

    def bind_addr(self, addr: SocketAddress, *, interface: str = "") -> None:
        assert not interface
        self.driver.calls.append(("bind_addr", addr[0]))
        self.driver.fail("bind_addr", addr[0])
        host, port = addr[:2]
        if host not in WILDCARDS:
            self.device_name = self.driver.device_of(host)
            if self.device_name is None:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        port = port or next(self.driver.ports)
        if (host, port) in self.driver.bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.driver.bound[host, port] = self
        self.local_addr = (host, port, *addr[2:])

    def listen(self, backlog: int) -> None:
        self.driver.fail("listen", self.local_addr[0])
        self.listening = True

    def resolve_addr(self, src: SocketAddress | None, dst: SocketAddress, timeout: float) -> None:
        self.peer_addr = dst
        self.driver.calls.append(("resolve_addr", dst[0]))
        self.driver.fail("resolve_addr", dst[0])
        self.device_name = self.driver.device_of(src[0]) if src else self.driver.routes.get(dst[0])
        if self.device_name is None:
            self.emit(CMEventType.ADDR_ERROR, status=-errno.ENODEV)
        elif self.driver.silent != "resolve_addr":
            self.local_addr = (src or self.driver.infos[self.device_name].addresses)[0], 1
            self.emit(CMEventType.ADDR_RESOLVED)

    def resolve_route(self, timeout: float) -> None:
        self.driver.fail("resolve_route", self.peer_addr[0])
        if self.driver.silent != "resolve_route":
            self.emit(*self.driver.route_answer)

    def connect(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        assert isinstance(qp, FakeQP)
        self.qp = qp
        self.driver.calls.append(("connect", self.peer_addr[0]))
        self.driver.fail("connect", self.peer_addr[0])
        if self.driver.silent == "connect":
            return
        if self.driver.answers:
            event, fields = self.driver.answers.pop(0)
            self.emit(event, **fields)
            return
        host, port = self.peer_addr[:2]
        bound = self.driver.bound
        listener = next((bound[at, port] for at in (host, *WILDCARDS) if (at, port) in bound), None)
        if listener is None or not listener.listening:
            self.emit(CMEventType.REJECTED, status=RejectReason.INVALID_SERVICE_ID)
            return
        child = self.peer = FakeCMID(self._channel)
        self.driver.ids.append(child)
        child.peer = self
        child.device_name = self.driver.device_of(host)
        child.local_addr, child.peer_addr = self.peer_addr, self.local_addr
        child.emit(CMEventType.CONNECT_REQUEST, listen_id=listener, private_data=private_data)

    def accept(self, qp: DriverQP, param: ConnParam, private_data: bytes) -> None:
        assert self.peer is not None
        assert isinstance(qp, FakeQP)
        self.qp = qp
        if self.peer.destroyed:
            self.emit(CMEventType.CONNECT_ERROR, status=-errno.ECONNRESET)
            return
        self.accepted = self.peer.accepted = True
        self.emit(CMEventType.ESTABLISHED)
        self.peer.emit(CMEventType.ESTABLISHED, private_data=private_data)

    def reject(self, private_data: bytes) -> None:
        assert self.peer is not None
        self.peer.emit(CMEventType.REJECTED, status=RejectReason.CONSUMER_DEFINED, private_data=private_data)
        self.peer = None

    def disconnect(self) -> None:
        assert not self.destroyed
        for end in (self, self.peer):
            if end is not None:
                if end.qp is not None:
                    end.qp.disconnected = True
                end.emit(CMEventType.DISCONNECTED)

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True
        self.driver.ids.remove(self)
        for key in [key for key, cm_id in self.driver.bound.items() if cm_id is self]:
            del self.driver.bound[key]
        if self.peer is not None and not self.peer.destroyed:
            end = CMEventType.DISCONNECTED if self.accepted else CMEventType.REJECTED
            self.peer.emit(end, status=0 if self.accepted else RejectReason.CONSUMER_DEFINED)


class FakeCMChannel:
    """The event channel."""

    def __init__(self, driver: FakeRDMA, loop: asyncio.AbstractEventLoop, on_event: Callable[[CMEvent], None]) -> None:
        self.driver = driver
        self.loop = loop
        self.on_event = on_event

    def create_id(self) -> FakeCMID:
        self.driver.ids.append(FakeCMID(self))
        return self.driver.ids[-1]

    def close(self) -> None:
        """Nothing is open."""


class FakeRDMA:
    """The driver.

    Attributes:
        infos: the devices, by name.
        routes: which device reaches an address.
        errors: an errno for a call at an address: ("bind_addr", ROCE).
        answers: what the next connects are answered, else they go to listeners.
        silent: the step that gets no answer.
        calls: what was asked of it.
        ids: identifiers there are.
        bound: those with an address.
        opened: contexts, the closed ones too.
    """

    name = "verbs"

    def __init__(self) -> None:
        self.infos = {"roce0": info("roce0", ROCE), "iwarp0": info("iwarp0", IWARP, takes_tcp_ports=True)}
        self.routes = {ROCE: "roce0", ROCE6: "roce0", IWARP: "iwarp0"}
        self.transports = {"roce0": "roce", "iwarp0": "iwarp"}
        self.errors: dict[tuple[str, str], int] = {}
        self.answers: list[tuple[CMEventType, dict[str, Any]]] = []
        self.silent = ""
        self.route_answer: tuple[CMEventType] = (CMEventType.ROUTE_RESOLVED,)
        self.calls: list[tuple[str, str]] = []
        self.ids: list[FakeCMID] = []
        self.bound: dict[tuple[str, int], FakeCMID] = {}
        #: Free for TCP too: where the soft device stands beside, a taken one would have both tried again.
        self.ports: Iterator[int] = filter(_free, itertools.count(40_000))
        self.opened: list[FakeRDMAContext] = []
        self.open_error: DeviceError | None = None
        self.channel_error: DeviceError | None = None

    def device_of(self, address: str) -> str | None:
        """Give the device that has an address of this host's."""
        return next((name for name, device in self.infos.items() if address in device.addresses), None)

    def fail(self, call: str, address: str) -> None:
        """Raise what the test wants to be raised."""
        if number := self.errors.get((call, address)):
            raise OSError(number, os.strerror(number))

    def reject(self, status: int, **fields: Any) -> None:
        """Answer the next connect by a reject."""
        self.answers.append((CMEventType.REJECTED, {"status": status, **fields}))

    def list_devices(self) -> list[DeviceInfo]:
        self.calls.append(("list_devices", ""))
        return list(self.infos.values())

    def open(self, name: str, loop: asyncio.AbstractEventLoop) -> FakeRDMAContext:
        if self.open_error is not None:
            raise self.open_error
        self.opened.append(FakeRDMAContext(name, self.transports[name]))
        return self.opened[-1]

    def create_cm_channel(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[CMEvent], None]) -> FakeCMChannel:
        if self.channel_error is not None:
            raise self.channel_error
        return FakeCMChannel(self, loop, on_event)

    def remove(self, name: str) -> None:
        """Take a device away: whoever has an identifier bound to it hears of it."""
        del self.infos[name]
        for cm_id in self.ids:
            if cm_id.device_name == name:
                cm_id.emit(CMEventType.DEVICE_REMOVAL)

    def nothing_left(self) -> bool:
        """Whether every identifier and queue pair is gone."""
        return not self.ids and all(qp.closed for context in self.opened for qp in context.qps)


def qp_of(conn: Any) -> FakeQP:
    """Give a connection's queue pair on the fake device."""
    driver = conn.qp.driver
    assert isinstance(driver, FakeQP)
    assert driver.state is not QPState.RESET
    return driver


@contextmanager
def kernel_with(driver: FakeRDMA | None) -> Iterator[None]:
    """Let the kernel have these devices, or none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "_kernel_has_devices", lambda: driver is not None)
        if driver is not None:
            patch.setattr(device_module, "_verbs_driver", lambda: driver)
        for module in ("connector", "binding"):
            patch.setattr(f"aiordma.{module}.is_loopback", lambda address: address[0] in LOOPBACK)
        patch.delenv("AIORDMA_DEVICE", raising=False)
        yield
