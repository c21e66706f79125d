"""Draws the Mermaid diagrams of the docs as SVG when the site is built: a hook of mkdocs.

GitHub draws Mermaid by itself; the site would have to fetch a library for it from elsewhere. It
knows what our pages use, and raises ValueError for anything else: `flowchart TD` with boxes and
arrows, `sequenceDiagram` with participants, messages, notes over one of them and `alt`, and
`stateDiagram-v2`. `accTitle` gives a picture its title; its description is made of the source, so
that it has the whole content for those who can't see it.

States are drawn like a sequence: a column for each state, a row for each transition. No arrow
crosses a label, however many transitions there are.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from html import escape
from itertools import count, pairwise
from typing import Any, Final

__all__ = ["draw", "on_page_markdown"]

_FENCE: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINE: Final = 18
"""Height of a line of text; its font has 14 units."""
_LETTER: Final = 7.7
"""Width of a letter, on average: there is no font to measure with."""
_GAP: Final = 24
_MARGIN: Final = 12
_LABEL_LETTERS: Final = 25
_numbers = count(1)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of a page: gives it with pictures for diagrams."""
    return _FENCE.sub(lambda found: draw(found[1]), markdown)


def draw(source: str) -> str:
    """A `<figure>` with the picture of a Mermaid diagram. Raises ValueError."""
    kind, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    title = next((line[9:].strip() for line in lines if line.startswith("accTitle:")), "")
    lines = [line for line in lines if not line.startswith("accTitle:")]
    if not title:
        raise ValueError(f"a diagram has no accTitle: {kind}")
    if kind == "flowchart TD":
        picture, text = _draw_flowchart(lines)
    elif kind == "sequenceDiagram":
        picture, text = _read_sequence(lines).draw()
    elif kind == "stateDiagram-v2":
        picture, text = _read_states(lines).draw()
    else:
        raise ValueError(f"no diagram that this script can draw: {kind}")
    number = next(_numbers)
    return (
        f'<figure class="diagram"><svg xmlns="http://www.w3.org/2000/svg" role="img"'
        f' viewBox="0 0 {picture.width:.0f} {picture.height:.0f}" width="{picture.width:.0f}"'
        f' aria-labelledby="diagram-{number}-title diagram-{number}-text">'
        f'<title id="diagram-{number}-title">{escape(title)}</title>'
        f'<desc id="diagram-{number}-text">{escape(text)}</desc>'
        f'<defs><marker id="diagram-{number}-tip" viewBox="0 0 10 10" refX="9" refY="5"'
        ' markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        '<path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>'
        + "".join(picture.parts).replace("TIP", f"url(#diagram-{number}-tip)")
        + "</svg></figure>"
    )


def _lines_of(text: str) -> list[str]:
    return [part.strip() for part in text.split("<br>")]


def _wrapped(text: str) -> list[str]:
    """The lines of a label: those of the source, or shorter ones."""
    return [
        line
        for part in _lines_of(text)
        for line in textwrap.wrap(part, _LABEL_LETTERS, break_on_hyphens=False)
    ]


def _width(lines: list[str]) -> float:
    return max(map(len, lines)) * _LETTER


@dataclass
class _Picture:
    width: float = 0.0
    height: float = 0.0
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, lines: list[str], css: str, anchor: str = "middle") -> None:
        """Lines below each other; the first one's middle is at `y`."""
        for index, line in enumerate(lines):
            self.parts.append(
                f'<text class="{css}" x="{x:.0f}" y="{y + 5 + index * _LINE:.0f}"'
                f' text-anchor="{anchor}">{escape(line)}</text>'
            )

    def box(self, x: float, y: float, width: float, height: float, css: str) -> None:
        self.parts.append(
            f'<rect class="{css}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}"'
            f' height="{height:.0f}" rx="5"/>'
        )

    def label_box(self, x: float, y: float, lines: list[str], css: str) -> None:
        """Text in a box; `x` is its middle, `y` its top."""
        width = _width(lines) + _GAP
        self.box(x - width / 2, y, width, len(lines) * _LINE + 12, css)
        self.text(x, y + 6 + _LINE / 2, lines, "name" if css == "node" else "label")

    def arrow(self, path: str, *, dashed: bool = False) -> None:
        css = "edge dashed" if dashed else "edge"
        self.parts.append(f'<path class="{css}" d="{path}" marker-end="TIP"/>')


