"""The site is built without a warning, is complete, and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    """Links for readers may lead anywhere; what a browser loads by itself may not."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//[^\"'> ]+"
        r"|<link(?![^>]+rel=[\"']?canonical)[^>]+href=[\"']?(?:https?:)?//[^\"'> ]+"
    )
    found = {
        str(path.relative_to(site)): loads.findall(path.read_text())
        for path in site.rglob("*.html")
    }
    assert {path: urls for path, urls in found.items() if urls} == {}


def listed(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for each in values for page in listed(each)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_diagrams_are_pictures_with_a_title_and_a_text(site: Path) -> None:
    sources = [path for path in DOCS.rglob("*.md") if "```mermaid" in path.read_text()]
    assert sources
    for path in sources:
        page = (site / path.relative_to(DOCS)).with_suffix(".html").read_text()
        pictures = re.findall(r'<figure class="diagram">.*?</figure>', page, re.DOTALL)
        titles = re.findall(r"accTitle: (.+)", path.read_text())
        shown = [re.findall(r"<title[^>]*>(.+?)</title>", each)[0] for each in pictures]
        assert [unescape(title) for title in shown] == titles
        assert all(re.search(r"<desc[^>]*>.{50,}</desc>", each) for each in pictures)
        assert "mermaid" not in page
