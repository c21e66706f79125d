"""A store whose disk takes its time."""

from __future__ import annotations

import threading

from crosswire.store.memory import MemoryStore


class BusyStore(MemoryStore):
    """What is written while it `is_busy` reaches the disk when the test allows it."""

    def __init__(self) -> None:
        self.is_busy = False
        self.may_end = threading.Event()
        super().__init__()

    def _sync(self) -> None:
        assert not self.is_busy or self.may_end.wait(30)
        super()._sync()
