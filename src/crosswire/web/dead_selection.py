"""Which dead letters a request means: a queue, and some or all of its letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Final

import msgspec

from crosswire.errors import InvalidEnvelope, UnknownMessage
from crosswire.hub.dead import DeadLetter
from crosswire.hub.filters import Predicate
from crosswire.hub.hub import Hub
from crosswire.web.numbers import Id
from crosswire.web.property_filter import FilterText

__all__ = [
    "LISTED_IDS",
    "DeadLetterSelection",
    "MessageSelection",
    "dead_destination",
    "dead_letter_ids_back",
    "dead_letter_pages",
    "dead_queue",
    "selected_ids",
]

LISTED_IDS: Final = 100
"""How many ids of selected letters a response lists."""
_MOST_IDS: Final = 50_000
_PAGE: Final = 256
_PAGE_BYTES: Final = 512 << 10
_WIDTH: Final = 512


class MessageSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The messages to process: exactly one of `ids`, `filter` and `all`."""

    ids: Annotated[list[Id], msgspec.Meta(max_length=_MOST_IDS)] = []
    """These messages."""
    filter: FilterText = ""
    """Those whose properties pass this filter, such as `price > 10`."""
    all: bool = False
    """All that are there now."""
    dry_run: bool = False
    """Whether they are only counted and listed."""

    @property
    def selects_nothing(self) -> bool:
        """Whether none of `ids`, `filter` and `all` is given."""
        return not (self.ids or self.filter or self.all)

    def check(self) -> None:
        """Raises InvalidEnvelope if it is not exactly one of them."""
        if bool(self.ids) + bool(self.filter) + self.all != 1:
            raise InvalidEnvelope("give exactly one of ids, filter and all")


class DeadLetterSelection(MessageSelection, frozen=True, kw_only=True):
    """The dead letters to process: exactly one of `ids`, `filter` and `all`."""

    queue: str
    """The queue, or named subscription, that they come from."""


def dead_destination(name: str) -> str:
    """The destination `queue/NAME/dead`; NAME may be given with or without prefix and suffix.

    That of a named subscription is `@NAME`, with users `@OWNER.NAME`.
    """
    return f"queue/{name.removeprefix('queue/').removesuffix('/dead')}/dead"


def dead_queue(hub: Hub, name: str) -> str:
    """The destination of a queue's dead letters. Raises UnknownMessage if it never had one."""
    destination = dead_destination(name)
    if destination not in hub.store.destinations():
        raise UnknownMessage(f"{name!r} has no dead letters")
    return destination


def dead_letter_pages(hub: Hub, queue: str, *, after: int = 0) -> Iterator[Sequence[DeadLetter]]:
    """The letters after an id, a page at a time; each page is read when it is requested."""
    list_page = partial(hub.dead_letters.list, queue, count=_PAGE, most_bytes=_PAGE_BYTES)
    while page := list_page(after=after):
        after = page[-1].id
        yield page


def dead_letter_ids_back(hub: Hub, queue: str, *, before: int) -> Iterator[list[int]]:
    """Ids of the letters before an id, the newest first, a part at a time. What is between two
    letters may be many other messages: a part that has few of them makes the next one wider."""
    oldest = hub.dead_letters.list(queue, count=1)
    first, width = oldest[0].id if oldest else before, _WIDTH
    while before > first:
        begin = max(before - width, first)
        found = []
        for page in dead_letter_pages(hub, queue, after=begin - 1):
            ids = [each.id for each in page if each.id < before]
            found += ids
            if len(ids) < len(page):
                break
        yield found[::-1]
        width = width * 2 if len(found) < _PAGE else max(width // 2, _WIDTH)
        before = begin


def selected_ids(
    hub: Hub, queue: str, choice: MessageSelection, matches: Predicate | None
) -> Iterator[list[int]]:
    """Ids of the selected messages of each page, perhaps none: others have a turn between pages.

    Messages that arrive meanwhile are not selected: a replay that fails again would never end.
    """
    upto = hub.store.newest_id
    if choice.ids:
        wanted = set(choice.ids)
        matches = None
    for page in dead_letter_pages(hub, queue):
        found = [
            dead_letter.id
            for dead_letter in page
            if dead_letter.id <= upto
            and (not choice.ids or dead_letter.id in wanted)
            and (matches is None or matches(dead_letter.envelope.properties))
        ]
        yield found
        if page[-1].id > upto:
            return
