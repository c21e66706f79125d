"""A store whose disk takes its time."""

from __future__ import annotations

import threading

from crosswire.store.memory import MemoryStore


class BusyStore(MemoryStore):
    """What is written reaches the disk when the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        super().__init__()

    def _sync(self) -> None:
        assert self._loop is None or self.may_end.wait(30)
        super()._sync()
