"""Ranges of a hub's log: the driver has the hub plan them, executors fetch their messages.

An offset is an id on a node, and everything before it has been read. Ids are sparse: a range is cut
into tasks by the hub, which knows how many messages are where. A task that is attempted again
fetches the same ids of the same node again, so its rows are the same.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import InputPartition

from crosswire.access import covers
from crosswire.errors import ConnectionLost, PipelineError, RequestFailed
from crosswire.lake.columns import numbers
from crosswire.pipeline.connector.address import HubAddress
from crosswire.pipeline.connector.columns import needed, to_spark
from crosswire.pipeline.connector.options import OTHERS, Offsets, ReadOptions

__all__ = [
    "FilteredRange",
    "HubLog",
    "LogPartition",
    "LogPosition",
    "MessageTally",
    "MissingRange",
    "PlanResponse",
    "fetch",
]

_log = logging.getLogger("crosswire.live")

_SHOWN_RANGES: Final = 10
_NAMES: Final = 10_000
"""Names of destinations that are requested at once."""
_CONTINUE: Final = "; set failOnDataLoss=false to continue without them"
_RETRY_S: Final = 0.2
_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 65_536
_END: Final = "behind"
"""The name of a range's end in the hub's API: the id after the last one."""


class MissingRange(msgspec.Struct, frozen=True):
    """Ids of a destination that were stored once and are gone: from `first` to `last`."""

    destination: str
    first: int
    last: int


class MessageTally(msgspec.Struct, frozen=True):
    """How many messages a destination has in a range, and the bytes of their payloads."""

    messages: int
    bytes: int


class PlanResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's answer to a plan: ids from `first` to before `end`, cut into `splits`. `found` is
    false if no message of the destinations is among them; `count` is, with a limit, how many, and
    `tallies`, if asked for, how many of each destination."""

    node: str
    starts: dict[str, int]
    ends: dict[str, int]
    first: int
    end: int = msgspec.field(name=_END)
    splits: list[tuple[int, int]]
    missing: list[MissingRange]
    found: bool
    count: int
    tallies: dict[str, MessageTally]


class LogPosition(NamedTuple):
    """A hub's node, the id after its latest message, and the destinations to read."""

    node: str
    end: int
    destinations: list[str]


