"""The report: what its figures, that nothing in it obeys a peer, and how a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crosswire.cli.parsers import options_last, parser_of, split_command
from crosswire.errors import InvalidInput, PipelineError
from crosswire.pipeline.manifests import Manifests, TablePaths
from crosswire.pipeline.report import write_report
from crosswire.pipeline.report.about_bytes import _PART_WORDS
from crosswire.pipeline.report.about_hub import _VERDICTS
from crosswire.pipeline.report.failures import KINDS
from crosswire.pipeline.report.formats import (
    amount,
    duration,
    moment,
    share,
    shell_word,
    size,
    text,
)
from crosswire.pipeline.report.gather import gather
from crosswire.pipeline.report.histogram import (
    highest_of,
    lowest_of,
    percentiles,
)
from crosswire.pipeline.report.plots import _decades, _scale
from crosswire.pipeline.report.table_reader import Highest, ReportTables, Tally
from crosswire.pipeline.stores import LocalStore
from crosswire.pipeline.tables.catalog import HISTOGRAM, entry
from crosswire.pipeline.tables.names import ACCOUNT_PARTS, VERDICTS

CROSSWIRE = Path(sys.executable).parent / "crosswire"
START = 1_790_000_040_000_000
MINUTE = 60_000_000
EVIL = "queue/</td><script>alert('x')</script><img src=x onerror=alert(1)>\"'&\u202e\x00"
NAME = EVIL.replace("\x00", "\x07")

TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    HISTOGRAM: pa.list_(pa.struct([("bucket", pa.int32()), ("count", pa.int64())])),
}


def schema(name: str) -> pa.Schema:
    """The columns of a table, as Spark writes them."""
    columns = entry(name.replace("/", ".")).columns
    return pa.schema([(column.name, TYPES[column.type]) for column in columns])


Rows = list[dict[str, Any]]


def put(root: Path, name: str, rows: Rows) -> None:
    """A table like Spark writes it: in parts, and with a file that is none."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "_SUCCESS").touch()
    for part in range(2):
        table = pa.Table.from_pylist(rows[part::2], schema=schema(name))
        pq.write_table(table, folder / f"part-{part}.parquet")
    show(root, name)


def show(root: Path, name: str) -> None:
    """Let a folder below the root be a table that readers see."""
    manifests = Manifests(LocalStore(str(root)))
    before = {} if manifests.newest is None else manifests.newest.tables
    manifests.commit({**before, name.replace("/", "."): TablePaths([name])})


PEERS = {"emp": 5040, "emqp": 47291, "relink": 7350, "epoxy": 25188, "micromsg2": 7360}


def traffic_rows(minutes: int) -> Rows:
    random = Random(7)
    return [
        {
            "time": START + minute * MINUTE,
            "protocol": protocol,
            "destination": destination,
            "leg": "caller",
            "messages": (number := random.randrange(20, 60 + minute)),
            "sends": 0,
            "publishes": 0,
            "requests": number // 2,
            "responses": number - number // 2,
            "bytes": number * 300,
            "errors": 1 if minute % 7 == 0 else 0,
            "latency_max_us": 40_000,
            "histogram": [{"bucket": 120 + index, "count": 9 - index} for index in range(9)],
        }
        for minute in range(minutes)
        for protocol in PEERS
        for destination in ("service/price", "service/stock")
    ]


def conversation(number: int, **more: Any) -> dict[str, Any]:
    asked = START + number * 1000
    return {
        "node": "n",
        "connection": f"c{number}",
        "direction": "forward",
        "protocol": "emp",
        "destination": "service/price",
        "leg": "caller",
        "correlation": str(number),
        "time": asked,
        "answered": asked + number * 10,
        "latency_us": number * 10,
        "request_bytes": 100,
        "response_bytes": 200,
        "outcome": "success",
        **more,
    }


def session(number: int, protocol: str, **more: Any) -> dict[str, Any]:
    return {
        "session": f"{protocol}-{number}",
        "protocol": protocol,
        "connections": 1,
        "connector_address": f"10.0.0.{number}",
        "acceptor_address": "10.1.0.1",
        "acceptor_port": PEERS[protocol],
        "time": START + number * MINUTE,
        "last_time": START + (number + 20) * MINUTE,
        "late": False,
        "handshake_us": 500,
        "messages_forward": 10,
        "messages_backward": 10,
        "bytes_forward": 1000 + number,
        "bytes_backward": 2000,
        "gap_bytes": 0,
        "violations": None,
        "ended": "goodbye",
        "error": None,
        **more,
    }


