"""Directions of a connection, and the kinds of runs that a recorded connection consists of.

The hub's tap, TCP reassembly of captures and every reader of either use these values; they are
stored in the columns `direction` and `kind` of the lake's `wire` table.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BACKWARD", "DATA", "FIN", "FORWARD", "GAP", "LOST", "OPEN", "RESET"]

FORWARD: Final = "forward"
"""From the side that opened the connection."""
BACKWARD: Final = "backward"
"""From the side that accepted it."""

OPEN: Final = "open"
"""The connection was opened; no bytes."""
DATA: Final = "data"
"""Bytes that were sent in one direction."""
GAP: Final = "gap"
"""Bytes were sent that were not recorded: only their number is known."""
FIN: Final = "fin"
"""The sender closed this direction normally; no bytes."""
RESET: Final = "reset"
"""The connection was aborted; no bytes."""
LOST: Final = "lost"
"""Rows of a hub's tap are missing, after a full disk or a power cut. Belongs to no connection."""
