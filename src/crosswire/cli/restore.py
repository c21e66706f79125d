"""Make a data directory from a backup, after its files were compared with its list of checksums.

The hub that starts on it is the same hub, with the same node: never run it beside the original.
For a copy that lives beside the original, use --new-node.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from crosswire.cli.hub import print_json, size
from crosswire.cli.parsers import add_examples
from crosswire.cli.progress import progress_lines
from crosswire.plurals import plural

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument("backup", metavar="DIR", help="the folder that `crosswire backup` wrote")
    parser.add_argument("data", metavar="DATA", help="the data directory to make; new or empty")
    parser.add_argument(
        "--new-node",
        action="store_true",
        help="give the copy a node of its own, so that it may run beside the original",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_examples(
        parser,
        "crosswire restore /backups/2026-11-16 /var/lib/crosswire",
        "crosswire restore /backups/2026-11-16 /tmp/copy --new-node --json",
    )


def run(options: argparse.Namespace) -> int:
    """Restore it. Raises StoreError."""
    from crosswire.server.backups import restore

    start = time.monotonic()
    source, data = Path(options.backup), Path(options.data)
    backup = restore(source, data, new_node=options.new_node, progress=progress_lines())
    if options.json:
        print_json(
            {
                "data": str(data),
                "created": backup.created,
                "new_node": options.new_node,
                "size_bytes": backup.size_bytes,
                "has_lake": backup.lake is not None,
            }
        )
        return 0
    files = plural(len(backup.store.files) + len(backup.lake or ()), "file")
    print(
        f"{data}: {files}, {size(backup.size_bytes)}, as of {backup.created}, in "
        f"{time.monotonic() - start:.1f} s. Start it with: crosswire serve --data {data}",
        file=sys.stderr,
    )
    if backup.lake is None:
        print("The backup has no lake: restore that from where you keep it.", file=sys.stderr)
    return 0
