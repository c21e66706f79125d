"""The grammar of .bond files: from tokens to declarations, with names not yet resolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from crosswire.bond.lexer import SourcePosition, Token, tokenize, unescape
from crosswire.bond.schema import NOTHING, PRIMITIVES, Modifier
from crosswire.errors import BondSyntaxError

__all__ = [
    "META",
    "AliasNode",
    "Declaration",
    "DefaultNode",
    "EnumNode",
    "FieldNode",
    "FileNode",
    "ForwardNode",
    "MethodNode",
    "ParamNode",
    "ServiceNode",
    "StructNode",
    "TypeNode",
    "parse_file",
    "parse_type",
]

MAX_TYPE_DEPTH: Final = 32
MAX_NAME_PARTS: Final = 100

_RESERVED: Final = frozenset(PRIMITIVES) | {
    *("blob", "bond_meta", "bonded", "class", "enum", "false", "import", "list", "map"),
    *("namespace", "nullable", "optional", "required", "required_optional", "Schema", "sealed"),
    *("service", "set", "struct", "true", "using", "var", "vector", "view_of", "void"),
}
_CONTAINERS: Final = {"list": 1, "vector": 1, "set": 1, "nullable": 1, "bonded": 1, "map": 2}
_LANGUAGES: Final = ("cpp", "cs", "csharp", "java")
_MODIFIERS: Final = {
    "optional": Modifier.OPTIONAL,
    "required": Modifier.REQUIRED,
    "required_optional": Modifier.REQUIRED_OPTIONAL,
}


# ------------------------------------------------------------------------------------ what is found


class TypeNode(msgspec.Struct, frozen=True):
    """A type. `name` is a keyword or a name, qualified or not; an argument may be a number."""

    name: str
    args: tuple[TypeNode | int, ...]
    at: SourcePosition


class DefaultNode(msgspec.Struct, frozen=True):
    """A default value. `kind`: integer, float, string, bool, enum or nothing."""

    kind: str
    value: Any
    at: SourcePosition


class FieldNode(msgspec.Struct, frozen=True):
    """A field of a struct."""

    id: int
    name: str
    type: TypeNode
    modifier: Modifier
    default: DefaultNode | None
    attributes: dict[str, str]
    at: SourcePosition


class ParamNode(msgspec.Struct, frozen=True):
    """A parameter of a generic declaration: a type, or a value if `is_value`."""

    name: str
    is_value: bool


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all declarations. `namespaces` are the file's, the language-neutral one first."""

    name: str
    at: SourcePosition
    namespaces: tuple[str, ...]
    attributes: dict[str, str] = {}
    params: tuple[ParamNode, ...] = ()

    @property
    def full_name(self) -> str:
        """With the language-neutral namespace."""
        return f"{self.namespaces[0]}.{self.name}"


class ForwardNode(Declaration, frozen=True, kw_only=True):
    """A struct that is declared later."""


class StructNode(Declaration, frozen=True, kw_only=True):
    """A struct, or a view of one: `view_of`, with the names of the fields that it keeps."""

    base: TypeNode | None = None
    fields: tuple[FieldNode, ...] = ()
    view_of: TypeNode | None = None
    kept: tuple[Token, ...] = ()


class EnumNode(Declaration, frozen=True, kw_only=True):
    """An enumeration, its constants by name."""

    constants: dict[str, int]


class AliasNode(Declaration, frozen=True, kw_only=True):
    """Another name for a type: `using`."""

    target: TypeNode


class MethodNode(msgspec.Struct, frozen=True, kw_only=True):
    """A method; `None` is void."""

    name: str
    request: TypeNode | None
    response: TypeNode | None
    is_event: bool
    attributes: dict[str, str]
    at: SourcePosition


class ServiceNode(Declaration, frozen=True, kw_only=True):
    """A service; `base` is the one that it derives from."""

    base: TypeNode | None
    methods: tuple[MethodNode, ...]


class FileNode(msgspec.Struct, frozen=True):
    """A parsed file: its imports and declarations, in order."""

    imports: tuple[Token, ...]
    declarations: tuple[Declaration, ...]


def parse_file(text: str, file: str) -> FileNode:
    """The content of a .bond file. Raises BondSyntaxError."""
    return _Parser(tokenize(text, file)).file()


