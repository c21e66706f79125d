"""The plot of who talks to whom: hosts, listeners and destinations in three columns of SVG."""

from __future__ import annotations

from collections import Counter
from html import escape
from math import log10
from typing import Final

import msgspec

from crosswire.pipeline.report.facts import Topology
from crosswire.pipeline.report.formats import amount, css_class, protocol_name, visible
from crosswire.plurals import plural

__all__ = ["graph"]

_WIDTH: Final = 1000
_BOX: Final = 210
_ROW: Final = 30
_TALL: Final = 22
_MOST: Final = (18, 12, 18)
_KINDS: Final = ("host", "listener", "destination")
_TITLES: Final = ("Who connects", "… to which listener", "… for which destination")
_LEFTS: Final = (0, (_WIDTH - _BOX) / 2, _WIDTH - _BOX)


class _GraphColumn(msgspec.Struct, frozen=True):
    """Names with their position from the top; those without room are together in the last one."""

    number: int
    positions: dict[str, float]
    labels: list[str]
    messages: list[int]
    step: float

    def position_of(self, name: str) -> int:
        """The index of a name; the last one for names without room."""
        return int(self.positions.get(name, len(self.labels) - 1))

    def middle(self, index: int) -> float:
        """The vertical centre of a box."""
        return 28 + (index + 0.5) * self.step


def graph(topology: Topology) -> str:
    """The plot; empty if there are no messages."""
    sums: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for link in topology.links:
        sums[0][link["host"]] += link["messages"]
        sums[1][link["listener"]] += link["messages"]
    for use in topology.uses:
        sums[2][_about(use["destination"])] += use["messages"]
    if not sums[0]:
        return ""
    shown = [min(len(each), most) for each, most in zip(sums, _MOST, strict=True)]
    rows = max(number + (len(each) > number) for number, each in zip(shown, sums, strict=True))
    columns = [_column(number, each, rows) for number, each in enumerate(sums)]
    height = 28 + rows * _ROW + 6
    edges = _edges(topology, columns)
    heads = "".join(
        f'<text class="head" x="{left:.0f}" y="14">{title}</text>'
        for left, title in zip(_LEFTS, _TITLES, strict=True)
    )
    boxes = "".join(_boxes(column) for column in columns)
    return (
        f'<svg class="graph" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Who talks to whom">{heads}{edges}{boxes}</svg>'
    )


def _about(destination: str | None) -> str:
    return "(no destination)" if destination is None else destination


def _column(number: int, sums: Counter[str], rows: int) -> _GraphColumn:
    most = _MOST[number]
    first = sums.most_common(most if len(sums) <= most else most - 1)
    labels = [name for name, _ in first]
    messages = [value for _, value in first]
    if len(sums) > len(first):
        labels.append(plural(len(sums) - len(first), f"other {_KINDS[number]}"))
        messages.append(sums.total() - sum(messages))
    positions = {name: float(index) for index, (name, _) in enumerate(first)}
    step = rows * _ROW / len(labels)
    return _GraphColumn(number, positions, labels, messages, min(step, 4 * _ROW))


def _edges(topology: Topology, columns: list[_GraphColumn]) -> str:
    joined: Counter[tuple[int, int, int, str | None]] = Counter()
    hosts, listeners, destinations = columns
    for link in topology.links:
        ends = hosts.position_of(link["host"]), listeners.position_of(link["listener"])
        joined[0, *ends, link["protocol"]] += link["messages"]
    for use in topology.uses:
        ends = (
            listeners.position_of(use["listener"]),
            destinations.position_of(_about(use["destination"])),
        )
        joined[1, *ends, use["protocol"]] += use["messages"]
    most = max(joined.values())
    return "".join(
        _edge(columns[side], columns[side + 1], left, right, protocol, messages, most)
        for (side, left, right, protocol), messages in sorted(
            joined.items(), key=lambda item: -item[1]
        )
    )


def _edge(
    first: _GraphColumn,
    second: _GraphColumn,
    left: int,
    right: int,
    protocol: str | None,
    messages: int,
    most: int,
) -> str:
    x1, x2 = _LEFTS[first.number] + _BOX, _LEFTS[second.number]
    y1, y2 = first.middle(left), second.middle(right)
    bend = (x2 - x1) / 2
    # Logarithmic: edges differ by orders of magnitude, and the thin ones should be visible too.
    width = 1 + 6 * log10(messages + 1) / log10(most + 1)
    tip = (
        f"{visible(first.labels[left])} ↔ {visible(second.labels[right])}\n"
        f"{protocol_name(protocol)}: {plural(messages, 'message')}"
    )
    return (
        f'<path class="edge {css_class(protocol)}" data-a="{first.number}.{left}" '
        f'data-b="{second.number}.{right}" stroke-width="{width:.1f}" data-tip="{escape(tip)}" '
        f'd="M{x1:.0f},{y1:.1f} C{x1 + bend:.0f},{y1:.1f} {x2 - bend:.0f},{y2:.1f} '
        f'{x2:.0f},{y2:.1f}"/>'
    )


def _boxes(column: _GraphColumn) -> str:
    left = _LEFTS[column.number]
    made = []
    for index, label in enumerate(column.labels):
        shown = visible(label)
        middle = column.middle(index)
        tip = f"{shown}\n{plural(column.messages[index], 'message')}"
        cut = shown if len(shown) <= 23 else f"{shown[:13]}…{shown[-9:]}"
        made.append(
            f'<g class="node" tabindex="0" data-n="{column.number}.{index}" '
            f'data-tip="{escape(tip)}"><rect x="{left:.0f}" y="{middle - _TALL / 2:.1f}" '
            f'width="{_BOX}" height="{_TALL}" rx="5"/>'
            f'<text x="{left + 9:.0f}" y="{middle + 4:.1f}">{escape(cut)}</text>'
            f'<text class="amount" x="{left + _BOX - 8:.0f}" y="{middle + 4:.1f}" '
            f'text-anchor="end">{amount(column.messages[index])}</text></g>'
        )
    return "".join(made)
