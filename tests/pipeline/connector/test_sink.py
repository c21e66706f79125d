"""Writing to a hub from Spark: each row once, whichever process is killed at which step."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from crosswire.cli.hub import Api
from crosswire.client.native.emp import EmpClient
from crosswire.errors import InvalidInput, PipelineError, RequestFailed
from crosswire.pipeline import register
from crosswire.pipeline.connector.layout import SinkLayout
from crosswire.pipeline.connector.sink import CrosswireStreamWriter, CrosswireWriter
from crosswire.pipeline.spark import plain_errors
from tests.cli.conftest import RunningHub
from tests.pipeline.connector.sink_driver import QUEUE, begin
from tests.pipeline.proxy import proxy_to

WAIT_S = 60.0
VALUE = StructType([StructField("value", StringType())])


@pytest.fixture(scope="module", autouse=True)
def registered(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """One for those tests that leave it alive; each has a queue of its own."""
    folder = tmp_path_factory.mktemp("hub")
    config = folder / "crosswire.toml"
    config.write_text("[queues.small]\nmax_length = 5\n")
    with running(folder / "data", "--config", str(config)) as hub:
        yield hub.hub


class Process:
    """A hub that can be killed and started again on the same port and data."""

    def __init__(self, data: Path, *options: str) -> None:
        self._data = data
        self._options = options
        self.hub = RunningHub(data, *options)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self.hub.process.poll() is None:
            self.hub.end(signal.SIGKILL)
        for stream in (self.hub.process.stdout, self.hub.process.stderr):
            assert stream is not None
            stream.close()

    def kill(self) -> None:
        self._end()

    def start(self) -> None:
        self.hub = RunningHub(self._data, *self._options)


def running(data: Path, *options: str) -> Process:
    return Process(data, *options)


def write(rows: DataFrame, url: str, **options: Any) -> None:
    """As a user would; errors in plain words."""
    with plain_errors():
        rows.write.format("crosswire").options(hub=url, **options).mode("append").save()


def numbers(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) value")


def text_of(delivery: dict[str, Any]) -> str:
    """A text that is a JSON text, too, as a number is, crosses to EMP as JSON."""
    return str(delivery["text"] if "text" in delivery else delivery["json"])


def texts(count: int) -> list[str]:
    return [str(each) for each in range(count)]


def api(hub: RunningHub) -> Api:
    return Api(hub.url, None)


def length(hub: RunningHub, queue: str) -> int:
    rows = api(hub).get("/v1/queues", contains=queue)["queues"]
    return sum(row["length"] for row in rows if row["name"] == queue)


def consumed(hub: RunningHub, queue: str, count: int) -> list[dict[str, Any]]:
    """What a consumer gets over EMP: `count` messages, and then the queue is empty."""
    return asyncio.run(_consume(hub, queue, count))


async def _consume(hub: RunningHub, queue: str, count: int) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = []
    enough = asyncio.Event()

    async def deliver(data: dict[str, Any]) -> None:
        given.append(data)
        if len(given) >= count:
            enough.set()

    async with EmpClient("127.0.0.1", hub.port("emp"), handlers={"$deliver": deliver}) as client:
        await client.request("$subscribe", {"destination": f"queue/{queue}", "window": 1000})
        async with asyncio.timeout(WAIT_S):
            await enough.wait()
            while await asyncio.to_thread(length, hub, queue):
                await asyncio.sleep(0.01)
    assert len(given) == count
    return given


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do it beside what is in the block: Spark knows a session's sources on its thread only."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        yield
        future.result(WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# A batch.


def test_a_batch_with_the_option_destination(spark: SparkSession, hub: RunningHub) -> None:
    write(numbers(spark, 1000), hub.url, destination="queue/option")
    given = consumed(hub, "option", 1000)
    assert [text_of(each) for each in given] == texts(1000)
    assert api(hub).get("/v1/staged")["staged"] == []


def test_a_batch_with_a_column_destination_and_all_others(
    spark: SparkSession, hub: RunningHub
) -> None:
    rows = spark.sql(
        """
        select 'queue/column' destination, cast('{"n":1}' as binary) value,
            cast('k' as binary) key, 'application/json' content_type, 'c-1' correlation,
            array(named_struct('key', 'price', 'value', cast('12' as binary)),
                  named_struct('key', 'name', 'value', cast('tea' as binary))) headers
        union all
        select 'topic/column', cast('x' as binary), null, null, null, null
        """
    )
    write(rows, hub.url)
    (given,) = consumed(hub, "column", 1)
    assert given["json"] == {"n": 1}
    assert given["properties"] == {"price": 12, "name": "tea"}
    steps = api(hub).get(f"/v1/messages/{given['id']}")["steps"]
    assert [step["step"] for step in steps] == ["accepted", "delivered", "settled"]
    (published,) = api(hub).get("/v1/topics/column", messages=10)["messages"]
    assert (published["base64"], published["content_type"]) == ("eA==", "application/octet-stream")


def test_what_was_read_can_be_written_elsewhere(spark: SparkSession, hub: RunningHub) -> None:
    headers = "array(named_struct('key', 'n', 'value', cast('1.5' as binary))) headers"
    rows = numbers(spark, 3).selectExpr("value", headers, "value key")
    write(rows, hub.url, destination="topic/first", contentType="text/plain")
    read = (
        spark.read.format("crosswire")
        .options(hub=hub.url, subscribe="topic/first", includeHeaders="true")
        .load()
    )
    write(read, hub.url, destination="queue/second")
    given = consumed(hub, "second", 3)
    assert [text_of(each) for each in given] == texts(3)
    assert [each["properties"] for each in given] == [{"n": 1.5}] * 3


def test_a_batch_with_a_name_is_written_once_however_often_it_is_run(
    spark: SparkSession, hub: RunningHub
) -> None:
    for _ in range(2):
        write(numbers(spark, 10), hub.url, destination="queue/n", producer="nightly", batch=7)
    assert length(hub, "n") == 10
    with pytest.raises(PipelineError, match="the last batch that nightly committed is 7"):
        write(numbers(spark, 1, 1), hub.url, destination="queue/n", producer="nightly", batch=6)
    write(numbers(spark, 1), hub.url, destination="queue/n", producer="nightly", batch=8)
    assert length(hub, "n") == 11


def test_no_rows_are_no_messages(spark: SparkSession, hub: RunningHub) -> None:
    write(numbers(spark, 10).where("value = 'x'"), hub.url, destination="queue/none")
    assert length(hub, "none") == 0


def test_a_failed_task_leaves_nothing(spark: SparkSession, hub: RunningHub) -> None:
    rows = numbers(spark, 1000).selectExpr("value", "raise_error('no') correlation").limit(1000)
    with pytest.raises(PipelineError):
        write(
            rows.selectExpr("value", "if(value = '999', cast(correlation as string), '') key"),
            hub.url,
            destination="queue/failed",
        )
    assert length(hub, "failed") == 0
    assert api(hub).get("/v1/staged")["staged"] == []


def test_a_full_queue_refuses_the_whole_batch(spark: SparkSession, hub: RunningHub) -> None:
    with pytest.raises(PipelineError, match="queue/small has no room for 6 messages"):
        write(numbers(spark, 6), hub.url, destination="queue/small", patienceS=0)
    assert length(hub, "small") == 0
    write(numbers(spark, 5), hub.url, destination="queue/small", patienceS=0)
    assert length(hub, "small") == 5


def test_who_waits_for_a_full_queue_gets_in_when_there_is_room(
    spark: SparkSession, hub: RunningHub
) -> None:
    """Backpressure: Spark waits, and goes on when a consumer has made room."""
    with proxy_to(hub.port("http")) as proxy:
        api(hub).post("/v1/queues/small/purge", {})
        write(numbers(spark, 5), proxy.url, destination="queue/small")
        before = len(proxy.paths)

        def make_room() -> None:
            until(lambda: len(proxy.paths) - before > 2)
            api(hub).post("/v1/queues/small/purge", {})

        with meanwhile(make_room):
            write(numbers(spark, 2, 1), proxy.url, destination="queue/small")
        assert length(hub, "small") == 2


def test_users_write_what_they_may(spark: SparkSession, tmp_path: Path) -> None:
    config = tmp_path / "crosswire.toml"
    config.write_text(
        '[[users]]\nname = "w"\ntoken = "the token of w ..."\nproduce = ["queue/mine"]\n'
    )
    with running(tmp_path / "data", "--config", str(config)) as process:
        url, rows = process.hub.url, numbers(spark, 3, 1)
        with pytest.raises(PipelineError, match="of a user is needed"):
            write(rows, url, destination="queue/mine", token="a wrong one, and long")
        with pytest.raises(PipelineError, match="w may not produce queue/yours"):
            write(rows, url, destination="queue/yours", token="the token of w ...")
        write(rows, url, destination="queue/mine", token="the token of w ...")


# What can't be written.


def columns_of(schema: str) -> StructType:
    parsed = StructType.fromDDL(schema)
    assert isinstance(parsed, StructType)
    return parsed


@pytest.mark.parametrize(
    ("schema", "options", "words"),
    [
        ("value int", {}, "the column value is int, and can be string or binary"),
        ("key string", {}, "there is no column value"),
        ("value string, prize int", {}, "a message has no column prize"),
        ("value string", {"destination": ""}, "there is no destination"),
        ("value string", {"destination": "orders"}, "does not start with queue/"),
        ("value string", {"destination": "service/s"}, "is a service: messages go to"),
        ("value string", {"destnation": "queue/q"}, "did you mean destination?"),
        ("value string", {"batch": "1"}, "names its producer needs the option batch"),
        ("value string", {"producer": "p"}, "names its producer needs the option batch"),
        ("value string", {"producer": "p", "batch": "x"}, "batch is a number"),
        ("value string", {"producer": "a/b", "batch": "1"}, "without slashes"),
        ("value string, content_type string", {"contentType": "a/b"}, "not both"),
        ("value string, headers map<string,string>", {}, "the column headers is map"),
        ("value string", {"hub": "gopher://x"}, "not the URL of a hub"),
    ],
)
def test_what_can_t_be_written(schema: str, options: dict[str, str], words: str) -> None:
    given = {"destination": "queue/q", **options}
    with pytest.raises(InvalidInput) as caught:
        CrosswireWriter(columns_of(schema), given, False)
    assert words in str(caught.value)


def test_messages_are_not_overwritten_and_a_stream_numbers_its_batches() -> None:
    given = {"destination": "queue/q"}
    with pytest.raises(InvalidInput, match="mode append"):
        CrosswireWriter(VALUE, given, True)
    with pytest.raises(InvalidInput, match="numbers its batches itself"):
        CrosswireStreamWriter(VALUE, {**given, "batch": "1"}, False)


def test_a_user_learns_in_plain_words_what_is_wrong(spark: SparkSession, hub: RunningHub) -> None:
    with pytest.raises(PipelineError, match=r"^a message has no column id; it has destination"):
        write(spark.range(1), hub.url, destination="queue/q")


@pytest.mark.parametrize(
    ("schema", "options", "columns"),
    [
        ("topic string, value string", {}, {"value": 1, "destination": 0}),
        ("topic string, destination string, value string", {}, {"destination": 1, "value": 2}),
        ("topic string, value string", {"topic": "queue/q"}, {"value": 1}),
        ("value string, offset long, timestamp timestamp", {"topic": "queue/q"}, {"value": 0}),
    ],
)
def test_kafkas_names_do(schema: str, options: dict[str, str], columns: dict[str, int]) -> None:
    layout = SinkLayout.of(columns_of(schema), options)
    assert (dict(layout.columns), layout.destination) == (columns, options.get("topic", ""))


# Attempts: the writer itself, as Spark calls it in a task.


def batches(*runs: list[str]) -> Iterator[pa.RecordBatch]:
    for run in runs:
        yield pa.record_batch({"value": run})


def test_of_two_attempts_of_a_task_the_one_that_spark_names_counts(hub: RunningHub) -> None:
    writer = CrosswireWriter(VALUE, {"hub": hub.url, "destination": "queue/twice"}, False)
    slow = writer.write(batches(["a", "b"]))
    quick = writer.write(batches(["a"], ["b"]))
    other = writer.write(batches(["c"]))
    assert length(hub, "twice") == 0
    writer.commit([quick, None, other])
    writer.commit([quick, None, other])
    assert [text_of(each) for each in consumed(hub, "twice", 3)] == ["a", "b", "c"]
    assert slow.attempt != quick.attempt
    assert api(hub).get("/v1/staged")["staged"] == []


def test_an_attempt_that_broke_off_does_not_count(hub: RunningHub) -> None:
    def breaking() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": ["x" * 5_000_000, "y"]})
        raise OSError("the executor is gone")

    writer = CrosswireWriter(VALUE, {"hub": hub.url, "destination": "queue/broke"}, False)
    with pytest.raises(OSError, match="is gone"):
        writer.write(breaking())
    writer.commit([writer.write(batches(["x", "y"]))])
    assert [text_of(each) for each in consumed(hub, "broke", 2)] == ["x", "y"]


def test_rows_of_any_size_are_cut_into_parts(hub: RunningHub) -> None:
    rows = [str(each) * 1000 for each in range(2000)]
    large = "z" * 6_000_000
    writer = CrosswireWriter(VALUE, {"hub": hub.url, "destination": "queue/cut"}, False)
    staged = writer.write(batches(rows, [large], [], ["end"]))
    assert (staged.parts >= 3, staged.messages) == (True, 2002)
    writer.commit([staged])
    given = consumed(hub, "cut", 2002)
    assert [text_of(each) for each in given] == [*rows, large, "end"]


def test_a_staged_attempt_that_is_gone_fails_the_commit(hub: RunningHub) -> None:
    writer = CrosswireWriter(VALUE, {"hub": hub.url, "destination": "queue/gone"}, False)
    staged = writer.write(batches(["a"]))
    writer.abort([staged])
    with pytest.raises(RequestFailed, match="the batch has to be written again"):
        writer.commit([staged])
    assert length(hub, "gone") == 0


# The hub is killed.


def test_a_hub_that_is_killed_between_staging_and_commit_knows_what_was_staged(
    spark: SparkSession, tmp_path: Path
) -> None:
    with running(tmp_path / "data") as process, proxy_to(process.hub.port("http")) as proxy:
        gate = proxy.gate("/commit", "before")

        def kill() -> None:
            gate.wait()
            process.kill()
            gate.cut()
            process.start()
            proxy.target = process.hub.port("http")

        with meanwhile(kill):
            write(numbers(spark, 1000), proxy.url, destination="queue/q")
        given = consumed(process.hub, "q", 1000)
        assert Counter(text_of(each) for each in given) == Counter(texts(1000))


def test_a_hub_that_is_killed_in_the_middle_of_a_commit_goes_on_with_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    count = 100_000
    with running(tmp_path / "data") as process, proxy_to(process.hub.port("http")) as proxy:
        taken: list[int] = []

        def kill() -> None:
            until(lambda: length(process.hub, "q") > 0)
            taken.append(length(process.hub, "q"))
            process.kill()
            process.start()
            proxy.target = process.hub.port("http")

        with meanwhile(kill):
            write(numbers(spark, count), proxy.url, destination="queue/q")
        assert 0 < taken[0] < count
        found = api(process.hub).get("/v1/staged")
        assert (found["staged"], found["staged_bytes"]) == ([], 0)
        assert length(process.hub, "q") == count
        read = spark.read.format("crosswire").options(hub=process.hub.url, subscribe="queue/q")
        values = read.load().selectExpr("cast(value as string) value")
        assert (values.count(), values.distinct().count()) == (count, count)


# A stream, and it is killed.


def lines(folder: Path, *files: range) -> Path:
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(files):
        file = folder / f"{number}.txt"
        file.write_text("".join(f"{line}\n" for line in each))
        # A stream reads them in order of their age.
        os.utime(file, (number, number))
    return folder


def test_a_stream_is_written_batch_by_batch(
    spark: SparkSession, hub: RunningHub, tmp_path: Path
) -> None:
    given = lines(tmp_path / "in", range(10), range(10, 25))
    for _ in range(2):
        begin(spark, hub.url, str(given), str(tmp_path / "checkpoint")).awaitTermination()
    found = consumed(hub, QUEUE, 25)
    assert Counter(text_of(each) for each in found) == Counter(texts(25))
    (producer,) = [
        row
        for row in api(hub).get("/v1/ingest")["producers"]
        if row["producer"].startswith("query-")
    ]
    assert (producer["batch"], producer["messages"]) == (1, 15)


def test_a_query_that_begins_anew_under_an_old_name_is_found_out(
    spark: SparkSession, hub: RunningHub, tmp_path: Path
) -> None:
    given = lines(tmp_path / "in", range(3))

    def run(checkpoint: str) -> None:
        with plain_errors():
            (
                spark.readStream.text(str(given))
                .writeStream.format("crosswire")
                .options(hub=hub.url, destination="queue/anew", producer="same")
                .option("checkpointLocation", str(tmp_path / checkpoint))
                .trigger(availableNow=True)
                .start()
                .awaitTermination()
            )

    run("first")
    with pytest.raises(PipelineError, match="needs another `producer`"):
        run("second")
    assert length(hub, "anew") == 3


Step = tuple[str, Literal["before", "after"]]
COMMITTED: Step = ("/commit", "after")
STEPS: tuple[Step, ...] = (("/attempts/", "after"), ("/commit", "before"), COMMITTED)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((COMMITTED,), id="committed"),
        pytest.param(STEPS, id="all", marks=pytest.mark.long),  # each starts a Spark
    ],
)
def test_a_query_that_is_killed_at_a_step_of_its_commit_writes_each_row_once(
    spark: SparkSession, tmp_path: Path, steps: tuple[Step, ...]
) -> None:
    """When a task has staged; before the hub gets the commit; and after it has committed, when
    Spark does not know yet. All on the same batch of the same checkpoint. Killed earlier, a query
    leaves nothing at the hub, as if it had not begun."""
    given = lines(tmp_path / "in", range(50), range(50, 80))
    checkpoint = tmp_path / "checkpoint"
    with running(tmp_path / "data") as process, proxy_to(process.hub.port("http")) as proxy:
        for part, when in steps:
            gate = proxy.gate(part, when)
            query = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "tests.pipeline.connector.sink_driver"),
                    *(proxy.url, str(given), str(checkpoint)),
                ],
                start_new_session=True,
            )
            try:
                gate.wait()
            finally:
                os.killpg(query.pid, signal.SIGKILL)
                query.wait()
            gate.cut()
            assert not list(checkpoint.glob("commits/0"))
        assert length(process.hub, QUEUE) == 50
        begin(spark, proxy.url, str(given), str(checkpoint)).awaitTermination()
        found = consumed(process.hub, QUEUE, 80)
        assert Counter(text_of(each) for each in found) == Counter(texts(80))
        assert api(process.hub).get("/v1/staged")["staged"] == []
