"""The registry of tables: what each is made of, and the one way in which runs make them.

A batch over all input and a batch of a stream go through the same steps with the same functions.
They differ in what a driver gives them: where rows are written, what earlier batches have handed
on, and how the rows of a hub's ledger are compared with the wire, at once or bit by bit.

    decoded rows ─▶ frames, messages, violations, directions
    directions, frames, violations ─▶ counts ─▶ accounting, sessions
    messages, directions, principals ─▶ conversations ─▶ traffic
    messages, directions ─▶ topology
    ledger, envelopes, messages, frames, directions ─▶ reconciliation ─▶ deliveries
    ledger, envelopes, directions ─▶ steps ─▶ minutes ─▶ depth, lag

All rows have `kept` (see `finality`): true for every row where the input is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import OPEN
from crosswire.pipeline.summary import MINUTE_TABLES, ONLY_RECORDS
from crosswire.pipeline.tables import tallies as tally_table
from crosswire.pipeline.tables import topology as topology_table
from crosswire.pipeline.tables import traffic as traffic_table
from crosswire.pipeline.tables.accounting import accounting, check_sums, summed
from crosswire.pipeline.tables.carry_over import CarriedCalls, Counts, Edges
from crosswire.pipeline.tables.conversations import conversations
from crosswire.pipeline.tables.directions import directions
from crosswire.pipeline.tables.finality import KEPT, TARGET_TABLE, Split, union_of
from crosswire.pipeline.tables.frames import frames
from crosswire.pipeline.tables.messages import from_hub, messages
from crosswire.pipeline.tables.sessions import by_session
from crosswire.pipeline.tables.violations import violations

__all__ = ["DayTotals", "DecodedBatch", "DecodedTables", "TableDriver", "TableRun"]

Work = Callable[[], None]

_SILVER: Final[dict[str, Callable[[DataFrame], DataFrame]]] = {
    "frames": frames,
    "messages": messages,
    "violations": violations,
}
"""The tables that are a selection of decoded rows."""


@dataclass(frozen=True)
class DecodedBatch:
    """What the tables of the ledger need of the wire: silver.messages with `kept`, final rows of
    silver.frames, the directions of all connections that are not over, and their counts."""

    messages: DataFrame
    frames: DataFrame
    directions: DataFrame
    counts: Counts


@dataclass(frozen=True)
class DayTotals:
    """A table whose rows are sums, so that a stream replaces whole days of it.

    fold     makes rows of the table from partial sums, which may be united in any way
    unfold   makes partial sums from rows of the table
    minute   the column of the partial sums that has their minute, µs
    """

    name: str
    fold: Callable[[DataFrame], DataFrame]
    unfold: Callable[[DataFrame], DataFrame]
    minute: str = "minute"


_TRAFFIC: Final = DayTotals("traffic", traffic_table.folded, traffic_table.unfolded)


class TableDriver(Protocol):
    """What distinguishes a batch over all input from a batch of a stream."""

    silver_first: bool
    """Silver tables are written before the others, which then read them from disk."""

    is_first: bool
    """Tables must be made even if they have no rows."""

    def wants(self, *names: str) -> bool:
        """Whether any of these tables is to be written."""

    def run(self, work: Sequence[Work]) -> None:
        """Do all of it, in order or side by side."""

    def step(self, name: str) -> AbstractContextManager[None]:
        """Work that writes no table, by its name among the steps of a run."""

    def write(self, name: str, rows: DataFrame) -> DataFrame:
        """Write rows with `kept`, each to its TARGET_TABLE if the table has open rows. Returns them
        as read back, with `kept`: what is made of them does not compute them again."""

    def keep(self, name: str, rows: DataFrame) -> DataFrame:
        """Rows of a table that is not wanted, but several others are made of."""

    def counts(self, directions: DataFrame, frames: Split, violations: Split) -> Counts:
        """The counts of all connections that are not over."""

    def packet_rows(self) -> DataFrame | None:
        """Rows of gold.accounting about the packets of captures, with `kept`."""

    def begin(self, directions: DataFrame) -> None:
        """Called when the directions are known, before all other tables are made."""

    def principals(self) -> DataFrame | None:
        """As whom connections signed in (`principals`); None if there is no ledger."""

    def for_traffic(self, messages: DataFrame) -> Split:
        """Messages to add to gold.traffic now, and those whose principal is not decided yet."""

    def calls(self, directions: DataFrame, messages: DataFrame) -> CarriedCalls:
        """The requests and responses that may be paired now."""

    def edges(self, directions: DataFrame, messages: DataFrame) -> Edges:
        """The edges of all connections."""

    def add_to_days(
        self, totals: DayTotals, fresh: DataFrame, provisional: DataFrame | None
    ) -> None:
        """Add partial sums to a table; `provisional` ones are shown until the next batch."""

    def ledger_tables(self, wire: DecodedBatch | None) -> None:
        """Write the tables that are made of a hub's ledger, if there is one."""


