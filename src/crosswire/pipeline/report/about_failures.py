"""Sections about what went wrong: failures by cause with commands, and the messages' own steps."""

from __future__ import annotations

from html import escape
from typing import Final

from crosswire.pipeline.report.cells import (
    all_is_well,
    anchor_of,
    command,
    lasting,
    message_link,
    number,
    peer_text_cell,
    protocol_cell,
    table,
    when,
)
from crosswire.pipeline.report.facts import Facts, Failure, Interruption, MessageKey, Row
from crosswire.pipeline.report.formats import (
    count,
    css_class,
    duration,
    moment,
    protocol_name,
    size,
    text,
)
from crosswire.plurals import noun_for, plural

__all__ = ["FAILURE_WORDS", "failures", "messages"]

FAILURE_WORDS: Final = {
    "dead": ("dead letter", "dead letters"),
    "lost": ("delivery lost", "deliveries lost"),
    "damaged": ("message damaged", "messages damaged"),
    "doubled": ("delivery doubled", "deliveries doubled"),
    "failed": ("request failed", "requests failed"),
    "unanswered": ("request without an answer", "requests without an answer"),
    "violation": ("protocol violation", "protocol violations"),
    "dropped": ("message dropped", "messages dropped"),
    "expired": ("message expired", "messages expired"),
    "late": ("delivery late", "deliveries late"),
}
"""Kind of failure → its name for one, and for several."""

_GRAVE: Final = ("dead", "lost", "damaged", "doubled", "failed", "unanswered")
_FOUND_BY: Final = ("dead", "failed", "dropped", "expired")
"""The kinds that `crosswire find --outcome` knows."""

_MOST_STEPS: Final = 40


def failures(facts: Facts) -> str:
    """What failed, by cause, and when the hub was interrupted; empty without tables about it."""
    if facts.calls is None and facts.violations is None and facts.deliveries is None:
        return ""
    body = _interruptions(facts.interruptions) if facts.interruptions else ""
    if not facts.failures:
        return all_is_well("Nothing failed.") + body
    rows = (
        (
            f'<td class="n times" data-v="{each.count}">{count(each.count)}</td>',
            f'<td class="what"><b class="{"bad" if each.kind in _GRAVE else "fair"}">'
            f"{noun_for(each.count, *FAILURE_WORDS[each.kind])}</b> {_where(each)}"
            f"{_cause(each)}</td>",
            f'<td data-v="{each.last_us or -1}">{_when(facts, each)}</td>',
            f'<td class="commands">{_commands(each)}</td>',
        )
        for each in facts.failures
    )
    head = (">times", "what, where and why", "when", "to look into it")
    listing = table("Failures by cause, the most serious first", head, rows, style="wide-words")
    return listing + body


def _where(each: Failure) -> str:
    preposition = "by" if each.kind == "violation" else "at"
    return (
        f'{preposition} <span class="party">{text(each.party)}</span> <small class="protocol">'
        f'<i class="dot {css_class(each.protocol)}"></i>{escape(protocol_name(each.protocol))} '
        f'<a href="#{each.where}">details</a></small>'
    )


def _cause(each: Failure) -> str:
    return f'<div class="cause">{text(each.cause)}</div>' if each.cause else ""


def _when(facts: Facts, each: Failure) -> str:
    made = ""
    if each.last_us is not None:
        made = f'<span class="when">{moment(each.last_us, "%Y-%m-%d %H:%M:%S.%f")}</span>'
        if each.first_us is not None and each.first_us < each.last_us:
            took = duration(each.last_us - each.first_us)
            made += f"<br><small>the last; the first {took} before</small>"
    if each.message_id is not None:
        made += f"<br>message {message_link(facts, each.node, each.message_id)}"
    if each.letter_id is not None:
        made += f"<br>dead letter {message_link(facts, each.node, each.letter_id)}"
    return made or text(None)