def edge(source: str, target: str, protocol: str, destination: str) -> dict[str, Any]:
    return {
        "source": source,
        "target": target,
        "protocol": protocol,
        "kind": "request",
        "destination": destination,
        "messages": 100,
        "bytes": 30_000,
    }


def account(number: int, protocol: str | None, **parts: int) -> dict[str, Any]:
    return {
        **dict.fromkeys((*ACCOUNT_PARTS, "missing"), 0),
        "node": "n",
        "connection": f"c{number}",
        "direction": "forward",
        "protocol": protocol,
        "seen": sum(parts.values()),
        **parts,
    }


def violation(number: int, reason: str) -> dict[str, Any]:
    return {
        "node": "n",
        "connection": f"c{number}",
        "direction": "backward" if number % 2 else "forward",
        "protocol": "epoxy",
        "byte_offset": 12,
        "length": 8,
        "time": START + number,
        "error": "malformed",
        "reason": reason,
    }


def write_tables(root: Path, minutes: int = 90) -> Path:
    """Every table, with known numbers and with text that would like to be HTML."""
    put(root, "gold/traffic", traffic_rows(minutes))
    failures = [
        conversation(901, outcome="out_of_stock", destination="service/stock"),
        conversation(902, outcome=EVIL, destination=EVIL, protocol="relink"),
        *(
            conversation(910 + n, outcome="unanswered", answered=None, latency_us=None)
            for n in range(3)
        ),
    ]
    put(root, "gold/conversations", [*map(conversation, range(1, 101)), *failures])
    put(root, "open/conversations", [conversation(1, answered=None, outcome=None)])
    held = [session(n, protocol) for protocol in PEERS for n in range(1, 31)]
    troubled = [
        session(40, "epoxy", violations=3, ended="error", error=EVIL, gap_bytes=0),
        session(41, "emp", gap_bytes=777, ended="fin"),
        session(42, "relink", ended="reset"),
    ]
    put(root, "gold/sessions", held + troubled)
    put(root, "open/sessions", [session(50, "emp", ended="open")])
    edges = [
        pair
        for protocol, port in PEERS.items()
        for n in range(30)
        for pair in (
            edge(f"10.0.0.{n}", f"10.1.0.1:{port}", protocol, f"service/{n % 4}"),
            edge(f"10.1.0.1:{port}", f"10.0.0.{n}", protocol, f"service/{n % 4}"),
        )
    ]
    put(root, "gold/topology", [*edges, edge("fd00::1", "fd00::2:5040", "emp", EVIL)])
    parts = {"frames": 900, "violations": 8, "gaps": 50, "unread": 42}
    accounts = [account(n, protocol, frames=1000 + n) for n, protocol in enumerate(PEERS)]
    accounts += [account(90, "epoxy", **parts), account(91, None, unknown=70)]
    put(root, "gold/accounting", [*accounts, account(92, "tls", encrypted=400)])
    put(root, "silver/violations", [violation(n, f"reason {n % 2} {EVIL}") for n in range(3)])
    both = ("forward", "backward")
    put(
        root,
        "silver/directions",
        [direction(f"c{n}", direction=d) for n in range(10) for d in both],
    )
    put_hub(root)
    return root


