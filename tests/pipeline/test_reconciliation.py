"""What the wire shows against what the hub recorded, case by case, each on its own connection."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from pyspark.sql import SparkSession

from crosswire.envelope import SCHEDULED
from crosswire.pipeline.sources.records import from_records
from crosswire.pipeline.tables.reconciliation import reconciliation
from tests.pipeline.records import Records

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    told = Records()

    with told.on("swapped", "relink"):
        told.noted("accepted", payload=b"a")
        told.noted("accepted", payload=b"b")
        told.said(b"b")
        told.said(b"a")
    with told.on("unrecorded", "emp"):
        told.said(b"a", identifier="1", status="success")
    with told.on("refused", "emp"):
        told.said(b"a", identifier="1", status="destination_full")
        told.said(b"a", identifier="2", status="success")
        told.noted("accepted", payload=b"a")
    with told.on("unacknowledged", "emp"):
        told.said(b"a", identifier="1")
    with told.on("uncarried", "micromsg2"):
        told.noted("delivered", payload=b"a", attempt=1)
    with told.on("left", "micromsg2"):
        identifier = told.noted("delivered", payload=b"a", attempt=1)
        told.noted("returned", identifier=identifier, attempt=1)
    with told.on("with gaps", "micromsg2", gaps=10):
        told.noted("delivered", payload=b"a", attempt=1)
    with told.on("killed", "emp", ended=None):
        told.noted("delivered", payload=b"carried", attempt=1)
        told.said(b"carried", out=True, identifier="1")
        told.noted("delivered", payload=b"a", attempt=1)
    with told.on("alive", "emp", ended=None):
        told.noted("delivered", payload=b"a", attempt=1)
        told.noted("delivered", payload=b"later", attempt=1, after_us=2_000_000)
        told.said(b"later", out=True, identifier="1")
    with told.on("scheduled", "emqp"):
        told.noted("accepted", payload=b"a", native={SCHEDULED: b"0.0"})
    with told.on("converted", "epoxy"):
        told.noted("accepted", payload=b"json", destination="service/s", kind="request")
        told.said(b"bond", destination="service/s", kind="request")
    with told.on("by id", "emp"):
        first = told.noted("delivered", payload=b"same", attempt=1)
        second = told.noted("delivered", payload=b"same", attempt=1)
        told.said(b"same", out=True, identifier="1", message_id=second)
        told.said(b"same", out=True, identifier="2", message_id=first)
    with told.on("buried", "emp"):
        identifier = told.noted("accepted", payload=b"a")
        told.said(b"a", identifier="1", status="success")
        told.noted("dead", identifier=identifier, connection="")
        told.noted("accepted", payload=b"a", destination="queue/q/dead")
    with told.on("resumed", "relink"):
        told.said(b"again", out=True, sequence=None)
    with told.on("broken off", "micromsg2"):
        told.said(b"a")
        told.error()
    with told.on("passing", "emp"):
        told.noted("accepted", destination="topic/p", detail="not durable", count=1, kept=False)
        told.said(b"a", destination="topic/p", kind="publish", identifier="1", status="success")
        told.said(b"a", destination="topic/p", kind="publish", out=True, identifier="2")
    with told.on("worker", "emqp"):
        told.said(b"done", kind="response")
    told.noted("delivered", payload=b"a", connection="nobody tapped it")
    told.end()

    tables = told.tables(spark)
    rows: Found = {name: [] for name in told.connections}
    for row in reconciliation(*tables).collect():
        rows[row["connection"]].append(row.asDict())
    return rows


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        ("swapped", ["equal", "equal"]),
        ("unrecorded", ["missing in the ledger"]),
        ("refused", ["equal", "not accepted"]),
        ("unacknowledged", ["not accepted"]),
        ("uncarried", ["missing on the wire"]),
        ("left", ["withdrawn"]),
        ("with gaps", ["uncertain"]),
        ("killed", ["equal", "uncertain"]),
        ("alive", ["equal", "missing on the wire"]),
        ("scheduled", []),
        ("converted", ["equal"]),
        ("by id", ["equal", "equal"]),
        ("buried", ["equal"]),
        ("resumed", ["uncertain"]),
        ("broken off", ["not accepted"]),
        ("passing", ["equal"]),
        ("worker", []),
    ],
)
def test_verdicts(found: Found, connection: str, expected: list[str]) -> None:
    assert sorted(row["verdict"] for row in found[connection]) == expected


def test_the_same_payload_is_found_whatever_the_order(found: Found) -> None:
    assert all(row["same_payload"] for row in found["swapped"])
    assert len({row["id"] for row in found["swapped"]}) == 2


def test_what_was_acknowledged_goes_with_what_was_recorded(found: Found) -> None:
    (equal,) = (row for row in found["refused"] if row["verdict"] == "equal")
    assert equal["acknowledged"] is True


def test_another_payload_is_told(found: Found) -> None:
    (row,) = found["converted"]
    assert row["same_payload"] is False


def test_the_hubs_ids_outrank_the_order(found: Found) -> None:
    first, second = sorted(found["by id"], key=lambda row: row["offset"])
    assert first["id"] > second["id"]


def test_no_folder_is_an_empty_table(spark: SparkSession) -> None:
    from crosswire.lake.schemas import LEDGER

    empty = from_records(spark, [], LEDGER)
    assert empty.columns == LEDGER.names and empty.isEmpty()


def test_checksums_are_unsigned() -> None:
    assert crc32(b"a") == Records().crc_of(b"a") > 1 << 31
