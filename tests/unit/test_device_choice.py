"""Which device `connect()` takes: demands, fallbacks, retries; and that no step leaves anything when cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

import aiordma
from aiordma import (
    AddressError,
    CMEventType,
    ConnectError,
    ConnectTimeoutError,
    DeviceError,
    RejectedError,
    RejectReason,
    RouteError,
    UnreachableError,
)
from aiordma.device import drivers, loop_state
from aiordma.errors import BrokenError
from tests.unit.fake_rdma import IWARP, ROCE, FakeRDMA, info, kernel_with


async def _nothing(conn: aiordma.Connection) -> None:
    with contextlib.suppress(BrokenError):
        await conn.recv()


@contextlib.asynccontextmanager
async def both_serve(rdma: FakeRDMA, host: str = ROCE) -> AsyncIterator[aiordma.Server]:
    """A server at an address of the fake's, by that device and by soft."""
    async with aiordma.serve(_nothing, host) as server:
        yield server


async def device_taken(host: str, port: int, **how: object) -> str:
    """Connect, and say by which device."""
    async with aiordma.connect(host, port, **how) as conn:  # type: ignore[arg-type]
        return conn.device


async def test_rdma_first(rdma: FakeRDMA) -> None:
    """Where an RDMA device reaches the peer, it is taken."""
    async with both_serve(rdma) as server:
        assert await device_taken(ROCE, server.port) == "roce0"


async def test_loopback_is_soft(rdma: FakeRDMA) -> None:
    """A loopback destination goes by soft, and nobody looks for RDMA devices."""
    async with aiordma.serve(_nothing, "127.0.0.1") as server:
        rdma.calls.clear()
        assert await device_taken("127.0.0.1", server.port) == "soft"
        assert rdma.calls == []


async def test_no_device_lists_none() -> None:
    """Without an RDMA device in the kernel soft is taken, at every address."""
    with kernel_with(None):
        async with aiordma.serve(_nothing, ROCE) as server:
            assert [endpoint.device for endpoint in server.listener.endpoints] == ["soft"]
            assert await device_taken(ROCE, server.port) == "soft"