def put_hub(root: Path) -> None:
    """Tables of what the hub recorded."""
    fixed = {"node": "n", "protocol": "emqp", "producer_protocol": "emp", "connection": "c"}
    times = {"time": START, "delivered": START + 10, "latency_us": 20, "attempts": 1}
    flags = {"late": False, "lost": False, "doubled": False, "intact": True, "outcome": "settled"}
    good = {"destination": "queue/jobs", **fixed, **times, **flags}
    deliveries = [{**good, "message_id": n} for n in range(50)]
    lost = {"lost": True, "destination": EVIL, "outcome": "dropped", "detail": EVIL}
    deliveries.append({**good, **lost, "message_id": 50, "latency_us": None})
    dead = {"destination": "queue/-jobs", "hop": "queue/-jobs", "outcome": "dead", "late": False}
    deliveries += [{**good, **dead, "message_id": 60 + n, "detail": "timeout"} for n in range(2)]
    read_by = {"destination": "topic/ticks", "hop": "@archive", "detail": EVIL, "message_id": 62}
    deliveries.append({**good, **dead, **read_by})
    deliveries.append({**good, "destination": NAME, "outcome": "expired", "message_id": 63})
    put(root, "gold/deliveries", deliveries)
    letters = [{"message_id": 71, "origin": 61, "destination": "queue/-jobs/dead"}]
    step = {"node": "n", "time": START, "step": "dead", "destination": EVIL, "detail": EVIL}
    steps = [{**step, "message_id": n, "ledger_seq": n} for n in (61, 62, 71, 99)]
    put(root, "gold/steps", steps)
    waiting = {
        "protocol": None,
        "outcome": "waiting",
        "late": True,
        "doubled": True,
        "intact": False,
    }
    open_rows = [{**good, **waiting, "message_id": 51, "latency_us": None}]
    fine = {**good, "outcome": "waiting", "latency_us": None}
    put(root, "open/deliveries", open_rows + [{**fine, **letter} for letter in letters])
    verdicts = ["equal"] * 40 + ["missing on the wire"] * 2 + ["missing in the ledger", "uncertain"]
    passage = {"node": "n", "connection": "c", "protocol": "emqp", "kind": "send", "way": "in"}
    compared = [
        {**passage, "message_id": n, "destination": EVIL, "verdict": verdict, "time": START}
        for n, verdict in enumerate(verdicts)
    ]
    put(root, "gold/reconciliation", compared)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def page(tables: Path) -> Path:
    target = tables / "report.html"
    write_report(str(tables), target, made_us=START)
    return target


# ------------------------------------------------------------------------------- its figures


def test_facts_of_known_tables(tables: Path) -> None:
    facts = gather(ReportTables(str(tables)))
    rows = traffic_rows(90)
    assert facts.traffic is not None and facts.calls is not None and facts.sessions is not None
    assert facts.traffic.total_messages == sum(row["messages"] for row in rows)
    assert facts.traffic.total_errors == sum(row["errors"] for row in rows)
    assert (facts.calls.answered, facts.calls.failed, facts.calls.unanswered) == (102, 2, 3)
    assert facts.calls.waiting == 1 and facts.calls.slowest[0]["latency_us"] == 9020
    assert (facts.sessions.total, facts.sessions.troubled_count) == (154, 3)
    assert facts.sessions.troubled[0]["session"] == "epoxy-40"
    assert facts.accounts is not None and facts.accounts.total("seen") == 6480
    assert facts.deliveries is not None and facts.reconciliation is not None
    assert (facts.deliveries.lost, facts.deliveries.late, facts.deliveries.doubled) == (1, 1, 1)
    assert facts.deliveries.took is not None and facts.deliveries.took.count == 54
    assert facts.deliveries.damaged == 1
    outcomes = {"settled": 50, "dead": 3, "dropped": 1, "expired": 1, "waiting": 2}
    assert facts.deliveries.outcomes == outcomes
    assert (facts.reconciliation.missing, facts.reconciliation.total) == (3, 44)


def test_latencies_add_up_over_rows(tables: Path) -> None:
    found = gather(ReportTables(str(tables))).latencies
    assert found is not None
    rows = traffic_rows(90)
    assert found.all.count == 45 * len(rows)
    assert found.all.longest == 40_000
    # Half of 45 are in the first three buckets, 9 + 8 + 7 of them.
    assert found.all.p50 == highest_of(122) and found.by_protocol["emp"].p50 == highest_of(122)
    assert found.all.p99 == highest_of(128)
    assert all(each == found.over_time[0] for each in found.over_time if each is not None)


