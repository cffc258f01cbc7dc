"""Programs for the other end, in processes of their own, which tests stop and kill; and what starts them.

`python -m tests.faults.peers ROLE PORT` says a line when it is where the role's name says, and stays there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiordma
from aiordma import Access, Connection, ConnParam, RemoteRegion
from tests.conformance.support import DEVICE, HOST
from tests.faults import raw_peer
from tests.faults.raw_peer import RawPeer

#: As long as the issue asks for.
BIG = 64 << 20
_ALL = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class Peer:
    """The other end's process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    async def said(self) -> str:
        """Wait for its next line."""
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "the peer ended before it came to its state"
        return line.decode().strip()

    def stop(self) -> None:
        """Stop it (SIGSTOP): its kernel goes on, its program doesn't."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait until it is gone with its sockets."""
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def peer(role: str, port: int = 0, *, netns: str = "") -> AsyncIterator[Peer]:
    """Start a program in a process, and end it at the end of the block."""
    command = [sys.executable, "-m", "tests.faults.peers", role, str(port)]
    if netns:
        command = ["ip", "netns", "exec", netns, *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])  # noqa: ASYNC220 - it returns at once
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# -- the programs -----------------------------------------------------------------------------------------------------


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def _requesting(port: int) -> None:
    """Has sent its Request, and waits to be accepted."""
    with await RawPeer.connect(port) as peer:
        await peer.send(raw_peer.request(private_data=b"waiting"))
        _say("sent")
        await _for_ever()


async def _connected(port: int) -> tuple[Connection, RemoteRegion]:
    conn = await aiordma.connect(HOST, port, device=DEVICE)
    return conn, RemoteRegion.from_bytes(conn.peer_private_data)


async def _idle(port: int) -> None:
    """Is connected."""
    conn = await aiordma.connect(HOST, port, device=DEVICE)
    _say("connected")
    await _for_ever()
    await conn.close()


async def _reading(port: int) -> None:
    """Reads much from us."""
    conn, remote = await _connected(port)
    _say("connected")
    await conn.read(remote, into=conn.alloc(remote.length))
    await _for_ever()


async def _writing(port: int) -> None:
    """Writes much to us."""
    conn, remote = await _connected(port)
    local = conn.alloc(remote.length)
    local.view[:] = b"w" * remote.length
    _say("connected")
    await conn.write(remote, local)
    await _for_ever()


async def _sending(port: int) -> None:
    """Sends numbered messages without end."""
    conn = await aiordma.connect(HOST, port, device=DEVICE)
    _say("connected")
    number = 0
    while True:
        await conn.send(number.to_bytes(4, "big") + bytes(2000))
        number += 1
        await asyncio.sleep(0)


async def _serving(host: str = HOST) -> None:
    """Is connected to, offers much to read, and does nothing."""
    async with aiordma.listen(host, device=DEVICE) as listener:
        region = listener.pd.alloc(BIG, access=_ALL)
        region.view[:] = b"r" * BIG
        _say(listener.port)
        request = await listener.get_request()
        conn = await request.accept(private_data=region.remote().to_bytes(), param=ConnParam(keepalive=1))
        await _for_ever()
        await conn.close()


async def _serving_anywhere(_port: int) -> None:
    await _serving("0.0.0.0")


async def _serving_again(port: int) -> None:
    """Is at a port, and answers each message."""

    async def echo(conn: Connection) -> None:
        async for message in conn:
            await conn.send(message)

    async with aiordma.serve(echo, HOST, port, device=DEVICE) as server:
        _say(server.port)
        await server.serve_forever()


async def _unaccepting(_port: int) -> None:
    """Has got a request, and doesn't answer."""
    async with aiordma.listen(HOST, device=DEVICE) as listener:
        _say(listener.port)
        request = await listener.get_request()
        _say("requested")
        await _for_ever()
        await request.reject()


_ROLES = {
    "requesting": _requesting,
    "idle": _idle,
    "reading": _reading,
    "writing": _writing,
    "sending": _sending,
    "serving": lambda _port: _serving(),
    "serving-anywhere": _serving_anywhere,
    "serving-again": _serving_again,
    "unaccepting": _unaccepting,
}

if __name__ == "__main__":
    asyncio.run(_ROLES[sys.argv[1]](int(sys.argv[2])))
