"""Where tables are written and read: a local folder, or an object store by its URL.

Spark writes the rows. What is done here is small: list, read and delete files, and create one file
only if it is absent, which is how a run becomes visible (`manifests`). Nothing is renamed or moved:
object stores can't, and where a rename copies, it is neither quick nor atomic.

Paths are relative to the root of the store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyarrow import fs

from crosswire.errors import InvalidInput, PipelineError

__all__ = [
    "ArrowStore",
    "LocalStore",
    "Settings",
    "StoreEntry",
    "TableStore",
    "is_local",
    "local_path",
    "open_store",
]

_LOCK: Final = "manifests/lock"

Settings = Callable[[str], str | None]
"""Finds a setting of Spark by its name."""


def is_local(url: str) -> bool:
    """Whether it is a path or URL of the local file system."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> str:
    """The path of a URL of the local file system; anything else as it is."""
    return url.removeprefix("file://")


def open_store(root: str, settings: Settings | None = None) -> TableStore:
    """The store of a folder. Credentials of an object store are those of the environment, or those
    that Spark has for it (`spark.hadoop.fs.s3a.…`). Raises InvalidInput if it can't be opened."""
    root = root.rstrip("/")
    if is_local(root):
        return LocalStore(root)
    try:
        files, base = _object_store(root, settings or (lambda _: None))
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput(f"can't open {root}: {_in_a_line(error)}") from error
    return ArrowStore(root, files, base)


