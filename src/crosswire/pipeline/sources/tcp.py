"""TCP's flags."""

from __future__ import annotations

from typing import Final

__all__ = ["ACK", "FIN", "RST", "SYN"]

FIN: Final = 1
SYN: Final = 2
RST: Final = 4
ACK: Final = 16
