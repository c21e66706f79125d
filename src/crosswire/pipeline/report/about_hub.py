"""Sections about what the hub recorded: deliveries, and how they agree with the wire."""

from __future__ import annotations

from html import escape
from typing import Final

from crosswire.pipeline.report.cells import (
    all_is_well,
    bad,
    host,
    lasting,
    message_cell,
    number,
    peer_text_cell,
    protocol_cell,
    table,
    when,
)
from crosswire.pipeline.report.facts import Facts, Row
from crosswire.pipeline.report.formats import (
    count,
    duration,
)
from crosswire.pipeline.report.plots import (
    bars,
    legend,
    split_bar,
)
from crosswire.plurals import plural

__all__ = ["deliveries", "reconciliation"]


def deliveries(facts: Facts) -> str:
    """Outcomes, durations and faults of deliveries; empty without gold.deliveries."""
    found = facts.deliveries
    if found is None or not found.total:
        return ""
    words = (
        f"<p>{plural(found.total, 'delivery', 'deliveries')}: {count(found.lost)} lost, "
        f"{count(found.doubled)} doubled, {count(found.late)} late."
    )
    if found.took is not None:
        words += (
            f" Half of those that arrived took up to {duration(found.took.p50)}, 99 of 100 up to "
            f"{duration(found.took.p99)}, the longest {duration(found.took.longest)}."
        )
    if found.damaged:
        damaged = plural(found.damaged, "payload is", "payloads are")
        words += f" {damaged} no longer what was accepted."
    parts = [
        ("in order", "s-good", found.total - found.faulty),
        ("late", "s-fair", found.late),
        ("doubled", "s-bad", found.doubled),
        ("lost", "s-worse", found.lost),
    ]
    ends = bars(
        [
            (escape(how), _OUTCOME_STYLES.get(how, "s-fair"), number_, count(number_))
            for how, number_ in found.outcomes.items()
        ]
    )
    head = ("destination", "protocol", ">deliveries", ">p50", ">p99", ">longest")
    rows = (
        (
            peer_text_cell(row["destination"]),
            protocol_cell(row["protocol"]),
            number(row["deliveries"]),
            *(lasting(getattr(row["took"], name, None)) for name in ("p50", "p99", "longest")),
            bad(row["lost"]),
            bad(row["doubled"]),
            bad(row["late"]),
        )
        for row in found.destinations
    )
    keys = legend((name, style) for name, style, _ in parts)
    body = f"{words}</p>{split_bar(parts)}{keys}<h3>How they ended</h3>{ends}"
    body += table("Deliveries by destination", (*head, ">lost", ">doubled", ">late"), rows)
    if not found.examples:
        return body + all_is_well("Nothing is late, lost or doubled.")
    return body + _faulty(facts, found.examples)


_OUTCOME_STYLES: Final = {
    **dict.fromkeys(("settled", "answered", "delivered"), "s-good"),
    **dict.fromkeys(("waiting", "held", "unknown"), "s-open"),
    **dict.fromkeys(("dead", "failed", "dropped", "damaged"), "s-bad"),
}
_FAULTS: Final = ("lost", "doubled", "late")


def _faulty(facts: Facts, rows: list[Row]) -> str:
    head = (">id", "fault", "destination", "protocol", "outcome", "detail", ">attempts", ">took")
    made = (
        (
            message_cell(facts, row["node"], row["message_id"]),
            f'<td class="bad">{", ".join(name for name in _FAULTS if row[name])}</td>',
            peer_text_cell(row["destination"]),
            protocol_cell(row["protocol"]),
            peer_text_cell(row["outcome"]),
            peer_text_cell(row["detail"]),
            number(row["attempts"]),
            lasting(row["latency_us"]),
            when(row["time"]),
        )
        for row in rows
    )
    return table("Late, lost or doubled deliveries", (*head, "accepted"), made)


_VERDICTS: Final = {
    "equal": ("s-good", "both have it"),
    "missing on the wire": ("s-worse", "recorded by the hub, but its connection never carried it"),
    "missing in the ledger": ("s-bad", "carried, but not recorded by the hub"),
    "not accepted": ("s-fair", "carried, and refused or never acknowledged by the hub"),
    "withdrawn": ("a-unsynchronized", "meant for a receiver that disconnected before it was sent"),
    "uncertain": ("s-open", "the recording is not complete enough to decide"),
}


def reconciliation(facts: Facts) -> str:
    """Verdicts of gold.reconciliation, and examples of differences; empty without it."""
    found = facts.reconciliation
    if found is None or not found.total:
        return ""
    there = [verdict for verdict in _VERDICTS if found.verdicts.get(verdict)]
    keys = "".join(
        f'<span class="key"><i class="{_VERDICTS[verdict][0]}"></i>{verdict} '
        f"<small>{_VERDICTS[verdict][1]}</small></span>"
        for verdict in there
    )
    bar = split_bar([(each, _VERDICTS[each][0], found.verdicts[each]) for each in there])
    rows = (
        (protocol_cell(name), *(number(directions.get(each, 0)) for each in there))
        for name, directions in found.by_protocol.items()
    )
    head = ("protocol", *(f">{each}" for each in there))
    body = f'{bar}<div class="legend tall">{keys}</div>{table("Passages by verdict", head, rows)}'
    if not found.missing:
        return body + all_is_well("The wire and the hub agree.")
    return body + _differing(facts, found.examples)


def _differing(facts: Facts, rows: list[Row]) -> str:
    head = (">id", "verdict", "destination", "protocol", "kind", "way", "time", "connection")
    made = (
        (
            message_cell(facts, row["node"], row["message_id"]),
            f"<td>{escape(row['verdict'])}</td>",
            peer_text_cell(row["destination"]),
            protocol_cell(row["protocol"]),
            peer_text_cell(row["kind"]),
            peer_text_cell(row["way"]),
            when(row["time"]),
            host(row["connection"]),
        )
        for row in rows
    )
    return table("Where wire and hub differ", head, made)
