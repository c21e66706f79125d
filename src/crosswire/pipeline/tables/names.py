"""Names of tables and of values in them, without an import of Spark, which takes seconds.

The command line and the report need them; the modules of the tables themselves import Spark.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ACCOUNT_PARTS",
    "CALLER",
    "EQUAL",
    "LAYERS",
    "MISSING_IN_LEDGER",
    "MISSING_ON_WIRE",
    "NAMES",
    "NOT_ACCEPTED",
    "NO_DATE",
    "PERCENTILES",
    "PROVIDER",
    "UNANSWERED",
    "UNCERTAIN",
    "UNMATCHED",
    "VERDICTS",
    "WITHDRAWN",
]

NO_DATE: Final = "1970-01-01"
"""The partition of rows without a time, and of the file that gives a table without rows its
schema: a partition without a date would make engines read the column as text."""

LAYERS: Final = ("bronze", "silver", "gold", "open")
"""The folders of an output. `open` has the rows of gold that later input may still change."""

NAMES: Final = (
    "wire",
    "frames",
    "messages",
    "violations",
    "directions",
    "sessions",
    "conversations",
    "traffic",
    "topology",
    "deliveries",
    "reconciliation",
    "steps",
    "depth",
    "lag",
    "accounting",
)

ACCOUNT_PARTS: Final = (
    "frames",
    "unsynchronized",
    "violations",
    "gaps",
    "encrypted",
    "tail",
    "unread",
    "unknown",
)
"""The columns of gold.accounting that add up to the bytes seen."""

PERCENTILES: Final = (0.5, 0.9, 0.95, 0.99)
"""The shares for which gold.traffic has a column: latency_p50_us and so on."""

CALLER: Final = "caller"
PROVIDER: Final = "provider"
"""The legs of a call through a hub: from the caller to the hub, from the hub to the provider."""

UNMATCHED: Final = "unmatched"
"""Kind of an answer whose request was not captured: a response, or only an acknowledgement."""

UNANSWERED: Final = "unanswered"
"""Outcome in gold.conversations of a request whose connection ended without a response."""

# The verdicts of gold.reconciliation; `tables.reconciliation` explains them.
EQUAL: Final = "equal"
MISSING_ON_WIRE: Final = "missing on the wire"
MISSING_IN_LEDGER: Final = "missing in the ledger"
NOT_ACCEPTED: Final = "not accepted"
WITHDRAWN: Final = "withdrawn"
UNCERTAIN: Final = "uncertain"
VERDICTS: Final = (
    EQUAL,
    MISSING_ON_WIRE,
    MISSING_IN_LEDGER,
    NOT_ACCEPTED,
    WITHDRAWN,
    UNCERTAIN,
)
