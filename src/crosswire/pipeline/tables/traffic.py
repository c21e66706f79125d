"""gold.traffic: a minute × node × protocol × destination × leg × direction × client × principal:
rates, bytes, errors, latencies.

`minute` is its beginning, µs since 1970. `direction` is that of the messages; `leg` is null for
messages that are part of no call. Latencies are those of the requests that were sent in the minute:
they are in the row of the requests' direction, and never mix the legs of a call.
The percentiles come from `histogram` (see `histogram.py`), which can be added to that of any other
row; percentiles can't.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.meanings.contract import PUBLISH, REQUEST, RESPONSE, SEND
from crosswire.pipeline.tables.histogram import bucket_of, percentile
from crosswire.pipeline.tables.legs import clients, leg_of_message
from crosswire.pipeline.tables.names import PERCENTILES
from crosswire.pipeline.tables.principals import minute_of, with_principal

__all__ = ["TRAFFIC_COLUMNS", "folded", "partials", "unfolded"]

TRAFFIC_COLUMNS: Final = (
    "node",
    "connection",
    "direction",
    "time",
    "protocol",
    "kind",
    "destination",
    "status",
    "payload_length",
)
"""The columns of silver.messages that traffic is made of."""

_KEY: Final = (
    "minute",
    "node",
    "protocol",
    "destination",
    "leg",
    "direction",
    "client",
    "principal",
)
_SUMS: Final = ("messages", "sends", "publishes", "requests", "responses", "bytes", "errors")


def partials(
    messages: DataFrame,
    conversations: DataFrame,
    directions: DataFrame,
    known: DataFrame | None = None,
) -> DataFrame:
    """Rows that `folded` adds up: counts of messages without a bucket, and counts of latencies by
    bucket. The partials of several sets of messages and conversations may be united.

    `messages` need TRAFFIC_COLUMNS only; `known` are the `principals` of their connections.
    """
    signed = with_principal(messages.select(*TRAFFIC_COLUMNS), known, minute_of(F.col("time")))
    counted = (
        signed.join(clients(directions), ["node", "connection"], "left")
        .withColumn("minute", minute_of(F.col("time")))
        .withColumn("leg", leg_of_message())
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
        .withColumn("minute", minute_of(F.col("asked")))
        .withColumn("bucket", bucket_of(F.col("latency_us")))
        .groupBy(*_KEY, "bucket")
        .agg(F.count("*").alias("count"), F.max("latency_us").alias("latency_max_us"))
    )
    return counted.unionByName(timed, allowMissingColumns=True)


def unfolded(rows: DataFrame) -> DataFrame:
    """The partials that rows of the table were made of, to add more to them."""
    counted = rows.select(*_KEY, *_SUMS)
    # The maximum of the row is repeated for each bucket, which does not change the maximum of them.
    timed = rows.select(*_KEY, "latency_max_us", F.explode("histogram").alias("entry")).select(
        *_KEY, "entry.bucket", "entry.count", "latency_max_us"
    )
    return counted.unionByName(timed, allowMissingColumns=True)


def folded(parts: DataFrame) -> DataFrame:
    """The table: partials added up by their key."""
    sums = [F.sum(name).alias(name) for name in _SUMS]
    longest = F.max("latency_max_us").alias("latency_max_us")
    entry = F.when(F.col("bucket").isNotNull(), F.struct("bucket", "count"))
    # By bucket first: what is collected per row is then at most one entry for each bucket, however
    # many partials there are. `percentile` needs the entries in order.
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
