"""Encoding and decoding in any binary encoding, by schema or as a tree.

Turns what generated code raises into BondEncodeError and BondDecodeError.
"""

from __future__ import annotations

from struct import error as StructError  # noqa: N812 - it is a class
from typing import Any, Final, TypeAlias

from crosswire.bond import codegen
from crosswire.bond.dialect import Dialect
from crosswire.bond.explain import explain
from crosswire.bond.schema import DEFAULT_LIMITS, DecodeLimits, StructDef
from crosswire.bond.tree import TreeStruct, read_tree, write_tree
from crosswire.errors import BondDecodeError, BondEncodeError

__all__ = [
    "Buffer",
    "decode",
    "decode_tree",
    "encode",
    "encode_tree",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

# What generated and plain Python code raises for a value of the wrong kind or size.
_VALUE_ERRORS: Final = (
    AttributeError,
    KeyError,
    OverflowError,
    StructError,
    TypeError,
    ValueError,
)


def encode(
    dialect: Dialect, value: Any, struct: StructDef, depth: int = DEFAULT_LIMITS.depth
) -> bytes:
    """The bytes of a struct. Raises BondEncodeError."""
    out = bytearray()
    try:
        codegen.encoder(dialect, struct)(out, value, depth)
    except _VALUE_ERRORS as error:
        raise explain(value, struct, error) from error
    return bytes(out)


def decode(
    dialect: Dialect, data: Buffer, struct: StructDef, limits: DecodeLimits
) -> tuple[Any, int]:
    """A `struct.python_class`, and the number of bytes that it took. Raises BondDecodeError."""
    decoder = codegen.decoder(dialect, struct)
    if not isinstance(data, bytes):
        data = bytes(data)
    try:
        return decoder(data, 0, len(data), limits.depth, [limits.values])
    except (IndexError, StructError):
        raise BondDecodeError("ends in the middle of a struct", offset=len(data)) from None
    except UnicodeDecodeError as error:
        raise BondDecodeError(f"a text that is not {error.encoding}") from None


def encode_tree(dialect: Dialect, tree: TreeStruct, depth: int = DEFAULT_LIMITS.depth) -> bytes:
    """The bytes of a tree. Raises BondEncodeError."""
    out = bytearray()
    try:
        write_tree(dialect, out, tree, depth)
    except _VALUE_ERRORS as error:
        raise BondEncodeError(f"not a tree: {error}") from error
    return bytes(out)


def decode_tree(dialect: Dialect, data: Buffer, limits: DecodeLimits) -> tuple[TreeStruct, int]:
    """A struct without its schema, and the number of bytes that it took. Raises BondDecodeError."""
    if not isinstance(data, bytes):
        data = bytes(data)
    try:
        return read_tree(dialect, data, 0, len(data), limits.depth, [limits.values])
    except (IndexError, StructError):
        raise BondDecodeError("ends in the middle of a struct", offset=len(data)) from None
    except UnicodeDecodeError as error:
        raise BondDecodeError(f"a text that is not {error.encoding}") from None
