"""Subscriptions that a client makes again on every new connection, under the same numbers.

A hub numbers the subscriptions of a connection from 1. After a reconnect the same subscription may
have another number there, so the client translates: the program keeps the number that it was given.
"""

from __future__ import annotations

import msgspec

__all__ = ["KeptSubscription", "KeptSubscriptions", "SubscriptionNumbers"]


class KeptSubscription(msgspec.Struct):
    """What was asked for, and the newest message that came of it."""

    number: int
    destination: str
    name: str
    start: str
    request: bytes
    """As it was sent the first time."""
    last_id: int = 0

    def start_again(self) -> str:
        """Where it goes on after a reconnect.

        A queue and a named subscription have their position in the hub. An unnamed subscriber to a
        topic that began somewhere in the past would get all of it again: it goes on after what came
        last. One that began with `latest` does so again, and misses what was published meanwhile.
        """
        in_hub = bool(self.name) or not self.destination.startswith("topic/")
        if in_hub or not self.last_id or self.start in ("", "latest"):
            return self.start
        return str(self.last_id + 1)


class KeptSubscriptions:
    """All that a client asked for and did not end, by the program's numbers, in order."""

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
        """On this connection it has this number."""
        self._kept[number] = kept
        self._on_connection[kept.number] = number

    @property
    def differ(self) -> bool:
        """Does any subscription have another number here than in the program?"""
        return any(number != kept.number for number, kept in self._kept.items())

    def for_program(self, number: int, identifier: int) -> int:
        """The program's number of a delivery, which is remembered as the newest."""
        kept = self._kept.get(number)
        if kept is None:
            return number
        kept.last_id = max(kept.last_id, identifier)
        return kept.number

    def for_connection(self, number: int) -> int:
        """The connection's number of one that the program names."""
        return self._on_connection.get(number, number)
