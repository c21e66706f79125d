"""Every table, made by one run over known traffic, read back without Spark."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.summary import Summary
from crosswire.pipeline.tables.histogram import bucket_of, highest_of
from crosswire.testing.traffic import Conversation
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Row
from tests.pipeline.captures import LATE
from tests.pipeline.conftest import TRAFFIC, Made

TALKS = list(TRAFFIC.conversations())
SENT_BYTES = sum(len(data) for talk in TALKS for _, _, data in talk.chunks)


def plain(talk: Conversation) -> list[tuple[str, Row]]:
    """The rows that plain decoders make of a conversation."""
    entry = protocol(talk.protocol)
    forward = entry.decoder(entry.roles[0])
    backward = entry.decoder(entry.roles[-1], peer=forward)
    return [
        ("forward" if way else "backward", row)
        for _, way, data in talk.chunks
        for row in (forward if way else backward).rows(data)
    ]


def name_of(talk: Conversation) -> str:
    return f"{talk.protocol}-{talk.number}"


def positions(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    names = ("protocol", "direction", "layer", "byte_offset", "length", "frame")
    return Counter(tuple(row[name] for name in names) for row in rows)


def of_connection(rows: list[dict[str, Any]], connection: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["connection"] == connection]


def test_frames_are_those_of_the_plain_decoders(from_tap: Made) -> None:
    frames = from_tap.rows("silver/frames")
    for talk in TALKS:
        found = of_connection(frames, name_of(talk))
        assert positions(found) == Counter(
            (talk.protocol, way, row.layer, row.offset, row.length, row.frame)
            for way, row in plain(talk)
        )


def test_a_frame_has_the_time_of_its_last_byte(from_tap: Made) -> None:
    frames = from_tap.rows("silver/frames")
    for talk in TALKS:
        times = {time for time, _, _ in talk.chunks}
        assert {row["time"] for row in of_connection(frames, name_of(talk))} <= times


def test_generated_traffic_has_no_violations(from_tap: Made) -> None:
    assert from_tap.rows("silver/violations") == []


@pytest.mark.parametrize("made", ["from_tap", "from_pcap"])
def test_bytes_add_up(made: str, request: pytest.FixtureRequest) -> None:
    run: Made = request.getfixturevalue(made)
    summary: Summary = run.summary
    accounts = run.rows("gold/accounting")
    # Rows without a connection are about packets.
    rows = [row for row in accounts if row["connection"] is not None]
    assert (len(accounts) > len(rows)) == (made == "from_pcap")
    assert len(rows) == 2 * len(TALKS) and not any(row["missing"] for row in rows)
    assert {row["protocol"] for row in summary.accounting} == set(PROTOCOL_NAMES)
    if made == "from_tap":
        assert summary.seen == SENT_BYTES == sum(row["frames"] for row in rows)


def test_messages_carry_what_was_sent(from_tap: Made) -> None:
    messages = from_tap.rows("silver/messages")
    kinds = Counter((row["protocol"], row["kind"]) for row in messages)
    assert kinds.keys() >= {
        ("emp", "request"),
        ("emp", "response"),
        ("emp", "send"),
        ("emqp", "request"),
        ("emqp", "publish"),
        ("relink", "request"),
        ("relink", "response"),
        ("epoxy", "request"),
        ("epoxy", "publish"),
        ("micromsg2", "request"),
        ("micromsg2", "response"),
        ("micromsg2", "send"),
    }
    assert all(len(row["payload"]) == row["payload_length"] for row in messages)
    sends = [row for row in messages if (row["protocol"], row["kind"]) == ("emp", "send")]
    assert {row["destination"] for row in sends} == {"queue/orders"}
    assert all(json.loads(row["payload"]).keys() == {"text", "number"} for row in sends)


def test_messages_have_the_checksum_of_their_payload(from_tap: Made) -> None:
    from zlib import crc32

    messages = from_tap.rows("silver/messages")
    assert messages and all(crc32(row["payload"]) == row["crc"] for row in messages)


def test_conversations_pair_requests_with_their_responses(from_tap: Made) -> None:
    messages = from_tap.rows("silver/messages")
    conversations = from_tap.rows("gold/conversations")
    asked = Counter(row["protocol"] for row in messages if row["kind"] == "request")
    assert Counter(row["protocol"] for row in conversations) == asked
    assert set(asked) == set(PROTOCOL_NAMES)
    by_offset = {
        (row["connection"], row["direction"], row["byte_offset"], row["kind"]): row
        for row in messages
    }
    for row in conversations:
        other = "backward" if row["direction"] == "forward" else "forward"
        request = by_offset[row["connection"], row["direction"], row["request_offset"], "request"]
        response = by_offset[row["connection"], other, row["response_offset"], "response"]
        assert row["latency_us"] == response["time"] - request["time"] > 0
        assert row["destination"] == request["destination"] == response["destination"]
        assert row["outcome"] == (response["status"] or "success")
    assert {row["outcome"] for row in conversations} <= {"success", "out_of_stock"}
    assert from_tap.rows("open/conversations") == []


def test_sessions_know_their_ends(from_tap: Made) -> None:
    sessions = from_tap.rows("gold/sessions")
    assert len(sessions) == len(TALKS) and from_tap.rows("open/sessions") == []
    by_connection = {row["last_connection"]: row for row in sessions}
    for talk in TALKS:
        row = by_connection[name_of(talk)]
        rows = plain(talk)
        assert (row["protocol"], row["listener"], row["connections"]) == (
            talk.protocol,
            talk.listener,
            1,
        )
        assert row["connector_address"] == talk.connector[0]
        assert row["acceptor_port"] == talk.port
        assert row["frames_forward"] == sum(
            way == "forward" and each.layer == 0 for way, each in rows
        )
        assert row["bytes_backward"] == sum(len(data) for _, way, data in talk.chunks if not way)
        assert row["time"] == talk.chunks[0][0] - 10
        assert row["handshake_us"] > 0 and not row["late"]
    ended = {row["protocol"]: row["ended"] for row in sessions}
    assert ended == {
        "emp": "goodbye",
        "emqp": "goodbye",
        "relink": "goodbye",
        "epoxy": "fin",
        "micromsg2": "fin",
    }
    links = [row["session"] for row in sessions if row["protocol"] == "relink"]
    assert all("/" in link for link in links)


def test_traffic_counts_and_times_by_minute(from_tap: Made) -> None:
    messages = from_tap.rows("silver/messages")
    conversations = from_tap.rows("gold/conversations")
    traffic = from_tap.rows("gold/traffic")
    assert sum(row["messages"] for row in traffic) == len(messages)
    assert sum(row["bytes"] for row in traffic) == sum(row["payload_length"] for row in messages)
    for row in traffic:
        names = ("node", "protocol", "destination", "leg", "direction", "client", "principal")
        latencies = sorted(
            each["latency_us"]
            for each in conversations
            if all(each[name] == row[name] for name in names)
            and each["time"] - each["time"] % 60_000_000 == row["time"]
        )
        counted = sum(entry["count"] for entry in row["histogram"] or [])
        assert counted == len(latencies)
        if latencies:
            middle = latencies[(len(latencies) + 1) // 2 - 1]
            assert middle <= row["latency_p50_us"] <= middle * 17 / 16 + 1
            assert row["latency_max_us"] == latencies[-1]
    failed = sum(row["outcome"] != "success" for row in conversations)
    assert sum(row["errors"] for row in traffic) == failed


def test_topology_has_an_edge_for_each_pair(from_tap: Made) -> None:
    rows = from_tap.rows("gold/topology")
    assert sum(row["messages"] for row in rows) == len(from_tap.rows("silver/messages"))
    talk = TALKS[0]
    server = f"{talk.acceptor[0]}:{talk.port}"
    edges = {(row["source"], row["target"], row["destination"]) for row in rows}
    assert (talk.connector[0], server, "service/price") in edges
    assert (server, talk.connector[0], "service/price") in edges


# ------------------------------------------------------------------------------------- captures


def test_captures_give_the_frames_of_the_tap(from_tap: Made, from_pcap: Made) -> None:
    """Doubled and swapped packets, sequence numbers that wrap, two files, a port unknown."""
    late = TALKS[LATE]
    start = f"{late.connector[0]}:"
    tapped = [row for row in from_tap.rows("silver/frames") if row["connection"] != name_of(late)]
    caught = [
        row for row in from_pcap.rows("silver/frames") if not row["connection"].startswith(start)
    ]
    assert positions(caught) == positions(tapped)
    fields = Counter(row["fields"] for row in caught)
    assert fields == Counter(row["fields"] for row in tapped)


def test_a_connection_without_a_beginning_is_late(from_pcap: Made) -> None:
    (session,) = (row for row in from_pcap.rows("gold/sessions") if row["late"])
    assert session["connector_address"] == TALKS[LATE].connector[0]
    assert session["frames_forward"] > 5
    rows = of_connection(from_pcap.rows("gold/accounting"), session["last_connection"])
    assert sum(row["unsynchronized"] for row in rows) < sum(row["frames"] for row in rows)


def test_bytes_of_captures_are_kept_in_order(from_pcap: Made) -> None:
    wire = from_pcap.rows("bronze/wire")
    talk = TALKS[0]
    start = f"{talk.connector[0]}:{talk.connector[1]}-"
    own = sorted(
        (row for row in wire if row["connection"].startswith(start)), key=lambda row: row["seq"]
    )
    for way in (True, False):
        direction = "forward" if way else "backward"
        sent = b"".join(row["data"] or b"" for row in own if row["direction"] == direction)
        assert sent == b"".join(data for _, forward, data in talk.chunks if forward is way)
    assert [row["kind"] for row in own[:1]] == ["open"]
    assert {row["kind"] for row in own[-2:]} == {"fin"}


# ------------------------------------------------------------------------------------ histograms


def test_buckets_hold_their_values_and_are_narrow(spark: SparkSession) -> None:
    values = [*range(70), 127, 128, 1000, 12_345, 10**6, 10**9 + 7, 2**40, 2**40 - 1, 2**62]
    rows = (
        spark.createDataFrame([(value,) for value in values], "value bigint")
        .withColumn("bucket", bucket_of(F.col("value")))
        .withColumn("highest", highest_of(F.col("bucket")))
        .collect()
    )
    found = sorted((row.value, row.bucket, row.highest) for row in rows)
    assert [bucket for _, bucket, _ in found] == sorted(bucket for _, bucket, _ in found)
    assert [bucket for value, bucket, _ in found if value < 32] == list(range(32))
    assert all(value <= highest < value * 17 / 16 + 1 for value, _, highest in found)
