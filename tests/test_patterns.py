"""Every regular expression that sees peers' bytes takes linear time, whatever they send.

The compiled patterns are collected from the modules, so that a new one is tested without being
listed here. Worst cases are generated from each pattern: an input that matches its first parts,
then a long run of characters that the pattern mentions, then something that it doesn't expect.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
import string
import time
from collections.abc import Callable, Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import crosswire
import crosswire.bond
import crosswire.gateways
import crosswire.hub
import crosswire.web
import crosswire.wire
from crosswire.wire.clauses import _compiled

PACKAGES = (crosswire.wire, crosswire.gateways, crosswire.hub, crosswire.web, crosswire.bond)
MODULES = (
    "crosswire.envelope",
    "crosswire.access",
    "crosswire.session",
    "crosswire.filter_text",
    "crosswire.tokens",
    "crosswire.server.checkpoints",
    "crosswire.store.checkpoint",
)
PROTOCOLS = ("emp", "emqp", "epoxy", "micromsg2", "relink")

FEW = 20
"""Characters for which only an exponential time is slow."""
RUN = 1_500
"""Characters of a run. What takes quadratic time takes many milliseconds for so many."""
TIMES = 4
QUICK_S = 0.002
"""Faster than this for `RUN` characters can't be quadratic."""
MOST_TIMES = 9.0
"""How much longer `TIMES` as many characters may take: 4 if linear, 16 if quadratic."""


class Used(NamedTuple):
    """A pattern, and the names of its methods that the module calls."""

    pattern: re.Pattern[Any]
    methods: frozenset[str]