class FilteredRange(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that pushed-down filters leave: `topics`, ids from `first` to before `end`, times
    from `since_us` to before `until_us`; None for no restriction."""

    topics: frozenset[str] | None = None
    first: int | None = None
    end: int | None = None
    since_us: int | None = None
    until_us: int | None = None


@dataclass
class LogPartition(InputPartition):
    """Ids from `first` to before `end` of one node, for one task. `starts` and `ends` restrict
    single destinations further."""

    node: str
    destinations: list[str]
    starts: dict[str, int]
    ends: dict[str, int]
    first: int
    end: int


class HubLog:
    """The hub's log as the driver uses it: plans ranges, and reports what is missing."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._regex = re.compile(options.pattern) if options.pattern else None

    def look(self, topics: frozenset[str] | None = None) -> LogPosition:
        """The log's end and the subscribed destinations, of `topics` only if these are given.

        A regular expression is matched here, not in the hub: it may take exponential time.
        """
        known = self._options.address.get("/v1/log", {"names": "false"})
        chosen = list(self._options.destinations)
        if self._regex is not None:
            # The end is from before: destinations that are created meanwhile begin after it.
            chosen = [name for name in self._names() if self._regex.fullmatch(name)]
        if topics is not None:
            chosen = [each for each in sorted(topics) if _is_among(each, chosen)]
        return LogPosition(known["node"], known["latest"] + 1, chosen)

    def _names(self) -> Iterator[str]:
        """All destinations that the user may consume."""
        cursor = ""
        while True:
            page = self._options.address.get("/v1/log", {"limit": _NAMES, "cursor": cursor})
            yield from page["destinations"]
            cursor = page["next"]
            if not cursor:
                return

    def plan(
        self, destinations: Sequence[str], *, end: int | None = None, **wanted: Any
    ) -> PlanResponse:
        """Have the hub plan a range; `wanted` are more fields of its request. None means absent."""
        fields = {"destinations": destinations, _END: end, **wanted}
        body = {name: value for name, value in fields.items() if value is not None}
        answer = self._options.address.post("/v1/log/plan", body)
        return msgspec.convert(answer, PlanResponse)

    def partitions(self, planned: PlanResponse, destinations: list[str]) -> list[LogPartition]:
        """A partition for each split of a plan. Raises PipelineError for messages that are gone,
        unless failOnDataLoss is off."""
        self.check_missing(planned.missing)
        return [
            LogPartition(planned.node, destinations, planned.starts, planned.ends, first, end)
            for first, end in planned.splits
        ]

    def check_missing(self, missing: Sequence[MissingRange]) -> None:
        """Raises PipelineError, or logs a warning, if messages of a plan are gone."""
        if not missing:
            return
        ranges = [
            f"{each.destination} {each.first} to {each.last}" for each in missing[:_SHOWN_RANGES]
        ]
        more = f" and {len(missing) - _SHOWN_RANGES} more" if len(missing) > _SHOWN_RANGES else ""
        self.report_loss(f"messages are no longer there: {', '.join(ranges)}{more}")

    def report_loss(self, what: str) -> None:
        """Raises PipelineError for lost data; only logs it if failOnDataLoss is off."""
        if self._options.strict:
            raise PipelineError(f"{what}{_CONTINUE}")
        _log.warning("%s", what)

    def at_node(self, offsets: int | Offsets, node: str) -> dict[str, int]:
        """Offsets on this node, by destination. Raises PipelineError for offsets of another node:
        ids of two nodes have nothing to do with each other."""
        if isinstance(offsets, int):
            return {OTHERS: offsets}
        for name, positions in offsets.items():
            if node not in positions:
                others = ", ".join(sorted(positions))
                raise PipelineError(
                    f"offsets of {name} are for node {others}, but this hub is node {node}"
                )
        return {name: by_node[node] for name, by_node in offsets.items()}


def _is_among(name: str, chosen: Sequence[str]) -> bool:
    """Whether a destination is one of these, matches a wildcard among them, or is a method of a
    service among them."""
    service = "/".join(name.split("/")[:2]) if name.startswith("service/") else name
    return any(each in (name, service) or covers(each, name) for each in chosen)


def fetch(
    address: HubAddress, part: LogPartition, columns: Sequence[str], *, strict: bool
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition. If an answer breaks off, another request continues after its
    last batch, so that no row comes twice; raises ConnectionLost if requests bring nothing for
    `patience_s`."""
    wanted: Mapping[str, Any] = {
        "node": part.node,
        "destinations": part.destinations,
        "starts": part.starts,
        "ends": part.ends,
        _END: part.end,
        "columns": needed(columns),
        "strict": strict,
    }
    position, began_at = part.first, 0
    while began_at < position < part.end:
        began_at = position
        for rows, last in _sealed(address, {**wanted, "first": position}):
            position = last + 1
            if rows is not None:
                yield to_spark(rows, columns, part.node)
    # What is not in files, or not alone there, and files that are damaged: the hub reports those.
    # The metadata of each batch has the id up to which the range is complete, also for batches
    # without messages: progress is visible where nothing matches.
    gives_up_at = 0.0
    while position < part.end:
        began_at = position
        for batch, last in _request(address, {**wanted, "first": position}):
            position = last + 1
            if len(batch):
                yield to_spark(batch, columns, part.node)
        if position > began_at:
            gives_up_at = 0.0
        elif not gives_up_at:
            gives_up_at = time.monotonic() + address.patience_s
        elif time.monotonic() > gives_up_at:
            raise ConnectionLost(
                f"the hub at {address.url} answers without messages from id {position} on"
            )
        else:
            time.sleep(_RETRY_S)


def _sealed(
    address: HubAddress, body: Mapping[str, Any]
) -> Iterator[tuple[pa.RecordBatch | None, int]]:
    """What is in files of the lake, as far as these go, each batch with the id up to which the
    range is complete then; None for a batch where only that id has changed. It ends where a file
    can't be decoded."""
    with _missing_reported():
        for first, last, data in address.files("/v1/log/files", body):
            try:
                for batch in _decoded(data):
                    ids = numbers(pa.chunked_array([batch.column("id")]))
                    start, end = np.searchsorted(ids, (first, last + 1)).tolist()
                    if start < end:
                        yield batch.slice(start, end - start), int(ids[end - 1])
            except (pa.ArrowException, OSError):
                return
            yield None, last


def _decoded(data: bytearray) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        metadata = file.metadata
        size_bytes = max(metadata.row_group(0).total_byte_size, 1)
        rows = min(max(_BATCH_BYTES * metadata.num_rows // size_bytes, 1), _BATCH_ROWS)
        yield from file.iter_batches(rows)


def _request(address: HubAddress, body: Mapping[str, Any]) -> Iterator[tuple[pa.RecordBatch, int]]:
    with _missing_reported():
        for batch, metadata in address.batches("/v1/log/read", body):
            yield batch, int(metadata[b"last"])


@contextmanager
def _missing_reported() -> Iterator[None]:
    try:
        yield
    except RequestFailed as error:
        if error.code != "gone":
            raise
        raise PipelineError(f"{error.description}{_CONTINUE}") from None
