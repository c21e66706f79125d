"""Make an HTML report of the pipeline's tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from crosswire.pipeline.report import Facts

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    parser.add_argument(
        "--input",
        required=True,
        metavar="DIR",
        help="the tables: what 'crosswire pipeline run' had as --output",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the page, report.html")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object")


def run(options: argparse.Namespace) -> int:
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
        f"{len(facts.tables)} tables, {rows:,} rows: {output.stat().st_size:,} bytes of HTML in "
        f"{spent:.1f} s.",
        file=sys.stderr,
    )
    return 0


def _summary(facts: Facts) -> dict[str, Any]:
    """The answers of the cards; null for what is unknown."""
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
        "suspects": msgspec.to_builtins(facts.suspects),
    }
