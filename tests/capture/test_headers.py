"""Headers of capture files: which files are captures, and what their descriptions mean."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from crosswire.capture.headers import (
    CaptureLayout,
    Interface,
    describe_block,
    describe_file,
    is_capture,
)
from crosswire.capture.layout import UNREADABLE_LINK
from crosswire.errors import InvalidInput
from tests.pipeline.captures import ETHERNET, RAW, classic, interface, section


def test_a_capture_is_known_by_its_content(tmp_path: Path) -> None:
    for name, data in (("a", classic([])), ("b", section()), ("c", gzip.compress(b""))):
        (tmp_path / name).write_bytes(data)
        assert is_capture(tmp_path / name)
    (tmp_path / "d").write_bytes(b"text")
    assert not is_capture(tmp_path / "d")


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_classic_header_has_one_interface(order: str) -> None:
    layout, start = describe_file(classic([], RAW, order=order), "a")
    assert layout == CaptureLayout(ng=False, little=order == "<", interfaces=(Interface(RAW),))
    assert start == 24


@pytest.mark.parametrize("order", ["<", ">"])
def test_sections_and_interfaces(order: str) -> None:
    layout, start = describe_file(section(order), "a")
    assert start == 0
    head = section(order)
    layout, length = describe_block(layout, memoryview(head), "a", 0)
    assert (layout, length) == (CaptureLayout(ng=True, little=order == "<"), len(head))
    for link, known in ((ETHERNET, ETHERNET), (249, UNREADABLE_LINK)):
        block = interface(link, order)
        assert describe_block(layout, memoryview(block)[:-1], "a", 0) == (layout, 0)
        layout, length = describe_block(layout, memoryview(block), "a", 0)
        assert (layout.interfaces[-1].link, length) == (known, len(block))
    # A new section has none of them.
    layout, _ = describe_block(layout, memoryview(head), "a", 0)
    assert layout.interfaces == ()


def test_a_section_without_a_byte_order_is_damaged() -> None:
    head = bytearray(section())
    head[8] ^= 1
    with pytest.raises(InvalidInput, match="a is damaged at byte 7"):
        describe_block(CaptureLayout(ng=True, little=True), memoryview(head), "a", 7)
