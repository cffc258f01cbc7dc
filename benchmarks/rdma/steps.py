"""What each step of an operation costs, on the machine's own clock."""

from __future__ import annotations

import asyncio
import os
import select
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import uvloop
from pyverbs.wr import SGE, SendWR

import aiordma
from aiordma import Access, Connection, Opcode, RemoteRegion, types
from aiordma.drivers.verbs.work_requests import SendChain
from aiordma.spinning import CompletionMode
from benchmarks.rdma.raw import RawQP

__all__ = ["measure_steps"]

LIST = 32


def measure_steps(device: str, host: str, count: int) -> dict[str, float]:
    """Measure each; us."""
    near, far = RawQP(device, host), RawQP(device, host)
    near.connect(far.address())
    far.connect(near.address())
    found = {**_requests(near, count), **_posts(near, count), **_completions(near, count)}
    found["READ 8 B by hand, event"] = statistics.median(near.one_sided("READ", "event", count)) / 1e3
    found["READ 8 B by hand, polling"] = statistics.median(near.one_sided("READ", "polling", count)) / 1e3
    near.close()
    far.close()
    for name, run in (("uvloop", uvloop.run), ("asyncio's loop", asyncio.run)):
        found.update(run(_loop_turns(name, count)))
        modes: tuple[CompletionMode, ...] = ("event", "busy", "adaptive") if name == "uvloop" else ("event",)
        for mode in modes:
            found[f"awaited READ 8 B, {mode}, {name}"] = run(_awaited(device, host, mode, count))
    return found


