"""Marshalled Bond: two bytes of magic and two of version before a struct identify its encoding."""

from __future__ import annotations

from typing import Any, Final

from crosswire.bond import binary, compact, fast
from crosswire.bond.binary import Buffer
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import DEFAULT_LIMITS, DecodeLimits, StructDef
from crosswire.bond.tree import TreeStruct
from crosswire.errors import BondDecodeError

__all__ = [
    "COMPACT_V1",
    "COMPACT_V2",
    "FAST_V1",
    "marshal",
    "marshal_tree",
    "protocol_of",
    "transcode",
    "unmarshal",
    "unmarshal_tree",
]

FAST_V1: Final[Dialect] = fast.FAST
COMPACT_V1: Final[Dialect] = compact.COMPACT1
COMPACT_V2: Final[Dialect] = compact.COMPACT2

_BY_MAGIC: Final = {each.magic: each for each in (FAST_V1, COMPACT_V1, COMPACT_V2)}
_MAGIC_BYTES: Final = 4


def protocol_of(data: Buffer) -> Dialect:
    """The encoding of `data`. Raises BondDecodeError for an unknown magic or version."""
    found = _BY_MAGIC.get(bytes(data[:_MAGIC_BYTES]))
    if found is None:
        start = bytes(data[:_MAGIC_BYTES]).hex(" ") or "nothing"
        raise BondDecodeError(f"not marshalled Bond: starts with {start}", offset=0)
    return found


def marshal(value: Any, struct: StructDef, *, protocol: Dialect = COMPACT_V1) -> bytes:
    """Magic, version and the bytes of a struct. Raises BondEncodeError."""
    return protocol.magic + binary.encode(protocol, value, struct)


def unmarshal(data: Buffer, struct: StructDef, *, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """A `struct.python_class`. Bytes after the struct are ignored. Raises BondDecodeError."""
    return binary.decode(protocol_of(data), data[_MAGIC_BYTES:], struct, limits)[0]


def marshal_tree(tree: TreeStruct, *, protocol: Dialect = COMPACT_V1) -> bytes:
    """`marshal`, for a struct without its schema. Raises BondEncodeError."""
    return protocol.magic + binary.encode_tree(protocol, tree)


def unmarshal_tree(data: Buffer, *, limits: DecodeLimits = DEFAULT_LIMITS) -> TreeStruct:
    """A struct without its schema. Raises BondDecodeError."""
    return binary.decode_tree(protocol_of(data), data[_MAGIC_BYTES:], limits)[0]


def transcode(data: Buffer, *, protocol: Dialect, limits: DecodeLimits = DEFAULT_LIMITS) -> bytes:
    """The same struct, marshalled in another encoding, without its schema and without loss.

    Raises BondDecodeError.
    """
    if protocol_of(data) is protocol:
        return bytes(data)
    return marshal_tree(unmarshal_tree(data, limits=limits), protocol=protocol)
