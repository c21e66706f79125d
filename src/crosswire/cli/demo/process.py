"""The hub of the demo: a process that can be killed and started again on the same ports."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from crosswire.cli.demo.scene import HOST
from crosswire.errors import CrosswireError
from crosswire.listeners import PLAIN_LISTENERS

__all__ = ["HubProcess"]


class HubProcess:
    """`crosswire serve`, with its standard output read for the ready line."""

    def __init__(self, data: Path, bond: Path) -> None:
        self._data = data
        self._bond = bond
        self._ports = dict.fromkeys(PLAIN_LISTENERS, 0)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> dict[str, int]:
        """The ports that are open; the same ones at every start."""
        command = [sys.executable, "-m", "crosswire.cli.main", "serve", "--json"]
        command += ["--data", str(self._data), "--bond", str(self._bond)]
        for name, port in self._ports.items():
            command += ["--listen", f"{name}={HOST}:{port}"]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        line = await self._process.stdout.readline()
        if not line:
            said = (await self._process.stderr.read()).decode()
            raise CrosswireError(f"the hub did not start: {said}")
        listen: dict[str, str] = msgspec.json.decode(line)["listen"]
        self._ports = {name: int(at.rpartition(":")[2]) for name, at in listen.items()}
        self._drain = asyncio.create_task(self._process.stderr.read())
        return self._ports

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
