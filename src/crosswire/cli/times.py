"""Times as options of commands: a date, a time of day, or how long ago."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime, timedelta
from typing import Final

__all__ = ["AGO", "time_of"]

AGO: Final = "2026-11-15, 2026-11-15T08:00, or 90m, 12h, 7d ago"
"""What `time_of` reads, for a help text."""
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def time_of(text: str) -> datetime:
    """The time; one without a zone is in UTC. Raises ArgumentTypeError."""
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    try:
        if ago:
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: {AGO}") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
