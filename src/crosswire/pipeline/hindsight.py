"""What a stream can tell only of the whole: gold.deliveries and gold.reconciliation.

How a message fared, and whether the wire agrees with the ledger, is decided by rows that may come
much later. So these two are made when a run of a stream ends, of all that it and the hub wrote.
"""

from __future__ import annotations

from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import LEDGER, MESSAGES
from crosswire.pipeline.arrivals import Position
from crosswire.pipeline.inputs import Inputs
from crosswire.pipeline.journal import Commit, Journal
from crosswire.pipeline.run import OF_RECORDS, WRONG
from crosswire.pipeline.sources.records import from_records
from crosswire.pipeline.state import KEPT
from crosswire.pipeline.tables.deliveries import deliveries
from crosswire.pipeline.tables.reconciliation import reconciliation

__all__ = ["look_back"]

_OF_WIRE: Final = ("silver.messages", "silver.frames", "silver.directions")
_PLACE: Final = "place"


def look_back(
    spark: SparkSession,
    journal: Journal,
    inputs: Inputs,
    chosen: list[str],
    *,
    since_us: int,
    late_us: int,
) -> tuple[dict[str, int], list[str]]:
    """Write the two tables, as far as they are `chosen` (or nothing is); what was found, and which
    were left out and why."""
    wanted = [name for name in OF_RECORDS if not chosen or name in chosen]
    if not wanted:
        return {}, []
    if not inputs.ledgers:
        return {}, ["no deliveries and no reconciliation: there is no ledger/"]
    notes: list[str] = []
    findings: dict[str, int] = {}
    ledger = from_records(spark, inputs.ledgers, LEDGER, since_us=since_us)
    envelopes = from_records(spark, inputs.messages, MESSAGES, since_us=since_us)
    staging = journal.stage()
    reconciled: DataFrame | None = None
    of_wire = [journal.table(place) for place in _OF_WIRE]
    said, framed, ways = of_wire
    if not inputs.taps:
        notes.append("no reconciliation: there is no wire/ beside the ledger")
    elif said is None or framed is None or ways is None:
        notes.append("no reconciliation: it needs the tables messages, frames and directions")
    else:
        reconciled = reconciliation(said, framed, ways, ledger, envelopes)
        if "reconciliation" in wanted:
            rows = reconciled.withColumn(KEPT, F.lit(False))
            place = "gold.reconciliation"
            staging.write("reconciliation", rows, places=(place,), dated_by="time")
            reconciled = staging.read("reconciliation", place).drop(KEPT)
        counts = reconciled.groupBy("verdict").count().collect()
        findings |= {row["verdict"]: row["count"] for row in counts}
    if "deliveries" in wanted:
        places = ("gold.deliveries", "open.deliveries")
        hops = deliveries(ledger, envelopes, reconciled, late_us=late_us)
        where = F.when(F.col("is_open"), places[1]).otherwise(places[0])
        rows = hops.withColumn(KEPT, F.lit(False)).withColumn(_PLACE, where)
        staging.write("deliveries", rows, places=places, dated_by="accepted")
        counted = [F.count_if(F.expr(sql)).alias(what) for what, sql in WRONG.items()]
        all_hops = staging.read("deliveries", *places)
        findings |= all_hops.agg(*counted).collect()[0].asDict()
    last = journal.last or Commit(batch=-1, position=Position())
    retained = frozenset(last.files) - staging.rows.keys()
    commit = msgspec.structs.replace(
        last,
        batch=staging.batch,
        rows={**last.rows, **staging.rows},
        schemas={**last.schemas, **staging.schemas},
    )
    journal.commit(commit, staging, replaced_days={}, retained=retained)
    return findings, notes
