"""A real hub in a process of its own: started, killed, started again on the same data."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Final

from crosswire.listeners import PLAIN_LISTENERS

__all__ = ["HubProcess", "free_port"]

_READY_S: Final = 60.0
_PORTS: Final = (20_000, 30_000)
"""Below those that systems give to outgoing connections: a restarted hub finds its own again."""


_claims: Final[list[socket.socket]] = []
"""Names of sockets tell other processes which ports are taken, also while a hub is down."""


def free_port() -> int:
    """A port that nobody listens on now, outside of what systems hand out by themselves. It is
    this process's until that ends."""
    while True:
        port = random.randint(*_PORTS)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0crosswire-campaign-port-{port}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class HubProcess:
    """`crosswire serve` on one data directory. `environment` is added to that of this process."""

    def __init__(
        self,
        data: Path,
        *,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        lake: bool = False,
        limits: str = "",
    ) -> None:
        self.data = data
        self.environment = environment or {}
        self.ports = {name: free_port() for name in PLAIN_LISTENERS if name != "http"}
        self.config = (folder or data.parent) / "hub.toml"
        self.log = (folder or data.parent) / "hub.log"
        is_on = str(lake).lower()
        self.config.write_text(
            f'data = "{data}"\ninsecure = true\ndrain_s = 0.5\n'
            f"[lake]\nmessages = {is_on}\nledger = {is_on}\n"
            f"[store]\nbuffer_bytes = 1048576\nspare_bytes = 16777216\n{limits}"
        )
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0

    async def start(self) -> bool:
        """Returns when it listens; False if it ended instead."""
        command = [sys.executable, "-m", "crosswire.cli.main", "serve", "--json"]
        command += ["--config", str(self.config), "--listen=http=off"]
        command += [f"--listen={name}=127.0.0.1:{port}" for name, port in self.ports.items()]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        self.starts += 1
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), _READY_S)
        return bool(line)

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.process is not None and self.process.returncode is None

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Its exit code."""
        assert self.process is not None
        if self.is_running:
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), _READY_S)
        # The pipe's end is read, so that its transport is closed.
        assert self.process.stdout is not None
        await self.process.stdout.read()
        return code

    def url(self, protocol: str) -> str:
        """Where a client of this protocol connects."""
        if protocol != "emqp":
            return f"{protocol}://127.0.0.1:{self.ports[protocol]}"
        names = ("workers", "publishers", "subscribers")
        query = "&".join(f"{name}={self.ports[f'emqp-{name}']}" for name in names)
        return f"emqp://127.0.0.1:{self.ports['emqp-clients']}?{query}"

    def memory_bytes(self) -> int:
        """What it has in memory."""
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
