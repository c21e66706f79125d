"""Draw the protocols' state diagrams from their transition tables into docs/architecture.md.

Usage: python scripts/draw_states.py [--check]

The part of the page between the two marks is replaced. With `--check` nothing is written, and the
exit code is 1 if the page differs from the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from crosswire.wire.emp import connection as emp
from crosswire.wire.emqp import connection as emqp
from crosswire.wire.epoxy import connection as epoxy
from crosswire.wire.micromsg2 import connection as micromsg2
from crosswire.wire.relink import connection as relink
from crosswire.wire.zmtp import connection as zmtp

PAGE: Final = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN: Final = "<!-- states: made by scripts/draw_states.py -->\n"
END: Final = "<!-- /states -->\n"
EMQP_SIDE: Final = "emqp-workers"
"""eMQP has a table for each role and listener: this one has the most states."""

Edges = dict[tuple[str, str], list[str]]


def transitions(table: Mapping[tuple[Any, type[Any]], Any]) -> Edges:
    """From state, to state → names of the frames that lead there."""
    edges: Edges = {}
    for (before, frame), after in table.items():
        for each in after:
            edges.setdefault((before.value, each.value), []).append(frame.frame_name)
    return edges


def diagram(name: str, first: str, edges: Edges) -> str:
    """A Mermaid state diagram."""
    lines = [f"### {name}", "", "```mermaid", "stateDiagram-v2"]
    lines += [f"    accTitle: States of {name}", f"    [*] --> {first}"]
    for (before, after), frames in edges.items():
        lines.append(f"    {before} --> {after}: {', '.join(sorted(set(frames)))}")
    if any("closed" in edge for edge in edges):
        lines.append("    closed --> [*]")
    return "\n".join([*lines, "```", ""])


def diagrams() -> str:
    """All of them, as the page has them."""
    modules = {"EMP": emp, "Relink": relink, "Epoxy": epoxy, "MicroMsg2": micromsg2, "ZMTP": zmtp}
    parts = [
        diagram(name, next(iter(module.State)).value, transitions(module.TRANSITIONS))
        for name, module in modules.items()
    ]
    workers = transitions(emqp.TRANSITIONS[EMQP_SIDE])
    # The only transition of the hub's side that is caused by a frame it sends.
    workers["informed", "registered"] = ["ack (sent)"]
    parts.append(diagram("eMQP, a worker's peer in the hub", "open", workers))
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{diagrams()}\n{END}{after}"
    if "--check" not in arguments:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if new != page:
        print(f"{PAGE.name} is not up to date: run python scripts/draw_states.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
