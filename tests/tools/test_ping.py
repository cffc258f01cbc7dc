"""`aiordma ping`, run as a command, in both roles; and its protocol's two sides against peers that don't keep to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import aiordma
from aiordma import Access, Connection, RemoteRegion
from aiordma.opening import Opening
from aiordma.testing import Pair, connected_pair
from aiordma.tools import rping
from aiordma.tools.cli import cli
from aiordma.tools.rping import Pinger, Responder, RpingError, decode_advert, encode_advert, ping_data

HOST = "127.0.0.1"
PING = [sys.executable, "-c", "from aiordma.tools.main import main; main()", "ping"]
#: Warnings are errors in the other process; slow callbacks, which the debug mode would report, are none.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONASYNCIODEBUG", "PYTHONDEVMODE")
} | {"PYTHONWARNINGS": "error", "AIORDMA_DEVICE": "soft"}


class Command:
    """The command in a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*PING, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        """Wait for its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit status, the rest of its output, its errors."""
        out, err = self.process.communicate(timeout=40)
        return self.process.returncode, out, err

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def ping(*arguments: str) -> Iterator[Command]:
    """Run the command in the block."""
    command = Command(*arguments)
    with command.process:
        try:
            yield command
        finally:
            command.process.kill()


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[tuple[Command, str]]:
    """Run a server on a free port; gives it and the port."""
    with ping("-s", "-a", HOST, "-p", "0", *arguments) as command:
        found = re.fullmatch(r"listening at 127\.0\.0\.1:(\d+)", line := command.line())
        assert found, line
        yield command, found[1]


def client(port: str, *arguments: str) -> tuple[int, str, str]:
    """Run a client to its end."""
    with ping("-c", "-a", HOST, "-p", port, *arguments) as command:
        return command.end()


@pytest.mark.parametrize("size", [23, 64, 4096, 65535])
def test_sizes(size: int) -> None:
    """Pings of every size go there and back, with their data right on both sides; then both end with status 0."""
    with server("-V") as (serving, port):
        status, out, err = client(port, "-C", "5", "-S", str(size), "-V")
        assert (status, err) == (0, "")
        assert f"5 pings of {size} bytes sent, 5 came back, 0% lost" in out
        status, out, err = serving.end()
    assert (status, err) == (0, "")
    assert re.fullmatch(r"127\.0\.0\.1:\d+: 5 pings answered\n", out)


def test_lines() -> None:
    """-v is a line for each ping on both sides; the client ends with statistics like ping's."""
    with server("-v") as (serving, port):
        status, out, _ = client(port, "-C", "3", "-v")
        lines = out.splitlines()
        assert status == 0
        assert lines[0] == f"PING {HOST}:{port} by soft: 64 bytes of data"
        for number, line in enumerate(lines[1:4]):
            assert re.fullmatch(rf"64 bytes from 127\.0\.0\.1: ping={number} time=\d+\.\d{{3}} ms", line)
        assert lines[4] == "--- 127.0.0.1 ping statistics ---"
        assert re.fullmatch(r"3 pings of 64 bytes sent, 3 came back, 0% lost, in \d+ ms", lines[5])
        assert re.fullmatch(r"round trip min/avg/max/mdev = (\d+\.\d{3}/){3}\d+\.\d{3} ms", lines[6])
        assert re.fullmatch(r"data \S+ [kMG]?B/s each way", lines[7])
        out = serving.end()[1]
    assert re.findall(r"64 bytes from 127\.0\.0\.1:\d+: ping=(\d)\n", out) == ["0", "1", "2"]


def test_debug() -> None:
    """-d tells each step and the data on standard error, and no key."""
    with server() as (_, port):
        status, out, err = client(port, "-C", "1", "-d")
    assert (status, "rdma-ping" in out) == (0, False)
    steps = ["send the source", "go-ahead after the source", "send the sink", "go-ahead after the sink", "ping data"]
    assert [line for line in err.splitlines() if line.startswith(tuple(steps))] == err.splitlines()
    assert len(err.splitlines()) == len(steps)
    assert "rdma-ping-0: ABC" in err
    assert "rkey" not in err


