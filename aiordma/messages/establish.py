"""`connect_messages()`, `serve_messages()`, `serve_calls()`: the two sides say hello in their private data."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import attrs

from aiordma.connection import Connection
from aiordma.connector import connect
from aiordma.domain import ProtectionDomain
from aiordma.errors import BrokenError
from aiordma.listener import ConnectRequest
from aiordma.messages.calls import CallHandler
from aiordma.messages.channel import MessageChannel
from aiordma.messages.protocol import MessageParam, Protocol
from aiordma.opening import Opening
from aiordma.server import Server, serve
from aiordma.types import ConnParam

__all__ = ["connect_messages", "serve_calls", "serve_messages"]


def connect_messages(
    host: str,
    port: int,
    *,
    messages: MessageParam | None = None,
    device: str | None = None,
    param: ConnParam | None = None,
    local_addr: tuple[str, int] | None = None,
    pd: ProtectionDomain | None = None,
    fallback_delay: float | None = 1.0,
) -> Opening[MessageChannel]:
    """Connect to a server of messages or of calls: `async with aiordma.connect_messages(host, port) as channel`.

    Args:
        host: see `connect`.
        port: see `connect`.
        messages: sizes of the channel.
        device: see `connect`.
        param: see `connect`; recv_size and recv_depth are set to what the channel needs.
        local_addr: see `connect`.
        pd: see `connect`.
        fallback_delay: see `connect`.

    Raises:
        ProtocolError: what listens there isn't a server of messages.
        ConnectError, DeviceError, ValueError: as for `connect`; a server that isn't one of messages may reject.
    """

    async def make() -> MessageChannel:
        own = messages or MessageParam()
        connection = await connect(
            host, port, device=device, private_data=own.to_bytes(), param=_with_receives(param, own),
            local_addr=local_addr, pd=pd, fallback_delay=fallback_delay,
        )  # fmt: skip
        try:
            peer = MessageParam.from_bytes(connection.peer_private_data)
            return MessageChannel(connection, own, peer, accepted=False)
        except BaseException:
            connection.abort()
            raise

    return Opening(make)


def serve_messages(
    handler: Callable[[MessageChannel], Awaitable[object]],
    host: str | None = None,
    port: int = 0,
    *,
    messages: MessageParam | None = None,
    device: str | None = None,
    backlog: int = 512,
    param: ConnParam | None = None,
    pd: ProtectionDomain | None = None,
) -> Opening[Server]:
    """Serve message channels with a handler: `async with aiordma.serve_messages(handle, host, port) as server`.

    The channel is closed when its handler returns; see `serve` for what else becomes of handlers. A peer that doesn't
    say hello is rejected.

    Args:
        handler: a coroutine function that takes the channel.
        host: see `listen`.
        port: see `listen`.
        messages: sizes of the channels.
        device: see `listen`.
        backlog: see `listen`.
        param: see `listen`; recv_size and recv_depth are set to what the channels need.
        pd: see `listen`.

    Raises:
        DeviceError, AddressError: as for `listen`.
    """
    own = messages or MessageParam()
    return _serve(handler, None, own, host, port, device=device, backlog=backlog, param=param, pd=pd)


def serve_calls(
    handler: CallHandler,
    host: str | None = None,
    port: int = 0,
    *,
    messages: MessageParam | None = None,
    device: str | None = None,
    backlog: int = 512,
    param: ConnParam | None = None,
    pd: ProtectionDomain | None = None,
) -> Opening[Server]:
    """Serve calls with a handler, which takes a request and gives the reply; peers make them by `channel.call()`.

    A task runs the handler for each request, for as many at once as `MessageParam.max_calls` says, by default 128 of
    each peer. Its exception goes to the caller, as a RemoteCallError with type and text. It is cancelled when the
    caller cancels the call, or the channel ends.

    Args:
        handler: a coroutine function that takes bytes, and gives what `MessageChannel.send` takes.
        host: see `listen`.
        port: see `listen`.
        messages: sizes of the channels.
        device: see `listen`.
        backlog: see `listen`.
        param: see `listen`; recv_size and recv_depth are set to what the channels need.
        pd: see `listen`.

    Raises:
        DeviceError, AddressError: as for `listen`.
    """
    own = messages or MessageParam(max_calls=128)
    return _serve(
        MessageChannel.wait_closed, handler, own, host, port, device=device, backlog=backlog, param=param, pd=pd
    )


def _serve(
    handler: Callable[[MessageChannel], Awaitable[object]],
    call_handler: CallHandler | None,
    own: MessageParam,
    host: str | None,
    port: int,
    *,
    device: str | None,
    backlog: int,
    param: ConnParam | None,
    pd: ProtectionDomain | None,
) -> Opening[Server]:
    if call_handler is None:
        own = attrs.evolve(own, max_calls=0)
    hello = own.to_bytes()

    def answer(request: ConnectRequest) -> bytes:
        MessageParam.from_bytes(request.private_data)  # else it is rejected
        return hello

    async def handle(connection: Connection) -> None:
        peer = MessageParam.from_bytes(connection.peer_private_data)
        channel = MessageChannel(connection, own, peer, accepted=True, handler=call_handler)
        try:
            await handler(channel)
        finally:
            # How a channel ends that its handler is done with concerns nobody.
            with contextlib.suppress(BrokenError):
                await channel.close()

    return serve(
        handle, host, port, private_data=answer, device=device, backlog=backlog, param=_with_receives(param, own), pd=pd
    )


def _with_receives(param: ConnParam | None, own: MessageParam) -> ConnParam:
    """Have a connection post the receives that the protocol relies on."""
    return attrs.evolve(param or ConnParam(), recv_size=own.frame_size, recv_depth=Protocol.receives(own))
