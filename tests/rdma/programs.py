"""Programs that bad days happen to, in processes of their own: `python -m tests.rdma.programs LOOP ROLE ARGUMENT...`.

A program writes what it saw, a line each, for the test that started it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import uvloop

import aiordma
from aiordma import (
    AsyncEvent,
    AsyncEventType,
    BrokenError,
    Connection,
    ConnParam,
    FlushedError,
    RDMAError,
    RemoteRegion,
    WCStatus,
)  # fmt: skip
from tests.conformance.support import DEVICE, HOST, offer, pair, pattern, until
from tests.rdma.own_device import IWARP, REMOVAL_LIMIT, OwnDevice, run

_MIB = 1 << 20
_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def say(text: object) -> None:
    """Tell the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _command(*command: str) -> int:
    """Run a command beside the loop; gives its exit status."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(REMOVAL_LIMIT):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class _Events:
    """The asynchronous events of a device, as they come."""

    def __init__(self, context: aiordma.Context) -> None:
        self.seen: list[AsyncEvent] = []
        self._task = asyncio.create_task(self._listen(context))

    async def _listen(self, context: aiordma.Context) -> None:
        async for event in context.events():
            self.seen.append(event)

    async def wait(self, kind: AsyncEventType) -> AsyncEvent:
        """Wait for an event of a kind."""
        await until(lambda: any(event.event_type == kind for event in self.seen))
        return next(event for event in self.seen if event.event_type == kind)

    async def ended(self) -> None:
        """Wait for the end of the iteration, which is the context's."""
        await self._task


# -- a device that is removed -----------------------------------------------------------------------------------------


async def _serves(seed: int) -> None:
    """A new connection by the device works."""
    async with pair() as ends:
        _, remote = offer(ends.server, 4096, seed=seed)
        assert await ends.client.read(remote) == pattern(4096, seed)


async def _for_ever(use: Callable[[], Awaitable[Any]], count: list[int]) -> None:
    while True:
        await use()
        count[0] += 1


def _names_the_device(error: BaseException | None) -> bool:
    """Whether an end's error says that its device is gone, or that its peer left.

    Both ends are on the device. Where the kernel destroys one's identifier first (siw), the other one may hear of that
    before it hears of the device.
    """
    return f"device {DEVICE} is gone" in str(error) or (isinstance(error, BrokenError) and error.orderly)


def _ended_by_the_removal(error: BaseException | None) -> bool:
    """Whether this is how a request or a wait ends with its device: by BrokenError that names it.

    siw closes the connections before anybody is told of the removal: what is being sent then fails with LOC_QP_OP_ERR,
    which others cite, and what waits behind it is flushed for one of the two reasons.
    """
    if isinstance(error, BrokenError) and _names_the_device(error):
        return True
    cause = error.__cause__ if isinstance(error, FlushedError | BrokenError) else error
    return IWARP and (_names_the_device(cause) or getattr(cause, "status", None) == WCStatus.LOC_QP_OP_ERR)


async def removed() -> None:
    """Have the device removed under requests of each kind, then come back."""
    device = OwnDevice()
    events = _Events(aiordma.open_device(DEVICE))
    await asyncio.sleep(0)
    async with pair() as ends:
        client, server = ends.client, ends.server
        _, remote = offer(server, _MIB)
        sink, source = client.alloc(_MIB), client.alloc(_MIB)
        rounds = [[0] for _ in range(3)]
        uses: list[Callable[[], Awaitable[Any]]] = [
            lambda: client.read(remote, into=sink),
            lambda: client.write(remote, source),
            client.barrier,
        ]
        tasks = [asyncio.create_task(_for_ever(use, count)) for use, count in zip(uses, rounds, strict=True)]
        waits: list[Awaitable[Any]] = [client.recv(), server.recv(), ends.listener.get_request()]
        tasks += [asyncio.ensure_future(wait) for wait in waits]
        await until(lambda: all(count[0] > 2 for count in rounds))
        removal = asyncio.create_task(_command("rdma", "link", "delete", DEVICE))
        await events.ended()
        heard = time.monotonic()
        done, pending = await asyncio.wait(tasks, timeout=REMOVAL_LIMIT)
        assert not pending, pending
        say(f"all ended {time.monotonic() - heard < 1.0}")
        say(f"rdma link delete returned {await removal}")
        for use in uses:
            try:
                await use()
            except BrokenError as error:
                say(_names_the_device(error) or repr(error))
    errors = [task.exception() for task in done]
    say({_ended_by_the_removal(error) or repr(error) for error in errors})
    say([event.event_type.name for event in events.seen][-1])
    try:
        await aiordma.connect(HOST, 1, device=DEVICE)
    except RDMAError as error:
        say(type(error).__name__)
    device.add()
    await _serves(2)
    say("serves again")


async def idle_when_removed() -> None:
    """Have a connection that does nothing, wait for the device's removal, and end."""
    context = aiordma.open_device(DEVICE)
    async with pair() as ends:
        say("idle")
        async with asyncio.timeout(60):
            try:
                await ends.server.recv()
            except BrokenError as error:
                say(f"device {DEVICE} is gone" in str(error))
    say(context.closed)
    # Until it is told to end: it is a process that goes on, after all.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


# -- a link that goes down --------------------------------------------------------------------------------------------


