"""What a message can carry beside its bytes: an immediate, a key to invalidate, a solicited event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import Access, Connection, MemoryRegion, RemoteRegion, UnsupportedError, WCStatus
from tests.conformance.support import ended, offer, pair, pattern, refused

_Post = Callable[[Connection, RemoteRegion, MemoryRegion], Any]


async def check(capability: str, post: _Post) -> bool:
    """Post on a fresh pair where the device can't: UnsupportedError, and no harm."""
    async with pair() as ends:
        if getattr(ends.client.capabilities, capability):
            return True
        region, remote = offer(ends.server, 64)
        with pytest.raises(UnsupportedError, match=capability):
            post(ends.client, remote, region)
        assert await ends.client.read(remote) == pattern(64)
        return False


@pytest.mark.parametrize("size", [0, 1, 64, 9000, 200_000])
@pytest.mark.parametrize("imm", [0, 1, 0xDEADBEEF, 0xFFFFFFFF])
async def test_write_with_imm(size: int, imm: int) -> None:
    """WRITE with immediate places the data, then delivers the immediate and the length written."""
    if not await check("write_with_imm", lambda conn, remote, _: conn.write(remote[:4], b"data", imm=imm)):
        return
    async with pair() as ends:
        region, remote = offer(ends.server, size)
        await ends.client.write(remote, pattern(size, 6), imm=imm)
        with await ends.server.recv_message() as message:
            assert region.view == pattern(size, 6)
            assert message.imm_data == imm
            assert message.byte_len == size
            assert len(message.data) == 0


@pytest.mark.parametrize("imm", [np.uint32(7), np.int64(7), np.uint8(7), True])
async def test_imm_of_another_integer_type(imm: Any) -> None:
    """An immediate may be any integer, NumPy's too; what is none is refused before anything is posted."""
    if not await check("write_with_imm", lambda conn, remote, _: conn.write(remote[:4], b"data", imm=7)):
        return
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        await ends.client.write(remote, b"", imm=imm)
        for wrong in (7.0, "7", np.float32(7), np.int64(-1), np.uint64(1 << 32)):
            with pytest.raises((TypeError, ValueError)):
                ends.client.write(remote, b"", imm=wrong)  # type: ignore[arg-type]
        await ends.client.send(b"works")
        with await ends.server.recv_message() as message:
            assert message.imm_data == int(imm)
        assert await ends.server.recv() == b"works"


async def test_imm_is_not_kept() -> None:
    """The immediate of one WRITE doesn't come back in a later one that has 0."""
    if not await check("write_with_imm", lambda conn, remote, _: conn.write(remote[:4], b"data", imm=7)):
        return
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        for imm in (7, 0, 0, 9, 0):
            await ends.client.write(remote, b"", imm=imm)
            with await ends.server.recv_message() as message:
                assert message.imm_data == imm


async def test_imm_among_messages() -> None:
    """Immediates and messages keep their order; recv and recv_into give no bytes for an immediate."""
    if not await check("write_with_imm", lambda conn, remote, _: conn.write(remote[:4], b"data", imm=7)):
        return
    async with pair() as ends:
        _, remote = offer(ends.server, 8)
        client = ends.client
        client.send(b"before")
        client.write(remote, b"12345678", imm=1)
        client.send(b"between")
        client.write(remote, b"12345678", imm=2)
        client.write(remote, b"plain")
        client.send(b"after")
        assert await ends.server.recv() == b"before"
        assert await ends.server.recv() == b""
        assert await ends.server.recv() == b"between"
        assert await ends.server.recv_into(bytearray()) == 0
        with await ends.server.recv_message() as message:
            assert message.data.tobytes() == b"after"
            assert message.imm_data is None
            assert message.byte_len == 5


async def test_many_imms() -> None:
    """Immediates beyond the receives posted wait as messages do."""
    if not await check("write_with_imm", lambda conn, remote, _: conn.write(remote[:4], b"data", imm=7)):
        return
    async with pair(server_param=aiordma.ConnParam(recv_depth=2)) as ends:
        _, remote = offer(ends.server, 8)
        for imm in range(200):
            ends.client.write(remote[: imm % 9], bytes(imm % 9), imm=imm)
        for imm in range(200):
            with await ends.server.recv_message() as message:
                assert (message.imm_data, message.byte_len) == (imm, imm % 9)


