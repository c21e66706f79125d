"""Hubs with a planted fault, which the chaos run has to find: `python -m tests.replication.planted
FAULT serve …`.

    lost       messages are acknowledged a moment before they are in the log
    returned   settlements are confirmed, and are not in the log
    doubled    a new leader gives out ids that the last one had given out: what had them is lost
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from crosswire.cli.main import main
from crosswire.commitlog.contract import CommitGroup
from crosswire.commitlog.records import LogRecord, RecordKind
from crosswire.commitlog.replicated import EngineLog
from crosswire.store.keys import state_key
from crosswire.store.replica import ReplicaStore

_LATE_S: Final = 0.3
_CURSORS: Final = (state_key("change", b""), state_key("cursor", b""))


def plant_lost() -> None:
    append = EngineLog.append
    waiting: list[LogRecord] = []
    tasks: list[asyncio.Task[None]] = []

    async def append_waiting(log: EngineLog) -> None:
        while waiting:
            await asyncio.sleep(_LATE_S)
            for record in list(waiting):
                await append(log, record)
                waiting.remove(record)

    async def append_later(self: EngineLog, record: LogRecord) -> None:
        if record.kind is RecordKind.TAKEOVER:
            await append(self, record)
            return
        waiting.append(record)
        if not tasks or tasks[-1].done():
            tasks[:] = [asyncio.ensure_future(append_waiting(self))]

    EngineLog.append = append_later  # type: ignore[method-assign]


def plant_returned() -> None:
    seal = ReplicaStore.seal

    def seal_unsettled(self: ReplicaStore) -> CommitGroup:
        group = self.group
        group.saves = {
            key: value for key, value in group.saves.items() if not key.startswith(_CURSORS)
        }
        group.ranges = []
        return seal(self)

    ReplicaStore.seal = seal_unsettled  # type: ignore[method-assign]


def plant_doubled() -> None:
    recover = ReplicaStore._recover

    def recover_ids(self: ReplicaStore, *, is_new: bool) -> None:
        recover(self, is_new=is_new)
        self._next_id = self._reserved_id = max(self._next_id - self._id_block, 1)

    ReplicaStore._recover = recover_ids  # type: ignore[method-assign]


FAULTS: Final = {"lost": plant_lost, "returned": plant_returned, "doubled": plant_doubled}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
