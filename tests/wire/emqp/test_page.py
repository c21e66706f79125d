"""The page on eMQP shows the tables that the code goes by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crosswire.wire.contract import Frame
from crosswire.wire.emqp.states import RECEIVES, SENDS

PAGE = Path(__file__).parents[3] / "docs/protocols/emqp.md"


def drawn(table: dict[tuple[str, object], frozenset[type[Frame]]]) -> str:
    lines = ["| listener or role | state | commands |", "|---|---|---|"]
    for (side, state), kinds in table.items():
        names = ", ".join(sorted(kind.__name__.removesuffix("Frame").upper() for kind in kinds))
        lines.append(f"| {side} | {state.value} | {names} |")  # type: ignore[attr-defined]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("name", "table"), [("receives", RECEIVES), ("sends", SENDS)])
def test_the_page_shows_the_table(
    name: str, table: dict[tuple[str, object], frozenset[type[Frame]]]
) -> None:
    found = re.search(rf"<!-- {name} -->\n(.*)<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None and found[1] == drawn(table)
