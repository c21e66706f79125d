"""Row groups of sealed files as Parquet files of their own, made without decoding them.

A reader gets the columns that it asked for as they are in the file: compressed, with the checksums
of their pages. Only the footer is made anew. The file's own would not do: it has the least and the
greatest value of every column in all row groups, also in those that a reader may not see.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.schemas import MESSAGES

__all__ = ["RowGroupFile", "RowGroupFiles"]

_DESTINATION: Final = "destination"
_MOST_KNOWN: Final = 256
_MOST_NAMES: Final = 20_000
"""Files, and destinations of their row groups, that are remembered: some MiB, whatever the names
that users have chosen."""
_MOST_DESTINATIONS: Final = 1_000
"""A row group with more of them is not given away as it is: it would take long to check them."""
_MAGIC: Final = b"PAR1"
_FOOTER_END: Final = 4 + len(_MAGIC)
_TYPES: Final = {"BOOLEAN": 0, "INT32": 1, "INT64": 2, "BYTE_ARRAY": 6}
_CODECS: Final = {"UNCOMPRESSED": 0, "ZSTD": 6}
_ENCODINGS: Final = {"PLAIN": 0, "PLAIN_DICTIONARY": 2, "RLE": 3, "RLE_DICTIONARY": 8}
_UTF8: Final = 0
_REQUIRED: Final = 0
# Types of Thrift's compact protocol, in which footers are written.
_I32: Final = 5
_I64: Final = 6
_BINARY: Final = 8
_LIST: Final = 9
_STRUCT: Final = 12
_SHORT_LIST: Final = 15


class _ColumnChunk(NamedTuple):
    """A column of a row group: where it is, and what is in its footer."""

    type: int
    codec: int
    encodings: tuple[int, ...]
    values: int
    size_bytes: int
    decoded_bytes: int
    first_page: int
    data_page: int
    dictionary_page: int | None


class _RowGroupLayout(NamedTuple):
    """Where the columns of a row group are in their file; without those that can't be given away as
    they are, because they are nested or written otherwise than this lake's writer does."""

    rows: int
    columns: dict[str, _ColumnChunk]


class _KnownFile:
    """What is remembered of a file: the layouts of its row groups, and the destinations of those
    that were opened."""

    def __init__(self, groups: list[_RowGroupLayout]) -> None:
        self.groups = groups
        self.destinations: dict[int, frozenset[str] | None] = {}
        self.names = 0
        """How many destinations are in these sets."""


class RowGroupFiles:
    """Opens row groups, and remembers the files that were opened last. For several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int, int, int], _KnownFile] = OrderedDict()
        self._lock = Lock()

    def open(self, path: Path, index: int, names: Sequence[str]) -> RowGroupFile | None:
        """A row group of a file of `messages`, with these columns; None if it can't be given away
        as it is. Raises FileNotFoundError, OSError, pyarrow's errors for a file that is damaged.
        """
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            known = self._looked_up(file)
            if index not in known.destinations:
                self._remember(known, index, _destinations(file, index))
            group, destinations = known.groups[index], known.destinations[index]
            if destinations is None or not group.columns.keys() >= set(names):
                os.close(file)
                return None
            return RowGroupFile(file, path, group, names, destinations)
        except BaseException:
            os.close(file)
            raise

    def _looked_up(self, file: int) -> _KnownFile:
        # Not by its path alone: what decides who may read a file must belong to these very bytes.
        status = os.fstat(file)
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        with _opened(file) as opened:
            known = _KnownFile(_layouts(opened.metadata))
        with self._lock:
            self._known[key] = known
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return known

    def _remember(self, known: _KnownFile, index: int, names: frozenset[str] | None) -> None:
        with self._lock:
            known.destinations[index] = names
            known.names += len(names or ())
            total = sum(each.names for each in self._known.values())
            while total > _MOST_NAMES and len(self._known) > 1:
                _, oldest = self._known.popitem(last=False)
                total -= oldest.names


class RowGroupFile:
    """A Parquet file with some columns of one row group. The original stays open until `close`: it
    may be compacted or deleted meanwhile."""

    def __init__(
        self,
        file: int,
        path: Path,
        group: _RowGroupLayout,
        names: Sequence[str],
        destinations: frozenset[str],
    ) -> None:
        """`destinations` are all that its rows have."""
        chunks = [group.columns[name] for name in names]
        starts = list(accumulate((each.size_bytes for each in chunks), initial=len(_MAGIC)))
        footer = _footer(group.rows, names, chunks, starts)
        self.destinations = destinations
        self.size_bytes = starts[-1] + len(footer) + _FOOTER_END
        self.decoded_bytes = sum(each.decoded_bytes for each in chunks)
        self._path = path
        self._end = footer + len(footer).to_bytes(4, "little") + _MAGIC
        self._ranges = [(each.first_page, each.size_bytes) for each in chunks]
        self._file = file

    def __enter__(self) -> RowGroupFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the original. May be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    # A request that is cancelled while a thread opens the file never gets to see it.
    __del__ = close

    def pieces(self, most: int) -> Iterator[bytes]:
        """The file from its beginning to its end, at most `most` bytes at once. Raises LakeError
        if the original is shorter than it has to be."""
        yield _MAGIC
        for offset, size in self._ranges:
            end = offset + size
            while offset < end:
                piece = os.pread(self._file, min(end - offset, most), offset)
                if not piece:
                    raise LakeError(f"{self._path} can't be read: it has no byte {offset}")
                yield piece
                offset += len(piece)
        yield self._end


@contextmanager
def _opened(file: int) -> Iterator[Any]:
    with (
        os.fdopen(file, "rb", closefd=False) as source,
        pq.ParquetFile(
            source, page_checksum_verification=True, read_dictionary=[_DESTINATION]
        ) as opened,
    ):
        yield opened


def _layouts(metadata: Any) -> list[_RowGroupLayout]:
    """The layouts of all row groups, by a file's footer as pyarrow has it."""
    flat = {}
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        if column.max_definition_level == 0 and column.path in MESSAGES.names:
            flat[column.path] = index
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = {name: _chunk(group.column(index)) for name, index in flat.items()}
        known = {name: chunk for name, chunk in chunks.items() if chunk is not None}
        found.append(_RowGroupLayout(group.num_rows, known))
    return found


