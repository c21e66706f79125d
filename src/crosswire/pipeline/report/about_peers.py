"""Sections about peers: sessions, who talks to whom, likely causes of problems."""

from __future__ import annotations

from html import escape
from typing import Final

from crosswire.pipeline.report.cells import (
    and_more,
    bad,
    host,
    lasting,
    number,
    peer_text_cell,
    protocol_cell,
    side_by_side,
    sized,
    table,
    when,
)
from crosswire.pipeline.report.facts import Facts, Row
from crosswire.pipeline.report.formats import (
    amount,
    css_class,
    protocol_name,
    text,
)
from crosswire.pipeline.report.graph import graph
from crosswire.pipeline.report.plots import (
    PlotSeries,
    legend,
    lines,
    split_bar,
)

__all__ = ["sessions", "topology"]

_ENDINGS: Final = {
    "goodbye": ("goodbye", "s-good"),
    "fin": ("closed by TCP", "s-fair"),
    "open": ("still open", "s-open"),
    "killed": ("ended with the hub", "s-bad"),
    "reset": ("reset", "s-fault"),
    "error": ("ended with an error", "s-worse"),
}


def sessions(facts: Facts) -> str:
    """How sessions ended, by protocol, and tables of some; empty without gold.sessions."""
    found = facts.sessions
    if found is None or not found.by_protocol:
        return ""
    ended = "".join(
        f'<div class="bar-label"><i class="dot {css_class(name)}"></i>'
        f"{escape(protocol_name(name))}</div>"
        + split_bar([(*_ENDINGS[how], endings.get(how, 0)) for how in _ENDINGS])
        for name, endings in sorted(
            found.endings.items(), key=lambda item: (item[0] is None, item[0] or "")
        )
    )
    keys = legend(_ENDINGS.values())
    figure = (
        '<figure><figcaption>How sessions ended</figcaption><div class="bars">'
        f"{ended}</div>{keys}</figure>"
    )
    plots = [figure]
    if facts.clock is not None and facts.clock.count > 1 and any(found.open_at):
        open_at = [PlotSeries("open sessions", "q-open", found.open_at)]
        plots.append(lines(facts.clock, open_at, amount, "Open sessions"))
    head = ("protocol", ">sessions", ">connections", ">messages", ">bytes", ">longest")
    more = (">slowest handshake", ">opened before the recording", ">gap bytes", ">violations")
    rows = (
        (
            protocol_cell(row["protocol"]),
            number(row["sessions"]),
            number(row["connections"]),
            number(row["messages"]),
            sized(row["bytes"]),
            lasting(row["lasted_us"]),
            lasting(row["handshake_us"]),
            number(row["late"]),
            bad(row["gap_bytes"]),
            bad(row["violations"]),
        )
        for row in found.by_protocol
    )
    body = side_by_side(*plots) + table("Sessions by protocol", (*head, *more), rows)
    if found.troubled:
        more_sessions = found.troubled_count - len(found.troubled)
        rest = and_more(more_sessions, "session with problems", "sessions with problems")
        body += _session_table("Sessions with problems", found.troubled, rest)
    return body + _session_table("The largest sessions", found.largest)


def _session_table(caption: str, rows: list[Row], note: str = "") -> str:
    head = ("session", "protocol", "from", "to", "opened", ">lasted", ">messages", ">bytes")
    made = (
        (
            peer_text_cell(row["session"]),
            protocol_cell(row["protocol"]),
            host(row["connector_address"]),
            host(f"{row['acceptor_address']}:{row['acceptor_port']}"),
            when(row["time"], "%Y-%m-%d %H:%M:%S"),
            lasting(row["lasted_us"]),
            number(row["messages"]),
            sized(row["bytes"]),
            bad(row["gap_bytes"]),
            bad(row["violations"]),
            f'<td class="peer-text">{_ending(row)}</td>',
        )
        for row in rows
    )
    return table(caption, (*head, ">gap bytes", ">violations", "end"), made, note)


def _ending(row: Row) -> str:
    words = _ENDINGS.get(row["ended"], (str(row["ended"]), ""))[0]
    return f"{escape(words)}: {text(row['error'])}" if row["error"] else escape(words)


def topology(facts: Facts) -> str:
    """The graph of who talks to whom, and its table; empty without gold.topology."""
    found = facts.topology
    if found is None or not found.edges:
        return ""
    used = sorted({row["protocol"] for row in found.links}, key=str)
    keys = legend((protocol_name(name), css_class(name)) for name in used)
    head = ("from", "to", "protocol", "kind", "destination", ">messages", ">payload")
    rows = (
        (
            host(row["source"]),
            host(row["target"]),
            protocol_cell(row["protocol"]),
            peer_text_cell(row["kind"]),
            peer_text_cell(row["destination"]),
            number(row["messages"]),
            sized(row["bytes"]),
        )
        for row in found.edges
    )
    note = and_more(found.more_edges, "edge with fewer messages", "edges with fewer messages")
    edges = table("Who talks to whom, by kind and destination", head, rows, note)
    listing = f"<details><summary>As a table</summary>{edges}</details>"
    return keys + graph(found) + listing
