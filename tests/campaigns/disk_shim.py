"""The library that is preloaded into a hub, and fails writes and syncs of its store."""

from __future__ import annotations

import errno
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from tests.campaigns.runner import CampaignSkipped

__all__ = ["DiskFaults", "DiskShim"]

_SOURCE: Final = Path(__file__).with_name("shim.c")
_CONTROL_BYTES: Final = 4096


class DiskFaults(NamedTuple):
    """What the disk does wrong; per mille, in the order of the control file."""

    writes: int = 0
    write_errno: int = errno.EIO
    syncs: int = 0
    sync_errno: int = errno.EIO
    short_writes: int = 0
    sync_ms: int = 0


class DiskShim:
    """Raises CampaignSkipped without a compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise CampaignSkipped("there is no C compiler")
        library = folder / "shim.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self._control = folder / "control"
        self._control.write_bytes(bytes(_CONTROL_BYTES))
        self.environment = {"LD_PRELOAD": str(library), "SHIM_CONTROL": str(self._control)}

    def set(self, faults: DiskFaults) -> None:
        """From now on."""
        with self._control.open("r+b") as file:
            file.write(struct.pack("6i", *faults))
