"""List, verify and compact the Parquet files of a hub's lake."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from crosswire.cli.hub import print_json, size
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.errors import StoreError
from crosswire.plurals import plural

if TYPE_CHECKING:
    from crosswire.lake.verification import SealedRows

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    listing = add_action(
        actions,
        "list",
        "tables, files, rows, bytes, time span",
        "crosswire lake list --data /var/lib/crosswire",
    )
    checking = add_action(
        actions,
        "verify",
        "read all files; report bad checksums, foreign files, gaps and overlaps of seq "
        "(exit code 1); with --data also files that the store has sealed and that are missing",
        "crosswire lake verify --data /var/lib/crosswire",
        "crosswire lake verify --lake /mnt/lake --json",
    )
    joining = add_action(
        actions,
        "compact",
        "merge small files, date by date",
        "crosswire lake compact --data /var/lib/crosswire --before 2026-11-01",
    )
    joining.add_argument(
        "--before",
        type=_date,
        metavar="DATE",
        help="only dates before this one (default: today); no stream may still read them",
    )
    joining.add_argument(
        "--target",
        type=_megabytes,
        default=256,
        metavar="MIB",
        help="size of the merged files (default: 256)",
    )
    for each in (listing, checking, joining):
        where = each.add_mutually_exclusive_group()
        where.add_argument(
            "--data",
            default="./crosswire-data",
            metavar="DIR",
            help="the hub's data directory (default: ./crosswire-data)",
        )
        where.add_argument(
            "--lake",
            metavar="DIR",
            help="the lake's own directory, if it is not in the data directory",
        )
        each.add_argument("--json", action="store_true", help="one JSON object")


def _date(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date like 2026-11-15") from None


def _megabytes(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of MiB")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Run the action; 1 if `verify` finds faults. Raises LakeError."""
    lake = Path(options.lake) if options.lake else Path(options.data) / "lake"
    return {"list": _list, "verify": _verify, "compact": _compact}[options.action](options, lake)


def _list(options: argparse.Namespace, lake: Path) -> int:
    from crosswire.lake.catalog import summarize

    tables = summarize(lake)
    if options.json:
        print_json({"tables": msgspec.to_builtins(tables)})
        return 0
    head = ("table", "node", "files", "rows", "size", "seq", "from", "to")
    rows = [
        (
            each.table,
            harmless(each.node),
            f"{each.files:,}",
            f"{each.rows:,}",
            size(each.bytes),
            f"{each.first_seq}–{each.last_seq}",
            _moment(each.first_time),
            _moment(each.last_time),
        )
        for each in tables
    ]
    print_table(head, rows, empty="no files")
    return 0


def _moment(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _verify(options: argparse.Namespace, lake: Path) -> int:
    from crosswire.lake.catalog import summarize
    from crosswire.lake.verification import verify

    sealed = None if options.lake else _sealed(Path(options.data))
    faults = list(verify(lake, sealed))
    wrong = [fault for fault in faults if fault.kind != "recorded"]
    tables = summarize(lake)
    if options.json:
        print_json(
            {
                "ok": not wrong,
                "files": sum(table.files for table in tables),
                "rows": sum(table.rows for table in tables),
                "faults": msgspec.to_builtins(faults),
            }
        )
        return 1 if wrong else 0
    if faults:
        head = ("fault", "table", "node", "first", "last", "what", "file")
        rows = [
            (
                fault.kind,
                fault.table,
                harmless(fault.node),
                fault.first,
                fault.last,
                harmless(fault.detail),
                harmless(fault.file),
            )
            for fault in faults
        ]
        print_table(head, rows)
    files, count = sum(table.files for table in tables), sum(table.rows for table in tables)
    verdict = plural(len(wrong), "fault") if wrong else "no faults"
    print(f"{plural(files, 'file')}, {plural(count, 'row')}: {verdict}.", file=sys.stderr)
    return 1 if wrong else 0


def _sealed(data: Path) -> SealedRows | None:
    """What the store has promised; None, with a note, where it can't be read now."""
    from crosswire.server.store_repair import sealed_rows

    if not (data / "store").is_dir():
        return None
    try:
        return sealed_rows(data)
    except StoreError as error:
        print(f"Note: the newest files are not compared with the store: {error}.", file=sys.stderr)
        return None


def _compact(options: argparse.Namespace, lake: Path) -> int:
    from crosswire.lake.compaction import compact
    from crosswire.server.private_files import create_private_files

    # The joined files are as private as those that the hub wrote.
    create_private_files()
    before = options.before or datetime.now(UTC).date().isoformat()
    done = []
    for each in compact(lake, before=before, target_bytes=options.target << 20):
        done.append(each)
        if not options.json:
            files = f"{plural(each.files_before, 'file')} → {each.files_after:,}"
            print(f"{each.table} {each.date}: {files}", file=sys.stderr)
    if options.json:
        print_json({"compacted": msgspec.to_builtins(done)})
    elif not done:
        print(f"There is nothing to compact before {before}.", file=sys.stderr)
    return 0
