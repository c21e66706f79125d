"""Cells and tables of HTML: shown in words, sorted by what is behind the words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from crosswire.pipeline.report.words import (
    count,
    css_class,
    duration,
    moment,
    protocol_name,
    size,
    text,
    visible,
)

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
    """Text that a peer may have chosen."""
    return f'<td class="said">{text(words)}</td>'


def mark(name: object) -> str:
    """What tells one from another, seldom read: on one line, and whole in its tooltip."""
    whole = escape(visible("" if name is None else name)[:1000])
    return f'<td class="mark" title="{whole}">{text(name)}</td>'


def host(name: object) -> str:
    """An address, which is not to be broken."""
    return f'<td class="host">{text(name)}</td>'


def number(value: float | None) -> str:
    return _cell(value, count(value))


def bad(value: int | None) -> str:
    """A number that ought to be 0."""
    return _cell(value, count(value), "bad" if value else "good")


def sized(value: int | None) -> str:
    return _cell(value, size(value))


def lasting(time_us: int | None) -> str:
    return _cell(time_us, duration(time_us))


def when(time_us: int | None, pattern: str = "%Y-%m-%d %H:%M:%S.%f") -> str:
    return _cell(time_us, moment(time_us, pattern), "when")


def protocol_cell(protocol: str | None) -> str:
    return (
        f'<td class="spoken"><i class="dot {css_class(protocol)}"></i>'
        f"{escape(protocol_name(protocol))}</td>"
    )


def _cell(value: float | None, words: str, style: str = "") -> str:
    return f'<td class="n {style}" data-v="{-1 if value is None else value}">{escape(words)}</td>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """Column titles (a leading > aligns right), rows of cells, and what to say below."""
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
    return f'<p class="fine">✓ {words}</p>'


def and_more(rest: int, what: str) -> str:
    """What to say below a table that could not show everything."""
    return f"… and {count(rest)} more {what}." if rest > 0 else ""
