"""Which clause of a protocol's specification a violation breaks.

Each protocol's `clauses.py` maps reasons to clauses, since a reason is what an error and a stored
row both have. A limit of ours that no specification has is a "hub limit", and what only this
implementation decides a "ruling".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Final, NamedTuple, TypeAlias

__all__ = ["HUB_LIMIT", "Clause", "ClauseTable", "clause_of", "is_a"]

HUB_LIMIT: Final = "hub limit"


class Clause(NamedTuple):
    """`title` is for people: `Relink 2.2, General packet format`. `page` is the page of this
    documentation that goes through the protocol clause by clause."""

    title: str
    page: str


ClauseTable: TypeAlias = Sequence[tuple[str, str]]
"""Expressions that match a reason from its beginning, and the clause. The first match holds."""


def is_a(limit: str) -> str:
    """The clause of a limit that the hub's configuration has."""
    return f"{HUB_LIMIT} {limit}"


def clause_of(protocol: str, reason: str, *, is_content: bool = False) -> Clause | None:
    """The clause that a violation with this reason breaks; None for a reason that no decoder and no
    connection of the protocol gives. `is_content`: a decoder gave it, so that one that is unknown
    here is about the content of a frame."""
    for pattern, title, page in _compiled(protocol):
        if pattern.match(reason):
            return Clause(title, page)
    if is_content:
        content = getattr(import_module(f"crosswire.wire.{protocol}.clauses"), "CONTENT", None)
        return None if content is None else Clause(content, f"protocols/{protocol}")
    return None


@cache
def _compiled(protocol: str) -> tuple[tuple[re.Pattern[str], str, str], ...]:
    # eMQP stands on ZMTP, so that its violations are those of both.
    names = ("emqp", "zmtp") if protocol == "emqp" else (protocol,)
    return tuple(
        (re.compile(expression), title, f"protocols/{name}")
        for name in names
        for expression, title in import_module(f"crosswire.wire.{name}.clauses").CLAUSES
    )
