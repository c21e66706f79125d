"""The tables of an output as readers see them: those of its newest manifest, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from crosswire.errors import InvalidInput
from crosswire.pipeline.manifests import all_paths, newest_manifest
from crosswire.pipeline.stores import is_local, open_store
from crosswire.pipeline.tables.names import LAYERS

__all__ = ["VisibleTables"]


class VisibleTables:
    """The tables of the run that was committed last when this was made; `names` are those that
    exist, as `gold.traffic`, in the order of the layers.

    `root` is a folder, or a URL that Arrow can open. Raises InvalidInput if it does not exist.
    """

    def __init__(self, root: str) -> None:
        self._store = open_store(root if not is_local(root) else _absolute(root))
        manifest = newest_manifest(self._store)
        self._tables = {} if manifest is None else manifest.tables
        self.names = tuple(
            sorted(
                (name for name in self._tables if name.partition(".")[0] in LAYERS),
                key=lambda name: (LAYERS.index(name.partition(".")[0]), name),
            )
        )

    def paths(self, name: str) -> list[str]:
        """Folders and Parquet files of a table, as Spark and DuckDB take them."""
        return [self._store.url(path) for path in all_paths(self._store, self._tables[name])]

    def files(self, name: str) -> list[str]:
        """The Parquet files of a table, as Spark and DuckDB take them."""
        return [self._store.url(path) for path in self._files(name)]

    def _files(self, name: str) -> list[str]:
        found: list[str] = []
        for path in all_paths(self._store, self._tables[name]):
            if path.endswith(".parquet"):
                found.append(path)
            else:
                found += [file for file, _ in self._store.row_files(path)]
        return found

    def arrow(self) -> tuple[Any, str]:
        """The file system of Arrow, and the path of the root in it."""
        return self._store.arrow()

    def dataset(self, name: str) -> Any:
        """A table as a dataset of Arrow. Raises OSError and ArrowException."""
        files, base = self._store.arrow()
        paths = [f"{base}/{path}" for path in self._files(name)]
        return ds.dataset(paths, filesystem=files, format="parquet")

    def read(self, name: str) -> pa.Table:
        """All rows of a table. Raises InvalidInput if there is no such table."""
        if name not in self._tables:
            raise InvalidInput(f"there is no table {name} in {self._store.root}")
        return self.dataset(name).to_table()


def _absolute(root: str) -> str:
    return root if root.startswith("file://") else str(Path(root).absolute())
