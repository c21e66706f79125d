"""What became of the packets of captures: how many were read, and why the others were not.

Every packet is in exactly one class up to FRAGMENT. The counts after it are about packets that are
in a class already, or about whole files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "ACKNOWLEDGEMENT",
    "CLOCK_STEP",
    "CLOCK_STEP_NS",
    "CUT_HEADERS",
    "CUT_PAYLOAD",
    "ENCAPSULATED",
    "FRAGMENT",
    "MALFORMED",
    "NAMES",
    "NOT_IP",
    "NOT_TCP",
    "SEGMENT",
    "TRUNCATED",
    "UNREADABLE_LINK_TYPE",
    "PacketCounts",
]

SEGMENT: Final = 0
ACKNOWLEDGEMENT: Final = 1
"""A TCP segment without bytes that neither opens nor ends anything."""
UNREADABLE_LINK_TYPE: Final = 2
NOT_IP: Final = 3
NOT_TCP: Final = 4
ENCAPSULATED: Final = 5
"""In a tunnel that is not read, or in too many of them."""
CUT_HEADERS: Final = 6
"""The capture ends before TCP's header does."""
MALFORMED: Final = 7
"""Lengths or versions in its headers contradict each other."""
FRAGMENT: Final = 8
"""Of a datagram that was never complete."""
CUT_PAYLOAD: Final = 9
"""Segments of which the capture has not all bytes; the bytes are those that were cut."""
CLOCK_STEP: Final = 10
"""Packets captured more than CLOCK_STEP_NS before the one that precedes them in the file."""
TRUNCATED: Final = 11
"""Files that end, or can't be read on, in the middle; the bytes are those that were not read."""

NAMES: Final = (
    "segments",
    "acknowledgements",
    "unreadable link type",
    "not IP",
    "not TCP",
    "encapsulated",
    "cut headers",
    "malformed",
    "incomplete fragments",
    "cut payloads",
    "clock steps",
    "truncated files",
)
"""What people read in gold.accounting and in the summary, by number."""

CLOCK_STEP_NS: Final = 1_000_000_000
"""Captures on several queues or interfaces are out of order by less than that."""

_MOST_FAULTS: Final = 100


@dataclass
class PacketCounts:
    """How many packets of each kind, and how many captured bytes they had; `faults` are the reasons
    why files could not be read to their end, the first ones. `first_ns` and `last_ns` are the times
    of the first and the last packet, 0 without any."""

    packets: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    size_bytes: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    faults: list[str] = field(default_factory=list)
    first_ns: int = 0
    last_ns: int = 0

    def add(self, kind: int, size_bytes: int, packets: int = 1) -> None:
        """Count packets of one kind; `size_bytes` is the sum of theirs."""
        self.packets[kind] += packets
        self.size_bytes[kind] += size_bytes

    def move(self, source: int, target: int, packets: int, size_bytes: int) -> None:
        """Count packets as another kind than before."""
        self.add(source, -size_bytes, -packets)
        self.add(target, size_bytes, packets)

    def add_fault(self, reason: str, size_bytes: int) -> None:
        """Count a file of which the last `size_bytes` were not read."""
        self.add(TRUNCATED, size_bytes)
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(reason)

    def merge(self, other: PacketCounts) -> None:
        """Add the counts of another part of the input, which follows."""
        for kind, packets in enumerate(other.packets):
            self.add(kind, other.size_bytes[kind], packets)
        self.faults = [*self.faults, *other.faults][:_MOST_FAULTS]
        self.first_ns = self.first_ns or other.first_ns
        self.last_ns = other.last_ns or self.last_ns

    def at(self, time_ns: int) -> None:
        """Note the time of the next packet of a file."""
        if self.last_ns - time_ns > CLOCK_STEP_NS:
            self.add(CLOCK_STEP, 0)
        self.first_ns = self.first_ns or time_ns
        self.last_ns = time_ns

    def follow(self, last_ns: int) -> None:
        """Count a clock step if the packets are those of a file that follows another, whose last
        packet has this time."""
        if last_ns - self.first_ns > CLOCK_STEP_NS and self.first_ns:
            self.add(CLOCK_STEP, 0)

    def rows(self) -> list[tuple[str, int, int]]:
        """Name, packets and bytes of each kind that occurred."""
        return [
            (name, packets, size_bytes)
            for name, packets, size_bytes in zip(NAMES, self.packets, self.size_bytes, strict=True)
            if packets
        ]
