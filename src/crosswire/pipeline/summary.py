"""What a run of the pipeline reports when it is done, be it a batch or a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DELIVERY_FAULTS", "LEDGER_TABLES", "NO_LEDGER", "NO_WIRE", "ONLY_RECORDS", "Summary"]

LEDGER_TABLES: Final = ("deliveries", "reconciliation")
"""The tables that are made of what a hub recorded itself."""

DELIVERY_FAULTS: Final = {
    "late": "late",
    "lost": "lost",
    "doubled": "doubled",
    "damaged": "NOT intact",
    "uncertain deliveries": "reason IS NOT NULL",
}
"""What is counted in gold.deliveries: a finding, and the SQL condition of its rows."""

NO_LEDGER: Final = "no deliveries and no reconciliation: there is no ledger/"
NO_WIRE: Final = "no reconciliation: there is no wire/ beside the ledger"
ONLY_RECORDS: Final = "a lake without wire/ gives the tables messages and deliveries only"


@dataclass(frozen=True)
class Summary:
    """Rows of each table (`gold.traffic`), the byte accounting of each protocol, and the duration.

    `findings` counts the verdicts of gold.reconciliation, and the late, lost, doubled and damaged
    messages of gold.deliveries. `notes` are the tables that were left out, with the reason.
    """

    rows: dict[str, int]
    accounting: list[dict[str, Any]]
    seconds: float
    findings: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def seen(self) -> int:
        """Bytes of the input, those of gaps included."""
        return sum(each["seen"] for each in self.accounting)
