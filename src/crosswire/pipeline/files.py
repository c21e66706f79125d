"""Files in any file system that Spark knows, and who may write to a folder of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput, PipelineError

__all__ = ["Files", "lock"]


class Files:
    """The file system of a folder. Writes no files of checksums beside others."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        # One of its own: others want their checksums.
        self._files = jvm.org.apache.hadoop.fs.FileSystem.newInstance(
            self._path(root).toUri(), spark._jsc.hadoopConfiguration()
        )
        self._files.setWriteChecksum(False)

    def close(self) -> None:
        self._files.close()

    def exists(self, path: str) -> bool:
        return bool(self._files.exists(self._path(path)))

    def make_folder(self, path: str) -> None:
        """Raises PipelineError if it can't be made."""
        if not self._files.mkdirs(self._path(path)):
            raise PipelineError(f"can't write to {path}")

    def children(self, folder: str) -> list[str]:
        """The paths of all that is in a folder; of none, if it is not there."""
        path = self._path(folder)
        if not self._files.exists(path):
            return []
        return [f"{folder}/{each.getPath().getName()}" for each in self._files.listStatus(path)]

    def of_rows(self, folder: str) -> Iterator[str]:
        """Files of rows below a folder."""
        path = self._path(folder)
        if not self._files.exists(path):
            return
        base = self._files.makeQualified(path).toString()
        found = self._files.listFiles(path, True)
        while found.hasNext():
            each = found.next().getPath()
            if each.getName().endswith(".parquet"):
                yield folder + each.toString().removeprefix(base)

    def matching(self, pattern: str) -> Iterator[tuple[str, int]]:
        """The URLs and sizes of files, in whatever file system the pattern is of."""
        path = self._path(pattern)
        files = path.getFileSystem(self._spark._jsc.hadoopConfiguration())
        for state in files.globStatus(path):
            yield state.getPath().toString(), state.getLen()

    def delete(self, path: str) -> None:
        """A file, or a folder with all that is in it, if it is there."""
        self._files.delete(self._path(path), True)

    def move(self, source: str, target: str) -> None:
        """One step; the folder is made. Raises PipelineError if it can't be done."""
        self._files.mkdirs(self._path(target).getParent())
        if not self._files.rename(self._path(source), self._path(target)):
            raise PipelineError(f"can't write {target}")

    def write_text(self, path: str, text: bytes) -> None:
        """It is there whole, or not at all."""
        unfinished = f"{path}.part"
        out = self._files.create(self._path(unfinished), True)
        out.write(bytearray(text))
        out.hsync()
        out.close()
        self.move(unfinished, path)

    def read_text(self, path: str) -> bytes:
        source = self._files.open(self._path(path))
        text = self._jvm.org.apache.commons.io.IOUtils.toByteArray(source)
        source.close()
        return bytes(text)


def lock(folder: str) -> int | None:
    """A lock on a folder that ends with its holder, or when the number is closed; None where there
    is none: in other file systems than the local one. Raises InvalidInput if somebody has it."""
    if "://" in folder:
        return None
    held = os.open(Path(folder) / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise InvalidInput(f"another run is writing to {Path(folder).parent}") from None
    return held