# --------------------------------------------------------------------- sequences and states


@dataclass
class _Row:
    """A message, a note (from and to are the same), or the beginning and end of a frame."""

    kind: str
    source: str = ""
    target: str = ""
    lines: list[str] = field(default_factory=list)
    dashed: bool = False


@dataclass
class _Ladder:
    """Columns with arrows between them, one below the other."""

    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    start: str = ""
    end: str = ""

    def draw(self) -> tuple[_Picture, str]:
        picture = _Picture()
        positions = self._positions()
        head = max(len(lines) for lines in self.columns.values()) * _LINE + 12
        top = _MARGIN + (_GAP if self.start or self.end else 0)
        y = top + head + _GAP / 2
        body = _Picture()
        frames: list[float] = []
        right = max(positions[name] + _width(lines) / 2 for name, lines in self.columns.items())
        for row in self.rows:
            y, edge = self._draw_row(body, row, positions, y, frames, right)
            right = max(right, edge)
        for x in positions.values():
            picture.parts.append(f'<path class="life" d="M{x:.0f} {top + head:.0f}V{y:.0f}"/>')
        for name, lines in self.columns.items():
            picture.label_box(positions[name], top + head - len(lines) * _LINE - 12, lines, "node")
        for name, css in ((self.start, "start"), (self.end, "end")):
            if name:
                x = positions[name]
                picture.parts.append(f'<circle class="{css}" cx="{x:.0f}" cy="14" r="6"/>')
                path = f"M{x:.0f} 21V{top - 1:.0f}" if css == "start" else f"M{x:.0f} {top}V21"
                picture.arrow(path)
        picture.parts += body.parts
        picture.width, picture.height = right + _MARGIN + _GAP / 2, y + _MARGIN
        return picture, " ".join(f"{sentence}." for sentence in self.sentences)

    def _positions(self) -> dict[str, float]:
        """The middle of each column: as far from those before it as the labels between need."""
        names = list(self.columns)
        positions = {names[0]: _MARGIN + _width(self.columns[names[0]]) / 2 + _GAP}
        for before, name in pairwise(names):
            x = positions[before] + (_width(self.columns[before]) + _width(self.columns[name])) / 2
            x += 2 * _GAP
            for row in self.rows:
                if row.kind == "message" and row.source == row.target == before:
                    x = max(x, positions[before] + _width(row.lines) + 2.4 * _GAP)
                elif row.kind == "message" and name in (row.source, row.target):
                    other = row.source if row.target == name else row.target
                    if other in positions:
                        x = max(x, positions[other] + _width(row.lines) + 1.5 * _GAP)
            positions[name] = x
        return positions

    def _draw_row(
        self,
        picture: _Picture,
        row: _Row,
        positions: dict[str, float],
        y: float,
        frames: list[float],
        right: float,
    ) -> tuple[float, float]:
        """Draws it at `y`; gives where the next one is, and how far to the right it went."""
        height = len(row.lines) * _LINE
        if row.kind == "note":
            x = positions[row.source]
            picture.label_box(x, y, row.lines, "note")
            return y + height + 12 + _GAP / 2, x + _width(row.lines) / 2 + _GAP / 2
        if row.kind == "message":
            start, end = positions[row.source], positions[row.target]
            if start == end:
                middle = y + max(height, 20) / 2
                picture.arrow(
                    f"M{start:.0f} {middle - 8:.0f}h{_GAP}v16H{start + 1:.0f}", dashed=row.dashed
                )
                top = middle - (height - _LINE) / 2
                picture.text(start + _GAP + 8, top, row.lines, "label", "start")
                return y + max(height, 20) + _GAP / 2, start + _GAP + 8 + _width(row.lines)
            picture.text((start + end) / 2, y + _LINE / 2, row.lines, "label")
            tip = 1 if start < end else -1
            picture.arrow(f"M{start:.0f} {y + height + 3:.0f}H{end - tip:.0f}", dashed=row.dashed)
            return y + height + _GAP * 0.75, max(start, end)
        if row.kind == "begin":
            frames.append(y)
            picture.text(2 * _MARGIN, y + _LINE / 2 + 4, row.lines, "label", "start")
            return y + _LINE + _GAP / 2, 2 * _MARGIN + _width(row.lines)
        top = frames[-1]
        if row.kind == "else":
            picture.parts.append(f'<path class="frame dashed" d="M{_MARGIN} {y:.0f}H{right:.0f}"/>')
            picture.text(2 * _MARGIN, y + _LINE / 2 + 4, ["else"], "label", "start")
            return y + _LINE + _GAP / 2, right
        frames.pop()
        picture.box(_MARGIN, top, right - _MARGIN + _GAP / 2, y - top, "frame")
        return y + _GAP / 2, right


