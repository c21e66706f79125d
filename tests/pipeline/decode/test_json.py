"""Strings and Base64 give what msgspec and the standard library give."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.json import Base64, Unescaped, surely_base64
from crosswire.pipeline.decode.text import TextPart, text


def laid(texts: list[bytes | None]) -> tuple[Bytes, Numbers, Numbers]:
    """One after the other; NONE for what is absent."""
    sizes = np.array([len(each or b"") for each in texts], np.int64)
    lengths = np.array([NONE if each is None else len(each) for each in texts], np.int64)
    whole = b"".join(each or b"" for each in texts)
    return np.frombuffer(whole, np.uint8), np.cumsum(sizes) - sizes, lengths


def octets(part: TextPart, count: int) -> list[bytes]:
    column = text(count, part)
    return [each.as_buffer().to_pybytes() for each in column]


@settings(max_examples=200)
@given(st.lists(st.none() | st.tuples(st.text(st.characters(codec="utf-8")), st.booleans())))
def test_what_strings_stand_for(values: list[tuple[str, bool] | None]) -> None:
    written = [
        None if each is None else json.dumps(each[0], ensure_ascii=each[1])[1:-1].encode()
        for each in values
    ]
    expected = [b"" if each is None else each[0].encode() for each in values]
    assert octets(Unescaped(*laid(written)), len(values)) == expected


def test_every_escape() -> None:
    written = rb"\"\\\/\b\f\n\r\t\u0000\u007f\u0080\u07FF\u0800\uffff\ud83d\uDE00"
    expected = '"\\/\b\f\n\r\t\0\x7f\x80\u07ff\u0800\uffff😀'
    assert octets(Unescaped(*laid([written])), 1) == [expected.encode()]


@settings(max_examples=200)
@given(st.lists(st.none() | st.binary(max_size=9)))
def test_base64(values: list[bytes | None]) -> None:
    written = [None if each is None else base64.b64encode(each) for each in values]
    assert surely_base64(*laid(written)).tolist() == [each is not None for each in values]
    assert octets(Base64(*laid(written)), len(values)) == [each or b"" for each in values]


@settings(max_examples=300)
@given(st.text("AQ=/+-\n", max_size=12))
def test_what_is_surely_base64_is(written: str) -> None:
    if surely_base64(*laid([written.encode()]))[0]:
        expected = base64.b64decode(written, validate=True)
        assert octets(Base64(*laid([written.encode()])), 1) == [expected]


@pytest.mark.parametrize("written", [b"Q", b"QQ=", b"=QQ=", b"QQ==QQ==", b"Q===", b"Q-==", b"===="])
def test_what_may_not_be_base64(written: bytes) -> None:
    assert not surely_base64(*laid([written]))[0]
