"""Sections about messages: traffic, destinations, latency, errors, the slowest conversations."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from crosswire.pipeline.report.cells import (
    all_is_well,
    and_more,
    bad,
    lasting,
    message_cell,
    number,
    peer_text_cell,
    protocol_cell,
    side_by_side,
    sized,
    table,
    when,
)
from crosswire.pipeline.report.facts import Facts, Latencies, LatencyRow, Row
from crosswire.pipeline.report.formats import (
    amount,
    brief,
    count,
    css_class,
    duration,
    protocol_name,
    share,
    size,
    text,
)
from crosswire.pipeline.report.plots import (
    PlotSeries,
    bars,
    columns,
    distribution,
    legend,
    lines,
    split_bar,
)
from crosswire.plurals import plural

__all__ = ["destinations", "errors", "latency", "slowest", "traffic"]


def traffic(facts: Facts) -> str:
    """Plots of messages, bytes and errors over time; empty without messages."""
    clock, found = facts.clock, facts.traffic
    if clock is None or found is None or not found.messages:
        return ""
    seconds = clock.width_us / 1e6
    piece = brief(duration(clock.width_us))

    def series(values: dict[str | None, list[int]], by: float) -> list[PlotSeries]:
        return [
            PlotSeries(protocol_name(name), css_class(name), [value / by for value in each])
            for name, each in values.items()
            if any(each)
        ]

    keys = [(protocol_name(name), css_class(name)) for name in found.messages]
    per_s = f"per second, in intervals of {piece}"
    plots = [
        columns(clock, series(found.messages, seconds), amount, f"Messages {per_s}"),
        columns(
            clock,
            series(found.bytes, seconds),
            _round_size,
            f"Bytes of payload {per_s}",
            thousand=1024,
        ),
    ]
    if found.total_errors:
        plots.append(
            columns(clock, series(found.errors, 1), amount, f"Responses with an error, per {piece}")
        )
    kinds = ", ".join(f"{count(value)} {name}" for name, value in found.kinds.items() if value)
    summary = f"<p>{plural(found.total_messages, 'message')}: {kinds}.</p>"
    return summary + legend(keys) + side_by_side(*plots)


def destinations(facts: Facts) -> str:
    """A table of the busiest destinations; empty without messages."""
    found = facts.traffic
    if found is None or not found.destinations:
        return ""
    took = facts.latencies.by_destination if facts.latencies else {}

    def row(each: Row) -> tuple[str, ...]:
        times = took.get((each["protocol"], each["destination"]))
        return (
            peer_text_cell(each["destination"]),
            protocol_cell(each["protocol"]),
            number(each["messages"]),
            sized(each["bytes"]),
            bad(each["errors"]),
            lasting(times.p50 if times else None),
            lasting(times.p99 if times else None),
            lasting(times.longest if times else None),
        )

    head = ("destination", "protocol", ">messages", ">payload", ">errors")
    return table(
        "Destinations, the busiest first",
        (*head, ">p50", ">p99", ">longest"),
        map(row, found.destinations),
        and_more(
            found.more_destinations,
            "destination with fewer messages",
            "destinations with fewer messages",
        ),
    )


def latency(facts: Facts) -> str:
    """Plots and percentiles of response times; empty without answered requests."""
    clock, found = facts.clock, facts.latencies
    if clock is None or found is None:
        return ""
    names = sorted(found.by_protocol, key=lambda name: (name is None, name or ""))
    plots = []
    if sum(each is not None for each in found.over_time) > 1:
        plots.append(_latency_over_time(facts, found))
    counts = {protocol_name(name): (css_class(name), found.counts[name]) for name in names}
    keys = legend((protocol_name(name), css_class(name)) for name in names)
    shape = distribution(counts, "Number of requests by response time")
    plots.append(f"<div>{shape}{keys}</div>")

    def row(first: str, each: LatencyRow) -> tuple[str, ...]:
        bounds = map(lasting, (each.p50, each.p90, each.p95, each.p99, each.longest))
        return (first, number(each.count), *bounds)

    rows = [row(protocol_cell(name), found.by_protocol[name]) for name in names]
    if len(rows) > 1:
        rows.append(row("<td><b>all</b></td>", found.all))
    head = ("protocol", ">answered requests", ">p50", ">p90", ">p95", ">p99", ">longest")
    return side_by_side(*plots) + table("Response times by protocol", head, rows)


def _round_size(number_: float) -> str:
    return brief(size(number_))


def _round_duration(time_us: float) -> str:
    return brief(duration(time_us))


def _latency_over_time(facts: Facts, found: Latencies) -> str:
    assert facts.clock is not None

    def values(pick: Callable[[LatencyRow], int]) -> list[float | None]:
        return [None if each is None else pick(each) for each in found.over_time]

    series = [
        PlotSeries("p99", "q-99", values(lambda row: row.p99)),
        PlotSeries("p95", "q-95", values(lambda row: row.p95)),
        PlotSeries("p50", "q-50", values(lambda row: row.p50)),
    ]
    title = "Response time (p50, p95, p99)"
    plot = lines(facts.clock, series, _round_duration, title, logarithmic=True)
    return f"<div>{plot}{legend((each.name, each.style) for each in series)}</div>"


def errors(facts: Facts) -> str:
    """Outcomes of requests, and all kinds of errors; empty without tables about them."""
    calls, sessions, violations = facts.calls, facts.sessions, facts.violations
    if calls is None and sessions is None and violations is None:
        return ""
    found: list[tuple[str, str | None, str, int]] = []
    if calls is not None:
        for row in calls.outcomes:
            kind = "no response" if row["outcome"] == "unanswered" else "response"
            found.append((kind, row["protocol"], row["outcome"], row["count"]))
    if sessions is not None:
        for row in sessions.errors:
            found.append(("end of session", row["protocol"], row["error"], row["sessions"]))
    if violations is not None:
        kinds: dict[tuple[str | None, str], int] = {}
        for row in violations.reasons:
            key = row["protocol"], row["error"]
            kinds[key] = kinds.get(key, 0) + row["count"]
        found += [("violation", protocol, error, n) for (protocol, error), n in kinds.items()]
    body = ""
    if calls is not None:
        body = _outcome(facts)
    if not found:
        return body + all_is_well("No request failed, no session ended with an error.")
    found.sort(key=lambda each: -each[3])
    body += bars(
        [
            (
                f"{text(_error(what))} <small>{kind}, {escape(protocol_name(protocol))}</small>",
                css_class(protocol),
                value,
                count(value),
            )
            for kind, protocol, what, value in found[:20]
        ]
    )
    if calls is not None and calls.troubled:
        head = ("destination", "protocol", ">requests", ">failed", ">unanswered", ">share")
        rows = (
            (
                peer_text_cell(row["destination"]),
                protocol_cell(row["protocol"]),
                number(row["calls"]),
                bad(row["failed"]),
                bad(row["unanswered"]),
                f'<td class="n" data-v="{row["trouble"] / row["calls"]}">'
                f"{share(row['trouble'], row['calls'])}</td>",
            )
            for row in calls.troubled
        )
        body += table("Destinations with failed requests", head, rows)
    return body


def _error(what: str) -> str:
    """Error codes of EMP and Epoxy are numbers: alone, they would not look like an error."""
    return f"error {what}" if str(what).isdigit() else what


def _outcome(facts: Facts) -> str:
    calls = facts.calls
    assert calls is not None
    parts = [
        ("answered", "s-good", calls.answered - calls.failed),
        ("answered with an error", "s-bad", calls.failed),
        ("never answered", "s-worse", calls.unanswered),
        ("still without response at the end", "s-open", calls.waiting),
    ]
    if not calls.total:
        return "<p>No requests were seen.</p>"
    words = ", ".join(f"{count(value)} {name}" for name, _, value in parts if value)
    keys = legend((name, style) for name, style, value in parts if value)
    return f"<p>{plural(calls.total, 'request')}: {words}.</p>{split_bar(parts)}{keys}"


def slowest(facts: Facts) -> str:
    """A table of the slowest conversations; empty if there are none."""
    if facts.calls is None or not facts.calls.slowest:
        return ""
    head = (">took", ">id", "destination", "protocol", "outcome", "sent at", ">request")
    rows = (
        (
            lasting(row["latency_us"]),
            message_cell(facts, row["node"], row["message_id"]),
            peer_text_cell(row["destination"]),
            protocol_cell(row["protocol"]),
            peer_text_cell(row["outcome"]),
            when(row["time"]),
            sized(row["request_bytes"]),
            sized(row["response_bytes"]),
            f'<td class="peer-text">{text(row["connection"])}<br>'
            f"<small>{text(row['correlation'])}</small></td>",
        )
        for row in facts.calls.slowest
    )
    titles = (*head, ">response", "connection and correlation")
    return table("Conversations, the slowest first", titles, rows)
