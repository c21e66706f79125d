"""gold.depth and gold.lag in a stream.

Both add up the ledger, minute by minute (`tables.minutes`). A batch has new rows of the last
minutes only, so the minutes of a node's last two days are carried, and all before them as one
opening row for each destination and subscription. Days that change are written again. (A clock
that is set back by more than a day is not followed: those minutes are in the opening rows only.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.envelope import MICROSECONDS
from crosswire.lake.files import date_of
from crosswire.pipeline.stream.commits import StreamOutput, StreamStaging
from crosswire.pipeline.tables.depth import depth
from crosswire.pipeline.tables.finality import KEPT, union_of
from crosswire.pipeline.tables.lag import lag
from crosswire.pipeline.tables.minutes import combined, opening
from crosswire.pipeline.tables.published import NO_DATE

__all__ = ["MinuteTables"]

_STATE: Final = "minutes"
_DAY_US: Final = 86_400 * MICROSECONDS
_TABLES: Final[dict[str, Callable[[DataFrame], DataFrame]]] = {"depth": depth, "lag": lag}


class MinuteTables:
    """Both tables in one batch; `replaced_days` has the days of each that were written again."""

    def __init__(
        self, output: StreamOutput, staging: StreamStaging, chosen: tuple[str, ...]
    ) -> None:
        self._output = output
        self._staging = staging
        self._chosen = chosen
        self.replaced_days: dict[str, set[str]] = {}

    def add(self, fresh: DataFrame) -> None:
        """Write the tables with the minutes of the batch's new steps added."""
        fresh = self._staging.work("fresh_minutes", fresh)
        # Nodes are few: what is known of each fits into the driver.
        day_us = (F.col("minute") - F.pmod("minute", F.lit(_DAY_US))).alias("day_us")
        found = fresh.select("node", day_us).distinct().orderBy("day_us").collect()
        last_day = {row.node: row.day_us for row in found}
        first_day = {row.node: row.day_us for row in reversed(found)}
        days = sorted({date_of(row.day_us) for row in found})
        rows = combined(union_of(self._output.state(_STATE), fresh))
        keep_from = _by_node({node: day - _DAY_US for node, day in last_day.items()})
        # Of a node without new rows nothing is past that was not before.
        is_past = F.coalesce(F.col("minute") < keep_from, F.lit(False))
        self._staging.save_state(_STATE, opening(rows, is_past))
        changed = F.coalesce(F.col("minute") >= _by_node(first_day), F.lit(False))
        for name in self._chosen:
            table = f"gold.{name}"
            # The depth and the lag of a day are those of the day before, as long as nothing
            # happens: days after the first one that has new rows change as well.
            again = sorted(
                {*days, *(each for each in self._days(table) if each >= min(days, default="9"))}
            )
            self.replaced_days[table] = set(again)
            if not again and self._staging.batch:
                continue
            kept = self._output.days(table, again)
            old = None if kept is None else kept.where(~changed)
            new = _TABLES[name](rows).where(changed)
            both = union_of(new, old).withColumn(KEPT, F.lit(True))
            self._staging.write(name, both, by_day=True)

    def _days(self, table: str) -> list[str]:
        last = self._output.last
        known = {} if last is None else last.days.get(table, {})
        return [day for day in known if day != NO_DATE]


def _by_node(values: dict[str, int]) -> Column:
    """A number for each row, by its node; null for other nodes."""
    if not values:
        return F.lit(None).cast("bigint")
    pairs = [F.lit(each) for item in values.items() for each in item]
    return F.create_map(*pairs)[F.col("node")].cast("bigint")
