"""Whether another process uses a store, and which one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from struct import Struct as Layout
from typing import Final

from crosswire.errors import StoreFailed

__all__ = ["check_unused", "describe_holder"]

_COMMAND_CHARACTERS: Final = 120
_FLOCK: Final = Layout("hhqqi4x")
"""The system's `struct flock` on 64 bits: type, whence, start, length, process."""


def check_unused(path: Path) -> None:
    """Raises StoreFailed while another process uses the store."""
    try:
        descriptor = os.open(path / "LOCK", os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = _describe(_holder(descriptor))
        raise StoreFailed(f"{path} is in use by {holder}: stop it first") from None
    finally:
        os.close(descriptor)


def describe_holder(path: Path) -> str:
    """The process that uses the store, in words; not for a store that this process has open, whose
    lock would be gone after this."""
    try:
        descriptor = os.open(path / "LOCK", os.O_RDWR)
    except OSError:
        return "another process"
    try:
        return _describe(_holder(descriptor))
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> int:
    """The number of the process that has the lock; 0 if it is unknown, as in another container."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    except OSError:
        return 0
    kind, _, _, _, process = _FLOCK.unpack(answer)
    return 0 if kind == fcntl.F_UNLCK else max(int(process), 0)


def _describe(process: int) -> str:
    if not process:
        return "another process"
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return f"process {process}"
    words = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {process} ({words[:_COMMAND_CHARACTERS]})"
