"""Decoders and encoders of structs, compiled: Python source per struct and encoding.

A decoder expects fields as Bond writes them, in ascending order, with the types of the schema, and
reads them one after the other without a loop or a lookup:

    if data[pos] == 48:                     # field 1, int32, in Compact Binary
        f0 = data[pos + 1]
        …
    else:
        f0 = d0                             # omitted: its default

At the first deviation — a field that is not in the schema, another order, a narrower type, fewer or
more levels of inheritance — it calls `_DecoderFallback`, which continues from there field by field.
Nothing is read twice, so a peer gains nothing by provoking it.

The source is built from numbers and from `FieldDef.python_name`s, which are ASCII identifiers by
construction (`classes.set_python_names`); everything else reaches it as objects in its namespace.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from crosswire.bond import scalars
from crosswire.bond.dialect import (
    SKIPPED_FIELD,
    Dialect,
    Reader,
    Writer,
    check_room,
    too_deep,
    too_short,
    wrong_type,
)
from crosswire.bond.schema import (
    NOTHING,
    BlobType,
    DataType,
    EnumDef,
    FieldDef,
    ListType,
    MapType,
    Modifier,
    NullableType,
    PrimitiveType,
    StructDef,
)
from crosswire.errors import BondDecodeError, BondEncodeError

__all__ = ["decoder", "encoder"]

_MISSING: Final = object()

_SIZES: Final = {tag: Struct(f"<{code}").size for tag, code in scalars.FORMATS.items()}
_VARIABLE: Final = {
    DataType.UINT16: 16,
    DataType.UINT32: 32,
    DataType.UINT64: 64,
    DataType.INT16: 16,
    DataType.INT32: 32,
    DataType.INT64: 64,
}
_ZIGZAGGED: Final = (DataType.INT16, DataType.INT32, DataType.INT64)


def decoder(dialect: Dialect, struct: StructDef) -> Reader:
    """The struct's Reader in that encoding, compiled on first use."""
    found: Reader | None = struct.codecs.get((dialect.name, "decoder"))
    if found is None:
        found = _compile(dialect, struct, "decoder", _write_decoder)
    return found


def encoder(dialect: Dialect, struct: StructDef) -> Writer:
    """The struct's Writer in that encoding, compiled on first use."""
    found: Writer | None = struct.codecs.get((dialect.name, "encoder"))
    if found is None:
        found = _compile(dialect, struct, "encoder", _write_encoder)
    return found


def _compile(
    dialect: Dialect,
    struct: StructDef,
    half: str,
    write: Callable[[Dialect, StructDef, _Source], None],
) -> Any:
    """Write the function's source, compile it, and store the function in its struct."""
    source = _Source()
    _compiling.add(struct)
    try:
        write(dialect, struct, source)
    finally:
        _compiling.discard(struct)
    file = f"<{dialect.name} {half} of {struct.full_name!a}>"
    exec(compile("\n".join(source.lines), file, "exec"), source.names)
    made = source.names[half]
    struct.codecs[dialect.name, half] = made
    return made


