"""A work queue: tasks in a ring in the server's memory, each for the worker whose FETCH_ADD drew its ticket.

Nobody hands tasks out: workers, on any number of hosts, draw numbers from a counter in the server's memory,
and READ the task of that number. Only results are messages; they tell the server which places are free again.
"""

import asyncio
import struct
from collections import Counter

import aiordma
from aiordma import Access, Connection, RemoteRegion

U64 = struct.Struct("=Q")  # atomics work on integers in the byte order of the host they are in
STOP = (1 << 64) - 1  # other tasks are numbers to be squared
RESULT = struct.Struct("=QQ16s")
PLACES = 32
# The server's memory: the next ticket to be drawn, the number of tasks published, the ring.
DRAWN, PUBLISHED, RING = slice(0, 8), slice(8, 16), 64


def place(ticket: int) -> slice:
    """Give the place of a task in the server's memory."""
    return slice(start := RING + ticket % PLACES * 8, start + 8)


async def work(name: bytes, port: int) -> None:
    """Draw tickets and do their tasks, until one says stop."""
    async with aiordma.connect("127.0.0.1", port) as conn:
        memory = RemoteRegion.from_bytes(conn.peer_private_data)
        while True:
            ticket = await conn.fetch_add(memory[DRAWN], 1)
            while U64.unpack(await conn.read(memory[PUBLISHED]))[0] <= ticket:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            (number,) = U64.unpack(await conn.read(memory[place(ticket)]))
            if number == STOP:
                return
            await conn.send(RESULT.pack(ticket, number * number, name))


async def main(tasks: int = 500, workers: int = 4) -> None:
    """Publish tasks as fast as places get free, and collect the results."""
    results: dict[int, int] = {}
    done_by: Counter[bytes] = Counter()
    arrived = asyncio.Event()

    async def take_results(conn: Connection) -> None:
        async for message in conn:
            ticket, result, name = RESULT.unpack(message)
            assert ticket not in results, "two workers drew one ticket"
            results[ticket] = result
            done_by[name.rstrip(b"\0")] += 1
            arrived.set()

    pd = aiordma.open_device("soft").pd  # the device of 127.0.0.1
    memory = pd.alloc(RING + PLACES * 8, access=Access.REMOTE_READ | Access.REMOTE_ATOMIC)
    offer = memory.remote().to_bytes()
    async with (
        memory,
        aiordma.serve(take_results, "127.0.0.1", private_data=offer) as server,
        asyncio.TaskGroup() as group,
    ):
        for n in range(workers):
            group.create_task(work(b"worker %d" % n, server.port))
        for ticket, number in enumerate([*range(tasks), *[STOP] * workers]):
            while ticket >= PLACES and ticket - PLACES not in results:  # the ring is full
                arrived.clear()
                await arrived.wait()
            U64.pack_into(memory[place(ticket)].view, 0, number)
            U64.pack_into(memory[PUBLISHED].view, 0, ticket + 1)
        while len(results) < tasks:
            arrived.clear()
            await arrived.wait()
    right = sum(results[n] == n * n for n in range(tasks))
    print(f"{right} of {tasks} tasks done, each by one of {len(done_by)} workers: {sorted(done_by.values())}")


if __name__ == "__main__":
    asyncio.run(main())
