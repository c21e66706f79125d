"""Cells and tables of HTML: they show formatted text, and are sorted by the value itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from crosswire.pipeline.report.facts import Facts, MessageKey
from crosswire.pipeline.report.formats import (
    count,
    css_class,
    duration,
    moment,
    protocol_name,
    shell_word,
    size,
    text,
)
from crosswire.plurals import noun_for

__all__ = [
    "all_is_well",
    "anchor_of",
    "and_more",
    "bad",
    "command",
    "copy_button",
    "host",
    "lasting",
    "message_cell",
    "message_link",
    "number",
    "peer_text_cell",
    "protocol_cell",
    "side_by_side",
    "sized",
    "table",
    "when",
]


def peer_text_cell(words: object) -> str:
    """A cell of text that a peer may have chosen: escaped, and cut if it is long."""
    return f'<td class="peer-text">{text(words)}</td>'


def host(name: object) -> str:
    """An address, without line breaks."""
    return f'<td class="host">{text(name)}</td>'


def number(value: float | None) -> str:
    """A cell of a count."""
    return _cell(value, count(value))


def bad(value: int | None) -> str:
    """A cell of a number that should be 0, marked if it is not."""
    return _cell(value, count(value), "bad" if value else "good")


def sized(value: int | None) -> str:
    """A cell of a number of bytes, in a suitable unit."""
    return _cell(value, size(value))


def lasting(time_us: int | None) -> str:
    """A cell of a duration, in a suitable unit."""
    return _cell(time_us, duration(time_us))


def when(time_us: int | None, pattern: str = "%Y-%m-%d %H:%M:%S.%f") -> str:
    """A cell of a time, in UTC."""
    return _cell(time_us, moment(time_us, pattern), "when")


def protocol_cell(protocol: str | None) -> str:
    """A cell of a protocol's name, with its colour."""
    return (
        f'<td class="protocol"><i class="dot {css_class(protocol)}"></i>'
        f"{escape(protocol_name(protocol))}</td>"
    )


def _cell(value: float | None, words: str, style: str = "") -> str:
    return f'<td class="n {style}" data-v="{-1 if value is None else value}">{escape(words)}</td>'


def message_cell(facts: Facts, node: str | None, identifier: int | None) -> str:
    """A cell of a message's id, which leads to its steps where the page has them."""
    return f'<td class="n" data-v="{identifier or -1}">{message_link(facts, node, identifier)}</td>'


def message_link(facts: Facts, node: str | None, identifier: int | None) -> str:
    """A message's id: a link to its steps, or else with the command for them to copy."""
    if identifier is None:
        return text(None)
    anchor = anchor_of(facts, (node, identifier))
    if anchor:
        return f'<a href="#{anchor}">{identifier}</a>'
    return f"{identifier} {copy_button(f'crosswire trace {identifier}')}"


def anchor_of(facts: Facts, key: MessageKey) -> str:
    """The name of the element with a message's steps; empty if the page has none."""
    if key not in facts.steps:
        return ""
    return f"message-{list(facts.steps).index(key) + 1}"


def command(*words: str) -> str:
    """A command to copy, as a shell reads it; the words may be text that a peer has chosen."""
    line = " ".join(map(shell_word, words))
    return f'<div class="command"><code>{escape(line)}</code>{copy_button(line)}</div>'


def copy_button(line: str) -> str:
    """A button that copies a line of printable text."""
    shown = escape(line)
    return (
        f'<button type="button" class="copy" data-copy="{shown}" title="copy: {shown}" '
        f'aria-label="copy: {shown}">copy</button>'
    )


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str = "",
    style: str = "",
) -> str:
    """A table: its caption in plain text, column titles (a leading > aligns right), rows of cells,
    and a note below."""
    titles = "".join(
        f'<th class="{"n" if title.startswith(">") else ""}" scope="col">'
        f'<button type="button">{escape(title.lstrip(">"))}</button></th>'
        for title in head
    )
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    below = f'<p class="note">{note}</p>' if note else ""
    name = escape(caption)
    # A region that scrolls must be reachable with the keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table class="{style}"><caption>{name}</caption><thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{below}"
    )


def side_by_side(*made: str) -> str:
    """Plots, as many in a row as there is room for."""
    return f'<div class="plots">{"".join(made)}</div>'


def all_is_well(words: str) -> str:
    """A line that reports that nothing is wrong."""
    return f'<p class="fine">✓ {words}</p>'


def and_more(rest: int, one: str, more: str = "") -> str:
    """A note below a table that does not show all rows: "… and 2 more reasons."; empty for 0."""
    if rest <= 0:
        return ""
    return f"… and {count(rest)} more {noun_for(rest, one, more)}."
