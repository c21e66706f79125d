"""The snippets of docs/client.md run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosswire.testing import RunningHub

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet(crosswire_hub: RunningHub, snippet: str) -> None:
    program = f"URL = {crosswire_hub.url('emp')!r}\n{snippet}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
