"""What the loop calls for a connection runs in an empty context, not in that of whoever opened it or posted."""

from __future__ import annotations

import contextvars

import pytest

from aiordma import Access
from aiordma.drivers.soft.link import Link
from aiordma.testing import connected_pair

_whose: contextvars.ContextVar[object] = contextvars.ContextVar("_whose")


@pytest.mark.parametrize("callback", ["_readable", "_writable", "_flush_posted"])
async def test_callbacks(callback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers, writers and the flush at the end of a turn don't see the caller's variables."""
    seen = []
    original = getattr(Link, callback)

    def recorded(link: Link) -> object:
        seen.append(_whose.get(None))
        return original(link)

    monkeypatch.setattr(Link, callback, recorded)
    _whose.set("the opener's")
    async with connected_pair() as pair:
        data = bytes(32 << 20)
        target = pair.server.register(bytearray(len(data)), access=Access.REMOTE_WRITE)
        writing = pair.client.write(target.remote(), data)
        await pair.client.send(b"a SEND leaves within the post, and takes along what waits")
        await writing
        await pair.client.barrier()
        assert seen
    assert not any(seen)
