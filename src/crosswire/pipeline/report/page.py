"""The page: four cards with the main figures, and sections with the details."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Final

from crosswire import __version__
from crosswire.pipeline.report.about_failures import FAILURE_WORDS
from crosswire.pipeline.report.facts import Facts, Failure
from crosswire.pipeline.report.formats import (
    amount,
    duration,
    moment,
    protocol_name,
    size,
    text,
)
from crosswire.pipeline.report.sections import SECTIONS
from crosswire.plurals import noun_for, plural

__all__ = ["render"]

_WORDS: Final = {
    "message": "what one program sends to another: a job for a queue, an event for a topic, a "
    "request to a service, or its response",
    "destination": "where a message is sent to: queue/…, topic/… or service/…",
    "conversation": "a request together with its response",
    "session": "a connection from its opening to its end; a Relink link is one session, over all "
    "of its connections",
    "dead letter": "a message that could not be delivered, kept until it is replayed or deleted",
    "frame": "the unit in which a protocol packs bytes; a message is made of one or more",
    "violation": "bytes that the rules of their protocol do not allow",
    "gap": "bytes that were sent but are missing from the recording",
    "p50, p95, p99": "50, 95 and 99 of 100 requests were answered within this time; from "
    "histograms, at most 1/16 too high",
}


def render(facts: Facts, source: str, made_us: int) -> str:
    """One self-contained HTML page."""
    style, script = (files(__package__).joinpath(name).read_text() for name in _ASSETS)
    # A second line of defence against names that peers have chosen: the browser runs no script
    # but this one, and fetches nothing.
    seal = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{seal}'"
    bodies = [(each, each.body(facts)) for each in SECTIONS]
    shown = [(each, body) for each, body in bodies if body]
    absent = [each.title for each, body in bodies if not body]
    links = "".join(f'<a href="#{each.name}">{each.title}</a>' for each, _ in shown)
    sections = "".join(
        f'<section id="{each.name}"><h2>{each.title}</h2><p class="why">{each.why}</p>{body}'
        "</section>"
        for each, body in shown
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Crosswire report: {text(source)}</title><style>{style}</style></head><body>"
        f"{_head(facts, source)}<nav>{links}</nav><main>{_cards(facts)}{sections}"
        f"{_foot(facts, absent, made_us)}</main>"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


_ASSETS: Final = ("page.css", "page.js")


def _head(facts: Facts, source: str) -> str:
    clock = facts.clock
    span = "no table has times"
    if clock is not None:
        lasted_us = clock.last_us - clock.first_us
        pattern = "%Y-%m-%d %H:%M:%S" + (".%f" if lasted_us < 10_000_000 else "")
        first, last = moment(clock.first_us, pattern), moment(clock.last_us, pattern)
        span = f"{first} – {last} UTC ({duration(lasted_us)})"
    words = "".join(f"<dt>{word}</dt><dd>{means}</dd>" for word, means in _WORDS.items())
    return (
        '<header><div><h1>Traffic report</h1><button id="theme" type="button" '
        'title="light or dark">◐</button></div>'
        f'<p class="span">{span}</p>'
        "<p>Crosswire read recorded network traffic of the messaging protocols EMP, eMQP, Relink, "
        "Epoxy and MicroMsg2, reassembled its messages, and matched requests with "
        f"their responses. This page summarizes the tables in <code>{text(source)}</code>: "
        "traffic, response times, losses and errors, and their likely causes.</p>"
        f"<details><summary>Words used on this page</summary><dl>{words}</dl></details></header>"
    )


# The cards.


def _cards(facts: Facts) -> str:
    cards = (
        _card("What was lost or failed?", "failures", *_lost(facts)),
        _card("What are the causes?", "failures", *_causes(facts)),
        _card("How much traffic?", "traffic", *_summary_text(facts)),
        _card("How long did it take?", "latency", *_took(facts)),
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(question: str, target: str, state: str, answer: str, lines: list[str]) -> str:
    items = "".join(f"<li>{line}</li>" for line in lines)
    return (
        f'<a class="card {state}" href="#{target}"><h3>{question}</h3>'
        f'<p class="answer">{answer}</p>'
        f"<ul>{items}</ul></a>"
    )


def _summary_text(facts: Facts) -> tuple[str, str, list[str]]:
    traffic = facts.traffic
    if traffic is None:
        return "", "unknown", ["There is no table gold.traffic."]
    names = [protocol_name(name) for name in traffic.messages]
    lines = [f"{size(traffic.total_bytes)} of payload"]
    if names:
        lines.append(f"in {escape(', '.join(names))}")
    if facts.sessions:
        lines.append(f"in {plural(facts.sessions.total, 'session')}")
    lines.append(f"to {plural(traffic.destination_count, 'destination')}")
    return "good", _big(traffic.total_messages, "message"), lines


def _big(number: int, one: str) -> str:
    return f"{amount(number)} <small>{noun_for(number, one)}</small>"


def _took(facts: Facts) -> tuple[str, str, list[str]]:
    took = facts.latencies
    if took is None:
        return "", "unknown", ["There are no requests with a response."]
    slow = max(took.by_protocol.items(), key=lambda item: item[1].p99)
    lines = [
        f"99 of 100 within {duration(took.all.p99)}",
        f"the longest {duration(took.all.longest)}",
    ]
    if len(took.by_protocol) > 1:
        lines.append(f"slowest: {escape(protocol_name(slow[0]))}, p99 {duration(slow[1].p99)}")
    lines.append(f"of {plural(took.all.count, 'answered request')}")
    return "good", f"{duration(took.all.p50)} <small>for half of them</small>", lines


def _lost(facts: Facts) -> tuple[str, str, list[str]]:
    faults: list[tuple[int, str]] = []
    if (sent := facts.deliveries) is not None:
        dead = sent.outcomes.get("dead", 0)
        faults += [
            (dead, plural(dead, "dead letter")),
            (sent.lost, plural(sent.lost, "lost delivery", "lost deliveries")),
            (sent.doubled, plural(sent.doubled, "doubled delivery", "doubled deliveries")),
            (sent.late, plural(sent.late, "late delivery", "late deliveries")),
            (sent.damaged, plural(sent.damaged, "delivery", "deliveries") + " of damaged payload"),
        ]
    if (calls := facts.calls) is not None:
        faults.append((calls.unanswered, plural(calls.unanswered, "unanswered request")))
        faults.append(
            (
                calls.failed,
                plural(
                    calls.failed,
                    "request answered with an error",
                    "requests answered with an error",
                ),
            )
        )
    if (compared := facts.reconciliation) is not None:
        words = plural(
            compared.missing, "difference between wire and hub", "differences between wire and hub"
        )
        faults.append((compared.missing, words))
    if facts.damaged_payloads:
        faults.append((facts.damaged_payloads, plural(facts.damaged_payloads, "damaged payload")))
    if (bytes_ := facts.accounts) is not None:
        gaps = bytes_.total("gaps")
        faults.append((gaps, f"{size(gaps)} missing from the recording"))
    if not faults:
        return "", "unknown", ["The tables for this do not exist."]
    if killed := sum(each.kind == "killed" for each in facts.interruptions):
        faults.insert(1, (killed, f"{plural(killed, 'kill')} of the hub"))
    grave = [words for number, words in faults if number]
    if not grave:
        return (
            "good",
            "nothing <small>in this recording</small>",
            [words for _, words in faults][:4],
        )
    first, _, rest = grave[0].partition(" ")
    return "warn", f"{first} <small>{rest}</small>", grave[1:5]


def _causes(facts: Facts) -> tuple[str, str, list[str]]:
    if not facts.failures:
        if facts.calls is None and facts.violations is None:
            return "", "unknown", ["The tables for this do not exist."]
        return "good", "none", ["No request failed, and no protocol was violated."]
    # The first of each kind: the most serious ones come first.
    firsts: dict[str, Failure] = {}
    for failure in facts.failures:
        firsts.setdefault(failure.kind, failure)
    lines = [
        f"<b>{text(each.party)}</b>: {plural(each.count, *FAILURE_WORDS[each.kind])}"
        for each in firsts.values()
    ]
    return "warn", _big(len(facts.failures), "cause"), lines[:4]


# The end.


def _foot(facts: Facts, absent: list[str], made_us: int) -> str:
    rows = ", ".join(
        f"{escape(name)} ({plural(number, 'row')})" for name, number in facts.tables.items()
    )
    missing = ""
    if absent:
        missing = (
            f"<p>Sections left out: {', '.join(absent)}. Their tables do not exist, "
            "or have no rows.</p>"
        )
    return (
        f"<footer>{missing}<p>Made from {rows}.</p><p>Crosswire {__version__}, "
        f"{moment(made_us)} UTC. All times are UTC.</p></footer>"
    )
