"""Constants of Bond: tags on the wire, modifiers of fields, and limits of decoding."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

__all__ = ["DEFAULT_LIMITS", "NOTHING", "DataType", "DecodeLimits", "Modifier"]


class DecodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of decoding one message.

    `depth` counts structs and containers inside each other. `values` counts the values in
    containers: a number or text is 1, a struct 1 and the sum of its fields, so that a list of
    one-byte structs does not become gigabytes of Python objects. An unknown field counts 8: it is
    skipped, which takes time, too.
    """

    depth: int = 64
    values: int = 4 * 1024 * 1024


DEFAULT_LIMITS: Final = DecodeLimits()


class DataType(IntEnum):
    """The tags of Bond's binary protocols (BondDataType)."""

    STOP = 0
    STOP_BASE = 1
    BOOL = 2
    UINT8 = 3
    UINT16 = 4
    UINT32 = 5
    UINT64 = 6
    FLOAT = 7
    DOUBLE = 8
    STRING = 9
    STRUCT = 10
    LIST = 11
    SET = 12
    MAP = 13
    INT8 = 14
    INT16 = 15
    INT32 = 16
    INT64 = 17
    WSTRING = 18


class Modifier(IntEnum):
    """Whether a field is always written, and must be present when read (bond.Modifier)."""

    OPTIONAL = 0
    REQUIRED = 1
    REQUIRED_OPTIONAL = 2


class _Nothing:
    """The default of a field that is declared `= nothing`: absent until it is set."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING: Final = _Nothing()
