"""Raw pyverbs at the other end: queue pair, requests and rdma_cm by hand, in a process without aiordma.

On rxe and siw both ends are that device, on `soft` the other one is siw. Rxe is connected without rdma_cm, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import frozen

import aiordma
from aiordma import Connection, ConnParam, MemoryRegion, Opcode, QPAddress, QueuePair, RemoteRegion
from aiordma.enums import WCFlags
from tests.conformance.support import ALL, DEVICE, HOST, capabilities, require
from tests.interop.support import free_port, needs_rdma

pytestmark = needs_rdma

both_ways = pytest.mark.parametrize("we", ["connect", "accept"])

SPACE: Final = 1 << 20
SIZES: Final = [1, 4096, 65_537, SPACE]
PARAM: Final = ConnParam(recv_size=SPACE, recv_depth=2, responder_resources=4, initiator_depth=4)


class Raw:
    """The program at the other end. To start takes it as long as a test does, so it serves one test after another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    async def do(self, command: str, **arguments: Any) -> Any:
        """Have it do something; gives its answer."""
        return await asyncio.to_thread(self._ask, json.dumps({"do": command} | arguments))

    def _ask(self, command: str) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the raw program failed: {command}"
        return json.loads(answer)

    def start(self) -> None:
        """Start it, unless it is there."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("raw_peer.py"))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None


@pytest.fixture(scope="module")
def program() -> Iterator[Raw]:
    """Have one program for all tests."""
    raw = Raw()
    yield raw
    raw.kill()


@pytest.fixture
def raw(program: Raw) -> Raw:
    """Start it before the test."""
    program.start()
    return program


@contextlib.asynccontextmanager
async def using(raw: Raw) -> AsyncIterator[None]:
    """Kill the program if the block fails: who knows what it waits for."""
    try:
        yield
    except BaseException:
        raw.kill()
        raise


@contextlib.asynccontextmanager
async def connected(raw: Raw, we: str) -> AsyncIterator[tuple[Connection, RemoteRegion, MemoryRegion]]:
    """Connect by rdma_cm, and exchange regions in messages; gives our end, the program's memory, and ours.

    Who connected speaks first, as iWARP wants it, and disconnects first.
    """
    async with using(raw):
        if we == "connect":
            port = free_port()
            await raw.do("listen", host=HOST, port=port)
            accepting = asyncio.create_task(raw.do("accept"))
            conn = await aiordma.connect(HOST, port, device=DEVICE, param=PARAM)
            await accepting
        else:
            async with aiordma.listen(HOST, 0, device=DEVICE, param=PARAM) as listener:
                connecting = asyncio.create_task(raw.do("connect", host=HOST, port=listener.port))
                conn = await (await listener.get_request()).accept()
                await connecting
        async with conn:
            region = conn.alloc(SPACE, access=ALL)
            if we == "connect":
                await conn.send(region.remote().to_bytes())
                await raw.do("recv_region")
                await raw.do("send_region")
                remote = RemoteRegion.from_bytes(await conn.recv())
            else:
                await raw.do("send_region")
                remote = RemoteRegion.from_bytes(await conn.recv())
                await conn.send(region.remote().to_bytes())
                await raw.do("recv_region")
            yield conn, remote, region
            if we == "connect":
                ending = asyncio.create_task(raw.do("end", first=False))
                await conn.close()
            else:
                ending = asyncio.create_task(raw.do("end", first=True))
                assert [message async for message in conn] == []
                await conn.close()
            await ending


@frozen
class Receive:
    """A posted receive."""

    memory: MemoryRegion
    completion: asyncio.Future[Any]


@contextlib.asynccontextmanager
async def by_hand(raw: Raw) -> AsyncIterator[tuple[QueuePair, RemoteRegion, MemoryRegion, Receive]]:
    """Connect without rdma_cm; gives our queue pair, the program's memory, ours, and a receive that is posted."""
    async with using(raw):
        context = aiordma.open_device(DEVICE)
        pd = aiordma.ProtectionDomain(context)
        with contextlib.closing(pd), contextlib.closing(pd.create_qp()) as qp:
            region, inbox = pd.alloc(SPACE, access=ALL), pd.alloc(SPACE)
            mine = qp.local_address(gid=context.gid_for(HOST))
            theirs = await raw.do("by_hand", device=DEVICE, host=HOST, psn=0xFEDCBA)
            receiving = qp.post_recv([inbox])
            theirs["gid"] = bytes.fromhex(theirs["gid"])
            qp.connect_to(QPAddress(**theirs), param=PARAM)
            await raw.do("connect_by_hand", qpn=mine.qpn, psn=mine.psn, gid=mine.gid.hex())
            greeting = pd.alloc(RemoteRegion.WIRE_SIZE)
            greeting.view[:] = region.remote().to_bytes()
            await qp.post_send(Opcode.SEND, [greeting])
            await raw.do("recv_region")
            await raw.do("send_region")
            await receiving
            remote = RemoteRegion.from_bytes(inbox.view)
            receiving = qp.post_recv([inbox])
            yield qp, remote, region, Receive(inbox, receiving)
            receiving.cancel()
            await raw.do("end", first=True)


