"""Environment variables that make the programs quick which tests start."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

__all__ = ["prepare_environment"]

_MEMORY: Final = Path("/dev/shm")
_PLENTY_BYTES: Final = 8 << 30


def prepare_environment() -> None:
    """For this process and all that it starts."""
    # Where Python is asked to write no bytecode, every program would compile all of our modules,
    # and pytest would rewrite the assertions of all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # pytest's temporary files: a hub syncs all that it acknowledges.
    if _memory_bytes() >= _PLENTY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    # For every Java: each lives for seconds, in which verifying Spark's classes and optimizing its
    # code take longer than they save.
    os.environ["JDK_JAVA_OPTIONS"] = (
        "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    )


def _memory_bytes() -> int:
    """What a file system in memory may still take; 0 if there is none."""
    if not _MEMORY.is_dir():
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, shutil.disk_usage(_MEMORY).free)
