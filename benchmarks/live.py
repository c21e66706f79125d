"""How fast Spark reads a hub's log, and how the read affects another peer's latency.

    python benchmarks/live.py [--messages 200000] [--payload 200] [--parts 2] [--no-lake]

A hub in its own process gets messages; then a batch reads all of them, while another peer publishes
and waits for each acknowledgement: first without, then during the read.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from pyspark.sql import SparkSession

from crosswire.cli.bench.hub import started_hub
from crosswire.pipeline import register
from crosswire.pipeline.connector.address import HubAddress
from crosswire.pipeline.spark import start

_BATCH = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--payload", type=int, default=200, help="bytes")
    parser.add_argument("--no-lake", action="store_true", help="read everything from the store")
    parser.add_argument("--parts", type=int, default=2, help="minimum number of tasks")
    options = parser.parse_args()
    config = "[lake]\nmessages = false\nledger = false\n" if options.no_lake else ""
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
    began = time.perf_counter()
    reader = spark.read.format("crosswire").option("hub", url).option("subscribe", "topic/bench")
    frame = reader.option("minPartitions", parts).load()
    row = frame.selectExpr("count(value) as rows", "sum(length(value)) as bytes").collect()[0]
    return time.perf_counter() - began, int(row.rows)


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
