"""A device that is removed: everything of it ends with BrokenError, nothing of it is left, and the program goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import (
    Access,
    AsyncEventType,
    BrokenError,
    ClosedError,
    ConnectError,
    Connection,
    Opcode,
    ProtectionDomain,
)
from aiordma.cm import CMID
from aiordma.device import loop_state
from tests.unit.fake_driver import Rig, rig
from tests.unit.fake_rdma import IWARP, ROCE, FakeRDMA, qp_of
from tests.unit.test_endpoints import dial

GONE = "device roce0 is gone"


@contextlib.asynccontextmanager
async def pair(rdma: FakeRDMA) -> AsyncIterator[tuple[Connection, Connection, aiordma.Listener]]:
    """Two ends of a connection by roce0, and the wildcard listener."""
    async with aiordma.listen("0.0.0.0") as listener:
        connecting = asyncio.ensure_future(dial(ROCE, listener.port, "roce0"))
        server = await (await listener.get_request()).accept()
        client = await connecting
        try:
            yield client, server, listener
        finally:
            for end in (client, server):
                with contextlib.suppress(BrokenError):
                    await end.close()


async def removed(rdma: FakeRDMA, name: str = "roce0") -> None:
    """Remove a device, and let the loop hear of it."""
    rdma.remove(name)
    for _ in range(3):
        await asyncio.sleep(0)


async def test_every_future_ends(rdma: FakeRDMA) -> None:
    """Requests in flight, waiting and collected, a receive and a drain end with BrokenError that has the device."""
    async with pair(rdma) as (client, _, _):
        remote = aiordma.RemoteRegion(0, 1 << 20, 1)
        into = client.alloc(64)
        writes = [client.write(remote, b"x") for _ in range(2 * client.qp.max_send_wr + 5)]
        reads = [client.read(remote, into) for _ in range(3)]
        receiving = asyncio.ensure_future(client.recv())
        draining = asyncio.ensure_future(client.drain())
        await asyncio.sleep(0)
        await removed(rdma)
        outcomes = await asyncio.gather(*writes, *reads, receiving, draining, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BrokenError}
        assert all(GONE in str(outcome) for outcome in outcomes)
        assert all(GONE in str(outcome.__cause__) for outcome in outcomes if isinstance(outcome, BrokenError))


async def test_flushes_that_come_do_no_harm(rdma: FakeRDMA) -> None:
    """A device that still flushes what it has: the outcome is the removal all the same."""
    async with pair(rdma) as (client, _, _):
        sending = client.send(b"x")
        qp = qp_of(client)
        await removed(rdma)
        qp.send_cq.ring()
        with pytest.raises(BrokenError, match=GONE):
            await sending


async def test_flushes_without_a_cause(rdma: FakeRDMA) -> None:
    """Where the flush is there before the removal, that is its cause, and the outcome of each request."""
    async with pair(rdma) as (client, _, _):
        sending = [client.send(b"x") for _ in range(3)]
        qp = qp_of(client)
        qp.to_error()
        qp.send_cq.ring()
        await removed(rdma)
        for outcome in await asyncio.gather(*sending, return_exceptions=True):
            assert isinstance(outcome, BrokenError)
            assert GONE in str(outcome)


async def test_collected_reads_end(rdma: FakeRDMA) -> None:
    """READs that were collected in the turn of the removal end as well."""
    async with pair(rdma) as (client, _, _):
        remote, into = aiordma.RemoteRegion(0, 64, 1), client.alloc(64)
        rdma.remove("roce0")
        reads = [client.read(remote, into) for _ in range(9)]
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, BrokenError)


async def test_nothing_is_left(rdma: FakeRDMA) -> None:
    """Queue pairs, regions, domains, queues, identifiers and the context are closed by themselves."""
    async with pair(rdma) as (client, server, _):
        context = client.context
        own = ProtectionDomain(context)
        regions = [own.alloc(8, access=Access.REMOTE_READ), client.alloc(8, access=Access.REMOTE_READ), client.alloc(8)]
        lone = own.create_qp()
        fake = rdma.opened[0]
        pds = [own.driver, context.pd.driver]
        await removed(rdma)
        assert all(qp.closed for qp in fake.qps)
        assert all(cq.closed for cq in fake.cqs)
        assert all(pd.closed and not pd.regions for pd in pds)  # type: ignore[attr-defined]
        assert fake.closed
        assert context.closed
        assert [cm_id for cm_id in rdma.ids if cm_id.device_name == "roce0"] == []
        assert all(region.closed for region in regions)
        assert lone.closed
        assert client.is_closing()
        assert server.is_closing()


async def test_use_after_it(rdma: FakeRDMA) -> None:
    """Whatever of the device is used afterwards raises BrokenError with its name."""
    async with pair(rdma) as (client, _, _):
        context, pd = client.context, client.pd
        lone = pd.create_qp()
        await removed(rdma)
        remote = aiordma.RemoteRegion(0, 8, 1)
        for call in (
            lambda: client.write(remote, b"x"),
            lambda: client.read(remote),
            lambda: client.alloc(8),
            lambda: client.register(bytearray(8)),
            lambda: pd.alloc(8, access=Access.REMOTE_READ),
            pd.create_qp,
            context.query_port,
            context.query_gids,
            lambda: ProtectionDomain(context),
            lambda: lone.post_send(Opcode.SEND, ()),
            lambda: lone.post_recv(()),
            lone.local_address,
        ):
            with pytest.raises(BrokenError, match=GONE):
                call()
        with pytest.raises(BrokenError, match=GONE):
            await client.recv()
        with pytest.raises(BrokenError, match="roce0"):
            await aiordma.connect(ROCE, 1, device="rdma", pd=_on(pd, rdma))


def _on(pd: ProtectionDomain, rdma: FakeRDMA) -> ProtectionDomain:
    """The device is back, the domain isn't."""
    rdma.infos["roce0"] = FakeRDMA().infos["roce0"]
    return pd


