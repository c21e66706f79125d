"""The page about EMP agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from crosswire.wire.emp.connection import TRANSITIONS, State
from crosswire.wire.emp.frames import Bye, Error, Hello, Ping, Pong, Request, Response

PAGE = Path(__file__).parents[3] / "docs/protocols/emp.md"
FRAMES = (Hello, Bye, Ping, Pong, Error, Request, Response)


def test_the_table_of_states_is_the_one_that_is_carried_out() -> None:
    found = re.search(r"<!-- states -->\n(.*)<!-- /states -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    head = (
        "| state | "
        + " | ".join(frame.frame_name for frame in FRAMES)
        + " |\n"
        + "|---" * 8
        + "|\n"
    )
    rows = [
        f"| {state.value} | "
        + " | ".join(
            TRANSITIONS[state, f][0].value if (state, f) in TRANSITIONS else "–" for f in FRAMES
        )
        + " |\n"
        for state in (State.HANDSHAKE, State.OPEN)
    ]
    assert found[1] == head + "".join(rows)