@pytest.mark.parametrize("way", ["address", "route", "refused", "unreachable", "timeout", "tcp", "no device", "no cm"])
async def test_falls_back(rdma: FakeRDMA, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where RDMA doesn't get there soft is taken, and the log says so with the reason."""
    caplog.set_level(logging.INFO, "aiordma")
    async with both_serve(rdma) as server:
        match way:
            case "address":
                rdma.routes.clear()
            case "route":
                rdma.route_answer = (CMEventType.ROUTE_ERROR,)
            case "refused":
                rdma.reject(RejectReason.INVALID_SERVICE_ID)
            case "unreachable":
                rdma.answers.append((CMEventType.UNREACHABLE, {"status": -errno.EHOSTUNREACH}))
            case "timeout":
                rdma.answers.append((CMEventType.UNREACHABLE, {"status": -errno.ETIMEDOUT}))
            case "tcp":
                rdma.errors["connect", ROCE] = errno.ECONNREFUSED
            case "no device":
                aiordma.open_device("roce0").close()
                rdma.open_error = DeviceError(errno.EACCES, "not for you")
            case _:
                loop_state()._channels.pop("verbs").close()
                rdma.channel_error = DeviceError(errno.ENOENT, "no rdma_cm")
        assert await device_taken(ROCE, server.port) == "soft"
        (record,) = [record for record in caplog.records if "connected" in record.message]
        assert "by soft: RDMA failed" in record.message


@pytest.mark.parametrize("step", ["resolve_addr", "resolve_route", "connect"])
async def test_falls_back_after_the_delay(rdma: FakeRDMA, step: str) -> None:
    """A step without an answer is given up after fallback_delay, and nothing of it is left."""
    async with both_serve(rdma) as server:
        before = len(rdma.ids)
        rdma.silent = step
        assert await device_taken(ROCE, server.port, fallback_delay=0.001) == "soft"
        assert len(rdma.ids) == before


async def test_no_delay_waits(rdma: FakeRDMA, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fallback_delay=None RDMA's answer is waited for."""
    asked = []

    def timeout(seconds: float | None) -> asyncio.Timeout:
        asked.append(seconds)
        return asyncio.Timeout(None)

    monkeypatch.setattr("aiordma.connector.asyncio", SimpleNamespace(timeout=timeout))
    rdma.silent = "connect"
    task = asyncio.ensure_future(device_taken(ROCE, 1, fallback_delay=None))
    while not rdma.calls or rdma.calls[-1][0] != "connect":  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert asked == [None, None]
    rdma.ids[-1].emit(CMEventType.CONNECT_ERROR, status=-errno.EPROTO)
    with pytest.raises(ConnectError):
        await task


async def test_reject_of_the_program_is_final(rdma: FakeRDMA) -> None:
    """What the peer's program rejects isn't tried by soft, and its private data is there."""
    async with both_serve(rdma) as server:
        rdma.reject(RejectReason.CONSUMER_DEFINED, private_data=b"no")
        with pytest.raises(RejectedError) as caught:
            await aiordma.connect(ROCE, server.port)
        assert caught.value.private_data == b"no"
        assert not server.connections


async def test_other_failures_are_final(rdma: FakeRDMA) -> None:
    """A failure that says nothing about whether RDMA gets there isn't hidden by soft."""
    async with both_serve(rdma) as server:
        rdma.answers.append((CMEventType.CONNECT_ERROR, {"status": -errno.EPROTO}))
        with pytest.raises(ConnectError):
            await aiordma.connect(ROCE, server.port)


async def test_stale_connection_is_retried(rdma: FakeRDMA, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale connection at the peer is waited out on the same device."""
    monkeypatch.setattr("aiordma.connector._STALE_PAUSE", 0)
    async with both_serve(rdma) as server:
        for _ in range(3):
            rdma.reject(RejectReason.STALE_CONNECTION)
        assert await device_taken(ROCE, server.port) == "roce0"


async def test_stale_for_ever(rdma: FakeRDMA, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that stays stale is an error in the end, and not tried by soft."""
    monkeypatch.setattr("aiordma.connector._STALE_PAUSE", 0)
    async with both_serve(rdma) as server:
        for _ in range(10):
            rdma.reject(RejectReason.STALE_CONNECTION)
        with pytest.raises(RejectedError) as caught:
            await aiordma.connect(ROCE, server.port)
        assert caught.value.status == RejectReason.STALE_CONNECTION
        assert len(rdma.answers) == 6


@pytest.mark.parametrize("demand", ["rdma", "roce0"])
async def test_a_demand_has_no_fallback(rdma: FakeRDMA, demand: str) -> None:
    """With a device demanded its error is raised, though soft would reach the peer."""
    async with both_serve(rdma) as server:
        rdma.reject(RejectReason.INVALID_SERVICE_ID)
        with pytest.raises(RejectedError):
            await aiordma.connect(ROCE, server.port, device=demand)
        rdma.channel_error = DeviceError(errno.ENOENT, "no rdma_cm")
        loop_state()._channels.pop("verbs").close()
        with pytest.raises(DeviceError, match="no rdma_cm"):
            await aiordma.connect(ROCE, server.port, device=demand)


async def test_a_demand_by_the_environment(rdma: FakeRDMA, monkeypatch: pytest.MonkeyPatch) -> None:
    """AIORDMA_DEVICE demands as the argument does."""
    async with both_serve(rdma) as server:
        monkeypatch.setenv("AIORDMA_DEVICE", "soft")
        assert await device_taken(ROCE, server.port) == "soft"
        monkeypatch.setenv("AIORDMA_DEVICE", "rdma")
        assert await device_taken(ROCE, server.port) == "roce0"
        with pytest.raises(ConnectError):
            await aiordma.connect("127.0.0.1", server.port)


async def test_a_name_holds(rdma: FakeRDMA) -> None:
    """A device's name is held against the one that routing takes: the error has both."""
    rdma.infos["iwarp0"] = info("iwarp0", "fd79::1")  # no address of the family
    with pytest.raises(AddressError, match="device roce0, and iwarp0 is asked for"):
        await aiordma.connect(ROCE, 1, device="iwarp0")


async def test_a_name_gives_the_source(rdma: FakeRDMA) -> None:
    """Where routing takes another device than the one named, it is tried from that one's address."""
    async with aiordma.serve(_nothing, device="rdma") as server:
        rdma.routes[ROCE] = "iwarp0"
        assert await device_taken(ROCE, server.port, device="roce0") == "roce0"


async def test_a_domain_demands_its_device(rdma: FakeRDMA) -> None:
    """`pd=` demands its device, and can't be of another than `device=`."""
    async with both_serve(rdma) as server:
        soft = aiordma.open_device("soft").pd
        assert await device_taken(ROCE, server.port, pd=soft) == "soft"
        roce = aiordma.open_device("roce0").pd
        assert await device_taken(ROCE, server.port, pd=roce, device="rdma") == "roce0"
        for pd, device in ((soft, "rdma"), (roce, "soft"), (roce, "iwarp0")):
            with pytest.raises(ValueError, match="protection domain"):
                await aiordma.connect(ROCE, server.port, pd=pd, device=device)


async def test_the_first_error_has_the_others_as_notes(rdma: FakeRDMA) -> None:
    """Where nothing gets there, RDMA's error is raised with soft's as a note."""
    with pytest.raises(RejectedError, match="is the server running") as caught:
        await aiordma.connect(ROCE, 1)
    assert len(caught.value.__notes__) == 1
    assert "TCP port 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("resolve_addr", errno.EADDRNOTAVAIL, AddressError),
        ("resolve_route", errno.EIO, RouteError),
        ("connect", errno.EHOSTUNREACH, UnreachableError),
        ("connect", errno.ETIMEDOUT, ConnectTimeoutError),
        ("connect", errno.EINVAL, ConnectError),
    ],
)
async def test_what_a_refused_call_is(rdma: FakeRDMA, call: str, number: int, error: type[Exception]) -> None:
    """A step that the system refuses to begin has the exception of one that fails."""
    rdma.errors[call, ROCE] = number
    with pytest.raises(ConnectError) as caught:
        await aiordma.connect(ROCE, 1, device="rdma")
    assert type(caught.value) is error


async def test_hint_of_an_iwarp_timeout(rdma: FakeRDMA) -> None:
    """Where an iWARP peer doesn't answer, the text says that the client speaks first; on RoCE it doesn't."""
    for host, hint in ((IWARP, True), (ROCE, False)):
        rdma.answers.append((CMEventType.UNREACHABLE, {"status": -errno.ETIMEDOUT}))
        with pytest.raises(ConnectTimeoutError) as caught:
            await aiordma.connect(host, 1, device="rdma")
        assert ("client speaks first" in str(caught.value)) == hint


@pytest.mark.parametrize("may_fall_back", [True, False])
async def test_cancelled_after_any_number_of_turns(
    rdma: FakeRDMA, may_fall_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connect cancelled after n turns, for every n up to its end, leaves no identifier and no queue pair."""

    async def resolve(host: str, port: int) -> list[tuple[str, int]]:  # a thread's turns can't be counted
        return [(host, port)]

    async with both_serve(rdma) as server:
        monkeypatch.setattr("aiordma.connector.resolve_host", resolve)
        listening = len(rdma.ids)
        taken, turns = "", 0
        while not taken:
            if may_fall_back:
                rdma.reject(RejectReason.INVALID_SERVICE_ID)
            task = asyncio.ensure_future(device_taken(ROCE, server.port))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            taken = "" if task.cancelled() else task.result()
            rdma.answers.clear()
            while server.connections or len(rdma.ids) > listening:  # noqa: ASYNC110 - the server's side of it
                await asyncio.sleep(0)
            turns += 1
        assert turns > 8
        assert taken == ("soft" if may_fall_back else "roce0")


async def test_open_device_takes_the_best(rdma: FakeRDMA) -> None:
    """open_device() without a name opens the first RDMA device; "rdma" too; without any it opens soft."""
    assert aiordma.open_device().name == "roce0"
    assert aiordma.open_device("rdma").name == "roce0"
    assert aiordma.open_device("iwarp0").name == "iwarp0"
    rdma.infos.clear()
    assert aiordma.open_device().name == "soft"
    with pytest.raises(DeviceError, match="no RDMA device is usable"):
        aiordma.open_device("rdma")


async def test_what_is_missing_is_said(rdma: FakeRDMA) -> None:
    """A device that is there and can't be used: the error has its hint."""
    unusable = aiordma.DeviceInfo(
        name="roce0", driver="verbs", transport="RoCE", available=False, hint="install pyverbs"
    )  # fmt: skip
    rdma.infos = {"roce0": unusable}
    for name in ("rdma", "roce0"):
        with pytest.raises(DeviceError, match="install pyverbs") as caught:
            aiordma.open_device(name)
        assert caught.value.errno == errno.ENODEV


def test_both_drivers_are_listed() -> None:
    """devices() asks soft and verbs, also where the kernel has no device: its entry says what to do."""
    assert [driver.name for driver in drivers()] == ["soft", "verbs"]
    assert {device.driver for device in aiordma.devices()} == {"soft", "verbs"}
