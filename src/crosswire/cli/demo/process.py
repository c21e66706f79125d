"""The hub of the demo: a process that is killed and started again on the same ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from crosswire.cli.demo.scene import HOST
from crosswire.errors import CrosswireError
from crosswire.listeners import PLAIN_LISTENERS

__all__ = ["HubProcess"]

_TRIES = 5
_PAUSE_S = 1.0
_TIMEOUT_S = 60.0


class HubProcess:
    """`crosswire serve`, with its standard output read for the ready line.

    It runs in a new session: Ctrl-C signals only the demo, which stops the hub in order.
    """

    def __init__(self, config: Path, log: Path) -> None:
        self._config = config
        self._log = log
        self._ports = dict.fromkeys(PLAIN_LISTENERS, 0)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process id; only after `start`."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> dict[str, int]:
        """Returns the open ports by listener: free ones at first, the same at every later start.

        Another process may have taken a port while the hub was down, if only for a moment: the
        start is retried a few times. Raises CrosswireError if the last attempt fails.
        """
        for _ in range(_TRIES - 1):
            with contextlib.suppress(CrosswireError):
                return await self._start()
            await asyncio.sleep(_PAUSE_S)
        return await self._start()

    async def _start(self) -> dict[str, int]:
        command = [sys.executable, "-m", "crosswire.cli.main", "serve", "--json"]
        command += ["--config", str(self._config)]
        for name, port in self._ports.items():
            command += ["--listen", f"{name}={HOST}:{port}"]
        with self._log.open("ab") as log:
            log_size = os.fstat(log.fileno()).st_size
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _TIMEOUT_S)
        except TimeoutError:
            await self.kill()
            line = b""
        if not line:
            await self._process.wait()
            output = self._log.read_bytes()[log_size:].decode(errors="replace").strip()
            raise CrosswireError(f"the hub did not start: {output or 'it printed nothing'}")
        listen: dict[str, str] = msgspec.json.decode(line)["listen"]
        self._ports = {name: int(at.rpartition(":")[2]) for name, at in listen.items()}
        return self._ports

    async def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    def abandon(self) -> None:
        """Send SIGKILL if it still runs, without waiting: for use outside the event loop."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Send SIGTERM if it still runs, and wait until it has drained."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
