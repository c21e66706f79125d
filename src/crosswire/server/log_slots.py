"""Limits how many requests read the log at a time, of all and of each user.

They share two threads. What is streamed takes one of them for a step at a time, and others are
served in between. A plan or a search takes it for seconds: of these a user has one at a time, so
that nobody keeps all threads busy.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Final

from crosswire.server.request_slots import RequestSlots

__all__ = ["LogSlots"]

_READERS: Final = 32
_STREAMS_EACH: Final = 8
_SEARCHES_EACH: Final = 1
_WAIT_S: Final = 8.0


class LogSlots:
    """A `holder` is a user or an address; "" has no share below the total."""

    def __init__(self) -> None:
        self._slots = RequestSlots(_READERS, _WAIT_S, "too many read the log at once")

    def stream(self, holder: str) -> AbstractAsyncContextManager[None]:
        """For what is read in short steps. Raises ServiceUnavailable if all are taken for long."""
        return self._slots.slot(holder, _STREAMS_EACH)

    def search(self, holder: str) -> AbstractAsyncContextManager[None]:
        """For what may take a thread for seconds. Raises ServiceUnavailable like `stream`."""
        return self._slots.slot(holder, _SEARCHES_EACH)
