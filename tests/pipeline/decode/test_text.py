"""Text columns have what Python would write row by row."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode import text as module
from crosswire.pipeline.decode.text import (
    Coded,
    Decimal,
    Fixed,
    Hexadecimal,
    Quoted,
    Raw,
    Vocabulary,
    by_code,
    distinct,
    hashes,
    json_parts,
    slices,
    text,
    words,
)

some_text = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ['"', "\\", "\x00\x1f\x7f", "\b\f\n\r\t", "ünï😀"]
)
rows = st.lists(
    st.tuples(some_text | st.none(), st.integers(0, (1 << 64) - 1), st.integers(-1, 2)), max_size=30
)


def laid(texts: list[bytes | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All in one, with something around each; NONE for what is absent."""
    whole, starts, lengths = b"<", [], []
    for each in texts:
        starts.append(len(whole))
        lengths.append(-1 if each is None else len(each))
        whole += (each or b"") + b"|"
    octets = np.frombuffer(whole, np.uint8)
    return octets, np.array(starts, np.int64), np.array(lengths, np.int64)


@settings(max_examples=200)
@given(rows)
def test_parts_follow_one_another(made: list[tuple[str | None, int, int]]) -> None:
    count = len(made)
    where = laid([None if each is None else each.encode() for each, _, _ in made])
    numbers = np.array([number for _, number, _ in made], np.uint64)
    codes = np.array([code for _, _, code in made], np.int64)
    chosen = codes >= 0
    column = text(
        count,
        Fixed("{", chosen),
        Quoted(*where),
        Coded(codes, ["a", "", "ü"]),
        Raw(*where),
        Decimal(numbers, chosen),
        Hexadecimal(*where),
    )
    column.validate(full=True)
    assert column.to_pylist() == [
        ("{" if code >= 0 else "")
        + ("" if word is None else msgspec.json.encode(word).decode())
        + (["a", "", "ü"][code] if code >= 0 else "")
        + (word or "")
        + (str(number) if code >= 0 else "")
        + (word or "").encode().hex()
        for word, number, code in made
    ]


@given(st.lists(st.integers(-1, 2), max_size=20))
def test_words(codes: list[int]) -> None:
    column = words(np.array(codes, np.int64), ["x", "yy", ""])
    column.validate(full=True)
    assert column.to_pylist() == [None if code < 0 else ["x", "yy", ""][code] for code in codes]


@given(st.lists(st.none() | st.binary(max_size=5), max_size=20))
def test_slices(some: list[bytes | None]) -> None:
    column = slices(*laid(some))
    column.validate(full=True)
    assert column.type == pa.binary() and column.to_pylist() == some


@settings(max_examples=200)
@given(st.lists(st.tuples(st.none() | st.binary(max_size=2), st.integers(-1, 1)), max_size=60))
def test_what_is_the_same_has_the_same_number(made: list[tuple[bytes | None, int]]) -> None:
    tags = np.array([tag for _, tag in made], np.int64)
    codes, firsts = distinct(*laid([each for each, _ in made]), tags)
    seen: list[tuple[bytes, int]] = []
    for index, (each, tag) in enumerate(made):
        if each is None:
            assert codes[index] == -1
            continue
        if (each, tag) not in seen:
            assert firsts[len(seen)] == index
            seen.append((each, tag))
        assert codes[index] == seen.index((each, tag))
    assert len(firsts) == len(seen)


def test_very_many_are_distinguished() -> None:
    some = [str(number % 7919).encode() for number in range(40_000)]
    codes, firsts = distinct(*laid(list(some)))
    assert len(firsts) == 7919 and codes.tolist() == [number % 7919 for number in range(40_000)]


@given(st.lists(st.none() | some_text, max_size=10), st.lists(st.none() | st.integers(0, 9)))
def test_columns_as_json(texts: list[str | None], numbers: list[int | None]) -> None:
    for column in (pa.array(texts, pa.string()), pa.array(numbers, pa.int32())):
        in_json = text(len(column), *json_parts(column)).to_pylist()
        assert in_json == [msgspec.json.encode(value).decode() for value in column.to_pylist()]
        part = column.slice(1)
        assert text(len(part), *json_parts(part)).to_pylist() == in_json[1:]


def test_a_hash_does_not_depend_on_where_it_is_made() -> None:
    column = pa.array(["x", "connection-7", "", "x"])
    first, second, third, last = hashes(column).tolist()
    assert first == last and len({first, second, third}) == 3
    assert hashes(column.slice(1)).tolist() == [second, third, last]
    assert second == 1_957_721_214_328_673_156


def test_a_vocabulary_numbers_what_it_meets() -> None:
    known: Vocabulary[str] = Vocabulary()
    assert known.codes(["a", None, "b", "a"]).tolist() == [0, -1, 1, 0]
    assert list(known) == ["a", "b"] and len(known) == 2
    assert by_code(np.array([1, -1, 0]), ["a", "b"], "-").tolist() == ["b", "-", "a"]


def test_more_than_a_column_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 10)
    with pytest.raises(OverflowError, match="12 bytes"):
        words(np.zeros(4, np.int64), ["abc"])
