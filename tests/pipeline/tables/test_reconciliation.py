"""What the wire shows against what the hub recorded, case by case, each on its own connection."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from pyspark.sql import SparkSession

from crosswire.envelope import SCHEDULED
from crosswire.pipeline.sources.lake import from_records
from crosswire.pipeline.tables.reconciliation import reconciliation
from crosswire.pipeline.tables.steps import with_messages
from tests.pipeline.records import Records

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    records = Records()

    with records.on("swapped", "relink"):
        records.recorded("accepted", payload=b"a")
        records.recorded("accepted", payload=b"b")
        records.sent(b"b")
        records.sent(b"a")
    with records.on("unrecorded", "emp"):
        records.sent(b"a", identifier="1", status="success")
    with records.on("refused", "emp"):
        records.sent(b"a", identifier="1", status="destination_full")
        records.sent(b"a", identifier="2", status="success")
        records.recorded("accepted", payload=b"a")
    with records.on("refused call", "emp"):
        records.sent(b"?", kind="request", destination="service/s", identifier="1")
        records.answered("forbidden", destination="service/s", identifier="1")
    with records.on("unrecorded answer", "emp"):
        records.answered("success", destination="service/s", identifier="1")
    with records.on("unacknowledged", "emp"):
        records.sent(b"a", identifier="1")
    with records.on("uncarried", "micromsg2"):
        records.recorded("delivered", payload=b"a", attempt=1)
    with records.on("left", "micromsg2"):
        identifier = records.recorded("delivered", payload=b"a", attempt=1)
        records.recorded("returned", identifier=identifier, attempt=1)
    with records.on("with gaps", "micromsg2", gaps=10):
        records.recorded("delivered", payload=b"a", attempt=1)
    with records.on("killed", "emp", ended=None):
        records.recorded("delivered", payload=b"carried", attempt=1)
        records.sent(b"carried", out=True, identifier="1")
        records.recorded("delivered", payload=b"a", attempt=1)
    with records.on("alive", "emp", ended=None):
        records.recorded("delivered", payload=b"a", attempt=1)
        records.recorded("delivered", payload=b"later", attempt=1, after_us=2_000_000)
        records.sent(b"later", out=True, identifier="1")
    with records.on("scheduled", "emqp"):
        records.recorded("accepted", payload=b"a", native={SCHEDULED: b"0.0"})
    with records.on("converted", "epoxy"):
        records.recorded("accepted", payload=b"json", destination="service/s", kind="request")
        records.sent(b"bond", destination="service/s", kind="request")
    with records.on("by id", "emp"):
        first = records.recorded("delivered", payload=b"same", attempt=1)
        second = records.recorded("delivered", payload=b"same", attempt=1)
        records.sent(b"same", out=True, identifier="1", message_id=second)
        records.sent(b"same", out=True, identifier="2", message_id=first)
    with records.on("buried", "emp"):
        identifier = records.recorded("accepted", payload=b"a")
        records.sent(b"a", identifier="1", status="success")
        records.recorded("dead", identifier=identifier, connection="")
        records.recorded("accepted", payload=b"a", destination="queue/q/dead")
    with records.on("replayed", "emp"):
        letter = records.recorded("accepted", payload=b"a", connection="")
        again = records.recorded("accepted", payload=b"a")
        # Not right after it: subscribers of a topic get it meanwhile.
        records.recorded("delivered", identifier=again, connection="not tapped")
        records.recorded(
            "replayed", identifier=letter, connection="", detail=f"sent again as {again}"
        )
    with records.on("to nobody", "micromsg2"):
        records.sent(b"", destination="reply/0")
    with records.on("too late", "micromsg2"):
        records.sent(b"done", kind="response", destination="service/s")
    with records.on("resumed", "relink"):
        records.sent(b"again", out=True, sequence=None)
    # One row of each side, of different connections of a link: only the destination is the same.
    for name, ended in (("cut", None), ("ended", "fin")):
        with records.on(name, "relink", ended=ended, link=f"the link that was {name}"):
            records.recorded("accepted", payload=b"not on the wire")
        with records.on(f"after {name}", "relink", link=f"the link that was {name}"):
            records.sent(b"not in the ledger")
    with records.on("broken off", "micromsg2"):
        records.sent(b"a")
        records.error()
    with records.on("passing", "emp"):
        records.recorded(
            "accepted", destination="topic/p", detail="not durable", count=1, kept=False
        )
        records.sent(b"a", destination="topic/p", kind="publish", identifier="1", status="success")
        records.sent(b"a", destination="topic/p", kind="publish", out=True, identifier="2")
    with records.on("worker", "emqp"):
        records.sent(b"done", kind="response")
    records.recorded("delivered", payload=b"a", connection="nobody tapped it")
    records.end()

    *wire, ledger, envelopes = records.tables(spark)
    rows: Found = {name: [] for name in records.connections}
    for row in reconciliation(*wire, with_messages(ledger, envelopes)).collect():
        rows[row["connection"]].append(row.asDict())
    return rows


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        ("swapped", ["equal", "equal"]),
        ("unrecorded", ["missing in the ledger"]),
        ("refused", ["equal", "not accepted"]),
        ("refused call", ["not accepted", "not accepted"]),
        ("unrecorded answer", ["missing in the ledger"]),
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
        ("replayed", []),
        ("to nobody", []),
        ("too late", ["not accepted"]),
        ("resumed", ["uncertain"]),
        ("cut", []),
        ("after cut", ["equal"]),
        ("ended", []),
        ("after ended", ["equal"]),
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


def test_another_payload_is_reported(found: Found) -> None:
    (row,) = found["converted"]
    assert row["same_payload"] is False


@pytest.mark.parametrize(("connection", "expected"), [("after cut", None), ("after ended", False)])
def test_payloads_prove_nothing_after_the_recording_of_a_link_was_cut_off(
    found: Found, connection: str, expected: bool | None
) -> None:
    """The partners of both may be in what was not written."""
    (row,) = found[connection]
    assert row["same_payload"] is expected


def test_the_hubs_ids_outrank_the_order(found: Found) -> None:
    first, second = sorted(found["by id"], key=lambda row: row["offset"])
    assert first["id"] > second["id"]


def test_no_folder_is_an_empty_table(spark: SparkSession) -> None:
    from crosswire.lake.schemas import LEDGER

    empty = from_records(spark, [], LEDGER)
    assert empty.columns == LEDGER.names and empty.isEmpty()


def test_checksums_are_unsigned() -> None:
    assert crc32(b"a") == Records().crc_of(b"a") > 1 << 31