async def test_close_says_it_once(rdma: FakeRDMA) -> None:
    """close() of a connection whose device is gone raises it, if nobody was told; and closes."""
    async with pair(rdma) as (client, server, _):
        await removed(rdma)
        with pytest.raises(BrokenError, match=GONE):
            await client.close()
        await client.close()
        with pytest.raises(BrokenError):
            await server.recv()
        await server.close()


async def test_the_program_goes_on(rdma: FakeRDMA) -> None:
    """Other devices go on; the device that is back is opened anew, and the wildcard serves it."""
    async with pair(rdma) as (client, _, listener):
        old = client.context
        device = rdma.infos["roce0"]
        await removed(rdma)
        rdma.infos["roce0"] = device
        for host, name in ((IWARP, "iwarp0"), (ROCE, "roce0")):
            connecting = asyncio.ensure_future(dial(host, listener.port, name))
            async with await (await listener.get_request()).accept() as server, await connecting as again:
                assert again.device == server.device == name
                assert again.context is not old


async def test_connects_under_way(rdma: FakeRDMA) -> None:
    """A connect and an accept that wait when the device is removed fail, and leave nothing."""
    async with aiordma.listen("0.0.0.0") as listener:
        connecting = asyncio.ensure_future(dial(ROCE, listener.port, "roce0"))
        request = await listener.get_request()
        await removed(rdma)
        with pytest.raises(ConnectError, match=GONE):
            await connecting
        with pytest.raises(BrokenError, match=GONE):
            await request.accept()


@pytest.mark.parametrize("step", ["resolve_addr", "resolve_route", "connect"])
async def test_each_step(rdma: FakeRDMA, step: str) -> None:
    """Whichever step waits, the removal ends it."""
    rdma.silent = step
    connecting = asyncio.ensure_future(dial(ROCE, 1, "roce0"))
    while not rdma.ids or rdma.ids[0].device_name is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(6):
        await asyncio.sleep(0)
    await removed(rdma)
    with pytest.raises(ConnectError, match=GONE):
        await connecting


async def test_a_listener_loses_its_endpoint(rdma: FakeRDMA) -> None:
    """The endpoint at an address of the device is lost; the others go on."""
    async with aiordma.listen(ROCE) as listener:
        await removed(rdma)
        assert [endpoint.device for endpoint in listener.endpoints] == ["soft"]
        connecting = asyncio.ensure_future(dial(ROCE, listener.port, "soft"))
        async with await (await listener.get_request()).accept(), await connecting:
            pass