def test_failures_come_by_cause_and_the_most_serious_first(tables: Path) -> None:
    failures = gather(ReportTables(str(tables))).failures
    found = [(each.kind, each.party, each.cause, each.count) for each in failures]
    assert found[:2] == [("dead", "queue/-jobs", "timeout", 2), ("dead", "topic/ticks", EVIL, 1)]
    assert found[2] == ("lost", EVIL, EVIL, 1)
    assert ("unanswered", "service/price", None, 3) in found
    rule = "reason … " + EVIL
    assert ("violation", "10.9.9.9", f"reason 0 {EVIL}", 2) in found
    assert ("violation", "10.1.0.1:25188", f"reason 1 {EVIL}", 1) in found
    assert not [each for each in found if each[2] == rule]
    kinds = [each.kind for each in failures]
    assert kinds == sorted(kinds, key=KINDS.index)
    dead = failures[0]
    assert (dead.message_id, dead.letter_id, dead.name) == (61, 71, "-jobs")
    assert failures[1].name == "@archive"


def test_one_rule_of_a_peer_is_one_cause(tmp_path: Path) -> None:
    rows = [{**violation(2, f"{n} bytes, more than 9"), "byte_offset": n} for n in (10, 11)]
    put(tmp_path, "silver/violations", rows)
    put(tmp_path, "silver/directions", [direction("c2")])
    (found,) = gather(ReportTables(str(tmp_path))).failures
    assert (found.cause, found.count) == ("… bytes, more than …", 2)


def test_failed_requests_come_from_the_wire_where_the_hub_recorded_nothing(tmp_path: Path) -> None:
    put(tmp_path, "gold/conversations", [conversation(1, outcome="out_of_stock")])
    (found,) = gather(ReportTables(str(tmp_path))).failures
    assert (found.kind, found.party, found.cause) == ("failed", "service/price", "out_of_stock")


def direction(connection: str, **more: Any) -> dict[str, Any]:
    ends = {"connector_address": "10.9.9.9", "acceptor_address": "10.1.0.1", "acceptor_port": 25188}
    times = {"time": START, "last_time": START + 1}
    return {
        "node": "n", "connection": connection, "direction": "forward", **ends, **times, **more
    }  # fmt: skip


def write_killed(root: Path) -> Path:
    """Two nodes: the hub of one was killed at second 10 and ran again from second 13 on, that of
    the other was stopped. A gap in second 5, and records that are missing after second 7."""
    second = 1_000_000

    def times(first: int, last: int) -> dict[str, Any]:
        return {"time": START + first * second, "last_time": START + last * second}

    put(
        root,
        "silver/directions",
        [
            direction("emp-9-1", **times(0, 10)),
            direction("relink-tls-a-1", **times(13, 20)),
            direction("emp-1-1", node="other", **times(0, 3)),
            direction("emp-2-1", node="other", **times(4, 20)),
            direction("10.0.0.1:5-10.0.0.2:6@7", node="pcap", **times(0, 20)),
        ],
    )
    named = {"node": "n", "last_connection": "emp-9-1"}
    put(root, "gold/sessions", [session(1, "emp", **named, **times(0, 2))])
    still = [
        session(2, "emp", ended="open", **named, **times(0, 4)),
        session(3, "emp", ended="open", **{**named, "last_connection": "emp-a-1"}, **times(13, 20)),
    ]
    put(root, "open/sessions", still)
    message = {"protocol": "emp", "destination": "queue/a", "kind": "send", "payload_length": 1}
    moments = [{**message, "time": START + n * second} for n in range(21)]
    put(root, "silver/messages", moments)
    put(root, "gold/accounting", [account(1, "emp", frames=90, gaps=10)])
    frame = {"node": "n", "connection": "emp-9-1", "direction": "forward", "frame": "gap"}
    put(root, "silver/frames", [{**frame, "time": START + 5 * second, "length": 10}])
    nothing = {"late": False, "lost": False, "doubled": False, "outcome": "unknown"}
    missing = {"node": "n", "time": START + 7 * second, "reason": "rows 5 to 9 are missing"}
    put(root, "gold/deliveries", [{**nothing, **missing}])
    return root


def test_sessions_of_a_killed_hub_end_with_it(tmp_path: Path) -> None:
    facts = gather(ReportTables(str(write_killed(tmp_path))))
    assert facts.sessions is not None and facts.clock is not None
    assert facts.sessions.endings == {"emp": {"goodbye": 1, "killed": 1, "open": 1}}
    ends = {row["session"]: row["lasted_us"] for row in facts.sessions.largest}
    assert ends == {"emp-1": 2_000_000, "emp-2": 10_000_000, "emp-3": 7_000_000}
    at = [
        (START + n * 1_000_000 - facts.clock.start_us) // facts.clock.width_us for n in (9, 11, 14)
    ]
    assert [facts.sessions.open_at[piece] for piece in at] == [1, 0, 1]