def test_one_client_only() -> None:
    """A server without -P ends with its first client, and while that is there takes no other."""
    with server() as (serving, port), ping("-c", "-a", HOST, "-p", port, "-v") as first:
        first.line()
        assert "ping=0" in first.line()
        status, _, err = client(port, "-C", "1")
        assert status == 1
        assert err.startswith("aiordma: ")
        first.interrupt()
        assert first.end()[0] == 0
        assert serving.end()[0] == 0


def test_twenty_clients_at_once() -> None:
    """A server with -P serves twenty clients that are all connected at once, and goes on until Ctrl-C."""
    with server("-P", "-V") as (serving, port), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ping("-c", "-a", HOST, "-p", port, "-v", "-V")) for _ in range(20)]
        for one in clients:
            one.line()
            assert "ping=0" in one.line()
        # All are connected, the first one still. From here on nobody reads their lines but communicate().
        for one in clients:
            one.interrupt()
        assert [one.end()[::2] for one in clients] == [(0, "")] * 20
        serving.interrupt()
        status, out, err = serving.end()
    assert (status, err) == (0, "")
    assert re.search(r"--- 20 clients, \d+ pings answered ---\n$", out)


def test_interrupted() -> None:
    """Ctrl-C ends a client with its statistics and status 0, and nothing lost that was only on its way."""
    with server() as (serving, port), ping("-c", "-a", HOST, "-p", port, "-v") as pinging:
        pinging.line()
        pinging.line()
        pinging.interrupt()
        status, out, err = pinging.end()
        assert (status, err) == (0, "")
        assert re.search(r"(\d+) pings? of 64 bytes sent, \1 came back, 0% lost", out)
        assert serving.end()[::2] == (0, "")


def test_server_that_hangs() -> None:
    """A ping that a stopped server doesn't answer is lost, a second after Ctrl-C."""
    with server() as (serving, port), ping("-c", "-a", HOST, "-p", port, "-v") as pinging:
        pinging.line()
        pinging.line()
        serving.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, serving.process.pid, os.WSTOPPED | os.WNOWAIT)
        pinging.interrupt()
        status, out, err = pinging.end()
    assert (status, err) == (0, "")
    assert re.search(r"(\d+) pings? of 64 bytes sent, (?!\1 )\d+ came back, \S+% lost", out)


def test_nothing_listens() -> None:
    """Without a server the client says so in one line, with status 1."""
    with server() as (_, port):
        pass
    status, out, err = client(port, "-C", "1")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"aiordma: can't connect .+\n", err)


def test_server_killed() -> None:
    """A server that is killed is one line and status 1, with the statistics of what came back."""
    with server("-P") as (serving, port), ping("-c", "-a", HOST, "-p", port, "-v") as pinging:
        pinging.line()
        assert "ping=0" in pinging.line()
        serving.process.kill()
        status, out, err = pinging.end()
    assert status == 1
    assert re.fullmatch(r"aiordma: ping \d+ didn't come back: .+\n", err)
    found = re.search(r"(\d+) pings of 64 bytes sent, (\d+) came back", out)
    assert found
    assert int(found[1]) == int(found[2]) + 1


async def test_client_gone_in_the_midst() -> None:
    """A client that leaves in the midst of a ping is one line and status 1 of the server."""
    with server() as (serving, port):
        async with connect(port) as connection:
            await connection.send(encode_advert(source(connection, ping_data(0, 64))))
            await connection.recv()
        status, out, err = await asyncio.to_thread(serving.end)
    assert status == 1
    assert re.fullmatch(r"aiordma: 127\.0\.0\.1:\d+: ping 0 broke off: .+\n", err)
    assert out.endswith(": 0 pings answered\n")


async def test_server_finds_wrong_data() -> None:
    """A server with -V refuses wrong data: one line that says where, and status 1."""
    with server("-V") as (serving, port):
        data = bytearray(ping_data(0, 64))
        data[50] ^= 1
        async with connect(port) as connection:
            await connection.send(encode_advert(source(connection, bytes(data))))
            status, _, err = await asyncio.to_thread(serving.end)
    assert status == 1
    assert re.fullmatch(r"aiordma: 127\.0\.0\.1:\d+: ping 0 came with wrong data: byte 50 of 64 .+\n", err)


