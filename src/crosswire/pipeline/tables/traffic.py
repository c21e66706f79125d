"""gold.traffic: a minute × protocol × destination: rates, bytes, errors, latencies.

`minute` is its beginning, µs since 1970. Latencies are of the requests that were asked in it; their
`histogram` (see `histogram.py`) can be added to that of any other row; percentiles come from it.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.protocols.contract import PUBLISH, REQUEST, RESPONSE, SEND
from crosswire.pipeline.tables.histogram import PERCENTILES, bucket_of, percentile

__all__ = ["traffic"]

_MINUTE_US: Final = 60_000_000
_KEY: Final = ("minute", "protocol", "destination")


def traffic(messages: DataFrame, conversations: DataFrame) -> DataFrame:
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
        .agg(F.count("*").alias("count"), F.max("latency_us").alias("longest"))
        .groupBy(*_KEY)
        .agg(
            F.sort_array(F.collect_list(F.struct("bucket", "count"))).alias("histogram"),
            F.max("longest").alias("latency_max_us"),
        )
    )
    # Destinations may be unknown, and unknown is not equal to unknown in a join.
    left, right = counted.alias("counted"), timed.alias("timed")
    same = [F.col(f"counted.{name}").eqNullSafe(F.col(f"timed.{name}")) for name in _KEY]
    joined = left.join(right, same, "left").select(
        "counted.*", "timed.histogram", "timed.latency_max_us"
    )
    histogram = F.col("histogram")
    return joined.select(
        *counted.columns,
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
