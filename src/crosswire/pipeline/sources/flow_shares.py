"""Shares of the flows in captures: each task finds the packets of its own share.

Walking over a capture is much cheaper than sending it through a shuffle, so every task walks over
all of it and keeps the packets of its share of the flows: their positions, not their bytes, sorted
in memory. A flow's hash puts it into one of `BUCKETS`. A survey counts packets and bytes of each
bucket, so that shares of about the same size can be made of them, and so that a task can allocate
what it needs before it begins.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.capture.flows import FLOW_BYTES
from crosswire.capture.packet_counts import CLOCK_STEP_NS, PacketCounts
from crosswire.errors import InvalidInput
from crosswire.pipeline.decode.kernels import lazy_kernel
from crosswire.pipeline.sources.capture_reader import Segments, Split, read
from crosswire.pipeline.sources.packet_kernels import PACKET, Packets
from crosswire.pipeline.sources.rotation import rotations

__all__ = [
    "BUCKETS",
    "FlowShare",
    "MappedFile",
    "OrderedSegments",
    "Survey",
    "check_mapped",
    "collect",
    "survey",
]

BUCKETS: Final = 1024

_BLOCK_BYTES: Final = 1 << 20
"""Read at once: small enough to stay in the cache of a core."""
_FLOW_WORDS: Final = FLOW_BYTES // 4
_FIRST_FLOWS: Final = 1024
_MOST_MAPPED_BYTES: Final = 384 * 1024 * 1024
_STATM: Final = Path("/proc/self/statm")
_PACKET_WEIGHT: Final = 256
"""The fixed cost of a packet, in bytes that take as long."""


@dataclass(frozen=True)
class OrderedSegments:
    """Segments, and the order in which to reassemble them: flow by flow, each by time.

    A packet's `flow` is an index of `keys`; its `source` is an index of `data`, and its payload is
    a slice of that.
    """

    order: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]
    data: Sequence[npt.NDArray[np.uint8]]
    packets: Packets


class MappedFile:
    """A plain file mapped into memory, up to the end that the survey has seen. Raises InvalidInput
    if it is shorter now."""

    def __init__(self, file: Split) -> None:
        assert file.end is not None
        self._path = file.path
        try:
            with Path(file.path).open("rb") as opened:
                self._mapping = mmap.mmap(opened.fileno(), file.end, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"can't read {file.path} up to byte {file.end}: {error}") from error
        # Unmapped when the last array that refers to it is gone.
        self.data = np.frombuffer(self._mapping, np.uint8)

    def check(self) -> None:
        """Raises InvalidInput if the file was truncated: reading a mapped page after its end kills
        the process with SIGBUS."""
        if self._mapping.size() < len(self._mapping):
            raise InvalidInput(f"{self._path} was truncated while it was read")

    def release_pages(self) -> None:
        """Drop its pages from this process's memory; they stay in the page cache."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def check_mapped(files: Sequence[MappedFile]) -> None:
    """To be called now and then while mapped files are read: checks that they are still whole, and
    limits how much of them counts as this process's memory, though the page cache has it anyway.
    Raises InvalidInput."""
    for file in files:
        file.check()
    if _mapped_bytes() > _MOST_MAPPED_BYTES:
        for file in files:
            file.release_pages()


def _mapped_bytes() -> int:
    """The bytes of mapped files that Linux counts as this process's memory; 0 on other systems."""
    try:
        return int(_STATM.read_bytes().split()[2]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------------------------------- shares


@dataclass(frozen=True)
class FlowShare:
    """One of several shares of the flows: those in the buckets whose owner is its `number`."""

    number: int
    packets: int
    owners: npt.NDArray[np.int32]
    seed: np.uint64


@dataclass(frozen=True)
class Survey:
    """`files` up to the ends that they had, and the packets and bytes in each bucket;
    `joined_bytes` were joined from fragments, `counts` is what became of all packets.

    The hash has a random `seed`, so that nobody can make a capture whose flows are all in one
    bucket.
    """

    files: list[Split]
    seed: np.uint64
    packets: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]
    joined_bytes: int
    counts: PacketCounts

    def shares(self, count: int) -> list[FlowShare]:
        """The flows in `count` shares of about the same cost: the largest bucket first, each to the
        share with the least so far."""
        weights = self.size_bytes + _PACKET_WEIGHT * self.packets
        owners = np.zeros(BUCKETS, np.int32)
        loads = np.zeros(count, np.int64)
        for bucket in np.argsort(-weights, kind="stable").tolist():
            lightest = int(loads.argmin())
            owners[bucket] = lightest
            loads[lightest] += weights[bucket]
        packets = np.bincount(owners, self.packets, count).astype(np.int64).tolist()
        return [FlowShare(number, own, owners, self.seed) for number, own in enumerate(packets)]


