"""A remote memory cache: clients GET by one-sided READ, without the server's program, and PUT by message.

The server's memory is a hash table with one slot for each hash. A GET reads a slot, perhaps while the server
writes there: the slot's checksum gives a torn read away, and it is read again.
"""

import asyncio
import itertools
import struct
import zlib

import aiordma
from aiordma import Access, Connection, MemoryRegion, RemoteRegion

BODY = struct.Struct("<QHH48s64s")  # version (0: empty), lengths of key and value, key, value
SLOT_SIZE = 4 + BODY.size  # in front of it its CRC-32
SLOTS = 4096
VERSIONS = itertools.count(1)


def pack(version: int, key: bytes, value: bytes) -> bytes:
    """Make the content of a slot."""
    body = BODY.pack(version, len(key), len(value), key, value)
    return zlib.crc32(body).to_bytes(4, "little") + body


def slot_of(key: bytes) -> slice:
    """Give the place of a key in the table, the same on every host."""
    return slice(start := zlib.crc32(key) % SLOTS * SLOT_SIZE, start + SLOT_SIZE)


async def serve_puts(conn: Connection, table: MemoryRegion) -> None:
    """Put what comes: the length of a key, the key, the value. It replaces what has the same hash."""
    async for message in conn:
        key, value = message[1 : 1 + message[0]], message[1 + message[0] :]
        table[slot_of(key)].view[:] = pack(next(VERSIONS), key, value)
        await conn.send(b"done")


async def put(conn: Connection, key: bytes, value: bytes) -> None:
    """Put an entry, and wait until it is there."""
    await conn.send(bytes([len(key)]) + key + value)
    await conn.recv()


async def get(conn: Connection, key: bytes) -> tuple[int, bytes] | None:
    """Get the version and value of an entry."""
    table = RemoteRegion.from_bytes(conn.peer_private_data)
    slot = await conn.read(table[slot_of(key)])
    while zlib.crc32(slot[4:]).to_bytes(4, "little") != slot[:4]:
        slot = await conn.read(table[slot_of(key)])  # it was torn
    version, key_size, value_size, found, value = BODY.unpack(slot[4:])
    return (version, value[:value_size]) if version and found[:key_size] == key else None


async def main() -> None:
    """Run a server and two clients: one puts, the other gets."""
    pd = aiordma.open_device("soft").pd  # the device of 127.0.0.1
    table = pd.alloc(SLOTS * SLOT_SIZE, access=Access.REMOTE_READ)
    table.view[:] = pack(0, b"", b"") * SLOTS
    offer = table.remote().to_bytes()
    async with (
        table,
        aiordma.serve(lambda conn: serve_puts(conn, table), "127.0.0.1", private_data=offer) as server,
        aiordma.connect("127.0.0.1", server.port) as writer,
        aiordma.connect("127.0.0.1", server.port) as reader,
    ):
        await put(writer, b"answer", b"42")
        print("get answer:", await get(reader, b"answer"))
        print("get question:", await get(reader, b"question"))
        for n in range(200):  # put and get it at once: the value found is the old one or the new one, and whole
            found, _ = await asyncio.gather(get(reader, b"n"), put(writer, b"n", b"%02d" % (n % 100) * 32))
            assert found is None or found[1] == found[1][:2] * 32
        print("get n:", await get(reader, b"n"))


if __name__ == "__main__":
    asyncio.run(main())
