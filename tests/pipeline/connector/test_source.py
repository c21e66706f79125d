"""The source `crosswire`: a real Spark that reads real hubs in processes of their own."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit
from pyspark.sql.streaming.query import StreamingQuery

from crosswire.pipeline import register
from crosswire.pipeline.connector.address import HubAddress
from crosswire.pipeline.connector.options import read_options
from crosswire.pipeline.connector.ranges import LogPartition, fetch
from crosswire.pipeline.connector.source import LogStreamReader
from crosswire.pipeline.spark_features import ReadAllAvailable, ReadMaxRows
from tests.cli.conftest import RunningHub

NO_LAKE = "[lake]\nmessages = false\nledger = false\n"
QUICK = "[lake]\nseal_s = 0.01\n"
NEVER = "[lake]\nseal_s = 3600\n"


class Hub:
    """A hub in a process of its own, and what goes into it over HTTP."""

    def __init__(self, folder: Path, config: str = "", *, port: int = 0, token: str = "") -> None:
        file = folder / "crosswire.toml"
        folder.mkdir(exist_ok=True)
        file.write_text(config)
        options = ["--config", str(file), f"--listen=http=127.0.0.1:{port}"]
        self.running = RunningHub(folder / "data", *options)
        self.url, self.port = self.running.url, self.running.port("http")
        self.address = HubAddress(self.url, token, 10.0)
        self.node: str = self.address.get("/v1/log")["node"]

    def send(self, destination: str, *texts: str, **more: Any) -> list[int]:
        messages = [{"destination": destination, "text": text, **more} for text in texts]
        ids: list[int] = self.address.post("/v1/messages", {"messages": messages})["ids"]
        return ids

    def served(self) -> int:
        """How many messages were read from its log so far."""
        path = f"http://127.0.0.1:{self.port}/metrics"
        found = re.search(r'event="log".*detail="messages"} (\d+)', _text(path))
        return int(found[1]) if found else 0

    def until_sealed(self, identifier: int, lake: Path) -> None:
        until(lambda: any(lake.glob("messages/*/*.parquet")))
        until(lambda: identifier <= _last_id(lake))

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.running.process.poll() is None:
            self.running.end(number)
        for stream in (self.running.process.stdout, self.running.process.stderr):
            assert stream is not None
            stream.close()


def _text(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read()).decode()


def _last_id(lake: Path) -> int:
    tables = [pq.read_table(path, columns=["id"]) for path in lake.glob("messages/*/*.parquet")]
    return max(int(identifier) for table in tables for identifier in table["id"].to_pylist())


def until(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One for all tests that don't kill it: each uses names of its own."""
    hub = Hub(tmp_path_factory.mktemp("live"))
    yield hub
    hub.end()


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One without a lake, whose queue `gone` has been emptied."""
    hub = Hub(tmp_path_factory.mktemp("forgetful"), NO_LAKE)
    hub.send("queue/gone", "1", "2")
    hub.address.post("/v1/queues/gone/purge", {})
    hub.send("queue/gone", "3")
    yield hub
    hub.end()


StartHub = Callable[..., Hub]


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[StartHub]:
    hubs: list[Hub] = []

    def start(*options: Any, **more: Any) -> Hub:
        hubs.append(Hub(tmp_path / "hub", *options, **more))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.end(signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def registered(spark: SparkSession, hub: Hub, forgetful: Hub) -> None:
    register(spark)


def load(spark: SparkSession, hub: Hub, **options: Any) -> DataFrame:
    reader = spark.read.format("crosswire").option("hub", hub.url).option("patienceS", "5")
    return reader.options(**options).load()


def values(frame: DataFrame) -> list[str]:
    return sorted(bytes(row.value).decode() for row in frame.select("value").collect())


def message_of(action: Callable[[], Any]) -> str:
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


# Batches.


def test_columns_are_those_of_kafka_and_some_more(spark: SparkSession, hub: Hub) -> None:
    before = datetime.now(UTC).replace(tzinfo=None)
    (identifier,) = hub.send("queue/columns", "héllo", key="k", properties={"n": 1, "s": "x"})
    frame = load(spark, hub, subscribe="queue/columns", includeHeaders="true")
    assert frame.columns[:7] == [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "headers",
    ]
    assert frame.columns[7:] == (
        ["protocol", "kind", "correlation", "content_type", "connection", "principal", "attempt"]
    )
    (row,) = frame.collect()
    assert (bytes(row.key), bytes(row.value).decode()) == (b"k", "héllo")
    assert (row.topic, row.partition, row.offset) == ("queue/columns", hub.node, identifier)
    assert abs((row.timestamp - before).total_seconds()) < 60
    assert [(each.key, bytes(each.value)) for each in row.headers] == [("n", b"1"), ("s", b"x")]
    assert (row.protocol, row.kind, row.content_type) == ("http", "send", "text/plain")
    assert (row.correlation, row.connection, row.principal, row.attempt) == (None, None, None, 0)


def test_a_session_finds_it_without_register(spark: SparkSession, hub: Hub) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    first, _ = hub.send("queue/found", "1", "2")
    frame = load(session, hub, subscribe="queue/found")
    assert values(frame.where(col("offset") > first)) == ["2"]


def test_headers_are_there_on_request_only(spark: SparkSession, hub: Hub) -> None:
    hub.send("queue/bare", "x")
    assert "headers" not in load(spark, hub, subscribe="queue/bare").columns
    (row,) = load(spark, hub, subscribe="queue/bare", columns="headers, offset, key").collect()
    assert (list(row.asDict()), row.headers, row.key) == (["headers", "offset", "key"], None, None)


def test_destinations_by_name_wildcard_and_regex(spark: SparkSession, hub: Hub) -> None:
    for name in ("queue/names/a", "queue/names/b", "topic/names/c"):
        hub.send(name, name[-1])
    one = load(spark, hub, subscribe="queue/names/a, topic/names/c")
    assert values(one) == ["a", "c"]
    assert values(load(spark, hub, subscribe="queue/names/+")) == ["a", "b"]
    assert values(load(spark, hub, subscribePattern="(queue|topic)/names/[bc]")) == ["b", "c"]
    assert values(load(spark, hub, subscribePattern="queue/nobody")) == []


def test_offsets_are_inclusive_at_the_start_and_exclusive_at_the_end(
    spark: SparkSession, hub: Hub
) -> None:
    a = hub.send("queue/ranges/a", "a0", "a1", "a2")
    b = hub.send("queue/ranges/b", "b0", "b1", "b2")
    node = hub.node
    frame = load(
        spark,
        hub,
        subscribe="queue/ranges/a,queue/ranges/b",
        startingOffsets=json.dumps({"queue/ranges/a": {node: a[1]}, "queue/ranges/b": {node: -2}}),
        endingOffsets=json.dumps({"queue/ranges/a": {node: -1}, "queue/ranges/b": {node: b[2]}}),
    )
    assert values(frame) == ["a1", "a2", "b0", "b1"]


def test_a_time_to_start_with(spark: SparkSession, hub: Hub) -> None:
    hub.send("queue/times", "early")
    time.sleep(0.002)
    middle_ms = time.time_ns() // 1_000_000 + 1
    until(lambda: time.time_ns() // 1_000_000 > middle_ms)
    hub.send("queue/times", "late")
    frame = load(spark, hub, subscribe="queue/times", startingTimestamp=str(middle_ms))
    assert values(frame) == ["late"]


def test_partitions_share_the_work_and_no_message(spark: SparkSession, hub: Hub) -> None:
    texts = [f"{number:04}" for number in range(1000)]
    hub.send("queue/parts", *texts)
    frame = load(spark, hub, subscribe="queue/parts", minPartitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert values(frame) == texts


def test_filters_are_pushed_down(spark: SparkSession, hub: Hub) -> None:
    early = hub.send("queue/filters/a", *"0123456789")
    hub.send("queue/filters/b", *"0123456789")
    frame = load(spark, hub, subscribe="queue/filters/+")
    (first,) = frame.filter(col("offset") == early[0]).collect()
    time.sleep(0.01)
    hub.send("queue/filters/a", "late")
    cases = [
        (frame.filter(col("topic") == "queue/filters/b"), 10, 10),
        (frame.filter(col("topic").isin("queue/filters/b", "queue/else")), 10, 10),
        (frame.filter((col("offset") >= early[2]) & (col("offset") < early[4])), 2, 2),
        (frame.filter((col("offset") > early[2]) & (col("offset") <= early[4])), 2, 2),
        (frame.filter(col("timestamp") > first.timestamp), 11, 11),
        (frame.filter(col("timestamp") <= first.timestamp), 10, 10),
        (frame.filter(col("value") == lit(b"7")), 2, 21),
    ]
    for narrowed, rows, fetched in cases:
        before = hub.served()
        assert (len(narrowed.collect()), hub.served() - before) == (rows, fetched)


def test_any_session_will_do(spark: SparkSession, hub: Hub) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    register(spark)
    hub.send("queue/any", "x")
    assert values(load(spark, hub, subscribe="queue/any").filter(col("offset") > 0)) == ["x"]


def test_a_dead_letter_has_its_number_of_attempts(spark: SparkSession, hub: Hub) -> None:
    hub.send("queue/tried/dead", "x", properties={"dead-attempts": 5})
    (row,) = load(spark, hub, subscribe="queue/tried/dead").collect()
    assert row.attempt == 5


# Where messages are.


def test_old_ones_from_the_lake_and_new_ones_from_the_store(
    spark: SparkSession, start_hub: StartHub, tmp_path: Path
) -> None:
    hub = start_hub(QUICK)
    hub.send("queue/q", "1", "2")
    (last,) = hub.send("topic/t", "3")
    hub.until_sealed(last, tmp_path / "hub/data/lake")
    hub.end(signal.SIGKILL)
    hub = start_hub(NEVER)
    hub.send("queue/q", "4")
    hub.send("topic/t", "5")
    frame = load(spark, hub, subscribe="queue/q,topic/t")
    assert values(frame) == ["1", "2", "3", "4", "5"]
    assert frame.select("offset").distinct().count() == 5


def test_what_is_gone_fails_unless_it_may(
    spark: SparkSession, forgetful: Hub, tmp_path: Path
) -> None:
    body = {"destinations": ["queue/gone"], "starts": {"*": 1}}
    until(lambda: bool(forgetful.address.post("/v1/log/plan", body)["missing"]))
    indexes = json.dumps({"queue/gone": {forgetful.node: 1}})
    options = {"subscribe": "queue/gone", "startingOffsets": indexes}
    message = message_of(lambda: load(spark, forgetful, **options).collect())
    assert "no longer there: queue/gone 1 to " in message and "failOnDataLoss" in message
    assert values(load(spark, forgetful, **options, failOnDataLoss="false")) == ["3"]
    assert values(load(spark, forgetful, subscribe="queue/gone")) == ["3"]
    message = message_of(lambda: run(spark, forgetful, tmp_path, **options))
    assert "no longer there: queue/gone" in message
    assert run(spark, forgetful, tmp_path / "other", **options, failOnDataLoss="false") == ["3"]


# Streams.


def begin(
    spark: SparkSession, hub: Hub, folder: Path, *, now: bool = True, **options: Any
) -> StreamingQuery:
    """A stream that writes values to files."""
    options = {"hub": hub.url, "patienceS": "30", "startingOffsets": "earliest"} | options
    stream = spark.readStream.format("crosswire").options(**options).load()
    writer = stream.select("value", "offset").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    trigger: dict[str, Any] = {"availableNow": True} if now else {"processingTime": "0 seconds"}
    return writer.trigger(**trigger).start(str(folder / "out"))


def written(spark: SparkSession, folder: Path) -> list[str]:
    if not (folder / "out/_spark_metadata").exists():
        return []
    return values(spark.read.schema("value binary").parquet(str(folder / "out")))


def run(spark: SparkSession, hub: Hub, folder: Path, **options: Any) -> list[str]:
    """What is written when a stream has read all that was there."""
    begin(spark, hub, folder, **options).awaitTermination()
    return written(spark, folder)


def test_a_stream_goes_on_where_it_was(spark: SparkSession, hub: Hub, tmp_path: Path) -> None:
    hub.send("queue/stream/a", "1", "2")
    options = {"subscribePattern": "queue/stream/.*"}
    assert run(spark, hub, tmp_path, **options) == ["1", "2"]
    hub.send("queue/stream/a", "3")
    hub.send("queue/stream/b", "4")
    hub.send("queue/unrelated", "no")
    assert run(spark, hub, tmp_path, **options) == ["1", "2", "3", "4"]
    assert run(spark, hub, tmp_path, **options) == ["1", "2", "3", "4"]


def test_a_trigger_takes_no_more_than_it_may(spark: SparkSession, hub: Hub, tmp_path: Path) -> None:
    for number in range(5):
        hub.send("queue/limited", f"{number}a", f"{number}b")
        hub.send("queue/unrelated", *"123")
    query = begin(spark, hub, tmp_path, subscribe="queue/limited", maxOffsetsPerTrigger="4")
    query.awaitTermination()
    assert [each.numInputRows for each in query.recentProgress if each.numInputRows] == [4, 4, 2]
    assert len(written(spark, tmp_path)) == 10


def test_each_destination_of_a_stream_begins_at_its_own_offset(
    spark: SparkSession, hub: Hub, tmp_path: Path
) -> None:
    a = hub.send("queue/own/a", "a0", "a1", "a2")
    b = hub.send("queue/own/b", "b0", "b1")
    a += hub.send("queue/own/a", "a3", "a4")
    indexes = {"queue/own/a": {hub.node: a[1]}, "*": {hub.node: b[1]}}
    options: dict[str, Any] = {"subscribe": "queue/own/+", "startingOffsets": json.dumps(indexes)}
    query = begin(spark, hub, tmp_path, **options, maxOffsetsPerTrigger="1")
    query.awaitTermination()
    assert written(spark, tmp_path) == ["a1", "a2", "a3", "a4", "b1"]
    assert max(each.numInputRows for each in query.recentProgress) == 1


def test_a_new_stream_begins_with_the_latest(spark: SparkSession, hub: Hub, tmp_path: Path) -> None:
    hub.send("queue/latest", "old")
    options = {"subscribe": "queue/latest", "startingOffsets": "latest"}
    assert run(spark, hub, tmp_path, **options) == []
    hub.send("queue/latest", "new")
    assert run(spark, hub, tmp_path, **options) == ["new"]


def test_a_stream_outlives_the_hub(
    spark: SparkSession, start_hub: StartHub, tmp_path: Path
) -> None:
    hub = start_hub(QUICK)
    hub.send("queue/q", "1", "2")
    query = begin(spark, hub, tmp_path, now=False, subscribe="queue/q")
    try:
        until(lambda: written(spark, tmp_path) == ["1", "2"])
        hub.send("queue/q", "3")
        hub.end(signal.SIGKILL)
        hub = start_hub(QUICK, port=hub.port)
        hub.send("queue/q", "4")
        until(lambda: written(spark, tmp_path) == ["1", "2", "3", "4"])
    finally:
        query.stop()
    hub.send("queue/q", "5")
    assert run(spark, hub, tmp_path, subscribe="queue/q") == ["1", "2", "3", "4", "5"]


def test_a_task_goes_on_where_a_killed_hub_left_off(start_hub: StartHub) -> None:
    hub = start_hub(NO_LAKE)
    expected = [each for _ in range(20) for each in hub.send("topic/t", *(["x" * 10_000] * 100))]
    body = {"destinations": ["topic/t"], "starts": {"*": 1}, "parts": 1}
    planned = hub.address.post("/v1/log/plan", body)
    ((first, end),) = planned["splits"]
    part = LogPartition(hub.node, ["topic/t"], planned["starts"], planned["ends"], first, end)
    fetched = fetch(hub.address, part, ["offset", "value"], strict=True)
    rows = next(fetched).column(0).to_pylist()
    hub.end(signal.SIGKILL)
    start_hub(NO_LAKE, port=hub.port)
    for batch in fetched:
        rows += batch.column(0).to_pylist()
    assert rows == expected


def test_another_hub_is_not_taken_for_the_same(
    spark: SparkSession, hub: Hub, forgetful: Hub, tmp_path: Path
) -> None:
    hub.send("queue/another", "1")
    forgetful.send("queue/another", "2")
    assert run(spark, hub, tmp_path, subscribe="queue/another") == ["1"]
    message = message_of(lambda: run(spark, forgetful, tmp_path, subscribe="queue/another"))
    assert f"this is the hub of node {forgetful.node}" in message
    going_on = {"subscribe": "queue/another", "failOnDataLoss": "false"}
    assert run(spark, forgetful, tmp_path, **going_on) == ["1", "2"]


# What is wrong.


def test_a_wrong_option_is_reported(spark: SparkSession, hub: Hub) -> None:
    message = message_of(lambda: load(spark, hub, subscribe="queue/a", startingOffset="latest"))
    assert "has no option" in message and "did you mean startingOffsets?" in message


def test_no_hub_is_reported(spark: SparkSession) -> None:
    options = {"hub": "http://127.0.0.1:9", "patienceS": "0", "subscribe": "queue/a"}
    frame = spark.read.format("crosswire").options(**options).load()
    message = message_of(frame.collect)
    assert "no answer from the hub at http://127.0.0.1:9: Connection refused" in message


def test_a_wrong_token_is_reported(spark: SparkSession, start_hub: StartHub) -> None:
    user = '[[users]]\nname = "anna"\ntoken = "a-secret-of-anna"\nconsume = ["queue/a"]\n'
    hub = start_hub(user, token="a-secret-of-anna")
    frame = load(spark, hub, subscribe="queue/a", token="not-her-secret-at-all")
    assert "unauthenticated" in message_of(frame.collect)
    frame = load(spark, hub, subscribe="queue/b", token="a-secret-of-anna")
    assert "anna may not consume queue/b" in message_of(frame.collect)
    assert load(spark, hub, subscribe="queue/a", token="a-secret-of-anna").collect() == []


def test_rows_bytes_and_lag_are_reported_by_destination(hub: Hub) -> None:
    """In `query.lastProgress["sources"][0]["latestOffset"]`."""
    read, *_ = hub.send("queue/lagging", "1", "22", "333")
    hub.send("topic/lagging/a", "4444")
    options = {"hub": hub.url, "subscribe": "queue/lagging,topic/lagging/#"}
    reader = LogStreamReader(read_options(options, stream=True))
    assert reader.reportLatestOffset().keys() == {"*"}
    start = {"*": {hub.node: read + 1}}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert reader.reportLatestOffset() == end | {
        "rows": {"queue/lagging": 2, "topic/lagging/#": 1},
        "bytes": {"queue/lagging": 5, "topic/lagging/#": 4},
        "lag": {"queue/lagging": 0, "topic/lagging/#": 0},
    }
    # Of a batch with a limit: what it has, and what is left after it.
    reader.latestOffset(start, ReadMaxRows(1))
    found = reader.reportLatestOffset()
    assert (found["rows"], found["bytes"], found["lag"]) == (
        {"queue/lagging": 1, "topic/lagging/#": 0},
        {"queue/lagging": 2, "topic/lagging/#": 0},
        {"queue/lagging": 1, "topic/lagging/#": 1},
    )
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert reader.reportLatestOffset()["lag"] == {"queue/lagging": 0, "topic/lagging/#": 0}


def test_columns_are_in_the_plan(
    spark: SparkSession, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark does not tell a Python source which columns it needs: the option `columns` does."""
    hub.send("queue/explained", "1")
    register(spark)
    reader = spark.read.format("crosswire").option("hub", hub.url)
    frame = reader.option("subscribe", "queue/explained").option("columns", "topic,offset").load()
    frame.explain("formatted")
    plan = capsys.readouterr().out
    assert "[topic#" in plan and "value#" not in plan
