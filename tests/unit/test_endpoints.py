"""Where `listen()` listens: on the RDMA devices that have the address, and on the soft device beside them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import pytest

import aiordma
from aiordma import ClosedError, Connection, DeviceError, Endpoint, RejectedError
from tests.unit.fake_rdma import IWARP, ROCE, FakeRDMA, info


def where(listener: aiordma.Listener) -> list[tuple[str, str]]:
    """Give address and device of each endpoint."""
    return [(endpoint.host, endpoint.device) for endpoint in listener.endpoints]


async def dial(host: str, port: int, device: str) -> Connection:
    """Connect, as a coroutine."""
    return await aiordma.connect(host, port, device=device)


async def came_by(listener: aiordma.Listener, host: str, device: str) -> str:
    """Connect to a listener by a device, and say by which one the request came; its memory is that one's."""
    connecting = asyncio.ensure_future(dial(host, listener.port, device))
    request = await listener.get_request()
    assert request.pd is request.context.pd is aiordma.open_device(request.device).pd
    server = await request.accept()
    client = await connecting
    await client.close()
    await server.close()
    return request.device


async def test_every_device(rdma: FakeRDMA) -> None:
    """Every address: a wildcard for all RDMA devices, and soft's beside, at one port; each request has its device."""
    rdma.infos["iwarp0"] = info("iwarp0", IWARP)  # as one that leaves TCP's ports alone
    async with aiordma.listen("0.0.0.0") as listener:
        assert where(listener) == [("0.0.0.0", "rdma"), ("0.0.0.0", "soft")]
        assert {endpoint.port for endpoint in listener.endpoints} == {listener.port}
        assert await came_by(listener, ROCE, "roce0") == "roce0"
        assert await came_by(listener, IWARP, "iwarp0") == "iwarp0"
        assert await came_by(listener, "127.0.0.1", "soft") == "soft"


async def test_both_families(rdma: FakeRDMA) -> None:
    """Without a host: both families, on both, at one port."""
    rdma.infos.pop("iwarp0")
    async with aiordma.listen() as listener:
        assert sorted(where(listener)) == [
            ("0.0.0.0", "rdma"),
            ("0.0.0.0", "soft"),
            ("::", "rdma"),
            ("::", "soft"),
        ]
        assert {endpoint.port for endpoint in listener.endpoints} == {listener.port}


async def test_iwarp_has_its_interfaces(rdma: FakeRDMA) -> None:
    """Beside an iWARP device soft listens on each other interface, loopback included."""
    others = [name for _, name in socket.if_nameindex()]
    async with aiordma.listen("0.0.0.0") as listener:
        assert listener.endpoints[0] == Endpoint("0.0.0.0", listener.port, "rdma")
        assert listener.endpoints[1:] == [Endpoint("0.0.0.0", listener.port, "soft", name) for name in others]
        assert await came_by(listener, "127.0.0.1", "soft") == "soft"
    rdma.infos["iwarp0"] = aiordma.DeviceInfo(
        name="iwarp0", driver="verbs", transport="iWARP", available=True, interfaces=("lo",), takes_tcp_ports=True
    )
    async with aiordma.listen("0.0.0.0") as listener:
        assert [endpoint.interface for endpoint in listener.endpoints[1:]] == [n for n in others if n != "lo"]


async def test_addresses_of_one_device(rdma: FakeRDMA) -> None:
    """A RoCE device's address: that device and soft. An iWARP device's: that one, which serves soft's peers itself."""
    async with aiordma.listen(ROCE) as listener:
        assert where(listener) == [(ROCE, "roce0"), (ROCE, "soft")]
    async with aiordma.listen(IWARP) as listener:
        assert where(listener) == [(IWARP, "iwarp0")]


async def test_loopback_and_others_are_soft(rdma: FakeRDMA) -> None:
    """Loopback isn't offered to RDMA at all; an address that no RDMA device has is soft's."""
    for host, asked in (("127.0.0.1", []), ("127.0.1.1", [("bind_addr", "127.0.1.1")])):
        rdma.calls.clear()
        async with aiordma.listen(host) as listener:
            assert where(listener) == [(host, "soft")]
        assert [call for call in rdma.calls if call[0] == "bind_addr"] == asked