def need(capability: str) -> None:
    """Skip, and say so, where one of the two ends lacks what the test is about."""
    if DEVICE == "soft":
        pytest.skip(f"siw, the soft device's peer here, lacks Capabilities.{capability}")
    require(capability)


def data(length: int, seed: int) -> bytes:
    """Give what the program's `fill` fills with."""
    return random.Random(seed).randbytes(length)


@both_ways
async def test_our_one_sided(raw: Raw, we: str) -> None:
    """READs of raw memory give what the program put there; WRITEs arrive in their place, and nowhere else."""
    async with connected(raw, we) as (conn, remote, _):
        for seed, size in enumerate(SIZES):
            at = min(7, SPACE - size)
            crc = await raw.do("fill", at=0, length=SPACE, seed=seed)
            content = bytearray(data(SPACE, seed))
            local = conn.alloc(size)
            await conn.read(remote[at : at + size], into=local)
            assert local.view == content[at : at + size]
            assert zlib.crc32(await conn.read(remote)) == crc
            local.view[:] = content[at : at + size] = data(size, seed + 100)
            await conn.write(remote[at : at + size], local)
            await conn.barrier()
            assert await raw.do("crc", at=0, length=SPACE) == zlib.crc32(content)


@both_ways
async def test_their_one_sided(raw: Raw, we: str) -> None:
    """Raw READs of our memory give what is there; raw WRITEs arrive in their place, and nowhere else."""
    async with connected(raw, we) as (conn, _, region):
        for seed, size in enumerate(SIZES):
            at = min(7, SPACE - size)
            content = bytearray(data(SPACE, seed))
            region.view[:] = content
            await raw.do("one_sided", name="read", at=0, remote_at=at, length=size)
            assert await raw.do("crc", at=0, length=size) == zlib.crc32(content[at : at + size])
            assert await raw.do("fill", at=0, length=size, seed=seed + 100) == zlib.crc32(data(size, seed + 100))
            await raw.do("one_sided", name="write", at=0, remote_at=at, length=size)
            await raw.do("send", length=0)  # on iWARP a WRITE's success proves nothing, a message behind it does
            assert await conn.recv() == b""
            content[at : at + size] = data(size, seed + 100)
            assert region.view == content


@both_ways
async def test_messages(raw: Raw, we: str) -> None:
    """Messages of all sizes come whole, both ways."""
    async with connected(raw, we) as (conn, _, _):
        for seed, size in enumerate([0, *SIZES]):
            await raw.do("fill", at=0, length=size, seed=seed)
            await raw.do("send", length=size)
            assert await conn.recv() == data(size, seed)
            message = data(size, seed + 100)
            await conn.send(message)
            assert await raw.do("recv") == {"length": size, "crc": zlib.crc32(message), "imm": None}


@both_ways
async def test_atomics(raw: Raw, we: str) -> None:
    """FETCH_ADD and CMP_AND_SWAP work on a raw number, and raw ones on ours: old value, new value."""
    need("atomics")
    async with connected(raw, we) as (conn, remote, region):
        number = remote[64:72]
        await raw.do("poke", at=64, value=(1 << 64) - 2)
        assert await conn.fetch_add(number, 5) == (1 << 64) - 2
        assert await raw.do("peek", at=64) == 3
        assert await conn.compare_swap(number, 4, 9) == 3
        assert await conn.compare_swap(number, 3, 1 << 63) == 3
        assert await raw.do("peek", at=64) == 1 << 63
        await check_their_atomics(raw, region)


async def check_their_atomics(raw: Raw, region: MemoryRegion) -> None:
    """Have the program count in our memory."""

    def value() -> int:
        return int.from_bytes(region.view[8:16], sys.byteorder)

    region.view[8:16] = (1 << 40).to_bytes(8, sys.byteorder)
    assert await raw.do("atomic", name="fetch_add", remote_at=8, compare_add=(1 << 64) - 1) == 1 << 40
    assert value() == (1 << 40) - 1
    assert await raw.do("atomic", name="compare_swap", remote_at=8, compare_add=1, swap=2) == (1 << 40) - 1
    assert value() == (1 << 40) - 1
    assert await raw.do("atomic", name="compare_swap", remote_at=8, compare_add=value(), swap=77) == (1 << 40) - 1
    assert value() == 77


