"""A hub in a process of its own, on free ports and in a temporary folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Self

from crosswire.listeners import LISTENERS, PLAIN_LISTENERS

__all__ = ["RunningHub", "running_hub"]

_READY_S: Final = 60.0
_EMQP_ROLES: Final = ("workers", "publishers", "subscribers", "admin")


def running_hub(
    *,
    config: str = "",
    data: str | Path | None = None,
    tls: bool = False,
    environment: Mapping[str, str] | None = None,
) -> RunningHub:
    """A hub for a test: enter it with `with` or with `async with`.

    All listeners have free ports on 127.0.0.1; those with TLS are open only if `tls`, which needs
    a certificate in `config`. `config` is the text of a configuration file. Without `data` the hub
    works in a temporary folder that is removed.
    """
    return RunningHub(config=config, data=data, tls=tls, environment=environment)


class RunningHub:
    """`crosswire serve` as a child process; `kill` and `restart` are for tests of failures.

    A restart keeps the data and the ports, so that clients find the hub again.
    """

    def __init__(
        self,
        *,
        config: str = "",
        data: str | Path | None = None,
        tls: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._given = None if data is None else Path(data)
        self._names = list(LISTENERS if tls else PLAIN_LISTENERS)
        self._environment = dict(environment or {})
        self._listen: dict[str, str] = {}
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    # Entering and leaving, in both kinds of programs.

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._clean()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)
        self._clean()

    # Addresses.

    @property
    def listen(self) -> dict[str, str]:
        """HOST:PORT of every listener, by its name."""
        return dict(self._listen)

    def port(self, listener: str) -> int:
        """The port of a listener: `emp`, `http`, `emqp-workers`, `relink-tls`, …"""
        return int(self._listen[listener].rpartition(":")[2])

    def url(self, protocol: str) -> str:
        """What `crosswire.connect` takes for a protocol (`emp`, `emp+tls`), or `http`."""
        if protocol == "emqp":
            query = "&".join(f"{role}={self.port(f'emqp-{role}')}" for role in _EMQP_ROLES)
            return f"emqp://127.0.0.1:{self.port('emqp-clients')}?{query}"
        listener = protocol.replace("+", "-")
        return f"{protocol}://127.0.0.1:{self.port(listener)}"

    @property
    def data(self) -> Path:
        """The folder of its store and lake."""
        return self._given if self._given is not None else self._work_folder() / "data"

    def log(self) -> str:
        """What it has logged so far, a JSON object per line."""
        return (self._work_folder() / "hub.log").read_text()

    # Its life.

    def start(self) -> None:
        """Start it, and wait until all listeners are open. Raises RuntimeError with its words."""
        folder = self._work_folder()
        command = [sys.executable, "-m", "crosswire.cli.main", "serve", "--json"]
        command += ["--data", str(self.data)]
        if self._config:
            (folder / "crosswire.toml").write_text(self._config)
            command += ["--config", str(folder / "crosswire.toml")]
        for name in self._names:
            command.append(f"--listen={name}={self._listen.get(name, '127.0.0.1:0')}")
        self._log = (folder / "hub.log").open("ab")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self._environment},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(timeout=_READY_S)
            self._close_streams()
            raise RuntimeError(f"the hub did not start: {self.log()[-2000:]}")
        ready: dict[str, Any] = json.loads(line)
        self._listen = ready["listen"]

    def stop(self) -> None:
        """Have it drain and end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a goodbye, as a crash would."""
        self._end(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, such as SIGHUP, which has it read its configuration again."""
        assert self._process is not None, "it is not running"
        self._process.send_signal(number)

    def restart(self, *, kill: bool = False) -> None:
        """End it, by default in order, and start it again on its data and ports."""
        self._end(signal.SIGKILL if kill else signal.SIGTERM)
        self.start()

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
        process.wait(timeout=_READY_S)
        if process.stdout is not None:
            process.stdout.close()
        self._close_streams()

    def _close_streams(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _work_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="crosswire-"))
        return self._folder

    def _clean(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
