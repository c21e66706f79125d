"""The names of all tables, for who must not wait for Spark to be imported."""

from __future__ import annotations

from typing import Final

__all__ = ["NAMES"]

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
    "accounting",
)
