"""The demo's progress, on standard error."""

from __future__ import annotations

import shutil
import sys
import time

__all__ = ["Ticker"]


class Ticker:
    """Lines that stay, and on a terminal one that is written over; `quiet` prints nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty() and not quiet
        self._start = time.monotonic()

    def restart(self) -> None:
        """Time counts from here."""
        self._start = time.monotonic()

    def line(self, text: str = "") -> None:
        if self._quiet:
            return
        sys.stdout.flush()
        end = "\r\x1b[K" if self._is_terminal else ""
        print(f"{end}{text}", file=sys.stderr, flush=True)

    def event(self, text: str) -> None:
        """Something happened now."""
        self.line(f"{self._clock()}  {text}")

    def show(self, text: str) -> None:
        """A status line, until something else is printed."""
        if self._is_terminal:
            line = f"{self._clock()}  {text}"
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)

    def _clock(self) -> str:
        return f"  {time.monotonic() - self._start:5.1f} s"
