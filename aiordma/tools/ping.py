"""`aiordma ping`: rping's pings, as client and as server, with what they took at the end, as ping has it."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from time import perf_counter
from typing import Final

import click

import aiordma
from aiordma import Connection, RDMAError
from aiordma.tools import rping
from aiordma.tools.rping import Pinger, Responder, RpingError, Trace
from aiordma.types import SocketAddress

__all__ = ["Statistics", "command"]

#: Seconds that a ping on its way has to come back after Ctrl-C, before it is a lost one.
_GRACE: Final = 1.0


class Statistics:
    """What pings took: it grows with none of them.

    Attributes:
        sent: pings that were sent.
        returned: pings that came back.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.returned = 0
        self._min = math.inf
        self._max = 0.0
        self._mean = 0.0
        self._squares = 0.0  # of the distances from the mean (Welford)

    def add(self, seconds: float) -> None:
        """Count a ping that came back."""
        self.returned += 1
        self._min = min(self._min, seconds)
        self._max = max(self._max, seconds)
        distance = seconds - self._mean
        self._mean += distance / self.returned
        self._squares += distance * (seconds - self._mean)

    def lines(self, size: int, elapsed: float) -> list[str]:
        """Say it in lines: of pings of so many bytes, which took so many seconds all in all."""
        lost = 100 * (1 - self.returned / self.sent) if self.sent else 0
        lines = [
            f"{_pings(self.sent, size)} sent, {self.returned} came back, {lost:.3g}% lost, in {elapsed * 1e3:.0f} ms"
        ]
        if self.returned:
            times = (self._min, self._mean, self._max, math.sqrt(self._squares / self.returned))
            lines.append(f"round trip min/avg/max/mdev = {'/'.join(f'{time * 1e3:.3f}' for time in times)} ms")
            lines.append(f"data {_rate(self.returned * size / elapsed)} each way")
        return lines


def _pings(count: int, size: int) -> str:
    return f"{count} ping{'' if count == 1 else 's'} of {size} bytes"


def _rate(bytes_per_second: float) -> str:
    for unit in ("B/s", "kB/s", "MB/s"):
        if bytes_per_second < 999.5:
            return f"{bytes_per_second:.3g} {unit}"
        bytes_per_second /= 1000
    return f"{bytes_per_second:.3g} GB/s"


def _name(address: SocketAddress) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"


def _complain(text: str) -> None:
    click.echo(f"aiordma: {text}", err=True)


def _text(data: memoryview) -> str:
    """Give a ping's data as text; what isn't ASCII was never rping's."""
    return bytes(data).rstrip(b"\0").decode("ascii", "backslashreplace")