_MESSAGE: Final = re.compile(r"(\w+)(-?->>)(\w+): (.+)")
_NOTE: Final = re.compile(r"Note over (\w+): (.+)")
_PARTICIPANT: Final = re.compile(r"participant (\w+) as (.+)")


def _read_sequence(lines: list[str]) -> _Ladder:
    ladder = _Ladder()

    def name(column: str) -> str:
        return " ".join(ladder.columns[column])

    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            ladder.columns[found[1]] = _lines_of(found[2])
        elif found := _MESSAGE.fullmatch(line):
            source, arrow, target, label = found.groups()
            dashed = arrow == "-->>"
            ladder.rows.append(_Row("message", source, target, _wrapped(label), dashed))
            text = label.replace("<br>", " ")
            ladder.sentences.append(f"{name(source)} to {name(target)}: {text}")
        elif found := _NOTE.fullmatch(line):
            ladder.rows.append(_Row("note", found[1], found[1], _wrapped(found[2])))
            text = found[2].replace("<br>", " ")
            ladder.sentences.append(f"Note on {name(found[1])}: {text}")
        elif line.startswith("alt "):
            ladder.rows.append(_Row("begin", lines=[line[4:]]))
            ladder.sentences.append(f"If {line[4:]}")
        elif line in ("else", "end"):
            ladder.rows.append(_Row(line))
            ladder.sentences.append("Else" if line == "else" else "After that")
        else:
            raise ValueError(f"can't draw this line of a sequence: {line}")
    return ladder


_TRANSITION: Final = re.compile(r"(\S+) --> ([^\s:]+)(?:: (.+))?")


def _read_states(lines: list[str]) -> _Ladder:
    ladder = _Ladder()
    for line in lines:
        found = _TRANSITION.fullmatch(line)
        if found is None:
            raise ValueError(f"can't draw this line of states: {line}")
        before, after, label = found.groups()
        if before == "[*]":
            ladder.start = after
            ladder.sentences.append(f"It starts in {after}")
        elif after == "[*]":
            ladder.end = before
            ladder.sentences.append(f"It ends in {before}")
        else:
            ladder.rows.append(_Row("message", before, after, _wrapped(label or "")))
            ladder.sentences.append(f"{before} to {after}: {label}")
        for state in (before, after):
            if state != "[*]":
                ladder.columns.setdefault(state, [state])
    if ladder.end:
        ladder.columns[ladder.end] = ladder.columns.pop(ladder.end)
    return ladder


# ------------------------------------------------------------------------------- flowcharts

_NODE: Final = re.compile(r'(\w+)(?:\["(.+?)"\])?')


@dataclass
class _Node:
    """A box, or with no lines a point that an edge over several layers passes."""

    lines: list[str]
    layer: int = 0
    x: float = 0.0
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        return _width(self.lines) + _GAP if self.lines else 10.0


