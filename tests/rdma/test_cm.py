"""The steps of rdma_cm at the seam, between two identifiers of this process."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from aiordma.drivers.watch import watch_readable
from aiordma.enums import CMEventType, QPState, RejectReason
from aiordma.errors import DeviceError
from aiordma.types import ConnParam
from tests.rdma.support import CM, DEVICE, HOST, HOST6, IWARP, PARAM, connection_manager, driver

#: An address of the documentation's, to which this machine has no way.
NOWHERE = "192.0.2.1"
#: What ends a connection that isn't established, or not for long.
ENDS = {CMEventType.REJECTED, CMEventType.CONNECT_ERROR, CMEventType.UNREACHABLE, CMEventType.DISCONNECTED}


async def test_connect_and_accept() -> None:
    """Both sides become established, with private data both ways; the acceptor's queue pair is ready to send."""
    async with connection_manager() as cm:
        listener = cm.listen()
        client, server, request = await cm.requested(listener, b"hello")
        assert request.listen_id is listener
        assert request.private_data.rstrip(b"\0") == b"hello"
        qp = cm.qp()
        server.accept(driver(qp), PARAM, b"welcome")
        established = await cm.next(client, CMEventType.ESTABLISHED)
        assert established.private_data.rstrip(b"\0") == b"welcome"
        await cm.next(server, CMEventType.ESTABLISHED)
        assert qp.state() == QPState.RTS


async def test_addresses_and_device() -> None:
    """Each side knows both addresses and the device."""
    async with connection_manager() as cm:
        listener = cm.listen()
        client, server, _ = await cm.requested(listener)
        assert client.device_name == server.device_name == listener.device_name == DEVICE
        assert client.local_addr == server.peer_addr
        assert client.peer_addr == server.local_addr == listener.local_addr
        assert client.local_addr[0] == HOST


async def test_ipv6() -> None:
    """The same over IPv6."""
    async with connection_manager() as cm:
        listener = cm.listen(host=HOST6)
        client = await cm.resolved(listener.local_addr[1], HOST6)
        client.connect(driver(cm.qp()), PARAM, b"")
        request = await cm.next(listener, CMEventType.CONNECT_REQUEST)
        assert request.id.peer_addr == client.local_addr
        assert client.local_addr == (HOST6, client.local_addr[1], 0, 0)


async def test_ipv6_wildcard_leaves_ipv4() -> None:
    """Both families' wildcards are bound to one port, and both take requests."""
    async with connection_manager() as cm:
        listener = cm.listen(host="0.0.0.0")
        listener6 = cm.listen(host="::", port=listener.local_addr[1])
        for host, expected in ((HOST, listener), (HOST6, listener6)):
            client = await cm.resolved(listener.local_addr[1], host)
            client.connect(driver(cm.qp()), PARAM, b"")
            request = await cm.next(expected, CMEventType.CONNECT_REQUEST)
            assert request.id.device_name == DEVICE
        assert listener.device_name is None


async def test_source_address() -> None:
    """A source address is taken as this side's."""
    async with connection_manager() as cm:
        listener = cm.listen()
        client = cm.channel.create_id()
        client.resolve_addr((HOST, 0), (HOST, listener.local_addr[1]), 2.0)
        await cm.next(client, CMEventType.ADDR_RESOLVED)
        assert client.local_addr[0] == HOST


async def test_depths_are_agreed() -> None:
    """Each side's READ depths are within what the other offers."""
    async with connection_manager() as cm:
        listener = cm.listen()
        client, server, request = await cm.requested(
            listener, param=ConnParam(responder_resources=4, initiator_depth=3)
        )
        assert (request.responder_resources, request.initiator_depth) == (3, 4)
        qp = cm.qp()
        server.accept(driver(qp), ConnParam(responder_resources=2, initiator_depth=9), b"")
        there = await cm.next(client, CMEventType.ESTABLISHED)
        here = await cm.next(server, CMEventType.ESTABLISHED)
        assert (here.responder_resources, here.initiator_depth) == (2, 4)
        # Over iWARP the kernel doesn't tell the client what the server answered.
        assert (there.responder_resources, there.initiator_depth) == ((4, 3) if IWARP else (4, 2))