class DecodedTables:
    """The silver tables in decoded rows with `kept`."""

    def __init__(
        self, decoded: DataFrame, *, has_provisional: bool = False, has_violations: bool = True
    ) -> None:
        self._decoded = decoded
        self._has_provisional = has_provisional
        self._written: dict[str, DataFrame] = {}
        self.has_violations = has_violations
        self.directions = union_of(
            directions(decoded.where(KEPT)).withColumn(KEPT, F.lit(True)),
            directions(decoded.where(~F.col(KEPT))).withColumn(KEPT, F.lit(False)),
        )
        """The directions of all connections that were not over before, whether there are new rows
        of them or not."""

    def use(self, name: str, rows: DataFrame) -> None:
        """Take a table from these rows, which were written, from now on."""
        self._written[name] = rows

    def split(self, name: str) -> Split:
        """The final rows of a table, and the provisional ones: None spares queries without rows."""
        written = self._written.get(name)
        final, provisional = (
            _SILVER[name](self._decoded.where(kept)) if written is None else written.where(kept)
            for kept in (F.col(KEPT), ~F.col(KEPT))
        )
        return final.drop(KEPT), provisional.drop(KEPT) if self._has_provisional else None

    def rows(self, name: str) -> DataFrame:
        """All rows of a table, with `kept`."""
        final, provisional = self.split(name)
        if provisional is not None:
            provisional = provisional.withColumn(KEPT, F.lit(False))
        return union_of(final.withColumn(KEPT, F.lit(True)), provisional)


