"""What a batch of a stream hands on to the next one beside the states of its decoders.

Of connections that go on: their tallies, the requests and responses that have no partner yet, the
edges that they are part of. Of links: the connections that they had. Of the topology: what
connections that are over gave to it. All of it is added up with what is new, so that the tables
that are made of it are those of a batch over all there was.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.envelope import MICROSECONDS
from crosswire.pipeline.decode.readings.contract import REQUEST, RESPONSE
from crosswire.pipeline.stream.decoder_state import KEPT
from crosswire.pipeline.tables import tallies as counts
from crosswire.pipeline.tables import topology as graph
from crosswire.pipeline.tables.sessions import connections

__all__ = ["LINK_US", "PART", "CarriedCalls", "Counts", "Edges", "together"]

PART: Final = "part"
LINK_US: Final = 24 * 3600 * MICROSECONDS
"""How long after its last connection a Relink link may be resumed and still be one session."""

_TALLIES: Final = "tallies"
_CONNECTIONS: Final = "connections"
_EDGES: Final = "edges"
_TOTALS: Final = "totals"

_CONNECTION: Final = ("node", "connection")
_SAYING: Final = (
    "node",
    "connection",
    "direction",
    "offset",
    "time",
    "protocol",
    "kind",
    "destination",
    "correlation",
    "status",
    "payload_length",
)

Split = tuple[DataFrame, DataFrame | None]
"""Rows that are kept, and those that are not, if there are any."""


def together(*parts: DataFrame | None) -> DataFrame:
    """The rows of all that are there, columns by their names."""
    there = [part for part in parts if part is not None]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), there)


def _flagged(rows: DataFrame, directions: DataFrame) -> DataFrame:
    """`over`: of a connection that will say no more."""
    ended = directions.where(KEPT).select(*_CONNECTION).distinct().withColumn("over", F.lit(True))
    marked = rows.join(ended, list(_CONNECTION), "left")
    return marked.withColumn("over", F.coalesce("over", F.lit(False)))


class Counts:
    """Tallies of directions, and connections as `tables.sessions` has them."""

    def __init__(self, rows: DataFrame) -> None:
        self._rows = rows

    @property
    def tallies(self) -> DataFrame:
        return self._rows.where(F.col(PART) == _TALLIES)

    @property
    def connections(self) -> DataFrame:
        """`final`: of a session that nothing can be added to."""
        return self._rows.where(F.col(PART) == _CONNECTIONS)

    @staticmethod
    def carry(
        before: DataFrame | None,
        directions: DataFrame,
        frames: Split,
        violations: Split,
        *,
        now_us: int,
    ) -> DataFrame:
        """What was carried before, with what is new."""
        old = None if before is None else Counts(before)
        known = None if old is None else old.tallies.where(~F.col("over"))
        tallied = counts.combined(together(known, counts.tallies(frames[0], violations[0])))
        all_tallied = tallied
        if frames[1] is not None and violations[1] is not None:
            passing = counts.tallies(frames[1], violations[1])
            all_tallied = counts.combined(together(tallied, passing))
        current = connections(directions, all_tallied, F.bool_and(KEPT).alias(KEPT))
        linked = None
        if old is not None:
            linked = old.connections.where(F.col(KEPT) & ~F.col("final")).select(*current.columns)
        held = together(linked, current).withColumn("final", _is_final(now_us))
        return together(
            _flagged(tallied, directions).withColumn(PART, F.lit(_TALLIES)),
            held.withColumn(PART, F.lit(_CONNECTIONS)),
        )


class CarriedCalls:
    """Requests and responses; `matched`: it has a partner."""

    def __init__(self, rows: DataFrame) -> None:
        settled = F.col("matched") | F.col("over")
        self.settled = rows.where(settled)
        self.waiting = rows.where(~settled)

    @staticmethod
    def carry(before: DataFrame | None, directions: DataFrame, messages: DataFrame) -> DataFrame:
        known = None if before is None else CarriedCalls(before).waiting.select(*_SAYING)
        is_call = F.col("kind").isin(REQUEST, RESPONSE) & F.col("correlation").isNotNull()
        calls = together(known, messages.where(is_call).select(*_SAYING))
        return _flagged(_matched(calls), directions)


class Edges:
    """Edges of connections, and in `totals` those of all that are over."""

    def __init__(self, rows: DataFrame) -> None:
        self._rows = rows

    @property
    def held(self) -> DataFrame:
        return self._rows.where((F.col(PART) == _EDGES) & ~F.col("over"))

    @property
    def totals(self) -> DataFrame:
        return self._rows.where(F.col(PART) == _TOTALS)

    @staticmethod
    def carry(before: DataFrame | None, directions: DataFrame, messages: DataFrame) -> DataFrame:
        old = None if before is None else Edges(before)
        known, totals = (None, None) if old is None else (old.held, old.totals)
        edges = _flagged(
            graph.combined(together(known, graph.edges(messages, directions))), directions
        )
        ended = edges.where("over").withColumn("connections", F.lit(1).cast("bigint"))
        return together(
            edges.withColumn(PART, F.lit(_EDGES)),
            graph.by_edge(together(totals, ended)).withColumn(PART, F.lit(_TOTALS)),
        )


def _is_final(now_us: int) -> Column:
    """Nothing can be added to the session of a connection. A link may get another connection, until
    it has been said goodbye to, or has been silent for long."""
    session = Window.partitionBy("node", "session")
    order = F.struct("opened", "connection")
    no_link = F.max("link").over(session).isNull()
    goodbye = F.max_by("how", order).over(session) == "goodbye"
    silent = F.max("last").over(session) < now_us - LINK_US
    return F.bool_and(KEPT).over(session) & (no_link | goodbye | silent)


def _matched(calls: DataFrame) -> DataFrame:
    """The n-th request of a correlation goes with the n-th response to it: both are there if n is
    not above the number of either."""
    is_request = F.col("kind") == REQUEST
    key = ("node", "connection", "asker", "correlation")
    other = F.when(F.col("direction") == "forward", "backward").otherwise("forward")
    every = Window.partitionBy(*key)
    turn = F.row_number().over(Window.partitionBy(*key, "kind").orderBy("offset"))
    requests = F.count_if(is_request).over(every)
    return (
        calls.withColumn("asker", F.when(is_request, F.col("direction")).otherwise(other))
        .withColumn("turn", turn)
        .withColumn("requests", requests)
        .withColumn("responses", F.count("*").over(every) - F.col("requests"))
        .withColumn("matched", F.col("turn") <= F.least("requests", "responses"))
        .select(*_SAYING, "matched")
    )
