"""Devices, what they can do, and what they report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import pytest

import aiordma
from aiordma import (
    Access,
    AsyncEventType,
    BrokenError,
    Connection,
    DeviceError,
    QPState,
    RemoteRegion,
    UnsupportedError,
)
from tests.conformance.support import DEVICE, HOST, capabilities, offer, pair, pattern, require


def test_devices() -> None:
    """The device under test is listed as available; those that aren't say in one line what to do."""
    found = aiordma.devices()
    assert [device.available for device in found if device.name == DEVICE] == [True]
    assert len({device.name for device in found}) == len(found)
    for device in found:
        assert device.transport
        assert device.available or (device.hint and "\n" not in device.hint)


async def test_open_device() -> None:
    """Opening gives one context for a device and loop, which connections use too."""
    context = aiordma.open_device(DEVICE)
    assert context.name == DEVICE
    assert aiordma.open_device(DEVICE) is context
    async with pair() as ends:
        assert ends.client.context is context
        assert ends.client.device == DEVICE
        assert ends.client.pd is context.pd


async def test_unknown_device() -> None:
    """A name that no device has is a DeviceError that lists those that are here."""
    calls: list[Callable[[], Any]] = [
        lambda: aiordma.connect(HOST, 1, device="nonesuch0"),
        lambda: aiordma.listen(HOST, 0, device="nonesuch0"),
        lambda: aiordma.serve(_nothing, HOST, 0, device="nonesuch0"),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="nonesuch0") as caught:
            await call()
        assert DEVICE in str(caught.value)
    with pytest.raises(DeviceError, match="nonesuch0"):
        aiordma.open_device("nonesuch0")


async def _nothing(_: Connection) -> None:
    """Handle a connection."""


async def test_device_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """AIORDMA_DEVICE is the device where none is named; a name given has precedence."""
    monkeypatch.setenv("AIORDMA_DEVICE", "nonesuch1")
    with pytest.raises(DeviceError, match="nonesuch1"):
        await aiordma.connect(HOST, 1)
    with pytest.raises(DeviceError, match="nonesuch1"):
        await aiordma.listen(HOST, 0)
    async with pair() as ends:
        assert ends.client.device == DEVICE
    monkeypatch.setenv("AIORDMA_DEVICE", DEVICE)
    async with aiordma.listen(HOST, 0) as listener:
        assert listener.context.name == DEVICE
    monkeypatch.setenv("AIORDMA_DEVICE", "")
    assert aiordma.open_device() is not None


async def test_capabilities() -> None:
    """The record makes sense, and can't be changed."""
    caps = capabilities()
    assert caps.transport in ("iwarp", "roce", "ib")
    assert caps.success_proves in ("acknowledged", "handed")
    for name in (
        "max_send_wr",
        "max_recv_wr",
        "max_sge",
        "max_cqe",
        "max_responder_resources",
        "max_initiator_depth",
    ):
        assert getattr(caps, name) >= 1
    assert caps.max_msg_size >= 1 << 30
    assert caps.max_connect_private_data >= 20
    assert caps.write_fault_known <= caps.remote_fault_known
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        caps.atomics = False  # type: ignore[misc]


async def test_unsupported() -> None:
    """What the device can't is an UnsupportedError that names the capability; all else works."""
    async with pair() as ends:
        region, remote = offer(ends.server, 64)
        client = ends.client
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("atomics", lambda: client.fetch_add(remote, 1)),
            ("atomics", lambda: client.compare_swap(remote, 1, 2)),
            ("atomics", lambda: client.batch().fetch_add(remote, 1)),
            ("write_with_imm", lambda: client.write(remote[:1], b"x", imm=1)),
            ("send_with_imm", lambda: client.send(b"x", imm=1)),
            ("send_with_invalidate", lambda: client.send(b"x", invalidate=remote.rkey)),
        ]
        for capability, call in calls:
            if not getattr(client.capabilities, capability):
                with pytest.raises(UnsupportedError, match=capability):
                    call()
        await client.send(b"works")
        assert await ends.server.recv() == b"works"
        assert region.view == pattern(64)


async def test_query_port() -> None:
    """The first port is active; a port that isn't there is an error."""
    port = aiordma.open_device(DEVICE).query_port()
    assert port.state == "active"
    assert port.active_mtu <= port.max_mtu
    with pytest.raises((ValueError, DeviceError)):
        aiordma.open_device(DEVICE).query_port(77)


async def test_states() -> None:
    """A queue pair is ready when connected, and in error when the connection ended."""
    async with pair() as ends:
        assert [end.qp.state for end in (ends.client, ends.server)] == [QPState.RTS] * 2
        assert ends.client.qp.qp_num != ends.server.qp.qp_num
        assert not ends.client.is_closing()
        await ends.client.close()
        assert ends.client.is_closing()
        with pytest.raises(BrokenError):
            await ends.server.recv()
        assert ends.server.qp.state == QPState.ERR
        assert ends.server.is_closing()


async def test_events() -> None:
    """A refused request is an event of the device that refused it, with queue pair and reason."""
    context = aiordma.open_device(DEVICE)
    require("qp_fault_events")
    async with contextlib.aclosing(context.events()) as events, pair() as ends:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        region, remote = offer(ends.server, 8, access=Access.REMOTE_READ)
        await asyncio.gather(ends.client.write(remote, bytes(8)), return_exceptions=True)
        seen = [await waiting]
        while seen[-1].element != ends.server.qp.qp_num:
            seen.append(await anext(events))  # the requester's device may report too
        assert seen[-1].event_type in (
            AsyncEventType.QP_ACCESS_ERR,
            AsyncEventType.QP_REQ_ERR,
            AsyncEventType.QP_FATAL,
        )
        if ends.server.capabilities.transport == "iwarp":
            assert "access rights" in seen[-1].reason
        await region.close()


async def test_events_of_two_watchers() -> None:
    """Every watcher gets every event."""
    context = aiordma.open_device(DEVICE)
    require("qp_fault_events")
    async with (
        contextlib.aclosing(context.events()) as first,
        contextlib.aclosing(context.events()) as second,
        pair() as ends,
    ):
        waiting = [asyncio.ensure_future(anext(events)) for events in (first, second)]
        await asyncio.sleep(0)
        await asyncio.gather(ends.client.write(RemoteRegion(0, 8, 0), bytes(8)), return_exceptions=True)
        one, two = await asyncio.gather(*waiting)
        assert one == two


async def test_reprs() -> None:
    """Objects say who they are, open and closed."""
    async with pair() as ends:
        region = ends.client.alloc(64)
        shown = [ends.client, ends.client.qp, ends.listener, region, region[3:9], ends.client.context]
        texts = [repr(thing) for thing in shown]
        assert DEVICE in texts[0]
        assert "RTS" in texts[0]
        assert str(ends.listener.port) in texts[2]
        assert "[3:9]" in texts[4]
        await ends.client.close()
        assert "closed" in repr(ends.client)


async def test_many_queue_pairs() -> None:
    """More queue pairs than one completion queue takes are served by further ones."""
    param = aiordma.ConnParam(max_send_wr=8000, recv_depth=8000, recv_size=8)
    async with contextlib.AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(pair(client_param=param, server_param=param)) for _ in range(4)]
        for number, ends in enumerate(pairs):
            await ends.client.send(b"%d" % number)
        assert [await ends.server.recv() for ends in pairs] == [b"0", b"1", b"2", b"3"]
