"""The keep-alive of a connection."""

from __future__ import annotations

from aiordma import ClosedError
from aiordma.keep_alive import KeepAlive
from tests.conformance.support import until
from tests.unit.fake_driver import rig


async def test_probes_in_each_interval() -> None:
    """An idle queue pair is probed again and again."""
    async with rig() as r:
        keep_alive = KeepAlive(r.qp, 0.001)
        for _ in range(3):
            await until(lambda: r.device.sends)
            r.complete()
        keep_alive.cancel()


async def test_ends_with_the_queue_pair() -> None:
    """A queue pair that takes no requests any more is left alone, and the loop lets go of it."""
    async with rig() as r:
        keep_alive = KeepAlive(r.qp, 3600.0)
        timer = keep_alive._timer
        r.qp.refuse(ClosedError("the connection was closed"))
        keep_alive._probe()
        assert keep_alive._timer is timer
        assert not r.device.sends
        keep_alive.cancel()