async def port() -> None:
    """Take the network interface down and up under a connection; a new one works afterwards in any case."""
    device = OwnDevice()
    context = aiordma.open_device(DEVICE)
    events = _Events(context)
    await asyncio.sleep(0)
    async with pair() as ends:
        client, server = ends.client, ends.server
        _, remote = offer(server, 4096)
        assert await client.read(remote) == pattern(4096)
        run("ip", "link", "set", device.netdev, "down")
        event = await events.wait(AsyncEventType.PORT_ERR)
        say(f"{event.event_type.name} {event.element} {event.reason}: {context.query_port().state}")
        run("ip", "link", "set", device.netdev, "up")
        event = await events.wait(AsyncEventType.PORT_ACTIVE)
        say(f"{event.event_type.name} {event.element} {event.reason}: {context.query_port().state}")
        try:
            async with asyncio.timeout(60):
                assert await client.read(remote) == pattern(4096)
        except RDMAError as error:
            say(f"ended: {type(error).__name__} {error}")
        else:
            say("goes on")
    await _serves(3)
    say("serves again")


async def used_while_down() -> None:
    """READ while the network interface is down, then take it up again."""
    device = OwnDevice()
    events = _Events(aiordma.open_device(DEVICE))
    await asyncio.sleep(0)
    async with pair() as ends:
        _, remote = offer(ends.server, 4096)
        run("ip", "link", "set", device.netdev, "down")
        await events.wait(AsyncEventType.PORT_ERR)
        reading = ends.client.read(remote)
        await asyncio.wait([reading], timeout=0.2)
        run("ip", "link", "set", device.netdev, "up")
        try:
            async with asyncio.timeout(60):
                assert await reading == pattern(4096)
        except RDMAError as error:
            say(f"{type(error).__name__} {error}; cause: {error.__cause__}")
        else:
            say("read")


# -- many connections -------------------------------------------------------------------------------------------------


async def _once(port_num: int) -> None:
    async with aiordma.connect(HOST, port_num, device=DEVICE) as conn:
        remote = RemoteRegion.from_bytes(conn.peer_private_data)
        assert await conn.read(remote) == pattern(64)


async def churn(before: str, traced: str) -> None:
    """Connect, read and close again and again; say what is there more than before.

    Args:
        before: how often without tracing of allocations, which takes twice the time.
        traced: how often with it.
    """
    device = OwnDevice()

    async def handle(conn: Connection) -> None:
        async for _ in conn:
            pass

    def private_data(request: aiordma.ConnectRequest) -> bytes:
        region = request.alloc(64, access=aiordma.Access.REMOTE_READ)
        region.view[:] = pattern(64)
        return region.remote().to_bytes()

    async with aiordma.serve(handle, HOST, device=DEVICE, private_data=private_data) as server:

        async def repeat(times: int) -> None:
            for _ in range(times):
                await _once(server.port)
            await until(lambda: not server.connections and not server._tasks)
            gc.collect()

        await repeat(10)
        resources, fds = device.resources(), _count_fds()
        await repeat(int(before))
        tracemalloc.start()
        await repeat(5)
        held = [tracemalloc.get_traced_memory()[0]]
        for _ in range(2):
            await repeat(int(traced) // 2)
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        after = device.resources()
        say({kind: after[kind] - resources[kind] for kind in after})
        say(_count_fds() - fds)
        # What each connection leaves is there in both halves; what the process grew by once is not.
        say(min(held[1] - held[0], held[2] - held[1]) // (int(traced) // 2))


def _count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- limits and what is missing ---------------------------------------------------------------------------------------


async def memlock() -> None:
    """Register more than the limit allows, then live within it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    pd = aiordma.open_device(DEVICE).pd
    try:
        pd.register(bytearray(1 << 20))
    except aiordma.DeviceError as error:
        say(f"{error.errno} {error}")
    listener = await aiordma.listen(HOST, device=DEVICE)
    try:
        await aiordma.connect(HOST, listener.port, device=DEVICE, param=ConnParam(recv_depth=512))
    except aiordma.DeviceError as error:
        say(f"{error.errno} {error}")
    await listener.close()
    region = pd.register(bytearray(4096))
    region.deregister()
    say("goes on")


async def _attempt(device: str | None) -> None:
    try:
        async with aiordma.listen(HOST, device=device) as listener:
            say(f"listens on {sorted({endpoint.device for endpoint in listener.endpoints})}")
            connecting = asyncio.ensure_future(_dial(listener.port, device))
            server = await (await listener.get_request()).accept()
            async with await connecting as client:
                await client.send(b"works")
                say(f"{client.device} {(await server.recv()).decode()}")
            await server.close()
    except RDMAError as error:
        say(f"{type(error).__name__} {error}")


async def _dial(port_num: int, device: str | None) -> Connection:
    return await aiordma.connect(HOST, port_num, device=device)


async def missing() -> None:
    """Try the device by name, any RDMA device, and whichever is there."""
    for device in (DEVICE, "rdma", None):
        await _attempt(device)
    say(next(device.hint for device in aiordma.devices() if device.name == DEVICE))


class _WithoutPyverbs(PathFinder):
    """Finds every module but pyverbs."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "pyverbs":
            return None
        return super().find_spec(fullname, path, target)


async def without_pyverbs() -> None:
    """Do the same where pyverbs isn't installed."""
    sys.meta_path[:] = [_WithoutPyverbs if finder is PathFinder else finder for finder in sys.meta_path]
    await missing()


_ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    role.__name__: role
    for role in (removed, idle_when_removed, port, used_while_down, churn, memlock, missing, without_pyverbs)
}

if __name__ == "__main__":
    # Its words about devices that are gone are expected; asyncio's about what nobody retrieved are not.
    logging.getLogger("aiordma").addHandler(logging.NullHandler())
    logging.getLogger("aiordma").propagate = False
    with asyncio.Runner(loop_factory=_LOOPS[sys.argv[1]]) as runner:
        runner.run(_ROLES[sys.argv[2]](*sys.argv[3:]))
