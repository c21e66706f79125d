"""Lists in pages: each response has `next`, with which the request for the next page is made.

A cursor names the last row of a page by what the list is sorted by, so that rows that appear or
vanish meanwhile neither repeat nor hide others.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from crosswire.errors import InvalidEnvelope
from crosswire.web.name_index import SortedNames
from crosswire.web.numbers import Many
from crosswire.web.turn import Turn

__all__ = [
    "ListQuery",
    "NameQuery",
    "SortKey",
    "cursor_of",
    "page_of",
    "page_of_names",
    "read_cursor",
]

T = TypeVar("T")

SortKey: TypeAlias = tuple[float, str]
"""What a list is sorted by: a number, and where that is equal a name."""

_LOOKED_AT: Final = 32
"""Rows that are looked at before it is checked whether the turn is over."""
_NAMES: Final = 250
"""Names that are looked at together, which takes less than half a millisecond."""
_SORTED: Final = 500
"""Rows that are gathered before they are sorted, at least: all at once would take long, and the
event loop waits for each sort."""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list."""

    limit: Many = 1000
    """How many rows the response has at most."""
    cursor: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """`next` of the page before; empty for the first."""


class NameQuery(ListQuery, frozen=True, kw_only=True):
    """A page of the names that contain a text."""

    contains: str = ""
    """Only names that contain this."""


def cursor_of(*key: float | str) -> str:
    """The cursor of the row with this key."""
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode().rstrip("=")


def read_cursor(text: str, kind: Any) -> Any:
    """The key in a cursor, of this type; None for an empty one. Raises InvalidEnvelope."""
    if not text:
        return None
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=kind)
    except (binascii.Error, ValueError):
        raise InvalidEnvelope(f"{text[:80]!r} is no cursor of this list") from None


async def page_of(
    rows: Iterable[T], key: Callable[[T], SortKey | None], query: ListQuery, turn: Turn
) -> tuple[list[T], str]:
    """The rows of a page in order, and the cursor of the next; "" after the last one.

    Rows whose key is None are left out. In short turns, and without keeping all rows: there may be
    a hundred thousand.
    """
    after: SortKey | None = read_cursor(query.cursor, SortKey)
    most = query.limit + 1
    found: list[tuple[SortKey, T]] = []
    chosen: list[tuple[SortKey, T]] = []
    for number, row in enumerate(rows):
        each = key(row)
        if each is not None and (after is None or each > after):
            chosen.append((each, row))
            if len(chosen) >= max(_SORTED, most):
                found = sorted(found + chosen, key=_key)[:most]
                chosen = []
        if not number % _LOOKED_AT:
            await turn.pause()
    found = sorted(found + chosen, key=_key)[:most]
    is_last = len(found) < most
    page = found[: query.limit]
    return [row for _, row in page], "" if is_last else cursor_of(*page[-1][0])


async def page_of_names(
    names: SortedNames,
    query: ListQuery,
    turn: Turn,
    *,
    prefix: str,
    keep: Callable[[list[str]], list[str]],
    values: Callable[[list[str]], Sequence[float]] | None = None,
) -> tuple[list[str], str]:
    """Like `page_of`, for names that are kept in order: many of them are looked at together.

    `prefix` is what all of them begin with, and what is not in cursors; `keep` chooses those that
    are in the list. Without `values` it is in order of names, else by value, the largest first.
    """
    after: SortKey | None = read_cursor(query.cursor, SortKey)
    most = query.limit + 1
    found: list[SortKey] = []
    least = float("-inf")
    last = ""
    if after is not None and values is None:
        last = prefix + after[1]
    while batch := names.after(last, _NAMES):
        last = batch[-1]
        kept = keep(batch)
        if values is None:
            found += [(0.0, name) for name in kept]
            if len(found) >= most:
                break
        else:
            # Most are not in the page: they are neither kept nor sorted. One that is as good as the
            # worst is after it, since names come in order.
            pairs = zip(values(kept), kept, strict=True)
            entries = [(-value, name) for value, name in pairs if value > least]
            if after is not None:
                border = (after[0], prefix + after[1])
                entries = [each for each in entries if each > border]
            found += entries
            if len(found) >= max(_SORTED, 2 * most):
                found.sort()
                del found[most:]
                least = -found[-1][0]
        await turn.pause()
    found.sort()
    page = found[: query.limit]
    is_last = len(found) < most
    cursor = "" if is_last else cursor_of(page[-1][0], page[-1][1].removeprefix(prefix))
    return [name for _, name in page], cursor


def _key(entry: tuple[SortKey, Any]) -> SortKey:
    return entry[0]
