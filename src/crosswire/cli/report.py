"""Write an HTML report of the pipeline's tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from crosswire.cli.parsers import add_examples
from crosswire.plurals import plural

if TYPE_CHECKING:
    from crosswire.pipeline.report import Facts

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    parser.add_argument(
        "--input",
        required=True,
        metavar="DIR",
        help="the folder of the tables: --output of 'crosswire pipeline run'",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the HTML file to write")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    add_examples(parser, "crosswire report --input tables --output report.html")


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path. Raises PipelineError for tables that can't be read."""
    from crosswire.pipeline.report import write_report

    start = time.monotonic()
    output = Path(options.output)
    facts = write_report(options.input, output, made_us=time.time_ns() // 1000)
    spent = time.monotonic() - start
    if options.json:
        summary_fields = {"output": str(output), "seconds": round(spent, 3), **_summary(facts)}
        print(msgspec.json.encode(summary_fields).decode())
        return 0
    print(output)
    rows = sum(facts.tables.values())
    print(
        f"{plural(len(facts.tables), 'table')}, {plural(rows, 'row')}: "
        f"{plural(output.stat().st_size, 'byte')} of HTML in {spent:.1f} s.",
        file=sys.stderr,
    )
    return 0


def _summary(facts: Facts) -> dict[str, Any]:
    """The figures at the top of the report; null for those whose table is missing."""
    clock, traffic, took, calls = facts.clock, facts.traffic, facts.latencies, facts.calls
    sent, compared, accounts = facts.deliveries, facts.reconciliation, facts.accounts
    return {
        "tables": facts.tables,
        "first": clock and clock.first_us,
        "last": clock and clock.last_us,
        "messages": traffic and traffic.total_messages,
        "payload_bytes": traffic and traffic.total_bytes,
        "sessions": facts.sessions and facts.sessions.total,
        "latency_us": took and msgspec.to_builtins(took.all),
        "requests": calls
        and {
            "answered": calls.answered,
            "failed": calls.failed,
            "unanswered": calls.unanswered,
            "waiting": calls.waiting,
        },
        "bytes": accounts
        and {name: accounts.total(name) for name in ("seen", "gaps", "violations", "missing")},
        "violations": facts.violations and facts.violations.total,
        "deliveries": sent
        and {
            "total": sent.total,
            "late": sent.late,
            "lost": sent.lost,
            "doubled": sent.doubled,
        },
        "reconciliation": compared and compared.verdicts,
        "failures": msgspec.to_builtins(facts.failures),
        "interruptions": msgspec.to_builtins(facts.interruptions),
    }