async def test_queue_pairs_have_what_conn_param_says() -> None:
    """Retries, timers and the type of service of each side's ConnParam are in its own queue pair."""
    if IWARP:
        pytest.skip("iWARP has neither retries nor RNR: TCP does that")
    ours = ConnParam(retry_count=3, rnr_retry=2, ack_timeout=0.067, rnr_timer=0.001, tos=96)
    theirs = ConnParam(retry_count=5, rnr_retry=0, ack_timeout=0.5)
    async with connection_manager() as cm:
        listener = cm.listen()
        client = await cm.resolved(listener.local_addr[1])
        qp, peer_qp = cm.qp(), cm.qp()
        client.connect(driver(qp), ours, b"")
        request = await cm.next(listener, CMEventType.CONNECT_REQUEST)
        request.id.accept(driver(peer_qp), theirs, b"")
        await cm.next(client, CMEventType.ESTABLISHED)
        have, peer_has = qp.attr(), peer_qp.attr()
        assert (have.retry_cnt, have.rnr_retry, have.timeout, have.min_rnr_timer) == (3, 2, 14, 14)
        assert (peer_has.retry_cnt, peer_has.rnr_retry, peer_has.timeout, peer_has.min_rnr_timer) == (5, 0, 17, 12)
        assert qp.modified[1][1].ah_attr.grh.traffic_class == 96


async def test_reject() -> None:
    """A reject arrives as the peer program's, with its private data."""
    async with connection_manager() as cm:
        client, server, _ = await cm.requested(cm.listen())
        server.reject(b"no room")
        event = await cm.next(client, CMEventType.REJECTED)
        assert event.status == RejectReason.CONSUMER_DEFINED
        assert event.private_data.rstrip(b"\0") == b"no room"
        assert "program rejected" in event.reason


async def test_nothing_listens() -> None:
    """Where nothing listens, the request is rejected for that reason."""
    async with connection_manager() as cm:
        listener = cm.listen()
        port = listener.local_addr[1]
        listener.destroy()
        client = await cm.resolved(port)
        client.connect(driver(cm.qp()), PARAM, b"")
        event = await cm.next(client, CMEventType.REJECTED)
        assert event.status == RejectReason.INVALID_SERVICE_ID
        assert "nothing listens" in event.reason


async def test_disconnect() -> None:
    """The peer is told, once; its queue pair knows that it was in order; the end is reported here too."""
    async with connection_manager() as cm:
        client, server, _ = await cm.requested(cm.listen())
        qp = cm.qp()
        server.accept(driver(qp), PARAM, b"")
        await cm.next(client, CMEventType.ESTABLISHED)
        await cm.next(server, CMEventType.ESTABLISHED)
        client.disconnect()
        event = await cm.next(server, CMEventType.DISCONNECTED)
        assert event.reason == qp.reason == "the peer disconnected"
        server.disconnect()
        await cm.next(client, CMEventType.DISCONNECTED)
        server.disconnect()
        client.disconnect()
        if not IWARP:
            await cm.next(client, CMEventType.TIMEWAIT_EXIT)


async def test_no_address() -> None:
    """An address without a way there is an address error, whether the call says so or an event."""
    async with connection_manager() as cm:
        client = cm.channel.create_id()
        client.resolve_addr(None, (NOWHERE, 1), 0.5)
        event = await cm.next(client, CMEventType.ADDR_ERROR)
        assert event.status < 0
        assert event.reason
        assert client.peer_addr == (NOWHERE, 1)


async def test_port_in_use() -> None:
    """A port that is taken is said to be, with the next step."""
    async with connection_manager() as cm:
        listener = cm.listen()
        with pytest.raises(DeviceError, match="another program listens") as caught:
            cm.listen(port=listener.local_addr[1])
        assert caught.value.errno == errno.EADDRINUSE


