"""A store that repeats a replicated log, and so is always a prefix of it.

The log is first: nothing is written here that is not in the log already, except keys under
`!local/`, which belong to this replica alone. Each write has the position of the last record that
it applies (`!log`), so that wherever the process or the machine ends, the store continues from
there. Second copies and the mark of the log's end, which a hub without replicas needs, don't exist:
what is lost or damaged here is in the log, or with another replica.
"""

from __future__ import annotations

from abc import abstractmethod
from struct import Struct as Layout
from typing import Final

from crosswire.commitlog.body import GroupBody, RecordedBody, repeat_body
from crosswire.commitlog.contract import CommitGroup
from crosswire.commitlog.records import ORIGIN, RecordPosition
from crosswire.errors import RecordUnreadable, StoreDamaged, StoreFailed
from crosswire.store.contract import Store
from crosswire.store.copies import Copies
from crosswire.store.keys import LOCAL
from crosswire.store.recovery import check_format

__all__ = ["LOG_POSITION", "RUNNING", "ReplicaStore", "pack_position"]

LOG_POSITION: Final = b"!log"
RUNNING: Final = b"!running"
_POSITION: Final = Layout(">16sQ32s")
_SAVE_BYTES: Final = 32
"""What a saved value takes in a body beside key and value, roughly."""


