"""What became of messages, hop by hop: late, lost and doubled ones among them."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.deliveries import deliveries, hops
from crosswire.pipeline.tables.recalled_steps import recalled_facts, recalled_steps
from crosswire.pipeline.tables.reconciliation import reconciliation
from crosswire.pipeline.tables.steps import with_facts, with_messages
from tests.pipeline.conftest import Made
from tests.pipeline.records import Records

SECOND = 1_000_000
Found = dict[str, list[dict[str, Any]]]


def story(records: Records, name: str) -> int:
    """A message of this name, accepted."""
    return records.recorded("accepted", payload=name.encode(), destination=f"queue/{name}")


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    records = Records()

    def step(what: str, name: str, identifier: int, **more: Any) -> None:
        records.recorded(what, identifier=identifier, destination=f"queue/{name}", **more)

    with records.on("c", "micromsg2"):
        settled = story(records, "settled")
        step("delivered", "settled", settled, attempt=1)
        step("settled", "settled", settled)

        late = story(records, "late")
        step("delivered", "late", late, attempt=1)
        step("settled", "late", late, after_us=6 * SECOND)

        retried = story(records, "retried")
        step("delivered", "retried", retried, attempt=1)
        step("refused", "retried", retried, attempt=1, detail="not now")
        step("delivered", "retried", retried, attempt=2)
        step("settled", "retried", retried)

        again = story(records, "again")
        step("delivered", "again", again, attempt=1)
        step("returned", "again", again, attempt=1, detail="left")
        step("delivered", "again", again, attempt=2)
        step("settled", "again", again)

        # What `sub --count` prefetches and gives back when it has enough.
        given_back = story(records, "given-back")
        step("delivered", "given-back", given_back, attempt=1)
        step("returned", "given-back", given_back, attempt=1, detail="the consumer unsubscribed")
        step("delivered", "given-back", given_back, attempt=2)
        step("settled", "given-back", given_back)

        dropped = story(records, "dropped")
        step("dropped", "dropped", dropped, connection="", detail="the queue is full")
        purged = story(records, "purged")
        step("dropped", "purged", purged, connection="", detail="purged")
        damaged = story(records, "damaged")
        step("damaged", "damaged", damaged, connection="", detail="missing")
        expired = story(records, "expired")
        step("expired", "expired", expired, connection="")
        held = story(records, "held")
        step("delivered", "held", held, attempt=1)

        news = records.recorded("accepted", payload=b"news", destination="topic/news")
        for connection in ("first", "second"):
            records.recorded(
                "delivered",
                identifier=news,
                destination="topic/news",
                connection=connection,
                attempt=1,
            )
        records.recorded("accepted", payload=b"quiet", destination="topic/quiet")
        records.recorded(
            "accepted", destination="topic/passing", detail="not durable", count=3, kept=False
        )
        asked = records.recorded("accepted", payload=b"?", destination="service/s", kind="request")
        records.recorded("delivered", identifier=asked, destination="service/s", connection="p")
        records.recorded("accepted", payload=b"!", destination="service/s", kind="response")
        records.recorded("answered", identifier=asked, destination="service/s", after_us=0)
        spoiled = records.recorded("accepted", payload=b"x", destination="queue/spoiled", crc=1)
        step("settled", "spoiled", spoiled)
        named = records.recorded("accepted", payload=b"n", destination="topic/named")
        records.recorded("delivered", identifier=named, destination="topic/+", attempt=1)
        records.recorded("refused", identifier=named, destination="topic/+", attempt=1)
        records.recorded("dead", identifier=named, destination="topic/+", connection="")
        records.recorded("accepted", payload=b"n", destination="queue/sub/dead")
        story(records, "waiting")
    with records.on("unheard", "micromsg2"):
        unheard = records.recorded(
            "accepted", payload=b"u", destination="topic/unheard", connection="x"
        )
        records.recorded("delivered", identifier=unheard, destination="topic/unheard", attempt=1)
    with records.on("writer", "relink"):
        chat = records.recorded("accepted", payload=b"hi", destination="topic/chat")
        for what, connection in (
            ("delivered", "ann's first"),
            ("delivered", "bob's first"),
            ("delivered", "eve's only"),
            ("settled", "eve's only"),
            ("settled", "bob's second"),
            ("settled", "ann's second"),
        ):
            records.recorded(what, identifier=chat, destination="topic/chat", connection=connection)
    records.end(after_us=SECOND)

    *wire, ledger, envelopes = records.tables(spark)
    steps = with_messages(ledger, envelopes)
    made = deliveries(steps, envelopes, reconciliation(*wire, steps), late_us=5 * SECOND)
    rows: Found = {}
    for row in made.collect():
        rows.setdefault(row["destination"], []).append(row.asDict())
    return rows


@pytest.mark.parametrize(
    ("destination", "outcome", "attempts", "faults"),
    [
        ("queue/settled", "settled", 1, []),
        ("queue/late", "settled", 1, ["late"]),
        ("queue/retried", "settled", 2, []),
        ("queue/again", "settled", 2, ["doubled"]),
        ("queue/given-back", "settled", 2, []),
        ("queue/dropped", "dropped", 0, ["lost"]),
        ("queue/purged", "dropped", 0, []),
        ("queue/damaged", "damaged", 0, ["lost"]),
        ("queue/expired", "expired", 0, []),
        ("queue/held", "held", 1, []),
        ("queue/waiting", "waiting", 0, []),
        ("topic/quiet", "unclaimed", 0, []),
        ("topic/passing", "delivered", 3, []),
        ("topic/named", "dead", 1, []),
        ("topic/unheard", "delivered", 1, ["lost"]),
        ("service/s", "answered", 1, []),
    ],
)
def test_outcomes(
    found: Found, destination: str, outcome: str, attempts: int, faults: list[str]
) -> None:
    (row,) = found[destination]
    assert (row["outcome"], row["attempts"]) == (outcome, attempts)
    assert [name for name in ("late", "lost", "doubled") if row[name]] == faults
    assert row["is_open"] == (outcome in ("held", "waiting"))


def test_each_receiver_of_a_topic_is_a_hop(found: Found) -> None:
    rows = found["topic/news"]
    assert sorted(row["hop"] for row in rows) == ["first", "second"]
    assert {(row["outcome"], row["connection"] == row["hop"]) for row in rows} == {
        ("delivered", True)
    }


def test_a_link_that_goes_on_over_another_connection_is_one_hop(found: Found) -> None:
    rows = found["topic/chat"]
    assert sorted(row["hop"] for row in rows) == ["ann's first", "bob's first", "eve's only"]
    assert {(row["outcome"], row["attempts"], row["doubled"]) for row in rows} == {
        ("settled", 1, False)
    }


def test_times_are_those_of_the_ledger(found: Found) -> None:
    (row,) = found["queue/settled"]
    assert row["accepted"] < row["delivered"] < row["settled"] == row["ended"]
    assert row["latency_us"] == row["settled"] - row["accepted"] == 2000


def test_a_dead_letter_knows_what_it_was(found: Found) -> None:
    (letter,) = found["queue/sub/dead"]
    (dead,) = found["topic/named"]
    assert letter["origin"] == dead["id"] and dead["origin"] is None


def test_the_checksum_of_the_edge_is_checked(found: Found) -> None:
    assert [row["intact"] for row in found["queue/spoiled"]] == [False]
    assert [row["intact"] for row in found["queue/settled"]] == [True]


def test_what_is_open_becomes_late(spark: SparkSession) -> None:
    records = Records()
    with records.on("c", "emp"):
        story(records, "waiting")
        story(records, "waiting/dead")
    records.end(after_us=SECOND)
    ledger, envelopes = records.records(spark)
    steps = with_messages(ledger, envelopes)
    for late_us, expected in ((SECOND // 2, [True, False]), (2 * SECOND, [False, False])):
        found = deliveries(steps, envelopes, late_us=late_us).where("id > 1").orderBy("id")
        rows = found.collect()
        assert [row["late"] for row in rows] == expected
        assert [row["on_wire"] for row in rows] == [None, None]


def test_without_a_ledger_they_are_left_out_with_a_note(from_tap: Made) -> None:
    assert from_tap.summary.notes == [
        "no deliveries, reconciliation, steps, depth and lag: there is no ledger/"
    ]
    assert not from_tap.summary.rows.keys() & {"gold.deliveries", "gold.reconciliation"}


NUMBERS = "id origin sent accepted delivered settled ended attempts refusals returns latency_us"
KINDS = dict.fromkeys([*NUMBERS.split(), "on_wire"], "bigint") | dict.fromkeys(
    ("late", "lost", "doubled", "same_payload", "intact", "is_open"), "boolean"
)


def test_steps_made_of_rows_give_these_rows_again(spark: SparkSession, found: Found) -> None:
    """So a stream loses nothing of a message whose steps are no longer in the lake."""
    kept = ("hop", "kind", "destination", "producer", "producer_protocol", "accepted", "delivered")
    kept += ("ended", "attempts", "refusals", "returns", "outcome", "detail", "latency_us")
    kept += ("late", "doubled", "intact", "origin")
    wanted = [
        row
        for rows in found.values()
        for row in rows
        # Not those that the ledger only counts, and links over several connections.
        if not row["is_open"] and row["destination"] not in ("topic/passing", "topic/chat")
    ]
    columns = ", ".join(f"{name} {KINDS.get(name, 'string')}" for name in wanted[0])
    table = spark.createDataFrame([tuple(row.values()) for row in wanted], columns)
    steps = with_facts(recalled_steps(table), recalled_facts(table))
    made = hops(steps.withColumn("newest", F.lit(0)), None, late_us=5 * SECOND).collect()
    assert sorted(str([row["id"], *(row[name] for name in kept)]) for row in made) == sorted(
        str([row["id"], *(row[name] for name in kept)]) for row in wanted
    )