class _Source:
    """Lines of a function, and the objects that they refer to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"__builtins__": {"len": len}}

    def add(self, indent: int, *lines: str) -> None:
        self.lines += ["    " * indent + line for line in lines]

    def name(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name


# Structs whose code is being written, and how deeply that may nest.
_compiling: set[StructDef] = set()
_MAX_COMPILING: Final = 50


def _codec_of(
    get: Callable[[Dialect, StructDef], Any], dialect: Dialect
) -> Callable[[StructDef], Any]:
    """The codec of another struct: compiled now or, if structs refer to each other in a circle, on
    its first call."""

    def of(struct: StructDef) -> Any:
        if struct not in _compiling and len(_compiling) < _MAX_COMPILING:
            return get(dialect, struct)
        return lambda *args: get(dialect, struct)(*args)

    return of


# -------------------------------------------------------------------------------------- decoding


def _write_decoder(dialect: Dialect, struct: StructDef, source: _Source) -> None:
    resume = _DecoderFallback(dialect, struct)
    source.names |= {
        "new": struct.python_class,
        "resume": resume.finish,
        "too_deep": too_deep,
        "too_short": too_short,
        "varint": scalars.read_varint,
        "misplaced": _misplaced,
        "missing": _missing,
        "MISSING": _MISSING,
    }
    source.add(0, "def decoder(data, pos, end, depth, budget):")
    source.add(1, "if not depth:", "    raise too_deep(pos)", "depth -= 1")
    if dialect.has_struct_length:
        source.add(1, "length = data[pos]", "pos += 1")
        source.add(1, "if length > 127:", "    length, pos = varint(data, pos - 1, 32)")
        source.add(1, "stop = pos + length")
        source.add(1, "if stop > end:", "    raise too_short(pos)")
    index = 0
    levels = struct.levels
    for number, level in enumerate(levels):
        for field in level.fields:
            _write_field_decoder(dialect, field, index, resume.readers[index], source)
            index += 1
        stop_tag = DataType.STOP if number == len(levels) - 1 else DataType.STOP_BASE
        so_far = "".join(f"f{each}, " for each in range(index))
        source.add(1, f"if data[pos] != {int(stop_tag)}:")
        source.add(2, f"value, pos = resume({number}, [{so_far}], data, pos, end, depth, budget)")
        if dialect.has_struct_length:
            source.add(2, "if pos != stop:", "    raise misplaced(pos)")
        source.add(2, "return value, pos")
        source.add(1, "pos += 1")
    if dialect.has_struct_length:
        source.add(1, "if pos != stop:", "    raise misplaced(pos)")
    for number, field in enumerate(struct.all_fields):
        if field.is_required:
            text = source.name(f"t{number}", f"{struct.full_name}.{field.name}")
            source.add(1, f"if f{number} is MISSING:", f"    raise missing({text}, pos)")
    values = ", ".join(f"f{each}" for each in range(index))
    source.add(1, f"return new({values}), pos")


def _misplaced(pos: int) -> BondDecodeError:
    return BondDecodeError("a struct that does not end where its length ends", offset=pos)


def _missing(name: str, pos: int) -> BondDecodeError:
    return BondDecodeError(f"required field {name} is missing", offset=pos)


def _write_field_decoder(
    dialect: Dialect, field: FieldDef, index: int, readers: dict[int, Reader], source: _Source
) -> None:
    head = dialect.field_head(field.type.wire, field.id)
    if len(head) == 1:
        test = f"data[pos] == {head[0]}"
    elif len(head) == 2:
        test = f"data[pos] == {head[0]} and data[pos + 1] == {head[1]}"
    else:
        test = f"data[pos:pos + 3] == {source.name(f'h{index}', head)}"
    source.add(1, f"if {test}:")
    value_at = len(head)
    kind = field.type
    if isinstance(kind, PrimitiveType | EnumDef):
        _write_scalar_decoder(dialect, kind.wire, index, value_at, source)
        if isinstance(kind, EnumDef):
            member = source.name(f"e{index}", kind.members.get)
            source.add(2, f"f{index} = {member}(f{index}, f{index})")
    else:
        read = source.name(f"r{index}", readers[int(kind.wire)])
        source.add(2, f"f{index}, pos = {read}(data, pos + {value_at}, end, depth, budget)")
    source.add(1, "else:")
    source.add(2, f"f{index} = {_default_expression(field, index, source)}")


def _default_expression(field: FieldDef, index: int, source: _Source) -> str:
    if field.is_required:
        return "MISSING"
    if field.default is NOTHING or isinstance(field.type, NullableType):
        return "None"
    match field.type:
        case ListType():
            return "[]"
        case MapType():
            return "{}"
        case PrimitiveType() | EnumDef() | BlobType():
            return source.name(f"d{index}", field.initial())
        case _:
            return source.name(f"d{index}", field.type.initial) + "()"


def _write_scalar_decoder(
    dialect: Dialect, tag: DataType, index: int, at: int, source: _Source
) -> None:
    """Lines that read a scalar at `pos + at` into its variable and move `pos` past it."""
    var = f"f{index}"
    if tag is DataType.BOOL:
        source.add(2, f"{var} = data[pos + {at}] != 0", f"pos += {at + 1}")
    elif tag is DataType.UINT8:
        source.add(2, f"{var} = data[pos + {at}]", f"pos += {at + 1}")
    elif tag in (DataType.STRING, DataType.WSTRING):
        size, codec = ("length", "") if tag is DataType.STRING else ("2 * length", _UTF16)
        source.add(2, f"length = data[pos + {at}]", f"pos += {at + 1}")
        source.add(2, "if length > 127:", "    length, pos = varint(data, pos - 1, 32)")
        source.add(2, f"end_of_text = pos + {size}")
        source.add(2, "if end_of_text > end:", "    raise too_short(pos)")
        source.add(2, f"{var} = data[pos:end_of_text].decode({codec})", "pos = end_of_text")
    elif dialect.name != "fast" and tag in _VARIABLE:
        bits = _VARIABLE[tag]
        source.add(2, f"{var} = data[pos + {at}]", f"pos += {at + 1}")
        source.add(2, f"if {var} > 127:", f"    {var}, pos = varint(data, pos - 1, {bits})")
        if tag in _ZIGZAGGED:
            source.add(2, f"{var} = {var} >> 1 ^ -({var} & 1)")
    else:
        code = scalars.FORMATS[tag]
        unpack = source.name(f"unpack_{code}", Struct(f"<{code}").unpack_from)
        source.add(2, f"{var}, = {unpack}(data, pos + {at})", f"pos += {at + _SIZES[tag]}")


_UTF16: Final = "'utf-16-le', 'surrogatepass'"


class _DecoderFallback:
    """Continues where a compiled decoder found something unexpected."""

    def __init__(self, dialect: Dialect, struct: StructDef) -> None:
        self.dialect = dialect
        self.struct = struct
        codec_of = _codec_of(decoder, dialect)
        # By index among all fields, then by tag on the wire.
        self.readers = [dialect.readers_of(field.type, codec_of) for field in struct.all_fields]
        self.indexes: list[dict[int, int]] = []
        index = 0
        for level in struct.levels:
            self.indexes.append({})
            for field in level.fields:
                self.indexes[-1][field.id] = index
                index += 1

    def finish(
        self,
        level: int,
        values: list[Any],
        data: bytes,
        pos: int,
        end: int,
        depth: int,
        budget: list[int],
    ) -> tuple[Any, int]:
        """The struct whose fields up to this level are `values`, and the position after it."""
        dialect, fields = self.dialect, self.struct.all_fields
        values += [
            _MISSING if field.is_required else field.initial() for field in fields[len(values) :]
        ]
        while True:
            tag, field_id, pos = dialect.read_field_head(data, pos)
            if tag == DataType.STOP:
                break
            if tag == DataType.STOP_BASE:
                check_room(1, 0, SKIPPED_FIELD, pos, end, budget)
                level += 1
                continue
            # Levels beyond ours belong to a struct that derives from this one.
            index = self.indexes[level].get(field_id) if level < len(self.indexes) else None
            if index is None:
                check_room(1, 0, SKIPPED_FIELD, pos, end, budget)
                pos = dialect.skip(data, pos, end, tag, depth, budget)
                continue
            read = self.readers[index].get(tag)
            if read is None:
                field = fields[index]
                expected = f"{field.type.text} {self.struct.full_name}.{field.name}"
                raise wrong_type(tag, expected, pos)
            # A field may be there again and again: the last one counts, and each takes time.
            check_room(1, 0, 1, pos, end, budget)
            values[index], pos = read(data, pos, end, depth, budget)
        for field, value in zip(fields, values, strict=True):
            if value is _MISSING:
                raise _missing(f"{self.struct.full_name}.{field.name}", pos)
        return self.struct.python_class(*values), pos


# -------------------------------------------------------------------------------------- encoding


def _write_encoder(dialect: Dialect, struct: StructDef, source: _Source) -> None:
    codec_of = _codec_of(encoder, dialect)
    source.names |= {
        "too_deep": _too_deep,
        "is_nothing": _is_nothing,
        "write_length": scalars.write_length,
        "write_varint": scalars.write_varint,
        "BOOLS": {True: 1, False: 0},
    }
    source.add(0, "def encoder(out, value, depth):")
    source.add(1, "if depth <= 0:", "    raise too_deep()", "depth -= 1")
    if dialect.has_struct_length:
        source.names["bytearray"] = bytearray
        source.add(1, "outer = out", "out = bytearray()")
    index = 0
    levels = struct.levels
    for number, level in enumerate(levels):
        for field in level.fields:
            _write_field_encoder(dialect, field, index, codec_of, source)
            index += 1
        stop = DataType.STOP if number == len(levels) - 1 else DataType.STOP_BASE
        source.add(1, f"out.append({int(stop)})")
    if dialect.has_struct_length:
        source.add(1, "write_length(outer, len(out))", "outer += out")


def _too_deep() -> BondEncodeError:
    return BondEncodeError("nested deeper than the limit allows, or a value inside itself")


def _is_nothing(name: str) -> BondEncodeError:
    return BondEncodeError("required, and nothing", path=name)


def _write_field_encoder(
    dialect: Dialect,
    field: FieldDef,
    index: int,
    codec_of: Callable[[StructDef], Writer],
    source: _Source,
) -> None:
    source.add(1, f"v = value.{field.python_name}")
    condition = _presence(field, index, source)
    indent = 1
    if condition:
        source.add(1, f"if {condition}:")
        indent = 2
    head = dialect.field_head(field.type.wire, field.id)
    kind = field.type
    if isinstance(kind, PrimitiveType | EnumDef):
        _write_scalar_encoder(dialect, kind.wire, head, index, indent, source)
    else:
        write = source.name(f"w{index}", dialect.writer_of(kind, codec_of))
        source.add(indent, *_head_lines(head, index, source), f"{write}(out, v, depth)")
    if field.default is NOTHING and field.modifier is not Modifier.OPTIONAL:
        text = source.name(f"t{index}", field.name)
        source.add(1, "else:", f"    raise is_nothing({text})")


def _presence(field: FieldDef, index: int, source: _Source) -> str:
    """The condition under which a field is written; empty if it always is."""
    if field.default is NOTHING:
        return "v is not None"
    if not field.may_be_omitted:
        return ""
    match field.type:
        case PrimitiveType() | EnumDef():
            return f"v != {source.name(f'd{index}', field.default)}"
        case NullableType():
            return "v is not None"
        case _:
            return "len(v)"


def _head_lines(head: bytes, index: int, source: _Source) -> list[str]:
    if len(head) == 1:
        return [f"out.append({head[0]})"]
    return [f"out += {source.name(f'h{index}', head)}"]


def _write_scalar_encoder(
    dialect: Dialect, tag: DataType, head: bytes, index: int, indent: int, source: _Source
) -> None:
    """Lines that append the head and the value `v`."""
    fixed = dialect.name == "fast" or tag not in _VARIABLE
    if tag in scalars.FORMATS and fixed:
        layout = Struct(f"<{len(head)}s{scalars.FORMATS[tag]}")
        pack = source.name(f"p{index}", layout.pack)
        source.add(indent, f"out += {pack}({source.name(f'h{index}', head)}, v)")
        return
    source.add(indent, *_head_lines(head, index, source))
    if tag is DataType.BOOL:
        source.add(indent, "out.append(BOOLS[v])")
    elif tag in (DataType.STRING, DataType.WSTRING):
        codec, size = ("", "len(v)") if tag is DataType.STRING else (_UTF16, "len(v) // 2")
        source.add(indent, f"v = v.encode({codec})", f"write_length(out, {size})", "out += v")
    else:
        if tag in _ZIGZAGGED:
            source.add(indent, "v = v << 1 if v >= 0 else ~(v << 1)")
        source.add(indent, "if 0 <= v < 128:", "    out.append(v)", "else:")
        source.add(indent, f"    write_varint(out, v, {_VARIABLE[tag]})")
