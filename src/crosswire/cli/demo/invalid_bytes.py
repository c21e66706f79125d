"""Invalid bytes for every port: other protocols, and nearly valid handshakes."""

from __future__ import annotations

import asyncio
import contextlib

from crosswire.cli.demo.scene import HOST

__all__ = ["send_invalid_bytes"]

_SCANS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("1603010200010001fc0303"),
    b"\xff" * 64,
)
_TIMEOUT_S = 1.0
_NEARLY_VALID = {
    # A hello of version 9.
    "emp": bytes.fromhex("00000008 00000000 09000000"),
    # A good config, and then a frame without framelets.
    "epoxy": bytes.fromhex("0100 4347 01000000 00 0000"),
    # Version 0, and a handshake with identifiers of 9 bytes.
    "relink": bytes(8) + bytes.fromhex("00 09 09 00") + bytes(20),
    # A handshake of major version 0.
    "micromsg2": bytes(16),
}


async def send_invalid_bytes(ports: dict[str, int]) -> int:
    """Send invalid bytes to every listener but HTTP; returns the number of connections."""
    messages = [
        (port, each)
        for name, port in ports.items()
        if name != "http"
        for each in (*_SCANS, *([_NEARLY_VALID[name]] if name in _NEARLY_VALID else []))
    ]
    await asyncio.gather(*(_send(port, each) for port, each in messages))
    return len(messages)


async def _send(port: int, wrong: bytes) -> None:
    """Wait until the hub closes the connection, a second at most."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(wrong)
                await reader.read()
            finally:
                writer.close()
