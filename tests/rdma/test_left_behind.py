"""What a thousand connections leave behind: nothing, in the kernel, in this process, in Python's memory; and fork()."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiordma import Access
from tests.conformance.support import offer, pair, pattern
from tests.rdma.own_device import OwnDevice, own_device, program


@pytest.fixture
def device() -> Iterator[OwnDevice]:
    """A device of this test's own, so that its counts are this test's too."""
    with own_device() as made:
        yield made


@pytest.mark.timeout(1800)
def test_a_thousand_connections(device: OwnDevice) -> None:
    """1,000 connects and closes with a region and a READ each leave no kernel object, no descriptor, no memory.

    Python's has grown by less than 256 bytes each, where a connection has several thousand.
    """
    resources, fds, bytes_each = program(
        "churn", "800", "200", loop="uvloop", environment=device.environment, timeout=1700
    )
    assert resources == "{'pd': 0, 'cq': 0, 'qp': 0, 'cm_id': 0, 'mr': 0}"
    assert fds == "0"
    assert int(bytes_each) < 256


# A thread that looked up an address may be there still: what Python warns of, a lock that is held in the child, the
# child doesn't use.
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
async def test_regions_of_a_process_that_forks() -> None:
    """While a child of fork() lives, and after it, device and process see the same in registered memory."""
    async with pair() as ends:
        client = ends.client
        region, remote = offer(ends.server, 16_384)
        sink = client.alloc(16_384)
        await client.read(remote, into=sink)
        gate, opened = os.pipe()
        child = os.fork()
        if not child:
            os.read(gate, 1)
            os._exit(0)
        try:
            for seed in (2, 3):
                # Each page is copied at its first change after a fork: to the child, or the device loses it.
                region.view[:] = pattern(16_384, seed)
                await client.read(remote, into=sink)
                assert sink.view == pattern(16_384, seed)
                await client.write(remote, pattern(16_384, seed + 10))
                await client.barrier()
                assert region.view == pattern(16_384, seed + 10)
        finally:
            os.write(opened, b"x")
            os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
            os.close(gate)
            os.close(opened)
        region.view[:] = pattern(16_384, 4)
        await client.read(remote, into=sink)
        assert sink.view == pattern(16_384, 4)


async def test_regions_of_a_process_that_starts_another() -> None:
    """A subprocess that comes and goes takes nothing of this process's registered memory with it."""
    async with pair() as ends:
        region, remote = offer(ends.server, 8192, access=Access.REMOTE_READ)
        subprocess.run([sys.executable, "-c", "pass"], check=True)  # noqa: ASYNC221 - the loop has nothing else to do
        region.view[:] = pattern(8192, 5)
        assert await ends.client.read(remote) == pattern(8192, 5)
