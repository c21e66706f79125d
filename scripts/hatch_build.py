"""The package's long description: the README, with links that lead somewhere outside of a clone.

Links to files of the repository become absolute below `[project.urls] Source`. Without that address
their text is left, without a link, and pictures are left out. Comments are for our tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def long_description(readme: str, source: str | None) -> str:
    """The text of a README for readers who have only the package."""
    text = re.sub(r"^<!-- .* -->\n", "", readme, flags=re.M)
    local = r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)"
    if source is None:
        return re.sub(local, lambda link: "" if link[1] else link[2], text)
    return re.sub(local, lambda link: f"{link[1]}[{link[2]}]({source}/{link[3]})", text)


class ReadmeHook(MetadataHookInterface):
    """hatchling calls it when it builds the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, which pyproject.toml declares as dynamic."""
        source = metadata.get("urls", {}).get("Source")
        text = long_description((Path(self.root) / "README.md").read_text(), source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
