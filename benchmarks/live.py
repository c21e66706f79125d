"""How fast Spark reads a hub's log, and how the read affects another peer's latency.

    python benchmarks/live.py [--messages 200000] [--payload 200] [--parts 2] [--no-lake]

A hub in its own process gets messages; then a batch reads all of them, while another peer publishes
and waits for each acknowledgement: first without, then during the read. With the lake, the same
columns of the same files are then read twice more, in turn with the source: by a Python data
source that does nothing but that, with pyarrow, and by the Parquet scan of Spark's JVM.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from crosswire.cli.bench.hub import started_hub
from crosswire.pipeline import register
from crosswire.pipeline.connector.address import HubAddress
from crosswire.pipeline.connector.columns import needed, schema, to_spark
from crosswire.pipeline.connector.options import known_columns
from crosswire.pipeline.spark import start

_BATCH = 2000
_ROUNDS = 9
SEALED = "[lake]\nseal_s = 1\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--payload", type=int, default=200, help="bytes")
    parser.add_argument("--no-lake", action="store_true", help="read everything from the store")
    parser.add_argument("--parts", type=int, default=2, help="minimum number of tasks")
    options = parser.parse_args()
    config = "[lake]\nmessages = false\nledger = false\n" if options.no_lake else SEALED
    with started_hub("http", config=config) as hub:
        url = f"http://127.0.0.1:{hub.ports['http']}"
        fill(HubAddress(url), options.messages, "x" * options.payload)
        spark = start("local[2]")
        register(spark)
        read(spark, url, options.parts)
        with pinging(url) as alone:
            time.sleep(5)
        before = hub.cpu_s()
        with pinging(url) as beside:
            took_s, rows = read(spark, url, options.parts)
        cpu_s = hub.cpu_s() - before
        if not options.no_lake:
            compare(spark, url, options.parts, Path(hub.data) / "lake" / "messages", rows)
        spark.stop()
    assert rows == options.messages // _BATCH * _BATCH
    print(f"{rows} messages in {took_s:.2f} s: {rows / took_s:,.0f}/s; hub {cpu_s:.2f} s of CPU")
    for name, times in (("alone", alone), ("during the read", beside)):
        print(f"a publish {name}: {summary(times)}")


def fill(hub: HubAddress, count: int, text: str) -> None:
    messages = [{"destination": "topic/bench", "text": text, "properties": {"n": 1}}] * _BATCH
    body = msgspec.json.encode({"messages": messages})
    for _ in range(count // _BATCH):
        hub.post_bytes("/v1/messages", body, "application/json")


def read(spark: SparkSession, url: str, parts: int) -> tuple[float, int]:
    return timed(lambda: source(spark, url, parts))


def source(spark: SparkSession, url: str, parts: int) -> DataFrame:
    reader = spark.read.format("crosswire").option("hub", url).option("subscribe", "topic/bench")
    return reader.option("minPartitions", parts).load()


def timed(frame: Callable[[], DataFrame]) -> tuple[float, int]:
    began = time.perf_counter()
    counts = ("count(value) as rows", "sum(length(value)) as bytes")
    row = frame().selectExpr(*counts).collect()[0]
    return time.perf_counter() - began, int(row.rows)


COLUMNS = known_columns({})
"""Those that the source has by default."""


class FilesSource(DataSource):
    """Reads files with pyarrow and gives the source's columns: what any source in Python costs."""

    @classmethod
    def name(cls) -> str:
        return "files"

    def schema(self) -> str:
        return schema(COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return FilesReader(self.options["files"].split(","), int(self.options["parts"]))


class FilesReader(DataSourceReader):
    def __init__(self, files: list[str], parts: int) -> None:
        self._files = files
        self._parts = parts

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._files[part :: self._parts]) for part in range(self._parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for path in partition.value:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=needed(COLUMNS)):
                    yield to_spark(batch, COLUMNS, "node")


def compare(spark: SparkSession, url: str, parts: int, folder: Path, rows: int) -> None:
    """Read all messages in three forms, in turn, and print the best time of each and the ratios of
    single rounds."""
    files = sealed(folder, rows)
    spark.dataSource.register(FilesSource)
    named = {"files": ",".join(files), "parts": str(parts)}
    readers: dict[str, Callable[[], DataFrame]] = {
        "the source": lambda: source(spark, url, parts),
        "a source that reads the files": lambda: spark.read.format("files").options(**named).load(),
        "the JVM's scan": lambda: (
            spark.read.parquet(*files)
            .where("destination = 'topic/bench'")
            .withColumnRenamed("payload", "value")
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(_ROUNDS):
        # In turn forwards and backwards: none is always the first after the other.
        for name in list(readers)[:: 1 if number % 2 else -1]:
            times[name].append(timed(readers[name])[0])
    for name, each in times.items():
        print(f"{name}: {rows / min(each):,.0f}/s, best of {_ROUNDS}")
    pairs = zip(times["a source that reads the files"], times["the source"], strict=True)
    shares = sorted(files_s / source_s for files_s, source_s in pairs)
    best = min(times["a source that reads the files"]) / min(times["the source"])
    print(
        f"the source reads {best:.2f} times as fast as one that only reads the files by the best"
        f" times; in single rounds {shares[0]:.2f} to {shares[-1]:.2f} times, median"
        f" {statistics.median(shares):.2f}"
    )


def sealed(folder: Path, rows: int) -> list[str]:
    """The files of the lake, once they have all messages."""
    while True:
        files = sorted(str(path) for path in folder.glob("date=*/*.parquet"))
        if sum(pq.read_metadata(path).num_rows for path in files) >= rows:
            return files
        time.sleep(0.2)


@contextmanager
def pinging(url: str) -> Iterator[list[float]]:
    """Durations of publishes, one after the other, during the block."""
    times: list[float] = []
    stop = threading.Event()

    def ping() -> None:
        hub = HubAddress(url)
        message = {"messages": [{"destination": "queue/ping", "text": "x"}]}
        while not stop.is_set():
            began = time.perf_counter()
            hub.post("/v1/messages", message)
            times.append(time.perf_counter() - began)
            time.sleep(0.002)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


def summary(times: list[float]) -> str:
    ordered = sorted(1000 * each for each in times)
    late = ordered[int(len(ordered) * 0.99)]
    return (
        f"{len(times)} of them, median {statistics.median(ordered):.1f} ms, "
        f"99 % within {late:.1f} ms, slowest {ordered[-1]:.1f} ms"
    )


if __name__ == "__main__":
    main()
