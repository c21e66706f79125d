"""A query that writes lines of text to a hub, with a Spark of its own: to be killed, all of it.

python -m tests.pipeline.connector.sink_driver HUB INPUT CHECKPOINT
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from crosswire.pipeline import register
from crosswire.pipeline.spark import SMALL_INPUT, start

__all__ = ["QUEUE", "begin"]

QUEUE = "lines"


def begin(spark: SparkSession, hub: str, given: str, checkpoint: str) -> StreamingQuery:
    """What is in INPUT, to `queue/lines`, in two tasks a batch; a batch a file."""
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(given)
    return (
        lines.repartition(2)
        .writeStream.format("crosswire")
        .option("hub", hub)
        .option("destination", f"queue/{QUEUE}")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    hub, given, checkpoint = sys.argv[1:]
    session = start("local[2]", {**SMALL_INPUT, "spark.driver.memory": "512m"})
    register(session)
    begin(session, hub, given, checkpoint).awaitTermination()
