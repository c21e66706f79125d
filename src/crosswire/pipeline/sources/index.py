"""The packets of some flows in captures: where they lie, in columns that are sorted in memory.

Walking a capture is so much cheaper than sending it through a shuffle that every task walks all of
it and keeps what belongs to its share of the flows. By its hash a flow is in one of `BUCKETS`; a
survey counts what is in each, so that shares can be made of about the same size.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.pipeline.compiled import compiled
from crosswire.pipeline.sources.capture import Segments, Split, mapped, read_mapped

__all__ = ["BUCKETS", "Mapped", "Ordered", "Survey", "collect", "keep_small", "shares", "survey"]

BUCKETS: Final = 1024

_FIRST_FLOWS: Final = 1024
_MOST_HELD_BYTES: Final = 384 * 1024 * 1024
_STATM: Final = Path("/proc/self/statm")
_PACKET_WEIGHT: Final = 256
"""A packet costs about as much as so many bytes."""


@dataclass(frozen=True)
class Ordered:
    """Segments, and the order in which to put them together: flow by flow, each by time.

    `flows` are rows of `keys`; payloads are slices of one of `data`, told by `sources`.
    """

    order: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]
    data: Sequence[npt.NDArray[np.uint8]]
    flows: npt.NDArray[np.int32]
    forwards: npt.NDArray[np.bool_]
    times: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.uint32]
    acknowledgements: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]


class Mapped:
    """A plain file in memory."""

    def __init__(self, file: Split) -> None:
        self._file = file
        self._mapping, self._base = mapped(file)
        self.data = np.frombuffer(self._mapping, np.uint8)

    def segments(self) -> Iterator[Segments]:
        for segments in read_mapped(self._file, self.data, self._base):
            yield segments
            keep_small((self,))

    def forget(self) -> None:
        """Have nothing of it in this process: the page cache has it still."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def keep_small(files: Iterable[Mapped]) -> None:
    """Files that are looked at all over should not look as if this process needed all of it."""
    if _held_of_files() > _MOST_HELD_BYTES:
        for file in files:
            file.forget()


def _held_of_files() -> int:
    """What Linux counts as ours though it is of files; elsewhere it is not told."""
    try:
        return int(_STATM.read_bytes().split()[2]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------------------------------- shares


@dataclass(frozen=True)
class Survey:
    """`files` as far as they went when they were looked at, and what is in each bucket."""

    files: list[Split]
    packets: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]


def survey(files: Iterable[Split]) -> Survey:
    """Walk over plain files. Raises InvalidInput."""
    made = Survey(list(files), np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.int64))
    for file in made.files:
        for each in Mapped(file).segments():
            words = each.flows.view(np.uint32)
            _tally(words, each.chosen, each.payload_sizes, made.packets, made.size_bytes)
    return made


def shares(surveyed: Survey, count: int) -> npt.NDArray[np.int32]:
    """Which of `count` shares each bucket is in, so that all have about as much to do."""
    weights = surveyed.size_bytes + _PACKET_WEIGHT * surveyed.packets
    owners = np.zeros(BUCKETS, np.int32)
    loads = np.zeros(count, np.int64)
    for bucket in np.argsort(-weights, kind="stable").tolist():
        lightest = int(loads.argmin())
        owners[bucket] = lightest
        loads[lightest] += weights[bucket]
    return owners


@compiled
def _hash(words: npt.NDArray[np.uint32], row: int) -> int:
    found = np.uint64(0)
    for place in range(words.shape[1]):
        found = (found ^ np.uint64(words[row, place])) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found  # type: ignore[return-value]


@compiled
def _bucket(hashed: Any) -> int:
    return np.int64(np.uint64(hashed) >> np.uint64(54))  # type: ignore[return-value]


@compiled
def _tally(
    words: npt.NDArray[np.uint32],
    chosen: npt.NDArray[np.int64],
    payload_sizes: npt.NDArray[np.int64],
    packets: npt.NDArray[np.int64],
    size_bytes: npt.NDArray[np.int64],
) -> None:
    for index in chosen:
        bucket = _bucket(_hash(words, index))
        packets[bucket] += 1
        size_bytes[bucket] += payload_sizes[index]


# --------------------------------------------------------------------------------------- collect


class _Flows:
    """Numbers for the flows of a share, in the order in which they came."""

    def __init__(self, owners: npt.NDArray[np.int32], share: int) -> None:
        self._owners = owners
        self._share = share
        self._words = np.zeros((_FIRST_FLOWS, 9), np.uint32)
        self._slots = np.full(4 * _FIRST_FLOWS, -1, np.int32)
        self._count = 0

    @property
    def keys(self) -> npt.NDArray[np.uint8]:
        return self._words[: self._count].view(np.uint8)

    def number(
        self, flows: npt.NDArray[np.uint8], chosen: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Of each chosen row its flow's number, -1 if it is of another share."""
        words = flows.view(np.uint32)
        numbers = np.empty(len(chosen), np.int32)
        at = 0
        while True:
            at, self._count = _number(
                words,
                chosen,
                at,
                self._owners,
                self._share,
                self._slots,
                self._words,
                self._count,
                numbers,
            )
            if at == len(chosen):
                return numbers
            more = np.zeros((2 * len(self._words), 9), np.uint32)
            more[: self._count] = self._words
            self._words = more
            self._slots = np.full(4 * len(more), -1, np.int32)
            _enter_all(self._slots, self._words, self._count)


@compiled
def _number(
    words: npt.NDArray[np.uint32],
    chosen: npt.NDArray[np.int64],
    at: int,
    owners: npt.NDArray[np.int32],
    share: int,
    slots: npt.NDArray[np.int32],
    known: npt.NDArray[np.uint32],
    count: int,
    numbers: npt.NDArray[np.int32],
) -> tuple[int, int]:
    """Goes on until all are told or there is no room for a new flow."""
    mask = np.uint64(len(slots) - 1)
    while at < len(chosen):
        row = chosen[at]
        hashed = np.uint64(_hash(words, row))
        if owners[_bucket(hashed)] != share:
            numbers[at] = -1
            at += 1
            continue
        slot = hashed & mask
        while slots[slot] >= 0 and not _same(words, row, known, slots[slot]):
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] < 0:
            if count == len(known):
                break
            known[count] = words[row]
            slots[slot] = count
            count += 1
        numbers[at] = slots[slot]
        at += 1
    return at, count


