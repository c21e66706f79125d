"""What a backlog reads its messages from: the log of a queue, or those of a pattern's topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from crosswire.hub.dispatch import Dispatcher
from crosswire.hub.topic_reads import PageReader
from crosswire.store.contract import Store

__all__ = ["MessageLog", "QueueLog"]


class MessageLog(Protocol):
    """See `PatternLogs`, which is one that takes several turns."""

    def read(
        self,
        reader: Dispatcher,
        *,
        after: int,
        upto: int,
        count: int,
        size_bytes: int,
        done: PageReader,
        failed: Callable[[], None],
        ask_again: Callable[[], None],
    ) -> None:
        """Call `done` with the next committed records after `after`, at once or in a later turn."""

    def read_now(
        self, *, after: int, upto: int, count: int, size_bytes: int = ..., done: PageReader
    ) -> None:
        """Like `read`, at once."""

    def fetch(self, identifier: int) -> bytes | None:
        """The record of one message; None if there is none."""

    def newest_id(self) -> int:
        """No committed message has a higher id."""


class QueueLog:
    """The log of one destination."""

    __slots__ = ("_numbers", "_store")

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._numbers = (number,)

    def read(
        self,
        reader: Dispatcher,  # noqa: ARG002
        *,
        after: int,
        upto: int,
        count: int,
        size_bytes: int,
        done: PageReader,
        failed: Callable[[], None],  # noqa: ARG002
        ask_again: Callable[[], None],  # noqa: ARG002
    ) -> None:
        """Before it returns."""
        self.read_now(after=after, upto=upto, count=count, size_bytes=size_bytes, done=done)

    def read_now(
        self, *, after: int, upto: int, count: int, size_bytes: int = 1 << 20, done: PageReader
    ) -> None:
        """Like `Store.read`. What is deleted is settled."""
        self._store.read(
            self._numbers,
            after=after,
            upto=upto,
            count=count,
            size_bytes=size_bytes,
            done=lambda page: done(page, 0),
        )

    def fetch(self, identifier: int) -> bytes | None:
        """The record of one message; None if there is none."""
        return self._store.fetch(self._numbers[0], [identifier])[0]

    def newest_id(self) -> int:
        """The highest id that is stored."""
        return self._store.last_id(self._numbers[0])
