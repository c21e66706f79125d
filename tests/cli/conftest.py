"""The program itself: a hub in a process of its own, and commands that talk to it."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crosswire.server.server import GATEWAYS

PROGRAM = str(Path(sys.executable).parent / "crosswire")


class RunningHub:
    """`crosswire serve --json` with every listener on a free port."""

    def __init__(self, data: Path, *options: str) -> None:
        listen = [f"--listen={name}=127.0.0.1:0" for name in (*GATEWAYS, "http")]
        self.process = subprocess.Popen(
            [PROGRAM, "serve", "--json", "--data", str(data), *listen, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        # Nobody reads the log before the end, and a hub waits for a pipe that is full.
        fcntl.fcntl(self.process.stderr, fcntl.F_SETPIPE_SZ, 1 << 20)
        line = self.process.stdout.readline()
        if not line:
            said = self.process.communicate(timeout=30)[1].decode()
            raise AssertionError(said)
        self.ready: dict[str, Any] = json.loads(line)

    def port(self, listener: str) -> int:
        return int(self.ready["listen"][listener].rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port('http')}"

    def end(self, number: int = signal.SIGTERM) -> tuple[int, list[dict[str, Any]]]:
        """The exit code, and the log."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, [json.loads(line) for line in log.splitlines()]


StartHub = Callable[..., RunningHub]


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[StartHub]:
    """Starts hubs, all on one data directory, one after the other."""
    hubs: list[RunningHub] = []

    def start(*options: str) -> RunningHub:
        hubs.append(RunningHub(tmp_path / "data", *options))
        return hubs[-1]

    yield start
    for hub in hubs:
        if hub.process.poll() is None:
            hub.end(signal.SIGKILL)
        for stream in (hub.process.stdout, hub.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """One for all tests of a module: each uses names of its own."""
    hub = RunningHub(tmp_path_factory.mktemp("hub") / "data")
    yield hub
    assert hub.end()[0] == 0
    for stream in (hub.process.stdout, hub.process.stderr):
        assert stream is not None
        stream.close()


def crosswire(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    return subprocess.run([PROGRAM, *arguments], input=given, capture_output=True, timeout=60)


def answer(*arguments: str, given: bytes = b"") -> Any:
    """What a command with --json printed, if it succeeded."""
    done = crosswire(*arguments, "--json", given=given)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)
