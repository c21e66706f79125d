"""Print the script that completes commands, options and file names in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Final

from crosswire.cli.parsers import add_examples, whole_parser

__all__ = ["configure", "run"]

_FILES: Final = frozenset({"FILE", "PATH"})
_FOLDERS: Final = frozenset({"DIR"})


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    add_examples(
        parser,
        "crosswire completion bash > ~/.local/share/bash-completion/completions/crosswire",
        "crosswire completion zsh > ~/.zfunc/_crosswire",
    )


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    parser = whole_parser()
    for action in _arguments(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY
    print(shtab.complete(parser, options.shell))
    return 0


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _arguments(each)
        else:
            yield action
