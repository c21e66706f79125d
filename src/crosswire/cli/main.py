"""The program `crosswire`: finds the module of a command and runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from crosswire import __version__
from crosswire.cli.table import harmless
from crosswire.errors import CrosswireError

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = {
    "serve": "run a hub",
    "check": "explain what is wrong in a configuration file",
    "user": "print the hash of a user's token, or a new token with its hash",
    "pub": "send to a queue or publish to a topic, through any protocol",
    "sub": "print the messages of a queue or a topic",
    "call": "call a service and print its response",
    "echo-service": "answer every call of a service with its own payload",
    "queue": "list queues, show one, purge one",
    "subscription": "list named subscriptions, delete one, give one to another user",
    "dead": "list, show, edit, replay and purge dead letters",
    "schedule": "list, add, remove and preview schedules",
    "connections": "list connections, close one",
    "trace": "show what happened to a message",
    "bench": "measure a hub's throughput and latency",
    "decode": "print the frames in a file of raw bytes",
    "demo": "run five protocols on one hub, kill it, and count what was lost",
    "store": "verify and repair the store of a hub that is stopped",
    "lake": "list, verify and compact the files of a hub's lake",
    "pipeline": "decode captured traffic into tables, on Spark",
    "report": "write an HTML report of the tables",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = _front_parser().parse_args(arguments[:1]).command
    try:
        # Only the command that runs is imported: others need Spark, or take long to load.
        module = import_module(f"crosswire.cli.{name.replace('-', '_')}")
        parser = argparse.ArgumentParser(prog=f"crosswire {name}", description=module.__doc__)
        module.configure(parser, arguments[1:])
        options = parser.parse_args(arguments[1:])
        code: int = module.run(options)
        sys.stdout.flush()
        return code
    except CrosswireError as error:
        # The text may be a provider's; lines are kept, since a configuration can have many faults.
        lines = "\n".join(map(harmless, str(error).split("\n")))
        print(f"crosswire {name}: {lines}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output closed it (`| head`). Python flushes standard output again at
        # exit, which would fail as well: it goes to /dev/null from now on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if name == "serve":
            print("crosswire serve: interrupted before it was ready", file=sys.stderr)
        return 130


def _front_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="crosswire",
        description="A message hub for EMP, eMQP, Relink, Bond Epoxy and MicroMsg2.",
        epilog="commands:\n" + "\n".join(lines) + "\n\nSee also: crosswire COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"crosswire {__version__}")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
