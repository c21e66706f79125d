"""What a hub noted, in a stream: the same deliveries and passages as in a batch, at every step."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from crosswire.lake.files import write
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.stream.ledger_tables import _near
from crosswire.pipeline.stream.run import Stream, run_stream
from crosswire.pipeline.summary import COMPARED_TABLES, LEDGER_TABLES, Summary
from crosswire.pipeline.visible_tables import VisibleTables
from tests.pipeline.records import Records
from tests.pipeline.stream.test_run import Tables, few_tasks, tables
from tests.pipeline.stretched import DURATION, MINUTE, NEWS, START, holed, numbered, until

__all__ = ["few_tasks"]

CHOSEN = frozenset(LEDGER_TABLES)
LATE_US = 20_000_000


class Lake:
    """The lake of a hub, given out in pieces."""

    def __init__(self, folder: Path, rows: dict[str, pa.Table]) -> None:
        self.folder = folder
        self._rows = {name: numbered(table) for name, table in rows.items()}
        self._given = dict.fromkeys(rows, 0)

    def give(self, until_us: int, **ahead_us: int) -> None:
        """What was noted until then; of some tables a little more or less."""
        for name, rows in self._rows.items():
            first, end = self._given[name], until(rows, until_us + ahead_us.get(name, 0))
            write(self.folder, name, rows.slice(first, end - first))
            self._given[name] = end


def batch(spark: SparkSession, lake: Path, output: Path) -> tuple[Tables, Summary]:
    given = find_inputs([str(lake)])
    summary = run_batch(spark, BatchJob(given, str(output), CHOSEN, late_us=LATE_US), quiet=True)
    return tables(output), summary


def once(spark: SparkSession, lake: Path, output: Path) -> tuple[Tables, Summary]:
    stream = Stream((str(lake),), str(output), once=True, tables=CHOSEN, late_us=LATE_US)
    summary = run_stream(spark, stream)
    return tables(output), summary


@pytest.mark.long  # `test_run.test_in_steps` has these rows, too, and all tables
def test_at_every_step_and_with_rows_missing(spark: SparkSession, tmp_path: Path) -> None:
    """What is settled is written once; a message with a new step after that is brought back."""
    lake = Lake(tmp_path / "lake", holed())
    for until_us, ahead in ((4 * MINUTE, MINUTE // 6), (DURATION, 0)):
        lake.give(until_us, ledger=ahead, messages=-ahead)
        found, summary = once(spark, lake.folder, tmp_path / "out")
        for name in COMPARED_TABLES:
            files = VisibleTables(str(tmp_path / "out")).files(f"gold.{name}")
            assert any("kept=true" in path for path in files)
    expected, whole = batch(spark, lake.folder, tmp_path / "batch")
    assert found == expected
    assert summary.findings == whole.findings
    counts = ({name: n for name, n in each.rows.items() if n} for each in (summary, whole))
    assert next(counts) == next(counts)
    news = [row for row in found["gold/deliveries"] if f"'{NEWS}'" in row]
    assert sorted("('connection', 'late')" in row for row in news) == [False, True]


@pytest.mark.long  # answers and dead letters are in `test_run.test_in_steps`, late steps below
def test_a_hub_without_a_tap(spark: SparkSession, tmp_path: Path) -> None:
    """An answer, a dead letter that waits, and a topic that is read after an hour."""
    records = Records(START)
    with records.on("c", "emp"):
        news = records.recorded("accepted", payload=b"news", destination="topic/news")
        asked = records.recorded("accepted", payload=b"?", destination="service/s", kind="request")
        records.recorded("accepted", payload=b"!", destination="service/s", kind="response")
        records.recorded("answered", identifier=asked, destination="service/s", after_us=0)
        poison = records.recorded("accepted", payload=b"p")
        records.recorded("dead", identifier=poison, connection="")
        letter = records.recorded("accepted", payload=b"p", destination="queue/q/dead")
        records.recorded("accepted", payload=b"2", after_us=2 * MINUTE)
        records.recorded(
            "delivered", identifier=news, destination="topic/news", after_us=60 * MINUTE
        )
        records.recorded("settled", identifier=letter, destination="queue/q/dead")
        records.recorded("accepted", payload=b"3", after_us=2 * MINUTE)
    ledger, messages = records.rows()
    lake = Lake(tmp_path / "lake", {"ledger": ledger, "messages": messages})
    for until_us in (10 * MINUTE, 100 * MINUTE):
        lake.give(until_us)
        found, _ = once(spark, lake.folder, tmp_path / "out")
    assert found == batch(spark, lake.folder, tmp_path / "batch")[0]
    assert (len(found["gold/deliveries"]), len(found["open/deliveries"])) == (4, 2)


def test_a_row_stays_as_rich_when_the_lake_no_longer_has_its_steps(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Retention takes all that the first run has read; then old messages are heard of again."""
    records = Records(START)
    with records.on("c", "emp"):
        news = records.recorded("accepted", payload=b"news", destination="topic/news")
        for step in ("delivered", "settled"):
            records.recorded(step, identifier=news, destination="topic/news", subscription="one")
        shaky = records.recorded("accepted", payload=b"twice", destination="queue/shaky")
        records.recorded("delivered", identifier=shaky, destination="queue/shaky", attempt=1)
        records.recorded("returned", identifier=shaky, destination="queue/shaky", attempt=1)
        records.recorded("delivered", identifier=shaky, destination="queue/shaky", attempt=2)
        records.recorded("settled", identifier=shaky, destination="queue/shaky", attempt=2)
        calm = records.recorded("accepted", payload=b"calm", destination="queue/calm")
        records.recorded("delivered", identifier=calm, destination="queue/calm", attempt=1)
        records.recorded("refused", identifier=calm, destination="queue/calm", attempt=1)
        records.recorded("delivered", identifier=calm, destination="queue/calm", attempt=2)
        records.recorded("settled", identifier=calm, destination="queue/calm", attempt=2)
        records.recorded("accepted", payload=b"2", after_us=2 * MINUTE)
        for step in ("delivered", "settled"):
            records.recorded(
                step,
                identifier=news,
                destination="topic/news",
                subscription="two",
                after_us=30 * MINUTE,
            )
        # A second settlement of a message that was settled before.
        records.recorded("settled", identifier=calm, destination="queue/calm", attempt=2)
        records.recorded("settled", identifier=shaky, destination="queue/shaky", attempt=2)
        records.recorded("accepted", payload=b"3", after_us=2 * MINUTE)
    ledger, messages = records.rows()
    rows = {"ledger": ledger, "messages": messages}
    lake, whole = Lake(tmp_path / "lake", rows), Lake(tmp_path / "whole", rows)
    lake.give(10 * MINUTE)
    first, _ = once(spark, lake.folder, tmp_path / "out")
    for file in lake.folder.rglob("*.parquet"):
        file.unlink()
    lake.give(100 * MINUTE)
    found, summary = once(spark, lake.folder, tmp_path / "out")
    whole.give(100 * MINUTE)
    expected, in_one_go = batch(spark, whole.folder, tmp_path / "batch")
    assert len(first["gold/deliveries"]) == 3
    assert found == expected
    assert summary.findings == in_one_go.findings


def test_messages_are_called_back_by_ranges_of_ids(spark: SparkSession) -> None:
    """A range for those that are near to each other: the rest of the lake is skipped."""
    wanted = spark.createDataFrame(
        [("n", 5), ("n", 7), ("n", 10_000_000)], "node string, id bigint"
    )
    ids = [(each,) for each in (4, 5, 6, 7, 8, 5_000_000, 9_999_999, 10_000_000)]
    found = spark.createDataFrame(ids, "id bigint").where(_near(wanted)).collect()
    assert [row.id for row in found] == [5, 6, 7, 10_000_000]