def _draw_flowchart(lines: list[str]) -> tuple[_Picture, str]:
    nodes, edges = _read_flowchart(lines)
    _assign_layers(nodes, edges)
    paths = _split_edges(nodes, edges)
    layers: list[list[str]] = [[] for _ in range(max(node.layer for node in nodes.values()) + 1)]
    for name, node in nodes.items():
        layers[node.layer].append(name)
    _arrange(nodes, layers)
    picture = _Picture()
    tops, heights = [], []
    y = float(_MARGIN)
    for layer in layers:
        height = max(len(nodes[name].lines) for name in layer) * _LINE + 12
        tops.append(y)
        heights.append(height)
        y += height + 2 * _GAP
    for path in paths:
        first = nodes[path[0]]
        top = tops[first.layer]
        bottom = (heights[first.layer] + len(first.lines) * _LINE + 12) / 2
        parts = [f"M{first.x:.0f} {top + bottom:.0f}"]
        at = top + bottom
        for before, name in pairwise(path):
            node = nodes[name]
            inset = (heights[node.layer] - len(node.lines) * _LINE - 12) / 2 if node.lines else 0
            to = tops[node.layer] + inset
            half = (to - at) / 2
            parts.append(
                f"C{nodes[before].x:.0f} {at + half:.0f} {node.x:.0f} {to - half:.0f}"
                f" {node.x:.0f} {to:.0f}"
            )
            at = to
            if name != path[-1]:
                at = tops[node.layer] + heights[node.layer]
                parts.append(f"V{at:.0f}")
        picture.arrow("".join(parts))
    for node in nodes.values():
        if node.lines:
            height = len(node.lines) * _LINE + 12
            inset = (heights[node.layer] - height) / 2
            picture.label_box(node.x, tops[node.layer] + inset, node.lines, "node")
    picture.width = max(node.x + node.width / 2 for node in nodes.values()) + _MARGIN
    picture.height = y - 2 * _GAP + _MARGIN
    sentences = [f"{source} uses {', '.join(targets)}." for source, targets in edges.items()]
    return picture, " ".join(sentences)


def _read_flowchart(lines: list[str]) -> tuple[dict[str, _Node], dict[str, list[str]]]:
    nodes: dict[str, _Node] = {}
    edges: dict[str, list[str]] = {}
    for line in lines:
        groups: list[list[str]] = []
        for part in line.split(" --> "):
            names = []
            for text in part.split(" & "):
                found = _NODE.fullmatch(text)
                if found is None:
                    raise ValueError(f"can't draw this line of a flowchart: {line}")
                name, label = found.groups()
                node = nodes.setdefault(name, _Node([name]))
                if label:
                    node.lines = _lines_of(label)
                names.append(name)
            groups.append(names)
        for sources, targets in pairwise(groups):
            for source in sources:
                edges.setdefault(source, []).extend(targets)
    return nodes, edges


def _assign_layers(nodes: dict[str, _Node], edges: dict[str, list[str]]) -> None:
    """Each below all that use it. Raises ValueError for a cycle."""
    for _ in nodes:
        changed = False
        for source, targets in edges.items():
            for target in targets:
                if nodes[target].layer <= nodes[source].layer:
                    nodes[target].layer = nodes[source].layer + 1
                    changed = True
        if not changed:
            return
    raise ValueError("a flowchart has a cycle")


def _split_edges(nodes: dict[str, _Node], edges: dict[str, list[str]]) -> list[list[str]]:
    """The nodes of each edge, with a point in every layer between its ends."""
    paths = []
    for source, targets in edges.items():
        for target in targets:
            path = [source]
            for layer in range(nodes[source].layer + 1, nodes[target].layer):
                name = f"{source}>{target}>{layer}"
                nodes[name] = _Node([], layer)
                path.append(name)
            path.append(target)
            for upper, lower in pairwise(path):
                nodes[upper].below.append(lower)
                nodes[lower].above.append(upper)
            paths.append(path)
    return paths


def _arrange(nodes: dict[str, _Node], layers: list[list[str]]) -> None:
    """Order each layer by the mean of its neighbours, so that few edges cross, and spread it."""

    def mean(names: list[str], otherwise: float) -> float:
        return sum(nodes[name].x for name in names) / len(names) if names else otherwise

    for layer in layers:
        _spread(nodes, layer, {name: index * 100.0 for index, name in enumerate(layer)})
    for turn in range(24):
        downwards = turn % 2 == 0
        for layer in layers if downwards else reversed(layers):
            wished = {}
            for name in layer:
                node = nodes[name]
                wished[name] = mean(node.above if downwards else node.below, node.x)
            layer.sort(key=wished.__getitem__)
            _spread(nodes, layer, wished)
    least = min(node.x - node.width / 2 for node in nodes.values())
    for node in nodes.values():
        node.x += _MARGIN - least


def _spread(nodes: dict[str, _Node], layer: list[str], wished: dict[str, float]) -> None:
    """As near to the wished positions as the widths allow."""
    for name in layer:
        nodes[name].x = wished[name]
    for _ in range(60):
        for left, right in pairwise(layer):
            one, other = nodes[left], nodes[right]
            needed = (one.width + other.width) / 2 + _GAP / 2
            lack = needed - (other.x - one.x)
            if lack > 0:
                one.x -= lack / 2
                other.x += lack / 2