async def test_foreign_address() -> None:
    """An address that no device has isn't bound."""
    async with connection_manager() as cm:
        with pytest.raises(DeviceError) as caught:
            cm.listen(host=NOWHERE)
        assert caught.value.errno in {errno.EADDRNOTAVAIL, errno.ENODEV}
        assert caught.value.hint


async def test_port_again_after_connections() -> None:
    """A server that is started again takes the same port, though connections of the first go on."""
    async with connection_manager() as cm:
        listener = cm.listen()
        _, server, _ = await cm.requested(listener)
        server.accept(driver(cm.qp()), PARAM, b"")
        await cm.next(server, CMEventType.ESTABLISHED)
        port = listener.local_addr[1]
        listener.destroy()
        assert cm.listen(port=port).local_addr[1] == port


async def test_listener_destroyed_with_requests() -> None:
    """Requests that weren't taken from the channel yet are rejected with their listener."""
    async with connection_manager() as cm, connection_manager() as servers:
        listener = servers.listen()
        # The event comes, and stays where it is.
        watch_readable(asyncio.get_running_loop(), servers.channel._fd, listener.destroy)
        client = await cm.resolved(listener.local_addr[1])
        client.connect(driver(cm.qp()), PARAM, b"")
        await cm.next(client, CMEventType.REJECTED)


async def test_channel_closed_with_requests() -> None:
    """Requests that were reported, and nobody took, are rejected with the channel."""
    async with connection_manager() as cm:
        servers = CM()
        listener = servers.listen()
        client = await cm.resolved(listener.local_addr[1])
        client.connect(driver(cm.qp()), PARAM, b"")
        await servers.next(listener, CMEventType.CONNECT_REQUEST)
        servers.close()
        event = await cm.next(client, CMEventType.REJECTED)
        assert event.status == RejectReason.CONSUMER_DEFINED


async def test_request_for_a_destroyed_listener() -> None:
    """A request that is taken from the channel after its listener was destroyed is rejected."""
    async with connection_manager() as cm, connection_manager() as servers:
        listener, other = servers.listen(), servers.listen()
        client = await cm.resolved(listener.local_addr[1])
        client.connect(driver(cm.qp()), PARAM, b"")
        get_event = servers.channel.library.get_event

        class Late:
            def __getattr__(self, name: str) -> object:
                return getattr(servers_library, name)

            def get_event(self, channel: int) -> object:
                raw = get_event(channel)
                if raw is not None:
                    listener.destroy()
                return raw

        servers_library = servers.channel.library
        servers.channel.library = Late()  # type: ignore[assignment]
        await cm.next(client, CMEventType.REJECTED)
        other.destroy()


async def test_accept_of_a_peer_that_left() -> None:
    """Accepting a peer that left ends with an event, not in silence."""
    async with connection_manager() as cm:
        client, server, _ = await cm.requested(cm.listen())
        client.destroy()
        server.accept(driver(cm.qp()), PARAM, b"")
        event = await cm.next(server)
        if event.event == CMEventType.ESTABLISHED:  # on iWARP, as soon as the Reply is sent
            event = await cm.next(server)
        assert event.event in ENDS


def open_fds() -> int:
    """Count this process's descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_thousand_identifiers() -> None:
    """Identifiers made and destroyed leave no descriptor, not even the channel's."""
    before = open_fds()
    async with connection_manager() as cm:
        for _ in range(10):
            made = [cm.channel.create_id() for _ in range(100)]
            assert open_fds() > before
            for cm_id in made:
                cm_id.destroy()
            assert open_fds() == before


async def test_port_of_another_kind() -> None:
    """A TCP socket's port is no obstacle on InfiniBand and RoCE, and one on iWARP."""
    async with connection_manager() as cm:
        with socket.socket() as sock:
            sock.bind((HOST, 0))
            sock.listen()
            if IWARP:
                with pytest.raises(DeviceError):
                    cm.listen(port=sock.getsockname()[1])
            else:
                cm.listen(port=sock.getsockname()[1])