@compiled
def _same(
    words: npt.NDArray[np.uint32], row: int, known: npt.NDArray[np.uint32], flow: int
) -> bool:
    for place in range(words.shape[1]):  # noqa: SIM110  numba has no all()
        if words[row, place] != known[flow, place]:
            return False
    return True


@compiled
def _enter_all(slots: npt.NDArray[np.int32], known: npt.NDArray[np.uint32], count: int) -> None:
    mask = np.uint64(len(slots) - 1)
    for flow in range(count):
        slot = np.uint64(_hash(known, flow)) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = flow


def collect(
    files: Sequence[Mapped], owners: npt.NDArray[np.int32], share: int, since_ns: int
) -> Ordered:
    """The segments of a share, of files in the order of their names. Raises InvalidInput."""
    flows = _Flows(owners, share)
    data = [file.data for file in files]
    parts: list[dict[str, Any]] = []
    in_order = True
    for source, file in enumerate(files):
        for segments in file.segments():
            chosen = segments.chosen
            if since_ns:
                chosen = chosen[segments.times[chosen] >= since_ns]
            numbers = flows.number(segments.flows, chosen)
            own = numbers >= 0
            chosen = chosen[own]
            if not len(chosen):
                continue
            where = source
            if segments.data is not file.data:
                # Put together of fragments: it comes behind the records of its batch.
                in_order, where = False, len(data)
                data.append(segments.data)
            parts.append(_columns(segments, chosen, numbers[own], source, where))
    # Column by column, so that not all of it is there twice.
    joined: dict[str, Any] = {
        name: np.concatenate([empty, *(part.pop(name) for part in parts)])
        for name, empty in _NOTHING.items()
    }
    keys = flows.keys
    files_, records = joined.pop("files"), joined.pop("records")
    if in_order:
        order = _by_flow_and_time(joined["flows"], joined["times"], len(keys))
    else:
        order = np.lexsort((records, files_, joined["times"], joined["flows"])).astype(np.int32)
    return Ordered(order=order, keys=keys, data=data, **joined)


def _columns(
    segments: Segments,
    chosen: npt.NDArray[np.int64],
    flows: npt.NDArray[np.int32],
    file: int,
    source: int,
) -> dict[str, Any]:
    return {
        "flows": flows,
        "forwards": segments.forwards[chosen],
        "times": segments.times[chosen],
        "numbers": segments.numbers[chosen].astype(np.uint32),
        "acknowledgements": segments.acknowledgements[chosen].astype(np.uint32),
        "flags": segments.flags[chosen].astype(np.uint8),
        "lengths": segments.lengths[chosen],
        "sizes": segments.payload_sizes[chosen].astype(np.int32),
        "sources": np.full(len(chosen), source, np.int32),
        "starts": segments.payload_starts[chosen],
        "files": np.full(len(chosen), file, np.int32),
        "records": segments.records[chosen],
    }


_NOTHING: Final = {
    "flows": np.zeros(0, np.int32),
    "forwards": np.zeros(0, np.bool_),
    "times": np.zeros(0, np.int64),
    "numbers": np.zeros(0, np.uint32),
    "acknowledgements": np.zeros(0, np.uint32),
    "flags": np.zeros(0, np.uint8),
    "lengths": np.zeros(0, np.int32),
    "sizes": np.zeros(0, np.int32),
    "sources": np.zeros(0, np.int32),
    "starts": np.zeros(0, np.int64),
    "files": np.zeros(0, np.int32),
    "records": np.zeros(0, np.int64),
}


def _by_flow_and_time(
    flows: npt.NDArray[np.int32], times: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int32]:
    """Nearly always they come by time, and only flows have to be taken apart."""
    bounds = np.zeros(count + 1, np.int64)
    order = np.empty(len(flows), np.int32)
    mixed = np.zeros(count, np.bool_)
    _group(flows, times, bounds, order, mixed)
    for flow in np.flatnonzero(mixed).tolist():
        own = order[bounds[flow] : bounds[flow + 1]]
        own[:] = own[np.argsort(times[own], kind="stable")]
    return order


@compiled
def _group(
    flows: npt.NDArray[np.int32],
    times: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    order: npt.NDArray[np.int32],
    mixed: npt.NDArray[np.bool_],
) -> None:
    """Flow by flow, each in the order in which it came; `mixed` says where time runs backwards."""
    for flow in flows:
        bounds[flow + 1] += 1
    for flow in range(len(mixed)):
        bounds[flow + 1] += bounds[flow]
    ends = bounds[:-1].copy()
    for index in range(len(flows)):
        flow = flows[index]
        end = ends[flow]
        order[end] = index
        if end > bounds[flow] and times[order[end - 1]] > times[index]:
            mixed[flow] = True
        ends[flow] += 1