async def test_port_zero_starts_again(rdma: FakeRDMA) -> None:
    """Port 0: where RDMA's number is taken on soft, both start again with another."""
    with socket.socket() as taken:
        taken.bind((ROCE, 0))
        taken.listen()
        number = taken.getsockname()[1]
        rdma.ports = iter([number, number + 1 if number < 65_000 else number - 1])
        async with aiordma.listen(ROCE) as listener:
            assert listener.port != number
            assert [endpoint.port for endpoint in listener.endpoints] == [listener.port] * 2
            assert len(rdma.bound) == 1


@pytest.mark.parametrize("side", ["rdma", "soft"])
async def test_a_taken_port_is_an_error(rdma: FakeRDMA, side: str) -> None:
    """A port that is taken on one side is an error, and the other side is let go."""
    async with aiordma.listen(ROCE, device=side) as first:
        with pytest.raises(DeviceError, match="another port") as caught:
            await aiordma.listen(ROCE, first.port)
        assert caught.value.errno == errno.EADDRINUSE
        other = "soft" if side == "rdma" else "rdma"
        async with aiordma.listen(ROCE, first.port, device=other):
            pass


@pytest.mark.parametrize("call", ["bind_addr", "listen"])
async def test_a_device_that_fails_is_passed_over(rdma: FakeRDMA, call: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the wildcard fails, RDMA's addresses are offered one by one; what fails is said by a warning."""
    rdma.errors[call, "0.0.0.0"] = errno.EPERM
    rdma.errors[call, IWARP] = errno.EIO
    async with aiordma.listen("0.0.0.0") as listener:
        assert where(listener) == [(ROCE, "roce0"), ("0.0.0.0", "soft")]
        assert await came_by(listener, ROCE, "roce0") == "roce0"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "RDMA isn't offered at 0.0.0.0" in said[0]
    assert "device iwarp0 isn't offered" in said[1]


async def test_soft_beside_one_iwarp_address(rdma: FakeRDMA) -> None:
    """Where iWARP listens at an address instead of the wildcard, soft still leaves its interface out."""
    rdma.errors["listen", "0.0.0.0"] = errno.EPERM
    async with aiordma.listen("0.0.0.0") as listener:
        assert where(listener)[:2] == [(ROCE, "roce0"), (IWARP, "iwarp0")]
        assert all(endpoint.interface for endpoint in listener.endpoints[2:])


async def test_no_connection_manager(rdma: FakeRDMA, caplog: pytest.LogCaptureFixture) -> None:
    """Where RDMA can't be used at all, soft is, with a warning that says why."""
    rdma.channel_error = DeviceError(errno.ENOENT, "no rdma_cm", hint="modprobe rdma_ucm")
    async with aiordma.listen("0.0.0.0") as listener:
        assert where(listener) == [("0.0.0.0", "soft")]
    assert "modprobe rdma_ucm" in caplog.text


@pytest.mark.parametrize("device", ["rdma", "roce0"])
async def test_a_demand_fails(rdma: FakeRDMA, device: str) -> None:
    """A device that is demanded and fails is an error; soft doesn't listen instead."""
    rdma.errors["listen", "0.0.0.0"] = errno.EPERM
    with pytest.raises(DeviceError) as caught:
        await aiordma.listen("0.0.0.0", device=device)
    assert caught.value.errno == errno.EPERM


async def test_an_address_of_another_device(rdma: FakeRDMA) -> None:
    """A device's name with an address of another one is an error that has both."""
    with pytest.raises(DeviceError, match="device iwarp0, and roce0 is asked for"):
        await aiordma.listen(IWARP, device="roce0")
    with pytest.raises(DeviceError):
        await aiordma.listen("127.0.1.1", device="rdma")


async def test_a_name_with_every_address(rdma: FakeRDMA) -> None:
    """A device's name with every address takes that device's requests only; others are rejected."""
    async with aiordma.listen("0.0.0.0", device="roce0") as listener:
        assert where(listener) == [("0.0.0.0", "roce0")]
        with pytest.raises(RejectedError):
            await aiordma.connect(IWARP, listener.port, device="iwarp0")
        assert await came_by(listener, ROCE, "rdma") == "roce0"


async def test_a_domain_demands_its_device(rdma: FakeRDMA) -> None:
    """`pd=` demands its device, whose requests have it."""
    pd = aiordma.ProtectionDomain(aiordma.open_device("roce0"))
    async with aiordma.listen(ROCE, pd=pd) as listener:
        assert where(listener) == [(ROCE, "roce0")]
        assert listener.pd is pd
        connecting = asyncio.ensure_future(dial(ROCE, listener.port, "rdma"))
        request = await listener.get_request()
        assert request.pd is pd
        await request.reject()
        with pytest.raises(RejectedError):
            await connecting
    with pytest.raises(ValueError, match="protection domain"):
        await aiordma.listen(ROCE, pd=pd, device="soft")
    pd.close()


async def test_pd_of_a_listener_on_several(rdma: FakeRDMA) -> None:
    """A listener on one device has that one's domain; on several it can't be told, and the error says what to do."""
    async with aiordma.listen("0.0.0.0") as listener:
        with pytest.raises(DeviceError, match=r"request\.pd"):
            _ = listener.pd
    async with aiordma.listen("127.0.0.1") as listener:
        assert listener.pd is aiordma.open_device("soft").pd
    rdma.infos.pop("iwarp0")
    async with aiordma.listen("0.0.0.0", device="rdma") as listener:
        assert listener.context.name == "roce0"


async def test_a_device_that_cannot_be_opened(rdma: FakeRDMA, caplog: pytest.LogCaptureFixture) -> None:
    """A device that can't be opened is said so at once, and its requests are rejected; if demanded it is an error."""
    client = aiordma.open_device("roce0")
    rdma.open_error = DeviceError(errno.EACCES, "not for you")
    async with aiordma.listen("0.0.0.0") as listener:
        assert "device iwarp0 can't be opened" in caplog.text
        assert "device roce0" not in caplog.text
        connecting = asyncio.ensure_future(dial(ROCE, listener.port, "roce0"))
        while rdma.calls[-1][0] != "connect":  # noqa: ASYNC110
            await asyncio.sleep(0)
        client.closed = True  # as if it had to be opened for the request
        with pytest.raises(RejectedError):
            await connecting
        client.closed = False
        assert "can't be taken" in caplog.text
        assert await came_by(listener, "127.0.0.1", "soft") == "soft"
    client.close()
    with pytest.raises(DeviceError, match="not for you"):
        await aiordma.listen("0.0.0.0", device="rdma")


async def test_bind_cancelled(rdma: FakeRDMA) -> None:
    """A listen cancelled while the name is resolved leaves nothing; one that got there closes at once."""
    task = asyncio.ensure_future(_listen())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not rdma.bound


async def _listen() -> None:
    async with aiordma.listen("0.0.0.0"):
        await asyncio.get_running_loop().create_future()


async def test_closed_while_requests_wait(rdma: FakeRDMA) -> None:
    """Closing rejects what waits, of every device."""
    listener = await aiordma.listen("0.0.0.0")
    connecting = asyncio.ensure_future(dial(ROCE, listener.port, "roce0"))
    while listener._queue.empty():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await listener.close()
    with pytest.raises(RejectedError):
        await connecting
    with pytest.raises(ClosedError):
        await listener.get_request()


async def test_the_log_lists_the_endpoints(rdma: FakeRDMA, caplog: pytest.LogCaptureFixture) -> None:
    """The log has a line for each endpoint, and the names of the devices behind a wildcard."""
    caplog.set_level(logging.INFO, "aiordma")
    async with aiordma.listen("0.0.0.0") as listener:
        lines = [record.getMessage() for record in caplog.records if "listening" in record.getMessage()]
        assert len(lines) == len(listener.endpoints)
        assert "by rdma (roce0, iwarp0)" in lines[0]