async def test_send_with_imm() -> None:
    """SEND with immediate delivers both, or is unsupported without harm."""
    if not await check("send_with_imm", lambda conn, *_: conn.send(b"data", imm=5)):
        return
    async with pair() as ends:
        await ends.client.send(b"data", imm=0xFFFF0001)
        with await ends.server.recv_message() as message:
            assert message.data.tobytes() == b"data"
            assert message.imm_data == 0xFFFF0001


@pytest.mark.parametrize("value", [-1, 1 << 32])
async def test_32_bits(value: int) -> None:
    """Values over 32 bits are a ValueError, and nothing is posted."""
    async with pair() as ends:
        _, remote = offer(ends.server, 64)
        if ends.client.capabilities.write_with_imm:
            with pytest.raises(ValueError, match="32 bits"):
                ends.client.write(remote[:1], b"x", imm=value)
        if ends.client.capabilities.send_with_invalidate:
            with pytest.raises(ValueError, match="32 bits"):
                ends.client.send(b"x", invalidate=value)
        assert await ends.client.read(remote) == pattern(64)


async def test_imm_or_invalidate() -> None:
    """Both at once are a ValueError: they share a field."""
    async with pair() as ends:
        with pytest.raises(ValueError, match="one of them"):
            ends.client.send(b"x", imm=1, invalidate=2)


@pytest.mark.parametrize("solicited", [False, True])
async def test_send_with_invalidate(solicited: bool) -> None:
    """The key is stale when the message is delivered; the message says which; other keys are good."""
    if not await check("send_with_invalidate", lambda conn, remote, _: conn.send(b"", invalidate=remote.rkey)):
        return
    async with pair() as ends:
        _, kept = offer(ends.server, 64)
        region, remote = offer(ends.server, 64)
        assert await ends.client.read(remote) == pattern(64)
        ends.client.send(b"done", invalidate=remote.rkey, solicited=solicited)
        with await ends.server.recv_message() as message:
            assert message.data.tobytes() == b"done"
            assert message.invalidated == remote.rkey == region.rkey
            assert message.imm_data is None
        assert await ends.client.read(kept) == pattern(64)
        with refused(ends.client.capabilities, WCStatus.REM_ACCESS_ERR, "invalid STag"):
            await ends.client.read(remote)
        await region.close()


async def test_send_with_invalidate_of_a_large_message() -> None:
    """A message of many packets invalidates once all of it is here."""
    if not await check("send_with_invalidate", lambda conn, remote, _: conn.send(b"", invalidate=remote.rkey)):
        return
    async with pair(server_param=aiordma.ConnParam(recv_size=300_000)) as ends:
        _, remote = offer(ends.server, 64)
        ends.client.send(pattern(300_000), invalidate=remote.rkey)
        with await ends.server.recv_message() as message:
            assert message.invalidated == remote.rkey
            assert message.data == pattern(300_000)


@pytest.mark.parametrize("which", ["unknown", "local"])
async def test_invalidate_what_may_not_be(which: str) -> None:
    """A key that isn't one, or of memory without remote rights, can't be invalidated: the connection ends."""
    if not await check("send_with_invalidate", lambda conn, remote, _: conn.send(b"", invalidate=remote.rkey)):
        return
    async with pair() as other, pair() as ends:
        _, remote = offer(other.server, 64)
        private = ends.server.register(bytearray(pattern(64)))
        await ends.client.send(b"", invalidate=0 if which == "unknown" else private.rkey)
        with pytest.raises(aiordma.BrokenError):
            await ends.client.recv()
        with pytest.raises(aiordma.BrokenError) as caught:
            await ends.server.recv()
        if ends.server.capabilities.transport == "iwarp":
            assert "can't be invalidated" in str(caught.value)
        # The key that was aimed at still is one.
        await other.server.send(private)
        assert await other.client.recv() == pattern(64)
        assert await other.client.read(remote) == pattern(64)


async def test_solicited() -> None:
    """A solicited message is a message."""
    async with pair() as ends:
        for solicited in (True, False, True):
            await ends.client.send(b"asks %d" % solicited, solicited=solicited)
            assert await ends.server.recv() == b"asks %d" % solicited


async def test_solicited_imm() -> None:
    """Rights are checked for a WRITE with immediate as for any WRITE: no message comes of a refused one."""
    if not await check("write_with_imm", lambda conn, remote, _: conn.write(remote[:4], b"data", imm=7)):
        return
    async with pair() as ends:
        region, remote = offer(ends.server, 8, access=Access.REMOTE_READ)
        writing = ends.client.write(remote, b"12345678", imm=1)
        with pytest.raises(aiordma.BrokenError):
            await ends.server.recv()
        await ended(writing)
        assert region.view == pattern(8)
