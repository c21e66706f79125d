"""Odd traffic through a whole run; runs that are repeated or fail; the command as a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput, PipelineError
from crosswire.lake.files import write
from crosswire.lake.schemas import LEDGER, MESSAGES, WIRE
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.lake import from_records
from crosswire.pipeline.sources.tap import from_tap, tap_files
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from crosswire.wire.emp.frames import (
    Hello,
    Ping,
    Request,
    Response,
    Result,
    serialize,
    serialize_call,
    serialize_result,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    ListenerHello,
    ListenerVersion,
    serialize_handshake,
)
from tests.pipeline.conftest import Made, make
from tests.pipeline.records import Records

CROSSWIRE = Path(sys.executable).parent / "crosswire"
HELLO, PING = serialize(Hello(1)), serialize(Ping())
ASK = serialize(Request(1, serialize_call("work", b"{}")))
ANSWER = serialize(Response(1, serialize_result(Result("success"))))
LINK = [
    ("forward", "data", serialize_handshake(ConnectorVersion(0)), 0),
    ("backward", "data", serialize_handshake(ListenerVersion(0)), 0),
    ("forward", "data", serialize_handshake(ConnectorHello(endpoint="queue/a")), 0),
    ("backward", "data", serialize_handshake(ListenerHello(7, 255)), 0),
]
START = 1_790_000_000_000_000
ENDED = [("forward", "fin", b"", 0), ("backward", "fin", b"", 0)]

Rows = list[tuple[str, str, bytes | None, int]]
"""Direction, kind, data, length."""

ODD: dict[str, tuple[str | None, Rows]] = {
    "refused": ("emp", [("forward", "data", HELLO + bytes.fromhex("0000000409000000") + PING, 28)]),
    "lost": ("emp", [("forward", "data", HELLO + b"\xff" * 100, 112), *ENDED]),
    "gap": (
        "emp",
        [
            ("forward", "data", HELLO, 12),
            ("forward", "gap", None, 50),
            ("forward", "data", PING * 3, 24),
            *ENDED,
        ],
    ),
    "secret": ("tls", [("forward", "data", b"x" * 40, 40), ("backward", "reset", b"", 0)]),
    "stranger": (None, [("forward", "data", b"SSH-2.0", 7), ("forward", "gap", None, 3), *ENDED]),
    "waiting": ("emp", [("forward", "data", HELLO + ASK, 0), ("backward", "data", HELLO, 0)]),
    "unanswered": ("emp", [("forward", "data", HELLO + ASK, 0), *ENDED]),
    "cut link": ("relink", [*LINK, *ENDED]),
    "same link": ("relink", [*LINK, ("forward", "reset", b"", 0)]),
    "unfinished": ("emp", [("forward", "data", HELLO + PING[:3], 0), *ENDED]),
}


def tap_rows(connections: dict[str, tuple[str | None, Rows]], first: int = 0) -> pa.Table:
    made = []
    for name, (name_of_protocol, rows) in connections.items():
        offsets = {"forward": 0, "backward": 0}
        for direction, kind, data, length in rows:
            length = length or len(data or b"")
            seq = first + len(made)
            fixed = (False, name_of_protocol, None, "10.0.0.1", 4000, "10.0.0.2", 5040)
            index = (offsets[direction], length, START + seq)
            made.append(("odd", seq, name, direction, kind, *index, data or None, *fixed))
            offsets[direction] += length
    columns = zip(*made, strict=True)
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, WIRE, strict=True)]
    return pa.Table.from_arrays(arrays, schema=WIRE)


@pytest.fixture(scope="module")
def odd(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("odd")
    write(folder / "data" / "lake", "wire", tap_rows(ODD))
    tables = frozenset({"violations", "accounting", "sessions", "conversations"})
    return make(spark, folder, folder / "data", tables=tables)


def one(rows: list[dict[str, Any]], connection: str) -> dict[str, Any]:
    (row,) = (
        row
        for row in rows
        if row.get("connection", row.get("session")) == connection
        and row.get("direction", "forward") == "forward"
    )
    return row


def test_violations_have_position_and_reason(odd: Made) -> None:
    rows = odd.rows("silver/violations")
    refused, lost = one(rows, "refused"), one(rows, "lost")
    assert (refused["byte_offset"], refused["length"], refused["error"]) == (12, 8, "unknown")
    assert refused["reason"] == "message type 9 is not defined"
    assert (lost["byte_offset"], lost["error"]) == (12, "limit")
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        ("refused", {"frames": 20, "violations": 8}),
        ("lost", {"frames": 12, "violations": 4, "unread": 96}),
        ("gap", {"frames": 36, "gaps": 50}),
        ("secret", {"encrypted": 40}),
        ("stranger", {"unknown": 7, "gaps": 3}),
        ("unfinished", {"frames": 12, "tail": 3}),
    ],
)
def test_every_byte_has_its_category(odd: Made, connection: str, expected: dict[str, int]) -> None:
    row = one(odd.rows("gold/accounting"), connection)
    parts = {
        name: value
        for name, value in row.items()
        if isinstance(value, int) and value and name != "seen"
    }
    assert parts == expected and row["seen"] == sum(expected.values())


def test_what_is_unfinished_is_in_open(odd: Made) -> None:
    assert {row["session"] for row in odd.rows("open/sessions")} == {"refused", "waiting"}
    assert {row["last_connection"] for row in odd.rows("gold/sessions")} == ODD.keys() - {
        "refused",
        "waiting",
        "cut link",
    }
    (waiting,) = odd.rows("open/conversations")
    (unanswered,) = odd.rows("gold/conversations")
    assert (waiting["connection"], waiting["outcome"]) == ("waiting", None)
    assert (unanswered["connection"], unanswered["outcome"]) == ("unanswered", "unanswered")


def test_sessions_show_how_they_ended(odd: Made) -> None:
    ended = {row["session"]: row["ended"] for row in odd.rows("gold/sessions")}
    assert (ended["secret"], ended["gap"]) == ("reset", "fin")
    assert one(odd.rows("gold/sessions"), "lost")["violations"] == 1
    assert one(odd.rows("gold/sessions"), "gap")["gap_bytes"] == 50


def test_a_link_over_two_connections_is_one_session(odd: Made) -> None:
    (row,) = (row for row in odd.rows("gold/sessions") if row["protocol"] == "relink")
    assert (row["session"], row["connections"], row["ended"]) == ("7/ff", 2, "reset")
    assert (row["last_connection"], row["frames_backward"]) == ("same link", 4)


# --------------------------------------------------------------------------------- runs, repeated


def test_a_run_replaces_what_the_last_one_wrote(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "lake", "wire", tap_rows({"gap": ODD["gap"]}))
    first = make(spark, tmp_path, tmp_path / "lake", tables=frozenset({"frames"}))
    before = first.rows("silver/frames")
    again = make(spark, tmp_path, tmp_path / "lake", tables=frozenset({"frames"}))
    assert again.rows("silver/frames") == before and len(before) == 5
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["manifests", "runs"]
    # What readers of the first one may still follow is there.
    assert len(list((folder / "runs").iterdir())) == 2


def test_a_run_that_fails_leaves_what_was_there(spark: SparkSession, tmp_path: Path) -> None:
    rows = tap_rows({"gap": ODD["gap"]})
    write(tmp_path / "lake", "wire", rows)
    good = make(spark, tmp_path, tmp_path / "lake", tables=frozenset({"frames"}))
    before = good.rows("silver/frames")
    (file,) = (tmp_path / "lake").rglob("*.parquet")
    (file.parent / "copy.parquet").write_bytes(file.read_bytes())
    with pytest.raises(PipelineError, match="has no name of a file of wire") as caught:
        make(spark, tmp_path, tmp_path / "lake", tables=frozenset({"frames"}))
    assert "\n" not in str(caught.value)
    assert good.rows("silver/frames") == before
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1


def test_since_leaves_out_what_is_older(spark: SparkSession, tmp_path: Path) -> None:
    rows: Rows = [("forward", "data", HELLO, 0), ("forward", "data", PING * 3, 0)]
    write(tmp_path / "lake", "wire", tap_rows({"c": ("emp", rows)}))
    made = make(
        spark,
        tmp_path,
        tmp_path / "lake",
        tables=frozenset({"frames"}),
        since_us=START + 1,
    )
    found = sorted((row["byte_offset"], row["frame"]) for row in made.rows("silver/frames"))
    assert found == [(12, "ping"), (20, "ping"), (28, "ping")]


def test_the_hubs_own_messages(spark: SparkSession, tmp_path: Path) -> None:
    from zlib import crc32

    fixed = {
        "node": "n",
        "time": START,
        "protocol": "emp",
        "connection": "c",
        "principal": "",
        "kind": "send",
        "destination": "queue/a",
        "key": "",
        "correlation": "",
        "reply_to": "",
        "durable": True,
        "expires": 0,
        "properties": '{"n":1}',
        "native": {},
        "content_type": "text/plain",
    }
    rows = [
        {**fixed, "seq": 0, "id": 10, "payload": b"good", "crc": crc32(b"good")},
        {**fixed, "seq": 1, "id": 11, "payload": b"bad", "crc": 1},
    ]
    write(tmp_path / "lake", "messages", pa.Table.from_pylist(rows, schema=MESSAGES))
    made = make(spark, tmp_path, tmp_path / "lake", tables=frozenset({"messages"}))
    found = sorted((row["message_id"], row["intact"]) for row in made.rows("silver/messages"))
    assert found == [(10, True), (11, False)]


def test_a_damaged_capture_is_reported_in_a_line(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    talk = SampleTraffic(protocols=("emp",), messages=2).conversation(0, "emp")
    write_pcap(file, packets(talk))
    file.write_bytes(file.read_bytes() + b"\xff" * 40)
    batch = BatchJob(inputs=find_inputs([str(file)]), output=str(tmp_path / "out"))
    with pytest.raises(PipelineError, match=r"a\.pcap is damaged at byte \d+; .+$"):
        run_batch(spark, batch, quiet=True)


# ---------------------------------------------------------------------------------------- inputs


def test_what_is_there_is_found(tmp_path: Path) -> None:
    write(tmp_path / "hub" / "lake", "wire", tap_rows({"gap": ODD["gap"]}))
    (tmp_path / "captures" / "deep").mkdir(parents=True)
    write_pcap(tmp_path / "captures" / "deep" / "x", [])
    (tmp_path / "captures" / "readme.txt").write_text("not a capture")
    found = find_inputs([str(tmp_path / "hub"), str(tmp_path / "captures")])
    assert found.taps == (str(tmp_path / "hub" / "lake" / "wire"),)
    assert found.captures == (str(tmp_path / "captures" / "deep" / "x"),)


@pytest.mark.parametrize(
    ("name", "where"), [("wire", "taps"), ("messages", "messages"), ("ledger", "ledgers")]
)
def test_the_tables_of_a_lake_may_be_named_one_by_one(
    tmp_path: Path, name: str, where: str
) -> None:
    records = Records(START)
    with records.on("c", "emp"):
        records.recorded("accepted", payload=b"1")
    rows = dict(zip(("ledger", "messages"), records.rows(), strict=True))
    lake = tmp_path / "lake"
    (file,) = write(lake, name, rows.get(name, tap_rows({"gap": ODD["gap"]})))
    for given in (lake, lake / name, file):
        found = getattr(find_inputs([str(given)]), where)
        assert found == (str(given if given != lake else lake / name),)
    url = f"hdfs://h/lake/{name}"
    assert getattr(find_inputs([url]), where) == (url,)


def test_files_of_a_lake_are_read_like_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    records = Records(START)
    with records.on("c", "emp"):
        records.recorded("accepted", payload=b"1")
        records.end()
    ledger, _ = records.rows()
    since_us = records.now
    folder, wire = tmp_path / "wire", tap_rows({"gap": ODD["gap"]})
    (file,) = write(tmp_path, "wire", wire)
    for given in (folder, file):
        assert from_tap(spark, [str(given)], since_us=START + 1).count() == len(wire) - 1
        assert tap_files([str(given)]) == [str(file)]
    (file,) = write(tmp_path, "ledger", ledger)
    for given in (tmp_path / "ledger", file):
        (row,) = from_records(spark, [str(given)], LEDGER, since_us=since_us).collect()
        assert row["step"] == "settled"


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "does not exist"), ("empty", "nothing to read"), ("text", "neither a capture")],
)
def test_no_input_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("text")
    with pytest.raises(InvalidInput, match=message):
        find_inputs([str(tmp_path / name)])