class ReplicaStore(Store):
    """What a replica has of its log; an engine is the other base of each class.

    On a standby `apply` is called for every group. On a leader the hub collects groups as in any
    store, and its log calls `apply_group` when they are durable. `position` is the last record that
    was applied; `log_id` is empty until there is one.
    """

    position: RecordPosition = ORIGIN
    log_id: bytes = b""
    is_log_full: bool = False
    """Whether producers are refused because the log has grown to its limit."""
    _stored_position: RecordPosition = ORIGIN
    _saved_bytes: int = 0
    # A block must be in the log before one of its ids is seen, and messages that are not durable
    # take ids without waiting for any group.
    _id_block: int = 1 << 24

    # Opening.

    def _recover(self, *, is_new: bool) -> None:
        """Read what the log has brought here. Nothing is written, and nothing is guessed."""
        # What a power cut takes is read from the log again.
        self.was_stopped = True
        try:
            stored = self._get(LOG_POSITION)
            own = {key: self._get(key) for key in (b"!format", b"!node", b"!ids")}
        except RecordUnreadable as error:
            raise StoreDamaged(self._explain(f"its own keys can't be read: {error}")) from error
        if stored is None:
            # Ended before it had applied anything, a replica has keys of its own at most.
            if own[b"!format"] is not None or (not is_new and self._has_content()):
                raise StoreFailed(self._explain("it has no position in a log"))
            return
        if len(stored) != _POSITION.size:
            raise StoreDamaged(self._explain("its position in the log can't be read"))
        self.log_id, number, digest = _POSITION.unpack(stored)
        self.position = self._stored_position = RecordPosition(number, digest)
        if own[b"!format"] is None:
            return  # the log has nothing but records without changes yet
        check_format(own[b"!format"])
        self.node = (own[b"!node"] or b"").decode()
        self._next_id = int.from_bytes(own[b"!ids"] or b"\x01")
        nothing = Copies({}, is_there=False, is_whole=False)
        self._recover_names(nothing, {})
        self._recover_rows()
        self._recover_groups(nothing, knows_end=True)
        self._reserved_id = self._next_id

    def _has_content(self) -> bool:
        """Is there anything that replicas share?"""
        return any(
            key != RUNNING and not LOCAL[0] <= key < LOCAL[1]
            for key, _ in self._scan(b"\x00", b"\xff")
        )

    def _save_mark(self) -> None:
        """The log shows where it ends."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be read or written any more."""
        return self._closed

    def join(self, log_id: bytes) -> None:
        """An empty replica follows this log from its first record on."""
        assert self.position == ORIGIN
        self.log_id = log_id

    # What the hub collects on a leader.

    def _batch(self) -> GroupBody:
        return RecordedBody()

    @abstractmethod
    def _engine_batch(self) -> GroupBody:
        """An empty batch that the engine can write."""

    def _size_of(self, batch: GroupBody) -> int:
        assert isinstance(batch, RecordedBody)
        return batch.size_bytes

    @property
    def open_bytes(self) -> int:
        """The size of the open group: what is in its body, and what was saved for it."""
        return self._size_of(self.group.body) + self._saved_bytes

    def retain(self, number: int, identifier: int, record: bytes) -> None:
        """Counted: it is in the body only when the group is sealed."""
        super().retain(number, identifier, record)
        self._saved_bytes += len(record) + _SAVE_BYTES

    def _set(self, space: str, key: bytes, value: bytes | None) -> None:
        super()._set(space, key, value)
        self._saved_bytes += len(key) + len(value or b"") + _SAVE_BYTES

    def save_as(self, key: bytes, value: bytes) -> None:
        """Counted, as what is saved by space and key."""
        super().save_as(key, value)
        self._saved_bytes += len(key) + len(value) + _SAVE_BYTES

    def seal(self) -> CommitGroup:
        """What was saved is in the body of the group then."""
        self._saved_bytes = 0
        return super().seal()

    def _reserve(self, at_least: int) -> None:
        """In the open group, as everything: a leader's first group is durable before a peer is
        served, and later blocks are renewed when half of one is used."""
        self._reserved_id = at_least + self._id_block
        self.group.saves[b"!ids"] = self._reserved_id.to_bytes(8)

    # Applying.

    def apply_group(self, group: CommitGroup, body: bytes, position: RecordPosition) -> None:
        """Write a durable group of this leader. Raises StoreError."""
        assert isinstance(group.body, RecordedBody)
        self.apply(body, position)

    def apply(self, body: bytes | memoryview, position: RecordPosition) -> None:
        """Write a durable group, unsynced, with the position of its last record in the same write.

        Raises StoreError, and LogDamaged for a body that can't be read.
        """
        batch = self._engine_batch()
        repeat_body(body, batch)
        self._put_position(batch, position)
        self._write(batch)
        self.position = self._stored_position = position
        if not self.node:
            # The first group of a log has it.
            self.node = (self._get(b"!node") or b"").decode()

    def pass_over(self, position: RecordPosition) -> None:
        """A record that changes nothing is applied, too. It is written with the next group, or by
        `write_position`."""
        self.position = position

    def write_position(self) -> RecordPosition:
        """Write the position, if records without changes were passed over since the last group.
        When all that is written is synced, this is how far the replica is. Raises StoreError."""
        if self._stored_position != self.position:
            batch = self._engine_batch()
            self._put_position(batch, self.position)
            self._write(batch)
            self._stored_position = self.position
        return self.position

    def sync(self) -> None:
        """Bring all that is written to the disk, on any thread. Raises StoreError."""
        self._sync()

    def _put_position(self, batch: GroupBody, position: RecordPosition) -> None:
        batch.put(LOG_POSITION, pack_position(self.log_id, position))

    # What belongs to this replica alone.

    def get_local(self, name: str) -> bytes | None:
        """A value of this replica; None where there is none. Raises RecordUnreadable."""
        return self._get(LOCAL[0] + name.encode())

    def save_local(self, name: str, value: bytes) -> None:
        """Keep a value that no other replica gets. Raises StoreError."""
        batch = self._engine_batch()
        batch.put(LOCAL[0] + name.encode(), value)
        self._write(batch)

    def clear_local(self) -> None:
        """Forget what another replica left in a checkpoint. Raises StoreError."""
        batch = self._engine_batch()
        batch.delete_range(*LOCAL)
        self._write(batch)

    def has_room(self, now: float) -> bool:
        """Also without room in the log, producers have to wait."""
        return super().has_room(now) and not self.is_log_full

    # Damage.

    @property
    def fault(self) -> str:
        """Why this replica must not lead: what is damaged here; "" if nothing is."""
        if self.damages.known:
            return self.damages.known[-1].detail
        return self.damage[-1].reason if self.damage else ""

    def check_intact(self) -> None:
        """Raises StoreDamaged if anything is. What a damaged store makes the hub settle or miss
        must not get into the log, where all replicas would repeat it."""
        if self.fault:
            raise StoreDamaged(self._explain(self.fault))


def pack_position(log_id: bytes, position: RecordPosition) -> bytes:
    """The value of LOG_POSITION."""
    return _POSITION.pack(log_id, position.number, position.digest)
