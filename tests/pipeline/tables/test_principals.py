"""As whom connections signed in, by the rows of the ledger."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.principals import (
    MINUTE_US,
    combined,
    minute_of,
    principals,
    with_principal,
)

LEDGER = "node string, connection string, principal string, seq bigint, time bigint"
ROWS = [
    ("n", "a", "anna", 4, 5 * MINUTE_US),
    # A connection stays whose it was first: later rows must not change what is written.
    ("n", "a", "bert", 9, 6 * MINUTE_US),
    ("n", "b", "", 5, 5 * MINUTE_US),
    ("m", "a", "mia", 1, 0),
    ("n", "", "nobody", 6, 0),
]


def test_the_first_row_of_a_connection_names_its_principal(spark: SparkSession) -> None:
    ledger = spark.createDataFrame(ROWS, LEDGER)
    passages = [
        ("n", "a", 2 * MINUTE_US),
        ("n", "a", 4 * MINUTE_US),
        ("n", "a", 9 * MINUTE_US + 7),
        ("n", "b", 5 * MINUTE_US),
        ("n", "c", 5 * MINUTE_US),
        ("m", "a", 5 * MINUTE_US),
    ]
    rows = spark.createDataFrame(passages, "node string, connection string, time bigint")
    known = principals(ledger)
    found = with_principal(rows, known, minute_of(F.col("time"))).collect()
    named = {(row.node, row.connection, row.time): row.principal for row in found}
    assert named == {
        # Older than the minute before it was named.
        passages[0]: None,
        passages[1]: "anna",
        passages[2]: "anna",
        passages[3]: None,
        passages[4]: None,
        passages[5]: "mia",
    }


def test_parts_of_a_ledger_name_the_same(spark: SparkSession) -> None:
    ledger = spark.createDataFrame(ROWS, LEDGER)
    parts = [principals(ledger.where(condition)) for condition in ("seq > 5", "seq <= 5")]
    together = combined(parts[0].unionByName(parts[1])).collect()
    assert sorted(together) == sorted(principals(ledger).collect())