def _object_store(root: str, settings: Settings) -> tuple[Any, str]:
    scheme, _, path = root.partition("://")
    if scheme not in ("s3", "s3a"):
        files, base = fs.FileSystem.from_uri(root)
        return files, base
    found = {
        "access_key": settings("spark.hadoop.fs.s3a.access.key"),
        "secret_key": settings("spark.hadoop.fs.s3a.secret.key"),
        "session_token": settings("spark.hadoop.fs.s3a.session.token"),
        "region": settings("spark.hadoop.fs.s3a.endpoint.region"),
    }
    endpoint = settings("spark.hadoop.fs.s3a.endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint:
        secured = settings("spark.hadoop.fs.s3a.connection.ssl.enabled") != "false"
        protocol, _, address = endpoint.rpartition("://")
        found |= {
            "scheme": protocol or ("https" if secured else "http"),
            "endpoint_override": address,
        }
    if not any(found.values()):
        # With what its query has (`?endpoint_override=…`), and the region of the bucket.
        files, base = fs.FileSystem.from_uri(f"s3://{path}")
        return files, base
    return fs.S3FileSystem(**{name: value for name, value in found.items() if value}), path


class StoreEntry(NamedTuple):
    """A file or folder in a folder of a store."""

    name: str
    is_folder: bool
    size_bytes: int


class TableStore(ABC):
    """Small files below `root`, which is a path or a URL as Spark takes it."""

    def __init__(self, root: str) -> None:
        self.root = root

    def url(self, path: str) -> str:
        """The path as Spark takes it."""
        return f"{self.root}/{path}"

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """The contents of a small file; None if there is none."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write a file, durably; False if there is one already, which then stays as it is.

        Only inside `exclusive`: not every store can do it at once.
        """

    @abstractmethod
    def entries(self, folder: str) -> list[StoreEntry]:
        """What is in a folder, sorted by name; nothing if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""
        return [each.name for each in self.entries(folder)]

    @abstractmethod
    def row_files(self, folder: str) -> list[tuple[str, int]]:
        """Paths and sizes of the Parquet files below a folder, sorted; none if it does not exist.

        What begins with `_` or `.` is left out, as Spark does.
        """

    @abstractmethod
    def size(self, path: str) -> int:
        """The size of a file in bytes."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its contents, if it exists."""

    @abstractmethod
    @contextmanager
    def exclusive(self, writer: str) -> Iterator[None]:
        """Let no other writer create a file meanwhile. Raises PipelineError with its name if it
        takes too long."""

    @abstractmethod
    def claim(self, folder: str) -> Callable[[], None]:
        """Mark a folder as being written, until the function is called that this returns."""

    @abstractmethod
    def is_claimed(self, folder: str) -> bool:
        """Whether somebody may still be writing there."""

    @abstractmethod
    def arrow(self) -> tuple[Any, str]:
        """The file system of Arrow, and the path of the root in it."""


class LocalStore(TableStore):
    """A local folder: files are created with O_EXCL, and locks end with their process."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._root = Path(local_path(root))

    def read(self, path: str) -> bytes | None:
        """The contents of a small file; None if there is none."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes) -> bool:
        """Write a file and sync it; False if there is one already."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def entries(self, folder: str) -> list[StoreEntry]:
        """What is in a folder, sorted by name."""
        found = []
        try:
            with os.scandir(self._root / folder) as listed:
                for each in listed:
                    with suppress(FileNotFoundError):  # removed since it was listed
                        is_folder = each.is_dir()
                        size = 0 if is_folder else each.stat().st_size
                        found.append(StoreEntry(each.name, is_folder, size))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found)

    def row_files(self, folder: str) -> list[tuple[str, int]]:
        """Paths and sizes of the Parquet files below a folder, sorted."""
        found = []
        for path, folders, names in os.walk(self._root / folder):
            folders[:] = [name for name in folders if not name.startswith((".", "_"))]
            for name in names:
                if name.endswith(".parquet") and not name.startswith((".", "_")):
                    file = Path(path, name)
                    found.append((str(file.relative_to(self._root)), file.stat().st_size))
        return sorted(found)

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        return (self._root / path).stat().st_size

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its contents. The JVM of a run that was killed may still
        write there: what it leaves is deleted by the next run."""
        target = self._root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)

    @contextmanager
    def exclusive(self, writer: str) -> Iterator[None]:
        """Wait for a lock, which is held for moments only, and ends with its process."""
        del writer
        (self._root / _LOCK).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def claim(self, folder: str) -> Callable[[], None]:
        """A lock beside the folder, which ends with the process."""
        claim = self._root / f"{folder}.writer"
        claim.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

        def release() -> None:
            claim.unlink(missing_ok=True)
            os.close(handle)

        return release

    def is_claimed(self, folder: str) -> bool:
        """Whether the process that writes there is alive."""
        try:
            handle = os.open(self._root / f"{folder}.writer", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def arrow(self) -> tuple[Any, str]:
        """The local file system, and the path of the root."""
        return fs.LocalFileSystem(), str(self._root)


_LEASE_S: Final = 30.0
"""How long a lock counts that nobody has released: far longer than what is done under it takes."""
_SETTLE_S: Final = 1.0
"""How long after writing a lock it is read again: the writes of others that had not seen it must be
visible by then."""
_PATIENCE_S: Final = 60.0
_ABANDONED_S: Final = 24 * 3600.0
"""When a folder that no manifest names counts as left by a run that was killed."""


class _Lease(msgspec.Struct):
    """The lock of a writer, until a time in seconds since 1970."""

    writer: str
    token: str
    until: float


class ArrowStore(TableStore):
    """An object store, or any other file system that Arrow can open.

    Arrow can't create a file only if it is absent. So writers take a lock with a lease first, which
    is weaker: it relies on clocks that agree within seconds, and on a store that shows a file to
    all once it is written. Files are visible whole or not at all.
    """

    def __init__(
        self,
        root: str,
        files: Any,
        base: str,
        *,
        settle_s: float = _SETTLE_S,
        lease_s: float = _LEASE_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        super().__init__(root)
        self._files = files
        self._base = base.rstrip("/")
        self._settle_s = settle_s
        self._lease_s = lease_s
        self._patience_s = patience_s

    def read(self, path: str) -> bytes | None:
        """The contents of a small file; None if there is none."""
        try:
            with self._files.open_input_stream(f"{self._base}/{path}") as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless there is one."""
        if self._files.get_file_info(f"{self._base}/{path}").type != fs.FileType.NotFound:
            return False
        self._write(path, data)
        return True

    def _write(self, path: str, data: bytes) -> None:
        folder = f"{self._base}/{path}".rpartition("/")[0]
        if self._files.type_name != "s3":  # which has no folders
            self._files.create_dir(folder)
        with self._files.open_output_stream(f"{self._base}/{path}") as file:
            file.write(data)

    def entries(self, folder: str) -> list[StoreEntry]:
        """What is in a folder, sorted by name."""
        selector = fs.FileSelector(f"{self._base}/{folder}".rstrip("/"), allow_not_found=True)
        return sorted(
            StoreEntry(each.base_name, each.type == fs.FileType.Directory, each.size or 0)
            for each in self._files.get_file_info(selector)
        )

    def row_files(self, folder: str) -> list[tuple[str, int]]:
        """Paths and sizes of the Parquet files below a folder, sorted."""
        selector = fs.FileSelector(f"{self._base}/{folder}", allow_not_found=True, recursive=True)
        found = []
        for each in self._files.get_file_info(selector):
            path = each.path.removeprefix(f"{self._base}/")
            hidden = any(
                part.startswith((".", "_")) for part in path.removeprefix(folder).split("/")
            )
            if each.type == fs.FileType.File and path.endswith(".parquet") and not hidden:
                found.append((path, each.size))
        return sorted(found)

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        return int(self._files.get_file_info(f"{self._base}/{path}").size or 0)

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its contents."""
        full = f"{self._base}/{path}"
        with suppress(FileNotFoundError):
            if self._files.get_file_info(full).type == fs.FileType.Directory:
                self._files.delete_dir(full)
            else:
                self._files.delete_file(full)

    @contextmanager
    def exclusive(self, writer: str) -> Iterator[None]:
        """Write a lock, and read it again after a moment: of several writers the last one has it,
        and the others wait for it."""
        token = os.urandom(8).hex()
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                held = self._lease()
                if held is None or held.until < time.time():
                    lease = _Lease(writer, token, time.time() + self._lease_s)
                    self._write(_LOCK, msgspec.json.encode(lease))
                    time.sleep(self._settle_s)
                    held = self._lease()
                if held is not None and held.token == token:
                    break
                problem = f"{'another run' if held is None else held.writer} holds the lock"
            except OSError as error:
                # Some stores fail to read a file that is replaced or deleted meanwhile.
                problem = f"{_in_a_line(error)}: nobody knows who holds the lock"
            if time.monotonic() > deadline:
                raise PipelineError(f"{problem} of {self.root}: try again")
            time.sleep(self._settle_s / 4)
        try:
            yield
        finally:
            held = self._lease()
            if held is not None and held.token == token:
                self.delete(_LOCK)

    def _lease(self) -> _Lease | None:
        text = self.read(_LOCK)
        try:
            return None if not text else msgspec.json.decode(text, type=_Lease)
        except msgspec.MsgspecError:
            return None

    def claim(self, folder: str) -> Callable[[], None]:
        """Nothing to do: here only the age of a folder shows that it was abandoned."""
        del folder
        return lambda: None

    def is_claimed(self, folder: str) -> bool:
        """Whether anything below the folder was written in the last day."""
        selector = fs.FileSelector(f"{self._base}/{folder}", allow_not_found=True, recursive=True)
        found = self._files.get_file_info(selector)
        newest = max((each.mtime_ns or 0 for each in found), default=0)
        return time.time() - newest / 1e9 < _ABANDONED_S

    def arrow(self) -> tuple[Any, str]:
        """The file system that it uses, and the path of the root there."""
        return self._files, self._base


def _in_a_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
