"""The folder of the demo: replaced each time, but only if a demo made it."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from crosswire.cli.demo.calculator import CALCULATOR
from crosswire.cli.hub import size
from crosswire.errors import CrosswireError
from crosswire.listeners import PLAIN_LISTENERS

__all__ = ["DemoFolder", "prepare"]

_MARK = (
    "# The hub of `crosswire demo`. The next demo replaces this folder with all that is in it.\n"
)
_FREE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class DemoFolder:
    """Paths in the demo's folder, which is also the hub's data folder."""

    folder: Path

    @property
    def config(self) -> Path:
        """The hub's configuration."""
        return self.folder / "crosswire.toml"

    @property
    def log(self) -> Path:
        """Standard error of the hub, of both processes."""
        return self.folder / "hub.log"

    @property
    def tables(self) -> Path:
        """The pipeline's output."""
        return self.folder / "tables"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.folder / "report.html"


def prepare(folder: Path) -> DemoFolder:
    """Make the folder with the hub's configuration, in which all listeners are tapped.

    Raises CrosswireError if the folder is in use, not a demo's, or can't be written.
    """
    demo = DemoFolder(folder)
    try:
        if folder.exists():
            _clear_folder(demo)
        folder.mkdir(parents=True)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _FREE_BYTES:
            folder.rmdir()
            raise CrosswireError(
                f"{folder} is on a disk with {size(free_bytes)} free; "
                f"the demo needs {size(_FREE_BYTES)}"
            )
        bond = folder / CALCULATOR.name
        shutil.copyfile(CALCULATOR, bond)
        demo.config.write_text(_configuration(folder.resolve(), bond.resolve()))
    except OSError as error:
        raise CrosswireError(f"can't use {error.filename or folder}: {error.strerror}") from error
    return demo


def _clear_folder(demo: DemoFolder) -> None:
    folder = demo.folder
    if folder.is_symlink() or not folder.is_dir():
        raise CrosswireError(f"{folder} exists and is no folder: choose another with --data")
    if any(folder.iterdir()):
        made_by_us = demo.config.is_file() and demo.config.read_text().startswith(_MARK)
        if not made_by_us:
            raise CrosswireError(f"{folder} exists and no demo made it: choose another with --data")
        if _is_in_use(folder / "store" / "LOCK"):
            raise CrosswireError(f"a hub is running on {folder}: stop it first")
    shutil.rmtree(folder)


def _is_in_use(lock: Path) -> bool:
    """Whether a running hub holds the lock on its store."""
    if not lock.exists():
        return False
    with lock.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _configuration(data: Path, bond: Path) -> str:
    def quoted(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    tapped = [name for name in PLAIN_LISTENERS if name != "http"]
    return (
        f"{_MARK}data = {quoted(str(data))}\n\n"
        f"[bond]\nfiles = [{quoted(str(bond))}]\n\n"
        f"[lake.tap]\nlisteners = {quoted(tapped)}\n"
    )
