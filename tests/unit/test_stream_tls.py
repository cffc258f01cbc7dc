"""TLS over streams, by asyncio's own layer, on both loops, with certificates that are verified."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest
import trustme

import aiordma
from tests.conformance.support import pattern

HOST = "127.0.0.1"
SIZE = 300_000


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority of this file's own."""
    return trustme.CA()


@pytest.fixture(scope="module")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    """The server's context: its certificate is for localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_context(authority: trustme.CA) -> ssl.SSLContext:
    """The client's context: it knows the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_encrypted_from_the_start(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> None:
    """`ssl=` at both ends: verified, and much data comes back as it was."""
    async with await aiordma.start_server(_echo, HOST, 0, ssl=server_context) as server:
        reader, writer = await aiordma.open_connection(
            HOST, server.port, ssl=client_context, server_hostname="localhost"
        )
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert writer.get_extra_info("device") == "soft"
        data = pattern(SIZE)
        writer.write(data)
        assert await reader.readexactly(SIZE) == data
        writer.close()
        await writer.wait_closed()


async def test_a_name_that_is_not_the_certificates(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """The handshake fails at the client, and nothing is left open."""
    async with await aiordma.start_server(_echo, HOST, 0, ssl=server_context) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await aiordma.open_connection(HOST, server.port, ssl=client_context, server_hostname="elsewhere")


async def test_start_tls(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> None:
    """A stream that begins in the clear goes on encrypted, by aiordma's function on every loop."""

    class Upgraded(asyncio.Protocol):
        """Echoes, encrypted from its first message on."""

        def __init__(self) -> None:
            self.upgrading: asyncio.Task[None] | None = None
            self.transport: asyncio.Transport | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            assert self.transport is not None
            if self.upgrading is None:
                assert data == b"STARTTLS"
                self.transport.write(b"OK")
                self.upgrading = asyncio.create_task(self.upgrade())
            else:
                self.transport.write(data)

        async def upgrade(self) -> None:
            assert self.transport is not None
            self.transport = await aiordma.start_tls(self.transport, self, server_context, server_side=True)

    async with await aiordma.create_server(Upgraded, HOST, 0) as server:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await aiordma.create_connection(lambda: protocol, HOST, server.port)
        transport.write(b"STARTTLS")
        assert await reader.readexactly(2) == b"OK"
        encrypted = await aiordma.start_tls(transport, protocol, client_context, server_hostname="localhost")
        encrypted.write(b"secret")
        assert await reader.readexactly(6) == b"secret"
        encrypted.close()
        assert await reader.read() == b""
        server.close_clients()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"server_hostname": "localhost"}, "server_hostname is only meaningful with ssl"),
        ({"ssl_handshake_timeout": 1.0}, "only meaningful with ssl"),
    ],
)
async def test_arguments_in_vain(arguments: dict[str, Any], message: str) -> None:
    """What has no meaning without `ssl` is refused, as by asyncio."""
    with pytest.raises(ValueError, match=message):
        await aiordma.open_connection(HOST, 1, **arguments)
    with pytest.raises(TypeError, match="SSLContext"):
        await aiordma.start_server(_echo, HOST, 0, ssl=True)
