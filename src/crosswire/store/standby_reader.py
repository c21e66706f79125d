"""A store that only reads what a standby has applied, for a hub that answers questions about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from crosswire.commitlog.body import GroupBody, RecordedBody
from crosswire.errors import StoreFailed
from crosswire.store.contract import View
from crosswire.store.copies import Copies
from crosswire.store.engine import LogMark
from crosswire.store.replica import ReplicaStore

__all__ = ["StandbyReader"]


class StandbyReader(ReplicaStore):
    """Reads from a replica's store, and writes nothing: what a hub collects in groups stays there.

    Names, numbers and positions are those of the moment when it is made; messages and state are
    read from the store as it is. It is of no use any more when that store is closed.
    """

    def __init__(self, source: ReplicaStore) -> None:
        super().__init__(source.limits)
        self._source = source
        self._recover(is_new=False)
        self.damages = source.damages
        self.last_error = source.last_error

    def _get(self, key: bytes) -> bytes | None:
        return self._source._get(key)

    def _scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._source._scan(begin, end)

    def _last(self, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        return self._source._last(begin, end)

    def view(self) -> View:
        """That of the store that is read."""
        return self._source.view()

    def _free_bytes(self) -> int:
        return self._source._free_bytes()

    def _engine_batch(self) -> GroupBody:
        return RecordedBody()

    def _write(self, batch: GroupBody) -> None:  # noqa: ARG002
        raise StoreFailed("a standby's store is written by its log alone")

    def _sync(self) -> None:
        """Nothing was written."""

    def _reopen(self) -> None:
        """There is nothing to open."""

    def _release(self) -> None:
        """The files belong to the store that is read."""

    def _load_copies(self) -> Copies:
        return Copies({}, is_there=False, is_whole=False)

    def _save_copies(self, changes: Mapping[bytes, bytes | None]) -> None:
        """A replica has no second copies."""

    def _replace_copies(self, values: Mapping[bytes, bytes]) -> None:
        """A replica has no second copies."""

    def _load_mark(self) -> LogMark | None:
        return None

    def _running(self) -> bytes:
        return b""
