"""Schemas from .bond files, read at run time.

    module = idl.load("calc.bond")
    Params = module.struct("examples.calc.Params")

Imports are looked for beside the importing file, then in the search path, then among the files that
come with Crosswire (`bond/core/bond.bond`, `bond/comm/comm.bond`). `syntax` has the grammar; here
names get their meaning: aliases and generics are resolved, so that a Module holds concrete types
only. Declarations may be used before they are made; forward declarations are read and not needed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from errno import EFBIG, EINVAL
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeAlias

from crosswire.bond import syntax
from crosswire.bond.lexer import SourcePosition
from crosswire.bond.schema import (
    BLOB,
    NOTHING,
    PRIMITIVES,
    VOID,
    BondedType,
    DataType,
    EnumDef,
    FieldDef,
    ListType,
    MapType,
    MethodDef,
    Module,
    NullableType,
    PrimitiveType,
    ServiceDef,
    SetType,
    StructDef,
    Type,
    check_structs,
)
from crosswire.errors import BondSchemaError, BondSyntaxError

__all__ = ["load", "parse"]

MAX_IMPORTS: Final = 1000
MAX_CHARACTERS: Final = 4_194_304  # in a file and all that it imports
MAX_DEPTH: Final = 64  # of aliases of aliases, bases of bases, generics in generics
MAX_INSTANCES: Final = 10_000  # structs that are made from generic ones
MAX_ARGUMENTS: Final = 100_000  # types that are resolved in aliases and generics
MAX_NAME: Final = 4_096  # characters in the name of an instance, its arguments included
MAX_MEMBERS: Final = 1_000_000  # fields and methods with inherited ones, names in all namespaces
MAX_TYPES: Final = 2_000_000  # steps in which names become types

_PACKAGED: Final = {
    "bond/core/bond.bond": "bond.bond",
    "bond/core/bond_const.bond": "bond.bond",
    "bond/comm/comm.bond": "comm.bond",
    "bond/comm/epoxy_transport.bond": "epoxy.bond",
}


def load(path: str | Path, *, search: Iterable[str | Path] = ()) -> Module:
    """The module of a file and its imports. Raises BondSyntaxError, and OSError for `path`."""
    path = Path(path)
    folder = path.resolve().parent
    return _build(_read(path), str(path), folder, search)


def parse(
    text: str,
    name: str = "<text>",
    *,
    directory: str | Path | None = None,
    search: Iterable[str | Path] = (),
) -> Module:
    """The module of a text; its imports are relative to `directory`. Raises BondSyntaxError."""
    return _build(text, name, None if directory is None else Path(directory), search)


def _build(text: str, name: str, directory: Path | None, search: Iterable[str | Path]) -> Module:
    declarations: list[syntax.Declaration] = []
    seen: set[str] = {str(directory / Path(name).name) if directory else name}
    pending = [(text, name, directory)]
    characters = len(text)
    if characters > MAX_CHARACTERS:
        raise SourcePosition(name, 1, 1).error(f"more than {MAX_CHARACTERS} characters")
    while pending:
        text, file, folder = pending.pop()
        node = syntax.parse_file(text, file)
        declarations += node.declarations
        # Once for each name: a file may import one and the same thousands of times.
        for token in {each.text: each for each in reversed(node.imports)}.values():
            found = _find_import(token.text, folder, search, token.at, seen)
            if found is None:
                continue
            seen.add(found[1])
            pending.append(found)
            characters += len(found[0])
            if characters > MAX_CHARACTERS:
                raise token.at.error(f"with {found[1]} more than {MAX_CHARACTERS} characters")
            if len(seen) > MAX_IMPORTS:
                raise token.at.error(f"more than {MAX_IMPORTS} files")
    return _Resolver(declarations).module(name)


def _find_import(
    wanted: str,
    folder: Path | None,
    search: Iterable[str | Path],
    at: SourcePosition,
    seen: Container[str],
) -> tuple[str, str, Path | None] | None:
    """The text, the name and the folder of an imported file; None for one that was `seen`."""
    wanted = wanted.replace("\\", "/")
    for each in (folder, *map(Path, search)):
        if each is None:
            continue
        path = each / wanted
        try:
            resolved = path.resolve()
            if str(resolved) in seen:
                return None
            return _read(resolved), str(resolved), resolved.parent
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise at.error(f"can't read {path}: {error}") from error
    packaged = _PACKAGED.get(wanted)
    if packaged is None:
        raise at.error(f"import {wanted} was not found", expected="a file in the search path")
    if packaged in seen:
        return None
    text = resources.files("crosswire.bond").joinpath(packaged).read_text(encoding="utf-8")
    return text, packaged, None


def _read(path: Path) -> str:
    """The text of a file. Raises OSError, also for what has no end, such as a device or a pipe."""
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "not a regular file", str(path))
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise OSError(EFBIG, f"more than {MAX_CHARACTERS} characters", str(path))
    return text


# ------------------------------------------------------------------------------------ resolving

# The arguments of the generic that is being instantiated, by parameter.
_Bindings: TypeAlias = Mapping[str, Type | int]
_NONE: Final[_Bindings] = {}


class _Resolver:
    """Resolves names, instantiates generics, and makes each concrete type once."""

    def __init__(self, declarations: Iterable[syntax.Declaration]) -> None:
        self._by_name: dict[str, syntax.Declaration] = {}
        self._structs: dict[str, StructDef] = {}
        self._enums: dict[str, EnumDef] = {}
        self._pending: dict[StructDef, tuple[syntax.StructNode, _Bindings]] = {}
        self._instances = 0
        self._arguments = 0
        self._members = 0
        self._types = 0
        for each in declarations:
            self._declare(each)

    def _count_members(self, count: int, node: syntax.Declaration) -> None:
        """Before they are made: a short file can repeat a long list of members thousands of times,
        as instances of a generic struct, views, derived structs or services do."""
        self._members += count
        if self._members > MAX_MEMBERS:
            raise node.at.error(f"{node.name} leads to more than {MAX_MEMBERS} fields and methods")

    def _count_type(self, name: str, at: SourcePosition) -> None:
        """A step. A type has many where it is a list of lists, an alias of aliases, or looked for
        in thousands of namespaces, and an instance of a generic struct repeats them."""
        self._types += 1
        if self._types > MAX_TYPES:
            raise at.error(f"{name} is one of more than {MAX_TYPES} types")

    def _declare(self, node: syntax.Declaration) -> None:
        self._count_members(len(node.namespaces), node)
        for namespace in node.namespaces:
            name = f"{namespace}.{node.name}"
            old = self._by_name.get(name)
            if old is None or isinstance(old, syntax.ForwardNode):
                self._by_name[name] = node
            elif not isinstance(node, syntax.ForwardNode):
                where = f"{old.at.file}:{old.at.line}"
                raise node.at.error(f"{node.name} is already declared ({where})")
            for each in (old, node):
                if isinstance(each, syntax.ForwardNode) and not isinstance(
                    self._by_name[name], syntax.StructNode | syntax.ForwardNode
                ):
                    raise each.at.error(f"{node.name} is forward declared as a struct, and is none")

    def module(self, name: str) -> Module:
        """Make all concrete declarations; generics are instantiated on use."""
        module = Module(name)
        nodes = list(dict.fromkeys(map(id, self._by_name.values())))
        by_id = {id(node): node for node in self._by_name.values()}
        for node in (by_id[each] for each in nodes):
            match node:
                case syntax.ForwardNode():
                    raise node.at.error(f"struct {node.name} is declared, but never defined")
                case syntax.EnumNode():
                    self._put(module.enums, node, self._enum(node))
                case syntax.StructNode() if not node.params and not self._view_params(node):
                    self._put(module.structs, node, self._struct(node, (), node.at))
                case syntax.AliasNode() if not node.params:
                    self._type(node.target, node.namespaces, _NONE, 0)
                case syntax.StructNode() | syntax.AliasNode():
                    self._check_generic(node)
        self._finish()
        for node in (by_id[each] for each in nodes):
            if isinstance(node, syntax.ServiceNode) and not node.params:
                self._put(module.services, node, self._service(node, _NONE, 0))
        self._finish()
        for struct_name, struct in self._structs.items():
            module.structs.setdefault(struct_name, struct)
        module.instantiate = self._instantiate
        return module

    def _put(self, table: dict[str, Any], node: syntax.Declaration, made: Any) -> None:
        for namespace in node.namespaces:
            table[f"{namespace}.{node.name}"] = made

    def _instantiate(self, text: str) -> Type:
        """An instance of a generic struct, by name with arguments; for `Module.struct`."""
        try:
            found = self._type(syntax.parse_type(text), (), _NONE, 0)
            self._finish()
        except BondSyntaxError as error:
            raise BondSchemaError(f"{text}: {error.reason}") from error
        return found

    def _find(
        self, name: str, namespaces: tuple[str, ...], at: SourcePosition
    ) -> syntax.Declaration:
        candidates = (name,) if "." in name else (f"{each}.{name}" for each in namespaces)
        for candidate in candidates:
            self._count_type(name, at)
            node = self._by_name.get(candidate)
            if node is not None:
                return node
        raise at.error(f"{name} is not declared", expected="a type")

    # Types -----------------------------------------------------------------------------------

    def _type(
        self, node: syntax.TypeNode, namespaces: tuple[str, ...], bindings: _Bindings, depth: int
    ) -> Type:
        if depth > MAX_DEPTH:
            raise node.at.error(
                f"{node.name} leads to itself, or through more than {MAX_DEPTH} types"
            )
        if node.name in PRIMITIVES:
            return PRIMITIVES[node.name]
        if node.name == "blob":
            return BLOB
        if node.name in syntax.META:
            return PRIMITIVES["string"]
        if node.name in _CONTAINERS:
            self._count_type(node.name, node.at)
            inner = [
                self._type(each, namespaces, bindings, depth + 1)
                for each in node.args
                if isinstance(each, syntax.TypeNode)
            ]
            return _container(node, inner)
        if node.name in bindings:
            return self._bound(node, bindings)
        found = self._find(node.name, namespaces, node.at)
        return self._named(node, found, namespaces, bindings, depth)

    def _bound(self, node: syntax.TypeNode, bindings: _Bindings) -> Type:
        value = bindings[node.name]
        if node.args:
            raise node.at.error(f"{node.name} is a type parameter, and not generic itself")
        if isinstance(value, int):
            raise node.at.error(f"{node.name} stands for {value} here", expected="a type")
        return value

    def _named(
        self,
        node: syntax.TypeNode,
        found: syntax.Declaration,
        namespaces: tuple[str, ...],
        bindings: _Bindings,
        depth: int,
    ) -> Type:
        # Depth alone does not bound the work: an alias that names another one twice doubles it with
        # each level, and so does a generic struct with two fields of itself.
        self._arguments += len(node.args)
        if self._arguments > MAX_ARGUMENTS:
            raise node.at.error(f"{node.name} leads to more than {MAX_ARGUMENTS} types")
        args = tuple(
            each if isinstance(each, int) else self._type(each, namespaces, bindings, depth + 1)
            for each in node.args
        )
        match found:
            case syntax.EnumNode() if not args:
                return self._enum(found)
            case syntax.StructNode():
                return self._struct(found, args, node.at)
            case syntax.AliasNode():
                inner = self._bind(found, found.params, args, node.at)
                return self._type(found.target, found.namespaces, inner, depth + 1)
            case syntax.ForwardNode():
                raise found.at.error(f"struct {found.name} is declared, but never defined")
            case syntax.ServiceNode():
                raise node.at.error(f"{found.name} is a service", expected="a type")
        raise node.at.error(f"{found.name} is not generic")

    def _bind(
        self,
        found: syntax.Declaration,
        params: tuple[syntax.ParamNode, ...],
        args: tuple[Type | int, ...],
        at: SourcePosition,
    ) -> dict[str, Type | int]:
        if len(args) != len(params):
            reason = f"takes {len(params)} type arguments" if params else "is not generic"
            raise at.error(f"{found.name} {reason}, and {len(args)} are given")
        for param, arg in zip(params, args, strict=True):
            if param.is_value and not isinstance(arg, int) and not _is_scalar(arg):
                raise at.error(f"{arg.text} is not a value type, as {param.name} must be")
        return {param.name: arg for param, arg in zip(params, args, strict=True)}

    def _enum(self, node: syntax.EnumNode) -> EnumDef:
        found = self._enums.get(node.full_name)
        if found is None:
            found = EnumDef(
                node.name,
                node.constants,
                namespace=node.namespaces[0],
                attributes=node.attributes,
            )
            self._enums[node.full_name] = found
        return found

    # Structs ---------------------------------------------------------------------------------

    def _struct(
        self, node: syntax.StructNode, args: tuple[Type | int, ...], at: SourcePosition
    ) -> StructDef:
        """The struct for these arguments; its fields are set later, since it may be recursive."""
        params = self._view_params(node) or node.params
        bindings = self._bind(node, params, args, at)
        name = node.name
        if args:
            texts = (str(each) if isinstance(each, int) else each.text for each in args)
            name = f"{node.name}<{', '.join(texts)}>"
        full_name = f"{node.namespaces[0]}.{name}"
        found = self._structs.get(full_name)
        if found is None:
            if name.count("<") > syntax.MAX_TYPE_DEPTH or (args and len(name) > MAX_NAME):
                raise at.error(f"{node.name} is filled in with itself without end")
            self._instances += bool(args)
            if self._instances > MAX_INSTANCES:
                raise at.error(f"{node.name} is one of more than {MAX_INSTANCES} generic structs")
            found = StructDef(name, namespace=node.namespaces[0], attributes=node.attributes)
            self._structs[full_name] = found
            self._pending[found] = (node, bindings)
        return found

    def _view_params(self, node: syntax.StructNode) -> tuple[syntax.ParamNode, ...]:
        return self._viewed(node).params if node.view_of is not None else ()

    def _viewed(self, node: syntax.StructNode) -> syntax.StructNode:
        assert node.view_of is not None
        seen = node
        for _ in range(MAX_DEPTH):
            assert seen.view_of is not None
            found = self._find(seen.view_of.name, seen.namespaces, seen.view_of.at)
            if not isinstance(found, syntax.StructNode):
                raise seen.view_of.at.error(f"{found.name} is no struct", expected="a struct")
            if found.view_of is None:
                return found
            seen = found
        raise node.at.error(f"{node.name} is a view of itself")

    def _finish(self) -> None:
        """Set the fields of all structs, which may instantiate more structs; then check them."""
        made: list[tuple[StructDef, SourcePosition]] = []
        while self._pending:
            struct, (node, bindings) = self._pending.popitem()
            made.append((struct, node.at))
            if not struct.is_complete:
                self._complete(struct, node, bindings, 0)
        done: set[StructDef] = set()
        for struct, at in made:
            try:
                check_structs([struct], done)
            except BondSchemaError as error:
                raise at.error(str(error)) from error

    def _complete(
        self, struct: StructDef, node: syntax.StructNode, bindings: _Bindings, depth: int
    ) -> None:
        source = self._viewed(node) if node.view_of is not None else node
        if depth > MAX_DEPTH:
            raise node.at.error(f"{node.name} derives from itself, or through too many structs")
        base = self._base(source, bindings, depth)
        fields = source.fields
        self._count_members(len(fields) + (len(base.all_fields) if base else 0), node)
        if node.view_of is not None:
            fields = self._kept_fields(node, source)
        _check_unique(fields, struct)
        made = [self._field(struct, each, source, bindings) for each in fields]
        try:
            struct.complete(made, base)
        except BondSchemaError as error:
            raise node.at.error(str(error)) from error

    def _kept_fields(
        self, node: syntax.StructNode, source: syntax.StructNode
    ) -> tuple[syntax.FieldNode, ...]:
        if isinstance(node.view_of, syntax.TypeNode):
            direct = self._find(node.view_of.name, node.namespaces, node.view_of.at)
            if isinstance(direct, syntax.StructNode) and direct.view_of is not None:
                self._count_members(len(direct.kept) + len(source.fields), node)
                there = self._kept_fields(direct, source)
            else:
                there = source.fields
        by_name = {field.name: field for field in there}
        for token in node.kept:
            if token.text not in by_name:
                raise token.at.error(f"{source.name} has no field {token.text}")
        kept = {token.text for token in node.kept}
        return tuple(field for field in there if field.name in kept)

    def _base(self, node: syntax.StructNode, bindings: _Bindings, depth: int) -> StructDef | None:
        if node.base is None:
            return None
        base = self._type(node.base, node.namespaces, bindings, 0)
        if not isinstance(base, StructDef):
            raise node.base.at.error(f"{base.text} can't be a base", expected="a struct")
        if not base.is_complete:
            waiting = self._pending.get(base)
            if waiting is None:
                raise node.base.at.error(f"{node.name} derives from itself")
            self._complete(base, *waiting, depth + 1)
        return base

    def _field(
        self,
        struct: StructDef,
        node: syntax.FieldNode,
        owner: syntax.StructNode,
        bindings: _Bindings,
    ) -> FieldDef:
        kind = self._type(node.type, owner.namespaces, bindings, 0)
        start = None
        if node.type.name in syntax.META:
            start = struct.name if node.type.name == "bond_meta::name" else struct.full_name
        default = None if node.default is None else _default(node.default, kind)
        try:
            return FieldDef(
                node.id,
                node.name,
                kind,
                modifier=node.modifier,
                default=default,
                start=start,
                attributes=node.attributes,
            )
        except BondSchemaError as error:
            raise node.at.error(str(error)) from error

    def _check_generic(self, node: syntax.StructNode | syntax.AliasNode) -> None:
        """Resolve all names of a generic, so that errors show even if it is not used."""
        params = {param.name for param in node.params}
        if isinstance(node, syntax.AliasNode):
            self._check_names(node.target, node, params)
        elif node.view_of is None:
            for each in ([node.base] if node.base else []) + [field.type for field in node.fields]:
                self._check_names(each, node, params)

    def _check_names(
        self, node: syntax.TypeNode, owner: syntax.Declaration, params: set[str]
    ) -> None:
        known = node.name in PRIMITIVES or node.name in _CONTAINERS or node.name in params
        if not known and node.name not in ("blob", *syntax.META):
            self._find(node.name, owner.namespaces, node.at)
        for arg in node.args:
            if isinstance(arg, syntax.TypeNode):
                self._check_names(arg, owner, params)

    # Services --------------------------------------------------------------------------------

    def _service(self, node: syntax.ServiceNode, bindings: _Bindings, depth: int) -> ServiceDef:
        methods: dict[str, MethodDef] = {}
        if node.base is not None:
            methods |= self._base_service(node, node.base, bindings, depth).methods
        self._count_members(len(methods) + len(node.methods), node)
        for each in node.methods:
            methods[each.name] = MethodDef(
                name=each.name,
                request=self._payload(each.request, node, bindings),
                response=None if each.is_event else self._payload(each.response, node, bindings),
                attributes=each.attributes,
            )
        return ServiceDef(
            name=node.name,
            full_name=node.full_name,
            methods=methods,
            attributes=node.attributes,
        )

    def _base_service(
        self, node: syntax.ServiceNode, base: syntax.TypeNode, bindings: _Bindings, depth: int
    ) -> ServiceDef:
        found = self._find(base.name, node.namespaces, base.at)
        if not isinstance(found, syntax.ServiceNode):
            raise base.at.error(f"{found.name} is no service", expected="a service")
        if depth > MAX_DEPTH:
            raise base.at.error(f"service {node.name} derives from itself")
        args = tuple(
            each if isinstance(each, int) else self._type(each, node.namespaces, bindings, 0)
            for each in base.args
        )
        inner = self._bind(found, found.params, args, base.at)
        return self._service(found, inner, depth + 1)

    def _payload(
        self, node: syntax.TypeNode | None, owner: syntax.ServiceNode, bindings: _Bindings
    ) -> StructDef:
        if node is None:
            return VOID
        found = self._type(node, owner.namespaces, bindings, 0)
        if not isinstance(found, StructDef):
            raise node.at.error(f"{found.text} can't be sent", expected="a struct or 'void'")
        return found


_CONTAINERS: Final = ("list", "vector", "set", "map", "nullable", "bonded")


def _container(node: syntax.TypeNode, inner: list[Type]) -> Type:
    first = inner[0]
    if node.name in ("set", "map") and not (_is_scalar(first) or _is_text(first)):
        raise node.at.error(
            f"{first.text} can't be a key", expected="a number, a text or an enumeration"
        )
    if node.name in ("list", "vector"):
        return ListType(first, node.name)
    if node.name == "set":
        return SetType(first)
    if node.name == "map":
        return MapType(first, inner[1])
    if node.name == "nullable":
        return NullableType(first)
    if not isinstance(first, StructDef):
        raise node.at.error(f"{first.text} can't be bonded", expected="a struct")
    return BondedType(first)


def _check_unique(fields: Iterable[syntax.FieldNode], struct: StructDef) -> None:
    seen: set[int | str] = set()
    for field in fields:
        for key in (field.id, field.name):
            if key in seen:
                raise field.at.error(f"{struct.name} has field {key} twice")
            seen.add(key)


def _is_scalar(kind: Type) -> bool:
    return isinstance(kind, EnumDef) or (isinstance(kind, PrimitiveType) and not _is_text(kind))


def _is_text(kind: Type) -> bool:
    return kind.wire in (DataType.STRING, DataType.WSTRING)


def _default(node: syntax.DefaultNode, kind: Type) -> Any:
    """The default as a Python value, if the type can have it."""
    if node.kind == "nothing":
        return NOTHING
    if isinstance(kind, EnumDef):
        if node.kind == "enum" and node.value in kind.by_name:
            return kind.members[kind.by_name[node.value]]
        raise node.at.error(f"{node.value} is not in {kind.full_name}", expected="a constant")
    if isinstance(kind, PrimitiveType):
        if kind.is_integer and node.kind == "integer":
            if not kind.minimum <= node.value <= kind.maximum:
                raise node.at.error(f"{node.value} is no {kind.text}")
            return node.value
        if kind.wire in (DataType.FLOAT, DataType.DOUBLE) and node.kind in ("integer", "float"):
            try:
                return _float(float(node.value), kind)
            except OverflowError as error:
                raise node.at.error(f"a number that is no {kind.text}") from error
        if kind.wire is DataType.BOOL and node.kind == "bool":
            return node.value
        if _is_text(kind) and node.kind == "string":
            return node.value
    raise node.at.error(f"a default that {kind.text} can't have")


def _float(value: float, kind: PrimitiveType) -> float:
    """A float's default rounded to a float, so that it equals what is read. Raises OverflowError
    for one that no float can have."""
    if kind.wire is DataType.DOUBLE:
        return value
    from struct import pack, unpack

    return float(unpack("<f", pack("<f", value))[0])
