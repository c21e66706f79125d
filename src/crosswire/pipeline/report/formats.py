"""Formats numbers, sizes and times for readers, and escapes text that peers have chosen."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import escape
from shlex import quote
from typing import Final

__all__ = [
    "amount",
    "brief",
    "count",
    "css_class",
    "duration",
    "moment",
    "protocol_name",
    "share",
    "shell_word",
    "size",
    "text",
    "visible",
]

_NAMES: Final = {
    "emp": "EMP",
    "emqp": "eMQP",
    "relink": "Relink",
    "epoxy": "Epoxy",
    "micromsg2": "MicroMsg2",
    "tls": "TLS",
}
_LONGEST: Final = 90
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def protocol_name(protocol: str | None) -> str:
    """The protocol's name as its specification writes it; text, not yet HTML."""
    return "unknown" if protocol is None else _NAMES.get(protocol) or visible(protocol)


def css_class(protocol: str | None) -> str:
    """The style sheet's class for a protocol's colour."""
    return f"p-{protocol}" if protocol in _NAMES else "p-other"


def visible(value: object) -> str:
    """Text with control characters and marks of writing direction shown as escapes."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))


def shell_word(word: str) -> str:
    """A word as a shell reads it, in printable characters only.

    Names may have control characters and marks of writing direction. Bash and zsh read these as
    escapes in $'…', and the line shows what it does.
    """
    if word.isprintable():
        return quote(word)
    made = []
    for c in word:
        if c in "\\'":
            made.append(f"\\{c}")
        elif c.isprintable():
            made.append(c)
        else:
            # \U takes up to eight digits: with fewer, a following digit would belong to it.
            made.append(f"\\U{ord(c):08x}")
    return f"$'{''.join(made)}'"


def text(value: object) -> str:
    """HTML of text that a peer may have chosen; long text is cut, and whole in its tooltip."""
    if value is None or value == "":
        return '<span class="none">–</span>'
    shown = visible(value)
    if len(shown) <= _LONGEST:
        return escape(shown)
    whole = shown if len(shown) <= 1000 else shown[:1000] + "…"
    return f'<span title="{escape(whole)}">{escape(shown[: _LONGEST - 1])}…</span>'


def count(number: float | None) -> str:
    """A whole number with separators of thousands; a dash for None."""
    return "–" if number is None else f"{number:,.0f}"


def amount(number: float) -> str:
    """At most four digits: 950, 1.2 k, 35 M."""
    for unit in ("", " k", " M", " G"):
        if abs(number) < 999.5:
            if abs(number) < 1:
                return f"{number:.2g}{unit}"
            digits = 0 if number == int(number) or abs(number) >= 100 else 1
            return f"{number:.{digits}f}{unit}"
        number /= 1000
    return f"{number:,.1f} T"


def size(number: float | None) -> str:
    """Bytes with a unit: 850 B, 1.2 KiB, 35 MiB; a dash for None."""
    if number is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


def duration(time_us: float | None) -> str:
    """850 µs, 1.24 ms, 3.5 s, 2 min 5 s, 3 h 20 min, 2 d 4 h."""
    if time_us is None:
        return "–"
    if time_us < 999.5:
        return f"{time_us:.0f} µs"
    if time_us < 59_995_000:
        number, unit = (time_us / 1e3, "ms") if time_us < 999_500 else (time_us / 1e6, "s")
        return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"
    seconds = round(time_us / 1e6)
    for large, small, first, second in ((86_400, 3600, "d", "h"), (3600, 60, "h", "min")):
        if seconds >= large:
            return f"{seconds // large:,} {first} {seconds % large // small} {second}"
    return f"{seconds // 60} min {seconds % 60} s"


def brief(words: str) -> str:
    """A size or a duration without needless zeros: 5 ms, not 5.00 ms; 10 min, not 10 min 0 s."""
    number, _, unit = words.partition(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return re.sub(r" 0 (s|min|h)$", "", f"{number} {unit}")


def share(part: float, whole: float) -> str:
    """A percentage that is 0 % only for nothing, and 100 % only for everything."""
    if not whole or not part:
        return "0 %"
    percent = 100 * part / whole
    if percent < 0.01:
        return "< 0.01 %"
    if part != whole and percent > 99.99:
        return "> 99.99 %"
    return f"{percent:.0f} %" if percent >= 99.995 else f"{percent:.{2 if percent < 10 else 1}f} %"


def moment(time_us: int | None, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """UTC; with milliseconds where the pattern ends with %f."""
    if time_us is None:
        return "–"
    try:
        shown = (_EPOCH + timedelta(microseconds=time_us)).strftime(pattern)
    except OverflowError:
        return f"{time_us} µs"
    return shown[:-3] if pattern.endswith("%f") else shown
