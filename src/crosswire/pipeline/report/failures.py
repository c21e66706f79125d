"""What failed, by cause: dead letters first, then what was lost, refused, unanswered or late."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.pipeline.report.facts import Calls, Failure, MessageKey, Row, Violations
from crosswire.pipeline.report.table_reader import Highest, ReportTables, Tally

__all__ = ["KINDS", "failures", "message_ids", "steps_of"]

KINDS: Final = (
    "dead",
    "lost",
    "damaged",
    "doubled",
    "failed",
    "unanswered",
    "violation",
    "dropped",
    "expired",
    "late",
)
"""The kinds of failures, the most serious first."""

_OUTCOMES: Final = ("dead", "damaged", "failed", "dropped", "expired")
_FLAGS: Final = ("lost", "doubled", "late")
_MOST_OF_A_KIND: Final = 8
_MOST_STEPS: Final = 5_000
_TABLES: Final = ("gold.deliveries", "open.deliveries")


def failures(
    tables: ReportTables, calls: Calls | None, violations: Violations | None
) -> list[Failure]:
    """Failures by kind and cause, the most serious kind first and of each the most frequent."""
    found = _of_deliveries(tables)
    if calls is not None:
        found += _of_calls(calls, with_answers=not tables.has("gold.deliveries"))
    if violations is not None:
        found += [
            Failure(
                "violation",
                row["host"],
                row["protocol"],
                row["reason"],
                row["count"],
                "violations",
                row["first"],
                row["last"],
            )
            for row in violations.hosts
        ]
    chosen: list[Failure] = []
    for kind in KINDS:
        own = [each for each in found if each.kind == kind]
        chosen += sorted(own, key=lambda each: -each.count)[:_MOST_OF_A_KIND]
    return _with_letters(tables, chosen)


def _of_deliveries(tables: ReportTables) -> list[Failure]:
    """By what the hub recorded. Each row is counted for one kind: the most serious one."""
    keys = ("kind", "node", "protocol", "destination", "hop", "detail")
    causes = Tally(keys, ("count",), most=("message_id", "last"), least=("first",))
    columns = ("node", "destination", "hop", "detail", "protocol", "producer_protocol")
    for table in _TABLES:
        for batch in tables.scan(table, *columns, "message_id", "time", "outcome", *_FLAGS):
            kind = _kind_of(batch)
            rows = pa.RecordBatch.from_pydict(
                {
                    "kind": kind,
                    "node": batch["node"],
                    "protocol": pc.coalesce(batch["protocol"], batch["producer_protocol"]),
                    "destination": batch["destination"],
                    "hop": batch["hop"],
                    "detail": batch["detail"],
                    "count": pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows),
                    "message_id": batch["message_id"],
                    "last": batch["time"],
                    "first": batch["time"],
                }
            )
            causes.add(rows.filter(pc.is_valid(kind)))
    return [
        Failure(
            row["kind"],
            row["destination"],
            row["protocol"],
            row["detail"],
            row["count"],
            "deliveries",
            row["first"],
            row["last"],
            row["node"],
            row["message_id"],
            name=_name_of_letters(row),
        )
        for row in causes.rows()
    ]


def _kind_of(batch: pa.RecordBatch) -> Any:
    found = pa.nulls(batch.num_rows, pa.string())
    for kind in reversed(KINDS):
        if kind in _FLAGS:
            applies = batch[kind]
        elif kind in _OUTCOMES:
            applies = pc.equal(batch["outcome"], kind)
        else:
            continue
        found = pc.if_else(pc.fill_null(applies, False), kind, found)
    return found


def _name_of_letters(row: Row) -> str | None:
    """What `crosswire dead` calls the queue or subscription that a dead letter comes from."""
    for name in (row["hop"], row["destination"]):
        if name is not None and (found := re.fullmatch(r"queue/(.+)|(@.+)", name, re.DOTALL)):
            return found[1] or found[2]
    return None


def _of_calls(calls: Calls, *, with_answers: bool) -> list[Failure]:
    """By what is on the wire: calls without a response and, where the hub's own record is missing,
    those answered with an error."""
    found = []
    for row in calls.failures:
        is_unanswered = row["outcome"] == "unanswered"
        if is_unanswered or with_answers:
            found.append(
                Failure(
                    "unanswered" if is_unanswered else "failed",
                    row["destination"],
                    row["protocol"],
                    None if is_unanswered else row["outcome"],
                    row["count"],
                    "errors",
                    row["first"],
                    row["last"],
                )
            )
    return found


def _with_letters(tables: ReportTables, found: list[Failure]) -> list[Failure]:
    """Adds the dead letters: they are messages of their own, with the failed one as `origin`."""
    ids = pa.array({each.message_id for each in found if each.kind == "dead"}, pa.int64())
    letters: dict[MessageKey, int] = {}
    for table in _TABLES if len(ids) else ():
        chosen = pc.is_in(pc.field("origin"), ids)
        for batch in tables.scan(table, "node", "origin", "message_id", where=chosen):
            for row in batch.to_pylist():
                letters[row["node"], row["origin"]] = row["message_id"]
    return [
        msgspec.structs.replace(each, letter_id=letters.get((each.node, each.message_id)))
        if each.kind == "dead" and each.message_id is not None
        else each
        for each in found
    ]


def message_ids(tables: ReportTables, conversations: list[Row]) -> dict[int, int]:
    """Index in `conversations` → id of its request, as gold.reconciliation has it."""
    wanted = {
        (row["node"], row["connection"], row["request_offset"]): index
        for index, row in enumerate(conversations)
    }
    connections = pa.array({row["connection"] for row in conversations}, pa.string())
    offsets = pa.array({row["request_offset"] for row in conversations}, pa.int64())
    chosen = (
        pc.is_in(pc.field("connection"), connections)
        & pc.is_in(pc.field("byte_offset"), offsets)
        & pc.field("message_id").is_valid()
        & (pc.field("kind") != "response")
    )
    found: dict[int, int] = {}
    columns = ("node", "connection", "byte_offset", "message_id")
    for batch in tables.scan("gold.reconciliation", *columns, where=chosen):
        for row in batch.to_pylist():
            index = wanted.get((row["node"], row["connection"], row["byte_offset"]))
            if index is not None:
                found[index] = row["message_id"]
    return found


_STEP: Final = ("time", "step", "destination", "protocol", "connection", "attempt", "detail")


def steps_of(tables: ReportTables, keys: Iterable[MessageKey]) -> dict[MessageKey, list[Row]]:
    """The steps of some messages, in order; those without any are left out."""
    found: dict[MessageKey, list[Row]] = {key: [] for key in keys}
    ids = pa.array({identifier for _, identifier in found}, pa.int64())
    first = Highest(_MOST_STEPS, ("message_id", "ascending"), ("ledger_seq", "ascending"))
    chosen = pc.is_in(pc.field("message_id"), ids)
    columns = ("node", "message_id", "ledger_seq", "since_accepted_us", *_STEP)
    for batch in tables.scan("gold.steps", *columns, where=chosen):
        first.add(batch)
    for row in first.rows():
        key = row["node"], row["message_id"]
        if key in found:
            found[key].append(row)
    return {key: rows for key, rows in found.items() if rows}
