"""The demo's progress, on standard error."""

from __future__ import annotations

import shutil
import sys
import time

__all__ = ["DemoProgress"]


class DemoProgress:
    """Prints lines, and on a terminal a status line that is overwritten; `quiet` prints nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty() and not quiet
        self._start = time.monotonic()

    def restart(self) -> None:
        """Set the clock of `event` and `show` to 0."""
        self._start = time.monotonic()

    def line(self, text: str = "") -> None:
        """Print a line after all of standard output so far."""
        if self._quiet:
            return
        sys.stdout.flush()
        end = "\r\x1b[K" if self._is_terminal else ""
        print(f"{end}{text}", file=sys.stderr, flush=True)

    def event(self, text: str) -> None:
        """Print a line with the time since `restart`."""
        self.line(f"{self._clock()}  {text}")

    def show(self, text: str) -> None:
        """Replace the status line; nothing is printed if standard error is no terminal."""
        if self._is_terminal:
            line = f"{self._clock()}  {text}"
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)

    def _clock(self) -> str:
        return f"  {time.monotonic() - self._start:5.1f} s"
