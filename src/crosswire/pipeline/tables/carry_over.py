"""What a batch hands on to the next one of its stream, beside the state of its decoders.

    state     rows                                               carried until
    counts    tallies of each direction                          its connection is over
              connections, as gold.sessions groups them          its session is final
              the latest start of each hub                       for good
    calls     requests and responses without partner             they are paired, or it is over
    principals connections, as whom they signed in               it is over
    undecided messages whose principal is not known yet          it is known, or never will be
    edges     edges of each connection                           it is over, then added to …
              totals of gold.topology                            … for good

Only final rows (`kept`) are ever added to this state. What is provisional, because a later batch
may see a cut-off frame continue, is added up with the state when a table is written, and then
dropped: the next batch computes it again. So each batch writes what a batch over all input up to
here would, and the state never has to be undone.

The state is read once, at the start of a batch, and becomes valid with the commit of the batch. A
batch that is killed and repeated starts from the state of the last commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.envelope import MICROSECONDS
from crosswire.pipeline.decode.meanings.contract import REQUEST
from crosswire.pipeline.tables import tallies as tally_table
from crosswire.pipeline.tables import topology as topology_table
from crosswire.pipeline.tables.conversations import CALL, CALL_COLUMNS, calls, with_partner
from crosswire.pipeline.tables.finality import KEPT, PART, Split, union_of
from crosswire.pipeline.tables.sessions import connections, latest_starts, with_killed

__all__ = [
    "CALLS",
    "COUNTS",
    "EDGES",
    "LINK_US",
    "PRINCIPALS",
    "UNDECIDED",
    "CarriedCalls",
    "Counts",
    "Edges",
]

LINK_US: Final = 24 * 3600 * MICROSECONDS
"""How long after its last connection a Relink link may be resumed and still be one session."""

# Names of states and of their parts are stored: a stream goes on with what an older version wrote.
COUNTS: Final = "counts"
CALLS: Final = "said"
EDGES: Final = "edges"
PRINCIPALS: Final = "principals"
UNDECIDED: Final = "undecided"
_TALLIES: Final = "tallies"
_CONNECTIONS: Final = "connections"
_STARTS: Final = "starts"
_EDGES: Final = "edges"
_TOTALS: Final = "totals"

_CONNECTION: Final = ("node", "connection")


def _with_over(rows: DataFrame, directions: DataFrame) -> DataFrame:
    """Rows with `over`: no later batch can have more of their connection.

    The decoder marks the summary of a direction as final only when its connection is over.
    """
    ended = directions.where(KEPT).select(*_CONNECTION).distinct().withColumn("over", F.lit(True))
    marked = rows.join(ended, list(_CONNECTION), "left")
    return marked.withColumn("over", F.coalesce("over", F.lit(False)))


@dataclass(frozen=True)
class Counts:
    """Tallies of final rows, by direction; and connections as `tables.sessions` has them,
    provisional rows included, with `final`: of a session that is complete."""

    tallies: DataFrame
    connections: DataFrame

    @staticmethod
    def carried(rows: DataFrame) -> Counts:
        """The counts in the rows that `carry` returned."""
        parts = (rows.where(F.col(PART) == name) for name in (_TALLIES, _CONNECTIONS))
        return Counts(*parts)

    @staticmethod
    def whole(
        directions: DataFrame, tallies: DataFrame, of_ledger: DataFrame | None = None
    ) -> Counts:
        """The counts of all input at once; `of_ledger` are the connections in the ledger."""
        found = connections(directions, tallies)
        found = with_killed(found, latest_starts(directions, of_ledger))
        return Counts(tallies, found.withColumn("final", F.lit(True)))

    @staticmethod
    def carry(
        before: DataFrame | None,
        directions: DataFrame,
        frames: Split,
        violations: Split,
        *,
        of_ledger: DataFrame | None = None,
        now_us: int,
    ) -> DataFrame:
        """The state after a batch, from the state before it and the batch's own rows.

        `directions` are those of all connections that were not over before the batch, whether it
        has new rows of them or not; `of_ledger` are connections in its part of the ledger;
        `now_us` is the watermark.
        """
        old = None if before is None else Counts.carried(before)
        # Tallies of connections that were over are not needed again: their rows are in gold.
        known = None if old is None else old.tallies.where(~F.col("over"))
        new = tally_table.tallies(frames[0], violations[0])
        tallies = tally_table.combined(union_of(known, new))
        with_provisional = tallies
        if frames[1] is not None and violations[1] is not None:
            provisional = tally_table.tallies(frames[1], violations[1])
            with_provisional = tally_table.combined(union_of(tallies, provisional))
        current = connections(directions, with_provisional, F.bool_and(KEPT).alias(KEPT))
        # A connection of a link that is over has no rows any more, but a later connection may
        # resume the link, and its session counts both.
        of_links = None
        if old is not None:
            of_links = old.connections.where(F.col(KEPT) & ~F.col("final"))
            of_links = of_links.select(*current.columns)
        # A connection of a hub that was killed stays provisional: its last bytes may be read after
        # a row of the ledger that shows the next start.
        starts = latest_starts(directions, of_ledger)
        if before is not None:
            known_starts = before.where(F.col(PART) == _STARTS)
            if "latest_start" in before.columns:
                starts = union_of(starts, known_starts.select("node", "latest_start"))
                starts = starts.groupBy("node").agg(F.max("latest_start").alias("latest_start"))
        sessions = with_killed(union_of(of_links, current), starts)
        sessions = sessions.withColumn("final", _is_final(now_us))
        return union_of(
            starts.withColumn(PART, F.lit(_STARTS)),
            _with_over(tallies, directions).withColumn(PART, F.lit(_TALLIES)),
            sessions.withColumn(PART, F.lit(_CONNECTIONS)),
        )


@dataclass(frozen=True)
class CarriedCalls:
    """Requests and responses: `settled` rows give final conversations now; `waiting` ones are
    carried on, because their partner may still come, or the row of the ledger that names their
    principal."""

    settled: DataFrame
    waiting: DataFrame | None = None

    @staticmethod
    def carried(rows: DataFrame) -> CarriedCalls:
        """The calls in the rows that `carry` returned."""
        settled = (F.col("matched") | F.col("over")) & F.col("decided")
        return CarriedCalls(rows.where(settled), rows.where(~settled))

    @staticmethod
    def carry(
        before: DataFrame | None,
        directions: DataFrame,
        messages: DataFrame,
        decide: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        """The state after a batch, from the state before it and the batch's final messages;
        `decide` gives rows `decided`: their principal is known, or will never be."""
        # Turns are counted again in every batch, from 1. That is right because a settled pair
        # leaves with both of its rows: the n-th request that still waits is still the partner of
        # the n-th response.
        known = None if before is None else CarriedCalls.carried(before).waiting
        known = None if known is None else known.select(*CALL_COLUMNS)
        rows = calls(union_of(known, messages.select(*CALL_COLUMNS)))
        rows = decide(with_partner(rows))
        # Both rows of a call leave together, so the request decides for both.
        call = Window.partitionBy(*CALL, "turn")
        of_request = F.max(F.when(F.col("kind") == REQUEST, F.col("decided"))).over(call)
        rows = rows.withColumn("decided", F.coalesce(of_request, F.lit(True)))
        return _with_over(rows.select(*CALL_COLUMNS, "matched", "decided"), directions)


@dataclass(frozen=True)
class Edges:
    """Edges of gold.topology: of each connection that is not over, and the `totals` of those that
    are."""

    of_connections: DataFrame
    totals: DataFrame | None = None

    @staticmethod
    def carried(rows: DataFrame) -> Edges:
        """The edges in the rows that `carry` returned."""
        return Edges(
            rows.where((F.col(PART) == _EDGES) & ~F.col("over")),
            rows.where(F.col(PART) == _TOTALS),
        )

    @staticmethod
    def carry(before: DataFrame | None, directions: DataFrame, messages: DataFrame) -> DataFrame:
        """The state after a batch, from the state before it and the batch's final messages."""
        old = None if before is None else Edges.carried(before)
        known, totals = (None, None) if old is None else (old.of_connections, old.totals)
        new = topology_table.edges(messages, directions)
        edges = _with_over(topology_table.combined(union_of(known, new)), directions)
        # gold.topology counts connections: one may be added to the totals only once, and before
        # it is over later batches may still have messages of it. Hence edges by connection.
        ended = edges.where("over").withColumn("connections", F.lit(1).cast("bigint"))
        return union_of(
            edges.withColumn(PART, F.lit(_EDGES)),
            topology_table.by_edge(union_of(totals, ended)).withColumn(PART, F.lit(_TOTALS)),
        )


def _is_final(now_us: int) -> Column:
    """Whether the session of a connection is complete: all of its connections are over, and it is
    no Relink link that could be resumed. A link can't be after a goodbye, or after LINK_US."""
    session = Window.partitionBy("node", "session")
    order = F.struct("opened", "connection")
    no_link = F.max("link").over(session).isNull()
    goodbye = F.max_by("how", order).over(session) == "goodbye"
    silent = F.max("last").over(session) < now_us - LINK_US
    return F.bool_and(KEPT).over(session) & (no_link | goodbye | silent)
