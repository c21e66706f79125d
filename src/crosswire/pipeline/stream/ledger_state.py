"""The state of a stream's ledger tables: the parts that a batch hands on, and their columns.

part            rows                                              carried until
steps           ledger rows of a message                          the message is settled
envelopes       kind and checksum of a message, no payload        the message is settled
wire messages   messages on the wire                              their verdict is final
passages        final rows of gold.reconciliation                 the message is settled
connections     those that were tapped                            over, and no caller's
counted         topics whose deliveries the ledger only counts    for good: they are few
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = [
    "CONNECTIONS",
    "COUNTED",
    "ENVELOPES",
    "PARTS",
    "PASSAGES",
    "STATE",
    "STEPS",
    "STORED_NAMES",
    "WIRE_MESSAGES",
]

STATE: Final = "records"
"""The name under which it is saved."""

# Names of parts and columns are stored: a stream goes on with the state that an older version has
# written. Columns whose stored name is no good here are in STORED_NAMES.
STEPS: Final = "steps"
ENVELOPES: Final = "envelopes"
WIRE_MESSAGES: Final = "said"
PASSAGES: Final = "passed"
CONNECTIONS: Final = "lines"
COUNTED: Final = "counted"
STORED_NAMES: Final = {"is_reported": "is_told", "position": "place", "reply_ok": "said_yes"}
PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    STEPS: {
        "node": "string",
        "seq": "bigint",
        "id": "bigint",
        "time": "bigint",
        "step": "string",
        "destination": "string",
        "protocol": "string",
        "connection": "string",
        "principal": "string",
        "attempt": "int",
        "detail": "string",
        "count": "bigint",
        "subscription": "string",
        "origin": "bigint",
        "is_moved": "boolean",
        "is_answer": "boolean",
        "is_reported": "boolean",
        "is_listed": "boolean",
    },
    ENVELOPES: {
        "node": "string",
        "id": "bigint",
        "time": "bigint",
        "kind": "string",
        "destination": "string",
        "protocol": "string",
        "connection": "string",
        "crc": "bigint",
        "intact": "boolean",
        "is_scheduled": "boolean",
    },
    WIRE_MESSAGES: {
        "node": "string",
        "connection": "string",
        "protocol": "string",
        "destination": "string",
        "kind": "string",
        "time": "bigint",
        "position": "bigint",
        "crc": "bigint",
        "id": "bigint",
        "correlation": "string",
        "sequence": "bigint",
        "way": "string",
        "side": "string",
        "name": "string",
        "refuses": "boolean",
        "reply_ok": "boolean",
    },
    PASSAGES: {
        "node": "string",
        "id": "bigint",
        "connection": "string",
        "destination": "string",
        "way": "string",
        "subscription": "string",
        "verdict": "string",
        "wire_time": "bigint",
        "same_payload": "boolean",
    },
    CONNECTIONS: {
        "node": "string",
        "connection": "string",
        "line": "string",
        "whole": "boolean",
        "written_until": "bigint",
        "broken_off": "bigint",
        "is_over": "boolean",
        "last_time": "bigint",
        "client": "string",
    },
    COUNTED: {"counted_node": "string", "counted_destination": "string"},
}
