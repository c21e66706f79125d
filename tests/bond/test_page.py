"""The page about Bond shows what runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/bond.md"


def test_its_example_runs() -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found[1], names)
    shown = re.search(r"marshal\(value, Params\) +# ([0-9a-f ]+)", found[1])
    assert shown is not None
    assert names["data"] == bytes.fromhex(shown[1])
