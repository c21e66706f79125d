"""Check a stopped hub's store, repair it, and acknowledge what a running hub reports as damaged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from crosswire.cli.hub import add_hub_options, api_of, print_json
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.progress import progress_lines
from crosswire.cli.table import harmless, print_table
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    checking = add_action(
        actions,
        "verify",
        "read everything and list damage (exit code 1); changes nothing",
        "crosswire store verify /var/lib/crosswire --json",
    )
    mending = add_action(
        actions,
        "repair",
        "write a new store from what is readable and from the lake; the old files are in "
        "DIR/damaged-DATE afterwards: remove that folder when you don't need it any more",
        "crosswire store repair /var/lib/crosswire",
    )
    for each in (checking, mending):
        each.add_argument("data", metavar="DIR", help="the data directory of a hub that is stopped")
        each.add_argument(
            "--lake", metavar="DIR", help="the lake, if it is not in the data directory"
        )
        each.add_argument("--json", action="store_true", help="one JSON object")
    acknowledging = add_action(
        actions,
        "acknowledge",
        "clear the damage that a running hub reports: it is ready again",
        "crosswire store acknowledge",
    )
    add_hub_options(acknowledging)


def run(options: argparse.Namespace) -> int:
    """Run the action; 1 if `verify` finds damage. Raises StoreError, or ClientError."""
    return {"verify": _verify, "repair": _repair, "acknowledge": _acknowledge}[options.action](
        options
    )


def _lake(options: argparse.Namespace) -> Path:
    return Path(options.lake) if options.lake else Path(options.data) / "lake"


def _verify(options: argparse.Namespace) -> int:
    from crosswire.server.private_files import create_private_files
    from crosswire.server.store_repair import verify

    # It works on a copy of parts of the store, which it writes to the data directory.
    create_private_files()
    result = verify(Path(options.data), _lake(options), progress_lines())
    if options.json:
        print_json({"ok": result.is_intact, **msgspec.to_builtins(result)})
        return 0 if result.is_intact else 1
    _print_findings(result.findings)
    counted = f"{plural(result.destinations, 'destination')}, {plural(result.messages, 'message')}"
    verdict = "nothing is damaged" if result.is_intact else plural(len(result.findings), "fault")
    print(f"{counted}: {verdict}.", file=sys.stderr)
    return 0 if result.is_intact else 1


def _print_findings(findings: Sequence[object]) -> None:
    if findings:
        rows = [
            (each["part"], harmless(each["destination"]) or "-", harmless(each["detail"]))
            for each in msgspec.to_builtins(findings)
        ]
        print_table(("part", "destination", "what"), rows)


def _repair(options: argparse.Namespace) -> int:
    from crosswire.server.private_files import create_private_files, make_private
    from crosswire.server.store_repair import repair

    create_private_files()
    result = repair(Path(options.data), _lake(options), progress_lines())
    make_private(Path(options.data))
    if options.json:
        print_json(msgspec.to_builtins(result))
        return 0
    _print_findings(result.findings)
    for name, count in result.restored.items():
        print(f"{harmless(name)}: {plural(count, 'message')} restored", file=sys.stderr)
    for name in result.rebuilt:
        print(f"{harmless(name)}: cursor rebuilt from the ledger", file=sys.stderr)
    for name, ids in result.lost.items():
        print(f"{harmless(name)}: {plural(len(ids), 'message')} lost", file=sys.stderr)
    if result.unsure:
        print(f"{plural(result.unsure, 'message')} may be delivered again", file=sys.stderr)
    if not result.is_ledger_whole:
        text = "Part of the ledger is missing: messages settled in it may be delivered again."
        print(text, file=sys.stderr)
    if not result.findings:
        print("Nothing is damaged.", file=sys.stderr)
        return 0
    kept = f"; the old files are in {result.aside}" if result.aside else ""
    print(f"The store is repaired{kept}.", file=sys.stderr)
    return 0


def _acknowledge(options: argparse.Namespace) -> int:
    answer = api_of(options).post("/v1/damage/acknowledge")
    if options.json:
        print_json(answer)
    else:
        entries = plural(answer["acknowledged"], "entry", "entries")
        print(f"{entries} acknowledged", file=sys.stderr)
    return 0
