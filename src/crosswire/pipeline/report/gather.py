"""Reads the tables and computes the figures: a few columns of each, in bounded memory."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.pipeline.report.facts import (
    MISSING,
    Accounts,
    Calls,
    Deliveries,
    Facts,
    Failure,
    MessageKey,
    Reconciliation,
    Sessions,
    TimeBuckets,
    Topology,
    Violations,
)
from crosswire.pipeline.report.failures import failures, message_ids, steps_of
from crosswire.pipeline.report.histogram import buckets_of
from crosswire.pipeline.report.interruptions import HubRuns, interruptions
from crosswire.pipeline.report.over_time import (
    LatencyHistogram,
    clock_of,
    latencies,
    leg_shown,
    of_leg,
    piece_of,
    traffic,
)
from crosswire.pipeline.report.table_reader import Highest, ReportTables, Tally
from crosswire.pipeline.tables.names import ACCOUNT_PARTS, UNANSWERED

__all__ = ["gather"]

_EXAMPLES: Final = 25
_CANDIDATES: Final = 4 * _EXAMPLES
_GROUPS: Final = 40
_NUMBERS: Final = re.compile(r"\d+")
_BROKEN_CONNECTIONS: Final = 10_000


def gather(tables: ReportTables) -> Facts:
    """The figures of all tables that exist. Raises InvalidInput for tables that can't be read."""
    clock = clock_of(tables)
    runs = HubRuns(tables)
    sessions = _sessions(tables, clock, runs) if tables.has("gold.sessions") else None
    accounts = _accounts(tables) if tables.has("gold.accounting") else None
    interrupted = interruptions(tables, clock, runs, accounts.total("gaps") if accounts else 0)
    if clock is not None:
        clock = msgspec.structs.replace(clock, interruptions=tuple(interrupted))
    calls = _calls(tables) if tables.has("gold.conversations") else None
    violations = _violations(tables) if tables.has("silver.violations") else None
    deliveries = _deliveries(tables) if tables.has("gold.deliveries") else None
    reconciliation = _reconciliation(tables) if tables.has("gold.reconciliation") else None
    traffic_facts = traffic(tables, clock) if clock else None
    failed = failures(tables, calls, violations)
    return Facts(
        tables={name: tables.count(name) for name in tables.names},
        clock=clock,
        traffic=traffic_facts,
        latencies=latencies(tables, clock, traffic_facts.destinations)
        if clock and traffic_facts
        else None,
        calls=calls,
        sessions=sessions,
        topology=_topology(tables, sessions) if tables.has("gold.topology") else None,
        accounts=accounts,
        violations=violations,
        deliveries=deliveries,
        reconciliation=reconciliation,
        failures=failed,
        interruptions=interrupted,
        steps=steps_of(tables, _messages_named(failed, calls, deliveries, reconciliation)),
        damaged_payloads=_damaged(tables),
    )


def _messages_named(
    failed: list[Failure],
    calls: Calls | None,
    deliveries: Deliveries | None,
    reconciliation: Reconciliation | None,
) -> list[MessageKey]:
    """The messages whose ids the page shows, in the order of its sections."""
    keys = [(each.node, each.message_id) for each in failed]
    keys += [(each.node, each.letter_id) for each in failed]
    for rows in (
        calls.slowest if calls else [],
        deliveries.examples if deliveries else [],
        reconciliation.examples if reconciliation else [],
    ):
        keys += [(row["node"], row["message_id"]) for row in rows]
    return [(node, identifier) for node, identifier in keys if identifier is not None]


def _with(batch: pa.RecordBatch, **columns: Any) -> pa.RecordBatch:
    for name, values in columns.items():
        batch = batch.append_column(name, values)
    return batch


def _ones(batch: pa.RecordBatch) -> pa.Array:
    return pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)


def _number(condition: Any) -> Any:
    return pc.fill_null(pc.cast(condition, pa.int64()), 0)


# Conversations.