def test_kills_and_gaps_are_marked_in_the_plots(tmp_path: Path) -> None:
    facts = write_report(str(write_killed(tmp_path)), tmp_path / "r.html", made_us=START)
    found = [(each.kind, each.node, each.start_us - START) for each in facts.interruptions]
    assert found == [
        ("restarted", "other", 3_000_000),
        ("gap", None, 5_000_000),
        ("missing records", "n", 7_000_000),
        ("killed", "n", 10_000_000),
    ]
    killed = facts.interruptions[-1]
    assert (killed.end_us, killed.sessions) == (START + 13_000_000, 1)
    html = (tmp_path / "r.html").read_text()
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    marks = [re.findall(r'class="cut ([a-z-]+)"', plot) for plot in plots]
    expected = ["restarted", "gap", "missing-records", "killed"]
    assert [each for each in marks if each] == [expected] * 3  # messages, bytes, open sessions
    # The band of the kill covers three of the plot's seconds, from the tenth on.
    x, width = re.findall(r'class="cut killed" x="([\d.]+)" y="14" width="([\d.]+)"', plots[0])[0]
    assert float(width) / (float(x) - 62) == pytest.approx(3 / 10, rel=0.05)


def test_no_conversation_twice_among_the_slowest(tmp_path: Path) -> None:
    """A request that was delivered again, or repeated over another connection of its link, has
    several rows: its id shows that it is one."""
    rows = [
        conversation(1, connection="a", request_offset=10, latency_us=900),
        conversation(2, connection="b", request_offset=20, latency_us=800),
        conversation(3, connection="c", request_offset=30, latency_us=700, correlation="x"),
        conversation(3, connection="c", request_offset=99, latency_us=600, correlation="x"),
        conversation(4, connection="c", request_offset=40, latency_us=500),
    ]
    put(tmp_path, "gold/conversations", rows)
    passage = {"node": "n", "kind": "request", "verdict": "equal", "message_id": 77}
    compared = [
        {**passage, "connection": "a", "byte_offset": 10},
        {**passage, "connection": "b", "byte_offset": 20},
        {**passage, "connection": "c", "byte_offset": 40, "message_id": 78},
    ]
    put(tmp_path, "gold/reconciliation", compared)
    calls = gather(ReportTables(str(tmp_path))).calls
    assert calls is not None
    found = [(row["latency_us"], row["message_id"]) for row in calls.slowest]
    assert found == [(900, 77), (700, None), (500, 78)]


def test_rows_lead_to_the_steps_of_their_messages(page: Path) -> None:
    html = page.read_text()
    anchors = set(re.findall(r'<details class="message" id="(message-\d+)">', html))
    links = set(re.findall(r'href="#(message-\d+)"', html))
    assert links and links == anchors
    assert "Steps of message 61" in html and "Steps of message 71" in html
    # The steps of others are not in the tables: there is the command for them.
    assert 'data-copy="crosswire trace 50"' in html


def test_commands_are_those_of_the_command_line(page: Path) -> None:
    """Every command on the page is parsed as it was meant, names of peers included."""
    lines = {
        value
        for name, value in Elements(page.read_text()).attributes
        if name == "data-copy" and value
    }
    assert all(line.isprintable() for line in lines)
    parsed = {}
    for line in lines:
        words = bash_words(line)
        assert words[0] == "crosswire"
        command, arguments = split_command(words[1:])
        parser = parser_of(command, arguments)
        parsed[line] = parser.parse_args(options_last(parser, arguments))
        parsed[line].command = command
    dead = [each for each in parsed.values() if each.command == "dead"]
    assert {each.queue for each in dead} == {"-jobs", "@archive"}
    found = [each for each in parsed.values() if each.command == "find"]
    assert NAME in {each.destination for each in found}
    assert all(each.since <= each.until for each in found)


