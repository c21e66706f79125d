"""The pipeline's main tables on a terminal, a few lines each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from crosswire.cli.table import harmless, print_table
from crosswire.pipeline.report.facts import (
    MISSING,
    Deliveries,
    Facts,
    Latencies,
    Reconciliation,
    Sessions,
    Traffic,
)
from crosswire.pipeline.report.formats import count, duration, protocol_name, size
from crosswire.plurals import plural

__all__ = ["print_figures"]

_INDENT: Final = 3
_MOST_ROWS: Final = 10
_ENDINGS: Final = ("goodbye", "fin", "reset", "error", "killed", "open")
_UNPROVEN: Final = ("uncertain", "not accepted", "withdrawn")


def print_figures(facts: Facts) -> None:
    """Print the figures of every table that exists."""
    if facts.traffic is not None:
        _traffic(facts.traffic)
    if facts.latencies is not None:
        _latency(facts.latencies)
    if facts.sessions is not None:
        _sessions(facts.sessions)
    if facts.deliveries is not None:
        _deliveries(facts.deliveries)
    if facts.reconciliation is not None:
        _reconciliation(facts.reconciliation)


def _print(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], *notes: str) -> None:
    shown = list(rows)
    print(f"\n{title}")
    print_table(head, shown[:_MOST_ROWS], indent=_INDENT)
    if len(shown) > _MOST_ROWS:
        print(f"{'':{_INDENT}}… and {len(shown) - _MOST_ROWS} more")
    for note in notes:
        print(f"{'':{_INDENT}}{note}")


def _where(protocol: str | None, destination: str | None) -> tuple[str, str]:
    return protocol_name(protocol), harmless(destination or "–")


def _traffic(traffic: Traffic) -> None:
    rows = [
        (
            *_where(row["protocol"], row["destination"]),
            count(row["messages"]),
            size(row["bytes"]),
            _or_none(row["errors"]),
        )
        for row in traffic.destinations
        if row["destination"] is not None
    ]
    title = f"Traffic: {plural(traffic.total_messages, 'message')} on the wire  (gold.traffic)"
    _print(title, ("protocol", "destination", ">messages", ">payload", ">errors"), rows)


def _latency(took: Latencies) -> None:
    destinations = sorted(took.by_destination.items(), key=lambda item: -item[1].count)
    rows = [
        (
            *_where(*destination),
            count(each.count),
            *(duration(time_us) for time_us in (each.p50, each.p90, each.p99, each.longest)),
        )
        for destination, each in destinations
    ]
    head = ("protocol", "destination", ">answered", ">median", ">p90", ">p99", ">longest")
    _print("Latency: from request to response  (gold.conversations, gold.traffic)", head, rows)


def _sessions(held: Sessions) -> None:
    rows = []
    for row in held.by_protocol:
        ends = held.endings.get(row["protocol"], {})
        rows.append(
            (
                protocol_name(row["protocol"]),
                count(row["sessions"]),
                count(row["connections"]),
                *(_or_none(ends.get(how, 0)) for how in _ENDINGS),
                _or_none(row["violations"]),
            )
        )
    titles = ("goodbye", "closed", "reset", "error", "killed", "open")
    head = ("protocol", ">sessions", ">connections", *(f">{each}" for each in titles))
    killed = sum(ends.get("killed", 0) for ends in held.endings.values())
    note = "killed: open when the hub was killed"
    _print(
        "Sessions: and how they ended  (gold.sessions)",
        (*head, ">violations"),
        rows,
        *([note] if killed else []),
    )


def _deliveries(sent: Deliveries) -> None:
    rows = []
    for row in sorted(sent.destinations, key=lambda row: -row["deliveries"]):
        took = row["took"]
        times = (took.p50, took.p99) if took else (None, None)
        rows.append(
            (
                *_where(row["protocol"], row["destination"]),
                count(row["deliveries"]),
                *(duration(time_us or None) for time_us in times),
                *(_or_none(row[fault]) for fault in ("late", "doubled", "lost")),
            )
        )
    ends = ", ".join(f"{count(number)} {how}" for how, number in sent.outcomes.items())
    head = ("to", "from", ">messages", ">median", ">p99", ">late", ">doubled", ">lost")
    notes = [ends]
    if sent.doubled:
        notes.append(
            "doubled: delivered again after the kill; the first consumer may have processed it"
        )
    _print("Deliveries: from accepted to settled  (gold.deliveries)", head, rows, *notes)


def _reconciliation(compared: Reconciliation) -> None:
    there = [each for each in (*_UNPROVEN, *MISSING) if compared.verdicts.get(each)]
    head = ("protocol", ">equal", *(f">{each}" for each in there))
    rows = [
        (
            protocol_name(protocol),
            count(verdicts.get("equal", 0)),
            *(_or_none(verdicts.get(each, 0)) for each in there),
        )
        for protocol, verdicts in compared.by_protocol.items()
    ]
    notes = []
    if "uncertain" in there:
        notes.append("uncertain: the last bytes before the kill, which the tap had not written")
    if "not accepted" in there:
        notes.append("not accepted: the hub neither stored nor acknowledged it")
    if not compared.missing:
        notes.append("nothing is missing on the wire or in the hub's ledger")
    title = "Reconciliation: the wire against the hub's own ledger  (gold.reconciliation)"
    _print(title, head, rows, *notes)


def _or_none(number: int | None) -> str:
    return count(number) if number else "–"
