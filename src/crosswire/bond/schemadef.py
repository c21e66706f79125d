"""Schemas as data: `bond.SchemaDef`, marshalled, read and written.

A SchemaDef has less than a .bond file. Enumerations are int32s in it, and only newer ones
distinguish nullables and blobs from lists: in older ones both are read as lists.
"""

from __future__ import annotations

from typing import Any, Final

from crosswire.bond import core_module, marshal
from crosswire.bond.binary import Buffer
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import (
    BLOB,
    DEFAULT_LIMITS,
    NOTHING,
    PRIMITIVES,
    BlobType,
    BondedType,
    DataType,
    DecodeLimits,
    EnumDef,
    FieldDef,
    ListType,
    MapType,
    Modifier,
    NullableType,
    PrimitiveType,
    SetType,
    StructDef,
    Type,
    check_structs,
)
from crosswire.errors import BondSchemaError

__all__ = ["dump", "from_value", "load", "to_value"]

MAX_TYPE_DEPTH: Final = 32
MAX_BASES: Final = 64

_NULLABLE, _BLOB = 1, 2
_BY_TAG: Final = {kind.wire: kind for kind in PRIMITIVES.values()}
_KEYS: Final = frozenset(_BY_TAG)


def load(data: Buffer, *, limits: DecodeLimits = DEFAULT_LIMITS) -> StructDef:
    """The root struct of a marshalled SchemaDef. Raises BondDecodeError, BondSchemaError."""
    return from_value(marshal.unmarshal(data, _struct("SchemaDef"), limits=limits))


def dump(
    struct: StructDef, *, protocol: Dialect = marshal.COMPACT_V1, list_sub_types: bool = False
) -> bytes:
    """The marshalled SchemaDef of a struct and all structs that it refers to.

    `list_sub_types` adds what distinguishes nullables and blobs from lists, which some peers don't
    expect.
    """
    value = to_value(struct, list_sub_types=list_sub_types)
    return marshal.marshal(value, _struct("SchemaDef"), protocol=protocol)


def _struct(name: str) -> StructDef:
    return core_module().struct(f"bond.{name}")


# --------------------------------------------------------------------------------------- reading


def from_value(value: Any) -> StructDef:
    """The root struct of a `bond.SchemaDef`. Raises BondSchemaError."""
    return _SchemaReader(value).root()


class _SchemaReader:
    def __init__(self, value: Any) -> None:
        self._value = value
        self._made = [_declare(each.metadata) for each in value.structs]

    def root(self) -> StructDef:
        for index in range(len(self._made)):
            self._complete(index, 0)
        root = self._type(self._value.root, 0)
        if not isinstance(root, StructDef):
            raise BondSchemaError(f"the root of a schema is a {root.text}, not a struct")
        check_structs(self._made)
        return root

    def _complete(self, index: int, depth: int) -> None:
        struct, source = self._made[index], self._value.structs[index]
        if struct.is_complete:
            return
        if depth > MAX_BASES:
            raise BondSchemaError(f"struct {struct.full_name} derives from itself")
        base: StructDef | None = None
        if source.base_def is not None:
            found = self._type(source.base_def, 0)
            if not isinstance(found, StructDef):
                raise BondSchemaError(f"struct {struct.full_name} derives from {found.text}")
            base = found
            self._complete(source.base_def.struct_def, depth + 1)
        struct.complete((self._field(each) for each in source.fields), base)

    def _field(self, source: Any) -> FieldDef:
        metadata = source.metadata
        kind = self._type(source.type, 0)
        try:
            modifier = Modifier(metadata.modifier)
        except ValueError:
            raise BondSchemaError(f"field {metadata.name} has an unknown modifier") from None
        return FieldDef(
            source.id,
            metadata.name,
            kind,
            modifier=modifier,
            default=_default(metadata.default_value, kind, metadata.name),
            attributes=metadata.attributes,
        )

    def _type(self, source: Any, depth: int) -> Type:
        if depth > MAX_TYPE_DEPTH:
            raise BondSchemaError("a type nested too deep")
        tag = source.id
        if tag == DataType.STRUCT:
            if source.struct_def >= len(self._made):
                raise BondSchemaError(f"a schema without a struct {source.struct_def}")
            struct = self._made[source.struct_def]
            return BondedType(struct) if source.bonded_type else struct
        if tag in _BY_TAG:
            return _BY_TAG[tag]
        if tag not in (DataType.LIST, DataType.SET, DataType.MAP) or source.element is None:
            raise BondSchemaError(f"a schema with an incomplete type {tag}")
        element = self._type(source.element, depth + 1)
        if tag == DataType.LIST:
            if source.list_sub_type == _NULLABLE:
                return NullableType(element)
            return BLOB if source.list_sub_type == _BLOB else ListType(element)
        key = element if tag == DataType.SET else self._key(source, depth)
        if not isinstance(key, PrimitiveType):
            raise BondSchemaError(f"a schema with keys of type {key.text}")
        return SetType(element) if tag == DataType.SET else MapType(key, element)

    def _key(self, source: Any, depth: int) -> Type:
        if source.key is None:
            raise BondSchemaError("a schema with a map without keys")
        return self._type(source.key, depth + 1)


