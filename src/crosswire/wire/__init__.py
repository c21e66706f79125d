"""The wire protocols, without I/O: `contract.py` has what they share, `registry.py` finds them."""

from __future__ import annotations

from crosswire.wire.registry import PROTOCOL_NAMES, protocol

__all__ = ["PROTOCOL_NAMES", "protocol"]