def _timed(run: Callable[[], object], count: int) -> float:
    """Give the median time of one call, in us, of loops of 20."""
    samples = []
    clock = time.perf_counter_ns
    empty = _empty(count)
    for _ in range(max(count // 20, 5)):
        start = clock()
        for _ in range(20):
            run()
        samples.append((clock() - start) / 20)
    return statistics.median(samples) / 1e3 - empty


def _empty(count: int) -> float:
    """What calling a function of nothing costs."""
    samples = []
    clock = time.perf_counter_ns
    run = _nothing
    for _ in range(max(count // 20, 5)):
        start = clock()
        for _ in range(20):
            run()
        samples.append((clock() - start) / 20)
    return statistics.median(samples) / 1e3


def _nothing() -> None:
    """Nothing."""


def _requests(qp: RawQP, count: int) -> dict[str, float]:
    """Building requests, and changing them."""
    chain = SendChain()
    memory = types.SGE(qp.addr, 8, qp.mr.lkey)
    single = types.SendWR(Opcode.RDMA_READ, (memory,), remote_addr=qp.addr, rkey=qp.mr.rkey)
    several = [single] * LIST

    def build() -> None:
        element = SGE(qp.addr, 8, qp.mr.lkey)
        request = SendWR(wr_id=1, opcode=4, num_sge=1, sg=[element])
        request.set_wr_rdma(qp.mr.rkey, qp.addr)
        element.close()
        request.close()

    return {
        "build a SendWR with its SGE": _timed(build, count),
        "change one in place (all of its fields)": _timed(lambda: chain.single(single), count),
        "change a linked list of 32, each": _timed(lambda: chain.several(several), count // 10) / LIST,
    }


def _posts(qp: RawQP, count: int) -> dict[str, float]:
    """Posting, without what follows: each call is timed by itself."""
    one, clock = qp.request("READ"), time.perf_counter_ns
    linked = [qp.request("WRITE", 64, 64 * index, 2 if index == LIST - 1 else 0) for index in range(LIST)]
    for request, following in pairwise(linked):
        request.next_wr = following
    found = {}
    for name, request, times in (
        ("ibv_post_send of one READ", one, count),
        ("ibv_post_send of a list of 32 WRITEs, each", linked[0], count // 10),
    ):
        samples = []
        for _ in range(times):
            start = clock()
            qp.qp.post_send(request)
            samples.append(clock() - start)
            qp.wait_polling()
        found[name] = statistics.median(samples) / 1e3
    found["ibv_post_send of a list of 32 WRITEs, each"] /= LIST
    return found


def _completions(qp: RawQP, count: int) -> dict[str, float]:
    """Taking completions and events."""
    clock = time.perf_counter_ns
    found = {"ibv_poll_cq, nothing there": _timed(lambda: qp.cq.poll(256), count)}
    request = qp.request("WRITE")
    for number in (1, LIST):
        samples = []
        for _ in range(max(count // 20, 5)):
            for _ in range(number):
                qp.qp.post_send(request)
            time.sleep(0.02)  # nothing tells that all are there without taking one
            start = clock()
            taken = qp.cq.poll(256)[0]
            end = clock()
            if taken == number:
                samples.append((end - start) / number)
            else:
                for _ in range(number - taken):
                    qp.wait_polling()
        step = f"ibv_poll_cq of {number} after a pause, each"
        found[step] = statistics.median(samples) / 1e3 if samples else float("nan")
    events: dict[str, list[int]] = {
        "ibv_req_notify_cq": [],
        "wake-up by select(), from ibv_post_send on": [],
        "ibv_get_cq_event": [],
    }
    return found | _events(qp, count, events)


def _events(qp: RawQP, count: int, samples: dict[str, list[int]]) -> dict[str, float]:
    """An operation by events, each step by itself."""
    clock = time.perf_counter_ns
    request = qp.request("WRITE")
    poller = select.poll()
    poller.register(qp.channel_fd, select.POLLIN)
    while poller.poll(0):
        qp.channel.get_cq_event(qp.cq)
    arm, wake, get = samples.values()
    for _ in range(count):
        begin = clock()
        qp.cq.req_notify()
        armed = clock()
        qp.qp.post_send(request)
        poller.poll()
        ready = clock()
        qp.channel.get_cq_event(qp.cq)
        taken = clock()
        qp.wait_polling()
        arm.append(armed - begin)
        wake.append(ready - armed)
        get.append(taken - ready)
    qp.cq.req_notify()
    return {name: statistics.median(values) / 1e3 for name, values in samples.items()}


async def _loop_turns(name: str, count: int) -> dict[str, float]:
    """What the loop itself costs."""
    loop, clock = asyncio.get_running_loop(), time.perf_counter_ns
    turns, futures, reads = [], [], []
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    waiter: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        os.eventfd_read(fd)
        waiter.set_result(None)

    loop.add_reader(fd, readable)
    for _ in range(count):
        start = clock()
        await asyncio.sleep(0)
        turned = clock()
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future
        resolved = clock()
        waiter = loop.create_future()
        os.eventfd_write(fd, 1)
        await waiter
        reads.append(clock() - resolved)
        futures.append(resolved - turned)
        turns.append(turned - start)
    loop.remove_reader(fd)
    os.close(fd)
    return {
        f"an empty turn of {name}": statistics.median(turns) / 1e3,
        f"a future resolved by call_soon, {name}": statistics.median(futures) / 1e3,
        f"a future resolved by a descriptor (eventfd), {name}": statistics.median(reads) / 1e3,
    }


async def _awaited(device: str, host: str, mode: CompletionMode, count: int) -> float:
    """An awaited READ, the peer in this process: it takes no part."""
    aiordma.open_device(device).completion_mode = mode

    async def hold(conn: Connection) -> None:
        async for _ in conn:
            pass

    async with aiordma.serve(hold, host, 0, device=device) as server:
        region = server.pd.alloc(64, access=Access.REMOTE_READ)
        async with aiordma.connect(host, server.port, device=device) as conn:
            samples = await _reads(conn, region.remote()[:8], count)
    await region.close()
    return statistics.median(samples) / 1e3


async def _reads(conn: Connection, remote: RemoteRegion, count: int) -> list[int]:
    into, clock = conn.alloc(8), time.perf_counter_ns
    samples = []
    for _ in range(count):
        start = clock()
        await conn.read(remote, into)
        samples.append(clock() - start)
    return samples
