"""The Python values that Bond needs and Python has not: sets that keep order, unread structs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from crosswire.errors import BondEncodeError

if TYPE_CHECKING:
    from crosswire.bond.schema import StructDef

__all__ = ["Bonded", "OrderedSet"]

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
        self._items[value] = None

    def discard(self, value: Item) -> None:
        self._items.pop(value, None)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._items)!r})"


class Bonded:
    """A struct that is read when it is asked for: `bonded<T>`.

    Made by decoding, then it holds bytes, which may be of a struct derived from T; or by a caller
    from a value. Two are equal when they write the same fields, whatever their encoding.
    """

    __slots__ = ("_data", "_encoding", "_struct", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._struct: StructDef | None = getattr(value, "__bond_struct__", None)
        if self._struct is None:
            raise BondEncodeError(f"a bonded must hold a Bond struct, not {type(value).__name__}")
        self._data: bytes | None = None
        self._encoding = ""

    @classmethod
    def empty(cls, struct: StructDef) -> Bonded:
        """One that holds a `struct` with all fields at their defaults."""
        bonded = cls.__new__(cls)
        bonded._value = None
        bonded._struct = struct
        bonded._data = None
        bonded._encoding = ""
        return bonded

    @classmethod
    def from_bytes(cls, data: bytes, encoding: str, struct: StructDef | None = None) -> Bonded:
        """From a struct's bytes; `encoding` is `fast`, `compact` or `compact2`."""
        bonded = cls.__new__(cls)
        bonded._value = None
        bonded._struct = struct
        bonded._data = data
        bonded._encoding = encoding
        return bonded

    @property
    def value(self) -> Any:
        """The value that it was made from, or None."""
        return self._value

    @property
    def data(self) -> bytes | None:
        """The bytes as they came, or None if it was made from a value."""
        return self._data

    @property
    def encoding(self) -> str:
        """What `data` is encoded in."""
        return self._encoding

    @property
    def struct(self) -> StructDef | None:
        """What the schema declares it to hold, or what the value is."""
        return self._struct

    def decode(self, struct: StructDef | None = None) -> Any:
        """The struct it holds, read as `struct` (unless given: as declared).

        Raises BondDecodeError.
        """
        from crosswire.bond import binary

        return binary.decode_bonded(self, struct)

    def encode(self, encoding: str, *, depth: int = 64) -> bytes:
        """Its bytes in another encoding, fields that no schema knows included."""
        from crosswire.bond import binary

        return binary.encode_bonded(self, encoding, depth)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bonded):
            return NotImplemented
        if self._data is not None and (self._data, self._encoding) == (
            other._data,
            other._encoding,
        ):
            return True
        return self.encode("compact") == other.encode("compact")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        name = self._struct.full_name if self._struct is not None else "?"
        if self._data is not None:
            return f"Bonded(<{name}, {len(self._data)} bytes>)"
        return f"Bonded({name if self._value is None else self._value!r})"
