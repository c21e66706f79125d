"""Times in requests and responses: RFC 3339 in UTC, to the microsecond."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, TypeAlias

import msgspec

from crosswire.envelope import MICROSECONDS

__all__ = ["Moment", "at_s", "at_us", "is_time", "to_us"]

Moment: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with its zone, such as `2026-11-16T12:00:00.25Z`."""

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_LATEST: Final = datetime.max.replace(tzinfo=UTC)


_RFC_3339: Final = re.compile(
    r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})"
)


def is_time(text: str) -> bool:
    """Whether a text has the form of RFC 3339."""
    return _RFC_3339.fullmatch(text) is not None


def at_us(time_us: int) -> datetime:
    """A time in µs since 1970; the year 9999 for all that is later, which an expiry may be."""
    try:
        return _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return _LATEST


def at_s(time_s: float) -> datetime:
    """A time in seconds since 1970."""
    return at_us(round(time_s * MICROSECONDS))


def to_us(moment: datetime) -> int:
    """In µs since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)
