"""Every violation that a decoder or a connection can report has a clause."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import crosswire.wire
from crosswire import errors
from crosswire.wire.clauses import HUB_LIMIT, clause_of
from crosswire.wire.registry import PROTOCOL_NAMES, protocol

WIRE = Path(crosswire.wire.__file__).parent
PAGES = Path(__file__).parents[2] / "docs"

KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, errors.RemoteProtocolError)
    and not issubclass(kind, errors.PeerError)
}
"""A peer's own error is no violation."""
FACTORIES = {"Malformed", "_unknown", "refuse"}
VARIABLES = {"reason", "what"}
NO_REASONS = {
    # Of what a peer is told, of a goodbye, and of our own side's refusal.
    ("zmtp", "400"),
    ("epoxy", "7: 7"),
    ("relink", "is being closed"),
    ("relink", "has no room in its window"),
    ("relink", "the sizes of channel ids are not known"),
    # A part of another one.
    ("micromsg2", "7 7"),
}


def texts(node: ast.expr) -> list[str]:
    """What a reason may be; numbers and names in it are 7."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(texts(each)[0] if texts(each) else "7" for each in values)]
        case ast.FormattedValue():
            return ["7"]
        case ast.IfExp(body=body, orelse=other):
            return texts(body) + texts(other)
        case ast.BoolOp(values=values):
            return [text for each in values for text in texts(each)]
    return []


def reasons(folder: str) -> Iterator[str]:
    for file in (WIRE / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[_, *_] as given) if (
                    name in KINDS | FACTORIES
                ):
                    yield from texts(given[1] if name == "refuse" else given[0])
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in VARIABLES:
                    yield from texts(value)


@pytest.mark.parametrize("folder", ["emp", "emqp", "zmtp", "relink", "epoxy", "micromsg2"])
def test_every_reason_has_a_clause(folder: str) -> None:
    found = {text for text in reasons(folder) if text and (folder, text) not in NO_REASONS}
    assert len(found) > 10
    name = "emqp" if folder == "zmtp" else folder
    assert [text for text in sorted(found) if clause_of(name, text) is None] == []


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_limits_are_those_of_the_configuration(name: str) -> None:
    titles = {clause.title for text in reasons(name) if (clause := clause_of(name, text))}
    limits = {title for title in titles if title.startswith(f"{HUB_LIMIT} ")}
    assert limits
    for limit in limits:
        protocol_name, _, setting = limit.removeprefix(f"{HUB_LIMIT} ").partition(".")
        assert protocol_name == name and hasattr(protocol(name).limits, setting)


def test_clauses_are_on_pages_that_exist() -> None:
    for name in PROTOCOL_NAMES:
        for text in reasons(name):
            clause = clause_of(name, text)
            if clause is not None:
                assert (PAGES / f"{clause.page}.md").is_file()


def test_what_nobody_reports_has_none() -> None:
    assert clause_of("emp", "the moon is full") is None