def _calls(tables: ReportTables) -> Calls:
    outcomes = Tally(("protocol", "outcome"), ("count",))
    causes = Tally(
        ("protocol", "destination", "outcome"), ("count",), most=("last",), least=("first",)
    )
    troubled = Tally(("protocol", "destination"), ("trouble", "failed", "unanswered", "calls"))
    slowest = Highest(_CANDIDATES, ("latency_us", "descending"), ("time", "ascending"))
    columns = ("protocol", "destination", "outcome", "latency_us", "time", "answered", "leg")
    sizes = ("request_offset", "request_bytes", "response_bytes")
    more = ("node", "connection", "direction", "correlation", *sizes)
    for batch in of_leg(tables.scan("gold.conversations", *columns, *more), leg_shown(tables)):
        outcome = batch["outcome"]
        unanswered = _number(pc.equal(outcome, UNANSWERED))
        trouble = _number(pc.not_equal(outcome, "success"))
        counted = _with(
            batch.select(["protocol", "destination", "outcome"]),
            count=_ones(batch),
            calls=_ones(batch),
            unanswered=unanswered,
            trouble=trouble,
            failed=pc.subtract(trouble, unanswered),
            first=batch["time"],
            last=batch["time"],
        )
        outcomes.add(counted)
        troubled.add(counted)
        causes.add(counted.filter(pc.equal(trouble, 1)))
        slowest.add(batch.filter(pc.is_valid(batch["answered"])))
    found = outcomes.rows()
    unanswered_count = _sum(found, UNANSWERED)
    good = _sum(found, "success")
    total = sum(row["count"] for row in found)
    return Calls(
        answered=total - unanswered_count,
        failed=total - unanswered_count - good,
        unanswered=unanswered_count,
        waiting=tables.count("open.conversations"),
        outcomes=[row for row in found if row["outcome"] != "success"][:_GROUPS],
        failures=causes.rows(_GROUPS),
        troubled=[row for row in troubled.rows(_EXAMPLES) if row["trouble"]],
        slowest=_each_once(tables, slowest.rows())[:_EXAMPLES],
    )


