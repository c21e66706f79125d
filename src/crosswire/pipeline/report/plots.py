"""Plots as inline SVG and HTML: style sheet classes give the colours, `data-tip` the tooltips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import ceil, log10
from typing import Final

import msgspec

from crosswire.envelope import MICROSECONDS
from crosswire.pipeline.report.facts import Interruption, TimeBuckets
from crosswire.pipeline.report.formats import amount, brief, count, duration, moment, share, visible
from crosswire.pipeline.report.histogram import highest_of, lowest_of

__all__ = ["PlotSeries", "bars", "columns", "distribution", "legend", "lines", "split_bar"]

_WIDTH: Final = 600
_HEIGHT: Final = 210
_LEFT: Final = 62
_RIGHT: Final = 12
_TOP: Final = 14
_BOTTOM: Final = 30
_INNER_WIDTH: Final = _WIDTH - _LEFT - _RIGHT
_INNER_HEIGHT: Final = _HEIGHT - _TOP - _BOTTOM

Format = Callable[[float], str]
"""Formats a value for axes and tooltips."""


class PlotSeries(msgspec.Struct, frozen=True):
    """`name` is plain text; `style` is the class that gives it its colour."""

    name: str
    style: str
    values: Sequence[float | None]


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names and their classes."""
    items = "".join(
        f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for name, style in entries
    )
    return f'<div class="legend">{items}</div>'


def columns(
    clock: TimeBuckets,
    series: Sequence[PlotSeries],
    formatted: Format,
    title: str,
    *,
    thousand: int = 1000,
) -> str:
    """Stacked columns, one for each interval of time; `thousand` is the factor between units."""
    totals = [sum(each.values[piece] or 0 for each in series) for piece in range(clock.count)]
    top, ticks = _scale(max(totals, default=0), thousand)
    width = _INNER_WIDTH / clock.count
    thick = min(max(width - (1.5 if width > 5 else 0.3), 0.6), 90)
    parts = [_grid([(tick / top, formatted(tick)) for tick in ticks]), _times(clock)]
    for piece in range(clock.count):
        left = _LEFT + piece * width + (width - thick) / 2
        bottom = 0.0
        for each in series:
            value = each.values[piece] or 0
            if not value:
                continue
            height = value / top * _INNER_HEIGHT
            y = _TOP + _INNER_HEIGHT - bottom - height
            parts.append(
                f'<rect class="{each.style}" x="{left:.1f}" y="{y:.2f}" width="{thick:.1f}" '
                f'height="{height:.2f}"/>'
            )
            bottom += height
    named = [(each.name, each.values) for each in series]
    parts.append(_targets(clock, named, formatted, totals if len(series) > 1 else None))
    parts.append(_interruptions(clock))
    return _svg(parts, title)


def lines(
    clock: TimeBuckets,
    series: Sequence[PlotSeries],
    formatted: Format,
    title: str,
    *,
    logarithmic: bool = False,
) -> str:
    """A line for each series, interrupted where it has no value."""
    known = [value for each in series for value in each.values if value is not None]
    if logarithmic:
        position, marks = _decades(min(known, default=1), max(known, default=1))
        grid = [(position(mark), formatted(mark)) for mark in marks]
    else:
        top, ticks = _scale(max(known, default=0))
        grid = [(tick / top, formatted(tick)) for tick in ticks]

        def position(value: float) -> float:
            return value / top

    width = _INNER_WIDTH / clock.count
    parts = [_grid(grid), _times(clock)]
    for each in series:
        run: list[str] = []
        for piece, value in enumerate((*each.values, None)):
            if value is not None:
                y = _TOP + (1 - position(value)) * _INNER_HEIGHT
                run.append(f"{_LEFT + (piece + 0.5) * width:.1f},{y:.1f}")
                continue
            # A line of one point would be invisible.
            if len(run) == 1:
                x, y_text = run[0].split(",")
                parts.append(f'<circle class="{each.style}" cx="{x}" cy="{y_text}" r="3"/>')
            elif run:
                parts.append(f'<polyline class="line {each.style}" points="{" ".join(run)}"/>')
            run = []
    parts.append(_targets(clock, [(each.name, each.values) for each in series], formatted, None))
    parts.append(_interruptions(clock))
    return _svg(parts, title)


