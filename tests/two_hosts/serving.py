"""The other end, for tests whose host dies: `python -m tests.two_hosts.serving HOST PORT` offers memory for ever."""

from __future__ import annotations

import asyncio
import sys

import aiordma
from aiordma import Access, Connection

#: Bytes that are offered.
OFFERED = 4 << 20


async def main(host: str, port: int) -> None:
    """Serve any number of connections, of which each may read the same region."""

    async def handle(conn: Connection) -> None:
        async for message in conn:
            await conn.send(message)

    offered: list[bytes] = []
    async with aiordma.serve(handle, host, port, device="rxw", private_data=lambda _: offered[0]) as server:
        region = server.pd.alloc(OFFERED, access=Access.REMOTE_READ)
        offered.append(region.remote().to_bytes())
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
