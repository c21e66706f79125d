"""Asks before a command deletes what can't be brought back."""

from __future__ import annotations

import argparse
import sys

from crosswire.errors import CrosswireError

__all__ = ["add_confirmation", "require_confirmation"]


def add_confirmation(parser: argparse.ArgumentParser) -> None:
    """Add `--yes`."""
    parser.add_argument("--yes", action="store_true", help="don't ask")


def require_confirmation(question: str) -> None:
    """Ask on the terminal. Raises CrosswireError unless the answer is yes; without a terminal,
    nobody can answer."""
    if not sys.stdin or not sys.stdin.isatty():
        raise CrosswireError(f"{question} Nobody is there to answer: use --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CrosswireError("nothing was changed")
