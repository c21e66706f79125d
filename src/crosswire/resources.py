"""What the process may use of the machine: memory, cgroups included, and open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

__all__ = ["available_memory_bytes", "memory_limit_bytes", "raise_file_limit"]

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def available_memory_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """The least of the machine's memory, the limits of the cgroups that the process is in, and the
    limit of its address space."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += _cgroup_limits(root, own)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limits)


def memory_limit_bytes(configured: int) -> int:
    """The configured limit; for 0 half of what the process may use: the other half is for code,
    caches of the store, and what the allocator does not give back."""
    return configured or available_memory_bytes() // 2


def _cgroup_limits(root: Path, own: Path) -> list[int]:
    """Of version 2 (`0::PATH`) and of version 1's memory controller (`N:memory:PATH`)."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A group has at most what its parents have. In a container the path may be the host's,
        # and only the top is mounted.
        here = top / path.lstrip("/")
        groups = [each for each in (here, *here.parents) if each.is_relative_to(top)]
        limits += [_read_limit(each / name) for each in groups]
    return [each for each in limits if each]


def _read_limit(file: Path) -> int:
    """0 for `max`, or where there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted`, or as far as the hard limit allows; gives
    the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return wanted if soft == resource.RLIM_INFINITY else soft