def _declare(metadata: Any) -> StructDef:
    """The qualified name ends with the name, which may have dots in its type arguments."""
    qualified = metadata.qualified_name
    namespace = ""
    if qualified.endswith(f".{metadata.name}"):
        namespace = qualified[: -len(metadata.name) - 1]
    return StructDef(metadata.name, namespace=namespace, attributes=metadata.attributes)


def _default(variant: Any, kind: Type, name: str) -> Any:
    if variant.nothing:
        return NOTHING
    if not isinstance(kind, PrimitiveType):
        return None
    if kind.wire is DataType.BOOL:
        return bool(variant.uint_value)
    if kind.wire in (DataType.FLOAT, DataType.DOUBLE):
        return variant.double_value
    if kind.wire is DataType.STRING:
        return variant.string_value
    if kind.wire is DataType.WSTRING:
        return variant.wstring_value
    number = variant.int_value if kind.minimum < 0 else variant.uint_value
    if not kind.minimum <= number <= kind.maximum:
        raise BondSchemaError(f"field {name} has the default {number}, which is no {kind.text}")
    return number


# --------------------------------------------------------------------------------------- writing


def to_value(struct: StructDef, *, list_sub_types: bool = False) -> Any:
    """The `bond.SchemaDef` of a struct."""
    return _SchemaWriter(list_sub_types).schema(struct)


class _SchemaWriter:
    def __init__(self, list_sub_types: bool) -> None:
        self._list_sub_types = list_sub_types
        self._structs: dict[StructDef, int] = {}
        self._pending: list[StructDef] = []

    def schema(self, root: StructDef) -> Any:
        root_type = self._type(root)
        made: list[Any] = []
        while len(made) < len(self._pending):
            made.append(self._definition(self._pending[len(made)]))
        return _struct("SchemaDef").python_class(structs=made, root=root_type)

    def _index(self, struct: StructDef) -> int:
        if struct not in self._structs:
            self._structs[struct] = len(self._pending)
            self._pending.append(struct)
        return self._structs[struct]

    def _definition(self, struct: StructDef) -> Any:
        metadata = _struct("Metadata").python_class(
            name=struct.name, qualified_name=struct.full_name, attributes=struct.attributes
        )
        return _struct("StructDef").python_class(
            metadata=metadata,
            base_def=None if struct.base is None else self._type(struct.base),
            fields=[self._field(field) for field in struct.fields],
        )

    def _field(self, field: FieldDef) -> Any:
        metadata = _struct("Metadata").python_class(
            name=field.name,
            attributes=field.attributes,
            modifier=int(field.modifier),
            default_value=_variant(field),
        )
        return _struct("FieldDef").python_class(
            metadata=metadata, id=field.id, type=self._type(field.type)
        )

    def _type(self, kind: Type) -> Any:
        make = _struct("TypeDef").python_class
        match kind:
            case StructDef():
                return make(struct_def=self._index(kind))
            case BondedType():
                return make(struct_def=self._index(kind.struct), bonded_type=True)
            case BlobType():
                element = make(id=int(DataType.INT8))
                return make(id=int(kind.wire), element=element, list_sub_type=self._sub(_BLOB))
            case NullableType():
                element = self._type(kind.element)
                return make(id=int(kind.wire), element=element, list_sub_type=self._sub(_NULLABLE))
            case ListType() | SetType():
                return make(id=int(kind.wire), element=self._type(kind.element))
            case MapType():
                return make(
                    id=int(kind.wire), element=self._type(kind.element), key=self._type(kind.key)
                )
            case PrimitiveType() | EnumDef():
                return make(id=int(kind.wire))

    def _sub(self, sub_type: int) -> int:
        return sub_type if self._list_sub_types else 0


def _variant(field: FieldDef) -> Any:
    make = _struct("Variant").python_class
    if field.default is NOTHING:
        return make(nothing=True)
    match field.type:
        case EnumDef():
            return make(int_value=int(field.default))
        case PrimitiveType(wire=DataType.BOOL):
            return make(uint_value=int(field.default))
        case PrimitiveType(wire=DataType.FLOAT | DataType.DOUBLE):
            return make(double_value=field.default)
        case PrimitiveType(wire=DataType.STRING):
            return make(string_value=field.default)
        case PrimitiveType(wire=DataType.WSTRING):
            return make(wstring_value=field.default)
        case PrimitiveType(minimum=0):
            return make(uint_value=field.default)
        case PrimitiveType():
            return make(int_value=field.default)
        case _:
            return make()
