"""The page about MicroMsg2 agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from crosswire.wire.micromsg2.connection import TRANSITIONS, State
from crosswire.wire.micromsg2.frames import (
    Command,
    Error,
    ErrorName,
    ExtensionFrame,
    Handshake,
    Message,
)

PAGE = Path(__file__).parents[3] / "docs/protocols/micromsg2.md"
FRAMES = (Handshake, Message, Command, ExtensionFrame, Error)


def test_the_table_of_states_is_the_one_that_is_carried_out() -> None:
    found = re.search(r"<!-- states -->\n(.*)<!-- /states -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    names = " | ".join(frame.frame_name for frame in FRAMES)
    head = f"| state | {names} |\n" + "|---" * (len(FRAMES) + 1) + "|\n"
    rows = [
        f"| {state.value} | "
        + " | ".join(
            TRANSITIONS[state, f][0].value if (state, f) in TRANSITIONS else "–" for f in FRAMES
        )
        + " |\n"
        for state in State
        if state is not State.CLOSED
    ]
    assert found[1] == head + "".join(rows)


def test_every_error_that_we_send_is_explained() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(ErrorName) <= set(listed)
