"""Subscriptions that a client makes again on every new connection, under the same numbers.

A hub numbers the subscriptions of a connection from 1. After a reconnect the same subscription may
have another number there, so the client translates: the program keeps the number that it was given.
"""

from __future__ import annotations

import msgspec

__all__ = ["KeptSubscription", "KeptSubscriptions", "SubscriptionNumbers"]


class KeptSubscription(msgspec.Struct):
    """A subscription as it was requested, and the id of its newest message."""

    number: int
    destination: str
    name: str
    start: str
    request: bytes
    """The protocol's request, as it was sent the first time."""
    last_id: int = 0

    def start_again(self) -> str:
        """Where it starts after a reconnect.

        A queue and a named subscription have their position in the hub. An unnamed subscriber that
        started in the past would get everything again: it continues after its newest message. One
        that started with `latest` does so again, and misses what was published meanwhile.
        """
        in_hub = bool(self.name) or not self.destination.startswith("topic/")
        if in_hub or not self.last_id or self.start in ("", "latest"):
            return self.start
        return str(self.last_id + 1)


class KeptSubscriptions:
    """All subscriptions of a client that it did not end, by the program's numbers, in order."""

    def __init__(self) -> None:
        self.by_number: dict[int, KeptSubscription] = {}

    def add(
        self, number: int, request: bytes, *, destination: str, name: str, start: str
    ) -> KeptSubscription:
        """Keep one under the connection's number, or another if the program has that already."""
        if number in self.by_number:
            number = max(self.by_number) + 1
        kept = KeptSubscription(number, destination, name, start, request)
        self.by_number[number] = kept
        return kept


class SubscriptionNumbers:
    """The numbers of one connection's subscriptions, and those that the program has for them."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptSubscription] = {}
        self._on_connection: dict[int, int] = {}

    def join(self, number: int, kept: KeptSubscription) -> None:
        """The subscription has this number on this connection."""
        self._kept[number] = kept
        self._on_connection[kept.number] = number

    @property
    def differ(self) -> bool:
        """Whether any subscription has another number here than in the program."""
        return any(number != kept.number for number, kept in self._kept.items())

    def for_program(self, number: int, identifier: int) -> int:
        """The program's number for a delivery, whose id is kept as the newest."""
        kept = self._kept.get(number)
        if kept is None:
            return number
        kept.last_id = max(kept.last_id, identifier)
        return kept.number

    def for_connection(self, number: int) -> int:
        """The connection's number for one of the program's."""
        return self._on_connection.get(number, number)
