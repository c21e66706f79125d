"""What a run of the pipeline reports when it is done, be it a batch or a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "COMPARED_TABLES",
    "DAMAGED_ANSWERS",
    "DELIVERY_FAULTS",
    "LEDGER_TABLES",
    "MINUTE_TABLES",
    "NO_LEDGER",
    "NO_WIRE",
    "ONLY_RECORDS",
    "OTHER_PAYLOAD",
    "RECORD_TABLES",
    "Summary",
]

COMPARED_TABLES: Final = ("deliveries", "reconciliation")
"""The tables that compare what a hub recorded with the wire."""

MINUTE_TABLES: Final = ("depth", "lag")
"""The tables that add up what a hub recorded, minute by minute."""

LEDGER_TABLES: Final = (*COMPARED_TABLES, "steps", *MINUTE_TABLES)
"""The tables that are made of what a hub recorded itself."""

DELIVERY_FAULTS: Final = {
    "late": "late",
    "lost": "lost",
    "doubled": "doubled",
    "damaged": "NOT intact",
    "uncertain deliveries": "reason IS NOT NULL",
}
"""What is counted in gold.deliveries: a finding, and the SQL condition of its rows."""

OTHER_PAYLOAD: Final = "other payload"
"""Passages of gold.reconciliation whose payload on the wire is not the one that the hub keeps."""
DAMAGED_ANSWERS: Final = "damaged answers"
"""Answers whose payload in the lake no longer has its checksum: gold.deliveries has no row for
them."""

RECORD_TABLES: Final = (*LEDGER_TABLES, "conversations", "traffic")
"""The tables that need what a hub recorded: the last two for the principals."""

NO_LEDGER: Final = "no deliveries, reconciliation, steps, depth and lag: there is no ledger/"
NO_WIRE: Final = "no reconciliation: there is no wire/ beside the ledger"
ONLY_RECORDS: Final = (
    "a lake without wire/ gives the tables messages, deliveries, steps, depth and lag only"
)


@dataclass(frozen=True)
class Summary:
    """Rows of each table (`gold.traffic`), the byte accounting of each protocol, and the duration;
    of a batch, `steps` has the parts that it consists of.

    `findings` counts the verdicts and the payload differences of gold.reconciliation, and the late,
    lost, doubled and damaged messages of gold.deliveries. `notes` are the tables that were left
    out, with the reason. `packets` has the category, number and bytes of the packets in captures;
    `refused` counts the connections in them that were refused.
    """

    rows: dict[str, int]
    accounting: list[dict[str, Any]]
    seconds: float
    findings: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    packets: list[tuple[str, int, int]] = field(default_factory=list)
    refused: int = 0
    steps: dict[str, float] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """Bytes of the input, those of gaps included."""
        return sum(each["seen"] for each in self.accounting)
