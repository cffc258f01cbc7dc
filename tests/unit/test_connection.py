"""What a connection does by itself where a device can do less."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from aiordma import Access, FlushedError, LocalError, Opcode, SendFlags, WCStatus
from aiordma.testing import connected_pair
from aiordma.types import SendWR
from tests.conformance.support import pattern


@pytest.mark.parametrize("fence", [False, True])
async def test_read_into_more_pieces_than_a_read_fills(fence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A READ into a list is as many READs as the device needs for it; empty pieces need none."""
    async with connected_pair() as ends:
        remote = ends.server.alloc(1000, access=Access.REMOTE_READ)
        remote.view[:] = pattern(1000)
        context = ends.client.context
        context.capabilities = attrs.evolve(context.capabilities, max_read_sge=1)
        posted: list[SendWR] = []
        post = ends.client.qp._post_send

        def post_and_note(wrs: Sequence[SendWR]) -> bool:
            posted.extend(wrs)
            return post(wrs)

        monkeypatch.setattr(ends.client.qp, "_post_send", post_and_note)
        local = ends.client.alloc(1000)
        pieces = [local[900:901], local[:0], local[:500], local[501:700]]
        reading = ends.client.read(remote.remote()[100:], into=pieces, fence=fence)
        assert [[piece.length for piece in wr.sg_list] for wr in posted] == [[1], [500], [199]]
        assert all(bool(wr.send_flags & SendFlags.FENCE) == fence for wr in posted)
        await reading
        assert b"".join(piece.view.tobytes() for piece in pieces) == pattern(1000)[100:800]
        await ends.client.read(remote.remote(), into=[local[:0], local[1:1]], fence=fence)


async def test_barrier_where_its_own_write_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier says so; of the WRITE, which nobody knows of, no future is left with an exception."""
    async with connected_pair() as ends:
        context = ends.client.context
        context.capabilities = attrs.evolve(context.capabilities, empty_read_waits=True)
        posted: list[SendWR] = []

        def keep(wrs: Sequence[SendWR]) -> bool:
            posted.extend(wrs)
            return False

        monkeypatch.setattr(ends.client.qp, "_post_send", keep)
        barrier = ends.client.barrier()
        assert [wr.opcode for wr in posted] == [Opcode.RDMA_WRITE, Opcode.RDMA_READ]
        assert posted[0].send_flags & SendFlags.FENCE
        for wr, status in zip(posted, (WCStatus.LOC_QP_OP_ERR, WCStatus.WR_FLUSH_ERR), strict=True):
            ends.client.qp.completed((wr.wr_id, status, 0, 0, ends.client.qp.qp_num, 0, 0, 0))
        with pytest.raises(FlushedError) as caught:
            await barrier
        assert isinstance(caught.value.__cause__, LocalError)