def parse_type(text: str) -> TypeNode:
    """A type, written as in a .bond file. Raises BondSyntaxError."""
    parser = _Parser(tokenize(text, "<type>"))
    found = parser.type()
    parser.expect_end()
    return found


# ---------------------------------------------------------------------------------------- parsing

Found = TypeVar("Found")


class _Parser:
    """Recursive descent; only types nest, up to a limit."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._namespaces: tuple[str, ...] = ()

    # Words -----------------------------------------------------------------------------------

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _ahead(self, count: int) -> Token:
        return self._tokens[min(self._next + count, len(self._tokens) - 1)]

    def _take(self) -> Token:
        token = self._token
        if token.kind != "end":
            self._next += 1
        return token

    def _unexpected(self, expected: str) -> BondSyntaxError:
        return self._token.at.error(f"unexpected {self._token}", expected=expected)

    def _is(self, text: str) -> bool:
        return self._token.text == text and self._token.kind in ("symbol", "name")

    def _accept(self, text: str) -> bool:
        if self._is(text):
            self._next += 1
            return True
        return False

    def _expect(self, text: str) -> Token:
        if not self._is(text):
            raise self._unexpected(f"'{text}'")
        return self._take()

    def expect_end(self) -> None:
        if self._token.kind != "end":
            raise self._unexpected("the end")

    def _name(self, what: str) -> Token:
        token = self._token
        if token.kind != "name" or "::" in token.text:
            raise self._unexpected(what)
        if token.text in _RESERVED:
            raise token.at.error(f"'{token.text}' is a reserved word", expected=what)
        return self._take()

    def _qualified_name(self, what: str) -> tuple[str, SourcePosition]:
        at = self._token.at
        parts = [self._namespace_part(what)]
        while self._accept("."):
            parts.append(self._namespace_part(what))
            if len(parts) > MAX_NAME_PARTS:
                raise at.error(f"a name of more than {MAX_NAME_PARTS} parts")
        return ".".join(parts), at

    def _namespace_part(self, what: str) -> str:
        return self._take().text if self._is("Schema") else self._name(what).text

    def _string(self, what: str) -> str:
        if self._token.kind != "string":
            raise self._unexpected(what)
        return unescape(self._take())

    def _integer(self, what: str) -> int:
        if self._token.kind != "integer":
            raise self._unexpected(what)
        return _number(self._take().text)

    def _separated(self, one: Callable[[], Found], separator: str = ",") -> list[Found]:
        found = [one()]
        while self._accept(separator):
            found.append(one())
        return found

    # Files -----------------------------------------------------------------------------------

    def file(self) -> FileNode:
        imports: list[Token] = []
        while self._accept("import"):
            if self._token.kind != "string":
                raise self._unexpected("the name of a file in quotes")
            imports.append(self._take())
            self._accept(";")
        self._namespaces = self._parse_namespaces()
        declarations: list[Declaration] = []
        while self._token.kind != "end":
            declarations.append(self._declaration())
        return FileNode(tuple(imports), tuple(declarations))

    def _parse_namespaces(self) -> tuple[str, ...]:
        neutral: list[str] = []
        by_language: list[str] = []
        while self._accept("namespace"):
            is_language = self._token.text in _LANGUAGES and self._ahead(1).kind == "name"
            if is_language and self._ahead(1).text not in _STARTS:
                self._take()
                by_language.append(self._qualified_name("a namespace")[0])
            else:
                neutral.append(self._qualified_name("a language or a namespace")[0])
            self._accept(";")
        if not neutral and not by_language:
            raise self._unexpected("'import' or 'namespace'")
        return tuple(dict.fromkeys(neutral + by_language))

    def _declaration(self) -> Declaration:
        attributes = self._attributes()
        if self._is("struct"):
            return self._struct(attributes)
        if self._is("enum"):
            return self._enum(attributes)
        if self._is("service"):
            return self._service(attributes)
        if self._is("using") and not attributes:
            return self._alias()
        expected = "'struct', 'enum' or 'service'"
        raise self._unexpected(expected if attributes else "'using', " + expected)

    def _attributes(self) -> dict[str, str]:
        attributes: dict[str, str] = {}
        while self._accept("["):
            name, _ = self._qualified_name("an attribute's name")
            self._expect("(")
            attributes[name] = self._string("the attribute's value in quotes")
            self._expect(")")
            self._expect("]")
        return attributes

    def _params(self) -> tuple[ParamNode, ...]:
        if not self._accept("<"):
            return ()
        params = self._separated(self._param)
        self._expect(">")
        return tuple(params)

    def _param(self) -> ParamNode:
        name = self._name("a type parameter").text
        is_value = self._accept(":")
        if is_value:
            self._expect("value")
        return ParamNode(name, is_value)

    # Structs ---------------------------------------------------------------------------------

    def _struct(self, attributes: dict[str, str]) -> Declaration:
        self._expect("struct")
        token = self._name("the struct's name")
        params = self._params()
        if self._is(";") and not attributes:
            self._take()
            return ForwardNode(
                name=token.text, at=token.at, namespaces=self._namespaces, params=params
            )
        if self._is("view_of") and not params:
            return self._view(token, attributes)
        base = self.type() if self._accept(":") else None
        if not self._is("{"):
            raise self._unexpected("'{'" if base else "'{', ':' or 'view_of'")
        self._take()
        fields: list[FieldNode] = []
        while not self._accept("}"):
            fields.append(self._field())
        self._accept(";")
        return StructNode(
            name=token.text,
            at=token.at,
            namespaces=self._namespaces,
            attributes=attributes,
            params=params,
            base=base,
            fields=tuple(fields),
        )

    def _view(self, token: Token, attributes: dict[str, str]) -> StructNode:
        self._expect("view_of")
        name, at = self._qualified_name("the struct to view")
        self._expect("{")
        kept = [self._name("a field's name")]
        while self._accept(",") or self._accept(";"):
            if self._is("}"):
                break
            kept.append(self._name("a field's name"))
        self._expect("}")
        self._accept(";")
        return StructNode(
            name=token.text,
            at=token.at,
            namespaces=self._namespaces,
            attributes=attributes,
            view_of=TypeNode(name, (), at),
            kept=tuple(kept),
        )

    def _field(self) -> FieldNode:
        attributes = self._attributes()
        at = self._token.at
        field_id = self._integer("a field's id or '}'")
        if not 0 <= field_id <= 0xFFFF:
            raise at.error(f"{field_id} is no field id", expected="0 to 65535")
        self._expect(":")
        modifier = _MODIFIERS.get(self._token.text)
        if modifier is not None:
            self._take()
        kind = self.type()
        name = self._name("the field's name")
        default = self._default() if self._accept("=") else None
        if not self._is(";"):
            raise self._unexpected("';'" if default else "';' or '='")
        self._take()
        return FieldNode(
            field_id,
            name.text,
            kind,
            Modifier.OPTIONAL if modifier is None else modifier,
            default,
            attributes,
            name.at,
        )

    def _default(self) -> DefaultNode:
        token = self._take()
        if token.kind == "name" and token.text == "L" and self._token.kind == "string":
            return DefaultNode("string", unescape(self._take()), token.at)
        if token.kind == "string":
            return DefaultNode("string", unescape(token), token.at)
        if token.kind == "integer":
            return DefaultNode("integer", _number(token.text), token.at)
        if token.kind == "float":
            return DefaultNode("float", float(token.text), token.at)
        if token.text in ("true", "false"):
            return DefaultNode("bool", token.text == "true", token.at)
        if token.text == "nothing":
            return DefaultNode("nothing", NOTHING, token.at)
        if token.kind == "name" and token.text not in _RESERVED:
            return DefaultNode("enum", token.text, token.at)
        raise token.at.error(f"unexpected {token}", expected="a default value")

    # Types -----------------------------------------------------------------------------------

    def type(self, depth: int = 0) -> TypeNode:
        token = self._token
        if depth > MAX_TYPE_DEPTH:
            raise token.at.error(f"a type nested more than {MAX_TYPE_DEPTH} deep")
        if token.text in PRIMITIVES or token.text in ("blob", *META):
            self._take()
            return TypeNode(token.text, (), token.at)
        if token.text in _CONTAINERS:
            self._take()
            self._expect("<")
            args = [self.type(depth + 1)]
            if _CONTAINERS[token.text] == 2:
                self._expect(",")
                args.append(self.type(depth + 1))
            self._expect(">")
            return TypeNode(token.text, tuple(args), token.at)
        name, at = self._qualified_name("a type")
        arguments: list[TypeNode | int] = []
        if self._accept("<"):
            arguments = self._separated(lambda: self._argument(depth + 1))
            self._expect(">")
        return TypeNode(name, tuple(arguments), at)

    def _argument(self, depth: int) -> TypeNode | int:
        return self._integer("") if self._token.kind == "integer" else self.type(depth)

    # Enums, aliases, services ----------------------------------------------------------------

    def _enum(self, attributes: dict[str, str]) -> EnumNode:
        self._expect("enum")
        token = self._name("the enum's name")
        self._expect("{")
        constants: dict[str, int] = {}
        following = 0
        while True:
            name = self._name("a constant's name")
            if name.text in constants:
                raise name.at.error(f"constant {name.text} is already defined")
            if self._accept("="):
                at = self._token.at
                following = self._integer("the constant's value")
                if not -(1 << 31) <= following < 1 << 32:
                    raise at.error(f"{following} does not fit 32 bits")
            # An enumeration is an int32: 0xA0BD0000 is the negative number with these bits.
            constants[name.text] = (following + (1 << 31)) % (1 << 32) - (1 << 31)
            following += 1
            if not (self._accept(",") or self._accept(";")):
                break
            if self._is("}"):
                break
        if not self._is("}"):
            raise self._unexpected("',', ';' or '}'")
        self._take()
        self._accept(";")
        return EnumNode(
            name=token.text,
            at=token.at,
            namespaces=self._namespaces,
            attributes=attributes,
            constants=constants,
        )

    def _alias(self) -> AliasNode:
        self._expect("using")
        token = self._name("the alias's name")
        params = self._params()
        self._expect("=")
        target = self.type()
        self._expect(";")
        return AliasNode(
            name=token.text,
            at=token.at,
            namespaces=self._namespaces,
            params=params,
            target=target,
        )

    def _service(self, attributes: dict[str, str]) -> ServiceNode:
        self._expect("service")
        token = self._name("the service's name")
        params = self._params()
        base = self.type() if self._accept(":") else None
        self._expect("{")
        methods: dict[str, MethodNode] = {}
        while not self._accept("}"):
            method = self._method()
            if method.name in methods:
                raise method.at.error(f"method {method.name} is already defined")
            methods[method.name] = method
        self._accept(";")
        return ServiceNode(
            name=token.text,
            at=token.at,
            namespaces=self._namespaces,
            attributes=attributes,
            params=params,
            base=base,
            methods=tuple(methods.values()),
        )

    def _method(self) -> MethodNode:
        attributes = self._attributes()
        if self._is("stream") and self._ahead(1).kind == "name" and self._ahead(2).text != "(":
            raise self._token.at.error("streaming methods are not supported")
        is_event = self._is("nothing") and self._ahead(1).kind == "name"
        if is_event:
            self._take()
        response = None if is_event else self._payload("a struct, 'void', 'nothing' or '}'")
        name = self._name("the method's name")
        self._expect("(")
        if self._is("stream") and self._ahead(1).kind == "name":
            raise self._token.at.error("streaming methods are not supported")
        request = None if self._is(")") else self._payload("a struct, 'void' or ')'")
        self._expect(")")
        self._expect(";")
        return MethodNode(
            name=name.text,
            request=request,
            response=response,
            is_event=is_event,
            attributes=attributes,
            at=name.at,
        )

    def _payload(self, expected: str) -> TypeNode | None:
        if self._accept("void"):
            return None
        if self._token.kind != "name":
            raise self._unexpected(expected)
        return self.type()


META: Final = ("bond_meta::name", "bond_meta::full_name")
_STARTS: Final = ("struct", "enum", "using", "service", "namespace")


def _number(text: str) -> int:
    """Decimal, with or without leading zeros; hexadecimal and octal with their prefix."""
    return int(text, 0) if "x" in text.lower() or "o" in text.lower() else int(text)