class _Client:
    """One run of the client's side."""

    def __init__(self, host: str, size: int, *, verbose: bool, validate: bool, trace: Trace | None) -> None:
        self._host = host
        self._size = size
        self._verbose = verbose
        self._validate = validate
        self._trace = trace
        self._statistics = Statistics()
        self._stopping = False
        self._failed = False

    async def run(self, port: int, count: int, device: str | None) -> int:
        """Connect, ping until there were enough or Ctrl-C; gives the exit status."""
        elapsed: float | None = None
        try:
            async with aiordma.connect(self._host, port, device=device, param=rping.PARAM) as connection:
                click.echo(f"PING {_name(connection.peer_addr)} by {connection.device}: {self._size} bytes of data")
                self._let_last_return()
                pinger = Pinger(connection, self._size, self._trace)
                start = perf_counter()
                try:
                    await self._ping(pinger, count)
                except asyncio.CancelledError:
                    connection.abort()  # a peer that doesn't answer wouldn't answer a disconnect either
                    raise
                finally:
                    elapsed = perf_counter() - start
        except asyncio.CancelledError:  # Ctrl-C
            if elapsed is None:
                _complain("interrupted before it was connected")
                return 1
        click.echo(f"--- {self._host} ping statistics ---")
        for line in self._statistics.lines(self._size, elapsed):
            click.echo(line)
        return int(self._failed or not self._statistics.returned)

    def _let_last_return(self) -> None:
        """From here on the first Ctrl-C waits for the ping on its way, for a while; the second doesn't."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupted() -> None:
            if self._stopping:
                task.cancel()
            self._stopping = True
            loop.call_later(_GRACE, task.cancel)

        loop.add_signal_handler(signal.SIGINT, interrupted)

    async def _ping(self, pinger: Pinger, count: int) -> None:
        statistics = self._statistics
        while not self._stopping and (not count or statistics.sent < count):
            number = statistics.sent
            statistics.sent += 1
            try:
                seconds = await pinger.ping(number)
                if self._validate:
                    rping.check_data(pinger.returned, number)
            except RDMAError as error:
                self._failed = True
                _complain(str(error) if isinstance(error, RpingError) else f"ping {number} didn't come back: {error}")
                return
            statistics.add(seconds)
            if self._verbose:
                click.echo(f"{self._size} bytes from {self._host}: ping={number} time={seconds * 1e3:.3f} ms")
            if self._trace:
                self._trace(f"ping data: {_text(pinger.returned)}")


class _Server:
    """One run of the server's side."""

    def __init__(self, size: int, *, verbose: bool, validate: bool, trace: Trace | None) -> None:
        self._size = size
        self._verbose = verbose
        self._validate = validate
        self._trace = trace
        self._clients = 0
        self._answered = 0
        self._failed = False

    async def run(self, host: str | None, port: int, device: str | None, *, persistent: bool) -> int:
        """Serve one client, or, if persistent, all until Ctrl-C; gives the exit status."""
        try:
            if persistent:
                async with aiordma.serve(self._handle, host, port, device=device, param=rping.PARAM) as server:
                    self._listening(server.listener)
                    await server.serve_forever()
            else:
                async with aiordma.listen(host, port, device=device, param=rping.PARAM) as listener:
                    self._listening(listener)
                    request = await listener.get_request()
                async with await request.accept() as connection:
                    await self._handle(connection)
        except asyncio.CancelledError:  # Ctrl-C
            clients = f"{self._clients} client{'' if self._clients == 1 else 's'}"
            click.echo(f"--- {clients}, {self._answered} pings answered ---")
        return int(self._failed or not (persistent or self._answered))

    def _listening(self, listener: aiordma.Listener) -> None:
        click.echo(f"listening at {', '.join(_name(endpoint) for endpoint in listener.endpoints)}")

    async def _handle(self, connection: Connection) -> None:
        self._clients += 1
        client = _name(connection.peer_addr)
        responder = Responder(connection, self._size, self._trace)
        try:
            while (data := await responder.answer(validate=self._validate)) is not None:
                self._answered += 1
                if self._verbose:
                    click.echo(f"{len(data)} bytes from {client}: ping={responder.answered - 1}")
                if self._trace:
                    self._trace(f"ping data: {_text(data)}")
        except RDMAError as error:
            self._failed = True
            what = str(error) if isinstance(error, RpingError) else f"ping {responder.answered} broke off: {error}"
            _complain(f"{client}: {what}")
        click.echo(f"{client}: {responder.answered} ping{'' if responder.answered == 1 else 's'} answered")


@click.command("ping")
@click.option("-c", "client", is_flag=True, help="Be the client: ping the server at -a.")
@click.option("-s", "server", is_flag=True, help="Be the server: one client's, or with -P everyone's.")
@click.option("-a", "address", metavar="ADDR", help="Name or address to connect to, or to listen at.  [server: all]")
@click.option("-p", "port", type=click.IntRange(0, 65535), default=rping.PORT, show_default=True, help="Its port.")
@click.option("-C", "count", type=click.IntRange(0), default=0, help="Pings to send.  [until Ctrl-C]")
@click.option(
    "-S", "size", type=click.IntRange(rping.MIN_SIZE, rping.MAX_SIZE),
    help=f"Bytes of a ping, from {rping.MIN_SIZE} on; the most a server takes.  [64; server: {rping.MAX_SIZE}]",
)  # fmt: skip
@click.option("-v", "verbose", is_flag=True, help="A line for each ping.")
@click.option("-V", "validate", is_flag=True, help="Check the data of each ping.")
@click.option("-d", "debug", is_flag=True, help="A line for each step, and the data, to standard error.")
@click.option("-P", "persistent", is_flag=True, help="Serve any number of clients, at once, until Ctrl-C.")
@click.option("--device", metavar="NAME", help="soft, rdma or a device's name.  [AIORDMA_DEVICE, or the best there is]")
def command(
    *,
    client: bool,
    server: bool,
    address: str | None,
    port: int,
    count: int,
    size: int | None,
    verbose: bool,
    validate: bool,
    debug: bool,
    persistent: bool,
    device: str | None,
) -> None:
    """Ping by RDMA, as rping does and with rping at the other end: SEND, READ and WRITE on one connection.

    The exit status is 1 if nothing came back, a ping was lost, or its data was wrong (-V).
    """
    if client == server:
        raise click.UsageError("give one of -c and -s: client or server")
    trace = _trace if debug else None
    if server:
        serving = _Server(size or rping.MAX_SIZE, verbose=verbose, validate=validate, trace=trace)
        status = asyncio.run(serving.run(address, port, device, persistent=persistent))
    else:
        if not address:
            raise click.UsageError("-c needs -a: the address to ping")
        if persistent:
            raise click.UsageError("-P is a server's")
        pinging = _Client(address, size or 64, verbose=verbose, validate=validate, trace=trace)
        status = asyncio.run(pinging.run(port, count, device))
    sys.exit(status)


def _trace(line: str) -> None:
    click.echo(line, err=True)
