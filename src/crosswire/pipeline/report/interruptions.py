"""When the hub was killed or restarted, and when the recording has gaps.

Connections of a hub are named `LISTENER-RUN-NUMBER`: RUN counts the starts of the hub on its data,
in hexadecimal. A run that another one followed is over, and so are its sessions, with or without an
end on the wire.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.lake.schemas import START_OF_CONNECTION
from crosswire.pipeline.report.facts import Interruption, TimeBuckets
from crosswire.pipeline.report.over_time import piece_of
from crosswire.pipeline.report.table_reader import Highest, ReportTables, Tally

__all__ = ["HubRuns", "interruptions"]

_MOST_RUNS: Final = 10_000
_MOST: Final = 50


class _HubRun(msgspec.Struct, frozen=True):
    """The starts and ends are those of what was recorded."""

    node: str
    run: str
    first_us: int
    last_us: int

    @property
    def number(self) -> int:
        return int(self.run, 16)


class HubRuns:
    """The runs of each hub, from silver.directions; none if that table does not exist."""

    def __init__(self, tables: ReportTables) -> None:
        spans = Tally(
            ("node", "run"), ("directions",), most=("last",), least=("first",), limit=_MOST_RUNS
        )
        for batch in tables.scan("silver.directions", "node", "connection", "time", "last_time"):
            rows = pa.RecordBatch.from_pydict(
                {
                    "node": batch["node"],
                    "run": _runs_of(batch["connection"]),
                    "directions": pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows),
                    "last": batch["last_time"],
                    "first": batch["time"],
                }
            )
            spans.add(rows.filter(pc.is_valid(rows["run"])))
        found = [
            _HubRun(row["node"], row["run"], row["first"], row["last"]) for row in spans.rows()
        ]
        found.sort(key=lambda each: (each.node, each.number))
        self._followed = [
            (run, following) for run, following in pairwise(found) if run.node == following.node
        ]
        self._keys = pa.array([_key(run.node, run.run) for run, _ in self._followed], pa.string())
        self._ends = pa.array([run.last_us for run, _ in self._followed], pa.int64())
        self._killed = Tally(("key",), ("sessions",), limit=_MOST_RUNS)

    def with_ends(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Sessions, with those that were open when their run ended as `killed`, at that time.

        The columns `node`, `last_connection`, `ended` and `last_time` are needed.
        """
        keys = pc.binary_join_element_wise(rows["node"], _runs_of(rows["last_connection"]), "\n")
        index = pc.index_in(keys, self._keys)
        # A table that a stream wrote may show a kill later than the wire does.
        is_open = pc.and_(pc.equal(rows["ended"], "open"), pc.is_valid(index))
        killed = pc.fill_null(pc.or_(is_open, pc.equal(rows["ended"], "killed")), False)
        if not pc.any(killed).as_py():
            return rows
        # Of a start that only the ledger shows to be over, there is no such time.
        ends = pc.max_element_wise(self._ends.take(index), rows["last_time"], skip_nulls=True)
        self._killed.add(
            pa.RecordBatch.from_pydict({"key": keys, "sessions": pc.cast(killed, pa.int64())})
        )
        for name, values in (
            ("ended", pc.if_else(killed, "killed", rows["ended"])),
            ("last_time", pc.if_else(killed, ends, rows["last_time"])),
        ):
            rows = rows.set_column(rows.schema.get_field_index(name), name, values)
        return rows

    def interruptions(self) -> list[Interruption]:
        """Kills and restarts, after all sessions went through `with_ends`."""
        killed = {row["key"]: row["sessions"] for row in self._killed.rows()}
        return [
            Interruption(
                kind="killed" if killed.get(_key(run.node, run.run)) else "restarted",
                node=run.node,
                start_us=run.last_us,
                end_us=max(following.first_us, run.last_us),
                sessions=killed.get(_key(run.node, run.run), 0),
                bytes=0,
                reason=None,
            )
            for run, following in self._followed
        ]


def _key(node: str, run: str) -> str:
    return f"{node}\n{run}"


def _runs_of(connections: Any) -> Any:
    """The number of the run in each connection's name; null for names of captured connections."""
    return pc.struct_field(pc.extract_regex(connections, START_OF_CONNECTION), "start")


def interruptions(
    tables: ReportTables, clock: TimeBuckets | None, runs: HubRuns, gap_bytes: int
) -> list[Interruption]:
    """Kills, restarts and gaps, in order of time; at most 50 of each."""
    found = runs.interruptions()[:_MOST] + _missing_records(tables)
    if clock is not None and gap_bytes:
        found += _gaps(tables, clock)[:_MOST]
    return sorted(found, key=lambda each: each.start_us)


def _gaps(tables: ReportTables, clock: TimeBuckets) -> list[Interruption]:
    """Intervals of the plots in which bytes are missing from the recording; adjacent ones are
    joined."""
    sums = Tally(("piece",), ("length",))
    for batch in tables.scan("silver.frames", "time", "length", where=pc.field("frame") == "gap"):
        sums.add(batch.append_column("piece", piece_of(clock, batch["time"])))
    found: list[Interruption] = []
    for row in sorted(sums.rows(), key=lambda row: row["piece"]):
        start = clock.start_us + row["piece"] * clock.width_us
        if found and found[-1].end_us == start:
            last = found.pop()
            start, row["length"] = last.start_us, row["length"] + last.bytes
            end = (last.end_us or start) + clock.width_us
        else:
            end = start + clock.width_us
        found.append(Interruption("gap", None, start, end, 0, row["length"], None))
    return found


def _missing_records(tables: ReportTables) -> list[Interruption]:
    """Ranges of the hub's ledger that are missing: rows of gold.deliveries without an id."""
    first = Highest(_MOST, ("time", "ascending"))
    for batch in tables.scan(
        "gold.deliveries", "node", "time", "reason", where=pc.field("message_id").is_null()
    ):
        first.add(batch.filter(pc.is_valid(batch["time"])))
    return [
        Interruption("missing records", row["node"], row["time"], None, 0, 0, row["reason"])
        for row in first.rows()
    ]
