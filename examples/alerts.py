"""Which words are said too often? A stream over a topic counts them, and workers hear of it.

    python examples/alerts.py               with a hub of its own, which is gone afterwards
    python examples/alerts.py --hub HOST    with a hub that runs there, on its usual ports

Log lines are published to `topic/logs` over EMP. Spark reads the topic as a stream, counts words in
windows of two seconds, and writes a job for every word that is too frequent to `queue/alerts`: each
once, even if Spark or the hub is killed meanwhile. An EventMQ worker does these jobs: it prints

    alert: `declined` was said 20 times in the 2 s from 10:31:42

It ends when the worker has heard of all the words of the one incident in the log.
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
QUIET = "all is well"
PATIENCE_S = 240.0
SETTINGS = {
    **SMALL_INPUT,
    # What the pipeline's own state is kept in is not for Spark's aggregations.
    "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",
}


# In Spark: DataFrames to DataFrames.


def frequent_words(lines: DataFrame) -> DataFrame:
    """Words with a count of at least `TOO_OFTEN` in a window; a window is told when it is over."""
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
    """What an EventMQ worker understands: the call of `alerts.tell(word, count, since)`."""
    since = F.date_format("window.start", "HH:mm:ss")
    arguments = F.struct("word", "count", since.alias("since"))
    call = F.struct(
        F.lit("alerts").alias("path"), F.lit("tell").alias("callable"), arguments.alias("kwargs")
    )
    return words.select(F.concat(F.lit('["run", '), F.to_json(call), F.lit("]")).alias("value"))


def watch(spark: SparkSession, hub: str, checkpoint: str) -> StreamingQuery:
    """The query: where it is stands in its checkpoint, what it wrote knows the hub."""
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


# Around it: who writes the log, and who is alerted.


async def write_log(host: str, port: int, over: asyncio.Event) -> None:
    """One incident, then peace: time goes on with every line, and with it Spark's windows."""
    async with EmpClient(host, port) as client:
        lines = [{"destination": "topic/logs", "text": line} for line in INCIDENT]
        await asyncio.gather(*(client.request("$publish", line) for line in lines))
        while not over.is_set():
            await client.request("$publish", {"destination": "topic/logs", "text": QUIET})
            await asyncio.sleep(0.5)


async def be_alerted(host: str, port: int, over: asyncio.Event) -> None:
    missing = set(INCIDENT[0].split())

    async def tell(word: str, count: int, since: str) -> None:
        print(f"alert: `{word}` was said {count} times in the 2 s from {since}", flush=True)
        missing.discard(word)
        if not missing:
            over.set()

    async with Worker(host, port, queues=[(10, "alerts")], jobs={"alerts.tell": tell}):
        await over.wait()


async def play(host: str, ports: dict[str, int], query: StreamingQuery) -> None:
    over = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(write_log(host, ports["emp"], over))
        tasks.create_task(be_alerted(host, ports["emqp-workers"], over))
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
    arguments.add_argument("--hub", metavar="HOST", help="a hub that runs, on its usual ports")
    spark = start("local[2]", SETTINGS, name="alerts")
    register(spark)
    with (
        hub_at(arguments.parse_args().hub) as (host, ports),
        tempfile.TemporaryDirectory() as checkpoint,
    ):
        query = watch(spark, f"http://{host}:{ports['http']}", checkpoint)
        try:
            asyncio.run(play(host, ports, query))
        finally:
            query.stop()
            spark.stop()


if __name__ == "__main__":
    main()
