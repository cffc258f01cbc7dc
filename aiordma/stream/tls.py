"""TLS over any transport and on any loop: asyncio's own layer, which works on ssl.MemoryBIO."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
from typing import Any, cast

from attrs import frozen

__all__ = ["TLS", "start_tls"]


@frozen(kw_only=True)
class TLS:
    """How a stream is encrypted: the arguments that asyncio's functions have for it."""

    context: ssl.SSLContext
    server_side: bool
    server_hostname: str | None = None
    handshake_timeout: float | None = None
    shutdown_timeout: float | None = None

    @classmethod
    def wanted(
        cls, context: ssl.SSLContext | bool | None, *, server_side: bool, server_hostname: str | None,
        host: str | None, handshake_timeout: float | None, shutdown_timeout: float | None,
    ) -> TLS | None:  # fmt: skip
        """Take asyncio's arguments, by its rules; None: no TLS.

        Raises:
            ValueError: `server_hostname` is needed and missing, or given in vain; so are time-outs.
            TypeError: a server's `ssl` is no context.
        """
        if not context:
            if server_hostname is not None:
                raise ValueError("server_hostname is only meaningful with ssl")
            if handshake_timeout is not None or shutdown_timeout is not None:
                raise ValueError("ssl_handshake_timeout and ssl_shutdown_timeout are only meaningful with ssl")
            return None
        if server_side:
            if not isinstance(context, ssl.SSLContext):
                raise TypeError("ssl argument must be an SSLContext or None")
        elif server_hostname is None:
            if not host:
                raise ValueError("You must set server_hostname when using ssl without a host")
            server_hostname = host
        return cls(
            context=context if isinstance(context, ssl.SSLContext) else ssl.create_default_context(),
            server_side=server_side, server_hostname=server_hostname,
            handshake_timeout=handshake_timeout, shutdown_timeout=shutdown_timeout,
        )  # fmt: skip

    def layer(
        self, protocol: asyncio.BaseProtocol, waiter: asyncio.Future[None] | None, *, connected: bool = False
    ) -> Any:
        """Make the protocol that encrypts what `protocol` writes; `connected`: that has its connection already."""
        # No public face of it takes a transport of another kind on every loop: uvloop's start_tls() refuses ours.
        make = cast("Any", asyncio.sslproto).SSLProtocol
        return make(
            asyncio.get_running_loop(), protocol, self.context, waiter, self.server_side, self.server_hostname,
            call_connection_made=not connected,
            ssl_handshake_timeout=self.handshake_timeout, ssl_shutdown_timeout=self.shutdown_timeout,
        )  # fmt: skip


async def start_tls(
    transport: asyncio.Transport,
    protocol: asyncio.BaseProtocol,
    sslcontext: ssl.SSLContext,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
) -> asyncio.Transport:
    """Encrypt a stream from now on, as `loop.start_tls()` does, but on every loop.

    Returns:
        The transport that `protocol` is to write to from now on.

    Cancellation: closes the transport.

    Raises:
        ssl.SSLError, ConnectionError: the handshake failed.
    """
    if not isinstance(sslcontext, ssl.SSLContext):
        raise TypeError(f"sslcontext is expected to be an instance of ssl.SSLContext, got {sslcontext!r}")
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    tls = TLS(
        context=sslcontext, server_side=server_side, server_hostname=server_hostname,
        handshake_timeout=ssl_handshake_timeout, shutdown_timeout=ssl_shutdown_timeout,
    )  # fmt: skip
    layer = tls.layer(protocol, waiter, connected=True)
    # Nothing is to be delivered to the layer before it knows its transport.
    transport.pause_reading()
    transport.set_protocol(layer)
    loop.call_soon(layer.connection_made, transport)
    loop.call_soon(transport.resume_reading)
    try:
        await waiter
    except BaseException:
        transport.close()
        raise
    return cast("asyncio.Transport", layer._app_transport)  # noqa: SLF001 - as asyncio's loops do
