"""Bond's types as objects: fields, structs, enumerations, services, and modules of them.

A type is one of

    PrimitiveType     bool, the integers, float, double, string, wstring
    BlobType          blob
    ListType          list<T>, vector<T>
    SetType, MapType  set<T>, map<K, T>
    NullableType      nullable<T>
    BondedType        bonded<T>
    EnumDef           an enumeration; an int32 on the wire
    StructDef         a struct, or an instance of a generic one

and has these attributes: its tag on the wire (`wire`), its spelling in a .bond file (`text`), the
value of a field that is not set (`initial`), the annotation of such a field in Python
(`annotation`), and the number of values that `initial` counts as (`weight`). `idl` makes types from
.bond files, `schemadef` from marshalled `bond.SchemaDef`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from crosswire.bond.classes import make_enum, make_struct, set_python_names
from crosswire.bond.datatypes import DEFAULT_LIMITS, NOTHING, DataType, DecodeLimits, Modifier
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


# A struct with more values than this when it is empty can only be an attack.
MAX_EMPTY_VALUES: Final = 1_000_000
# How many bases a struct may derive through.
MAX_LEVELS: Final = 64


# ----------------------------------------------------------------------------------------- types


class PrimitiveType(msgspec.Struct, frozen=True):
    """A number, a truth value or a text. `minimum` and `maximum` bound the integers."""

    text: str
    wire: DataType
    start: bool | int | float | str
    minimum: int = 0
    maximum: int = -1
    weight: ClassVar[int] = 1

    @property
    def annotation(self) -> Any:
        """bool, int, float or str."""
        return type(self.start)

    def initial(self) -> Any:
        """False, zero or empty."""
        return self.start

    @property
    def is_integer(self) -> bool:
        """Whether it is one of the eight integer types."""
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

    annotation: ClassVar[Any] = bytes

    def initial(self) -> bytes:
        """No bytes."""
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
        """`list<T>` or `vector<T>`."""
        return f"{self.word}<{self.element.text}>"

    @property
    def annotation(self) -> Any:
        """A list."""
        made: Any = list[self.element.annotation]  # type: ignore[name-defined]  # made at run time
        return made

    def initial(self) -> list[Any]:
        """A new empty list."""
        return []


class SetType(msgspec.Struct, frozen=True, eq=False):
    """`set<T>`."""

    element: Type
    wire: ClassVar[DataType] = DataType.SET
    weight: ClassVar[int] = 4

    @property
    def text(self) -> str:
        """`set<T>`."""
        return f"set<{self.element.text}>"

    @property
    def annotation(self) -> Any:
        """An OrderedSet."""
        made: Any = OrderedSet[self.element.annotation]  # type: ignore[name-defined]  # made at run time
        return made

    def initial(self) -> OrderedSet[Any]:
        """A new empty set."""
        return OrderedSet()


class MapType(msgspec.Struct, frozen=True, eq=False):
    """`map<K, T>`."""

    key: Type
    element: Type
    wire: ClassVar[DataType] = DataType.MAP
    weight: ClassVar[int] = 2

    @property
    def text(self) -> str:
        """`map<K, T>`."""
        return f"map<{self.key.text}, {self.element.text}>"

    @property
    def annotation(self) -> Any:
        """A dict."""
        made: Any = dict[self.key.annotation, self.element.annotation]  # type: ignore[name-defined]  # made at run time
        return made

    def initial(self) -> dict[Any, Any]:
        """A new empty dict."""
        return {}


class NullableType(msgspec.Struct, frozen=True, eq=False):
    """A value or None; a list of one or none on the wire."""

    element: Type
    wire: ClassVar[DataType] = DataType.LIST
    weight: ClassVar[int] = 1

    @property
    def text(self) -> str:
        """`nullable<T>`."""
        return f"nullable<{self.element.text}>"

    @property
    def annotation(self) -> Any:
        """The element's, or None."""
        return self.element.annotation | None

    def initial(self) -> None:
        """None."""
        return


class BondedType(msgspec.Struct, frozen=True, eq=False):
    """A struct that is decoded on demand; it may be of a derived type."""

    struct: StructDef
    wire: ClassVar[DataType] = DataType.STRUCT
    weight: ClassVar[int] = 4

    annotation: ClassVar[Any] = Bonded

    @property
    def text(self) -> str:
        """`bonded<T>`."""
        return f"bonded<{self.struct.text}>"

    def initial(self) -> Bonded:
        """With a struct whose fields are all at their defaults."""
        return Bonded.empty(self.struct)


class EnumDef:
    """An enumeration. Values without a name are allowed, as in Bond."""

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
        # Of two names for one value the first is used, as in Python's enumerations.
        self.members: dict[int, IntEnum] = {each.value: each for each in self.python_class}

    @property
    def text(self) -> str:
        """Its full name."""
        return self.full_name

    @property
    def annotation(self) -> Any:
        """The IntEnum, or an int without a name."""
        return self.python_class | int

    def initial(self) -> int:
        """The constant 0, or the number if there is none."""
        return self.members.get(0, 0)

    def name_of(self, value: int) -> str | None:
        """The constant's name in the .bond file, None if the value has none."""
        for name, number in self.by_name.items():
            if number == value:
                return name
        return None

    @property
    def python_class(self) -> type[IntEnum]:
        """An IntEnum; an underscore is appended to names that Python reserves."""
        if self._class is None:
            self._class = make_enum(self.name, self.by_name, module=self.namespace or "bond")
        return self._class

    def __repr__(self) -> str:
        return f"<enum {self.full_name}>"


