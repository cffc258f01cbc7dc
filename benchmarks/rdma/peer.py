"""The other process: an aiordma server on uvloop, or a queue pair of raw pyverbs, pinned to a core.

It prints one line of JSON, what the client needs to connect. Then each line on its standard input is a command,
answered by a line; the end of its standard input ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import sys
import time

import uvloop

import aiordma
from aiordma import Access, Connection
from benchmarks.rdma.raw import RawQP

#: As much as 16 WRITEs of 64 KiB need.
REGION = 1 << 20
#: Seconds for one command: a peer that waits for what never comes can't be interrupted.
LIMIT = 120.0


async def echo(conn: Connection) -> None:
    """Echo messages."""
    async for message in conn:
        await conn.send(message)


async def serve(device: str, host: str, mode: str) -> None:
    """Serve until standard input ends."""
    aiordma.open_device(device).completion_mode = "busy" if mode == "polling" else "event"
    access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    async with aiordma.serve(echo, host, 0, device=device) as server:
        region = server.pd.alloc(REGION, access=access)
        print(json.dumps({"port": server.port, "region": region.remote().to_bytes().hex()}), flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            print(time.process_time_ns(), flush=True)
    await region.close()


def raw(device: str, host: str) -> None:
    """Echo as often as asked, with the way of waiting asked for."""
    qp = RawQP(device, host)
    print(json.dumps(qp.address()), flush=True)
    qp.connect(json.loads(sys.stdin.readline()))
    print(flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "echo":
            print(flush=True)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            qp.echo(command["mode"], command["count"])
            faulthandler.cancel_dump_traceback_later()
        print(time.process_time_ns(), flush=True)
    qp.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("aiordma", "raw"))
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--cpu", type=int, help="the core to stay on")
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    if arguments.kind == "aiordma":
        uvloop.run(serve(arguments.device, arguments.host, arguments.mode))
    else:
        raw(arguments.device, arguments.host)