def survey(files: Iterable[Split]) -> Survey:
    """Count what is in plain files. Raises InvalidInput."""
    found = list(files)
    seed = np.random.default_rng().integers(1 << 63, dtype=np.uint64)
    counts = np.zeros((2, BUCKETS), np.int64)
    joined_bytes, packet_counts = 0, PacketCounts()
    last_ns: dict[int, int] = {}
    for file, rotation in zip(found, rotations([file.path for file in found]), strict=True):
        own = PacketCounts()
        for segments in read(file, own, block_bytes=_BLOCK_BYTES):
            _tally(segments.flows.view(np.uint32), segments.packets, seed, counts)
            if segments.is_joined:
                joined_bytes += len(segments.data)
        own.follow(last_ns.get(rotation, 0))
        last_ns[rotation] = own.last_ns
        packet_counts.merge(own)
    packets, size_bytes = counts
    return Survey(found, seed, packets, size_bytes, joined_bytes, packet_counts)


@lazy_kernel
def _hash(words: npt.NDArray[np.uint32], row: int, seed: Any) -> int:
    # Multiplying by an odd constant (2**64 divided by the golden ratio) mixes lower bits into upper
    # ones, the shift brings them back down: both ends of the result are used.
    found = seed
    for index in range(words.shape[1]):
        found = (found ^ np.uint64(words[row, index])) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found  # type: ignore[no-any-return]


@lazy_kernel
def _bucket(hashed: Any) -> int:
    # The upper 10 bits: BUCKETS of them. The lower ones choose the slot of a flow's table.
    return np.int64(np.uint64(hashed) >> np.uint64(54))  # type: ignore[return-value]


@lazy_kernel
def _tally(
    words: npt.NDArray[np.uint32], packets: Packets, seed: Any, counts: npt.NDArray[np.int64]
) -> None:
    for row in range(len(packets)):
        bucket = _bucket(_hash(words, row, seed))
        counts[0, bucket] += 1
        counts[1, bucket] += packets[row].size


# --------------------------------------------------------------------------------------- collect


def collect(
    files: Sequence[Split], data: Sequence[MappedFile], share: FlowShare, since_ns: int
) -> OrderedSegments:
    """The segments of a share, in the order of `files`. Raises InvalidInput."""
    kept = _SharePackets(share, since_ns)
    joined = bytearray()
    for source, file in enumerate(files):
        for segments in read(file, block_bytes=_BLOCK_BYTES):
            if not segments.is_joined:
                kept.add(segments, source, segments.base)
            # Joined from fragments, so not in the file as it is: one more source, in memory.
            elif kept.add(segments, len(files), len(joined)):
                joined += segments.data.tobytes()
    keys, packets = kept.keys, kept.packets
    sources = [*(file.data for file in data), np.frombuffer(bytes(joined), np.uint8)]
    # What was joined is no file: a number of its own.
    written = np.array([*rotations([file.path for file in files]), len(files)], np.int32)
    return OrderedSegments(_by_flow_and_time(packets, len(keys), written), keys, sources, packets)


class _SharePackets:
    """The packets of a share. Its flows are numbered in the order of their first packets, by an
    open-addressing hash table: `_slots` has numbers of flows, `_words` their keys."""

    def __init__(self, share: FlowShare, since_ns: int) -> None:
        self._share = share
        self._since_ns = since_ns
        # The survey has counted them; with `since_ns` there are fewer.
        self._packets = np.empty(share.packets, PACKET)
        self._words = np.zeros((_FIRST_FLOWS, _FLOW_WORDS), np.uint32)
        self._slots = np.full(4 * _FIRST_FLOWS, -1, np.int32)
        # The number of flows and the number of packets so far.
        self._counts = np.zeros(2, np.int64)

    @property
    def keys(self) -> npt.NDArray[np.uint8]:
        return self._words[: self._counts[0]].view(np.uint8)

    @property
    def packets(self) -> Packets:
        return self._packets[: self._counts[1]]

    def add(self, segments: Segments, source: int, base: int) -> int:
        """Keep the segments of the share; gives their number. `base` is the position in the source
        where the data of these segments begins."""
        before = int(self._counts[1])
        words = segments.flows.view(np.uint32)
        at = 0
        while True:
            at = _keep(
                words,
                segments.packets,
                at,
                source,
                base,
                self._since_ns,
                self._share.seed,
                self._share.owners,
                self._share.number,
                self._slots,
                self._words,
                self._packets,
                self._counts,
            )
            if at == len(words):
                return int(self._counts[1]) - before
            if self._counts[1] == len(self._packets):
                raise InvalidInput(
                    "a capture changed while it was read: it has more packets than before"
                )
            self._make_room()

    def _make_room(self) -> None:
        count = int(self._counts[0])
        more = np.zeros((2 * count, _FLOW_WORDS), np.uint32)
        more[:count] = self._words
        self._words = more
        self._slots = np.full(4 * len(more), -1, np.int32)
        _enter_all(self._slots, self._words, count, self._share.seed)


