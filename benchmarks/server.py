"""The server process of the benchmarks: an aiordma server and a TCP streams server, on one uvloop, pinned to a core.

Prints its two ports and the region, then answers each line on its standard input with the CPU time it has used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time

import uvloop

import aiordma
from aiordma import Access, Connection

REGION = 8 << 20


async def echo(conn: Connection) -> None:
    """Echo messages."""
    async for message in conn:
        await conn.send(message)


async def tcp_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo what comes; a first byte of S makes it a sink that acknowledges each 64 MiB."""
    first = await reader.read(65536)
    if first[:1] == b"S":
        left = int.from_bytes(first[1:9], "big") + 9 - len(first)
        while True:
            while left > 0:
                left -= len(await reader.read(1 << 18))
            writer.write(b"done")
            size = await reader.readexactly(8) if not reader.at_eof() else b""
            left = int.from_bytes(size, "big")
    writer.write(first)
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def main(cpu: int) -> None:
    """Serve until standard input ends."""
    os.sched_setaffinity(0, {cpu})
    access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    tcp = await asyncio.start_server(_guarded, "127.0.0.1", 0)
    async with aiordma.serve(echo, "127.0.0.1", 0, device="soft") as server:
        region = server.pd.alloc(REGION, access=access)
        ports = {
            "rdma": server.port,
            "tcp": tcp.sockets[0].getsockname()[1],
            "region": region.remote().to_bytes().hex(),
        }
        print(json.dumps(ports), flush=True)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            print(time.process_time_ns(), flush=True)
    tcp.close()
    await region.close()


async def _guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await tcp_echo(reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", type=int, required=True)
    uvloop.run(main(parser.parse_args().cpu))