def _each_once(tables: ReportTables, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversations with `message_id`, each of them once: the wire has one several times where a
    request was delivered again, or was sent again over another connection of a link."""
    ids = message_ids(tables, rows)
    found: dict[object, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        row["message_id"] = identifier = ids.get(index)
        key: object = (row["node"], identifier)
        if identifier is None:
            name = "correlation" if row["correlation"] else "request_offset"
            key = (row["node"], row["connection"], row["direction"], name, row[name])
        # The rows are in order: the first one is the slowest.
        found.setdefault(key, row)
    return list(found.values())


def _sum(rows: list[dict[str, Any]], outcome: str) -> int:
    return sum(row["count"] for row in rows if row["outcome"] == outcome)


# Sessions.


def _sessions(tables: ReportTables, clock: TimeBuckets | None, runs: HubRuns) -> Sessions:
    by_protocol = Tally(
        ("protocol",),
        ("sessions", "connections", "late", "messages", "bytes", "gap_bytes", "violations"),
        most=("lasted_us", "handshake_us"),
    )
    endings = Tally(("protocol", "ended"), ("sessions",))
    errors = Tally(("protocol", "error"), ("sessions",))
    largest = Highest(10, ("bytes", "descending"), ("session", "ascending"))
    worst = [("violations", "descending"), ("gap_bytes", "descending"), ("time", "ascending")]
    troubled = Highest(_EXAMPLES, *worst)
    acceptors = Tally(("acceptor_address", "acceptor_port"), ("sessions",))
    begun, over = Tally(("piece",), ("sessions",)), Tally(("piece",), ("sessions",))
    troubled_count = 0
    for table in ("gold.sessions", "open.sessions"):
        for batch in tables.scan(table, *_SESSION_COLUMNS):
            rows = _measured(runs.with_ends(batch))
            for tally in (by_protocol, endings, acceptors):
                tally.add(rows)
            largest.add(rows)
            errors.add(rows.filter(pc.equal(rows["ended"], "error")))
            in_trouble = rows.filter(_is_troubled(rows))
            troubled_count += in_trouble.num_rows
            troubled.add(in_trouble)
            if clock is not None:
                begun.add(_with(rows, piece=piece_of(clock, rows["time"])))
                ended = rows.filter(pc.not_equal(rows["ended"], "open"))
                over.add(_with(ended, piece=piece_of(clock, ended["last_time"])))
    how: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
    for row in endings.rows():
        how[row["protocol"]][row["ended"] or "open"] = row["sessions"]
    return Sessions(
        by_protocol=by_protocol.rows(),
        endings=dict(how),
        errors=errors.rows(_GROUPS),
        troubled=troubled.rows(),
        troubled_count=troubled_count,
        largest=largest.rows(),
        open_at=_open_at(clock, begun, over) if clock else [],
        acceptors=frozenset(
            f"{row['acceptor_address']}:{row['acceptor_port']}" for row in acceptors.rows()
        ),
    )


_SESSION_COLUMNS: Final = (
    "node",
    "session",
    "last_connection",
    "protocol",
    "connections",
    "connector_address",
    "acceptor_address",
    "acceptor_port",
    "time",
    "last_time",
    "late",
    "handshake_us",
    "messages_forward",
    "messages_backward",
    "bytes_forward",
    "bytes_backward",
    "gap_bytes",
    "violations",
    "ended",
    "error",
)


def _measured(batch: pa.RecordBatch) -> pa.RecordBatch:
    def filled(name: str) -> Any:
        return pc.fill_null(pc.cast(batch[name], pa.int64()), 0)

    kept = ("session", "protocol", "connections", "connector_address", "acceptor_address")
    more = ("acceptor_port", "time", "last_time", "handshake_us", "ended", "error")
    return _with(
        batch.select([*kept, *more]),
        sessions=_ones(batch),
        late=filled("late"),
        messages=pc.add(filled("messages_forward"), filled("messages_backward")),
        bytes=pc.add(filled("bytes_forward"), filled("bytes_backward")),
        gap_bytes=filled("gap_bytes"),
        violations=filled("violations"),
        lasted_us=pc.subtract(batch["last_time"], batch["time"]),
    )


def _is_troubled(rows: pa.RecordBatch) -> Any:
    broken = pc.is_in(rows["ended"], pa.array(["error", "reset"]))
    damaged = pc.or_(pc.greater(rows["violations"], 0), pc.greater(rows["gap_bytes"], 0))
    return pc.or_(broken, damaged)


def _open_at(clock: TimeBuckets, begun: Tally, over: Tally) -> list[int]:
    """Sessions that were open at any moment of each interval: those that ended in it included."""
    ends = {row["piece"]: row["sessions"] for row in over.rows()}
    starts = {row["piece"]: row["sessions"] for row in begun.rows()}
    counts, now = [], 0
    for piece in range(clock.count):
        now += starts.get(piece, 0)
        counts.append(now)
        now -= ends.get(piece, 0)
    return counts


# Topology.


def _topology(tables: ReportTables, sessions: Sessions | None) -> Topology:
    key = ("source", "target", "protocol", "kind", "destination")
    edges = Tally(key, ("messages", "bytes"))
    for batch in tables.scan("gold.topology", *key, "messages", "bytes"):
        edges.add(batch)
    links: Counter[tuple[str, str, str]] = Counter()
    uses: Counter[tuple[str, str, str]] = Counter()
    known = sessions.acceptors if sessions else frozenset()
    for row in edges.rows():
        source, target = str(row["source"]), str(row["target"])
        host, listener = (
            (source, target) if _is_listener(target, source, known) else (target, source)
        )
        links[host, listener, row["protocol"]] += row["messages"]
        uses[listener, row["protocol"], row["destination"]] += row["messages"]
    return Topology(
        links=[
            {"host": host, "listener": address, "protocol": protocol, "messages": messages}
            for (host, address, protocol), messages in links.most_common()
        ],
        uses=[
            {
                "listener": address,
                "protocol": protocol,
                "destination": destination,
                "messages": messages,
            }
            for (address, protocol, destination), messages in uses.most_common()
        ],
        edges=edges.rows(_GROUPS),
        more_edges=max(len(edges) - _GROUPS, 0),
    )


def _is_listener(name: str, other: str, known: frozenset[str]) -> bool:
    """Whether this end of an edge accepted the connection: it is a known acceptor, or has a port at
    its end. The latter shows only in comparison, since IPv6 addresses have colons too."""
    if (name in known) != (other in known):
        return name in known
    return name.count(":") >= other.count(":")


# Bytes.


def _accounts(tables: ReportTables) -> Accounts:
    sums = Tally(("protocol",), ("seen", *ACCOUNT_PARTS, "missing", "directions"))
    worst = Highest(_EXAMPLES, ("not_read", "descending"), ("connection", "ascending"))
    columns = ("node", "connection", "direction", "protocol", "seen", *ACCOUNT_PARTS, "missing")
    for batch in tables.scan("gold.accounting", *columns):
        # Rows without a connection are about packets.
        batch = batch.filter(pc.is_valid(batch["connection"]))
        sums.add(_with(batch, directions=_ones(batch)))
        not_read = pc.subtract(pc.subtract(batch["seen"], batch["frames"]), batch["encrypted"])
        rows = _with(batch, not_read=not_read)
        worst.add(rows.filter(pc.greater(rows["not_read"], 0)))
    return Accounts(by_protocol=sums.rows(), worst=worst.rows())


def _violations(tables: ReportTables) -> Violations:
    reasons = Tally(("protocol", "error", "reason"), ("count", "length"))
    senders = Tally(
        ("node", "connection", "direction", "protocol", "reason"),
        ("count",),
        most=("last",),
        least=("first",),
        limit=_BROKEN_CONNECTIONS,
    )
    first = Highest(_EXAMPLES, ("time", "ascending"), ("byte_offset", "ascending"))
    destination = ("node", "connection", "direction", "protocol", "byte_offset", "length", "time")
    total = 0
    for batch in tables.scan("silver.violations", *destination, "error", "reason"):
        counted = _with(batch, count=_ones(batch), first=batch["time"], last=batch["time"])
        reasons.add(counted)
        senders.add(counted)
        first.add(batch)
        total += batch.num_rows
    return Violations(
        total=total,
        reasons=reasons.rows(_GROUPS),
        more_reasons=max(len(reasons) - _GROUPS, 0),
        examples=first.rows(),
        hosts=_hosts(tables, senders.rows()),
    )


def _hosts(tables: ReportTables, senders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hosts that sent violations, by reason: their addresses are in silver.directions."""
    if not senders:
        return []
    sent: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in senders:
        sent[row["node"], row["connection"], row["direction"]].append(row)
    names = pa.array({row["connection"] for row in senders}, pa.string())
    hosts: dict[tuple[Any, ...], dict[str, Any]] = {}
    columns = ("node", "connection", "direction", "connector_address", "acceptor_address")
    broken = pc.is_in(pc.field("connection"), names)
    for batch in tables.scan("silver.directions", *columns, "acceptor_port", where=broken):
        for row in batch.to_pylist():
            listener = f"{row['acceptor_address']}:{row['acceptor_port']}"
            host = row["connector_address"] if row["direction"] == "forward" else listener
            for each in sent.get((row["node"], row["connection"], row["direction"]), ()):
                # One rule is one cause, whatever the numbers in the reason are.
                rule = _NUMBERS.sub("…", each["reason"])
                entry = hosts.setdefault(
                    (host, each["protocol"], rule), {**each, "host": host, "count": 0}
                )
                entry["count"] += each["count"]
                entry["first"] = min(entry["first"], each["first"])
                entry["last"] = max(entry["last"], each["last"])
                if entry["reason"] != each["reason"]:
                    entry["reason"] = rule
    return sorted(hosts.values(), key=lambda row: -row["count"])[:_EXAMPLES]


def _damaged(tables: ReportTables) -> int | None:
    """Payloads whose checksum is not the one taken at the edge; None if there are no checksums."""
    if not tables.has("silver.messages") or "intact" not in tables.columns("silver.messages"):
        return None
    checked = damaged = 0
    for batch in tables.scan("silver.messages", "intact"):
        checked += batch.num_rows - batch["intact"].null_count
        damaged += pc.sum(pc.cast(pc.invert(batch["intact"]), pa.int64())).as_py() or 0
    return damaged if checked else None


# What the hub recorded.


_FAULTS: Final = ("lost", "doubled", "late")
_SHOWN: Final = (
    "node",
    "message_id",
    "destination",
    "connection",
    "attempts",
    "outcome",
    "detail",
)


def _deliveries(tables: ReportTables) -> Deliveries:
    by_destination = Tally(("protocol", "destination"), ("faults", "deliveries", *_FAULTS))
    outcomes = Tally(("outcome",), ("deliveries",))
    by_time = Tally(("protocol", "destination", "bucket"), ("count",), most=("longest",))
    gravest = [(name, "descending") for name in _FAULTS]
    examples = Highest(_EXAMPLES, *gravest, ("time", "ascending"))
    totals: Counter[str] = Counter()
    times = ("time", "delivered", "latency_us")
    columns = (*_SHOWN, *times, *_FAULTS, "protocol", "producer_protocol", "intact")
    for table in ("gold.deliveries", "open.deliveries"):
        for batch in tables.scan(table, *columns):
            flags = {name: _number(batch[name]) for name in _FAULTS}
            any_fault = pc.max_element_wise(*flags.values())
            rows = _with(
                batch.select([*_SHOWN, *times]),
                **flags,
                # A message that was never delivered has no receiver, but it has a producer.
                protocol=pc.coalesce(batch["protocol"], batch["producer_protocol"]),
                faults=any_fault,
                deliveries=_ones(batch),
            )
            by_destination.add(rows)
            outcomes.add(rows)
            arrived = rows.filter(pc.is_valid(rows["latency_us"]))
            times_us = arrived["latency_us"]
            arrived = _with(arrived, count=_ones(arrived), longest=times_us)
            by_time.add(_with(arrived, bucket=buckets_of(times_us)))
            examples.add(rows.filter(pc.equal(rows["faults"], 1)))
            totals["deliveries"] += batch.num_rows
            totals["damaged"] += pc.sum(_number(pc.invert(batch["intact"]))).as_py() or 0
            for name, flag in {**flags, "faulty": any_fault}.items():
                totals[name] += pc.sum(flag).as_py() or 0
    took = LatencyHistogram()
    destinations: defaultdict[tuple[str | None, str | None], LatencyHistogram] = defaultdict(
        LatencyHistogram
    )
    for row in by_time.rows():
        took.add(row)
        destinations[row["protocol"], row["destination"]].add(row)
    return Deliveries(
        total=totals["deliveries"],
        faulty=totals["faulty"],
        late=totals["late"],
        lost=totals["lost"],
        doubled=totals["doubled"],
        damaged=totals["damaged"],
        took=took.row() if took.counts else None,
        outcomes={str(row["outcome"]): row["deliveries"] for row in outcomes.rows()},
        destinations=[
            row
            | {
                "took": destinations[key].row()
                if (key := _destination_key(row)) in destinations
                else None
            }
            for row in by_destination.rows(_GROUPS)
        ],
        examples=examples.rows(),
    )


def _destination_key(row: dict[str, Any]) -> tuple[str | None, str | None]:
    return row["protocol"], row["destination"]


def _reconciliation(tables: ReportTables) -> Reconciliation:
    by_verdict = Tally(("protocol", "verdict"), ("count",))
    examples = Highest(_EXAMPLES, ("verdict", "ascending"), ("time", "ascending"))
    columns = ("destination", "kind", "way", "node", "message_id", "connection", "time")
    missing = pa.array(MISSING)
    for batch in tables.scan("gold.reconciliation", "verdict", "protocol", *columns):
        by_verdict.add(_with(batch, count=_ones(batch)))
        examples.add(batch.filter(pc.is_in(batch["verdict"], missing)))
    verdicts: Counter[str] = Counter()
    by_protocol: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
    for row in by_verdict.rows():
        verdicts[row["verdict"]] += row["count"]
        by_protocol[row["protocol"]][row["verdict"]] = row["count"]
    return Reconciliation(dict(verdicts), dict(by_protocol), examples.rows())