@lazy_kernel
def _keep(
    words: npt.NDArray[np.uint32],
    packets: Packets,
    at: int,
    source: int,
    base: int,
    since_ns: int,
    seed: Any,
    owners: npt.NDArray[np.int32],
    share: int,
    slots: npt.NDArray[np.int32],
    known: npt.NDArray[np.uint32],
    kept: Packets,
    counts: npt.NDArray[np.int64],
) -> int:
    """Keep packets until the last one, or until there is no room for a flow or a packet; gives the
    index of the next one."""
    mask = np.uint64(len(slots) - 1)
    flows, count = counts
    while at < len(packets):
        packet = packets[at]
        hashed = np.uint64(_hash(words, at, seed))
        if owners[_bucket(hashed)] == share and packet.time_ns >= since_ns:
            slot = hashed & mask
            # Linear probing; the table is at most a quarter full.
            while slots[slot] >= 0 and not _same(words, at, known, slots[slot]):
                slot = (slot + np.uint64(1)) & mask
            if count == len(kept) or (slots[slot] < 0 and flows == len(known)):
                break
            if slots[slot] < 0:
                known[flows] = words[at]
                slots[slot] = flows
                flows += 1
            kept[count] = packet
            kept[count].flow = slots[slot]
            kept[count].source = source
            kept[count].start += base
            count += 1
        at += 1
    counts[0], counts[1] = flows, count
    return at


@lazy_kernel
def _same(
    words: npt.NDArray[np.uint32], row: int, known: npt.NDArray[np.uint32], flow: int
) -> bool:
    for index in range(words.shape[1]):  # noqa: SIM110  numba has no all()
        if words[row, index] != known[flow, index]:
            return False
    return True


@lazy_kernel
def _enter_all(
    slots: npt.NDArray[np.int32], known: npt.NDArray[np.uint32], count: int, seed: Any
) -> None:
    mask = np.uint64(len(slots) - 1)
    for flow in range(count):
        slot = np.uint64(_hash(known, flow, seed)) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = flow


def _by_flow_and_time(
    packets: Packets, flows: int, written: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """The order of packets by flow, then by time. Captures are nearly always in the order of time,
    so packets are only distributed to flows, and few flows have to be sorted. Sources with the same
    number in `written` are one capture."""
    bounds = np.zeros(flows + 1, np.int64)
    order = np.empty(len(packets), np.int32)
    mixed = np.zeros(flows, np.bool_)
    _group(packets, bounds, order, mixed)
    for flow in np.flatnonzero(mixed).tolist():
        own = order[bounds[flow] : bounds[flow + 1]]
        times = _steady(packets["time_ns"][own], written[packets["source"][own]])
        # Stable: segments of the same time stay in the order of files and records.
        own[:] = own[np.argsort(times, kind="stable")]
    return order


def _steady(times: npt.NDArray[np.int64], sources: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The times of a flow's packets as a clock would have them that was never set back: by more
    than CLOCK_STEP_NS a capture is not out of order by itself. Else what came after the step would
    be sorted before what came earlier, as a connection of its own."""
    steady = times.copy()
    for source in np.unique(sources).tolist():
        own = sources == source
        drops = -np.diff(times[own])
        added = np.cumsum(np.where(drops > CLOCK_STEP_NS, drops, 0))
        steady[own] += np.concatenate([[0], added])
    return steady


@lazy_kernel
def _group(
    packets: Packets,
    bounds: npt.NDArray[np.int64],
    order: npt.NDArray[np.int32],
    mixed: npt.NDArray[np.bool_],
) -> None:
    """A counting sort by flow, stable; sets `mixed` for flows in which a time decreases."""
    for index in range(len(packets)):
        bounds[packets[index].flow + 1] += 1
    for flow in range(len(mixed)):
        bounds[flow + 1] += bounds[flow]
    ends = bounds[:-1].copy()
    for index in range(len(packets)):
        packet = packets[index]
        end = ends[packet.flow]
        order[end] = index
        if end > bounds[packet.flow] and packets[order[end - 1]].time_ns > packet.time_ns:
            mixed[packet.flow] = True
        ends[packet.flow] += 1
