"""The body of a group: the ordered list of its changes, so that replicas repeat bytes and decide
nothing.

    count    4            big-endian, as all numbers
    kinds    count × 1    1 put, 2 delete, 3 delete range
    sizes    2 × count × 4
    bytes                 key, value; or key, nothing; or begin, end; and so on

Sizes stand together because Python reads thousands of numbers in one call; and they are compared
with the bytes that are there before anything is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct as Layout
from struct import unpack_from
from typing import Final, Protocol

from crosswire.errors import LogDamaged

__all__ = ["GroupBody", "RecordedBody", "read_body", "repeat_body"]

_COUNT: Final = Layout(">I")
_PUT: Final = 1
_DELETE: Final = 2
_DELETE_RANGE: Final = 3
_CHANGE_BYTES: Final = 9


class GroupBody(Protocol):
    """The ordered list of puts, deletes and range deletions that a group consists of.

    It is all that a replica has to repeat. With the local log the store's engine provides it: its
    own write batch, so that nothing is copied or encoded twice. `RecordedBody` can be sent
    elsewhere, and repeated here.
    """

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, whatever the key had before."""

    def delete(self, key: bytes) -> None:
        """Remove a key; no error where there is none."""

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove all keys in [begin, end)."""


class RecordedBody:
    """A group's changes as bytes, to be sent to a replicated log.

    `size_bytes` is the size of `encode()`, so that a group can be closed before it is larger than
    a record.
    """

    __slots__ = ("_kinds", "_pieces", "size_bytes")

    def __init__(self) -> None:
        self._kinds = bytearray()
        self._pieces: list[bytes] = []
        self.size_bytes = _COUNT.size

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, whatever the key had before."""
        self._kinds.append(_PUT)
        self._pieces += (key, value)
        self.size_bytes += _CHANGE_BYTES + len(key) + len(value)

    def delete(self, key: bytes) -> None:
        """Remove a key; no error where there is none."""
        self._kinds.append(_DELETE)
        self._pieces += (key, b"")
        self.size_bytes += _CHANGE_BYTES + len(key)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove all keys in [begin, end)."""
        self._kinds.append(_DELETE_RANGE)
        self._pieces += (begin, end)
        self.size_bytes += _CHANGE_BYTES + len(begin) + len(end)

    def encode(self) -> bytes:
        """The bytes for `RecordChain.group` and `repeat_body`."""
        pieces = self._pieces
        sizes = Layout(f">{len(pieces)}I").pack(*map(len, pieces))
        return b"".join((_COUNT.pack(len(self._kinds)), self._kinds, sizes, *pieces))


def read_body(body: bytes | memoryview) -> Iterator[tuple[int, bytes, bytes]]:
    """The changes of a group: (1, key, value), (2, key, b"") or (3, begin, end), in order.

    All of it is verified before the first one is returned. Raises LogDamaged.
    """
    kinds, pieces = _split_body(body)
    return zip(kinds, pieces[::2], pieces[1::2], strict=True)


def repeat_body(body: bytes | memoryview, into: GroupBody) -> None:
    """Make a group's changes again, in order, or none of them. Raises LogDamaged."""
    kinds, pieces = _split_body(body)
    put = into.put
    for kind, first, second in zip(kinds, pieces[::2], pieces[1::2], strict=True):
        if kind == _PUT:
            put(first, second)
        elif kind == _DELETE:
            into.delete(first)
        else:
            into.delete_range(first, second)


def _split_body(body: bytes | memoryview) -> tuple[bytes, list[bytes]]:
    if len(body) < _COUNT.size:
        raise LogDamaged(f"the body of a group in the log has only {len(body)} bytes")
    (count,) = _COUNT.unpack_from(body)
    start = _COUNT.size + _CHANGE_BYTES * count
    # Before anything of that count is made: it may be any number.
    if start > len(body):
        raise LogDamaged(f"a group in the log has {count} changes in {len(body)} bytes")
    kinds = bytes(body[_COUNT.size : _COUNT.size + count])
    sizes: Sequence[int] = unpack_from(f">{2 * count}I", body, _COUNT.size + count)
    if start + sum(sizes) != len(body):
        raise LogDamaged("the sizes of the changes of a group in the log are wrong")
    if kinds.translate(None, b"\x01\x02\x03"):
        raise LogDamaged("a group in the log has a change of an unknown kind")
    data = bytes(body)
    pieces: list[bytes] = []
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    if _DELETE in kinds and any(
        kind == _DELETE and value for kind, value in zip(kinds, pieces[1::2], strict=True)
    ):
        raise LogDamaged("a group in the log deletes a key and has a value for it")
    return kinds, pieces
