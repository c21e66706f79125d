"""The page about ZMTP agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from crosswire.wire.zmtp import COMPATIBLE, Command, Greeting, Message, Sealed
from crosswire.wire.zmtp.connection import TRANSITIONS, State

PAGE = Path(__file__).parents[3] / "docs/protocols/zmtp.md"
FRAMES = (Greeting, Command, Message, Sealed)


def section(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*)<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    return "".join((lines[0], "|---" * len(rows[0]) + "|\n", *lines[1:]))


def test_the_table_of_states_is_the_one_that_is_carried_out() -> None:
    rows = [
        (
            state.value,
            *(
                ", ".join(after.value for after in TRANSITIONS.get((state, f), ())) or "–"
                for f in FRAMES
            ),
        )
        for state in (State.GREETING, State.HANDSHAKE, State.OPEN)
    ]
    assert section("states") == table(("state", *(f.frame_name for f in FRAMES)), *rows)


def test_the_table_of_socket_types_is_the_one_that_is_carried_out() -> None:
    rows = [(ours, ", ".join(sorted(theirs))) for ours, theirs in COMPATIBLE.items()]
    assert section("types") == table(("ours", "peers"), *rows)
