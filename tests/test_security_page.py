"""docs/security.md: what its hardening guide tells one to run and to write works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosswire.config import load
from crosswire.server.exposure import refuse_exposures

PAGE = (Path(__file__).parents[1] / "docs/security.md").read_text()
GUIDE = PAGE[PAGE.index("## Hardening") :]
SNIPPETS = re.findall(r"^```(sh|toml)\n(.*?)^```", GUIDE, re.M | re.S)


@pytest.mark.slow
def test_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kind for kind, _ in SNIPPETS] == ["sh", "sh", "toml", "sh"]
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = ""
    for kind, text in SNIPPETS:
        if kind == "toml":
            (tmp_path / "crosswire.toml").write_text(text)
            continue
        done = subprocess.run(
            ["sh", "-ec", text],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed += done.stdout + done.stderr
    assert "no mistakes" in printed
    config = load(tmp_path / "crosswire.toml")
    warnings = refuse_exposures(config, tmp_path / "crosswire.toml")
    assert [each.path for each in warnings] == [("listen",)]
    assert (tmp_path / "hub.key").stat().st_mode & 0o077 == 0
