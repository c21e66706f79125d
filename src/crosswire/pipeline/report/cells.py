"""Cells and tables of HTML: they show formatted text, and are sorted by the value itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from crosswire.pipeline.report.formats import (
    count,
    css_class,
    duration,
    moment,
    protocol_name,
    size,
    text,
    visible,
)
from crosswire.plurals import noun_for

__all__ = [
    "all_is_well",
    "and_more",
    "bad",
    "host",
    "lasting",
    "mark",
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


def mark(name: object) -> str:
    """An identifier, seldom read: on one line, cut, and whole in its tooltip."""
    whole = escape(visible("" if name is None else name)[:1000])
    return f'<td class="mark" title="{whole}">{text(name)}</td>'


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A table: column titles (a leading > aligns right), rows of cells, and a note below."""
    titles = "".join(
        f'<th class="{"n" if title.startswith(">") else ""}" scope="col">'
        f'<button type="button">{escape(title.lstrip(">"))}</button></th>'
        for title in head
    )
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    below = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{below}"
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