def test_tables_have_captions_and_percentiles_colours_of_their_own(page: Path) -> None:
    html = page.read_text()
    assert html.count("<table") == html.count("<caption>") > 12
    style = html[html.index("<style>") : html.index("</style>")]
    protocols = set(re.findall(r"--(?:emp|emqp|relink|epoxy|micromsg2|tls): (#\w+)", style))
    others = set(re.findall(r"--(?:q\d+|fine|fair|idle|fault|fail|bad): (#\w+)", style))
    assert len(protocols) >= 10 and len(others) >= 14 and not protocols & others


def test_listeners_are_distinguished_from_hosts(tables: Path) -> None:
    topology = gather(ReportTables(str(tables))).topology
    assert topology is not None
    listeners = {row["listener"] for row in topology.links}
    assert listeners == {f"10.1.0.1:{port}" for port in PEERS.values()} | {"fd00::2:5040"}
    # Both directions between two of them are one link.
    assert {row["messages"] for row in topology.links if row["protocol"] != "emp"} == {200}


def test_the_page_has_every_section(page: Path) -> None:
    html = page.read_text()
    sections = re.findall(r'<section id="(\w+)">', html)
    assert len(sections) == len(set(sections)) == 13 and sections[0] == "failures"
    for target in re.findall(r'href="#(\w+)"', html):
        assert target in sections
    cards = (
        "How much traffic?",
        "How long did it take?",
        "What was lost or failed?",
        "What are the causes?",
    )
    for words in cards:
        assert words in html
    assert "6,480 bytes were seen, and every one is accounted for" in html


def test_a_short_recording_is_counted_by_its_messages(tmp_path: Path) -> None:
    put(tmp_path, "gold/traffic", traffic_rows(1))
    sent = {"protocol": "emp", "destination": "queue/a", "kind": "send", "payload_length": 5}
    rows = [{**sent, "time": START + n * 1000, "status": None, "intact": n > 1} for n in range(90)]
    put(tmp_path, "silver/messages", rows)
    facts = gather(ReportTables(str(tmp_path)))
    assert facts.clock is not None and facts.traffic is not None
    assert (facts.clock.width_us, facts.clock.count) == (1000, 90)
    assert facts.traffic.messages == {"emp": [1] * 90}
    assert facts.damaged_payloads == 2


def test_little_is_enough(tmp_path: Path) -> None:
    put(tmp_path, "gold/accounting", [])
    facts = write_report(str(tmp_path), tmp_path / "r.html", made_us=START)
    assert facts.tables == {"gold.accounting": 0}
    assert "Sections left out" in (tmp_path / "r.html").read_text()


def test_a_table_without_files_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "silver" / "violations").mkdir(parents=True)
    (tmp_path / "silver" / "violations" / "_SUCCESS").touch()
    show(tmp_path, "silver/violations")
    facts = write_report(str(tmp_path), tmp_path / "r.html", made_us=START)
    assert facts.violations is not None and facts.violations.total == 0


# ---------------------------------------------------------------- nothing in it obeys a peer


def bash_words(line: str) -> list[str]:
    """The words of a command as a shell gives them to a program."""
    script = f"printf '%s\\0' {line}"
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, check=True)
    return done.stdout.decode().split("\0")[:-1]


