"""Sections about bytes: the byte accounting, and protocol violations."""

from __future__ import annotations

from html import escape
from typing import Final

from crosswire.pipeline.report.cells import (
    all_is_well,
    and_more,
    bad,
    number,
    peer_text_cell,
    protocol_cell,
    table,
    when,
)
from crosswire.pipeline.report.facts import Facts, Row
from crosswire.pipeline.report.formats import (
    count,
    css_class,
    protocol_name,
    size,
)
from crosswire.pipeline.report.plots import (
    split_bar,
)
from crosswire.pipeline.tables.names import ACCOUNT_PARTS

__all__ = ["accounting", "violations"]

_PART_WORDS: Final = {
    "frames": ("frames", "a-frames", "decoded"),
    "encrypted": ("encrypted", "a-encrypted", "TLS: only its two ends can read it"),
    "tail": ("tail", "a-tail", "a frame that was incomplete when the recording ended"),
    "unsynchronized": ("unsynchronized", "a-unsynchronized", "skipped in search of the start of a "
                       "frame, after a gap or a late beginning"),
    "unknown": ("unknown", "a-unknown", "of connections whose protocol was not recognized"),
    "unread": ("unread", "a-unread", "after a violation that made further decoding impossible"),
    "gaps": ("gaps", "a-gaps", "sent, but missing from the recording"),
    "violations": ("violations", "a-violations", "not allowed by the protocol"),
}  # fmt: skip


def accounting(facts: Facts) -> str:
    """Bars and a table of bytes by protocol and category; empty without gold.accounting."""
    found = facts.accounts
    if found is None or not found.by_protocol:
        return ""
    seen, missing = found.total("seen"), found.total("missing")
    verdict = (
        all_is_well(f"{count(seen)} bytes were seen, and every one is accounted for.")
        if not missing
        else f'<p class="alarm">{count(missing)} of {count(seen)} bytes are not accounted for: '
        "that is a fault of the pipeline.</p>"
    )
    made = "".join(
        f'<div class="bar-label"><i class="dot {css_class(row["protocol"])}"></i>'
        f"{escape(protocol_name(row['protocol']))}</div>"
        + split_bar([(part, _PART_WORDS[part][1], row[part]) for part in _PART_WORDS], size)
        for row in found.by_protocol
    )
    keys = "".join(
        f'<span class="key"><i class="{style}"></i>{part} <small>{words}</small></span>'
        for part, style, words in _PART_WORDS.values()
        if found.total(part)
    )
    parts = [part for part in ACCOUNT_PARTS if found.total(part)]
    head = ("protocol", ">directions", ">seen", *(f">{part}" for part in parts), ">missing")
    rows = (
        (
            protocol_cell(row["protocol"]),
            number(row["directions"]),
            number(row["seen"]),
            *(number(row[part]) for part in parts),
            bad(row["missing"]),
        )
        for row in found.by_protocol
    )
    body = (
        f'{verdict}<div class="bars">{made}</div><div class="legend tall">{keys}</div>'
        f"{table('Bytes by protocol and category', head, rows)}"
    )
    if found.worst:
        body += _worst(found.worst)
    return body


def _worst(rows: list[Row]) -> str:
    parts = [
        part
        for part in ACCOUNT_PARTS
        if part not in ("frames", "encrypted") and any(row[part] for row in rows)
    ]
    head = ("connection", "direction", "protocol", ">seen", ">not decoded")
    made = (
        (
            peer_text_cell(row["connection"]),
            peer_text_cell(row["direction"]),
            protocol_cell(row["protocol"]),
            number(row["seen"]),
            number(row["not_read"]),
            *(number(row[part]) for part in parts),
        )
        for row in rows
    )
    caption = "Directions with the most bytes that were not decoded"
    return table(caption, (*head, *(f">{part}" for part in parts)), made)


def violations(facts: Facts) -> str:
    """Violations by reason, and the first ones; empty without silver.violations."""
    found = facts.violations
    if found is None:
        return ""
    if not found.total:
        return all_is_well("No protocol was violated.")
    head = ("reason", "kind", "protocol", ">times", ">bytes")
    rows = (
        (
            peer_text_cell(row["reason"]),
            peer_text_cell(row["error"]),
            protocol_cell(row["protocol"]),
            number(row["count"]),
            number(row["length"]),
        )
        for row in found.reasons
    )
    examples = (
        (
            when(row["time"]),
            peer_text_cell(row["connection"]),
            peer_text_cell(row["direction"]),
            protocol_cell(row["protocol"]),
            number(row["byte_offset"]),
            number(row["length"]),
            peer_text_cell(row["reason"]),
        )
        for row in found.examples
    )
    where = ("time", "connection", "direction", "protocol", ">at byte", ">bytes", "reason")
    first = "The first violations" if found.total > len(found.examples) else "All violations"
    return table(
        "Violations by reason", head, rows, and_more(found.more_reasons, "reason")
    ) + table(first, where, examples)
