"""Numbers in requests: ids, and the check that all of them fit into 64 bits."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, TypeAlias

import msgspec

from crosswire.envelope import LARGEST_INTEGER
from crosswire.errors import InvalidEnvelope

__all__ = ["Few", "Id", "Many", "check_numbers"]

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
"""Of a message; 0 is before all of them."""
Many: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
"""How many rows of a list a response may have."""
Few: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1_000)]
"""How many messages a response may have."""


def check_numbers(value: object) -> None:
    """Raises InvalidEnvelope for a number beyond 64 bits or not finite, at any depth of `value`.

    JSON allows such numbers, but neither the store nor the other protocols can carry them. JSON
    payloads (`msgspec.Raw`) are not checked: they are stored as they are.
    """
    if isinstance(value, int):
        if not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            raise InvalidEnvelope("a number has more than 64 bits")
    elif isinstance(value, float):
        if not isfinite(value):
            raise InvalidEnvelope("a number is not finite")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            check_numbers(getattr(value, name))
    elif isinstance(value, dict):
        for each in value.values():
            check_numbers(each)
    elif isinstance(value, list | tuple):
        # A body of a MiB may have half a million numbers or texts: these loops are in C.
        types = set(map(type, value))
        if types == {int}:
            check_numbers(min(value))
            check_numbers(max(value))
        elif not types <= {str, bool}:
            for each in value:
                check_numbers(each)
