"""Strangers: bytes that are nobody's protocol, on every port."""

from __future__ import annotations

import asyncio

from crosswire.cli.demo.scene import HOST

__all__ = ["make_trouble"]

_GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("1603010200010001fc0303"),
    b"\xff" * 64,
)


async def make_trouble(ports: dict[str, int]) -> None:
    """Say something wrong to every listener, and wait until it has ended the connection."""
    targets = [port for name, port in ports.items() if name != "http"]
    await asyncio.gather(*(_bother(port, each) for port in targets for each in _GARBAGE))


async def _bother(port: int, garbage: bytes) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(garbage)
    try:
        await asyncio.wait_for(reader.read(), 10)
    except (TimeoutError, ConnectionError):
        return
    finally:
        writer.close()
