"""Lists the files of a lake's folders, `date=…/NAME.parquet`, again and again without looking at
days that can't have changed: a stream asks every second, and a lake may have many thousand files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from crosswire.pipeline.stores import Settings, TableStore, is_local, open_store

__all__ = ["LakeListing"]

_PARQUET: Final = ".parquet"
_DATED: Final = "date="
_SETTLED_S: Final = 2.0
"""A folder whose time of change is younger may change again without another time."""
_RECHECKED_S: Final = 60.0
"""How often days are listed again in stores whose folders have no time of change. The two newest
are listed each time: only retention and compaction change the others."""

Files = list[tuple[str, int]]


class LakeListing:
    """Paths and sizes of the files of lakes, in the order of dates and names; `settings` are those
    of Spark, for object stores."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._days: dict[str, tuple[float, Files]] = {}
        """By folder of a day: a time of change, or when it was listed; and its files."""
        self._stores: dict[str, TableStore] = {}

    def __call__(self, folder: str) -> Iterator[tuple[str, int]]:
        """The Parquet files of a lake's folder, or the one file given."""
        store = self._store(folder)
        if folder.endswith(_PARQUET):
            yield folder, 0 if not is_local(folder) else Path(folder).stat().st_size
            return
        days = [
            each.name
            for each in store.entries("")
            if each.is_folder and each.name.startswith(_DATED)
        ]
        for number, day in enumerate(days):
            is_recent = number >= len(days) - 2
            yield from self._day(store, folder.rstrip("/"), day, is_recent=is_recent)

    def everything(self, folder: str) -> Iterator[str]:
        """All that is in a lake's folder: files of days, and what should not be there."""
        store, folder = self._store(folder), folder.rstrip("/")
        for each in store.entries(""):
            if each.name.startswith((".", "_")):
                continue
            if each.is_folder and each.name.startswith(_DATED):
                yield from (f"{folder}/{each.name}/{name}" for name in store.names(each.name))
            else:
                yield f"{folder}/{each.name}"

    def _store(self, folder: str) -> TableStore:
        if folder not in self._stores:
            self._stores[folder] = open_store(folder, self._settings)
        return self._stores[folder]

    def _day(self, store: TableStore, folder: str, day: str, *, is_recent: bool) -> Files:
        path = f"{folder}/{day}"
        known = self._days.get(path)
        if is_local(folder):
            try:
                changed = Path(path.removeprefix("file://")).stat().st_mtime
            except FileNotFoundError:
                return []  # removed by retention since the days were listed
            if known is not None and known[0] == changed:
                return known[1]
            mark = changed if changed < time.time() - _SETTLED_S else 0.0
        else:
            mark = time.monotonic()
            if known is not None and not is_recent and mark - known[0] < _RECHECKED_S:
                return known[1]
        found = [
            (f"{path}/{each.name}", each.size_bytes)
            for each in store.entries(day)
            if each.name.endswith(_PARQUET) and not each.name.startswith((".", "_"))
        ]
        self._days[path] = mark, found
        return found
