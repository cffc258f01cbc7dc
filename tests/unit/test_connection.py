"""What a connection does by itself where a device can do less."""

from __future__ import annotations

import attrs
import pytest

from aiordma import Access
from aiordma.testing import connected_pair
from tests.conformance.support import pattern


@pytest.mark.parametrize("fence", [False, True])
async def test_read_into_more_pieces_than_a_read_fills(fence: bool) -> None:
    """A READ into a list is as many READs as the device needs for it; empty pieces need none."""
    async with connected_pair() as ends:
        remote = ends.server.alloc(1000, access=Access.REMOTE_READ)
        remote.view[:] = pattern(1000)
        context = ends.client.context
        context.capabilities = attrs.evolve(context.capabilities, max_read_sge=1)
        local = ends.client.alloc(1000)
        pieces = [local[900:901], local[:0], local[:500], local[501:700]]
        await ends.client.read(remote.remote()[100:], into=pieces, fence=fence)
        assert b"".join(piece.view.tobytes() for piece in pieces) == pattern(1000)[100:800]
        await ends.client.read(remote.remote(), into=[local[:0], local[1:1]], fence=fence)
