"""A program whose device is removed under it, and comes again; test_cm_slow runs it with a device of its own."""

from __future__ import annotations

import asyncio
import sys

from aiordma.enums import CMEventType
from tests.rdma.support import DEVICE, connection_manager


def report(line: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{line}\n")


async def main() -> None:
    """Hear of the removal, destroy the identifier, see the removal end, and find the device that came in its place."""
    async with connection_manager() as cm:
        client = await cm.resolved(1)
        removal = await asyncio.create_subprocess_exec("rdma", "link", "delete", DEVICE)
        async with asyncio.timeout(30):
            event = await cm.next(client, CMEventType.DEVICE_REMOVAL)
            report(event.reason)
            client.destroy()
            report(f"rdma link delete returned {await removal.wait()}")
            kind = DEVICE.removesuffix("cm")
            command = ("rdma", "link", "add", DEVICE, "type", kind, "netdev", "aiocm")
            await (await asyncio.create_subprocess_exec(*command)).wait()
            report(f"found anew: {(await cm.resolved(1)).device_name}")


if __name__ == "__main__":
    asyncio.run(main())
