"""What a message may make a reader do, whether its schema asks for it or not."""

from __future__ import annotations

import pytest

from crosswire.bond import compact, idl
from crosswire.errors import BondDecodeError

ONE_FIELD = idl.parse("namespace x struct A { 0: int32 v; }", name="a.bond").struct("x.A")
LIST_OF_STRUCTS_IN_FIELD_5 = bytes([(5 << 5) | 11, 10])
FIVE_MILLION = bytes([0xC0, 0x96, 0xB1, 0x02])


def test_what_is_skipped_counts_too() -> None:
    """Unknown fields are nobody's, but passing over millions of them would hold everybody up."""
    data = LIST_OF_STRUCTS_IN_FIELD_5 + FIVE_MILLION + bytes(5_000_001)
    with pytest.raises(BondDecodeError, match="more values than the limit"):
        compact.decode(data, ONE_FIELD)


def test_a_few_unknown_structs_are_skipped() -> None:
    data = LIST_OF_STRUCTS_IN_FIELD_5 + bytes([3]) + bytes(3) + b"\0"
    assert compact.decode(data, ONE_FIELD) == ONE_FIELD.python_class()
