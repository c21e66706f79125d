"""The tables of a hub's ledger in a stream, compared with its tapped bytes.

gold.deliveries and gold.reconciliation compare rows of different files that are sealed at different
times: how a message fared and whether wire and ledger agree depends on rows that arrive in any
order. So a batch hands on to the next one what is not decided: messages that are open, passages
that lack their partner or their reply, and all that is newer than the watermark
(`watermarks.settled_before`). What is older and complete is written once, and then dropped from the
state.

`ledger_state` has its parts. A step of a message that was dropped (a durable subscription reads on
after a week) brings it back: its steps are read from the lake again, and its rows in
gold.deliveries are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import BACKWARD, LEDGER, MESSAGES
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.new_input import LakeRows, NewInput
from crosswire.pipeline.stream.commits import StreamOutput, StreamStaging, StreamStart
from crosswire.pipeline.stream.ledger_state import (
    CONNECTIONS,
    COUNTED,
    ENVELOPES,
    PARTS,
    PASSAGES,
    STATE,
    STEPS,
    STORED_NAMES,
    WIRE_MESSAGES,
)
from crosswire.pipeline.stream.minute_tables import MinuteTables
from crosswire.pipeline.stream.watermarks import HubTimes, settled_before
from crosswire.pipeline.summary import (
    DAMAGED_ANSWERS,
    DELIVERY_FAULTS,
    LEDGER_TABLES,
    MINUTE_TABLES,
    OTHER_PAYLOAD,
)
from crosswire.pipeline.tables import reconciliation as reconciling
from crosswire.pipeline.tables.deliveries import UNKNOWN, hops, missing_ranges, unrecorded
from crosswire.pipeline.tables.finality import KEPT, PART, TARGET_TABLE, union_of
from crosswire.pipeline.tables.minutes import minutes, with_leaving
from crosswire.pipeline.tables.names import NOT_ACCEPTED, VERDICTS, WITHDRAWN
from crosswire.pipeline.tables.recalled_steps import recalled_facts, recalled_steps
from crosswire.pipeline.tables.registry import DecodedBatch
from crosswire.pipeline.tables.steps import (
    ACCEPTED,
    ANSWERED,
    DEAD,
    REPLAYED,
    gold_steps,
    message_facts,
    sent_again_as,
    with_facts,
    with_origins,
)

__all__ = ["LedgerTables", "ReadRows"]

_CONNECTION: Final = ("node", "connection")
_MESSAGE: Final = ("node", "id")
_DELIVERIES: Final = ("gold.deliveries", "open.deliveries")
_RECONCILIATION: Final = "gold.reconciliation"

_ID_RANGE: Final = 100_000
"""Messages with ids this near to each other are read as one range."""
_MOST_RANGES: Final = 64
_OF_WIRE: Final = ("correlation", "reply_ok", "undecided", "name", KEPT)
"""Columns of wire messages that the comparison must hand through, to carry them on."""


ReadRows = Callable[[Iterable[LakeRows], pa.Schema], DataFrame]
"""Reads rows of a lake by their numbers."""


class LedgerTables:
    """The tables in one batch: `run`, after `begin`, writes them and the new state into the staging
    folder.

    Then `hub_times` has the newest times by node, `findings` the counts (True: of final rows,
    False: of provisional ones), `replaced_files` files of gold.deliveries that were written again.
    """

    def __init__(
        self,
        spark: SparkSession,
        output: StreamOutput,
        staging: StreamStaging,
        new_input: NewInput,
        read: ReadRows,
        *,
        begun: StreamStart,
    ) -> None:
        self._spark = spark
        self._output = output
        self._staging = staging
        self._new_input = new_input
        self._read = read
        self._chosen = [name for name in LEDGER_TABLES if begun.wants(name)]
        self._late_us = begun.late_us
        self._before = output.state(STATE)
        self._has_wire = bool(new_input.position.taps)
        last = output.last
        self._missing = (*(last.missing if last is not None else ()), *new_input.missing)
        self.hub_times: dict[str, HubTimes] = {} if last is None else dict(last.clocks)
        self.findings: dict[bool, dict[str, int]] = {True: {}, False: {}}
        self.replaced_files: list[str] = []
        self.ledger = self._new(new_input.ledgers, LEDGER)
        """The new rows of the ledger; None if there are none."""
        self._envelopes = self._new(new_input.messages, MESSAGES)
        wanted = tuple(name for name in MINUTE_TABLES if name in self._chosen)
        self._minutes = MinuteTables(output, staging, wanted) if wanted else None

    @property
    def replaced_days(self) -> dict[str, set[str]]:
        """By table: days whose files this batch has written again."""
        return {} if self._minutes is None else self._minutes.replaced_days

    def run(self, wire: DecodedBatch | None) -> None:
        """Write what the new rows decide; `wire` is None if the batch has no new bytes."""
        if not self._chosen:
            return
        ledger, envelopes, settled = self.ledger, self._envelopes, self.settled
        connections, wire_messages = self._connections(wire), self._wire_messages(wire)
        if not any(times.ledgers for times in self.hub_times.values()):
            # A tap without ledger so far: keep what is newer than the watermark, in case one comes.
            young = wire_messages.where(KEPT).where(F.col("time") >= settled)
            self._save({WIRE_MESSAGES: young, CONNECTIONS: connections})
            return
        connections = self._staging.work("connections", connections)
        wire_messages = self._staging.work("wire_messages", wire_messages)
        facts = union_of(
            self._part(ENVELOPES), None if envelopes is None else message_facts(envelopes)
        )
        steps, facts, old_passages = self._steps(ledger, facts)
        counted = self._part(COUNTED)
        if ledger is not None:
            counted = counted.unionByName(reconciling.counted_topics(ledger)).distinct()
        passages = union_of(self._part(PASSAGES), old_passages)
        judged: DataFrame | None = None
        if self._has_wire:
            judged = self._judged(wire_messages, steps, connections, counted, settled)
            rows = reconciling.reconciliation_rows(judged.where(~F.col("left_out")), KEPT)
            if "reconciliation" in self._chosen:
                self._staging.write("reconciliation", rows)
            passages = passages.withColumn(KEPT, F.lit(True)).unionByName(
                rows.select(*passages.columns, KEPT)
            )
        steps = self._with_settled(steps, judged, connections, settled)
        if "steps" in self._chosen:
            self._list_steps(steps, connections, settled)
        if self._minutes is not None:
            self._minutes.add(minutes(with_leaving(steps).where("is_new")))
        reconciled = passages.drop(KEPT) if judged is not None else None
        live = self._deliveries(steps, facts, reconciled, settled)
        parts = self._carried(steps, live, facts, connections, judged, settled)
        # gold.deliveries of a live message is computed again from all of its passages, and the
        # final ones are not compared again: they are carried as they are.
        final = passages.where(KEPT) if judged is not None else passages
        final = final.where(F.col("id").isNotNull())
        parts[PASSAGES] = final.join(live, list(_MESSAGE), "left_semi")
        parts[COUNTED] = counted
        self._save(parts)

    # State.

    def _new(self, rows: tuple[LakeRows, ...], schema: pa.Schema) -> DataFrame | None:
        return self._read(rows, schema) if rows else None

    def _part(self, name: str) -> DataFrame:
        """A part of the state that the last batch saved, without rows if there is none."""
        columns = PARTS[name]
        if self._before is None:
            return self._no_rows(columns)
        rows = self._before.where(F.col(PART) == name)
        return rows.select(*(F.col(STORED_NAMES.get(each, each)).alias(each) for each in columns))

    def _no_rows(self, columns: Mapping[str, str]) -> DataFrame:
        empty = self._spark.range(1).where(F.lit(False))
        return empty.select(*(F.lit(None).cast(kind).alias(name) for name, kind in columns.items()))

    def _save(self, parts: Mapping[str, DataFrame]) -> None:
        """Save the state for the next batch: all columns of all parts, also of those without rows,
        because the next batch reads it with the schema of this one."""
        rows = []
        for name, columns in PARTS.items():
            part = parts[name] if name in parts else self._no_rows(columns)
            stored = (F.col(each).alias(STORED_NAMES.get(each, each)) for each in columns)
            rows.append(part.select(*stored).withColumn(PART, F.lit(name)))
        self._staging.save_state(STATE, union_of(*rows))

    @property
    def settled(self) -> Column:
        """The watermark of each row's node: see `watermarks.settled_before`."""
        return self._by_node(settled_before(self.hub_times, self._new_input.lagging))

    def begin(self, directions: DataFrame | None) -> None:
        """Find the newest time of each table and node. Nodes are few: they fit into the driver."""
        if directions is not None:
            directions = directions.where(F.col("node") != NODE)
            directions = directions.select("node", F.col("last_time").alias("time"))
        tables = {"ledgers": self.ledger, "messages": self._envelopes, "taps": directions}
        for table, rows in tables.items():
            found = [] if rows is None else rows.groupBy("node").agg(F.max("time")).collect()
            for node, time_us in found:
                times = self.hub_times.get(node, HubTimes())
                newest = max(getattr(times, table), time_us)
                self.hub_times[node] = times._replace(**{table: newest})

    def _by_node(self, values: Mapping[str, int]) -> Column:
        """A number for each row, by its node; 0 for other nodes."""
        if not values:
            return F.lit(0).cast("bigint")
        pairs = [F.lit(each) for item in values.items() for each in item]
        return F.coalesce(F.create_map(*pairs)[F.col("node")], F.lit(0)).cast("bigint")

    # Wire and ledger.

    def _connections(self, wire: DecodedBatch | None) -> DataFrame:
        """The tapped connections: those of this batch, and older ones that are still carried."""
        known = self._part(CONNECTIONS)
        if wire is None:
            return known
        backward = wire.counts.tallies.where(F.col("direction") == BACKWARD)
        errors = backward.select(*_CONNECTION, F.col("last_error.time").alias("broken_off"))
        relink = F.col("protocol") == "relink"
        links = wire.counts.connections.select(
            *_CONNECTION, F.when(relink, F.col("link")).alias("link"), F.col("final")
        ).join(errors, list(_CONNECTION), "left")
        directions = wire.directions.where(F.col("node") != NODE)
        last_time = F.max("last_time").alias("last_time")
        client = F.max("connector_address").alias("client")
        now = reconciling.tapped_connections(directions, links, last_time, client)
        now = now.withColumn("is_over", F.coalesce("final", F.lit(False)))
        older = known.join(now, list(_CONNECTION), "left_anti")
        return older.unionByName(now.select(*known.columns))

    def _wire_messages(self, wire: DecodedBatch | None) -> DataFrame:
        """Messages on the wire without a final verdict: carried ones and new ones, with `kept`."""
        rows = self._part(WIRE_MESSAGES).withColumn(KEPT, F.lit(True))
        if wire is None:
            return reconciling.with_replies(rows, reconciling.replies(self._no_frames()))
        tapped = wire.messages.where(F.col("node") != NODE)
        parts = [
            reconciling.wire_passages(tapped.where(F.col(KEPT) == kept)).withColumn(
                KEPT, F.lit(kept)
            )
            for kept in (True, False)
        ]
        # Only new frames are searched for replies: what older ones answered is in `reply_ok`.
        replies = reconciling.replies(wire.frames.where(F.col("node") != NODE))
        return reconciling.with_replies(union_of(rows, *parts), replies)

    def _no_frames(self) -> DataFrame:
        texts = ("node", "connection", "direction", "protocol", "identifier", "kind", "status")
        numbers = ("sequence", "time")
        return self._no_rows(dict.fromkeys(texts, "string") | dict.fromkeys(numbers, "bigint"))

    def _steps(
        self, ledger: DataFrame | None, facts: DataFrame
    ) -> tuple[DataFrame, DataFrame, DataFrame | None]:
        """All steps of messages that are not settled, what is known of these messages, and earlier
        passages of messages that were dropped from the state and are brought back."""
        known = self._part(STEPS).withColumn("is_new", F.lit(False))
        new = None
        if ledger is not None:
            # Without a wire there is no passage to wait for.
            new = ledger.withColumn("is_reported", F.lit(not self._has_wire))
            new = new.withColumn("is_new", F.lit(True)).withColumn("is_listed", F.lit(False))
        rows = with_facts(with_origins(union_of(known, new)), facts)
        # A message begins with `accepted`. If all that there is of it is new and `accepted` is not
        # among it, then its earlier steps were settled and dropped.
        all_new = F.min("is_new").over(Window.partitionBy(*_MESSAGE))
        rows = rows.withColumn("is_dropped", F.col("accepted_by").isNull() & all_new)
        found = Observation()
        rows = rows.observe(found, F.count_if("is_dropped").alias("dropped"))
        steps = self._staging.work(STEPS, rows)
        last = self._output.last
        if not found.get["dropped"] or last is None or not last.position.ledgers:
            return steps, facts, None
        return self._bring_back(steps, facts)

    def _judged(
        self,
        wire_messages: DataFrame,
        steps: DataFrame,
        connections: DataFrame,
        counted: DataFrame,
        settled: Column,
    ) -> DataFrame:
        """Both sides compared, with `kept`: the verdict is final."""
        nodes = [node for node, times in self.hub_times.items() if times.ledgers]
        horizons = {
            node: min(times.taps, times.ledgers)
            for node, times in self.hub_times.items()
            if times.taps and times.ledgers
        }
        unreported = steps.where("NOT is_reported").select("node", F.col("seq").alias("position"))
        in_ledger = reconciling.ledger_passages(steps)
        rows = reconciling.both_sides(
            wire_messages.where(F.col("node").isin(nodes)),
            in_ledger.join(unreported, ["node", "position"], "left_semi"),
            connections,
        )
        both = reconciling.compare(
            rows, F.min("is_over").alias("is_over"), wire_columns=_OF_WIRE
        ).withColumn("horizon", self._by_node(horizons))
        judged = reconciling.judge(both, counted, self._missing)
        judged = judged.withColumn(KEPT, _is_final(settled))
        conditions = {name: F.col("verdict") == name for name in VERDICTS}
        conditions[OTHER_PAYLOAD] = ~reconciling.same_payload()
        conditions[DAMAGED_ANSWERS] = reconciling.is_damaged_answer(
            F.coalesce(F.col("wire.kind"), F.col("ledger.kind")), F.col("ledger.intact")
        )
        return self._counted(
            "judged",
            judged,
            {name: each & ~F.col("left_out") for name, each in conditions.items()},
            lambda rows: self._staging.work("judged", rows),
        )

    def _counted(
        self,
        name: str,
        rows: DataFrame,
        conditions: Mapping[str, Column],
        write: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        """Write rows and add those that meet the conditions to the findings, in one pass."""
        found = Observation(name)
        kept = F.col(KEPT)
        metrics = [
            F.count_if(condition & (kept if flag else ~kept)).alias(f"{finding} {flag}")
            for finding, condition in conditions.items()
            for flag in (True, False)
        ]
        made = write(rows.observe(found, *metrics))
        for finding in conditions:
            for flag in (True, False):
                counts = self.findings[flag]
                counts[finding] = counts.get(finding, 0) + found.get[f"{finding} {flag}"]
        return made

    # Messages.

    def _with_settled(
        self,
        steps: DataFrame,
        judged: DataFrame | None,
        connections: DataFrame,
        settled: Column,
    ) -> DataFrame:
        """Steps, with `is_reported` brought up to date, and `is_settled`: no row that is still to
        be read can change what gold.deliveries has of their message, unless it is open."""
        flagged, pending = steps, None
        if judged is not None:
            reported = judged.where(KEPT).select("node", F.col("ledger.position").alias("seq"))
            # Passages on connections that were not tapped have no partner to wait for.
            untapped = (
                reconciling.ledger_passages(steps)
                .join(connections, list(_CONNECTION), "left_anti")
                .where(F.col("time") < settled)
                .select("node", F.col("position").alias("seq"))
            )
            now = reported.unionByName(untapped).where(F.col("seq").isNotNull())
            now = now.distinct().withColumn("now", F.lit(True))
            is_reported = F.col("is_reported") | F.coalesce("now", F.lit(False))
            flagged = steps.join(now, ["node", "seq"], "left")
            flagged = flagged.withColumn("is_reported", is_reported)
            # Where the protocol gives the hub's id, a message on the wire whose verdict is not
            # final keeps its message alive, even if the ledger is complete.
            pending = (
                judged.where(~F.col(KEPT) & F.col("wire.id").isNotNull())
                .select("node", F.col("wire.id").alias("id"))
                .distinct()
                .withColumn("pending", F.lit(True))
            )
        own = Window.partitionBy(*_MESSAGE)
        waits = F.max(reconciling.is_passage() & ~F.col("is_reported")).over(own)
        is_settled = ~waits & (F.max("time").over(own) < settled)
        flagged = flagged.withColumn("is_settled", is_settled)
        if pending is not None:
            flagged = flagged.join(pending, list(_MESSAGE), "left").withColumn(
                "is_settled", F.col("is_settled") & F.col("pending").isNull()
            )
        columns = [*steps.columns, "is_settled"]
        return self._staging.work("settled_steps", flagged.select(*columns))

    def _list_steps(self, steps: DataFrame, connections: DataFrame, settled: Column) -> None:
        """Write gold.steps: a step is final when all that its row shows must have been read."""
        rows = gold_steps(steps.where("NOT is_listed"), connections if self._has_wire else None)
        self._staging.write("steps", rows.withColumn(KEPT, F.col("time") < settled))

    def _deliveries(
        self, steps: DataFrame, facts: DataFrame, reconciled: DataFrame | None, settled: Column
    ) -> DataFrame:
        """Write gold.deliveries; returns the messages that the next batch needs again."""
        newest = self._by_node({node: times.ledgers for node, times in self.hub_times.items()})
        is_settled = steps.groupBy(*_MESSAGE).agg(F.min("is_settled").alias("is_settled"))
        own = Window.partitionBy(*_MESSAGE)
        # All hops of a message become final together: a step that brings a dropped message back
        # replaces all of its rows.
        rows = (
            hops(
                steps.withColumn("newest", newest),
                reconciled,
                late_us=self._late_us,
                missing=self._missing,
            )
            .join(is_settled, list(_MESSAGE))
            .withColumn(KEPT, F.col("is_settled") & ~F.max("is_open").over(own))
            .drop("is_settled")
        )
        with_ledger = facts.where(newest > 0)
        alone = unrecorded(with_ledger, steps.select(*_MESSAGE).distinct(), newest, self._missing)
        alone = alone.withColumn(KEPT, F.col("accepted") < settled)
        rows = rows.unionByName(alone, allowMissingColumns=True)
        if self._new_input.missing:
            ranges = missing_ranges(self._spark, self._new_input.missing)
            rows = rows.unionByName(ranges.withColumn(KEPT, F.lit(True)), allowMissingColumns=True)
        table = F.when(F.col("is_open"), _DELIVERIES[1]).otherwise(_DELIVERIES[0])
        rows = rows.withColumn(TARGET_TABLE, table)

        def write(rows: DataFrame) -> DataFrame:
            if "deliveries" not in self._chosen:
                return self._staging.work("deliveries", rows)
            self._staging.write("deliveries", rows)
            return self._staging.read("deliveries")

        faults = {
            name: F.coalesce(F.expr(sql), F.lit(False)) for name, sql in DELIVERY_FAULTS.items()
        }
        made = self._counted("deliveries", rows, faults, write)
        # Envelopes without a step are carried on their own: see `_carried`.
        waiting = made.where(~F.col(KEPT) & (F.col("outcome") != UNKNOWN)).select(*_MESSAGE)
        # Answers have no row in gold.deliveries, but their steps may not be settled yet.
        return waiting.union(steps.where("NOT is_settled").select(*_MESSAGE)).distinct()

    def _carried(
        self,
        steps: DataFrame,
        live: DataFrame,
        facts: DataFrame,
        connections: DataFrame,
        judged: DataFrame | None,
        settled: Column,
    ) -> dict[str, DataFrame]:
        """The state for the next batch, of the messages that are `live`."""
        # An envelope may be sealed before its first step: it is kept until the step must be there.
        early = facts.where(F.col("time") >= settled).join(
            steps.select(*_MESSAGE), list(_MESSAGE), "left_anti"
        )
        steps = steps.join(live, list(_MESSAGE), "left_semi")
        steps = steps.withColumn("is_listed", F.col("is_listed") | (F.col("time") < settled))
        over = F.col("is_over") & (F.col("last_time") < settled)
        # The answer to a request passes over the connection of the caller. It may be recorded
        # after that connection was over, so callers stay while their request is live.
        callers = steps.where(F.col("step") == ACCEPTED).select(*_CONNECTION)
        parts = {
            STEPS: steps,
            ENVELOPES: facts.join(live, list(_MESSAGE), "left_semi").unionByName(early),
            CONNECTIONS: connections.where(~over).unionByName(
                connections.where(over).join(callers, list(_CONNECTION), "left_semi")
            ),
        }
        if judged is not None:
            wire = judged.where(~F.col(KEPT) & F.col(f"wire.{KEPT}"))
            names = [name for name in PARTS[WIRE_MESSAGES] if name not in ("node", "way", "side")]
            parts[WIRE_MESSAGES] = wire.select(
                "node", "way", F.lit("wire").alias("side"), *(f"wire.{name}" for name in names)
            )
        return parts

    # Messages that were dropped from the state.

    def _bring_back(
        self, steps: DataFrame, facts: DataFrame
    ) -> tuple[DataFrame, DataFrame, DataFrame | None]:
        """Like `_steps`, after reading the earlier steps of dropped messages from the lake, or, of
        those that retention has removed there, from their rows in gold.deliveries.

        Only rows up to the last commit are read: those after it are in `steps` already.
        """
        last = self._output.last
        assert last is not None
        wanted = steps.where("is_dropped").select(*_MESSAGE).distinct()
        wanted = self._staging.work("wanted", wanted)
        between = _near(wanted)
        history = self._history(wanted, between)
        old = self._output.rows_of(_DELIVERIES[0], self._output.kept(_DELIVERIES[0]))
        if last.position.messages:
            envelopes = self._read(last.position.rows("messages"), MESSAGES).where(between)
            again = message_facts(envelopes).join(wanted, list(_MESSAGE), "left_semi")
            facts = self._staging.work("facts", union_of(facts, again))
        if old is not None:
            begun = history.where(F.col("step") == ACCEPTED).select(*_MESSAGE)
            lost = wanted.join(begun, list(_MESSAGE), "left_anti")
            recalled = self._staging.work(
                "recalled", old.where(between).join(lost, list(_MESSAGE), "left_semi")
            )
            # The row stands for all steps before it, also for those that the lake still has.
            history = history.join(recalled, list(_MESSAGE), "left_anti")
            history = union_of(history, recalled_steps(recalled))
            unknown = recalled_facts(recalled).join(facts, list(_MESSAGE), "left_anti")
            facts = self._staging.work("all_facts", union_of(facts, unknown))
        done = {"is_reported": F.lit(True), "is_listed": F.lit(True), "is_new": F.lit(False)}
        history = history.withColumns(done)
        dropped = steps.where("is_dropped").select(*PARTS[STEPS], "is_new")
        whole = with_facts(union_of(dropped, history), facts)
        steps = union_of(steps.where("NOT is_dropped"), whole)
        steps = self._staging.work("steps_again", steps.drop("is_dropped"))
        if "deliveries" in self._chosen:
            self._remove_deliveries(wanted, between)
        if "reconciliation" not in self._chosen:
            return steps, facts, None
        files = self._output.kept(_RECONCILIATION)
        passages = self._output.rows_of(_RECONCILIATION, files)
        if passages is not None:
            passages = passages.where(between).select(*PARTS[PASSAGES])
            passages = passages.join(wanted, list(_MESSAGE), "left_semi")
        return steps, facts, passages

    def _history(self, wanted: DataFrame, between: Column) -> DataFrame:
        """The steps of these messages that the lake still has."""
        last = self._output.last
        assert last is not None
        ledger = self._read(last.position.rows("ledgers"), LEDGER)
        own = ledger.where(between).join(wanted, list(_MESSAGE), "left_semi")
        own = self._staging.work("history", own)
        # `with_origins` needs the neighbours of moved messages and answers, which have other ids.
        bounds = (
            own.where(F.col("step") == ACCEPTED)
            .groupBy("node")
            .agg(F.min("seq").alias("low"), F.max("seq").alias("high"))
            .collect()
        )
        if not bounds:
            return with_origins(own)
        near = F.lit(False)
        for row in bounds:
            is_near = F.col("seq").between(row.low - 1, row.high + 1)
            near |= (F.col("node") == row.node) & is_near
        neighbours = ledger.where(near & F.col("step").isin(DEAD, ANSWERED))
        sent_again = wanted.select("node", F.col("id").alias("sent_as"))
        replays = ledger.where(F.col("step") == REPLAYED).withColumn("sent_as", sent_again_as())
        replays = replays.join(sent_again, ["node", "sent_as"], "left_semi").drop("sent_as")
        others = neighbours.unionByName(replays)
        others = others.join(wanted, list(_MESSAGE), "left_anti")
        history = with_origins(own.unionByName(others))
        return history.join(wanted, list(_MESSAGE), "left_semi")

    def _remove_deliveries(self, wanted: DataFrame, between: Column) -> None:
        """Take the `wanted` messages out of gold.deliveries: they are written again, with the new
        steps. The other rows of their files are copied to new files, and the old ones replaced."""
        table = _DELIVERIES[0]
        files = self._output.kept(table)
        rows = self._output.rows_of(table, files)
        if rows is None:
            return
        found = rows.select("*", F.col("_metadata.file_path").alias("file")).where(between)
        found = found.join(wanted, list(_MESSAGE), "left_semi").select("file").distinct()
        # As URLs, with escapes: names and folders of dates have nothing to escape.
        holding = {_last_parts(row.file) for row in found.collect()}
        self.replaced_files = [path for path in files if _last_parts(path) in holding]
        if not self.replaced_files:
            return
        before = self._output.rows_of(table, self.replaced_files)
        assert before is not None
        rest = before.join(wanted, list(_MESSAGE), "left_anti").withColumn(KEPT, F.lit(True))
        self._staging.write("deliveries", rest, folder="deliveries_again")
        counts = [F.count_if(F.expr(sql)).alias(name) for name, sql in DELIVERY_FAULTS.items()]
        gone = before.join(wanted, list(_MESSAGE), "left_semi").agg(*counts).collect()[0]
        # Their findings and rows were added by an earlier batch, and will be added again.
        self.findings[True] |= {name: -gone[name] for name in DELIVERY_FAULTS}
        self._staging.subtract(table, before.count())


def _last_parts(path: str) -> tuple[str, ...]:
    """The folder of the date and the name of a file, which no other file of a table has."""
    return tuple(path.split("/")[-2:])


def _near(wanted: DataFrame) -> Column:
    """A condition that holds for the ids of these messages, and lets Parquet skip most others.

    Ids grow with time, so few ranges cover many messages that are called back together.
    """
    step = F.floor(F.col("id") / _ID_RANGE)
    ranges = (
        wanted.groupBy(step).agg(F.min("id").alias("low"), F.max("id").alias("high")).orderBy("low")
    ).limit(_MOST_RANGES + 1)
    found = [(row.low, row.high) for row in ranges.collect()]
    if len(found) > _MOST_RANGES:
        low, high = wanted.agg(F.min("id"), F.max("id")).collect()[0]
        found = [(low, high)]
    condition = F.lit(False)
    for low, high in found:
        condition |= F.col("id").between(low, high)
    return condition


def _is_final(settled: Column) -> Column:
    """Whether no row that is still to be read can change a verdict.

    It must be older than the watermark on both sides, and not rest on provisional rows. Then it is
    final if the connection is over, or if it can't change although the connection goes on: both
    sides have it, or they can't be compared, or the hub has refused it.
    """
    wire, ledger = F.col("wire"), F.col("ledger")
    is_old = F.greatest(wire["time"], ledger["time"]) < settled
    is_kept = F.coalesce(wire[KEPT], F.lit(True))
    is_decided = F.coalesce(~wire["undecided"], F.lit(True))
    both = wire.isNotNull() & ledger.isNotNull()
    resumed = (wire["protocol"] == "relink") & wire["sequence"].isNull()
    hopeless = ~F.col("whole") | F.coalesce(resumed, F.lit(False))
    refused = F.col("verdict").isin(NOT_ACCEPTED, WITHDRAWN)
    certain = is_decided & (both | hopeless | refused | F.col("left_out"))
    return is_old & is_kept & (F.col("is_over") | certain)