@both_ways
async def test_immediates(raw: Raw, we: str) -> None:
    """Immediates come in the right byte order, with a message and with a WRITE, both ways."""
    need("write_with_imm")
    async with connected(raw, we) as (conn, remote, region):
        await conn.send(b"message", imm=0x01020304)
        assert await raw.do("recv") == {"length": 7, "crc": zlib.crc32(b"message"), "imm": 0x01020304}
        await conn.write(remote[3:10], b"written", imm=0xFFFEFDFC)
        assert await raw.do("recv") == {"length": 7, "crc": 0, "imm": 0xFFFEFDFC}
        assert await raw.do("crc", at=3, length=7) == zlib.crc32(b"written")
        await raw.do("fill", at=0, length=4096, seed=1)
        await raw.do("send", length=4096, imm=0x01020304)
        with await conn.recv_message() as message:
            assert (message.imm_data, message.data.tobytes()) == (0x01020304, data(4096, 1))
        await raw.do("one_sided", name="write_with_imm", at=0, remote_at=5, length=4096, imm=0xFFFEFDFC)
        with await conn.recv_message() as message:
            assert (message.imm_data, message.byte_len, len(message.data)) == (0xFFFEFDFC, 4096, 0)
        assert region.view[5:4101] == data(4096, 1)


def need_raw_connect() -> None:
    """Skip, and say so, where queue pairs are connected by rdma_cm only."""
    if capabilities().transport == "iwarp":
        pytest.skip(f'{DEVICE} can\'t connect without rdma_cm: Capabilities.transport is "iwarp"')


async def test_one_sided_by_hand(raw: Raw) -> None:
    """READs and WRITEs, both ways, where the two queue pairs met by their numbers alone."""
    need_raw_connect()
    async with by_hand(raw) as (qp, remote, region, _):
        local = region[: SPACE // 2]
        for seed, size in enumerate(size for size in SIZES if size < SPACE):
            await raw.do("fill", at=0, length=size, seed=seed)
            await qp.post_send(Opcode.RDMA_READ, [local[:size]], remote.addr, remote.rkey)
            assert local.view[:size] == data(size, seed)
            local.view[:size] = data(size, seed + 100)
            await qp.post_send(Opcode.RDMA_WRITE, [local[:size]], remote.addr + 1, remote.rkey)
            assert await raw.do("crc", at=1, length=size) == zlib.crc32(data(size, seed + 100))
            local.view[:size] = data(size, seed + 200)
            await raw.do("one_sided", name="read", at=8, remote_at=0, length=size)
            assert await raw.do("crc", at=8, length=size) == zlib.crc32(data(size, seed + 200))
            await raw.do("one_sided", name="write", at=8, remote_at=SPACE // 2 + 3, length=size)
            assert region.view[SPACE // 2 + 3 :][:size] == data(size, seed + 200)


async def test_atomics_by_hand(raw: Raw) -> None:
    """Atomics, both ways, where the two queue pairs met by their numbers alone."""
    need_raw_connect()
    need("atomics")
    async with by_hand(raw) as (qp, remote, region, _):
        old = region[:8]
        await raw.do("poke", at=64, value=40)
        add, swap = Opcode.ATOMIC_FETCH_AND_ADD, Opcode.ATOMIC_CMP_AND_SWP
        await qp.post_send(add, [old], remote.addr + 64, remote.rkey, compare_add=2)
        assert int.from_bytes(old.view, sys.byteorder) == 40
        await qp.post_send(swap, [old], remote.addr + 64, remote.rkey, compare_add=42, swap=7)
        assert int.from_bytes(old.view, sys.byteorder) == 42
        assert await raw.do("peek", at=64) == 7
        await check_their_atomics(raw, region)


async def test_messages_by_hand(raw: Raw) -> None:
    """Messages with immediates, both ways, where the two queue pairs met by their numbers alone."""
    need_raw_connect()
    need("send_with_imm")
    async with by_hand(raw) as (qp, _, region, receive):
        region.view[:] = data(SPACE, 1)
        await qp.post_send(Opcode.SEND_WITH_IMM, [region], imm_data=0x01020304)
        assert await raw.do("recv") == {"length": SPACE, "crc": zlib.crc32(region.view), "imm": 0x01020304}
        await raw.do("fill", at=0, length=SPACE, seed=2)
        await raw.do("send", length=SPACE, imm=0xFFFEFDFC)
        _, _, _, length, _, imm, flags, _ = await receive.completion
        assert receive.memory.view == data(SPACE, 2)
        assert (length, imm, flags & WCFlags.WITH_IMM) == (SPACE, 0xFFFEFDFC, WCFlags.WITH_IMM)
