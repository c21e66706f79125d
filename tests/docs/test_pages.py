"""Every snippet and console example of the docs runs as it is written, and prints what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from crosswire.config import check
from tests.docs.pages import DATA, PAGES, ROOT, RUNNABLE, Block, blocks, needs_hub
from tests.docs.terminal import Terminal

WITH_BLOCKS = [page for page in PAGES if any(each.language in RUNNABLE for each in blocks(page))]
LONGEST_LINE = 100

LONG = {"docs/how-to/spark-cluster.md", "docs/how-to/wireshark.md", "docs/spark.md"}
"""Each starts Spark, as the tutorial does."""

FRAMES = {
    "spark": (
        "from crosswire.pipeline import register\n"
        "from crosswire.pipeline.spark import SMALL_INPUT, start\n"
        'spark = start("local[2]", {**SMALL_INPUT, "spark.driver.memory": "1g"})\n'
        "register(spark)\n",
        "\nspark.stop()\n",
    ),
}
"""What is around a fragment of Python: before it, and after it."""


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_runs_or_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert block.language in RUNNABLE | DATA, f"{block}: in which language is it?"
        assert block.asked.get("not run") != "", f"{block}: why not?"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for page, name in zip(WITH_BLOCKS, names(WITH_BLOCKS), strict=True)
    ],
)
def test_a_page(page: Path, tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        if needs_hub(page):
            terminal.start("crosswire serve", until="ready")
        printed = ""
        for block in blocks(page):
            if "output" in block.asked:
                assert_shown(printed, block.text, str(block))
            elif "file" in block.asked:
                (tmp_path / block.asked["file"]).write_text(block.text)
            elif block.language in RUNNABLE and "not run" not in block.asked:
                printed = run(terminal, block)


def run(terminal: Terminal, block: Block) -> str:
    """Run a block; gives what it printed."""
    if block.language == "toml":
        config, mistakes = check(block.text)
        assert config is not None, f"{block}: {mistakes}"
        return ""
    if block.language == "console":
        return "".join(
            typed(terminal, block, command, shown) for command, shown in console(block.text)
        )
    if block.language == "python":
        before, after = FRAMES[block.asked["with"]] if "with" in block.asked else ("", "")
        program = terminal.folder / f".snippet-{block.line}.py"
        program.write_text(f"{before}{block.text}{after}")
        command = f"python {shlex.quote(str(program))}"
    else:
        script = terminal.folder / f".script-{block.line}.sh"
        script.write_text(block.text)
        command = f"sh -e {shlex.quote(str(script))}"
    return typed(terminal, block, command, "")


def console(text: str) -> list[tuple[str, str]]:
    """Commands after `$ `, and what is shown below each."""
    found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.M)
    assert found, "a console block has commands"
    return [(command, shown) for command, shown in found]


def typed(terminal: Terminal, block: Block, command: str, shown: str) -> str:
    if "until" in block.asked:
        terminal.start(command, block.asked["until"])
        return ""
    code, printed = terminal.run(command)
    assert code == int(block.asked.get("exit", 0)), f"{block}: {command}\n{printed}"
    if shown:
        assert_shown(printed, shown, f"{block}: {command}")
    return printed


def assert_shown(printed: str, shown: str, where: str) -> None:
    """`…` in a line stands for anything in it, alone in a line for any lines."""
    pattern = ""
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n"
    assert re.fullmatch(pattern, printed.rstrip("\n") + "\n"), f"{where} printed\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_lines_of_prose_are_short(page: Path) -> None:
    """Tables and addresses can't be broken, and what a program printed is shown as it is."""
    if "\nMade by `python -m" in page.read_text():
        return  # its lines are those of docstrings
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S).splitlines()
    own = [line for line in prose if not line.startswith(("|", "    ", "["))]
    assert [line for line in own if len(line) > LONGEST_LINE] == []
