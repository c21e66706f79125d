"""Limits how many large bodies of requests are in memory at a time.

What a handler makes of a body takes several times its size, until the last of it is stored. So a
request with a large one waits for a slot before its body is read.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Final

from crosswire.server.request_slots import RequestSlots

__all__ = ["LARGE_BYTES", "BodySlots"]

LARGE_BYTES: Final = 64 * 1024
_SLOTS: Final = 4
_SLOTS_EACH: Final = 1
_WAIT_S: Final = 10.0


class BodySlots:
    """A `holder` is a user or an address; "" has no share below the total."""

    def __init__(self) -> None:
        self._slots = RequestSlots(_SLOTS, _WAIT_S, "too many large bodies at a time: retry later")

    def slot(self, holder: str) -> AbstractAsyncContextManager[None]:
        """For one body. Raises ServiceUnavailable if all are taken for long."""
        return self._slots.slot(holder, _SLOTS_EACH)
