"""A hub, its commands and, if asked, the pipeline, in a network that has nothing but loopback.

    unshare --net python -m tests.e2e.without_network FOLDER [--pipeline]

`sitecustomize.py`, which is written to the folder, notes every address that a Python program of
this run connects to or looks up, other than this machine's. Programs that are not in Python can't
reach any.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import runpy
import socket
import struct
import subprocess
import sys
from pathlib import Path

from crosswire import connect
from crosswire.testing import running_hub

_INTERFACE_FLAGS = 0x8913
_SET_INTERFACE_FLAGS = 0x8914
_UP = 0x1

FOREIGN = "foreign.txt"
"""Has a line for each address of another machine that was asked for."""
_WATCH = """
import sys

_LOCAL = ("", "localhost", "0.0.0.0", "::", "::1")
_EVENTS = {{
    "socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
}}

def watch(event, arguments):
    if event not in _EVENTS:
        return
    address = arguments[_EVENTS[event]]
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(host, bytes):
        host = host.decode()
    is_path = event == "socket.connect" and not isinstance(address, tuple)
    if host is None or is_path or host in _LOCAL or host.startswith("127."):
        return
    with open({path!r}, "a") as file:
        file.write(f"{{event}} {{host}} {{sys.argv}}\\n")

sys.addaudithook(watch)
"""


def main() -> None:
    folder = Path(sys.argv[1])
    _raise_loopback()
    watch = folder / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(_WATCH.format(path=str(folder / FOREIGN)))
    runpy.run_path(str(watch / "sitecustomize.py"))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(watch), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    lake = folder / "data" / "lake"
    asyncio.run(_traffic(folder))
    assert list(lake.rglob("*.parquet"))
    if "--pipeline" in sys.argv:
        tables = str(folder / "tables")
        _crosswire("pipeline", "run", "--input", str(lake), "--output", tables)
        _crosswire("report", "--input", tables, "--output", str(folder / "report.html"))


async def _traffic(folder: Path) -> None:
    with running_hub(data=folder / "data") as hub:
        for protocol in ("emp", "emqp", "relink", "epoxy", "micromsg2"):
            async with connect(hub.url(protocol)) as client:
                await client.publish(f"queue/{protocol}", {"n": 1})
        _crosswire("status", "--hub", hub.url("http"))


def _crosswire(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "crosswire.cli.main", *arguments], check=True)


def _raise_loopback() -> None:
    """A new network has loopback, but it is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _INTERFACE_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


if __name__ == "__main__":
    main()
