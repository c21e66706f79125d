"""Layouts agree with themselves: struct formats are as long as the offsets next to them state."""

from __future__ import annotations

from importlib import import_module
from struct import Struct

import pytest

from crosswire.wire.emp import layout as emp
from crosswire.wire.micromsg2 import layout as micromsg2
from crosswire.wire.zmtp import layout as zmtp


@pytest.mark.parametrize(
    ("struct", "size"),
    [
        (emp.HEADER_STRUCT, emp.HEADER_SIZE),
        (emp.HELLO_STRUCT, emp.HELLO_SIZE),
        (emp.ERROR_STRUCT, emp.ERROR_DESCRIPTION_OFFSET),
        (emp.REQUEST_STRUCT, emp.JSON_OFFSET),
        (zmtp.LONG_HEADER_STRUCT, zmtp.LONG_HEADER_SIZE),
        (micromsg2.MESSAGE_STRUCT, micromsg2.MESSAGE_HEADER_SIZE),
        (micromsg2.SEQUENCE_STRUCT, micromsg2.DESTINATION_LENGTH_OFFSET),
        (micromsg2.LENGTH_STRUCT, micromsg2.PROPERTIES_LENGTH_SIZE),
        (micromsg2.LENGTH_STRUCT, micromsg2.EXTENSIONS_LENGTH_SIZE),
    ],
)
def test_a_struct_ends_where_the_next_field_starts(struct: Struct, size: int) -> None:
    assert struct.size == size


def test_zmtp_sizes_are_those_of_the_rfcs() -> None:
    assert zmtp.GREETING_SIZE == 64
    assert zmtp.HELLO_SIZE == 194  # RFC 26 counts the name too: 200
    assert zmtp.WELCOME_SIZE == 160
    assert zmtp.VOUCH_SIZE == 96


@pytest.mark.parametrize("name", ["emp", "emqp", "zmtp", "micromsg2"])
def test_a_layout_holds_plain_values(name: str) -> None:
    """Compiled kernels take them as constants."""
    layout = import_module(f"crosswire.wire.{name}.layout")
    plain = (int, float, str, bytes, tuple, Struct)
    values = {key: value for key, value in vars(layout).items() if key.isupper()}
    assert values
    assert all(isinstance(value, plain) for value in values.values())
