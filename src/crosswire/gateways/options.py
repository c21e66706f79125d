"""Options of subscriptions and calls that all protocols have: start, window, timeout."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from crosswire.envelope import LARGEST_INTEGER, Property
from crosswire.errors import InvalidDestination, InvalidEnvelope
from crosswire.hub.subscriptions import AtId, AtTime, Start

__all__ = ["LARGEST_WINDOW", "LONGEST_LEASE_S", "check_timeout", "parse_start"]

LARGEST_WINDOW: Final = 65_535
"""The most messages that may be on their way to one consumer that names its window."""
LONGEST_LEASE_S: Final = 86_400.0
"""The longest lease that a consumer may ask for at a time."""
_ID_DIGITS: Final = 19
"""The digits of the largest id of 63 bits."""
_LONGEST_CALL_S: Final = 10 * 365 * 86_400


def parse_start(text: str) -> Start:
    """`earliest`, `latest` (the default), a message's id, or a time as ISO 8601.

    Raises InvalidDestination. An id has at most 63 bits and no message is older than 1970: anything
    else would be stored with a subscription or a link and could not be read again.
    """
    if text in ("", "latest"):
        return "latest"
    if text == "earliest":
        return "earliest"
    # The length is checked first: int() refuses thousands of digits with a ValueError of its own.
    if text.isascii() and text.isdecimal() and len(text) <= _ID_DIGITS:
        identifier = int(text)
        if identifier <= LARGEST_INTEGER:
            return AtId(identifier)
    else:
        try:
            moment = datetime.fromisoformat(text)
            time_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            time_s = -1.0
        if time_s >= 0:
            return AtTime(time_s)
    raise InvalidDestination(
        f"{text[:80]!r} is no start: use earliest, latest, an id of 63 bits or a time since 1970"
    )


def check_timeout(timeout_s: Property | None) -> float | None:
    """The timeout of a call that its property `timeout` asks for; None for the default, as for 0.

    A property that is not a number belongs to the application. Raises InvalidEnvelope for a number
    out of range.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s:
        return None
    if not 0 < timeout_s <= _LONGEST_CALL_S:
        raise InvalidEnvelope(f"a timeout is 0 to {_LONGEST_CALL_S} s, not {timeout_s}")
    return float(timeout_s)