async def test_client_finds_wrong_data() -> None:
    """A client with -V finds wrong data: one line that says where, and status 1; without -V it doesn't look."""

    async def corrupt(connection: Connection) -> None:
        await connection.recv()
        await connection.send(bytes(16))
        data = bytearray(ping_data(0, 64))
        data[50] ^= 1
        await connection.write(decode_advert(await connection.recv()), data)
        await connection.send(bytes(16))
        with contextlib.suppress(aiordma.BrokenError):
            await connection.recv()

    async with aiordma.serve(corrupt, HOST, device="soft", param=rping.PARAM) as serving:
        status, out, err = await asyncio.to_thread(client, str(serving.port), "-C", "1", "-V")
        assert status == 1
        assert re.fullmatch(r"aiordma: ping 0 came with wrong data: byte 50 of 64 .+\n", err)
        assert "1 ping of 64 bytes sent, 0 came back, 100% lost" in out
        assert (await asyncio.to_thread(client, str(serving.port), "-C", "1"))[0] == 0


def test_server_takes_only_its_size() -> None:
    """A server with -S refuses longer pings, and says which option that is."""
    with server("-S", "100") as (serving, port):
        assert client(port, "-C", "1", "-S", "100")[0] == 0
        assert serving.end()[0] == 0
    with server("-S", "100") as (serving, port):
        assert client(port, "-C", "1", "-S", "101")[0] == 1
        status, _, err = serving.end()
    assert status == 1
    assert "pings with 101 bytes, this server takes 100: -S" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of -c and -s"),
        (("-c", "-s"), "one of -c and -s"),
        (("-c",), "-c needs -a"),
        (("-c", "-a", HOST, "-P"), "-P is a server's"),
        (("-c", "-a", HOST, "-S", "22"), "22"),
        (("-c", "-a", HOST, "-S", "65536"), "65536"),
        (("-c", "-a", HOST, "-C", "-1"), "-1"),
    ],
)
def test_usage(arguments: tuple[str, ...], words: str) -> None:
    """Arguments that don't fit together, and sizes that rping doesn't have, are told of with status 2."""
    result = CliRunner().invoke(cli, ["ping", *arguments])
    assert result.exit_code == 2
    assert words in result.output


# -- the two sides, against peers that don't keep to the protocol ---------------------------------------------------


def source(connection: Connection, data: bytes) -> RemoteRegion:
    """Offer data to a server that will READ it."""
    region = connection.alloc(len(data), access=Access.REMOTE_READ | Access.REMOTE_WRITE)
    region.view[:] = data
    return region.remote()


def connect(port: str) -> Opening[Connection]:
    """Connect to a server by hand."""
    return aiordma.connect(HOST, int(port), device="soft", param=rping.PARAM)


def pair() -> contextlib.AbstractAsyncContextManager[Pair]:
    """Connect two ends with rping's parameters."""
    return connected_pair(device="soft", client_param=rping.PARAM, server_param=rping.PARAM)


async def test_server_answers_nonsense() -> None:
    """A client whose server sends something else than a go-ahead says so."""
    async with pair() as ends:
        ends.server.send(b"hello")
        with pytest.raises(RpingError, match="sent 5 bytes"):
            await Pinger(ends.client, 64).ping(0)


async def test_client_sends_nonsense() -> None:
    """A server whose client sends something else than an advert says so."""
    async with pair() as ends:
        ends.client.send(b"hello")
        with pytest.raises(RpingError, match="sent 5 bytes"):
            await Responder(ends.server).answer()


async def test_short_sink() -> None:
    """A sink that is shorter than the source is refused, before anything is written to it."""
    async with pair() as ends:
        region = source(ends.client, ping_data(0, 64))
        ends.client.send(encode_advert(region))
        ends.client.send(encode_advert(region[:63]))
        with pytest.raises(RpingError, match="sink has 63 bytes, its source 64"):
            await Responder(ends.server).answer()


async def test_client_disconnects() -> None:
    """Between two pings a client's disconnect is the end, and no error."""
    async with pair() as ends:
        await ends.client.close()
        assert await Responder(ends.server).answer() is None
