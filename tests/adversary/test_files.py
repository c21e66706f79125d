"""Files that take long to read: descriptions of interfaces in captures, generics in .bond files.

Time is compared with that of a smaller file of the same kind: twice as much may take about twice as
long, where a quadratic reader takes four times, and an exponential one for ever.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crosswire.bond import idl
from crosswire.capture.layout import MOST_INTERFACES
from crosswire.capture.reader import read_packets
from crosswire.errors import BondSyntaxError, InvalidInput
from crosswire.pipeline.sources import capture_reader

SECTION = struct.pack("<IIIHHqI", 0x0A0D0D0A, 28, 0x1A2B3C4D, 1, 0, -1, 28)
INTERFACE = struct.pack("<IIHHII", 1, 20, 101, 0, 0, 20)
PACKET = struct.pack("<IIIIIIII", 6, 32, 0, 0, 0, 0, 0, 32)
ATTEMPTS = 5


def read_columns(path: str) -> Iterator[object]:
    """As the pipeline reads it."""
    for split in capture_reader.splits(path, 1 << 30):
        yield from capture_reader.read(split)


READERS = pytest.mark.parametrize("reader", [read_packets, read_columns])
QUADRATIC = 3.3
"""Twice the input: 2 for a linear reader, 4 for a quadratic one."""


def seconds(read: Callable[[], object]) -> float:
    """Of CPU time, the best of a few: other programs of the machine should not count."""
    times = []
    for _ in range(ATTEMPTS):
        began = time.process_time()
        read()
        times.append(time.process_time() - began)
    return min(times)


def capture(path: Path, sections: int, *, interfaces: int = MOST_INTERFACES) -> Path:
    """Sections in which a packet follows each of many interfaces."""
    path.write_bytes((SECTION + (INTERFACE + PACKET) * interfaces) * sections)
    return path


@pytest.mark.alone
@READERS
def test_interfaces_of_a_capture_take_linear_time(
    tmp_path: Path, reader: Callable[[str], Iterator[object]]
) -> None:
    def read(path: Path) -> int:
        return sum(1 for _ in reader(str(path)))

    half = capture(tmp_path / "half.pcapng", 2, interfaces=MOST_INTERFACES // 2)
    whole = capture(tmp_path / "whole.pcapng", 2)
    read(half)
    assert seconds(lambda: read(whole)) < QUADRATIC * seconds(lambda: read(half))


@READERS
def test_a_section_with_too_many_interfaces_is_refused(
    tmp_path: Path, reader: Callable[[str], Iterator[object]]
) -> None:
    path = capture(tmp_path / "many.pcapng", 1, interfaces=MOST_INTERFACES + 1)
    with pytest.raises(InvalidInput, match="describes more than 1024 interfaces"):
        list(reader(str(path)))


DOUBLING = {
    "an alias that names another twice": "using C<T, U> = T; using A0 = int32;"
    + "".join(f"using A{n} = C<A{n - 1}, A{n - 1}>;" for n in range(1, 60)),
    "a struct with two instances of itself": "struct A<T> {"
    " 0: nullable<A<list<T>>> x; 1: nullable<A<vector<T>>> y; }"
    " struct B { 0: nullable<A<int32>> a; }",
    "a tree of different structs": "".join(
        f"struct A{n}<T> {{ 0: nullable<A{n + 1}<list<T>>> x; 1: nullable<A{n + 1}<set<T>>> y; }}"
        for n in range(16)
    )
    + "struct A16<T> {} struct B { 0: nullable<A0<int32>> a; }",
    "a pair of pairs": "struct P<T, U> { 0: nullable<T> a; 1: nullable<U> b; } using P0 = int32;"
    + "".join(f"using P{n} = P<P{n - 1}, P{n - 1}>;" for n in range(1, 60)),
}


@pytest.mark.parametrize("kind", DOUBLING)
def test_types_that_double_are_refused(kind: str) -> None:
    began = time.perf_counter()
    with pytest.raises(BondSyntaxError, match=r"without end|more than|can't be a key"):
        idl.parse(f"namespace x {DOUBLING[kind]}")
    # The limits are reached within about a second; without them it takes hours.
    assert time.perf_counter() - began < 30


_FIELDS = "".join(f"{n}: int32 f{n};" for n in range(5_000))
_OF_A_TYPE = _FIELDS.replace("int32", "T")
_METHODS = "".join(f"void m{n}();" for n in range(3_000))
REPEATING = {
    "a long generic struct, many times": f"struct G<T> {{ {_OF_A_TYPE} }}"
    + "".join(f"struct E{n} {{}} struct U{n} {{ 0: G<E{n}> x; }}" for n in range(3_000)),
    "views of a long struct": f"struct G {{ {_FIELDS} }}"
    + "".join(f"struct V{n} view_of G {{ f1 }}" for n in range(5_000)),
    "structs that derive from a long one": f"struct G {{ {_FIELDS} }}"
    + "".join(f"struct D{n} : G {{}}" for n in range(5_000)),
    "services that derive from a long one": f"service G {{ {_METHODS} }}"
    + "".join(f"service S{n} : G {{}}" for n in range(3_000)),
    "declarations in many namespaces": "".join(f"namespace n{n} " for n in range(3_000))
    + "".join(f"struct S{n} {{}}" for n in range(3_000)),
}


@pytest.mark.parametrize("kind", REPEATING)
def test_members_that_are_repeated_are_refused(kind: str) -> None:
    began = time.process_time()
    with pytest.raises(BondSyntaxError, match="more than 1000000 fields and methods"):
        idl.parse(f"namespace x {REPEATING[kind]}")
    # It takes about a second; without the limit, up to a minute and 2 GiB.
    assert time.process_time() - began < 15


@pytest.mark.parametrize(
    "text",
    [
        'struct S { 0: string s = "\\%s"; }' % ("1" * 5_000),
        'struct S { 0: string s = "\\ud800"; }',
        "struct S { 0: float f = 1e300; }",
        f"struct S {{ 0: {'n' * 100_000} f; }}",
        f"struct S {{ 0: {'.'.join(['n'] * 100_000)} f; }}",
        f'import "{"a" * 1_000}" struct S {{}}',
    ],
)
def test_what_has_no_value_is_a_mistake_with_a_short_text(text: str) -> None:
    with pytest.raises(BondSyntaxError) as raised:
        idl.parse(f"namespace x {text}" if text.startswith("struct") else text, directory="/")
    assert len(str(raised.value)) < 2_000


def test_a_character_of_two_halves_is_one() -> None:
    text = 'namespace x struct S { 0: string s = "\\ud83d\\ude00"; }'
    assert idl.parse(text).struct("x.S").fields[0].default == "\N{GRINNING FACE}"


def test_an_import_that_has_no_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bond")
    for file in ("pipe.bond", "/dev/zero"):
        with pytest.raises(BondSyntaxError, match="not a regular file"):
            idl.parse(f'import "{file}" namespace x', directory=tmp_path)


def test_steps_to_types_are_limited(tmp_path: Path) -> None:
    """Without the limit: minutes, and 6 GiB for the lists."""
    began = time.process_time()
    (tmp_path / "y.bond").write_text("namespace y struct E {} struct T {}")
    for text in (
        'import "y.bond" '
        + "".join(f"namespace n{n} " for n in range(1_000))
        + f"namespace y struct S {{ {_OF_A_TYPE} }}",
        "namespace x using A0 = int32;"
        + "".join(f"using A{n} = A{n - 1};" for n in range(1, 61))
        + "".join(f"struct S{n} {{ {_FIELDS.replace('int32', 'A60')} }}" for n in range(10)),
        "namespace x struct G<T> { "
        + _FIELDS.replace("int32", "list<" * 30 + "T" + ">" * 30)
        + " }"
        + "".join(f"struct E{n} {{}} struct U{n} {{ 0: G<E{n}> x; }}" for n in range(100)),
    ):
        with pytest.raises(BondSyntaxError, match="one of more than 2000000 types"):
            idl.parse(text, directory=tmp_path)
    assert time.process_time() - began < 45


def test_views_of_views_are_limited() -> None:
    kept = ", ".join(f"f{n}" for n in range(5_000))
    views = "".join(f"struct V{n} view_of V{n - 1} {{ {kept} }}" for n in range(1, 60))
    more = "".join(f"struct W{n} view_of V59 {{ f1 }}" for n in range(100))
    with pytest.raises(BondSyntaxError, match="more than 1000000 fields and methods"):
        idl.parse(f"namespace x struct V0 {{ {_FIELDS} }} {views} {more}")


def test_a_file_that_is_imported_often_is_read_once(tmp_path: Path) -> None:
    """Under names of its own, too: what counts is the file."""
    other = tmp_path / "other.bond"
    other.write_text("namespace y struct E {}" + " " * 1_000_000)
    imports = "".join(f'import "{"./" * n}other.bond" ' for n in range(1_000))
    began = time.process_time()
    module = idl.parse(f"{imports * 2} namespace x struct S {{ 0: y.E e; }}", directory=tmp_path)
    assert module.struct("x.S").fields[0].type is module.struct("y.E")
    assert time.process_time() - began < 5  # reading it 2,000 times takes 10 s and more


def test_characters_of_all_files_are_limited(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / f"{n}.bond").write_text(f"namespace x{n} " + " " * 1_000_000)
    imports = "".join(f'import "{n}.bond" ' for n in range(5))
    with pytest.raises(BondSyntaxError, match="more than 4194304 characters"):
        idl.parse(f"{imports} namespace x", directory=tmp_path)
    with pytest.raises(BondSyntaxError, match="more than 4194304 characters"):
        idl.parse("namespace x" + " " * 4_194_304)


def test_generics_within_the_limits_are_accepted() -> None:
    structs = "".join(f"struct E{n} {{}}" for n in range(3_000))
    fields = "".join(f"{n}: G<E{n}> f{n};" for n in range(3_000))
    text = f"namespace x struct G<T> {{ 0: nullable<T> a; }} {structs} struct U {{ {fields} }}"
    assert len(idl.parse(text).structs) == 6_001
