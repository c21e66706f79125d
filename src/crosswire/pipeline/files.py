"""Files in any file system that Spark can use, and locks on folders."""

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
    """The file system of a folder, through Hadoop's classes in the JVM.

    It writes no `.crc` files: a commit is one rename, and they would need a second one.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        # An instance of its own: Hadoop shares instances, and Spark's writers want checksums.
        self._files = jvm.org.apache.hadoop.fs.FileSystem.newInstance(
            self._path(root).toUri(), spark._jsc.hadoopConfiguration()
        )
        self._files.setWriteChecksum(False)

    def close(self) -> None:
        """Release the instance of the file system."""
        self._files.close()

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this path."""
        return bool(self._files.exists(self._path(path)))

    def make_folder(self, path: str) -> None:
        """Raises PipelineError if it can't be made."""
        if not self._files.mkdirs(self._path(path)):
            raise PipelineError(f"can't write to {path}")

    def children(self, folder: str) -> list[str]:
        """The paths in a folder; none if it does not exist."""
        path = self._path(folder)
        if not self._files.exists(path):
            return []
        return [f"{folder}/{each.getPath().getName()}" for each in self._files.listStatus(path)]

    def of_rows(self, folder: str) -> Iterator[str]:
        """Parquet files in a folder and the folders below it; none if it does not exist."""
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
        """URLs and sizes of the files that a glob pattern matches, in its own file system."""
        path = self._path(pattern)
        files = path.getFileSystem(self._spark._jsc.hadoopConfiguration())
        for state in files.globStatus(path):
            yield state.getPath().toString(), state.getLen()

    def below(self, folder: str) -> Iterator[str]:
        """URLs of the files two levels below a folder, in its own file system."""
        for name, _ in self.matching(f"{folder.rstrip('/')}/*/*"):
            # Hadoop leaves out the empty host of a local file's URL.
            yield name.replace("file:/", "file:///", 1) if name.startswith("file:/") else name

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its contents, if it exists."""
        self._files.delete(self._path(path), True)

    def move(self, source: str, target: str) -> None:
        """Rename, after creating the target's folder. Raises PipelineError if that fails."""
        self._files.mkdirs(self._path(target).getParent())
        if not self._files.rename(self._path(source), self._path(target)):
            raise PipelineError(f"can't write {target}")

    def write_text(self, path: str, text: bytes) -> None:
        """Write a file so that it appears whole or not at all: synced first, then renamed."""
        unfinished = f"{path}.part"
        out = self._files.create(self._path(unfinished), True)
        out.write(bytearray(text))
        out.hsync()
        out.close()
        self.move(unfinished, path)

    def read_text(self, path: str) -> bytes:
        """The contents of a small file."""
        source = self._files.open(self._path(path))
        text = self._jvm.org.apache.commons.io.IOUtils.toByteArray(source)
        source.close()
        return bytes(text)


def lock(folder: str) -> int | None:
    """Lock a local folder against other writers; returns a file descriptor.

    The lock ends when the descriptor is closed or the process dies, so a crash leaves no lock.
    None in other file systems, which have no locks. Raises InvalidInput if another process has it.
    """
    if "://" in folder:
        return None
    descriptor = os.open(Path(folder) / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise InvalidInput(f"another run is writing to {Path(folder).parent}") from None
    return descriptor
