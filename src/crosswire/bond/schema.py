"""Bond's types as objects: what a field is, what a struct holds, what a service offers.

A type is one of

    PrimitiveType     bool, the integers, float, double, string, wstring
    BlobType          blob
    ListType          list<T>, vector<T>
    SetType, MapType  set<T>, map<K, T>
    NullableType      nullable<T>
    BondedType        bonded<T>
    EnumDef           an enumeration; an int32 on the wire
    StructDef         a struct, or an instance of a generic one

and knows its tag on the wire (`wire`), its spelling in a .bond file (`text`) and the value that a
field of it starts with (`initial`). `idl` makes them from .bond files, `schemadef` from marshalled
`bond.SchemaDef`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from crosswire.bond.values import Bonded, OrderedSet
from crosswire.errors import BondSchemaError

__all__ = [
    "BLOB",
    "DEFAULT_LIMITS",
    "NOTHING",
    "PRIMITIVES",
    "VOID",
    "BlobType",
    "BondedType",
    "DataType",
    "DecodeLimits",
    "EnumDef",
    "FieldDef",
    "ListType",
    "MapType",
    "MethodDef",
    "Modifier",
    "Module",
    "NullableType",
    "PrimitiveType",
    "ServiceDef",
    "SetType",
    "StructDef",
    "Type",
    "check_structs",
]


class DecodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding may cost, whoever sent the bytes.

    `depth` counts structs and containers inside each other. `values` counts what containers hold,
    in one message: a number or text is 1, a struct 1 and what its fields are, so that no run of
    one-byte structs becomes gigabytes of Python objects.
    """

    depth: int = 64
    values: int = 4 * 1024 * 1024


DEFAULT_LIMITS: Final = DecodeLimits()

# A struct that is larger than this when empty can only be a trap.
MAX_EMPTY_VALUES: Final = 1_000_000


# How long a line of bases may be.
MAX_LEVELS: Final = 64


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
    """When a field is written and whether it must be there (bond.Modifier)."""

    OPTIONAL = 0
    REQUIRED = 1
    REQUIRED_OPTIONAL = 2


