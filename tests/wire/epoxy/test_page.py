"""The page about Epoxy describes what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosswire.wire.epoxy.connection import TRANSITIONS, State
from crosswire.wire.epoxy.frames import ConfigFrame, Message, ProtocolError
from tests.wire.vectors import load

ROOT = Path(__file__).parents[3]
FRAMES = (ConfigFrame, Message, ProtocolError)


def section(name: str) -> str:
    page = (ROOT / "docs/protocols/epoxy.md").read_text()
    found = re.search(rf"<!-- {name} -->\n(.*)<!-- /{name} -->", page, re.DOTALL)
    assert found is not None
    return found[1]


def run(example: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_table_of_states_is_the_one_that_is_carried_out() -> None:
    names = " | ".join(frame.frame_name for frame in FRAMES)
    rows = [
        f"| {state.value} | "
        + " | ".join(
            TRANSITIONS[state, frame][0].value if (state, frame) in TRANSITIONS else "–"
            for frame in FRAMES
        )
        + " |\n"
        for state in State
        if state is not State.CLOSED
    ]
    assert section("states") == f"| state | {names} |\n|---|---|---|---|\n" + "".join(rows)


@pytest.mark.slow
def test_the_dumps_are_what_the_script_prints() -> None:
    assert section("dumps").strip() == run("epoxy_hexdump.py").strip()


def test_the_dumps_are_what_real_peers_write() -> None:
    dumped = [
        "".join(re.findall(r"^[0-9a-f]{8}: ([0-9a-f ]{39})", dump, re.MULTILINE)).replace(" ", "")
        for dump in section("dumps").split("```")[1::2]
    ]
    recorded = {vector["name"]: vector["wire"] for vector in load("epoxy")}
    names = ("config-frame", "spec-example-request", "spec-example-response")
    assert dumped == [recorded[name] for name in names]


def test_the_calculator_calculates() -> None:
    assert "67 × 87 = 5829" in run("calculator.py")