def distribution(counts: Mapping[str, tuple[str, Mapping[int, int]]], title: str) -> str:
    """Stacked columns of latency buckets, four to a column. Name → style, counts."""
    joined: dict[str, dict[int, int]] = {}
    for name, (_, buckets) in counts.items():
        sums = joined.setdefault(name, {})
        for bucket, number in buckets.items():
            sums[bucket // 4] = sums.get(bucket // 4, 0) + number
    bucket_numbers = [bucket for sums in joined.values() for bucket in sums]
    first, last = min(bucket_numbers) - 1, max(bucket_numbers) + 1
    totals = {
        bucket: sum(sums.get(bucket, 0) for sums in joined.values()) for bucket in bucket_numbers
    }
    top, ticks = _scale(max(totals.values()))
    width = _INNER_WIDTH / (last - first + 1)
    thick = max(width - 1.5, 0.8)
    parts = [_grid([(tick / top, amount(tick)) for tick in ticks])]
    every = ceil((last - first + 1) / 9)
    for position in range(first, last + 1):
        left = _LEFT + (position - first) * width
        if position >= 0 and (position - first) % every == 0:
            parts.append(_mark(left, duration(lowest_of(position * 4))))
        bottom = 0.0
        for name, (style, _) in counts.items():
            height = joined[name].get(position, 0) / top * _INNER_HEIGHT
            if height:
                y = _TOP + _INNER_HEIGHT - bottom - height
                parts.append(
                    f'<rect class="{style}" x="{left:.1f}" y="{y:.2f}" width="{thick:.1f}" '
                    f'height="{height:.2f}"/>'
                )
                bottom += height
        if position in totals:
            lines_of_text = [
                f"{duration(lowest_of(position * 4))} – {duration(highest_of(position * 4 + 3))}"
            ]
            lines_of_text += [
                f"{name}: {count(sums[position])}"
                for name, sums in joined.items()
                if position in sums
            ]
            parts.append(_target(left, width, lines_of_text))
    return _svg(parts, title)


def bars(rows: Sequence[tuple[str, str, float, str]]) -> str:
    """Horizontal bars: HTML of the label, class, value, and the value in words."""
    longest = max((value for _, _, value, _ in rows), default=0) or 1
    made = [
        f'<div class="bar-label">{label}</div><div class="bar-track"><i class="{style}" '
        f'style="width:{max(100 * value / longest, 0.6):.2f}%"></i><b>{escape(words)}</b></div>'
        for label, style, value, words in rows
    ]
    return f'<div class="bars">{"".join(made)}</div>'


def split_bar(parts: Sequence[tuple[str, str, float]], formatted: Format = count) -> str:
    """One bar, split: name, class, value."""
    total = sum(value for _, _, value in parts) or 1
    made = [
        f'<i class="{style}" style="flex:{value / total:.5f} 1 0" '
        f'data-tip="{escape(f"{name}: {formatted(value)} ({share(value, total)})")}"></i>'
        for name, style, value in parts
        if value
    ]
    return f'<div class="split">{"".join(made)}</div>'


# Kills and gaps.

_LABELS: Final = {
    "killed": "hub killed",
    "restarted": "restart",
    "gap": "gap",
    "missing records": "no records",
}
_LABEL_WIDTH: Final = 64


def _interruptions(clock: TimeBuckets) -> str:
    """Bands over the times in which the hub was not there, or something was not recorded."""
    made = []
    # Labels that would overlap are left out; the tooltips are always there.
    labelled = -_LABEL_WIDTH
    for each in clock.interruptions:
        left, right = (
            _LEFT + _INNER_WIDTH * min(max(_position(clock, time_us), 0), 1)
            for time_us in (each.start_us, each.end_us or each.start_us)
        )
        style = each.kind.replace(" ", "-")
        width = max(right - left, 2)
        made.append(
            f'<rect class="cut {style}" x="{left:.1f}" y="{_TOP}" width="{width:.1f}" '
            f'height="{_INNER_HEIGHT}" data-tip="{escape(_described(each))}"/>'
        )
        if left - labelled >= _LABEL_WIDTH:
            end = left > _WIDTH - _LABEL_WIDTH
            anchor = "end" if end else "start"
            made.append(
                f'<text class="cut-label {style}" x="{left + (width if end else 0):.1f}" '
                f'y="{_TOP - 3}" text-anchor="{anchor}">{_LABELS[each.kind]}</text>'
            )
            labelled = int(left)
    return "".join(made)


def _position(clock: TimeBuckets, time_us: int) -> float:
    return (time_us - clock.start_us) / (clock.width_us * clock.count)


def _described(each: Interruption) -> str:
    lines_of_text = [_LABELS[each.kind], moment(each.start_us, "%Y-%m-%d %H:%M:%S.%f")]
    if each.end_us is not None:
        lines_of_text.append(f"for {brief(duration(each.end_us - each.start_us))}")
    if each.bytes:
        lines_of_text.append(f"{count(each.bytes)} bytes were not recorded")
    if each.reason:
        lines_of_text.append(visible(each.reason))
    return "\n".join(lines_of_text)


# Axes and frames.


def _svg(parts: Sequence[str], title: str) -> str:
    name = escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg></figure>'
    )


