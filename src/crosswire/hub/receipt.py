"""What a producer holds until its messages are on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from crosswire.errors import HubError

__all__ = ["Receipt"]


class Receipt:
    """The fate of a batch.

    `ids` are the messages' own, 0 for those refused, whose errors stand in `refused` by place.
    `done` is set when the rest is on disk, or needs not be; `error` then tells that it could not
    be written: none of the batch was accepted. Await it, or add a callback: both come once per
    batch, on the event loop.
    """

    __slots__ = ("_callbacks", "done", "error", "ids", "refused")

    def __init__(self, ids: list[int], refused: dict[int, HubError]) -> None:
        self.ids = ids
        self.refused = refused
        self.done = False
        self.error: HubError | None = None
        self._callbacks: list[Callable[[Receipt], None]] = []

    def add_done_callback(self, callback: Callable[[Receipt], None]) -> None:
        """Called when done; at once, if it is."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def finish(self, error: HubError | None = None) -> list[Callable[[Receipt], None]]:
        """The hub's to call. Gives whom to call then, in `Hub.finish`."""
        self.done = True
        self.error = error
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __await__(self) -> Generator[Any, None, list[int]]:
        """The ids. Raises what kept the batch from the disk."""
        if not self.done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake(_receipt: Receipt) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self.add_done_callback(wake)
            yield from waiter
        if self.error is not None:
            raise self.error
        return self.ids
