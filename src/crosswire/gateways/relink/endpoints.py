"""A link's endpoint: the text of its name, and what the link is for.

queue/Q, topic/T                                       produce, on any channel
queue/Q?consume[&filter=]                              consume, on our channel 0
topic/T?subscribe[&from=][&name=][&filter=]            consume, on our channel 0
service/S                                              call
service/S?serve                                        serve
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

import msgspec

from crosswire.access import Right, parse_subscription_dead_letters
from crosswire.envelope import Kind, parse_destination, parse_pattern
from crosswire.errors import InvalidDestination
from crosswire.gateways.options import parse_start
from crosswire.hub.subscriptions import Start, predicate

__all__ = ["Endpoint", "parse_endpoint"]

_RIGHTS: Final[dict[tuple[str, str], tuple[Right, frozenset[str]]]] = {
    ("queue", ""): ("produce", frozenset()),
    ("topic", ""): ("produce", frozenset()),
    ("service", ""): ("call", frozenset()),
    ("queue", "consume"): ("consume", frozenset({"filter"})),
    ("topic", "subscribe"): ("consume", frozenset({"filter", "from", "name"})),
    ("service", "serve"): ("serve", frozenset()),
}
"""The right that an endpoint needs, and the options that it may have, by destination and word."""

_KINDS: Final[dict[str, Kind]] = {"queue": "send", "topic": "publish", "service": "request"}


class Endpoint(msgspec.Struct, frozen=True):
    """What a link is for: its endpoint's name, parsed."""

    right: Right
    destination: str
    filter: str = ""
    name: str = ""
    start: Start = "latest"

    @property
    def kind(self) -> Kind:
        """The kind of messages that a peer sends to it."""
        return _KINDS[self.destination.partition("/")[0]]


def parse_endpoint(text: str) -> Endpoint:
    """`queue/Q`, `topic/T?subscribe&name=N`, …; values are URL-encoded.

    Raises InvalidDestination or InvalidFilter.
    """
    destination, mark, query = text.partition("?")
    word, *options = query.split("&")
    found = _RIGHTS.get((destination.partition("/")[0], word))
    if found is None or (mark and not word):
        raise InvalidDestination(f"there is no endpoint {text!r}")
    right, allowed = found
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in allowed or name in given:
            raise InvalidDestination(f"{option!r} is no option of {destination}?{word}")
        given[name] = unquote(value)
    if word == "subscribe":
        parse_pattern(destination)
    elif word != "consume" or parse_subscription_dead_letters(destination) is None:
        parse_destination(destination)
    predicate(given.get("filter", ""))
    return Endpoint(
        right,
        destination,
        given.get("filter", ""),
        given.get("name", ""),
        parse_start(given.get("from", "")),
    )
