"""Rows of a hub's record that the input lacks: what depends on them is uncertain, never a fault.

A file that was deleted, or cut out by retention, leaves a hole in the numbers of its table. Which
rows were in it nobody knows, but when they were written is known from the rows around the hole. So
whatever such a row could have changed gets the `reason` of the hole instead of a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["ALWAYS_US", "MissingLakeRows", "reason_at", "reason_between", "reason_of_id"]

ALWAYS_US: Final = (1 << 63) - 1
"""After every time: the end of a hole after which nothing follows."""

_SLACK_US: Final = 60_000_000
"""How far the times of the two sides of a passage may be apart: a peer that does not read gets a
message long after the ledger has it as delivered."""

_MOST: Final = 64
"""Holes of one table and node that are distinguished; of more, neighbours become one larger hole:
each is a branch of an expression that Spark evaluates for every row."""


@dataclass(frozen=True)
class MissingLakeRows:
    """The rows `first` … `last` of a table of a hub's lake, which are not in the input.

    They were written between `after_us` and `before_us`. `node` is empty if it holds for all nodes:
    there is no such table. `by_id`: the hub recorded the gap itself, in ids instead of numbers of
    rows. `recorded` is the reason that it gave.
    """

    table: str
    node: str
    first: int
    last: int
    after_us: int = 0
    before_us: int = ALWAYS_US
    recorded: str = ""
    by_id: bool = False

    @property
    def reason(self) -> str:
        """In words, for people who read the tables."""
        if not self.node:
            return f"there is no {self.table}/"
        what = "messages" if self.by_id else "rows"
        because = f" ({self.recorded})" if self.recorded else ""
        return f"{what} {self.first} to {self.last} of {self.table}/ are missing{because}"

    @property
    def note(self) -> str:
        """A line for the summary of a run."""
        whose = f"of node {self.node}, " if self.node else ""
        return f"{whose}{self.reason}: what depends on them is uncertain"


def reason_at(missing: Iterable[MissingLakeRows], table: str, time: Column) -> Column:
    """The reason if rows of `table` are missing of about this time; else null."""
    return reason_between(missing, table, time - _SLACK_US, time + _SLACK_US)


def reason_between(
    missing: Iterable[MissingLakeRows], table: str, start: Column, end: Column
) -> Column:
    """The reason if rows of `table` are missing that were written between these times; else null.

    The node is that of the column `node`.
    """
    found = F.lit(None).cast("string")
    for each in _few([hole for hole in missing if hole.table == table and not hole.by_id]):
        overlaps = (end >= each.after_us) & (start <= each.before_us)
        if each.node:
            overlaps &= F.col("node") == each.node
        found = F.when(overlaps, each.reason).otherwise(found)
    return found


def reason_of_id(missing: Iterable[MissingLakeRows], table: str, identifier: Column) -> Column:
    """The reason if the hub recorded that it could not keep this message; else null."""
    found = F.lit(None).cast("string")
    for each in _few([hole for hole in missing if hole.table == table and hole.by_id]):
        is_inside = (F.col("node") == each.node) & identifier.between(each.first, each.last)
        found = F.when(is_inside, each.reason).otherwise(found)
    return found


def _few(holes: Sequence[MissingLakeRows]) -> list[MissingLakeRows]:
    """At most _MOST holes that cover all of these."""
    ordered = sorted(holes, key=lambda hole: (hole.node, hole.first))
    if len(ordered) <= _MOST:
        return ordered
    step = -(-len(ordered) // _MOST)
    joined = []
    for start in range(0, len(ordered), step):
        group = ordered[start : start + step]
        for node in dict.fromkeys(hole.node for hole in group):
            own = [hole for hole in group if hole.node == node]
            joined.append(
                replace(
                    own[0],
                    last=own[-1].last,
                    after_us=min(hole.after_us for hole in own),
                    before_us=max(hole.before_us for hole in own),
                )
            )
    return joined
