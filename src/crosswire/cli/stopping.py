"""Signals for commands that run until they are stopped."""

from __future__ import annotations

import asyncio
import signal

__all__ = ["stop_on_signal"]


def stop_on_signal() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets, so that the command can unsubscribe and disconnect. A
    second signal ends the command at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return stop