class _Nothing:
    """The default of a field that is declared `= nothing`: not there until somebody sets it."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING: Final = _Nothing()


# ----------------------------------------------------------------------------------------- types


class PrimitiveType(msgspec.Struct, frozen=True):
    """A number, a truth value or a text. `minimum` and `maximum` bound the integers."""

    text: str
    wire: DataType
    start: bool | int | float | str
    minimum: int = 0
    maximum: int = -1
    weight: ClassVar[int] = 1

    def initial(self) -> Any:
        return self.start

    @property
    def is_integer(self) -> bool:
        return self.maximum > 0


def _integer(text: str, wire: DataType, *, bits: int, signed: bool) -> PrimitiveType:
    if signed:
        return PrimitiveType(text, wire, 0, -(1 << bits - 1), (1 << bits - 1) - 1)
    return PrimitiveType(text, wire, 0, 0, (1 << bits) - 1)


PRIMITIVES: Final[Mapping[str, PrimitiveType]] = {
    each.text: each
    for each in (
        PrimitiveType("bool", DataType.BOOL, False),
        _integer("uint8", DataType.UINT8, bits=8, signed=False),
        _integer("uint16", DataType.UINT16, bits=16, signed=False),
        _integer("uint32", DataType.UINT32, bits=32, signed=False),
        _integer("uint64", DataType.UINT64, bits=64, signed=False),
        PrimitiveType("float", DataType.FLOAT, 0.0),
        PrimitiveType("double", DataType.DOUBLE, 0.0),
        PrimitiveType("string", DataType.STRING, ""),
        _integer("int8", DataType.INT8, bits=8, signed=True),
        _integer("int16", DataType.INT16, bits=16, signed=True),
        _integer("int32", DataType.INT32, bits=32, signed=True),
        _integer("int64", DataType.INT64, bits=64, signed=True),
        PrimitiveType("wstring", DataType.WSTRING, ""),
    )
}


class BlobType:
    """Bytes; a list of int8 on the wire."""

    __slots__ = ()
    text: ClassVar[str] = "blob"
    wire: ClassVar[DataType] = DataType.LIST
    weight: ClassVar[int] = 2

    def initial(self) -> bytes:
        return b""


BLOB: Final = BlobType()


class ListType(msgspec.Struct, frozen=True, eq=False):
    """`list<T>` and `vector<T>`, which differ in name only."""

    element: Type
    word: str = "list"
    wire: ClassVar[DataType] = DataType.LIST
    weight: ClassVar[int] = 2

    @property
    def text(self) -> str:
        return f"{self.word}<{self.element.text}>"

    def initial(self) -> list[Any]:
        return []


class SetType(msgspec.Struct, frozen=True, eq=False):
    element: Type
    wire: ClassVar[DataType] = DataType.SET
    weight: ClassVar[int] = 4

    @property
    def text(self) -> str:
        return f"set<{self.element.text}>"

    def initial(self) -> OrderedSet[Any]:
        return OrderedSet()


class MapType(msgspec.Struct, frozen=True, eq=False):
    key: Type
    element: Type
    wire: ClassVar[DataType] = DataType.MAP
    weight: ClassVar[int] = 2

    @property
    def text(self) -> str:
        return f"map<{self.key.text}, {self.element.text}>"

    def initial(self) -> dict[Any, Any]:
        return {}


class NullableType(msgspec.Struct, frozen=True, eq=False):
    """A value or None; a list of one or none on the wire."""

    element: Type
    wire: ClassVar[DataType] = DataType.LIST
    weight: ClassVar[int] = 1

    @property
    def text(self) -> str:
        return f"nullable<{self.element.text}>"

    def initial(self) -> None:
        return None


class BondedType(msgspec.Struct, frozen=True, eq=False):
    """A struct that stays as it came until it is asked for; it may be of a derived type."""

    struct: StructDef
    wire: ClassVar[DataType] = DataType.STRUCT
    weight: ClassVar[int] = 4

    @property
    def text(self) -> str:
        return f"bonded<{self.struct.text}>"

    def initial(self) -> Bonded:
        return Bonded.empty(self.struct)


class EnumDef:
    """An enumeration. Values that it does not name are allowed, as Bond allows them."""

    __slots__ = ("_class", "attributes", "by_name", "full_name", "members", "name", "namespace")
    wire: ClassVar[DataType] = DataType.INT32
    weight: ClassVar[int] = 1

    def __init__(
        self,
        name: str,
        constants: Mapping[str, int],
        *,
        namespace: str = "",
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.full_name = f"{namespace}.{name}" if namespace else name
        self.attributes = dict(attributes or {})
        self.by_name = dict(constants)
        self._class: type[IntEnum] | None = None
        # First name wins, as it does in Python's own enumerations.
        self.members: dict[int, IntEnum] = {each.value: each for each in self.python_class}

    @property
    def text(self) -> str:
        return self.full_name

    def initial(self) -> int:
        return self.members.get(0, 0)

    def name_of(self, value: int) -> str | None:
        """The constant's name as the .bond file has it."""
        for name, number in self.by_name.items():
            if number == value:
                return name
        return None

    @property
    def python_class(self) -> type[IntEnum]:
        """An IntEnum; a name that Python reserves gets an underscore behind it."""
        if self._class is None:
            from crosswire.bond.classes import make_enum

            self._class = make_enum(self)
        return self._class

    def __repr__(self) -> str:
        return f"<enum {self.full_name}>"


