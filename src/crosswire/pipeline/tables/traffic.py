"""gold.traffic: a minute × protocol × destination: rates, bytes, errors, latencies.

`minute` is its beginning, µs since 1970. Latencies are of the requests that were asked in it; their
`histogram` (see `histogram.py`) can be added to that of any other row; percentiles come from it.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.readings.contract import PUBLISH, REQUEST, RESPONSE, SEND
from crosswire.pipeline.tables.histogram import PERCENTILES, bucket_of, percentile

__all__ = ["folded", "partials", "traffic", "unfolded"]

_MINUTE_US: Final = 60_000_000
_KEY: Final = ("minute", "protocol", "destination")
_SUMS: Final = ("messages", "sends", "publishes", "requests", "responses", "bytes", "errors")


def traffic(messages: DataFrame, conversations: DataFrame) -> DataFrame:
    return folded(partials(messages, conversations))


def partials(messages: DataFrame, conversations: DataFrame) -> DataFrame:
    """What `folded` makes rows of: counts with no bucket, and latencies with theirs. Those of any
    runs of messages and conversations can be put together."""
    counted = (
        messages.withColumn("minute", _minute("time"))
        .groupBy(*_KEY)
        .agg(
            F.count("*").alias("messages"),
            *(
                F.count_if(F.col("kind") == kind).alias(name)
                for kind, name in (
                    (SEND, "sends"),
                    (PUBLISH, "publishes"),
                    (REQUEST, "requests"),
                    (RESPONSE, "responses"),
                )
            ),
            F.sum("payload_length").alias("bytes"),
            F.count_if(F.col("status").isNotNull() & (F.col("status") != "success")).alias(
                "errors"
            ),
        )
    )
    timed = (
        conversations.where(F.col("latency_us").isNotNull())
        .withColumn("minute", _minute("asked"))
        .withColumn("bucket", bucket_of(F.col("latency_us")))
        .groupBy(*_KEY, "bucket")
        .agg(F.count("*").alias("count"), F.max("latency_us").alias("latency_max_us"))
    )
    return counted.unionByName(timed, allowMissingColumns=True)


def unfolded(rows: DataFrame) -> DataFrame:
    """The partials that these rows were made of."""
    counted = rows.select(*_KEY, *_SUMS)
    timed = rows.select(*_KEY, "latency_max_us", F.explode("histogram").alias("entry")).select(
        *_KEY, "entry.bucket", "entry.count", "latency_max_us"
    )
    return counted.unionByName(timed, allowMissingColumns=True)


def folded(parts: DataFrame) -> DataFrame:
    sums = [F.sum(name).alias(name) for name in _SUMS]
    longest = F.max("latency_max_us").alias("latency_max_us")
    entry = F.when(F.col("bucket").isNotNull(), F.struct("bucket", "count"))
    joined = (
        parts.groupBy(*_KEY, "bucket")
        .agg(*sums, F.sum("count").alias("count"), longest)
        .groupBy(*_KEY)
        .agg(*sums, longest, F.sort_array(F.collect_list(entry)).alias("entries"))
        .withColumn("histogram", F.when(F.size("entries") > 0, F.col("entries")))
    )
    histogram = F.col("histogram")
    return joined.select(
        *_KEY,
        *_SUMS,
        (F.col("messages") / 60.0).alias("messages_per_s"),
        *(
            percentile(histogram, share).alias(f"latency_p{round(share * 100)}_us")
            for share in PERCENTILES
        ),
        "latency_max_us",
        "histogram",
    )


def _minute(column: str) -> Column:
    return F.col(column) - F.pmod(F.col(column), F.lit(_MINUTE_US))