class FieldDef:
    """A field. It is omitted if it has the value `default`; a new struct has `initial()`."""

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
        """Whether decoding fails if the field is missing."""
        return self.modifier is Modifier.REQUIRED

    @property
    def may_be_omitted(self) -> bool:
        """Whether it is omitted at its default: optional fields are, but never structs."""
        return self.modifier is Modifier.OPTIONAL and self.type.wire is not DataType.STRUCT

    @property
    def json_name(self) -> str:
        """The attribute JsonName, or the field's name."""
        return self.attributes.get("JsonName", self.name)

    def initial(self) -> Any:
        """The value in a new struct; None for `nothing`."""
        if self.default is NOTHING:
            return None
        if self.start is not None:
            return self.start
        return self.type.initial() if self.default is None else self.default

    @property
    def annotation(self) -> Any:
        """Of the attribute in the Python class."""
        hint = self.type.annotation
        return hint | None if self.default is NOTHING else hint

    @property
    def class_default(self) -> Any:
        """Of the attribute in the Python class: mutable values are made for each instance."""
        kind = self.type
        if self.default is NOTHING or isinstance(kind, NullableType):
            return None
        if isinstance(kind, PrimitiveType | EnumDef | BlobType):
            return self.initial()
        return msgspec.field(default_factory=kind.initial)

    def __repr__(self) -> str:
        return f"<field {self.id}: {self.type.text} {self.name}>"


# Structs whose class is being made. Structs may refer to each other in a circle, and deeply: an
# annotation in it is Any then, since it can't be made before the class.
_making: set[StructDef] = set()
_MAX_MAKING: Final = 50


class StructDef:
    """A struct. `complete` sets its fields later, since structs may refer to themselves."""

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
        """Set the fields, in any order, and the base. Raises BondSchemaError."""
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
        set_python_names(self.fields, taken={field.python_name for field in inherited})
        self.all_fields = inherited + self.fields
        self.is_complete = True
        return self

    @property
    def text(self) -> str:
        """Its full name."""
        return self.full_name

    @property
    def levels(self) -> tuple[StructDef, ...]:
        """The bases and the struct, the root first: their order on the wire."""
        found = [self]
        while found[-1].base is not None:
            found.append(found[-1].base)
        return tuple(reversed(found))

    @property
    def weight(self) -> int:
        """How many values an empty one consists of; finite after `check_structs`."""
        if not self._weight:
            self._weight = 1 + sum(field.type.weight for field in self.all_fields)
        return self._weight

    @property
    def python_class(self) -> type[Any]:
        """A slotted class: keyword constructor, defaults, `==`, `repr`; derives as Bond does."""
        if self._class is None:
            base = None if self.base is None else self.base.python_class
            _making.add(self)
            try:
                fields = [
                    (each.python_name, each.annotation, each.class_default) for each in self.fields
                ]
            finally:
                _making.discard(self)
            self._class = make_struct(self, fields, base=base)
        return self._class

    @property
    def annotation(self) -> Any:
        """The Python class, or Any while that is being made."""
        return Any if self in _making or len(_making) > _MAX_MAKING else self.python_class

    def initial(self) -> Any:
        """A new instance, with all fields at their defaults."""
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


def check_structs(structs: Iterable[StructDef], done: set[StructDef] | None = None) -> None:
    """Raises BondSchemaError for structs that contain themselves, or are huge when empty.

    Structs in `done` are not checked again; those that are checked are added to it.
    """
    done = set() if done is None else done
    for root in structs:
        # Depth-first, without recursion, which a schema from a peer could drive: the path from the
        # root, each struct with an iterator over the structs that it contains.
        path: dict[StructDef, Iterator[StructDef]] = {}
        if root not in done:
            path[root] = _contained(root)
        while path:
            struct, contained = next(reversed(path.items()))
            inner = next(contained, None)
            if inner is None:
                path.popitem()
                done.add(struct)
                if struct.weight > MAX_EMPTY_VALUES:
                    raise BondSchemaError(f"struct {struct.full_name} is too large even when empty")
            elif inner in path:
                raise BondSchemaError(f"struct {inner.full_name} contains itself")
            elif inner not in done:
                path[inner] = _contained(inner)


def _contained(struct: StructDef) -> Iterator[StructDef]:
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
        """Whether it is one-way."""
        return self.response is None


class ServiceDef(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A service and its methods by name, including those of a base service."""

    name: str
    full_name: str
    methods: dict[str, MethodDef]
    attributes: dict[str, str]

    def method(self, name: str) -> MethodDef:
        """The method of that name. Raises BondSchemaError."""
        try:
            return self.methods[name]
        except KeyError:
            raise BondSchemaError(f"service {self.full_name} has no method {name}") from None


class Module:
    """The declarations of .bond files and their imports, by full name (`examples.calc.Params`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.structs: dict[str, StructDef] = {}
        self.enums: dict[str, EnumDef] = {}
        self.services: dict[str, ServiceDef] = {}
        self.instantiate: Callable[[str], Type] | None = None  # set by `idl`, for generics

    def struct(self, name: str) -> StructDef:
        """A struct, or an instance of a generic one: `bond.Box<int32>`. Raises BondSchemaError."""
        struct = self.structs.get(name)
        if struct is not None:
            return struct
        found = self.instantiate(name) if self.instantiate and "<" in name else None
        if not isinstance(found, StructDef):
            raise BondSchemaError(f"{self.name} has no struct {name}")
        return found

    def service(self, name: str) -> ServiceDef:
        """A service, but not a generic one. Raises BondSchemaError."""
        try:
            return self.services[name]
        except KeyError:
            raise BondSchemaError(f"{self.name} has no service {name}") from None

    def enum(self, name: str) -> EnumDef:
        """An enumeration. Raises BondSchemaError."""
        try:
            return self.enums[name]
        except KeyError:
            raise BondSchemaError(f"{self.name} has no enum {name}") from None

    def __repr__(self) -> str:
        return f"<module {self.name}>"
