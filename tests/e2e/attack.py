"""Peers that mean no good, as a program: `python -m tests.e2e.attack KIND SECONDS NAME=PORT…`.

    garbage    many connections that send bytes that mean nothing
    slow       handshakes, a byte now and then
    silent     peers that send hello, then nothing, and never close
    unread     subscribers that never read what is published, which is much

It prints how many connections it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import Awaitable, Callable

import msgspec

from crosswire.wire.emp.frames import Request, serialize

HELLO = {
    "emp": bytes.fromhex("000000080000000001000000"),
    "emqp-clients": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48),
    "relink": bytes(8),
    "epoxy": bytes.fromhex("010043470100000000"),
    "micromsg2": b"\x01\x00\x00\x09crosswire\x00\x00\x00\x07pub-sub",
}
_AT_ONCE = 64
_SLOW = 300
_SILENT = 1000
_UNREAD = 20
_MESSAGE_BYTES = 65536

Ports = dict[str, int]


async def garbage(ports: Ports, seconds: float) -> int:
    chance = random.Random(7)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    count = 0

    async def bother() -> None:
        nonlocal count
        while loop.time() < end:
            name = chance.choice(list(ports))
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[name])
            count += 1
            begin = HELLO[name] if chance.random() < 0.5 else b""
            writer.write(begin + chance.randbytes(chance.randrange(1, 4096)))
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.read()
            writer.transport.abort()

    await asyncio.gather(*(bother() for _ in range(_AT_ONCE)))
    return count


async def slow(ports: Ports, seconds: float) -> int:
    names = list(ports)
    writers = []
    for number in range(_SLOW):
        name = names[number % len(names)]
        _, writer = await asyncio.open_connection("127.0.0.1", ports[name])
        writers.append((writer, HELLO[name]))
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    index = 0
    while loop.time() < end:
        for writer, hello in writers:
            if index < len(hello) - 1:
                writer.write(hello[index : index + 1])
        index += 1
        await asyncio.sleep(0.2)
    return len(writers)


async def silent(ports: Ports, seconds: float) -> int:
    names = list(ports)
    held = []
    for number in range(_SILENT):
        name = names[number % len(names)]
        peer = socket.create_connection(("127.0.0.1", ports[name]))
        peer.sendall(HELLO[name])
        held.append(peer)
    await asyncio.sleep(seconds)
    return len(held)


async def unread(ports: Ports, seconds: float) -> int:
    """All in EMP, whose client would read; these write what it would and no more."""
    held = []
    for _ in range(_UNREAD):
        peer = socket.create_connection(("127.0.0.1", ports["emp"]))
        peer.sendall(HELLO["emp"] + _request(1, "$subscribe", {"destination": "topic/flood"}))
        held.append(peer)
    reader, writer = await asyncio.open_connection("127.0.0.1", ports["emp"])
    writer.write(HELLO["emp"])
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    number = 1
    text = "x" * _MESSAGE_BYTES
    while loop.time() < end:
        writer.write(_request(number, "$publish", {"destination": "topic/flood", "text": text}))
        number += 1
        await writer.drain()
        await reader.read(4096)
    return len(held)


def _request(identifier: int, op: str, data: object) -> bytes:
    return serialize(Request(identifier, msgspec.json.encode({"op": op, "data": data})))


KINDS: dict[str, Callable[[Ports, float], Awaitable[int]]] = {
    "garbage": garbage,
    "slow": slow,
    "silent": silent,
    "unread": unread,
}


async def main() -> None:
    ports = dict(each.split("=") for each in sys.argv[3:])
    count = await KINDS[sys.argv[1]](
        {name: int(port) for name, port in ports.items()}, float(sys.argv[2])
    )
    print(count)


if __name__ == "__main__":
    asyncio.run(main())
