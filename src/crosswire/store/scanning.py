"""Skipping what can't be read in a sorted table: always forward, and in bounded time."""

from __future__ import annotations

from collections.abc import Callable

import rocksdict

__all__ = ["error_of", "first_readable"]


def error_of(iterator: rocksdict.RdictIter) -> str | None:
    """Why an iterator stopped early; None if it has not, or has reached the end."""
    if iterator.valid():
        return None
    try:
        iterator.status()
    except Exception as error:
        return str(error)
    return None


def first_readable(
    make_iterator: Callable[[], rocksdict.RdictIter], begin: bytes, end: bytes
) -> bytes:
    """The first key after `begin`, at most `end`, from which reading works again.

    A seek into a damaged block fails, one after it does not. The distance from `begin` is doubled
    until a seek succeeds, then halved: what is readable between two damaged blocks is skipped only
    where it is smaller than the first of them. Takes two seeks for each bit of a key.
    """
    shared = _shared(begin, end)
    width = max(len(begin), len(end)) - shared + 1
    prefix = begin[:shared]

    def key_at(position: int) -> bytes:
        return prefix + position.to_bytes(width)

    def is_readable(position: int) -> bool:
        # Not one for all: after a seek that failed, others fail that would not.
        iterator = make_iterator()
        iterator.seek(key_at(position))
        return error_of(iterator) is None

    start = int.from_bytes(begin[shared:].ljust(width, b"\x00"))
    limit = int.from_bytes(end[shared:].ljust(width, b"\x00"))
    step = 1
    low = start + 1
    high = min(start + step, limit)
    while high < limit and not is_readable(high):
        low = high + 1
        step *= 2
        high = min(start + step, limit)
    while low < high:
        middle = (low + high) // 2
        if is_readable(middle):
            high = middle
        else:
            low = middle + 1
    # Not shortened: without its zeros the key could be one that can't be read.
    return min(key_at(low), end) if low < limit else end


def _shared(one: bytes, other: bytes) -> int:
    """How many bytes two keys have in common at their start."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
