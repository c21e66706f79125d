"""gold.deliveries and gold.reconciliation in a stream: what a hub noted, with what the wire shows.

How a message fared, and whether wire and ledger agree, is decided by rows that come in any order.
So a batch hands on to the next one what is not settled: messages that are open, passages that lack
their partner or their answer, and all that is younger than a minute of the hub's own time, in which
the other side's rows may still come. What is older and complete is written once, and forgotten.

A step of a message that was forgotten (a durable subscription reads on after a week) calls it back:
its steps are read from the lake again, and its rows in gold are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, LEDGER, MESSAGES
from crosswire.pipeline.batch import OF_RECORDS, WRONG
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.new_input import LakeRows, NewInput
from crosswire.pipeline.stream.carry_over import PART, Counts, together
from crosswire.pipeline.stream.commits import Journal, StreamStaging
from crosswire.pipeline.stream.decoder_state import KEPT, HubTimes
from crosswire.pipeline.tables import reconciliation as compared
from crosswire.pipeline.tables.deliveries import hops
from crosswire.pipeline.tables.steps import ACCEPTED, ANSWERED, DEAD, REPLAYED, kept_of, related
from crosswire.pipeline.tables.steps import joined as with_kept

__all__ = ["LINGER_US", "PATIENCE_US", "DecodedBatch", "LedgerBatch"]

LINGER_US: Final = 60_000_000
"""How much later than a row its partner may come: messages, ledger and tap are sealed every few
seconds, each on its own."""

PATIENCE_US: Final = 600_000_000
"""How long a table of a hub is waited for that lags behind the others, though all was read."""

_RECORDS: Final = "records"
_PLACE: Final = "place"
_CONNECTION: Final = ("node", "connection")
_MESSAGE: Final = ("node", "id")
_DELIVERIES: Final = ("gold.deliveries", "open.deliveries")
_RECONCILIATION: Final = "gold.reconciliation"

# What is handed on, part by part.
_STEPS: Final = "steps"
_ENVELOPES: Final = "envelopes"
_SAID: Final = "said"
_PASSED: Final = "passed"
_LINES: Final = "lines"
_COUNTED: Final = "counted"
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    _STEPS: {
        "node": "string",
        "seq": "bigint",
        "id": "bigint",
        "time": "bigint",
        "step": "string",
        "destination": "string",
        "protocol": "string",
        "connection": "string",
        "principal": "string",
        "attempt": "int",
        "detail": "string",
        "count": "bigint",
        "origin": "bigint",
        "is_moved": "boolean",
        "is_answer": "boolean",
        "is_told": "boolean",
    },
    _ENVELOPES: {
        "node": "string",
        "id": "bigint",
        "time": "bigint",
        "kind": "string",
        "crc": "bigint",
        "intact": "boolean",
        "is_scheduled": "boolean",
    },
    _SAID: {
        "node": "string",
        "connection": "string",
        "protocol": "string",
        "destination": "string",
        "kind": "string",
        "time": "bigint",
        "place": "bigint",
        "crc": "bigint",
        "id": "bigint",
        "correlation": "string",
        "sequence": "bigint",
        "way": "string",
        "side": "string",
        "name": "string",
        "said_yes": "boolean",
    },
    _PASSED: {
        "node": "string",
        "id": "bigint",
        "connection": "string",
        "destination": "string",
        "way": "string",
        "verdict": "string",
        "wire_time": "bigint",
        "same_payload": "boolean",
    },
    _LINES: {
        "node": "string",
        "connection": "string",
        "line": "string",
        "whole": "boolean",
        "written_until": "bigint",
        "broken_off": "bigint",
        "is_over": "boolean",
        "last_time": "bigint",
    },
    _COUNTED: {"counted_node": "string", "counted_destination": "string"},
}
_OF_WIRE: Final = ("correlation", "said_yes", "undecided", "name", KEPT)


@dataclass(frozen=True)
class DecodedBatch:
    """What a batch decoded: messages with `kept`, frames that are there for good, the directions
    of all connections, and what is carried of them."""

    messages: DataFrame
    frames: DataFrame
    directions: DataFrame
    counts: Counts


ReadRows = Callable[[Iterable[LakeRows], pa.Schema], DataFrame]


class LedgerBatch:
    """One batch of it. `run` writes tables and what is handed on into the batch's staging."""

    def __init__(
        self,
        spark: SparkSession,
        journal: Journal,
        staging: StreamStaging,
        arrived: NewInput,
        read: ReadRows,
        *,
        chosen: list[str],
        late_us: int,
    ) -> None:
        self._spark = spark
        self._journal = journal
        self._staging = staging
        self._arrived = arrived
        self._read = read
        self._chosen = [name for name in OF_RECORDS if not chosen or name in chosen]
        self._late_us = late_us
        self._before = journal.state(_RECORDS)
        self._has_wire = bool(arrived.position.taps)
        last = journal.last
        self.clocks: dict[str, HubTimes] = {} if last is None else dict(last.clocks)
        self.findings: dict[bool, dict[str, int]] = {True: {}, False: {}}
        self.replaced: list[str] = []
        """Files of gold.deliveries whose rows were written anew."""

    def run(self, wire: DecodedBatch | None) -> None:
        ledger = self._new(self._arrived.ledgers, LEDGER)
        envelopes = self._new(self._arrived.messages, MESSAGES)
        self._look_at_clocks(ledger, envelopes, wire)
        settled = self._by_node(self._settled_us())
        lines, wire_messages = self._lines(wire), self._wire_messages(wire)
        if not any(clock.ledgers for clock in self.clocks.values()):
            young = wire_messages.where(KEPT).where(F.col("time") >= settled)
            self._leave({_SAID: young, _LINES: lines})
            return
        lines, wire_messages = self._on_disk("lines", lines), self._on_disk("shown", wire_messages)
        kept = together(self._part(_ENVELOPES), None if envelopes is None else kept_of(envelopes))
        steps, kept, called_back = self._steps(ledger, kept)
        counted = self._part(_COUNTED)
        if ledger is not None:
            counted = counted.unionByName(compared.counted_topics(ledger)).distinct()
        passed = together(self._part(_PASSED), called_back)
        judged = (
            self._judged(wire_messages, steps, lines, counted, settled) if self._has_wire else None
        )
        if judged is not None:
            reported_rows = compared.reconciliation_rows(judged.where(~F.col("left_out")), KEPT)
            if "reconciliation" in self._chosen:
                tables = (_RECONCILIATION,)
                self._staging.write("reconciliation", reported_rows, tables=tables, dated_by="time")
            passed = passed.withColumn(KEPT, F.lit(True)).unionByName(
                reported_rows.select(*passed.columns, KEPT)
            )
        flagged = self._flagged(steps, judged, lines, settled)
        live = self._hops(flagged, passed.drop(KEPT) if judged is not None else None)
        parts = self._carried(flagged, live, kept, lines, judged, settled)
        old = passed.where(KEPT) if judged is not None else passed
        parts[_PASSED] = old.where(F.col("id").isNotNull()).join(live, list(_MESSAGE), "left_semi")
        parts[_COUNTED] = counted
        self._leave(parts)

    # What there is.

    def _new(self, rows: tuple[LakeRows, ...], schema: pa.Schema) -> DataFrame | None:
        return self._read(rows, schema) if rows else None

    def _part(self, name: str) -> DataFrame:
        columns = _PARTS[name]
        if self._before is None:
            empty = self._spark.range(1).where(F.lit(False))
            return empty.select(*(F.lit(None).cast(kind).alias(x) for x, kind in columns.items()))
        return self._before.where(F.col(PART) == name).select(*columns)

    def _on_disk(self, name: str, rows: DataFrame) -> DataFrame:
        """What stands on no disk is planned and made anew wherever it is used."""
        return self._staging.work(name, rows)

    def _leave(self, parts: Mapping[str, DataFrame]) -> None:
        rows = together(
            *(
                part.select(*_PARTS[name]).withColumn(PART, F.lit(name))
                for name, part in parts.items()
            )
        )
        nothing = [self._part(name) for name in _PARTS]
        rows = together(rows, *(part.where(F.lit(False)) for part in nothing))
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        made = self._staging.work(_RECORDS, rows.coalesce(tasks))
        self._staging.leave(_RECORDS, _RECORDS, made)

    def _look_at_clocks(
        self, ledger: DataFrame | None, envelopes: DataFrame | None, wire: DecodedBatch | None
    ) -> None:
        """Nodes are few: how far each was read goes through the driver."""
        directions = None
        if wire is not None:
            directions = wire.directions.where(F.col("node") != NODE)
            directions = directions.select("node", F.col("last_time").alias("time"))
        for table, rows in (("ledgers", ledger), ("messages", envelopes), ("taps", directions)):
            found = [] if rows is None else rows.groupBy("node").agg(F.max("time")).collect()
            for node, time in found:
                clock = self.clocks.get(node, HubTimes())
                newest = max(getattr(clock, table), time)
                self.clocks[node] = clock._replace(**{table: newest})

    def _settled_us(self) -> dict[str, int]:
        """By node: what is older has been told by all tables. One of which all was read, and that
        says nothing new, is waited for a while: it may be sealed late, or nothing happens."""
        found: dict[str, int] = {}
        for node, clock in self.clocks.items():
            read_to = [
                time if table in self._arrived.lagging else max(time, max(clock) - PATIENCE_US)
                for table, time in clock._asdict().items()
                if time
            ]
            found[node] = min(read_to) - LINGER_US
        return found

    def _by_node(self, values: Mapping[str, int]) -> Column:
        if not values:
            return F.lit(0).cast("bigint")
        pairs = [F.lit(each) for item in values.items() for each in item]
        return F.coalesce(F.create_map(*pairs)[F.col("node")], F.lit(0)).cast("bigint")

    # Both sides.

    def _lines(self, wire: DecodedBatch | None) -> DataFrame:
        known = self._part(_LINES)
        if wire is None:
            return known
        tallied = wire.counts.tallies.where(F.col("direction") == BACKWARD)
        errors = tallied.select(*_CONNECTION, F.col("last_error.time").alias("broken_off"))
        relink = F.col("protocol") == "relink"
        about = wire.counts.connections.select(
            *_CONNECTION, F.when(relink, F.col("link")).alias("link"), F.col("final")
        ).join(errors, list(_CONNECTION), "left")
        directions = wire.directions.where(F.col("node") != NODE)
        now = compared.lines(directions, about, F.max("last_time").alias("last_time"))
        now = now.withColumn("is_over", F.coalesce("final", F.lit(False)))
        older = known.join(now, list(_CONNECTION), "left_anti")
        return older.unionByName(now.select(*known.columns))

    def _wire_messages(self, wire: DecodedBatch | None) -> DataFrame:
        known = self._part(_SAID).withColumn(KEPT, F.lit(True))
        if wire is not None:
            tapped = wire.messages.where(F.col("node") != NODE)
            parts = [
                compared.shown(tapped.where(F.col(KEPT) == kept)).withColumn(KEPT, F.lit(kept))
                for kept in (True, False)
            ]
            known = together(known, *parts)
            replies = compared.answers(wire.frames.where(F.col("node") != NODE))
        else:
            replies = compared.answers(self._no_frames())
        return compared.acknowledged(known, replies)

    def _no_frames(self) -> DataFrame:
        nothing = ("node", "connection", "direction", "protocol", "identifier", "kind", "status")
        empty = self._spark.range(1).where(F.lit(False))
        numbers = [F.lit(None).cast("bigint").alias(name) for name in ("sequence", "time")]
        return empty.select(*(F.lit(None).cast("string").alias(name) for name in nothing), *numbers)

    def _steps(
        self, ledger: DataFrame | None, kept: DataFrame
    ) -> tuple[DataFrame, DataFrame, DataFrame | None]:
        """All steps of messages that are not settled, what is kept of these, and the passages of
        those that were called back."""
        known = self._part(_STEPS).withColumn("is_new", F.lit(False))
        new = None
        if ledger is not None:
            new = ledger.withColumn("is_told", F.lit(not self._has_wire))
            new = new.withColumn("is_new", F.lit(True))
        rows = with_kept(related(together(known, new)), kept)
        unheard_of = F.min("is_new").over(Window.partitionBy(*_MESSAGE))
        lost = F.col("accepted_by").isNull() & unheard_of
        rows = rows.withColumn("is_lost", lost)
        found = Observation()
        steps = self._staging.work(_STEPS, rows.observe(found, F.count_if("is_lost").alias("lost")))
        last = self._journal.last
        if not found.get["lost"] or last is None or not last.position.ledgers:
            return steps, kept, None
        return self._call_back(steps, kept)

    def _judged(
        self,
        wire_messages: DataFrame,
        steps: DataFrame,
        lines: DataFrame,
        counted: DataFrame,
        settled: Column,
    ) -> DataFrame:
        """`kept`: that is what it will be."""
        nodes = [node for node, clock in self.clocks.items() if clock.ledgers]
        horizons = {
            node: min(clock.taps, clock.ledgers)
            for node, clock in self.clocks.items()
            if clock.taps and clock.ledgers
        }
        rows = compared.sides(
            wire_messages.where(F.col("node").isin(nodes)),
            compared.noted(steps).join(_untold(steps), ["node", "place"], "left_semi"),
            lines,
        )
        both = compared.compare(
            rows, F.min("is_over").alias("is_over"), wire_columns=_OF_WIRE
        ).withColumn("horizon", self._by_node(horizons))
        judged = compared.judge(both, counted).withColumn(KEPT, _is_final(settled))
        return self._counted(
            "judged",
            judged,
            {name: (F.col("verdict") == name) & ~F.col("left_out") for name in compared.VERDICTS},
            lambda rows: self._staging.work("judged", rows),
        )

    def _counted(
        self,
        name: str,
        rows: DataFrame,
        conditions: Mapping[str, Column],
        write: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        """Count while it is written what is there for good, and what is not."""
        found = Observation(name)
        kept = F.col(KEPT)
        metrics = [
            F.count_if(condition & (kept if flag else ~kept)).alias(f"{what} {flag}")
            for what, condition in conditions.items()
            for flag in (True, False)
        ]
        made = write(rows.observe(found, *metrics))
        for what in conditions:
            for flag in (True, False):
                counts = self.findings[flag]
                counts[what] = counts.get(what, 0) + found.get[f"{what} {flag}"]
        return made

    # What becomes of messages.

    def _flagged(
        self, steps: DataFrame, judged: DataFrame | None, lines: DataFrame, settled: Column
    ) -> DataFrame:
        """Steps, whether their passage `is_reported` now, and whether their message `is_settled`:
        all is told of it, unless it is open."""
        flagged, pending = steps, None
        if judged is not None:
            reported_rows = judged.where(KEPT).select("node", F.col("ledger.place").alias("seq"))
            # Nobody tapped the connection.
            unseen = (
                compared.noted(steps)
                .join(lines, list(_CONNECTION), "left_anti")
                .where(F.col("time") < settled)
                .select("node", F.col("place").alias("seq"))
            )
            now = reported_rows.unionByName(unseen).where(F.col("seq").isNotNull())
            now = now.distinct().withColumn("now", F.lit(True))
            is_reported = F.col("is_told") | F.coalesce("now", F.lit(False))
            flagged = steps.join(now, ["node", "seq"], "left").withColumn("is_told", is_reported)
            pending = (
                judged.where(~F.col(KEPT) & F.col("wire.id").isNotNull())
                .select("node", F.col("wire.id").alias("id"))
                .distinct()
                .withColumn("pending", F.lit(True))
            )
        own = Window.partitionBy(*_MESSAGE)
        waits = F.max(compared.is_passage() & ~F.col("is_told")).over(own)
        is_settled = ~waits & (F.max("time").over(own) < settled)
        flagged = flagged.withColumn("is_settled", is_settled)
        if pending is not None:
            flagged = flagged.join(pending, list(_MESSAGE), "left").withColumn(
                "is_settled", F.col("is_settled") & F.col("pending").isNull()
            )
        columns = [*steps.columns, "is_settled"]
        return self._staging.work("flagged", flagged.select(*columns))

    def _hops(self, flagged: DataFrame, reconciled: DataFrame | None) -> DataFrame:
        """Write gold.deliveries; gives the messages that the next batch has to know."""
        newest = self._by_node({node: clock.ledgers for node, clock in self.clocks.items()})
        steps = flagged.withColumn("newest", newest)
        is_settled = flagged.groupBy(*_MESSAGE).agg(F.min("is_settled").alias("is_settled"))
        own = Window.partitionBy(*_MESSAGE)
        rows = (
            hops(steps, reconciled, late_us=self._late_us)
            .join(is_settled, list(_MESSAGE))
            .withColumn(KEPT, F.col("is_settled") & ~F.max("is_open").over(own))
            .drop("is_settled")
        )
        table = F.when(F.col("is_open"), _DELIVERIES[1]).otherwise(_DELIVERIES[0])
        rows = rows.withColumn(_PLACE, table)

        def write(rows: DataFrame) -> DataFrame:
            if "deliveries" not in self._chosen:
                return self._staging.work("hops", rows)
            self._staging.write("deliveries", rows, tables=_DELIVERIES, dated_by="accepted")
            return self._staging.read("deliveries", *_DELIVERIES)

        wrong = {what: F.coalesce(F.expr(sql), F.lit(False)) for what, sql in WRONG.items()}
        made = self._counted("deliveries", rows, wrong, write)
        waiting = made.where(~F.col(KEPT)).select(*_MESSAGE)
        return waiting.union(flagged.where("NOT is_settled").select(*_MESSAGE)).distinct()

    def _carried(
        self,
        flagged: DataFrame,
        live: DataFrame,
        kept: DataFrame,
        lines: DataFrame,
        judged: DataFrame | None,
        settled: Column,
    ) -> dict[str, DataFrame]:
        steps = flagged.join(live, list(_MESSAGE), "left_semi")
        # Its step comes, or came to nothing.
        early = kept.where(F.col("time") >= settled).join(
            flagged.select(*_MESSAGE), list(_MESSAGE), "left_anti"
        )
        over = F.col("is_over") & (F.col("last_time") < settled)
        # Who asked may be gone when the answer is noted.
        asked = steps.where(F.col("step") == ACCEPTED).select(*_CONNECTION)
        parts = {
            _STEPS: steps,
            _ENVELOPES: kept.join(live, list(_MESSAGE), "left_semi").unionByName(early),
            _LINES: lines.where(~over).unionByName(
                lines.where(over).join(asked, list(_CONNECTION), "left_semi")
            ),
        }
        if judged is not None:
            wire = judged.where(~F.col(KEPT) & F.col(f"wire.{KEPT}"))
            names = [name for name in _PARTS[_SAID] if name not in ("node", "way", "side")]
            parts[_SAID] = wire.select(
                "node", "way", F.lit("wire").alias("side"), *(f"wire.{name}" for name in names)
            )
        return parts

    # Messages that were forgotten.

    def _call_back(
        self, steps: DataFrame, kept: DataFrame
    ) -> tuple[DataFrame, DataFrame, DataFrame | None]:
        last = self._journal.last
        assert last is not None
        wanted = steps.where("is_lost").select(*_MESSAGE).distinct()
        wanted = self._staging.work("wanted", wanted)
        low, high = wanted.agg(F.min("id"), F.max("id")).collect()[0]
        between = F.col("id").between(low, high)
        beside = F.col("step").isin(DEAD, REPLAYED, ANSWERED)
        ledger = self._read(last.position.rows("ledgers"), LEDGER).where(between | beside)
        history = related(ledger).join(wanted, list(_MESSAGE), "left_semi")
        history = history.withColumn("is_told", F.lit(True))
        if last.position.messages:
            messages = self._read(last.position.rows("messages"), MESSAGES).where(between)
            again = kept_of(messages).join(wanted, list(_MESSAGE), "left_semi")
            kept = self._staging.work("kept", together(kept, again))
        lost = steps.where("is_lost").select(*_PARTS[_STEPS])
        found = with_kept(together(lost, history), kept)
        steps = together(steps.where("NOT is_lost"), found)
        steps = self._staging.work("steps-again", steps.drop("is_lost", "is_new"))
        if "deliveries" in self._chosen:
            self._rewrite(wanted, between)
        if "reconciliation" not in self._chosen:
            return steps, kept, None
        files = self._journal.kept(_RECONCILIATION)
        passed = self._journal.rows_of(_RECONCILIATION, files)
        if passed is not None:
            passed = passed.where(between).select(*_PARTS[_PASSED])
            passed = passed.join(wanted, list(_MESSAGE), "left_semi")
        return steps, kept, passed

    def _rewrite(self, wanted: DataFrame, between: Column) -> None:
        """Take what is `wanted` out of gold.deliveries: it is written anew, with what is new."""
        table = _DELIVERIES[0]
        rows = self._journal.rows_of(table, self._journal.kept(table))
        if rows is None:
            return
        day = F.to_date(F.timestamp_micros("accepted")).cast("string").alias("day")
        old = rows.where(between).join(wanted, list(_MESSAGE), "left_semi")
        days = [row.day for row in old.select(day).distinct().collect()]
        if not days:
            return
        self.replaced = self._journal.kept(table, days)
        before = self._journal.rows_of(table, self.replaced)
        assert before is not None
        rest = before.join(wanted, list(_MESSAGE), "left_anti").withColumn(KEPT, F.lit(True))
        self._staging.write("deliveries-again", rest, tables=(table,), dated_by="accepted")
        counts = [F.count_if(F.expr(sql)).alias(what) for what, sql in WRONG.items()]
        gone = before.join(wanted, list(_MESSAGE), "left_semi").agg(*counts).collect()[0]
        self.findings[True] |= {what: -gone[what] for what in WRONG}
        self._staging.forget(table, before.count())


def _untold(steps: DataFrame) -> DataFrame:
    return steps.where("NOT is_told").select("node", F.col("seq").alias("place"))


def _is_final(settled: Column) -> Column:
    """Nothing that may still come changes the verdict."""
    wire, ledger = F.col("wire"), F.col("ledger")
    is_old = F.greatest(wire["time"], ledger["time"]) < settled
    is_kept = F.coalesce(wire[KEPT], F.lit(True))
    is_decided = F.coalesce(~wire["undecided"], F.lit(True))
    both = wire.isNotNull() & ledger.isNotNull()
    resumed = (wire["protocol"] == "relink") & wire["sequence"].isNull()
    hopeless = ~F.col("whole") | F.coalesce(resumed, F.lit(False))
    judged = F.col("verdict").isin(compared.NOT_ACCEPTED, compared.WITHDRAWN)
    certain = is_decided & (both | hopeless | judged | F.col("left_out"))
    return is_old & is_kept & (F.col("is_over") | certain)
