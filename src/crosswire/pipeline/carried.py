"""What a batch of a stream hands on to the next one beside the states of its decoders.

Of connections that go on: their tallies, the requests and responses that have no partner yet, the
edges that they are part of. Of links: the connections that they had. Of the topology: what
connections that are over gave to it. All of it is added up with what is new, so that the tables
that are made of it are those of a batch over all there was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.protocols.contract import REQUEST, RESPONSE
from crosswire.pipeline.state import KEPT
from crosswire.pipeline.tables import tallies as counts
from crosswire.pipeline.tables import topology as graph
from crosswire.pipeline.tables.sessions import connections

__all__ = ["LINK_US", "PART", "Carried", "carry", "together"]

PART: Final = "part"
LINK_US: Final = 24 * 3600 * 1_000_000
"""How long after its last connection a Relink link may be resumed and still be one session."""

_TALLIES: Final = "tallies"
_CONNECTIONS: Final = "connections"
_SAID: Final = "said"
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


class Carried:
    """The rows that `carry` gives, by what they are."""

    def __init__(self, rows: DataFrame) -> None:
        self._rows = rows

    def _part(self, name: str) -> DataFrame:
        return self._rows.where(F.col(PART) == name)

    @property
    def tallies(self) -> DataFrame:
        """`over`: of a connection that will say no more; so in `said` and `edges`."""
        return self._part(_TALLIES)

    @property
    def connections(self) -> DataFrame:
        """As `tables.sessions` has them; `final`: of a session that nothing can be added to."""
        return self._part(_CONNECTIONS)

    @property
    def said(self) -> DataFrame:
        """Requests and responses; `matched`: it has a partner."""
        return self._part(_SAID)

    @property
    def edges(self) -> DataFrame:
        return self._part(_EDGES)

    @property
    def totals(self) -> DataFrame:
        """The edges of connections that are over."""
        return self._part(_TOTALS)


def together(*parts: DataFrame | None) -> DataFrame:
    """The rows of all that are there, columns by their names."""
    there = [part for part in parts if part is not None]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), there)


def carry(
    before: Carried | None,
    ways: DataFrame,
    frames: tuple[DataFrame, DataFrame | None],
    violations: tuple[DataFrame, DataFrame | None],
    messages: DataFrame,
    *,
    now_us: int,
) -> DataFrame:
    """What was carried before, with what is new: directions with `kept`, frames and violations that
    are kept and those that are not, messages that are. See Carried."""
    over = ways.where(KEPT).select(*_CONNECTION).distinct().withColumn("over", F.lit(True))
    open_only = ~F.coalesce(F.col("over"), F.lit(False))

    def flagged(rows: DataFrame) -> DataFrame:
        marked = rows.join(over, list(_CONNECTION), "left")
        return marked.withColumn("over", F.coalesce("over", F.lit(False)))

    def known(rows: Callable[[Carried], DataFrame]) -> DataFrame | None:
        return None if before is None else rows(before)

    old_tallies = known(lambda old: old.tallies.where(open_only))
    tallied = counts.combined(together(old_tallies, counts.tallies(frames[0], violations[0])))
    all_tallied = tallied
    if frames[1] is not None and violations[1] is not None:
        all_tallied = counts.combined(together(tallied, counts.tallies(frames[1], violations[1])))
    current = connections(ways, all_tallied, F.bool_and(KEPT).alias(KEPT))
    of_links = known(lambda old: old.connections.where(F.col(KEPT) & ~F.col("final")))
    held = together(of_links and of_links.select(*current.columns), current)
    new_said = messages.where(
        F.col("kind").isin(REQUEST, RESPONSE) & F.col("correlation").isNotNull()
    )
    old_said = known(lambda old: old.said.where(~F.col("matched") & open_only))
    said = together(old_said and old_said.select(*_SAYING), new_said.select(*_SAYING))
    old_edges = known(lambda old: old.edges.where(open_only))
    edges = flagged(graph.combined(together(old_edges, graph.edges(messages, ways))))
    ended = edges.where("over").withColumn("connections", F.lit(1).cast("bigint"))
    totals = graph.by_edge(together(known(lambda old: old.totals), ended))
    parts = {
        _TALLIES: flagged(tallied),
        _CONNECTIONS: held.withColumn("final", _is_final(now_us)),
        _SAID: flagged(_matched(said)),
        _EDGES: edges,
        _TOTALS: totals,
    }
    return together(*(rows.withColumn(PART, F.lit(name)) for name, rows in parts.items()))


def _is_final(now_us: int) -> Column:
    """Nothing can be added to the session of a connection. A link may get another connection, until
    it has been said goodbye to, or has been silent for long."""
    session = Window.partitionBy("node", "session")
    order = F.struct("opened", "connection")
    no_link = F.max("link").over(session).isNull()
    goodbye = F.max_by("how", order).over(session) == "goodbye"
    silent = F.max("last").over(session) < now_us - LINK_US
    return F.bool_and(KEPT).over(session) & (no_link | goodbye | silent)


def _matched(said: DataFrame) -> DataFrame:
    """The n-th request of a correlation goes with the n-th response to it: both are there if n is
    not above the number of either."""
    is_request = F.col("kind") == REQUEST
    key = ("node", "connection", "asker", "correlation")
    other = F.when(F.col("direction") == "forward", "backward").otherwise("forward")
    every = Window.partitionBy(*key)
    turn = F.row_number().over(Window.partitionBy(*key, "kind").orderBy("offset"))
    requests = F.count_if(is_request).over(every)
    return (
        said.withColumn("asker", F.when(is_request, F.col("direction")).otherwise(other))
        .withColumn("turn", turn)
        .withColumn("requests", requests)
        .withColumn("responses", F.count("*").over(every) - F.col("requests"))
        .withColumn("matched", F.col("turn") <= F.least("requests", "responses"))
        .select(*_SAYING, "matched")
    )
