"""Alerts for frequent words: a stream counts the words of a topic and sends jobs to workers.

    python examples/alerts.py               with a temporary hub
    python examples/alerts.py --hub HOST    with a running hub, on its default ports

Log lines are published to `topic/logs` over EMP. Spark reads the topic as a stream, counts words in
windows of two seconds, and writes a job for every word that is too frequent to `queue/alerts`: each
once, even if Spark or the hub is killed meanwhile. An EventMQ worker runs these jobs: it prints

    alert: `declined` occurred 20 times in the 2 s from 10:31:42

The example ends when the worker has been alerted of all words of the one incident in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from crosswire.cli.bench.hub import started_hub
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.emqp.worker import Worker
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.pipeline import register
from crosswire.pipeline.spark import SMALL_INPUT, start

WINDOW = "2 seconds"
TOO_OFTEN = 10
INCIDENT = ["payment declined"] * 20
NORMAL_LINE = "all is well"
TIMEOUT_S = 240.0
SETTINGS = {
    **SMALL_INPUT,
    # The encoding of the pipeline's own state does not support Spark's aggregations.
    "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",
}


# In Spark: DataFrames to DataFrames.


def frequent_words(lines: DataFrame) -> DataFrame:
    """Words with a count of at least `TOO_OFTEN` in a window, after the window has ended."""
    words = lines.select(
        "timestamp", F.explode(F.split(F.col("value").cast("string"), r"\W+")).alias("word")
    )
    counted = (
        words.withWatermark("timestamp", "0 seconds")
        .groupBy(F.window("timestamp", WINDOW), "word")
        .count()
    )
    return counted.where(F.col("count") >= TOO_OFTEN)


def as_jobs(words: DataFrame) -> DataFrame:
    """Jobs for an EventMQ worker: calls of `alerts.notify(word, count, since)`."""
    since = F.date_format("window.start", "HH:mm:ss")
    arguments = F.struct("word", "count", since.alias("since"))
    call = F.struct(
        F.lit("alerts").alias("path"), F.lit("notify").alias("callable"), arguments.alias("kwargs")
    )
    return words.select(F.concat(F.lit('["run", '), F.to_json(call), F.lit("]")).alias("value"))


def watch(spark: SparkSession, hub: str, checkpoint: str) -> StreamingQuery:
    """Start the query. The checkpoint has its offsets; the hub knows which batches it committed."""
    lines = (
        spark.readStream.format("crosswire")
        .option("hub", hub)
        .option("subscribe", "topic/logs")
        .option("startingOffsets", "earliest")
        .option("columns", "value,timestamp")
        .load()
    )
    return (
        as_jobs(frequent_words(lines))
        .writeStream.format("crosswire")
        .option("hub", hub)
        .option("destination", "queue/alerts")
        .option("contentType", "application/json")
        .option("checkpointLocation", checkpoint)
        .start()
    )


# Around it: the writer of the log, and the worker.


async def write_log(host: str, port: int, over: asyncio.Event) -> None:
    """Publish one incident, then normal lines: each advances the watermark of Spark's windows."""
    async with EmpClient(host, port) as client:
        lines = [{"destination": "topic/logs", "text": line} for line in INCIDENT]
        await asyncio.gather(*(client.request("$publish", line) for line in lines))
        while not over.is_set():
            await client.request("$publish", {"destination": "topic/logs", "text": NORMAL_LINE})
            await asyncio.sleep(0.5)


async def print_alerts(host: str, port: int, over: asyncio.Event) -> None:
    """Run the jobs until every word of the incident has occurred in one."""
    missing = set(INCIDENT[0].split())

    async def notify(word: str, count: int, since: str) -> None:
        print(f"alert: `{word}` occurred {count} times in the 2 s from {since}", flush=True)
        missing.discard(word)
        if not missing:
            over.set()

    async with Worker(host, port, queues=[(10, "alerts")], jobs={"alerts.notify": notify}):
        await over.wait()


async def run(host: str, ports: dict[str, int], query: StreamingQuery) -> None:
    over = asyncio.Event()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(write_log(host, ports["emp"], over))
        tasks.create_task(print_alerts(host, ports["emqp-workers"], over))
        while not over.is_set():
            failure = query.exception()
            if failure is not None:
                raise failure
            await asyncio.sleep(0.1)


@contextmanager
def hub_at(host: str | None) -> Iterator[tuple[str, dict[str, int]]]:
    if host is not None:
        yield host, PLAIN_LISTENERS
        return
    with started_hub("http", "emp", "emqp-workers") as hub:
        yield "127.0.0.1", hub.ports


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--hub", metavar="HOST", help="a running hub, on its default ports")
    spark = start("local[2]", SETTINGS, name="alerts")
    register(spark)
    with (
        hub_at(arguments.parse_args().hub) as (host, ports),
        tempfile.TemporaryDirectory() as checkpoint,
    ):
        query = watch(spark, f"http://{host}:{ports['http']}", checkpoint)
        try:
            asyncio.run(run(host, ports, query))
        finally:
            query.stop()
            spark.stop()


if __name__ == "__main__":
    main()
