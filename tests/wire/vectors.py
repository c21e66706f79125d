"""The recorded bytes in tests/vectors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "vectors"


@cache
def load(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return vectors