def _commands(each: Failure) -> str:
    """The commands that show more about a failure, or undo it; all work as they are."""
    made = []
    # No program can be given an argument with a NUL.
    if each.kind == "dead" and each.name is not None and "\0" not in each.name:
        # A name may begin like an option.
        name = ["--", each.name] if each.name.startswith("-") else [each.name]
        if each.letter_id is not None:
            made.append(command("crosswire", "dead", "show", *name, str(each.letter_id)))
        made.append(command("crosswire", "dead", "list", *name))
        made.append(command("crosswire", "dead", "replay", "--all", "--dry-run", *name))
    if each.message_id is not None:
        made.append(command("crosswire", "trace", str(each.message_id)))
    party = each.party or "\0"
    if each.kind not in ("violation", "dead") and "\0" not in party and each.first_us:
        words = ["crosswire", "find", "--destination", party]
        if each.kind in _FOUND_BY:
            words += ["--outcome", each.kind]
        pattern = "%Y-%m-%dT%H:%M:%S"
        # The search's end is exclusive, and in whole seconds here.
        since, until = each.first_us, (each.last_us or each.first_us) + 1_000_000
        words += ["--since", moment(since, pattern), "--until", moment(until, pattern)]
        made.append(command(*words))
    if each.kind == "violation" and each.protocol:
        made.append(command("crosswire", "connections", "--protocol", each.protocol))
    return "".join(made) or text(None)


_INTERRUPTIONS: Final = {
    "killed": "The hub was killed or crashed, and was started again",
    "restarted": "The hub was stopped, and was started again",
    "gap": "Bytes are missing from the recording",
    "missing records": "Rows of the hub's ledger are missing",
}


def _interruptions(found: list[Interruption]) -> str:
    head = ("what happened", "from", ">lasted", "node", ">sessions open", ">bytes missing")
    rows = (
        (
            f'<td><i class="dot cut {each.kind.replace(" ", "-")}"></i>'
            f"{_INTERRUPTIONS[each.kind]}{_cause_of(each)}</td>",
            when(each.start_us),
            lasting(None if each.end_us is None else each.end_us - each.start_us),
            peer_text_cell(each.node),
            number(each.sessions or None),
            f'<td class="n" data-v="{each.bytes}">{size(each.bytes or None)}</td>',
        )
        for each in found
    )
    note = (
        "They are marked in the plots below. A kill is dated by the last bytes that were recorded "
        "before it."
    )
    return table("Interruptions of the hub and of the recording", head, rows, note)


def _cause_of(each: Interruption) -> str:
    return f": {text(each.reason)}" if each.reason else ""


# Messages.


def messages(facts: Facts) -> str:
    """The steps of every message that the page names; empty without gold.steps."""
    return "".join(_message(facts, key, rows) for key, rows in facts.steps.items())


def _message(facts: Facts, key: MessageKey, rows: list[Row]) -> str:
    _, identifier = key
    last = rows[-1]
    head = ("step", ">after", "time", "protocol", "connection", ">attempt", "detail")
    shown = (
        (
            f"<td>{escape(str(row['step']))}</td>",
            lasting(row["since_accepted_us"]),
            when(row["time"]),
            protocol_cell(row["protocol"] or None) if row["protocol"] else f"<td>{text(None)}</td>",
            peer_text_cell(row["connection"]),
            number(row["attempt"] or None),
            peer_text_cell(row["detail"]),
        )
        for row in rows[:_MOST_STEPS]
    )
    rest = len(rows) - _MOST_STEPS
    note = f"… and {plural(rest, 'more step')}." if rest > 0 else ""
    return (
        f'<details class="message" id="{anchor_of(facts, key)}"><summary>Message {identifier} '
        f"<small>{text(rows[0]['destination'])}, {plural(len(rows), 'step')}, the last one: "
        f"{escape(str(last['step']))}</small></summary>"
        f"{command('crosswire', 'trace', str(identifier))}"
        f"{table(f'Steps of message {identifier}', head, shown, note)}</details>"
    )
