"""Captures that were written as several files, one after the other, by tcpdump or dumpcap.

Their names show the order in which they were written, whatever the clock did meanwhile:

    trace.pcap, trace.pcap1, trace.pcap2, …         tcpdump -C
    trace_00001_20261117083000.pcap, …              dumpcap -b, Wireshark

`tcpdump -W` gives names again, and numbers the first file, too: there only times show the order, as
with names that are nothing but times (`tcpdump -G`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["in_rotation", "rotations"]

_TCPDUMP: Final = re.compile(r"(.+\.(?:pcap|pcapng|cap))(\d*)(?:\.gz|\.zst)?", re.IGNORECASE)
_DUMPCAP: Final = re.compile(r"(.+)_(\d{5,})_\d{14}((?:\.\w+)*)")
_DIGITS: Final = re.compile(r"(\d+)")


def in_rotation(paths: Iterable[str]) -> list[str]:
    """Paths sorted with numbers as numbers: `trace.pcap10` follows `trace.pcap9`."""
    return sorted(paths, key=lambda path: [_number_in(part) for part in _DIGITS.split(path)])


def _number_in(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (0, part)


def rotations(paths: Sequence[str]) -> list[int]:
    """For each path, sorted as `in_rotation` does, a number that it shares with those that were
    written before and after it by the same program."""
    named: dict[tuple[str, str], list[int]] = {}
    is_first: set[tuple[str, str]] = set()
    for index, path in enumerate(paths):
        if found := _DUMPCAP.fullmatch(path):
            key = found[1], f"_{found[3]}"
            is_first.add(key)
        elif found := _TCPDUMP.fullmatch(path):
            key = found[1], ""
            if not found[2]:
                is_first.add(key)
        else:
            continue
        named.setdefault(key, []).append(index)
    numbers = list(range(len(paths)))
    for key in is_first:
        for index in named[key]:
            numbers[index] = named[key][0]
    return numbers
