"""Calls code that others registered, so that an exception harms only the one who registered it.

A receipt, a delivery, an answer, a watcher, a timer and a listener of commits run in the middle of
the hub's own work, one after another. If one of them raised through that loop, the rest would never
run: other peers' receipts would stay open and their messages invisible.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec

__all__ = ["Callbacks"]

_log = logging.getLogger("crosswire.hub")

P = ParamSpec("P")


class Callbacks:
    """Runs callbacks; `failed` counts by kind how many raised."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()

    def run(
        self, kind: str, callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> Exception | None:
        """Call it. Gives what it raised, which is logged and counted, or None."""
        try:
            callback(*args, **kwargs)
        except Exception as error:
            self.note(kind, error)
            return error
        return None

    def note(self, kind: str, error: Exception) -> None:
        """Log and count what was raised by a callback that was not called by `run`."""
        self.failed[kind] += 1
        _log.error("callback failed: %s", kind, exc_info=error)
