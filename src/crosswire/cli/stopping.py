"""SIGTERM for commands that run until they are stopped."""

from __future__ import annotations

import asyncio
import signal

__all__ = ["stop_on_sigterm"]


def stop_on_sigterm() -> asyncio.Event:
    """An event that SIGTERM sets, so that the command can unsubscribe and disconnect.

    SIGINT is asyncio's own: it cancels the command, which does the same.
    """
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop
