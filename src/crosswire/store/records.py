"""Decodes the small records of state spaces: whatever is wrong with one raises RecordDamaged.

Records are read when the hub starts, where one that can't be used must not keep the rest from
being used. MessagePack that is damaged shows in several ways (no MessagePack at all, other types,
text that is not UTF-8, numbers out of range, a nesting without end): callers handle one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from crosswire.envelope import LARGEST_INTEGER
from crosswire.errors import RecordDamaged

__all__ = ["Count", "reader"]

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
"""An id, a number of messages or bytes, or a time in microseconds."""

T = TypeVar("T")


def reader(kind: type[T] | Any, what: str) -> Callable[[bytes], T]:
    """A decoder of records of one kind, which raises RecordDamaged; `what` is in its text."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(record: bytes) -> T:
        try:
            decoded: T = decode(record)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RecordDamaged(f"{what} can't be read: {error}") from None
        return decoded

    return read
