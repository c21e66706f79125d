"""Reports to systemd, over a real datagram socket; of a hub that runs, reloads and stops, too."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosswire.server.service_manager import ServiceManager
from crosswire.testing import running_hub

WAIT_S = 30.0


class Manager:
    """systemd's side of the socket."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(WAIT_S)
        self.environment = {"NOTIFY_SOCKET": address}

    def report(self) -> dict[str, str]:
        lines = self._socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.close()


def test_reports(manager: Manager) -> None:
    hub = ServiceManager(manager.environment)
    hub.ready("running")
    assert manager.report() == {"READY": "1", "STATUS": "running"}
    hub.reloading()
    reloading = manager.report()
    assert reloading["RELOADING"] == "1" and int(reloading["MONOTONIC_USEC"]) > 0
    hub.stopping("draining")
    assert manager.report() == {"STOPPING": "1", "STATUS": "draining"}


def test_an_abstract_address() -> None:
    manager = Manager(f"@crosswire-{os.getpid()}")
    ServiceManager(manager.environment).ready("running")
    assert manager.report()["READY"] == "1"
    manager.close()


def test_a_manager_that_is_gone_harms_nobody(manager: Manager) -> None:
    manager.close()
    ServiceManager(manager.environment).ready("running")
    ServiceManager({}).ready("running")


@pytest.mark.parametrize(
    ("environment", "is_watched"),
    [
        ({"WATCHDOG_USEC": "20000"}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "never"}, False),
        ({}, False),
    ],
)
async def test_the_loop_is_watched(
    manager: Manager, environment: dict[str, str], is_watched: bool
) -> None:
    hub = ServiceManager({**manager.environment, **environment})
    hub.keep_alive(asyncio.get_running_loop())
    hub.ready("running")
    if is_watched:
        assert manager.report() == {"WATCHDOG": "1"}
    assert manager.report()["READY"] == "1"
    if is_watched:
        # Once more, after half of the interval, from the loop.
        assert await asyncio.to_thread(manager.report) == {"WATCHDOG": "1"}


@pytest.mark.slow
def test_a_hub_reports_its_life(manager: Manager) -> None:
    with running_hub(config="drain_s = 1\n", environment=manager.environment) as hub:
        assert manager.report() == {"READY": "1", "STATUS": "running with 10 listeners"}
        hub.send_signal(signal.SIGHUP)
        assert manager.report()["RELOADING"] == "1"
        assert manager.report()["READY"] == "1"
    assert manager.report()["STOPPING"] == "1"
