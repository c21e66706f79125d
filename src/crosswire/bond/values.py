"""Values that Python lacks: sets that keep their order, structs that are decoded on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from crosswire.errors import BondEncodeError

__all__ = ["Bonded", "BondedCodec", "OrderedSet"]

Item = TypeVar("Item")


class OrderedSet(MutableSet[Item], Generic[Item]):
    """A set that keeps the order in which it was filled, so that it is written as it was read.

    Equal to any set with the same members. Plain sets are accepted wherever this is; they are
    written in ascending order, as C++ does.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._items: dict[Item, None] = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: Item) -> None:
        """Add an item at the end; one that is in the set keeps its position."""
        self._items[value] = None

    def discard(self, value: Item) -> None:
        """Remove an item, if it is in the set."""
        self._items.pop(value, None)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._items)!r})"


class BondedCodec(Protocol):
    """Decodes and encodes the content of a Bonded; `bonded.py` has the implementation.

    A struct's schema leads to values, and values to the codecs, which need schemas: this is where
    the circle is cut. Structs are `schema.StructDef`s, which can't be named here.
    """

    def decode(self, bonded: Bonded, struct: Any) -> Any:
        """The struct, read as `struct` or, if that is None, as declared."""

    def encode(self, bonded: Bonded, encoding: str, depth: int) -> bytes:
        """The struct's bytes in `encoding`."""


class Bonded:
    """A struct that is decoded on demand: `bonded<T>`.

    Decoding creates it from bytes, which may be of a struct derived from T; a caller creates it
    from a value. Two are equal if they encode to the same fields, independent of their encoding.
    """

    __slots__ = ("_data", "_encoding", "_struct", "_value")
    codec: ClassVar[BondedCodec]

    def __init__(self, value: Any) -> None:
        self._value = value
        self._struct: Any = getattr(value, "__bond_struct__", None)
        if self._struct is None:
            raise BondEncodeError(f"a bonded must hold a Bond struct, not {type(value).__name__}")
        self._data: bytes | None = None
        self._encoding = ""

    @classmethod
    def empty(cls, struct: Any) -> Bonded:
        """With a `struct` that has all fields at their defaults."""
        bonded = cls.__new__(cls)
        bonded._value = None
        bonded._struct = struct
        bonded._data = None
        bonded._encoding = ""
        return bonded

    @classmethod
    def from_bytes(cls, data: bytes, encoding: str, struct: Any = None) -> Bonded:
        """With a struct's bytes; `encoding` is `fast`, `compact` or `compact2`."""
        bonded = cls.__new__(cls)
        bonded._value = None
        bonded._struct = struct
        bonded._data = data
        bonded._encoding = encoding
        return bonded

    @property
    def value(self) -> Any:
        """The value that it was created from, or None."""
        return self._value

    @property
    def data(self) -> bytes | None:
        """The bytes as they were received, or None if it was created from a value."""
        return self._data

    @property
    def encoding(self) -> str:
        """The encoding of `data`; empty if there is none."""
        return self._encoding

    @property
    def struct(self) -> Any:
        """The StructDef that the schema declares, or that of the value; None if unknown."""
        return self._struct

    def decode(self, struct: Any = None) -> Any:
        """The struct, read as the StructDef `struct` (default: as declared).

        Raises BondDecodeError.
        """
        return self.codec.decode(self, struct)

    def encode(self, encoding: str, *, depth: int = 64) -> bytes:
        """Its bytes in an encoding, including fields that the schema does not have."""
        return self.codec.encode(self, encoding, depth)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bonded):
            return NotImplemented
        if self._data is not None and (self._data, self._encoding) == (
            other._data,
            other._encoding,
        ):
            return True
        return self.encode("compact") == other.encode("compact")

    __hash__ = None  # type: ignore[assignment]  # how Python declares what can't be hashed

    def __repr__(self) -> str:
        name = self._struct.full_name if self._struct is not None else "?"
        if self._data is not None:
            return f"Bonded(<{name}, {len(self._data)} bytes>)"
        return f"Bonded({name if self._value is None else self._value!r})"
