"""Reports to the service manager that started the hub (systemd's notify protocol).

systemd passes the address of a datagram socket in NOTIFY_SOCKET. Each report is one datagram with
lines NAME=VALUE. Without the variable nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

__all__ = ["ServiceManager"]

_MICROSECOND_S: Final = 1e-6


class ServiceManager:
    """Where to report to; `environment` is that of the process by default."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        # A leading @ is systemd's notation of an abstract address, whose first byte is zero.
        self._address = environment.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval = environment.get("WATCHDOG_USEC", "0") if watched else "0"
        self._interval_s = int(interval) * _MICROSECOND_S if interval.isdecimal() else 0.0

    def ready(self, status: str) -> None:
        """All listeners are open, or a reload is over; `systemctl status` shows the text."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """The configuration is being read again; `ready` must follow."""
        # systemd compares it with its own clock, to distinguish this reload from an earlier one.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """It drains, or has failed."""
        self._send("STOPPING=1", f"STATUS={status}")

    def keep_alive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report from the event loop that it turns, twice in the interval that systemd asks for.

        A hub whose loop stands still for longer is killed and started again.
        """
        if self._address and self._interval_s:
            self._send("WATCHDOG=1")
            loop.call_later(self._interval_s / 2, self.keep_alive, loop)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)
            try:
                manager.connect(self._address)
                manager.send("\n".join(lines).encode())
            except OSError:
                # A manager that is gone or busy must not stop the hub. It notices what it misses:
                # its own timeouts report it.
                return
