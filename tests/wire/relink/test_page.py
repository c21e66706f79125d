"""The page about Relink describes what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from crosswire.wire.relink.connection import TRANSITIONS, State
from crosswire.wire.relink.frames import RelinkLimits

PAGE = (Path(__file__).parents[3] / "docs/protocols/relink.md").read_text()
STATES = [State.VERSION, State.HELLO, State.ANSWER, State.RESUMING, State.OPEN]


def test_the_table_of_states_is_the_one_that_is_carried_out() -> None:
    found = re.search(r"<!-- states -->\n(.*)<!-- /states -->", PAGE, re.DOTALL)
    assert found is not None
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].splitlines()]
    assert rows[0][1:] == [state.value for state in STATES]
    listed = {
        (state.value, row[0]): row[1:][column]
        for row in rows[2:]
        for column, state in enumerate(STATES)
        if row[1:][column] != "–"
    }
    assert listed == {
        (state.value, kind.frame_name): ", ".join(after.value for after in follow)
        for (state, kind), follow in TRANSITIONS.items()
    }


def test_every_limit_is_on_the_page() -> None:
    limits = PAGE[PAGE.index("## Limits") :]
    assert [name for name in RelinkLimits.__struct_fields__ if f"`{name}`" not in limits] == []