def patterns() -> dict[str, Used]:
    names = [
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    found: dict[str, Used] = {}
    for name in (*names, *MODULES):
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            # Some modules keep a bound method of the pattern only.
            pattern = getattr(value, "__self__", value)
            if isinstance(pattern, re.Pattern):
                methods = {value.__name__} if pattern is not value else _methods(module, key)
                found[f"{name}.{key}"] = Used(pattern, frozenset(methods))
    return found


def clauses() -> Iterator[Used]:
    """Those that find the clause of a violation, whose reason may quote the peer."""
    for protocol in PROTOCOLS:
        for pattern, _, _ in _compiled(protocol):
            yield Used(pattern, frozenset({"match"}))


def _methods(module: ModuleType, key: str) -> set[str]:
    return set(re.findall(rf"\b{key}\.(\w+)\(", inspect.getsource(module)))


PATTERNS = patterns()


# ---------------------------------------------------------------------------------- worst cases


def sample(items: Any) -> str:
    """A short text that these items of a parsed pattern match, as far as that is easy to tell."""
    return "".join(map(_sample_item, items))


def _sample_item(item: tuple[Any, Any]) -> str:
    code, value = item
    if code is codes.LITERAL:
        return chr(value)
    if code is codes.NOT_LITERAL or code is codes.ANY:
        return "a"
    if code is codes.IN:
        return next(iter(_members(value)), "a")
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return sample(value[2]) * max(value[0], 1)
    if code is codes.SUBPATTERN:
        return sample(value[3])
    if code is codes.ATOMIC_GROUP:
        return sample(value)
    if code is codes.BRANCH:
        return sample(value[1][0])
    return ""


_CATEGORIES = {
    codes.CATEGORY_DIGIT: "1",
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_NOT_WORD: " ",
}


def _members(items: Any) -> Iterator[str]:
    """Characters of a set; of a negated one those that any text has, without its members."""
    listed = []
    for code, value in items:
        if code is codes.LITERAL:
            listed.append(chr(value))
        elif code is codes.RANGE:
            listed.append(chr(value[0]))
        elif code is codes.CATEGORY:
            listed.append(_CATEGORIES[value])
    if items[0][0] is codes.NEGATE:
        return (each for each in "a1 " if each not in listed)
    return iter(listed)


def mentioned(items: Any) -> Iterator[str]:
    """All characters that a pattern names anywhere."""
    for code, value in items:
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            yield chr(value)
        elif code is codes.IN:
            yield from _members(value)
            yield from (chr(each) for kind, each in value if kind is codes.LITERAL)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            yield from mentioned(value[2])
        elif code is codes.SUBPATTERN:
            yield from mentioned(value[3])
        elif code is codes.ATOMIC_GROUP:
            yield from mentioned(value)
        elif code is codes.BRANCH:
            for branch in value[1]:
                yield from mentioned(branch)
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            yield from mentioned(value[1])


def worst_cases(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], str]]:
    """Functions of a size."""
    text = pattern.pattern
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    items = parser.parse(text, pattern.flags & ~re.UNICODE).data
    starts = list(dict.fromkeys(["", *(sample(items[:end]) for end in range(1, len(items) + 1))]))
    letters = list(dict.fromkeys([*mentioned(items), "a", "1", " "]))[:16]
    runs = [*letters, *(a + b for a in letters for b in letters if a != b), *starts[1:]]
    for start in starts:
        for run in dict.fromkeys(runs):
            for end in ("", "\x00", "\\"):
                yield lambda size, start=start, run=run, end=end: (  # type: ignore[misc]
                    start + run * (size // len(run)) + end
                )


def seconds(used: Used, text: str) -> float:
    """How long it takes with the methods that the module calls."""
    given: Any = text.encode("latin-1") if isinstance(used.pattern.pattern, bytes) else text
    began = time.perf_counter()
    if "fullmatch" in used.methods:
        used.pattern.fullmatch(given)
    if "match" in used.methods:
        used.pattern.match(given)
    if used.methods - {"fullmatch", "match"}:
        # Searching all of it takes as long as any other method may.
        for _ in used.pattern.finditer(given):
            pass
    return time.perf_counter() - began


def slowest(used: Used) -> tuple[float, str]:
    """The growth for `TIMES` as many characters, of the first case where it is too much."""
    for case in worst_cases(used.pattern):
        if _is_slow(used, case(FEW)):
            return math.inf, case(FEW)
        # Nearly all cases are quick; only others are measured with care.
        if _is_slow(used, case(RUN)):
            one = min(seconds(used, case(RUN)) for _ in range(3))
            more = seconds(used, case(TIMES * RUN))
            if more > MOST_TIMES * one:
                return more / one, case(40)
    return 0.0, ""


def _is_slow(used: Used, text: str) -> bool:
    """More than once: a busy machine may stop this process at any time."""
    return all(seconds(used, text) >= QUICK_S for _ in range(3))


# ----------------------------------------------------------------------------------------- tests


@pytest.mark.alone
@pytest.mark.parametrize("name", PATTERNS)
def test_linear_time(name: str) -> None:
    growth, text = slowest(PATTERNS[name])
    assert growth < MOST_TIMES, f"{name} backtracks: {growth:.0f} times longer for {text!r}"


@pytest.mark.alone
def test_clauses_are_found_in_linear_time() -> None:
    texts = [letter * RUN + "\x00" for letter in "a1 '\"("]
    for used in clauses():
        start = sample(parser.parse(used.pattern.pattern).data)
        for text in (*texts, *(start + each for each in texts)):
            assert not _is_slow(used, text), (used.pattern.pattern, text[:40])


def test_all_packages_were_searched() -> None:
    """Not nothing, because a name has changed."""
    for package in ("wire.emp.", "wire.emqp.", "wire.micromsg2.", "gateways.", "hub.", "bond."):
        assert any(name.startswith(f"crosswire.{package}") for name in PATTERNS), package
    assert all(used.methods for used in PATTERNS.values())


@pytest.mark.alone
@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", "fullmatch"),
        (r"a\s*\s*b", "match"),
        (r"(a+)+b", "fullmatch"),
        (r"(?:a|a)*b", "match"),
        (r"\s+$", "search"),
        (rb'"((?:[^"\\]|\\.)*)("|$)', "finditer"),
    ],
)
def test_patterns_that_backtrack_are_found(pattern: str | bytes, method: str) -> None:
    used = Used(re.compile(pattern, re.DOTALL), frozenset({method}))
    assert slowest(used)[0] > MOST_TIMES


def test_characters_are_those_of_the_pattern() -> None:
    items = parser.parse(r"x[0-9]+(?:;|\s)").data
    assert set(mentioned(items)) >= {"x", "0", ";", " "}
    assert set(mentioned(items)) <= set(string.printable)
