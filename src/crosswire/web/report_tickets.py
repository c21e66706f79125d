"""Tickets with which a browser opens the pipeline's report once.

The report is a document of its own, which a browser opens by its address: it can't be given a token
in a header, and a token must not be in an address. So a request with the token makes a ticket, and
the address has that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import msgspec

__all__ = ["TICKET_S", "ReportTickets"]

TICKET_S: Final = 30.0
"""How long a ticket is valid: as long as a browser takes to open the page."""
_MOST: Final = 64


class _Ticket(msgspec.Struct, frozen=True):
    expires: float
    is_allowed: Callable[[], bool]


class ReportTickets:
    """Tickets that are valid once and for a short time; at most 64, the oldest is dropped."""

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}

    def issue(self, now: float, is_allowed: Callable[[], bool]) -> str:
        """A new ticket; `is_allowed` is asked again when it is used."""
        while len(self._tickets) >= _MOST:
            del self._tickets[next(iter(self._tickets))]
        name = secrets.token_urlsafe(32)
        self._tickets[name] = _Ticket(now + TICKET_S, is_allowed)
        return name

    def redeem(self, name: str, now: float) -> bool:
        """Whether the ticket is valid; it is used up then."""
        ticket = self._tickets.pop(name, None)
        return ticket is not None and now < ticket.expires and ticket.is_allowed()
