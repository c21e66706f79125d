"""What of a hub's log is to be read: asked of the hub by the driver, fetched by executors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from crosswire.access import covers
from crosswire.errors import ConnectionLost, PipelineError, RequestFailed
from crosswire.pipeline.connector.address import HubAddress
from crosswire.pipeline.connector.columns import needed, to_spark
from crosswire.pipeline.connector.options import OTHERS, Offsets, ReadOptions

__all__ = [
    "FilteredRange",
    "HubLog",
    "LogPartition",
    "LogPosition",
    "MissingRange",
    "PlanResponse",
    "fetch",
]

_log = logging.getLogger("crosswire.live")

_SHOWN_RANGES: Final = 10
_AGAIN_S: Final = 0.2


class MissingRange(msgspec.Struct, frozen=True):
    destination: str
    first: int
    last: int


class PlanResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's answer to a plan."""

    node: str
    starts: dict[str, int]
    ends: dict[str, int]
    first: int
    behind: int
    splits: list[tuple[int, int]]
    missing: list[MissingRange]
    found: bool


class LogPosition(NamedTuple):
    """A hub's node, the id behind its latest message, and destinations."""

    node: str
    end: int
    destinations: list[str]


class FilteredRange(msgspec.Struct, frozen=True, kw_only=True):
    """What filters leave of it: `topics` where only some are wanted, ids and times."""

    topics: frozenset[str] | None = None
    first: int | None = None
    behind: int | None = None
    since_us: int | None = None
    until_us: int | None = None


@dataclass
class LogPartition(InputPartition):
    """Ids first to before behind, of one node, for one task."""

    node: str
    destinations: list[str]
    starts: dict[str, int]
    ends: dict[str, int]
    first: int
    end: int


class HubLog:
    """The driver's side: plans in the hub's words, and what becomes of losses."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._regex = re.compile(options.pattern) if options.pattern else None

    def look(self, topics: frozenset[str] | None = None) -> LogPosition:
        """Where the log ends, and what is subscribed to; of these topics only, if some are given.

        A regular expression is matched here: it could keep the hub busy for ever.
        """
        query = {"names": "false" if self._regex is None else "true"}
        known = self._options.address.get("/v1/log", query)
        chosen = list(self._options.destinations)
        if self._regex is not None:
            chosen = [name for name in known["destinations"] if self._regex.fullmatch(name)]
        if topics is not None:
            chosen = [each for each in sorted(topics) if _is_among(each, chosen)]
        return LogPosition(known["node"], known["latest"] + 1, chosen)

    def plan(self, destinations: Sequence[str], **wanted: Any) -> PlanResponse:
        given = {name: value for name, value in wanted.items() if value is not None}
        body = {"destinations": destinations, **given}
        answer = self._options.address.post("/v1/log/plan", body)
        return msgspec.convert(answer, PlanResponse)

    def partitions(self, planned: PlanResponse, destinations: list[str]) -> list[LogPartition]:
        """Raises PipelineError for what is gone, unless that shall only be said."""
        self.judge(planned.missing)
        return [
            LogPartition(planned.node, destinations, planned.starts, planned.ends, first, end)
            for first, end in planned.splits
        ]

    def judge(self, missing: Sequence[MissingRange]) -> None:
        if not missing:
            return
        ranges = [
            f"{each.destination} {each.first} to {each.last}" for each in missing[:_SHOWN_RANGES]
        ]
        more = f" and {len(missing) - _SHOWN_RANGES} more" if len(missing) > _SHOWN_RANGES else ""
        self.lose(f"messages are no longer there: {', '.join(ranges)}{more}")

    def lose(self, what: str) -> None:
        """Raises PipelineError, or says it and goes on."""
        if self._options.strict:
            raise PipelineError(f"{what}; to go on without them, say failOnDataLoss=false")
        _log.warning("%s", what)

    def at_node(self, offsets: int | Offsets, node: str) -> dict[str, int]:
        """Places on this node, by destination."""
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
    """Is it one of these, covered by one, or a method of one?"""
    service = "/".join(name.split("/")[:2]) if name.startswith("service/") else name
    return any(each in (name, service) or covers(each, name) for each in chosen)


def fetch(
    address: HubAddress, part: LogPartition, columns: Sequence[str], *, strict: bool
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition. An answer that breaks off is taken up behind what came of it;
    raises ConnectionLost when nothing more comes."""
    position = part.first
    wanted: Mapping[str, Any] = {
        "node": part.node,
        "destinations": part.destinations,
        "starts": part.starts,
        "ends": part.ends,
        "behind": part.end,
        "columns": needed(columns),
        "strict": strict,
    }
    patient_until = 0.0
    while position < part.end:
        began_at = position
        for batch, last in _ask(address, {**wanted, "first": position}):
            position = last + 1
            if len(batch):
                yield to_spark(batch, columns, part.node)
        if position > began_at:
            patient_until = 0.0
        elif not patient_until:
            patient_until = time.monotonic() + address.patience_s
        elif time.monotonic() > patient_until:
            raise ConnectionLost(f"{address.url} gives nothing from {position} on")
        else:
            time.sleep(_AGAIN_S)


def _ask(address: HubAddress, body: Mapping[str, Any]) -> Iterator[tuple[pa.RecordBatch, int]]:
    try:
        for batch, metadata in address.batches("/v1/log/read", body):
            yield batch, int(metadata[b"last"])
    except RequestFailed as error:
        if error.code != "gone":
            raise
        raise PipelineError(
            f"{error.description}; to go on without them, say failOnDataLoss=false"
        ) from None
