"""The grammar of .bond files: declarations, and errors with their positions."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosswire.bond import core_module, epoxy_module, hub_module, idl
from crosswire.bond.schema import (
    BLOB,
    NOTHING,
    PRIMITIVES,
    VOID,
    BondedType,
    DataType,
    ListType,
    MapType,
    Modifier,
    NullableType,
    SetType,
    StructDef,
)
from crosswire.errors import BondSchemaError, BondSyntaxError


def one(body: str, name: str = "n.S") -> StructDef:
    return idl.parse(f"namespace n {body}").struct(name)


# -------------------------------------------------------------------------------- declarations


def test_every_type() -> None:
    struct = one(
        "struct T {} struct S { 0: list<int8> a; 1: vector<string> b; 2: set<wstring> c;"
        " 3: map<int32, T> d; 4: nullable<T> e; 5: bonded<T> f; 6: blob g; 7: T h; }"
    )
    kinds = [type(field.type) for field in struct.fields]
    assert kinds == [
        *(ListType, ListType, SetType, MapType, NullableType, BondedType),
        *(type(BLOB), StructDef),
    ]
    assert struct.fields[3].type.text == "map<int32, n.T>"
    assert struct.fields[1].type.text == "vector<string>"


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_every_primitive(name: str) -> None:
    assert one(f"struct S {{ 0: {name} x; }}").fields[0].type is PRIMITIVES[name]


def test_fields_are_sorted_by_id() -> None:
    assert [field.id for field in one("struct S { 7: int8 a; 0: int8 b; }").fields] == [0, 7]


def test_modifiers() -> None:
    struct = one(
        "struct S { 0: int8 a; 1: optional int8 b; 2: required int8 c;"
        " 3: required_optional int8 d; }"
    )
    assert [field.modifier for field in struct.fields] == [
        *(Modifier.OPTIONAL, Modifier.OPTIONAL),
        *(Modifier.REQUIRED, Modifier.REQUIRED_OPTIONAL),
    ]


@pytest.mark.parametrize(
    ("declaration", "default"),
    [
        ("int32 x = -7", -7),
        ("uint64 x = 0xFFFFFFFFFFFFFFFF", 2**64 - 1),
        ("int32 x = 0o17", 15),
        ("int32 x = 010", 10),
        ("double x = 1.5", 1.5),
        ("double x = -1e3", -1000.0),
        ("double x = 3", 3.0),
        ("float x = 0.1", 0.10000000149011612),
        ("bool x = true", True),
        ('string x = "a\\"b\\n\\x41"', 'a"b\nA'),
        ('wstring x = L"é"', "é"),
        ("vector<int8> x = nothing", NOTHING),
        ("int8 x", 0),
        ("string x", ""),
    ],
)
def test_defaults(declaration: str, default: object) -> None:
    found = one(f"struct S {{ 0: {declaration}; }}").fields[0].default
    assert found == default
    assert type(found) is type(default)


def test_enums_count_on_and_wrap_to_int32() -> None:
    module = idl.parse("namespace n enum E { A, B = 5, C; D = 0xA0BD0000, E, F = -2, }")
    assert module.enum("n.E").by_name == {
        "A": 0,
        "B": 5,
        "C": 6,
        "D": 0xA0BD0000 - 2**32,
        "E": 0xA0BD0001 - 2**32,
        "F": -2,
    }


def test_an_enum_field_without_default_starts_at_zero() -> None:
    # The specification's own EpoxyHeaders and ProtocolError are written so.
    struct = one("enum E { A = 1 } struct S { 0: required E e; 1: E f; }")
    assert [field.default for field in struct.fields] == [0, 0]


def test_aliases() -> None:
    struct = one(
        "using Time = int64; using Times<T> = map<T, Time>; using Array<T, N> = vector<T>;"
        "struct S { 0: Times<string> a; 1: Array<Time, 10> b; 2: Time c = 5; }"
    )
    assert struct.fields[0].type.text == "map<string, int64>"
    assert struct.fields[1].type.text == "vector<int64>"
    assert struct.fields[2].default == 5


def test_generics() -> None:
    module = idl.parse(
        "namespace n struct Box<T> { 0: T value; 1: nullable<Box<T>> next; }"
        "struct Two<A, B : value> : Box<A> { 0: vector<B> b; } struct S { 0: Two<string, int8> t; }"
    )
    two = module.struct("n.S").fields[0].type
    assert isinstance(two, StructDef)
    assert two.full_name == "n.Two<string, int8>"
    assert two.base is module.struct("n.Box<string>")
    assert module.struct("n.Box<n.S>").fields[0].type is module.struct("n.S")
    with pytest.raises(BondSchemaError, match="takes 1 type arguments"):
        module.struct("n.Box<int8, int8>")


def test_recursion_and_forward_declarations() -> None:
    module = idl.parse(
        "namespace n struct Leaf; struct Tree { 0: vector<Leaf> leaves; 1: nullable<Tree> next; }"
        "struct Leaf { 0: bonded<Tree> up; }"
    )
    tree = module.struct("n.Tree")
    assert tree.python_class(next=tree.python_class()).next == tree.python_class()


def test_views() -> None:
    module = idl.parse(
        "namespace n struct B { 0: int8 b; }"
        'struct S : B { 0: int8 x; 3: string y = "d"; 9: bool z; } struct V view_of S { y, z; }'
        "struct W view_of V { z }; struct G<T> { 0: T a; 1: T b; } struct H view_of G { b; }"
    )
    view = module.struct("n.V")
    assert [(field.id, field.name) for field in view.fields] == [(3, "y"), (9, "z")]
    assert view.base is module.struct("n.B")
    assert view.fields[0].default == "d"
    assert [field.name for field in module.struct("n.W").fields] == ["z"]
    assert module.struct("n.H<int8>").fields[0].type is PRIMITIVES["int8"]


def test_attributes() -> None:
    module = idl.parse(
        'namespace n [a.b("1")][c("x\\ty")] struct S { [JsonName("other")] 0: int8 x; }'
        '[d("e")] enum E { A } [f("g")] service T { [h("i")] void M(); }'
    )
    struct = module.struct("n.S")
    assert struct.attributes == {"a.b": "1", "c": "x\ty"}
    assert struct.fields[0].json_name == "other"
    assert module.enum("n.E").attributes == {"d": "e"}
    assert module.service("n.T").attributes == {"f": "g"}
    assert module.service("n.T").method("M").attributes == {"h": "i"}


def test_namespaces_of_languages() -> None:
    module = idl.parse(
        "namespace cs Foo.Bar; namespace foo.bar namespace cpp foo_bar "
        "struct S {} struct T { 0: foo_bar.S s; 1: S t; 2: Foo.Bar.S u; }"
    )
    assert module.struct("foo.bar.S") is module.struct("Foo.Bar.S") is module.struct("foo_bar.S")
    assert module.struct("foo.bar.S").full_name == "foo.bar.S"


def test_a_namespace_may_be_called_like_a_language() -> None:
    assert idl.parse("namespace cs struct S {}").struct("cs.S").namespace == "cs"


def test_comments_and_separators() -> None:
    module = idl.parse(
        "\ufeff// one\n/* two\n * three */ namespace n; /// four\nstruct S { // five\n };"
        "enum E { A; B };"
    )
    assert set(module.structs) == {"n.S"}


def test_services() -> None:
    service = idl.parse(
        "namespace n struct P {} using Q = P;"
        "service Base { P One(Q); }"
        "service S : Base { void Two(); nothing Three(P); P Four(void); }"
    ).service("n.S")
    assert list(service.methods) == ["One", "Two", "Three", "Four"]
    assert service.method("Two").request is service.method("Two").response is VOID
    assert service.method("Three").is_event
    assert not service.method("Two").is_event
    with pytest.raises(BondSchemaError, match="no method Five"):
        service.method("Five")


def test_bond_meta_holds_the_struct_name() -> None:
    struct = one("struct S { 0: bond_meta::name a; 1: bond_meta::full_name b; }")
    value = struct.python_class()
    assert (value.a, value.b) == ("S", "n.S")
    assert struct.fields[0].default == ""  # so that it is always written


def test_imports(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "a.bond").write_text(
        'import "lib/b.bond" import "c.bond"; namespace a struct A { 0: b.B b; 1: c.C c; }'
    )
    (tmp_path / "lib" / "b.bond").write_text(
        'import "../a.bond" import "bond/core/bond.bond" namespace b struct B { 0: bond.GUID id; }'
    )
    (tmp_path / "other" / "c.bond").write_text("namespace c struct C {}")
    module = idl.load(tmp_path / "a.bond", search=[tmp_path / "other"])
    assert {"a.A", "b.B", "c.C", "bond.GUID"} <= set(module.structs)
    with pytest.raises(BondSyntaxError, match=r"a\.bond:1:28: import c\.bond was not found"):
        idl.load(tmp_path / "a.bond")


def test_the_files_that_come_with_us() -> None:
    hub = hub_module()
    assert list(hub.service("crosswire.Hub").methods) == [
        *("Publish", "Subscribe", "Unsubscribe", "Settle", "Serve", "Extend", "Authenticate")
    ]
    assert hub.service("crosswire.Subscriber").method("Deliver").is_event
    assert epoxy_module().struct("bond.comm.AggregateError").base is not None
    assert core_module().struct("bond.Box<int32>").fields[0].type.wire is DataType.INT32


# -------------------------------------------------------------------------- what is wrong with them


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("struct S {}", (1, 1), "expected 'import' or 'namespace'"),
        ("namespace n\nstruct S { 0 int8 x; }", (2, 14), "expected ':'"),
        ("namespace n\nstruct S { 0: int8 x }", (2, 22), "expected ';' or '='"),
        ("namespace n struct S { x: int8 y; }", (1, 24), "expected a field's id or '}'"),
        ("namespace n struct S { 0: int8 string; }", (1, 32), "reserved word"),
        ("namespace n struct S { 70000: int8 x; }", (1, 24), "expected 0 to 65535"),
        ("namespace n struct S { 0: Foo x; }", (1, 27), "Foo is not declared"),
        ("namespace n struct S { 0: int8 x; 0: int8 y; }", (1, 43), "field 0 twice"),
        ("namespace n struct S { 0: int8 x; 1: int8 x; }", (1, 43), "field x twice"),
        ("namespace n struct S { 0: int8 x = 300; }", (1, 36), "300 is no int8"),
        ("namespace n struct S { 0: int8 x = 1.5; }", (1, 36), "a default that int8 can't have"),
        ("namespace n struct S { 0: blob x = true; }", (1, 36), "a default that blob can't have"),
        ("namespace n struct S { 0: bool x = 1; }", (1, 36), "a default that bool can't have"),
        ("namespace n enum E { A } struct S { 0: E x = B; }", (1, 46), "B is not in n.E"),
        ("namespace n struct T {} struct S { 0: T x = nothing; }", (1, 41), "can't be nothing"),
        ("namespace n struct S { 0: set<blob> x; }", (1, 27), "blob can't be a key"),
        ("namespace n struct S { 0: bonded<int8> x; }", (1, 27), "int8 can't be bonded"),
        ("namespace n struct S : int8 {}", (1, 24), "int8 can't be a base"),
        ("namespace n struct S : S {}", (1, 24), "derives from itself"),
        ("namespace n struct A : B {} struct B : A {}", (1, 24), "derives from itself"),
        ("namespace n struct S { 0: S s; }", (1, 20), "contains itself"),
        ("namespace n struct A { 0: B b; } struct B { 0: A a; }", (1, 41), "contains itself"),
        ("namespace n struct S {} struct S {}", (1, 32), "already declared"),
        ("namespace n struct S;", (1, 20), "never defined"),
        ("namespace n struct S; enum S { A }", (1, 20), "forward declared as a struct"),
        ("namespace n using A = B; using B = A;", (1, 36), "leads to itself"),
        ("namespace n struct G<T> { 0: Foo x; }", (1, 30), "Foo is not declared"),
        (
            "namespace n struct G<T> { 0: nullable<G<vector<T>>> x; } struct S { 0: G<int8> g; }",
            (1, 39),
            "without end",
        ),
        ("namespace n struct G<T : value> {} struct S { 0: G<string> g; }", (1, 50), "value type"),
        ("namespace n struct T {} struct S { 0: T<int8> t; }", (1, 39), "is not generic"),
        ("namespace n struct T {} struct V view_of T { x; }", (1, 46), "has no field x"),
        ("namespace n struct V view_of V { x; }", (1, 20), "a view of itself"),
        ("namespace n enum E { A, A }", (1, 25), "already defined"),
        ("namespace n enum E { }", (1, 22), "expected a constant's name"),
        ("namespace n enum E { A = 0x100000000 }", (1, 26), "does not fit 32 bits"),
        ("namespace n service S { int8 M(); }", (1, 25), "can't be sent"),
        ("namespace n struct P {} service S { P M(stream P); }", (1, 41), "streaming"),
        ("namespace n struct P {} service S { stream P M(P); }", (1, 37), "streaming"),
        ("namespace n struct P {} service S { P M(); P M(); }", (1, 46), "already defined"),
        ("namespace n [a(1)] struct S {}", (1, 16), "value in quotes"),
        ("namespace n /* and", (1, 13), "expected */"),
        ('namespace n struct S { 0: string x = "abc; }', (1, 38), "a string without an end"),
        ('namespace n struct S { 0: string x = "\\q"; }', (1, 38), "unknown escape"),
        ("namespace n struct S { 0: int8 x = @; }", (1, 36), "does not belong"),
        ("namespace n struct S { 0: int8 x = " + "9" * 5000 + "; }", (1, 36), "5000 characters"),
        ("namespace n struct S { 0: " + "list<" * 1000, (1, 192), "nested more than"),
        ('import "nowhere.bond" namespace n', (1, 8), "was not found"),
    ],
)
def test_errors_have_a_position_and_a_reason(
    text: str, position: tuple[int, int], reason: str
) -> None:
    with pytest.raises(BondSyntaxError) as caught:
        idl.parse(text, "some.bond")
    error = caught.value
    assert reason in str(error)
    assert (error.file, error.line, error.column) == ("some.bond", *position)


def test_huge_when_empty_is_refused() -> None:
    text = "namespace n struct S0 { 0: int8 x; }" + "".join(
        f"struct S{each} {{ 0: S{each - 1} a; 1: S{each - 1} b; }}" for each in range(1, 60)
    )
    with pytest.raises(BondSyntaxError, match="too large even when empty"):
        idl.parse(text)


def test_unknown_names_in_a_module() -> None:
    module = idl.parse("namespace n struct S {}", "some.bond")
    for ask in (module.struct, module.enum, module.service):
        with pytest.raises(BondSchemaError, match=r"some\.bond has no"):
            ask("n.Nothing")
