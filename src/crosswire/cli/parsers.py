"""The commands, and their parsers: made when they are needed, with examples, options anywhere."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

from crosswire import __version__

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "COMMANDS",
    "add_action",
    "add_actions",
    "add_examples",
    "command_module",
    "front_parser",
    "leaves",
    "options_last",
    "parser_of",
    "split_command",
    "whole_parser",
]

COMMANDS: Final = {
    "serve": "run a hub",
    "check": "explain what is wrong in a configuration file",
    "user": "print the hash of a user's token, or a new token with its hash",
    "context": "name hubs with their addresses and credentials, and choose one",
    "status": "show how a hub is: ready or not, traffic, backlog, disk, troubles",
    "top": "show the busiest queues, topics and services of a hub, live",
    "pub": "send to a queue or publish to a topic, through any protocol",
    "sub": "print the messages of a queue or a topic",
    "call": "call a service and print its response",
    "echo-service": "answer every call of a service with its own payload",
    "queue": "list queues, show, create, pause, purge, move or delete one",
    "topic": "list topics, show one, delete one",
    "subscription": "list named subscriptions, show one, delete one, give one to another user",
    "service": "list services with their providers, show one",
    "dead": "list, show, edit, replay and purge dead letters",
    "schedule": "list, add, remove, pause, fire and preview schedules",
    "connections": "list connections, close one",
    "find": "search messages by destination, time, property, outcome or text",
    "trace": "show what happened to a message",
    "bench": "measure a hub's throughput and latency",
    "decode": "print the frames in a file of raw bytes",
    "demo": "run five protocols on one hub, kill it, and count what was lost",
    "backup": "copy store and lake of a running hub, and verify the copy",
    "restore": "make a data directory from a backup",
    "replication": "start a replicated log, show and remove replicas, hand over",
    "store": "verify and repair the store of a hub that is stopped",
    "lake": "list, verify and compact the files of a hub's lake",
    "pipeline": "decode captured traffic into tables, on Spark",
    "report": "write an HTML report of the tables",
    "completion": "print the script that completes commands and options in a shell",
    "help": "explain a command, with examples",
}

_LEADING: Final = {
    "--context": 1,
    "--hub": 1,
    "--token": 1,
    "--ca": 1,
    "--cert": 1,
    "--key": 1,
    "--json": 0,
    "--via": 1,
    "--host": 1,
    "--port": 1,
    "--tls": 0,
    "--curve-server": 1,
    "--curve-secret": 1,
    "--bond": 1,
}
"""Options that many commands share, with the number of their values: they may precede the command.
Stated here, since asking the commands would import all of them at every start."""


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps descriptions to the width of the terminal, and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(("examples:", "commands:")):
            return "\n".join(indent + line for line in text.splitlines())
        paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
        filled = [
            super(_HelpFormatter, self)._fill_text(each, width, indent) for each in paragraphs
        ]
        return "\n\n".join(filled)


# --------------------------------------------------------------------------------- for the commands


def add_examples(parser: argparse.ArgumentParser, *lines: str) -> None:
    """Show these commands at the end of `--help`; a test runs each through its parser."""
    parser.epilog = "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_actions(parser: argparse.ArgumentParser) -> Actions:
    """Make it a command with actions, such as `queue list`, which `add_action` adds."""
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_action(
    actions: Actions, name: str, summary: str, *examples: str
) -> argparse.ArgumentParser:
    """A parser for an action of a command. `summary` begins in lower case."""
    parser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[:1].upper()}{summary[1:]}.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add_examples(parser, *examples)
    return parser


# --------------------------------------------------------------------------------- for the program


def command_module(command: str) -> ModuleType:
    """The module of a command. Only the one that runs is imported: others need Spark, or take long
    to load."""
    return import_module(f"crosswire.cli.{command.replace('-', '_')}")


def parser_of(command: str, argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of a command; `argv` are its arguments, if they are known already."""
    module = command_module(command)
    parser = argparse.ArgumentParser(
        prog=f"crosswire {command}",
        description=module.__doc__,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser, argv)
    return parser


def front_parser() -> argparse.ArgumentParser:
    """The parser of what precedes a command's own arguments; its help lists the commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="crosswire",
        description="A message hub for EMP, eMQP, Relink, Bond Epoxy and MicroMsg2.",
        epilog="commands:\n" + "\n".join(lines) + "\n\nSee also: crosswire help COMMAND",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crosswire {__version__}")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below"
    )
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """One parser with all commands inside, for what describes them: completion, documentation."""
    parser = argparse.ArgumentParser(prog="crosswire", formatter_class=_HelpFormatter)
    parser.add_argument("--version", action="version", version=f"crosswire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        own = commands.add_parser(
            name, help=text, formatter_class=_HelpFormatter, allow_abbrev=False
        )
        module = command_module(name)
        own.description = module.__doc__
        module.configure(own, ())
    return parser


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser itself, or those of its actions if it has some."""
    actions = _actions_of(parser)
    if actions is None:
        yield parser
        return
    for each in actions.choices.values():
        yield from leaves(each)


def split_command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command, and its arguments: those after it, and the options before it.

    Exits with 2 for wrong usage, and with 0 after `--help` and `--version`.
    """
    leading, rest = _leading(argv, _LEADING)
    command: str = front_parser().parse_args(rest[:1]).command
    return command, [*leading, *rest[1:]]


def options_last(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments of a command with its action first: options may precede that, and are its."""
    actions = _actions_of(parser)
    if actions is None:
        return list(argv)
    counts: dict[str, int] = {}
    for each in actions.choices.values():
        for option in each._actions:
            # With any number of values it is unknown where they end: such options come last.
            if option.nargs in (None, 0):
                count = 0 if option.nargs == 0 else 1
                counts.update(dict.fromkeys(option.option_strings, count))
    for flag in ("-h", "--help"):
        counts.pop(flag, None)
    leading, rest = _leading(argv, counts)
    if not rest or rest[0] not in actions.choices:
        return list(argv)
    return [rest[0], *leading, *rest[1:]]


def _leading(argv: Sequence[str], counts: dict[str, int]) -> tuple[list[str], list[str]]:
    """The known options at the beginning, with their values, and the rest."""
    index = 0
    while index < len(argv):
        flag, equals, _ = argv[index].partition("=")
        if flag not in counts:
            break
        index += 1 + (0 if equals else counts[flag])
    return list(argv[:index]), list(argv[index:])


def _actions_of(parser: argparse.ArgumentParser) -> Actions | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action
    return None
