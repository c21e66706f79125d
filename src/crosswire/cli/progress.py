"""Progress of long work, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["progress_lines"]


def progress_lines() -> Callable[[str], None]:
    """A function that prints a line to standard error, at most one a second."""
    shown_at = time.monotonic()

    def show(text: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= 1.0:
            shown_at = time.monotonic()
            print(text, file=sys.stderr)

    return show