class Elements(HTMLParser):
    """The elements and attributes that a browser would see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_text_of_peers_stays_text(page: Path) -> None:
    html = page.read_text()
    found = Elements(html)
    assert found.tags.count("script") == 1 and "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in html
    assert "\u202e" not in html and "\x00" not in html and "\\x202e" in html


def test_the_page_needs_nothing_but_itself(page: Path) -> None:
    html = page.read_text()
    assert not re.search(r"https?://|@import|url\(", html)
    found = Elements(html)
    links = [value or "" for name, value in found.attributes if name in ("href", "src", "action")]
    assert links and all(link.startswith("#") for link in links)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(found.tags)


def test_only_our_script_may_run(page: Path) -> None:
    assert re.search(
        r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/=]{44}'\"",
        page.read_text(),
    )


# ------------------------------------------------------------------------------- its parts


def test_percentiles_are_bounded_by_the_longest() -> None:
    assert percentiles({100: 100}, None) == [highest_of(100)] * 4
    assert percentiles({100: 100}, lowest_of(100)) == [lowest_of(100)] * 4
    assert percentiles({1: 99, 5: 1}, 5) == [1, 1, 1, 1]
    assert percentiles({1: 98, 5: 2}, 5) == [1, 1, 1, 5]


def test_every_part_of_the_accounting_is_explained() -> None:
    assert set(_PART_WORDS) == set(ACCOUNT_PARTS)


def test_every_verdict_is_explained() -> None:
    assert tuple(_VERDICTS) == VERDICTS


def batch(**columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_a_tally_keeps_the_largest_within_its_limit() -> None:
    tally = Tally(("key",), ("count",), most=("top",), limit=10)
    for turn in range(50):
        keys = ["large", None, *(f"small {turn * 9 + n}" for n in range(9))]
        tally.add(batch(key=keys, count=[100, 50, *([1] * 9)], top=[turn] * 11))
    first, second, *_ = tally.rows()
    assert (first["key"], first["count"], first["top"]) == ("large", 5000, 49)
    assert (second["key"], second["count"]) == (None, 2500)
    assert len(tally.rows()) <= 10 and len(tally) >= 20


def test_the_highest_of_many_pieces() -> None:
    highest = Highest(3, ("value", "descending"), ("name", "ascending"))
    for start in range(0, 30, 10):
        highest.add(batch(value=[*range(start, start + 10), None], name=["x"] * 11))
    assert [row["value"] for row in highest.rows()] == [29, 28, 27]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (duration(0), "0 µs"),
        (duration(999.6), "1.00 ms"),
        (duration(1_240), "1.24 ms"),
        (duration(999_600), "1.00 s"),
        (duration(59_996_000), "1 min 0 s"),
        (duration(12_000_000_000), "3 h 20 min"),
        (duration(187_200_000_000), "2 d 4 h"),
        (duration(None), "–"),
        (size(1023), "1023 B"),
        (size(1536), "1.5 KiB"),
        (amount(950), "950"),
        (amount(1_234), "1.2 k"),
        (amount(999_999), "1 M"),
        (share(1, 1_000_000), "< 0.01 %"),
        (share(999_999, 1_000_000), "> 99.99 %"),
        (share(5, 5), "100 %"),
        (share(0, 0), "0 %"),
        (moment(START), "2026-09-21 14:14:00"),
        (moment(10**18), f"{10**18} µs"),
        (text(""), '<span class="none">–</span>'),
        (text("a<b\n"), "a&lt;b\\x0a"),
        (shell_word("orders"), "orders"),
        (shell_word("it's; rm $x"), "'it'\"'\"'s; rm $x'"),
        (shell_word("a'\\\u202e1"), "$'a\\'\\\\\\U0000202e1'"),
    ],
)
def test_numbers_in_words(found: str, expected: str) -> None:
    assert found == expected


def test_long_text_is_cut_and_whole_in_its_tooltip() -> None:
    assert text("x" * 90) == "x" * 90
    assert text("x" * 91) == f'<span title="{"x" * 91}">{"x" * 89}…</span>'
    assert len(text("x" * 10**6)) < 1200


@pytest.mark.parametrize("highest", [0.003, 1, 3, 7, 10, 99, 1000, 1024, 123_456, 10**12])
def test_an_axis_holds_what_is_on_it(highest: float) -> None:
    top, marks = _scale(highest)
    assert top >= highest * 0.999 and marks[0] == 0 and marks[-1] == pytest.approx(top)
    assert 2 <= len(marks) <= 6
    index, marks = _decades(highest, highest * 30)
    assert 0 <= index(highest) <= index(highest * 30) <= 1 and 1 < len(marks) <= 8


# ---------------------------------------------------------------------------------- errors


def test_no_input_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hub" / "wire").mkdir(parents=True)
    for name, message in (
        ("nothing", "does not exist"),
        ("empty", "there are no tables"),
        ("hub", "is the lake of a hub"),
    ):
        with pytest.raises(InvalidInput, match=message):
            write_report(str(tmp_path / name), tmp_path / "r.html", made_us=START)
    assert not (tmp_path / "r.html").exists()


def test_tables_of_another_make_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gold" / "traffic").mkdir(parents=True)
    pq.write_table(pa.table({"time": [START]}), tmp_path / "gold" / "traffic" / "a.parquet")
    show(tmp_path, "gold/traffic")
    with pytest.raises(InvalidInput, match=r"gold\.traffic .* has no column 'protocol'"):
        write_report(str(tmp_path), tmp_path / "r.html", made_us=START)


def test_damage_is_reported_in_a_line_and_leaves_the_old_report(tmp_path: Path) -> None:
    put(tmp_path, "gold/traffic", traffic_rows(2))
    (tmp_path / "gold" / "traffic" / "part-0.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "r.html").write_text("old")
    with pytest.raises(InvalidInput, match=r"can't read gold\.traffic: ") as caught:
        write_report(str(tmp_path), tmp_path / "r.html", made_us=START)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "r.html").read_text() == "old"


def test_a_page_that_cannot_be_written_is_an_error(tables: Path, tmp_path: Path) -> None:
    for target, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "r.html", "no folder")):
        with pytest.raises(PipelineError, match=message):
            write_report(str(tables), target, made_us=START)


# ------------------------------------------------------------------------------ the program


def crosswire(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CROSSWIRE, "report", *arguments], capture_output=True, text=True)


def test_the_command(tables: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    done = crosswire("--input", tables, "--output", target, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary["output"] == str(target) and summary["requests"]["unanswered"] == 3
    assert summary["deliveries"] == {"total": 57, "late": 1, "lost": 1, "doubled": 1}
    assert target.read_text().startswith("<!doctype html>")
    assert target.stat().st_mode & 0o044


def test_the_command_reads_urls_and_explains_itself(tables: Path, tmp_path: Path) -> None:
    done = crosswire("--input", f"file://{tables}", "--output", tmp_path / "r.html")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/r.html\n")
    done = crosswire("--input", tmp_path / "nope", "--output", tmp_path / "r.html")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"crosswire report: {tmp_path}/nope does not exist\n"


# ------------------------------------------------------------------------------ in a browser


def _find_browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def chromium() -> str:
    found = _find_browser()
    if found is None and os.environ.get("CI") and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-q", "chromium"], capture_output=True)
        found = _find_browser()
    if found is not None:
        return found
    why = "no browser to look at the report with: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture
def browse(chromium: str, tmp_path: Path) -> Iterator[Any]:
    def show(page: Path) -> tuple[str, list[str]]:
        """The page as the browser has it in the end, and its messages on the console."""
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
        quiet = ("--disable-background-networking", "--disable-dev-shm-usage", "--dump-dom")
        home = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [chromium, *options, *quiet, home, "--enable-logging=stderr", f"file://{page}"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    yield show


def test_a_browser_has_nothing_to_complain_about(page: Path, browse: Any) -> None:
    shown, complaints = browse(page)
    assert complaints == []
    assert shown.count("<section") == 13 and 'id="tip"' in shown


def test_a_browser_refuses_any_other_script(page: Path, browse: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    added = "<script>document.title = 'taken over'</script></body>"
    other.write_text(page.read_text().replace("</body>", added))
    shown, complaints = browse(other)
    assert len(complaints) == 1 and "Content Security Policy" in complaints[0]
    assert "<title>taken over" not in shown


def test_a_click_sorts_a_table(page: Path, browse: Any, tmp_path: Path) -> None:
    clicks = """<script>
      const [table] = document.querySelectorAll("#destinations table");
      const column = (n) => [...table.tBodies[0].rows].map((row) => row.cells[n].textContent);
      const button = (n) => table.querySelectorAll("th button")[n];
      const seen = [];
      for (const n of [1, 2, 2]) { button(n).click(); seen.push(column(n)); }
      document.getElementById("theme").click();
      document.title = JSON.stringify([seen, document.documentElement.dataset.theme]);
    </script></body>"""
    html = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text())
    (tmp_path / "clicks.html").write_text(html.replace("</body>", clicks))
    shown, complaints = browse(tmp_path / "clicks.html")
    assert complaints == []
    title = re.search(r"<title>(.*?)</title>", shown)
    assert title is not None
    (names, falling, rising), theme = json.loads(title[1])
    assert names == sorted(names, key=str.casefold) and len(set(names)) == 5
    numbers = [int(each.replace(",", "")) for each in falling]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 5
    assert rising == falling[::-1]
    assert theme in ("dark", "light")
