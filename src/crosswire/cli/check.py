"""Explain every mistake in a configuration file, with its line and how to correct it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from crosswire.cli.parsers import add_examples
from crosswire.cli.table import harmless
from crosswire.config import Config, examine
from crosswire.errors import BondError, ConfigError
from crosswire.plurals import plural
from crosswire.server.exposure import find_exposures
from crosswire.toml import Lines, Mistake, dotted

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("file", help="crosswire.toml")
    parser.add_argument("--json", action="store_true", help="one JSON object per mistake")
    add_examples(parser, "crosswire check crosswire.toml", "crosswire check crosswire.toml --json")


def run(options: argparse.Namespace) -> int:
    """Print every mistake; 1 if there are any. Raises ConfigError for a file that can't be read."""
    path = Path(options.file)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"can't read {path}: {reason}") from None
    examined = examine(text, path.parent)
    config, mistakes = examined.config, list(examined.mistakes)
    warnings: list[Mistake] = []
    if config is not None:
        lines = Lines(text)
        mistakes += _around(config, lines)
        has_addresses = not any(each.where.startswith("listen") for each in mistakes)
        # Who may connect depends on users and listeners: with mistakes there, it is not known.
        if has_addresses and not examined.wrong & {"users", "insecure", "tls"}:
            for each in find_exposures(config, path):
                found = Mistake(lines.of(each.path), dotted(each.path), each.what, each.hint)
                (mistakes if each.is_refused else warnings).append(found)
    for mistake in sorted(mistakes):
        if options.json:
            print(msgspec.json.encode(mistake).decode())
        else:
            print(f"{path}: {harmless(str(mistake))}")
    for warning in sorted(warnings):
        # Not among the mistakes, in JSON neither: what is printed there fails a deployment.
        print(f"{path}: warning: {harmless(str(warning))}", file=sys.stderr)
    verdict = plural(len(mistakes), "mistake") if mistakes else "no mistakes"
    print(f"{path}: {verdict}", file=sys.stderr)
    return 1 if mistakes else 0


def _around(config: Config, lines: Lines) -> Iterator[Mistake]:
    """Mistakes of a valid configuration on this machine: files that can't be used."""
    if config.tls is not None:
        from crosswire.server.tls import server_context

        try:
            server_context(config.tls)
        except ConfigError as error:
            yield Mistake(lines.of(("tls",)), "tls", str(error), "PEM files, key included")
    if config.bond.files:
        from crosswire.bond import idl

        for number, file in enumerate(config.bond.files):
            try:
                idl.load(Path(file))
            except (OSError, UnicodeDecodeError, BondError) as error:
                line = lines.of(("bond", "files"))
                yield Mistake(line, f"bond.files[{number + 1}]", str(error))