class FieldDef:
    """A field. `default` is what it is left out for, `initial()` what a new struct holds."""

    __slots__ = ("attributes", "default", "id", "modifier", "name", "python_name", "start", "type")

    def __init__(
        self,
        id: int,  # noqa: A002 - Bond's own word
        name: str,
        type: Type,  # noqa: A002
        *,
        modifier: Modifier = Modifier.OPTIONAL,
        default: Any = None,
        start: Any = None,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        if not 0 <= id <= 0xFFFF:
            raise BondSchemaError(f"field {name} has the id {id}, which is not in 0–65535")
        if default is NOTHING and isinstance(type, StructDef | BondedType):
            raise BondSchemaError(f"field {name} is a struct and can't be nothing")
        self.id = id
        self.name = name
        self.type = type
        self.modifier = modifier
        self.attributes = dict(attributes or {})
        self.python_name = name  # made unique and legal by StructDef.complete
        self.default = default
        self.start = start
        if default is None and isinstance(type, PrimitiveType | EnumDef):
            self.default = type.initial()

    @property
    def is_required(self) -> bool:
        return self.modifier is Modifier.REQUIRED

    @property
    def may_be_omitted(self) -> bool:
        """Only optional fields are left out, and structs never are."""
        return self.modifier is Modifier.OPTIONAL and self.type.wire is not DataType.STRUCT

    @property
    def json_name(self) -> str:
        return self.attributes.get("JsonName", self.name)

    def initial(self) -> Any:
        """What the field of a new struct holds."""
        if self.default is NOTHING:
            return None
        if self.start is not None:
            return self.start
        return self.type.initial() if self.default is None else self.default

    def __repr__(self) -> str:
        return f"<field {self.id}: {self.type.text} {self.name}>"


class StructDef:
    """A struct. Made in two steps, since structs may speak of themselves: `complete` ends it."""

    __slots__ = (
        "_class",
        "_weight",
        "all_fields",
        "attributes",
        "base",
        "codecs",
        "fields",
        "full_name",
        "is_complete",
        "name",
        "namespace",
    )
    wire: ClassVar[DataType] = DataType.STRUCT

    def __init__(
        self, name: str, *, namespace: str = "", attributes: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.full_name = f"{namespace}.{name}" if namespace else name
        self.attributes = dict(attributes or {})
        self.base: StructDef | None = None
        self.fields: tuple[FieldDef, ...] = ()
        self.all_fields: tuple[FieldDef, ...] = ()
        self.is_complete = False
        self.codecs: dict[tuple[str, str], Any] = {}  # by encoding; made by `codegen` and `json`
        self._class: type[Any] | None = None
        self._weight = 0

    def complete(self, fields: Iterable[FieldDef], base: StructDef | None = None) -> StructDef:
        """Give the struct its fields, in any order, and its base. Raises BondSchemaError."""
        from crosswire.bond.classes import python_names

        if base is not None and (base is self or not base.is_complete):
            raise BondSchemaError(f"struct {self.full_name} derives from an incomplete struct")
        self.base = base
        if len(self.levels) > MAX_LEVELS:
            raise BondSchemaError(f"struct {self.full_name} derives through too many structs")
        self.fields = tuple(sorted(fields, key=lambda field: field.id))
        ids, names = set[int](), set[str]()
        for field in self.fields:
            if field.id in ids or field.name in names:
                raise BondSchemaError(
                    f"struct {self.full_name} has field {field.id}: {field.name} twice"
                )
            ids.add(field.id)
            names.add(field.name)
        inherited = base.all_fields if base is not None else ()
        python_names(self.fields, taken={field.python_name for field in inherited})
        self.all_fields = inherited + self.fields
        self.is_complete = True
        return self

    @property
    def text(self) -> str:
        return self.full_name

    @property
    def levels(self) -> tuple[StructDef, ...]:
        """The struct and its bases, the eldest first: their order on the wire."""
        found = [self]
        while found[-1].base is not None:
            found.append(found[-1].base)
        return tuple(reversed(found))

    @property
    def weight(self) -> int:
        """How many values an empty one consists of; `check_structs` found it finite."""
        if not self._weight:
            self._weight = 1 + sum(field.type.weight for field in self.all_fields)
        return self._weight

    @property
    def python_class(self) -> type[Any]:
        """A slotted class: keyword constructor, defaults, `==`, `repr`; derives as Bond does."""
        if self._class is None:
            from crosswire.bond.classes import make_struct

            self._class = make_struct(self)
        return self._class

    def initial(self) -> Any:
        return self.python_class()

    def field(self, name: str) -> FieldDef:
        """The field of that name, here or in a base. Raises BondSchemaError."""
        for field in reversed(self.all_fields):
            if field.name == name:
                return field
        raise BondSchemaError(f"struct {self.full_name} has no field {name}")

    def __repr__(self) -> str:
        return f"<struct {self.full_name}>"


Type: TypeAlias = (
    PrimitiveType
    | BlobType
    | ListType
    | SetType
    | MapType
    | NullableType
    | BondedType
    | EnumDef
    | StructDef
)

VOID: Final = StructDef("Void", namespace="bond").complete(())


def check_structs(structs: Iterable[StructDef]) -> None:
    """Refuse structs that hold themselves, or that are huge when empty. Raises BondSchemaError."""
    done: set[StructDef] = set()
    for root in structs:
        # The way from the root, each struct with those of its fields that are still to be seen.
        way: dict[StructDef, Iterator[StructDef]] = {}
        if root not in done:
            way[root] = _held_structs(root)
        while way:
            struct, held = next(reversed(way.items()))
            inner = next(held, None)
            if inner is None:
                way.popitem()
                done.add(struct)
                if struct.weight > MAX_EMPTY_VALUES:
                    raise BondSchemaError(f"struct {struct.full_name} is too large even when empty")
            elif inner in way:
                raise BondSchemaError(f"struct {inner.full_name} holds itself")
            elif inner not in done:
                way[inner] = _held_structs(inner)


def _held_structs(struct: StructDef) -> Iterator[StructDef]:
    return (field.type for field in struct.all_fields if isinstance(field.type, StructDef))


# -------------------------------------------------------------------------------------- services


class MethodDef(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A method; `void` is `bond.Void`. An event has no response at all."""

    name: str
    request: StructDef
    response: StructDef | None
    attributes: dict[str, str]

    @property
    def is_event(self) -> bool:
        return self.response is None


class ServiceDef(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A service and its methods by name, those of a base service included."""

    name: str
    full_name: str
    methods: dict[str, MethodDef]
    attributes: dict[str, str]

    def method(self, name: str) -> MethodDef:
        """Raises BondSchemaError."""
        try:
            return self.methods[name]
        except KeyError:
            raise BondSchemaError(f"service {self.full_name} has no method {name}") from None


class Module:
    """What .bond files declare, their imports included, by full name (`examples.calc.Params`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.structs: dict[str, StructDef] = {}
        self.enums: dict[str, EnumDef] = {}
        self.services: dict[str, ServiceDef] = {}
        self.instantiate: Callable[[str], Type] | None = None  # set by `idl`, for generics

    def struct(self, name: str) -> StructDef:
        """Also an instance of a generic struct: `bond.Box<int32>`. Raises BondSchemaError."""
        struct = self.structs.get(name)
        if struct is not None:
            return struct
        found = self.instantiate(name) if self.instantiate and "<" in name else None
        if not isinstance(found, StructDef):
            raise BondSchemaError(f"{self.name} has no struct {name}")
        return found

    def service(self, name: str) -> ServiceDef:
        """Raises BondSchemaError. A generic service is none until another derives from it."""
        try:
            return self.services[name]
        except KeyError:
            raise BondSchemaError(f"{self.name} has no service {name}") from None

    def enum(self, name: str) -> EnumDef:
        """Raises BondSchemaError."""
        try:
            return self.enums[name]
        except KeyError:
            raise BondSchemaError(f"{self.name} has no enum {name}") from None

    def __repr__(self) -> str:
        return f"<module {self.name}>"
