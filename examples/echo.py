"""Messages, echoed: a server that sends back what it gets, and a client that checks the answers.

python examples/echo.py                         both, in one run
python examples/echo.py serve 0.0.0.0 7471      the server
python examples/echo.py send 10.0.0.5 7471 hello world
"""

import asyncio
import sys

import aiordma


async def echo(conn: aiordma.Connection) -> None:
    """Send every message back, until the peer disconnects."""
    print(f"server: connection from {conn.peer_addr[0]} on device {conn.device}")
    async for message in conn:
        await conn.send(message)


async def send(host: str, port: int, texts: list[str]) -> None:
    """Send messages all at once, then receive the answers: they come whole, and in order."""
    async with aiordma.connect(host, port) as conn:
        for text in texts:
            # Posted at once. What it returns is a future, for who wants to await the end of it.
            conn.send(text.encode())
        for text in texts:
            answer = (await conn.recv()).decode()
            print(f"client: sent {text!r}, got {answer!r}")
            if answer != text:
                raise SystemExit("that isn't an echo")


async def serve(host: str, port: int) -> None:
    """Serve until interrupted."""
    async with aiordma.serve(echo, host, port) as server:
        print(f"server: port {server.port}")
        await server.serve_forever()


async def both() -> None:
    """Run server and client in one program, on a port that is free."""
    async with aiordma.serve(echo, "127.0.0.1") as server:
        await send("127.0.0.1", server.port, ["hello", "", "RDMA " * 3])


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            asyncio.run(both())
        case ["serve", host, port]:
            asyncio.run(serve(host, int(port)))
        case ["send", host, port, *texts]:
            asyncio.run(send(host, int(port), texts))
        case _:
            raise SystemExit(__doc__)
