"""Folders in the repository that several processes of one test run use."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["make_once"]


def make_once(folder: Path, version: str, make: Callable[[], None]) -> None:
    """Have `make` fill the folder, unless it was filled in this version before.

    Processes that ask for it at the same time wait for the first of them. If `make` raises, the
    next one that asks begins anew.
    """
    done = folder / "installed"
    # Beside the folder, which is removed meanwhile; never removed itself, or two processes could
    # hold locks on two files of this name.
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == version:
            return
        shutil.rmtree(folder, ignore_errors=True)
        make()
        done.write_text(version)
