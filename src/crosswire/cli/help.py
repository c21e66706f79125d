"""Explain a command or one of its actions, with examples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from crosswire.cli.parsers import COMMANDS, add_examples, front_parser, options_last, parser_of

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "topic", nargs="*", metavar="COMMAND", help="a command and, if you like, its action"
    )
    add_examples(parser, "crosswire help pub", "crosswire help queue purge")


def run(options: argparse.Namespace) -> int:
    """Print the help; exits with 2 for what is no command, or no action of it."""
    if not options.topic:
        front_parser().print_help()
        return 0
    command, *actions = options.topic
    if command not in COMMANDS:
        # Its error names all commands.
        front_parser().parse_args([command])
    parser = parser_of(command)
    # It prints the help of the innermost parser, and exits.
    parser.parse_args([*options_last(parser, actions), "--help"])
    return 0
