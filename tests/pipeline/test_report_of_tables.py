"""Reports of tables that Spark has made."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.report import write_report
from crosswire.pipeline.report.histogram import buckets_of, highest_of, lowest_of
from crosswire.pipeline.tables import histogram
from tests.pipeline.conftest import Made
from tests.pipeline.test_report import START


def test_a_report_of_a_real_run(from_tap: Made, tmp_path: Path) -> None:
    facts = write_report(str(from_tap.folder), tmp_path / "r.html", made_us=START)
    assert facts.traffic is not None and facts.accounts is not None and facts.calls is not None
    messages = from_tap.rows("silver/messages")
    assert facts.traffic.total_messages == len(messages)
    assert facts.accounts.total("seen") == from_tap.summary.seen
    answered = [row for row in from_tap.rows("gold/conversations") if row["answered"] is not None]
    assert facts.calls.answered == len(answered)
    assert facts.latencies is not None and facts.latencies.all.count == len(answered)


def test_buckets_are_those_of_the_pipeline(spark: SparkSession) -> None:
    values = [*range(70), *(2**bit + more for bit in range(6, 62) for more in (-1, 0, 1))]
    column = F.col("value")
    bucket = histogram.bucket_of(column)
    rows = spark.createDataFrame(pa.table({"value": values})).select(
        column, bucket.alias("bucket"), histogram.highest_of(bucket).alias("highest")
    )
    expected = {row.value: (row.bucket, row.highest) for row in rows.collect()}
    found = dict(zip(values, buckets_of(pa.array(values, pa.int64())).to_pylist(), strict=True))
    assert {value: (b, highest_of(b)) for value, b in found.items()} == expected
    assert all(lowest_of(b) <= value <= highest_of(b) for value, b in found.items())
