"""Counts with their nouns, as all messages to users write them."""

from __future__ import annotations

__all__ = ["noun_for", "plural"]


def plural(count: int, one: str, more: str = "") -> str:
    """The count with separators of thousands, and its noun: "1 message", "2,000 messages".

    `more` is the plural of nouns that don't form it with an s.
    """
    return f"{count:,} {noun_for(count, one, more)}"


def noun_for(count: float, one: str, more: str = "") -> str:
    """The noun alone, for a count that is formatted in another way."""
    return one if count == 1 else more or f"{one}s"
