"""The snippets of docs/client.md and of the README run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosswire.testing import RunningHub

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
SNIPPETS = PYTHON.findall((ROOT / "docs" / "client.md").read_text())


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet(crosswire_hub: RunningHub, snippet: str) -> None:
    assert printed(f"URL = {crosswire_hub.url('emp')!r}\n{snippet}")


def test_the_readme(crosswire_hub: RunningHub) -> None:
    snippet = PYTHON.findall((ROOT / "README.md").read_text())[0]
    for protocol in ("emp", "micromsg2"):
        address = f'"{protocol}://127.0.0.1"'
        assert address in snippet
        snippet = snippet.replace(address, repr(crosswire_hub.url(protocol)))
    assert printed(snippet) == "{'item': 'tea'} {'price': 12}\n"


def printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
