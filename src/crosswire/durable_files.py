"""Files and folders that are there after a power cut: contents are synced, and so are names.

Who syncs a file has its content on disk, but not its name: that is in the folder, and the name of
the folder in the one above it.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["make_folder", "replace_file", "sync_folder"]


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file as a whole: after a crash it is the old one or the new one. Raises OSError."""
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it, unless they are there. Raises OSError."""
    missing = [each for each in folder.parents if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # Also if it was there: who made it may have been killed before this.
    for each in (folder, *missing):
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