def _chunk(column: Any) -> _ColumnChunk | None:
    encodings = [_ENCODINGS.get(each) for each in column.encodings]
    kind, codec = _TYPES.get(column.physical_type), _CODECS.get(column.compression)
    known = tuple(each for each in encodings if each is not None)
    if kind is None or codec is None or len(known) < len(encodings):
        return None
    dictionary = column.dictionary_page_offset if column.has_dictionary_page else None
    first = column.data_page_offset
    return _ColumnChunk(
        kind,
        codec,
        known,
        column.num_values,
        column.total_compressed_size,
        column.total_uncompressed_size,
        first if dictionary is None else min(first, dictionary),
        first,
        dictionary,
    )


def _destinations(file: int, group: int) -> frozenset[str] | None:
    """The different destinations of a row group; None if there are very many."""
    with _opened(file) as opened:
        column = opened.read_row_group(group, [_DESTINATION], use_threads=False).column(0)
    found: set[str] = set()
    for chunk in column.chunks:
        # Only what rows have: a dictionary may hold more than that.
        used = pc.unique(chunk.indices)
        if len(found) + len(used) > _MOST_DESTINATIONS:
            return None
        found.update(chunk.dictionary.take(used).to_pylist())
    return frozenset(found)


# -------------------------------------------------------------------------------------- the footer


def _footer(
    rows: int, names: Sequence[str], chunks: Sequence[_ColumnChunk], starts: Sequence[int]
) -> bytes:
    """FileMetaData of the Parquet format, with one row group and no statistics."""
    root = _struct((4, _BINARY, _binary(b"schema")), (5, _I32, _integer(len(names))))
    elements = [root, *map(_element, names, chunks)]
    group = _struct(
        (1, _LIST, _list(_STRUCT, list(map(_column, names, chunks, starts)))),
        (2, _I64, _integer(sum(each.decoded_bytes for each in chunks))),
        (3, _I64, _integer(rows)),
    )
    return _struct(
        (1, _I32, _integer(2)),
        (2, _LIST, _list(_STRUCT, elements)),
        (3, _I64, _integer(rows)),
        (4, _LIST, _list(_STRUCT, [group])),
    )


def _element(name: str, chunk: _ColumnChunk) -> bytes:
    fields = [
        (1, _I32, _integer(chunk.type)),
        (3, _I32, _integer(_REQUIRED)),
        (4, _BINARY, _binary(name.encode())),
    ]
    if pa.types.is_string(MESSAGES.field(name).type):
        fields.append((6, _I32, _integer(_UTF8)))
    return _struct(*fields)


def _column(name: str, chunk: _ColumnChunk, start: int) -> bytes:
    moved = start - chunk.first_page
    fields = [
        (1, _I32, _integer(chunk.type)),
        (2, _LIST, _list(_I32, [_integer(each) for each in chunk.encodings])),
        (3, _LIST, _list(_BINARY, [_binary(name.encode())])),
        (4, _I32, _integer(chunk.codec)),
        (5, _I64, _integer(chunk.values)),
        (6, _I64, _integer(chunk.decoded_bytes)),
        (7, _I64, _integer(chunk.size_bytes)),
        (9, _I64, _integer(chunk.data_page + moved)),
    ]
    if chunk.dictionary_page is not None:
        fields.append((11, _I64, _integer(chunk.dictionary_page + moved)))
    return _struct((2, _I64, _integer(start)), (3, _STRUCT, _struct(*fields)))


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """Fields in the order of their numbers, of which the difference to the last one is written."""
    out = bytearray()
    last = 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        out += value
        last = number
    out.append(0)
    return bytes(out)


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    count = len(items)
    if count < _SHORT_LIST:
        head = bytes([count << 4 | kind])
    else:
        head = bytes([_SHORT_LIST << 4 | kind]) + _number(count)
    return head + b"".join(items)


def _binary(value: bytes) -> bytes:
    return _number(len(value)) + value


def _integer(value: int) -> bytes:
    return _number(value << 1 if value >= 0 else (-value << 1) - 1)


def _number(value: int) -> bytes:
    """Seven bits in each byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
