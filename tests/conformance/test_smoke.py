"""The thin path: one of each operation."""

from __future__ import annotations

from aiordma import Access
from aiordma.testing import connected_pair


async def test_one_of_each() -> None:
    """READ, WRITE, atomics and messages work between two ends."""
    async with connected_pair() as pair:
        access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
        region = pair.server.alloc(4096, access=access)
        remote = region.remote()
        region.view[:5] = b"hello"
        assert await pair.client.read(remote[:5]) == b"hello"
        await pair.client.write(remote[100:108], b"8 bytes!")
        await pair.client.barrier()
        assert region.view[100:108].tobytes() == b"8 bytes!"
        assert await pair.client.fetch_add(remote[16:24], 5) == 0
        assert await pair.client.compare_swap(remote[16:24], 5, 7) == 5
        await pair.client.send(b"ping")
        assert await pair.server.recv() == b"ping"
        await pair.server.send(b"pong")
        assert await pair.client.recv() == b"pong"