class TableRun:
    """One run over the registry, with the driver of a batch or of a stream.

    `accounts` has the sums of gold.accounting by protocol (True: of final rows, False: of
    provisional ones), `refused` the connections that were refused, alike.
    """

    def __init__(self, driver: TableDriver) -> None:
        self._driver = driver
        self.accounts: dict[bool, dict[str, dict[str, int]]] = {True: {}, False: {}}
        self.refused = {True: 0, False: 0}

    def from_wire(self, tables: DecodedTables) -> None:
        """Write all tables of decoded bytes. Raises BytesMissing if bytes don't add up."""
        driver = self._driver
        wants_directions = driver.wants("directions")
        keep = driver.write if wants_directions else driver.keep
        tables.directions = keep("directions", tables.directions)
        driver.begin(tables.directions)
        silver: list[Work] = [
            lambda name=name: self._silver(tables, name)  # type: ignore[misc]
            for name in _SILVER
            if driver.wants(name)
            and (name != "violations" or tables.has_violations or driver.is_first)
        ]
        # The longest first, for a driver that does several at a time.
        others: list[Work] = [lambda: self._counted(tables)]
        if driver.wants("conversations", "traffic"):
            others.append(lambda: self._conversations(tables))
        if driver.wants("topology"):
            others.append(lambda: self._topology(tables))
        if driver.silver_first:
            driver.run(silver)
            driver.run(others)
        else:
            driver.run([*others, *silver])

    def from_records(self, envelopes: DataFrame | None) -> None:
        """Write the tables of a hub that did not tap its connections."""
        if not self._driver.wants("messages", "deliveries", "steps", *MINUTE_TABLES):
            raise InvalidInput(ONLY_RECORDS)
        if envelopes is not None and self._driver.wants("messages"):
            self._driver.write("messages", from_hub(envelopes).withColumn(KEPT, F.lit(True)))
        self._driver.ledger_tables(None)

    def _silver(self, tables: DecodedTables, name: str) -> None:
        written = self._driver.write(name, tables.rows(name))
        if self._driver.silver_first:
            tables.use(name, written)

    def _counted(self, tables: DecodedTables) -> None:
        """What needs the counts of connections: accounting, sessions, and the ledger's tables."""
        frame_rows, violation_rows = tables.split("frames"), tables.split("violations")
        counts = self._driver.counts(tables.directions, frame_rows, violation_rows)
        wire = DecodedBatch(tables.rows("messages"), frame_rows[0], tables.directions, counts)

        def of_connections() -> None:
            self._account(tables.directions, counts, frame_rows, violation_rows)
            if self._driver.wants("sessions"):
                rows = by_session(counts.connections, F.bool_and("final").alias(KEPT))
                is_open = F.col("ended") == OPEN
                self._driver.write(
                    "sessions", rows.withColumn(TARGET_TABLE, _target("sessions", is_open))
                )

        self._driver.run([lambda: self._driver.ledger_tables(wire), of_connections])

    def _account(
        self, direction_rows: DataFrame, counts: Counts, frame_rows: Split, violation_rows: Split
    ) -> None:
        """Write gold.accounting and check its sums. Raises BytesMissing."""
        tallies = counts.tallies
        if frame_rows[1] is not None and violation_rows[1] is not None:
            provisional = tally_table.tallies(frame_rows[1], violation_rows[1])
            tallies = tally_table.combined(union_of(tallies, provisional))
        parts = [
            accounting(direction_rows.where(F.col(KEPT) == kept), tallies).withColumn(
                KEPT, F.lit(kept)
            )
            for kept in (True, False)
        ]
        rows = union_of(*parts, self._driver.packet_rows())
        if self._driver.wants("accounting"):
            rows = self._driver.write("accounting", rows)
        with self._driver.step("adding up bytes"):
            for row in summed(rows, KEPT).collect():
                self.accounts[row[KEPT]][row.protocol or ""] = check_sums(row)
                self.refused[row[KEPT]] += row.refused

    def _conversations(self, tables: DecodedTables) -> None:
        """Write gold.conversations, and gold.traffic with their latencies.

        Conversations with both sides, and unanswered ones of connections that are over, are final.
        The others are paired again in each batch, together with the provisional messages.
        """
        final, provisional = tables.split("messages")
        calls = self._driver.calls(tables.directions, final)
        known = self._driver.principals()
        rows = conversations(calls.settled, tables.directions, known)
        rows = rows.withColumn(KEPT, F.lit(True))
        if calls.waiting is not None:
            waiting = union_of(calls.waiting, provisional)
            waiting = conversations(waiting, tables.directions, known)
            rows = union_of(rows, waiting.withColumn(KEPT, F.lit(False)))
        if self._driver.wants("conversations"):
            target = _target("conversations", F.col("is_open"))
            rows = self._driver.write("conversations", rows.withColumn(TARGET_TABLE, target))
        if self._driver.wants("traffic"):
            self._traffic((final, provisional), rows, tables.directions)

    def _traffic(
        self, message_rows: Split, conversation_rows: DataFrame, direction_rows: DataFrame
    ) -> None:
        known = self._driver.principals()
        final, undecided = self._driver.for_traffic(message_rows[0])
        fresh = traffic_table.partials(final, conversation_rows.where(KEPT), direction_rows, known)
        provisional = None
        if message_rows[1] is not None or undecided is not None:
            messages = union_of(message_rows[1], undecided)
            answers = conversation_rows.where(~F.col(KEPT))
            provisional = traffic_table.partials(messages, answers, direction_rows, known)
        self._driver.add_to_days(_TRAFFIC, fresh, provisional)

    def _topology(self, tables: DecodedTables) -> None:
        """Write gold.topology: all of it each time, since any edge may have grown."""
        final, provisional = tables.split("messages")
        carried = self._driver.edges(tables.directions, final)
        edges = carried.of_connections
        if provisional is not None:
            new = topology_table.edges(provisional, tables.directions)
            edges = topology_table.combined(union_of(edges, new))
        edges = edges.withColumn("connections", F.lit(1).cast("bigint"))
        rows = topology_table.by_edge(union_of(carried.totals, edges))
        self._driver.write("topology", rows.withColumn(KEPT, F.lit(False)))


def _target(name: str, is_open: Column) -> Column:
    """TARGET_TABLE of a table with open rows."""
    return F.when(is_open, f"open.{name}").otherwise(f"gold.{name}")
