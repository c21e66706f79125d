"""Reads over many topics, in parts.

A subscription to a pattern reads the logs of all topics that it matches, in the order of ids. With
tens of thousands of them, to look at each takes longer than a turn of the event loop has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from crosswire.hub.core import Core
from crosswire.hub.dispatch import Dispatcher
from crosswire.store.contract import MergedPage, Page

__all__ = ["read_topics"]

_AT_ONCE: Final = 128
"""Topics that are looked at before others have a turn: about 5 us each."""


def read_topics(
    core: Core,
    reader: Dispatcher,
    numbers: Sequence[int],
    *,
    after: int,
    upto: int,
    count: int,
    size_bytes: int = 1 << 20,
    done: Callable[[Page], None],
    failed: Callable[[], None],
    ask_again: Callable[[], None],
) -> None:
    """Like `Store.read`; but if there are many topics, `done` is called in a later turn, and then
    the reader is touched. If that can't be read, or `done` raises, `failed` is called, and what
    was raised is logged. If too many read already, `ask_again` is called later instead, and the
    reader is touched."""
    if len(numbers) <= _AT_ONCE:
        core.store.read(
            numbers, after=after, upto=upto, count=count, size_bytes=size_bytes, done=done
        )
        return
    if not core.reads.take(reader, ask_again):
        return
    merged = core.store.merged_page(after=after, upto=upto, count=count, size_bytes=size_bytes)
    core.loop.touch(_PartialRead(core, reader, numbers, merged, done, failed))


class _PartialRead:
    """Looks at some topics each time it has its turn among all that have something to hand out."""

    def __init__(
        self,
        core: Core,
        reader: Dispatcher,
        numbers: Sequence[int],
        merged: MergedPage,
        done: Callable[[Page], None],
        failed: Callable[[], None],
    ) -> None:
        self._core = core
        self._reader = reader
        # A copy: topics come and go meanwhile, and those that come have no ids up to `upto`.
        self._numbers: Iterator[int] = iter(list(numbers))
        self._merged = merged
        self._done = done
        self._failed = failed

    def dispatch(self, now: float) -> None:  # noqa: ARG002
        """Look at the next topics; after the last, hand the page to the reader."""
        is_more = False
        try:
            for number in islice(self._numbers, _AT_ONCE):
                is_more = True
                self._merged.add(number)
            if is_more:
                self._core.loop.touch(self)
                return
            self._core.reads.release()
        except Exception:
            self._core.reads.release()
            self._failed()
            raise
        try:
            self._done(self._merged.page())
        except Exception:
            self._failed()
            raise
        self._core.loop.touch(self._reader)
