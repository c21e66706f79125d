"""Hubs with a planted fault, which the chaos run has to find: `python -m tests.replication.planted
FAULT serve …`.

    lost       messages are acknowledged that are not in the log
    returned   settlements are confirmed, and are not in the log
    doubled    a new leader gives out ids that the last one had given out: what had them is lost
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Final

from crosswire.cli.main import main
from crosswire.commitlog.body import RecordedBody, read_body
from crosswire.commitlog.contract import CommitGroup
from crosswire.store.keys import state_key
from crosswire.store.replica import ReplicaStore

_PUT: Final = 1
_DELETE_RANGE: Final = 3
_CURSORS: Final = (state_key("change", b""), state_key("cursor", b""))


def plant_lost() -> None:
    encode = RecordedBody.encode
    numbers = count(1)

    # A group that is missing as a whole would be found by the next leader.
    def encode_without_some(self: RecordedBody) -> bytes:
        whole = RecordedBody()
        for kind, key, value in read_body(encode(self)):
            if kind == _PUT and key.startswith(b"m") and next(numbers) % 20 == 0:
                continue
            add = {_PUT: whole.put, _DELETE_RANGE: whole.delete_range}.get(kind)
            if add is None:
                whole.delete(key)
            else:
                add(key, value)
        return encode(whole)

    RecordedBody.encode = encode_without_some  # type: ignore[method-assign]


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
