"""gold.steps, gold.depth and gold.lag of a ledger that is known row by row."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from crosswire.pipeline.tables.depth import depth
from crosswire.pipeline.tables.lag import lag
from crosswire.pipeline.tables.minutes import combined, minutes, opening, with_leaving
from crosswire.pipeline.tables.steps import gold_steps, with_messages
from tests.pipeline.records import Records

MINUTE = 60_000_000
START = 100 * MINUTE


def recorded() -> Records:
    """A queue that fills and drains, and a subscription that stops after its first message."""
    records = Records(START)
    with records.on("c", "emp"):
        first = records.recorded("accepted", payload=b"1")
        second = records.recorded("accepted", payload=b"2")
        records.recorded("delivered", identifier=first, attempt=1)
        records.recorded("settled", identifier=first, attempt=1)
        news = records.recorded("accepted", payload=b"n", destination="topic/news")
        records.recorded(
            "delivered", identifier=news, destination="topic/news", attempt=1, subscription="s"
        )
        # The second is settled twice, after a minute: it leaves its queue once.
        records.recorded("settled", identifier=second, after_us=MINUTE)
        records.recorded("settled", identifier=second)
        # Of this one the ledger does not have the acceptance.
        records.recorded("settled", identifier=7)
        records.recorded("accepted", payload=b"m", destination="topic/news")
        records.recorded("accepted", payload=b"o", destination="topic/news", after_us=2 * MINUTE)
        records.recorded("accepted", payload=b"3")
    return records


@pytest.fixture(scope="module")
def steps(spark: SparkSession) -> DataFrame:
    return with_messages(*recorded().records(spark)).cache()


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in frame.orderBy("minute").collect()]


def test_depth_is_what_is_left_at_the_end_of_a_minute(steps: DataFrame) -> None:
    found = rows(depth(minutes(with_leaving(steps))))
    assert [(row["minute"] // MINUTE, row["depth"]) for row in found] == [
        (100, 1),
        (101, 0),
        (103, 1),
    ]
    assert [(row["accepted"], row["gone"], row["settled"]) for row in found] == [
        (2, 1, 1),
        (0, 1, 3),
        (1, 0, 0),
    ]


def test_a_subscription_that_stopped_falls_behind(steps: DataFrame) -> None:
    found = rows(lag(minutes(with_leaving(steps))))
    assert [(row["minute"] // MINUTE, row["accepted"], row["delivered"]) for row in found] == [
        (100, 1, 1),
        (101, 1, 0),
        (103, 1, 0),
    ]
    assert found[0]["lag_us"] == 0 and found[0]["position"] == found[0]["newest"]
    assert 0 < found[1]["lag_us"] < 2 * MINUTE < found[2]["lag_us"]
    assert len({row["position"] for row in found}) == 1


def test_minutes_may_be_counted_apart_and_collapsed(steps: DataFrame) -> None:
    """As a stream does it: the first minutes were counted by an earlier batch, and are past."""
    leaving = with_leaving(steps)
    whole = minutes(leaving)
    border = START + MINUTE
    earlier = minutes(leaving.where(leaving.time < border))
    past = opening(earlier, earlier.minute < border)
    later = combined(past.unionByName(minutes(leaving.where(leaving.time >= border))))
    for table in (depth, lag):
        expected = [row for row in rows(table(whole)) if row["minute"] >= border]
        assert rows(table(later)) == expected and len(expected) == 2


def test_steps_have_the_time_since_acceptance_and_the_address(
    spark: SparkSession, steps: DataFrame
) -> None:
    seen = [("n", "c", "10.0.0.1", START + 10_000)]
    columns = "node string, connection string, client string, last_time bigint"
    connections = spark.createDataFrame(seen, columns)
    found = {row.seq: row for row in gold_steps(steps, connections).collect()}
    assert [found[number].since_accepted_us for number in (1, 3, 4)] == [0, 2000, 3000]
    assert found[9].since_accepted_us is None
    assert found[1].client == "10.0.0.1" and found[12].client is None
