"""What all binary encodings share: encode and decode by schema or as a tree, with errors mapped."""

from __future__ import annotations

from struct import error as StructError  # noqa: N812 - it is a class
from typing import Any, Final, TypeAlias

from crosswire.bond import codegen
from crosswire.bond.dialect import Dialect
from crosswire.bond.explain import explain
from crosswire.bond.schema import DEFAULT_LIMITS, DecodeLimits, StructDef
from crosswire.bond.tree import TreeStruct, read_tree, write_tree
from crosswire.bond.values import Bonded
from crosswire.errors import BondDecodeError, BondEncodeError

__all__ = [
    "DIALECTS",
    "Buffer",
    "decode",
    "decode_bonded",
    "decode_tree",
    "dialect_named",
    "encode",
    "encode_bonded",
    "encode_tree",
    "register",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

DIALECTS: Final[dict[str, Dialect]] = {}

# What generated and plain Python code raises for a value of the wrong kind or size.
_VALUE_ERRORS: Final = (
    AttributeError,
    KeyError,
    OverflowError,
    StructError,
    TypeError,
    ValueError,
)


def register(dialect: Dialect) -> None:
    DIALECTS[dialect.name] = dialect


def dialect_named(name: str) -> Dialect:
    """`fast`, `compact` or `compact2`: a bonded may hold one that nobody has imported yet."""
    if name not in DIALECTS:
        from crosswire.bond import compact, fast

        for each in (fast.FAST, compact.COMPACT1, compact.COMPACT2):
            register(each)
    return DIALECTS[name]


def encode(
    dialect: Dialect, value: Any, struct: StructDef, depth: int = DEFAULT_LIMITS.depth
) -> bytes:
    out = bytearray()
    try:
        codegen.encoder(dialect, struct)(out, value, depth)
    except _VALUE_ERRORS as error:
        raise explain(value, struct, error) from error
    return bytes(out)


def decode(
    dialect: Dialect, data: Buffer, struct: StructDef, limits: DecodeLimits
) -> tuple[Any, int]:
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
    out = bytearray()
    try:
        write_tree(dialect, out, tree, depth)
    except _VALUE_ERRORS as error:
        raise BondEncodeError(f"a tree that is none: {error}") from error
    return bytes(out)


def decode_tree(dialect: Dialect, data: Buffer, limits: DecodeLimits) -> tuple[TreeStruct, int]:
    if not isinstance(data, bytes):
        data = bytes(data)
    try:
        return read_tree(dialect, data, 0, len(data), limits.depth, [limits.values])
    except (IndexError, StructError):
        raise BondDecodeError("ends in the middle of a struct", offset=len(data)) from None
    except UnicodeDecodeError as error:
        raise BondDecodeError(f"a text that is not {error.encoding}") from None


# ---------------------------------------------------------------------------------------- bonded


def decode_bonded(bonded: Bonded, struct: StructDef | None) -> Any:
    """What `Bonded.decode` gives."""
    struct = struct or bonded.struct
    if struct is None:
        raise BondDecodeError("a bonded of an unknown struct")
    if bonded.data is not None:
        return decode(dialect_named(bonded.encoding), bonded.data, struct, DEFAULT_LIMITS)[0]
    value = bonded.value
    if value is None:
        assert bonded.struct is not None
        value = bonded.struct.python_class()
    if isinstance(value, struct.python_class):
        return value
    # Another view of it: through the wire, as Bond casts.
    dialect = dialect_named("fast")
    return decode(dialect, encode_bonded(bonded, "fast"), struct, DEFAULT_LIMITS)[0]


def encode_bonded(bonded: Bonded, encoding: str, depth: int = DEFAULT_LIMITS.depth) -> bytes:
    """What `Bonded.encode` gives: by schema from a value, through a tree from other bytes."""
    dialect = dialect_named(encoding)
    if bonded.data is None:
        assert bonded.struct is not None
        value = bonded.value if bonded.value is not None else bonded.struct.python_class()
        return encode(dialect, value, bonded.struct, depth)
    if bonded.encoding == encoding:
        return bonded.data
    tree, _ = decode_tree(dialect_named(bonded.encoding), bonded.data, DEFAULT_LIMITS)
    return encode_tree(dialect, tree, depth)