async def test_the_last_endpoint(rdma: FakeRDMA) -> None:
    """With the last endpoint get_request and the iteration end with BrokenError, each time; after close ClosedError."""
    async with aiordma.listen(ROCE, device="roce0") as listener:
        waiting = asyncio.ensure_future(listener.get_request())
        await asyncio.sleep(0)
        await removed(rdma)
        for ends in (waiting, _iterate(listener), listener.get_request()):
            with pytest.raises(BrokenError, match=GONE):
                await ends
        await listener.close()
        with pytest.raises(ClosedError):
            await listener.get_request()


async def _iterate(listener: aiordma.Listener) -> object:
    return [request async for request in listener]


async def _hold(conn: Connection) -> None:
    await conn.recv()


async def test_a_server_without_endpoints(rdma: FakeRDMA) -> None:
    """serve_forever raises when no endpoint is left, and has closed; a server nobody waits for just stops."""
    server = await aiordma.serve(_hold, ROCE, device="roce0")
    idle = await aiordma.serve(_hold, ROCE, device="rdma")
    serving = asyncio.ensure_future(server.serve_forever())
    await asyncio.sleep(0)
    await removed(rdma)
    with pytest.raises(BrokenError, match=GONE):
        await serving
    assert not idle.is_serving()
    await server.wait_closed()
    await idle.close()


async def test_events_end(rdma: FakeRDMA) -> None:
    """The device's events end with DEVICE_FATAL; of a context that is gone there are none."""
    context = aiordma.open_device("roce0")
    seen = []

    async def watch() -> None:
        async for event in context.events():
            seen.append(event.event_type)  # noqa: PERF401 - what came before an error shall be seen

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    assert rdma.opened[0].handler is not None
    rdma.opened[0].handler(AsyncEventType.PORT_ERR, 1, "")
    rdma.opened[0].handler(AsyncEventType.DEVICE_FATAL, 0, "pulled out")
    await watching
    assert seen == [AsyncEventType.PORT_ERR, AsyncEventType.DEVICE_FATAL]
    await watch()
    assert "pulled out" in str(context.removed)
    assert rdma.opened[0].closed


async def test_both_ways_at_once(rdma: FakeRDMA) -> None:
    """The removal heard from identifiers and by DEVICE_FATAL is one removal, also of a device opened anew meanwhile."""
    async with pair(rdma) as (client, _, _):
        handler = rdma.opened[0].handler
        assert handler is not None
        handler(AsyncEventType.DEVICE_FATAL, 0, "")
        device = rdma.infos["roce0"]
        rdma.remove("roce0")
        rdma.infos["roce0"] = device
        while not client.context.closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        again = aiordma.open_device("roce0")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not again.closed


async def test_identifiers_alone(rdma: FakeRDMA) -> None:
    """A removal where no context is open ends what waits at the identifiers, requests nobody took too."""
    state = loop_state()
    server, client = CMID(state, rdma), CMID(state, rdma)
    server.bind_addr(("0.0.0.0", 7471))
    server.listen(1)
    fake = client.driver
    await client.resolve_addr((ROCE, 7471))
    await client.resolve_route()
    fake.connect(rig_qp := Rig().device, aiordma.ConnParam(), b"")
    assert rig_qp is not None
    while not server._requests:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await removed(rdma)
    assert client.destroyed
    assert not server._requests
    assert [cm_id for cm_id in rdma.ids if cm_id.device_name == "roce0"] == []
    assert "gone" in await client.disconnected()
    server.destroy()


async def test_a_device_that_fails_to_close(caplog: pytest.LogCaptureFixture) -> None:
    """A device that refuses everything when it goes: what is here ends all the same, and the log says what."""
    async with rig() as device:
        future = device.post()

        def refuse() -> None:
            raise OSError(5, "gone")

        device.device.to_error = refuse  # type: ignore[method-assign]
        device.fake.cqs[0].close = refuse  # type: ignore[method-assign]
        assert device.fake.handler is not None
        device.fake.handler(AsyncEventType.DEVICE_FATAL, 0, "")
        with pytest.raises(BrokenError, match="device fake is gone"):
            await future
        assert device.fake.closed
        assert device.qp.closed
        assert "[Errno 5]" in caplog.text
