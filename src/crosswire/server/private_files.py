"""Keeps what a hub writes readable by its own user only, whatever the umask is.

Messages, tokens in recorded bytes and the ledger are in these files.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from crosswire.logs import log_event

__all__ = ["create_private_files", "make_private"]

_log = logging.getLogger("crosswire.files")

_OTHERS: Final = 0o077
"""All rights of group and others."""
_OWN: Final = re.compile(r"store|lake|checkpoints|damaged-.*|\.store-(check|repaired)|\.restoring")
"""What a hub makes in its data directory: whatever else is there belongs to somebody else."""
_LAKE: Final = re.compile(r"messages|ledger|wire|\.spool|\..*")
"""What a hub makes in a lake."""


def create_private_files() -> None:
    """From now on, what this process creates has no rights for group and others."""
    # Of the whole process: RocksDB and Arrow create files themselves, and take no mode.
    os.umask(_OTHERS)


def make_private(data: Path, lake: Path | None = None) -> None:
    """Take the rights to a hub's existing files from group and others.

    `data` is the data directory, `lake` the lake's folder if it is elsewhere. Call it when the
    store in `data` is known to be a hub's: the files of another program stay as they are. Rights
    that can't be taken away are logged: such a file belongs to another user.
    """
    data = data.resolve()
    changed = sum(_tighten_tree(entry) for entry in _entries(data, _OWN))
    changed += _tighten(data)
    if lake is not None and lake.is_dir():
        # Its own folder may be shared with others on purpose: only what the hub makes is closed.
        changed += sum(_tighten_tree(entry) for entry in _entries(lake, _LAKE))
    if changed:
        log_event(
            _log,
            logging.WARNING,
            "files were open to other users: now only the hub's user may read and write them",
            data=str(data),
            changed=changed,
        )


def _entries(folder: Path, names: re.Pattern[str]) -> Iterator[Path]:
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    # Store and lake may be links to other disks.
    yield from (each.resolve() for each in found if names.fullmatch(each.name))


def _tighten_tree(top: Path) -> int:
    """Returns how many files and folders changed.

    The folder itself comes last: one that is closed already was done to its end, and a lake with
    many files is not searched at each start.
    """
    if not _is_open(top):
        return 0
    changed = 0
    if top.is_dir():
        for folder, folders, files in os.walk(top):
            for name in (*files, *folders):
                changed += _tighten(Path(folder, name))
    return changed + _tighten(top)


def _is_open(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not stat.S_ISLNK(mode) and bool(mode & _OTHERS)


def _tighten(path: Path) -> int:
    """Returns 1 if it changed, else 0. Links inside store and lake are not followed."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) or not mode & _OTHERS:
            return 0
        if mode & stat.S_ISVTX:
            # A folder for all, such as /tmp: closing it would shut out everybody else.
            raise PermissionError(0, "it is a folder that all users share")
        path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    except FileNotFoundError:
        return 0
    except OSError as error:
        log_event(
            _log,
            logging.WARNING,
            "other users may be able to read this, and its rights can't be changed",
            path=str(path),
            reason=error.strerror,
        )
        return 0
    return 1
