"""What of a store can't be read or is missing, and the list of it that outlives a restart."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from crosswire.durable_files import replace_file
from crosswire.store.keys import MAX_ID

__all__ = ["Damage", "DamageEntry", "DamageFile", "DamageList"]

_MOST: Final = 1000
_EACH: Final = 32


class Damage(msgspec.Struct, frozen=True):
    """Something that can't be read or is missing.

    `part` is where: `tables` (keys in [first, end) are skipped), `log`, `copies` (one of the two
    copies of the store's own keys), `cursor`, `record`, `engine`.
    """

    first: bytes
    end: bytes
    reason: str
    part: str = "tables"

    def messages(self) -> tuple[int, int, int] | None:
        """Destination number, first and last id, where it is messages that are damaged."""
        if self.part != "tables" or self.first[:1] != b"m" or len(self.first) < 5:
            return None
        number = int.from_bytes(self.first[1:5])
        first = int.from_bytes(self.first[5:13].ljust(8, b"\x00")) + (len(self.first) > 13)
        if self.end[:5] != self.first[:5]:
            return number, first, MAX_ID
        last = int.from_bytes(self.end[5:13].ljust(8, b"\x00"))
        # A longer key sorts after the one with this id, so that this id is in the range.
        return number, first, max(last - (len(self.end) <= 13), first)


class DamageEntry(msgspec.Struct, frozen=True, rename={"end": "behind"}):
    """A damage as administrators see it, in the list's file and in the HTTP API.

    `time` is in seconds since 1970, keys are in hex.
    """

    time: float
    part: str
    detail: str
    first: str = ""
    end: str = ""

    def covers(self, other: DamageEntry) -> bool:
        """Does this one include the other? A larger range is another report."""
        if self.first or other.first:
            is_within = self.first == other.first and other.end <= self.end
            return self.part == other.part and is_within
        return (self.part, self.detail) == (other.part, other.detail)


class _StoredDamage(msgspec.Struct):
    open: list[DamageEntry] = []
    acknowledged: list[DamageEntry] = []


class DamageList:
    """Entries that nobody acknowledged yet. What was acknowledged is not listed again when it is
    found again. May be used by several threads."""

    def __init__(self, stored: _StoredDamage | None = None) -> None:
        self._stored = stored or _StoredDamage([], [])
        self._lock = Lock()

    @property
    def entries(self) -> list[DamageEntry]:
        """Those that nobody acknowledged, oldest first."""
        return list(self._stored.open)

    @property
    def known(self) -> list[DamageEntry]:
        """All of them, acknowledged or not."""
        return [*self._stored.open, *self._stored.acknowledged]

    def close(self) -> None:
        """All of it is repaired. What was not acknowledged stays listed, as repaired."""
        with self._lock:
            self._stored.open = [
                msgspec.structs.replace(each, part="repaired", first="", end="")
                for each in self._stored.open
            ]
            self._stored.acknowledged = []
            self._save(self._stored)

    def add(self, damage: Damage, detail: str) -> bool:
        """False for what is listed already."""
        entry = DamageEntry(time.time(), damage.part, detail, damage.first.hex(), damage.end.hex())
        with self._lock:
            stored = self._stored
            for known in (*stored.open, *stored.acknowledged):
                if known.covers(entry):
                    return False
            if len(stored.open) >= _MOST:
                return False
            stored.open.append(entry)
            # Saving syncs, on the event loop: with many entries, not for each of them. By then it
            # is on disk that something is damaged, and the rest is found again.
            if len(stored.open) <= _EACH or len(stored.open) % _EACH == 0:
                self._save(stored)
        return True

    def acknowledge(self) -> list[DamageEntry]:
        """Remove all entries from the list; returns them."""
        with self._lock:
            entries, self._stored.open = self._stored.open, []
            self._stored.acknowledged = [*self._stored.acknowledged, *entries][-_MOST:]
            self._save(self._stored)
        return entries

    def _save(self, stored: _StoredDamage) -> None:
        """Nothing to do for a list in memory."""


class DamageFile(DamageList):
    """A list in a file of its own: the engine's files may be what is damaged.

    `failed` is called when the file can't be written.
    """

    def __init__(self, path: Path, failed: Callable[[OSError], None]) -> None:
        self.path = path
        self._failed = failed
        super().__init__(self._load())

    def _load(self) -> _StoredDamage:
        try:
            checksum, _, body = self.path.read_bytes().partition(b"\n")
            if int(checksum, 16) != zlib.crc32(body):
                raise ValueError("the checksum is wrong")
            return msgspec.json.decode(body, type=_StoredDamage)
        except FileNotFoundError:
            return _StoredDamage([], [])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            detail = f"{self.path.name}, the list of what is damaged, can't be read: {error}"
            return _StoredDamage([DamageEntry(time.time(), "list", detail)], [])

    def _save(self, stored: _StoredDamage) -> None:
        body = msgspec.json.format(msgspec.json.encode(stored))
        try:
            replace_file(self.path, b"%08x\n" % zlib.crc32(body) + body)
        except OSError as error:
            # The entry stays in memory; after a restart the damage is found again.
            self._failed(error)
