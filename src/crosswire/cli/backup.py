"""Copy store and lake of a running hub into a folder, and verify the copy.

The hub goes on meanwhile. The copy has all that was acknowledged before the command was started.
It has the layout of a data directory: `crosswire restore` makes one of it, on any machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from crosswire import __version__
from crosswire.cli.hub import Api, add_hub_options, api_of, path_of, print_json, size
from crosswire.cli.parsers import add_examples
from crosswire.cli.progress import progress_lines
from crosswire.errors import ConnectFailed, CrosswireError, StoreDamaged, StoreFailed
from crosswire.plurals import plural

__all__ = ["configure", "run"]

_LOOK_S: Final = 0.2
_ATTEMPTS: Final = 5
_PAGE: Final = 1000


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("folder", metavar="DIR", help="the folder to write to; new or empty")
    parser.add_argument(
        "--no-lake", action="store_true", help="leave out the lake: it is backed up otherwise"
    )
    parser.add_argument(
        "--like",
        metavar="DIR",
        help="an earlier backup: files that it has already are linked, not fetched",
    )
    add_hub_options(parser)
    add_examples(
        parser,
        "crosswire backup /backups/2026-11-16",
        "crosswire backup /backups/2026-11-17 --like /backups/2026-11-16",
        "crosswire backup copy --hub https://hub.example:7381 --ca ca.pem --json",
    )


def run(options: argparse.Namespace) -> int:
    """Make the backup, and verify it. Raises ClientError, StoreError and LakeError."""
    from crosswire.server.backups import Backup, load_backup, save_backup, verify_backup
    from crosswire.server.private_files import create_private_files
    from crosswire.store.checkpoint import Checkpoint

    folder = Path(options.folder)
    like = None
    if options.like is not None:
        like = Path(options.like)
        load_backup(like)
    create_private_files()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CrosswireError(f"{folder} is not empty: a backup needs a folder of its own")
    except OSError as error:
        raise CrosswireError(f"can't write to {folder}: {error.strerror}") from None
    start = time.monotonic()
    api, show = api_of(options), progress_lines()
    made = _made(api, show)
    fetch = _Fetch(api, made["id"], folder, like, show)
    try:
        checkpoint = msgspec.convert({**made["store"], "files": made["files"]}, Checkpoint)
        for file in checkpoint.files:
            fetch.store_file(file.name, file.size_bytes, file.sha256)
        lake = None
        if not options.no_lake:
            lake = tuple(fetch.lake_file(**each) for each in _lake_files(api, made["id"]))
    finally:
        api.delete(path_of("v1", "checkpoints", made["id"]))
    fetch.sync()
    backup = Backup(
        crosswire=__version__,
        created=made["created"],
        store=checkpoint,
        lake=lake,
    )
    show("verifying")
    verify_backup(folder, backup, show)
    # Last of all: without it the folder is no backup.
    save_backup(folder, backup)
    _report(options, folder, backup, fetch, time.monotonic() - start)
    return 0


def _report(
    options: argparse.Namespace, folder: Path, backup: Any, fetch: _Fetch, seconds: float
) -> None:
    lake = backup.lake
    if options.json:
        print_json(
            {
                "backup": str(folder),
                "node": backup.store.node,
                "newest_id": backup.store.newest_id,
                "store_files": len(backup.store.files),
                "lake_files": None if lake is None else len(lake),
                "size_bytes": backup.size_bytes,
                "fetched_bytes": fetch.fetched_bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    files = len(backup.store.files) + len(lake or ())
    without = " without the lake" if lake is None else ""
    print(
        f"{folder}: {plural(files, 'file')}, {size(backup.size_bytes)}{without}, of which "
        f"{size(fetch.fetched_bytes)} were fetched; verified, in {seconds:.1f} s.",
        file=sys.stderr,
    )


def _made(api: Api, show: Any) -> dict[str, Any]:
    """A checkpoint that is ready. Raises ClientError, and StoreFailed if it could not be made."""
    made: dict[str, Any] = api.post("/v1/checkpoints")
    while made["state"] == "running":
        show("the hub makes a checkpoint")
        time.sleep(_LOOK_S)
        made = api.get(path_of("v1", "checkpoints", made["id"]))
    if made["state"] != "ready":
        api.delete(path_of("v1", "checkpoints", made["id"]))
        raise StoreFailed(made["error"])
    return made


def _lake_files(api: Api, identifier: str) -> Iterator[dict[str, Any]]:
    cursor = ""
    while True:
        path = path_of("v1", "checkpoints", identifier, "lake")
        page = api.get(path, cursor=cursor, limit=_PAGE)
        yield from page["files"]
        cursor = page["next"]
        if not cursor:
            return


class _Fetch:
    """Fetches files, or links those that an earlier backup has."""

    def __init__(
        self, api: Api, identifier: str, folder: Path, like: Path | None, show: Any
    ) -> None:
        self.fetched_bytes = 0
        self._api = api
        self._path = path_of("v1", "checkpoints", identifier, "files")
        self._folder = folder
        self._show = show
        self._folders: set[Path] = {folder}
        self._like = like
        self._known: dict[str, tuple[int, str]] = {}
        if like is not None:
            from crosswire.server.backups import load_backup

            earlier = load_backup(like)
            for kind, files in (("store", earlier.store.files), ("lake", earlier.lake or ())):
                for each in files:
                    self._known[f"{kind}/{each.name}"] = (each.size_bytes, each.sha256)

    def store_file(self, name: str, size_bytes: int, sha256: str) -> None:
        """Fetch a file of the store. Raises StoreDamaged if it is not what the hub has listed."""
        from crosswire.store.checkpoint import is_plain_name

        if not is_plain_name(name):
            raise StoreDamaged(f"{name!r} is no name of a store's file")
        path = f"store/{name}"
        if self._known.get(path) == (size_bytes, sha256) and self._link(path):
            return
        if self._get(path, size_bytes) != sha256:
            raise StoreDamaged(f"{name} arrived with another checksum than the hub has")

    def lake_file(self, name: str, size_bytes: int) -> Any:
        """Fetch a file of the lake; returns it with its checksum. Its pages have checksums of their
        own, which are verified later."""
        from crosswire.server.backups import is_lake_name
        from crosswire.store.checkpoint import CheckpointFile

        if not is_lake_name(name):
            raise StoreDamaged(f"{name!r} is no name of a lake's file")
        path = f"lake/{name}"
        # A name of the lake stands for its rows: a file is never written again with others.
        known_bytes, known = self._known.get(path, (-1, ""))
        if known_bytes == size_bytes and self._link(path):
            return CheckpointFile(name, size_bytes, known)
        return CheckpointFile(name, size_bytes, self._get(path, size_bytes))

    def _link(self, path: str) -> bool:
        target = self._target(path)
        try:
            os.link(self._like / path, target)  # type: ignore[operator]
        except OSError:
            # On another file system, or gone: it is fetched.
            return False
        return True

    def _target(self, path: str) -> Path:
        target = self._folder / path
        if target.parent not in self._folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(target.parent)
        return target

    def _get(self, path: str, size_bytes: int) -> str:
        """Fetch a file, and continue where a connection ended; returns its SHA-256."""
        digest, received = hashlib.sha256(), 0
        url = f"{self._path}{path_of(path)}"
        try:
            with self._target(path).open("xb") as out:
                attempts = 0
                while received < size_bytes or not attempts:
                    before, attempts = received, attempts + 1
                    try:
                        for chunk in self._api.read(f"{url}?offset={received}"):
                            digest.update(chunk)
                            out.write(chunk)
                            received += len(chunk)
                            self._show(f"fetching: {size(self.fetched_bytes + received)}")
                    except ConnectFailed:
                        # The hub limits how long a request takes: what counts is to get on.
                        if received == before and attempts >= _ATTEMPTS:
                            raise
                    if received > before:
                        attempts = 1
                    elif attempts >= _ATTEMPTS:
                        break
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise CrosswireError(f"can't write {self._folder / path}: {error.strerror}") from None
        if received != size_bytes:
            raise StoreDamaged(f"{path} has {received} bytes, the hub listed {size_bytes}")
        self.fetched_bytes += received
        return digest.hexdigest()

    def sync(self) -> None:
        """So that the names are on the disk, too."""
        from crosswire.durable_files import sync_folder

        for folder in sorted(self._folders):
            sync_folder(folder)
