"""The program `crosswire`: finds the module of a command and runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from crosswire.cli.known_hubs import fill_in
from crosswire.cli.parsers import command_module, options_last, parser_of, split_command
from crosswire.cli.table import harmless
from crosswire.errors import CrosswireError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 failed, 2 wrong usage."""
    _make_output_safe()
    command = ""
    try:
        given = list(map(_decoded, sys.argv[1:])) if argv is None else argv
        command, arguments = split_command(given)
        if command == "serve":
            _return_memory()
        parser = parser_of(command, arguments)
        options = parser.parse_args(options_last(parser, arguments))
        fill_in(options)
        code: int = command_module(command).run(options)
        sys.stdout.flush()
        return code
    except CrosswireError as error:
        # The text may be a provider's; lines are kept, since a configuration can have many faults.
        _fail(command, "\n".join(map(harmless, str(error).split("\n"))))
        return 1
    except BrokenPipeError:
        # The reader of our output closed it (`| head`). Python flushes standard output again at
        # exit, which would fail as well: it goes to /dev/null from now on.
        _discard_output()
        return 1
    except UnicodeEncodeError:
        _fail(command, "an argument is not text in UTF-8")
        return 1
    except OSError as error:
        # Such as a disk that fills up under our output; errors of files are explained where they
        # are opened.
        _fail(command, harmless(str(error)))
        _discard_output()
        return 1
    except KeyboardInterrupt:
        if command == "serve":
            _fail(command, "interrupted before it was ready")
        return 130


def _return_memory() -> None:
    """Have Arrow use the system's allocator, before it is loaded: its own one keeps what it had for
    the largest reads of the lake, hundreds of megabytes, for as long as the hub runs."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def _decoded(argument: str) -> str:
    """UTF-8 in every locale; bytes that are not UTF-8 stay as Python has them."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeDecodeError:
        return argument


def _make_output_safe() -> None:
    """A terminal that can't show a character gets its escape, and a closed stream takes nothing:
    neither is worth a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _fail(command: str, text: str) -> None:
    try:
        print(f"crosswire {command}: {text}", file=sys.stderr)
    except OSError:
        _discard_output()


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
