"""Decodes and encodes the content of `Bonded` values, in all three encodings.

`crosswire.bond` imports it, so that every Bonded has its codec.
"""

from __future__ import annotations

from typing import Any, Final

from crosswire.bond import binary
from crosswire.bond.compact import COMPACT1, COMPACT2
from crosswire.bond.dialect import Dialect
from crosswire.bond.fast import FAST
from crosswire.bond.schema import DEFAULT_LIMITS, StructDef
from crosswire.bond.values import Bonded
from crosswire.errors import BondDecodeError

__all__ = ["DIALECTS", "BinaryBondedCodec"]

DIALECTS: Final[dict[str, Dialect]] = {each.name: each for each in (FAST, COMPACT1, COMPACT2)}
"""All encodings, by the name that a Bonded has."""


class BinaryBondedCodec:
    """`Bonded.decode` and `Bonded.encode`."""

    def decode(self, bonded: Bonded, struct: StructDef | None) -> Any:
        """The struct, read as `struct` or as declared. Raises BondDecodeError."""
        struct = struct or bonded.struct
        if struct is None:
            raise BondDecodeError("a bonded of an unknown struct")
        if bonded.data is not None:
            dialect = DIALECTS[bonded.encoding]
            return binary.decode(dialect, bonded.data, struct, DEFAULT_LIMITS)[0]
        value = bonded.value
        if value is None:
            assert bonded.struct is not None
            value = bonded.struct.python_class()
        if isinstance(value, struct.python_class):
            return value
        # As another struct: through its bytes, as Bond casts.
        return binary.decode(FAST, self.encode(bonded, FAST.name), struct, DEFAULT_LIMITS)[0]

    def encode(self, bonded: Bonded, encoding: str, depth: int = DEFAULT_LIMITS.depth) -> bytes:
        """By schema from a value; from bytes in another encoding through a tree, which keeps
        fields that the schema does not have. Raises BondEncodeError, BondDecodeError."""
        dialect = DIALECTS[encoding]
        if bonded.data is None:
            assert bonded.struct is not None
            value = bonded.value if bonded.value is not None else bonded.struct.python_class()
            return binary.encode(dialect, value, bonded.struct, depth)
        if bonded.encoding == encoding:
            return bonded.data
        source = DIALECTS[bonded.encoding]
        tree, _ = binary.decode_tree(source, bonded.data, DEFAULT_LIMITS)
        return binary.encode_tree(dialect, tree, depth)


Bonded.codec = BinaryBondedCodec()