def _scale(highest: float, thousand: int = 1000) -> tuple[float, list[float]]:
    """The top of an axis that begins at 0, and its marks: 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return 1, [0, 1]
    if highest >= thousand:
        top, marks = _scale(highest / thousand, thousand)
        return top * thousand, [mark * thousand for mark in marks]
    rough = highest / 4
    power = 10.0 ** (ceil(log10(rough)) - 1)
    step = next(power * number for number in (1, 2, 5, 10) if power * number >= rough * 0.999)
    number = ceil(highest / step - 1e-9)
    return number * step, [step * position for position in range(number + 1)]


def _decades(lowest: float, highest: float) -> tuple[Callable[[float], float], list[float]]:
    """A logarithmic axis: a function from a value to its position (0 to 1), and the marks."""
    steps = [number * 10.0**power for power in range(20) for number in (1, 2, 5)]
    bottom = max((step for step in steps if step <= lowest), default=1.0)
    top = next(step for step in steps if step >= highest and step > bottom)
    marks = [step for step in steps if bottom <= step <= top]
    if len(marks) > 7:
        marks = [mark for mark in marks if log10(mark).is_integer()]

    def position(value: float) -> float:
        return log10(max(value, bottom) / bottom) / log10(top / bottom)

    return position, marks


def _grid(marks: Sequence[tuple[float, str]]) -> str:
    made = []
    for height, label in marks:
        y = _TOP + (1 - height) * _INNER_HEIGHT
        made.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="axis" x="{_LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
    return "".join(made)


def _mark(x: float, label: str) -> str:
    y = _TOP + _INNER_HEIGHT
    return (
        f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>'
        f'<text class="axis" x="{x:.1f}" y="{y + 17}" text-anchor="middle">{escape(label)}</text>'
    )


def _times(clock: TimeBuckets) -> str:
    pattern = _pattern(clock)
    every = max(ceil(clock.count / 6), 1)
    width = _INNER_WIDTH / clock.count
    made = []
    for piece in range(0, clock.count, every):
        x = _LEFT + piece * width
        if x < _WIDTH - 50:
            made.append(_mark(x, moment(clock.start_us + piece * clock.width_us, pattern)))
    return "".join(made)


def _pattern(clock: TimeBuckets) -> str:
    if clock.width_us >= 86_400_000_000:
        return "%Y-%m-%d"
    if clock.last_us - clock.first_us > 20 * 3_600_000_000:
        return "%m-%d %H:%M"
    if clock.width_us >= 60_000_000:
        return "%H:%M"
    return "%H:%M:%S" if clock.width_us >= MICROSECONDS else "%H:%M:%S.%f"


def _targets(
    clock: TimeBuckets,
    named: Sequence[tuple[str, Sequence[float | None]]],
    formatted: Format,
    totals: Sequence[float] | None,
) -> str:
    """Invisible columns that carry the tooltips of the intervals with values."""
    width = _INNER_WIDTH / clock.count
    made = []
    for piece in range(clock.count):
        lines_of_text = [
            f"{name}: {formatted(v)}" for name, values in named if (v := values[piece])
        ]
        if not lines_of_text:
            continue
        start = clock.start_us + piece * clock.width_us
        pattern = "%Y-%m-%d %H:%M:%S" + (".%f" if clock.width_us < MICROSECONDS else "")
        lines_of_text.insert(0, f"{moment(start, pattern)} (+ {brief(duration(clock.width_us))})")
        if totals is not None and len(lines_of_text) > 2:
            lines_of_text.append(f"total: {formatted(totals[piece])}")
        made.append(_target(_LEFT + piece * width, width, lines_of_text))
    return "".join(made)


def _target(x: float, width: float, lines_of_text: Sequence[str]) -> str:
    tip = escape("\n".join(map(visible, lines_of_text)))
    return (
        f'<rect class="target" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_INNER_HEIGHT}" '
        f'data-tip="{tip}"/>'
    )
