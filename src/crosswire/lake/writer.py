"""Messages and ledger into files: tables made column by column, prepared, then published.

Everything here runs on a thread beside the event loop. What Python has to do for a message is done
in short slices with a breath in between, so that the loop is never kept waiting; the rest is
Arrow's, which lets go of the interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from crosswire.envelope import Envelope, Property
from crosswire.errors import CrosswireError
from crosswire.lake.columns import binary, booleans, int32s, integers, maps, text
from crosswire.lake.files import FinishedFile, clear, discard, is_covered, prepare, publish
from crosswire.lake.schemas import GAPS, LEDGER, MESSAGES

__all__ = ["LakeBatch", "LakeWriter", "MissingRows", "Runs", "ledger_table", "messages_table"]

_SLICE: Final = 2000
_BREATH_S: Final = 0.0003
_SLICE_BYTES: Final = 1 << 28


class Runs(Protocol):
    """A block of the ledger, column by column, as the hub stores it.

    A run is the same step of `lengths` messages. Text is a number in `words`; ids and counts are 64
    bit little-endian, counts only of those runs that are `counted`.
    """

    @property
    def words(self) -> list[str]: ...
    @property
    def times(self) -> list[int]: ...
    @property
    def steps(self) -> list[int]: ...
    @property
    def destinations(self) -> list[int]: ...
    @property
    def protocols(self) -> list[int]: ...
    @property
    def connections(self) -> list[int]: ...
    @property
    def principals(self) -> list[int]: ...
    @property
    def attempts(self) -> list[int]: ...
    @property
    def details(self) -> list[int]: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def counted(self) -> list[bool]: ...
    @property
    def ids(self) -> bytes: ...
    @property
    def counts(self) -> bytes: ...


class MissingRows(msgspec.Struct, frozen=True):
    """Rows that a table will never have, and why."""

    table: str
    first: int
    last: int
    time: int
    reason: str


class LakeBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the lake as one: messages from `first_seq` on, blocks by their first rows."""

    first_seq: int = 1
    messages: Sequence[Envelope] = ()
    blocks: Sequence[tuple[int, Runs]] = ()
    first_gap: int = 1
    gaps: Sequence[MissingRows] = ()


class LakeWriter:
    """Writes for one node into one lake. `steps` has the ledger's steps in words, by number."""

    def __init__(
        self,
        lake: Path,
        node: str,
        steps: Mapping[int, str],
        *,
        breathe: Callable[[float], None] = time.sleep,
    ) -> None:
        self.lake = lake
        self.node = node
        self._steps = steps
        self._breathe = breathe

    def prepare(self, batch: LakeBatch) -> list[FinishedFile]:
        """Files that are complete and synced, but not in place.

        Raises OSError, and CrosswireError for what can never be written; then nothing is left.
        """
        parts: list[FinishedFile] = []
        try:
            if batch.messages:
                rows = self._messages(batch)
                parts += prepare(self.lake, "messages", rows)
            if batch.blocks:
                rows = ledger_table(self.node, batch.blocks, self._steps)
                parts += prepare(self.lake, "ledger", rows)
            if batch.gaps:
                rows = _gaps_table(self.node, batch.first_gap, batch.gaps)
                parts += prepare(self.lake, "gaps", rows)
        except BaseException as error:
            discard(parts)
            if isinstance(error, ValueError | TypeError | OverflowError | pa.ArrowException):
                raise CrosswireError(f"can't be written as Parquet: {error}") from error
            raise
        return parts

    def _messages(self, batch: LakeBatch) -> pa.Table:
        tables = []
        seq = batch.first_seq
        for some in _slices(batch.messages):
            tables.append(messages_table(self.node, seq, some, breathe=self._breathe))
            seq += len(some)
        return pa.concat_tables(tables)

    @staticmethod
    def publish(parts: Iterable[FinishedFile]) -> None:
        """Raises OSError; may be tried again."""
        publish(parts)

    @staticmethod
    def discard(parts: Iterable[FinishedFile]) -> None:
        discard(parts)

    def has(self, table: str, first: int, last: int) -> bool:
        """Are these rows in place already?"""
        return is_covered(self.lake, table, self.node, first, last)

    def clear(self) -> None:
        """Throw away what an earlier life prepared and did not publish."""
        for table in ("messages", "ledger", "gaps"):
            clear(self.lake, table, self.node)


# ---------------------------------------------------------------------------------------- messages

_names: Final = Envelope.__struct_fields__
_json: Final = msgspec.json.Encoder().encode


def messages_table(
    node: str,
    first_seq: int,
    envelopes: Sequence[Envelope],
    *,
    names: Sequence[str] = tuple(MESSAGES.names),
    breathe: Callable[[float], None] = time.sleep,
) -> pa.Table:
    """Rows of `messages`, numbered from `first_seq` on; not all columns, where `names` says so."""
    values = zip(*map(msgspec.structs.astuple, envelopes), strict=True)
    fields: dict[str, Any] = dict(zip(_names, values, strict=True))
    fields["node"] = [node] * len(envelopes)
    fields["seq"] = np.arange(first_seq, first_seq + len(envelopes))
    breathe(_BREATH_S)
    columns = {name: _COLUMNS[name](fields[name]) for name in names}
    breathe(_BREATH_S)
    return _table(columns, MESSAGES if len(names) == len(MESSAGES) else _part(names))


def _part(names: Sequence[str]) -> pa.Schema:
    return pa.schema([MESSAGES.field(name) for name in names])


def _properties(values: Sequence[dict[str, Property]]) -> pa.Array:
    return text([_json(each).decode() if each else "{}" for each in values])


_COLUMNS: Final[dict[str, Callable[[Any], pa.Array]]] = {
    **dict.fromkeys(MESSAGES.names, text),
    "seq": integers,
    "id": integers,
    "time": integers,
    "expires": integers,
    "crc": integers,
    "properties": _properties,
    "native": maps,
    "durable": booleans,
    "payload": binary,
}
"""How each is made of its values."""


def _table(columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _slices(envelopes: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
    """As many as are dealt with at once: not too many, and not too large."""
    for start in range(0, len(envelopes), _SLICE):
        some = envelopes[start : start + _SLICE]
        if sum(len(each.payload) for each in some) < _SLICE_BYTES:
            yield some
        else:
            for envelope in some:
                yield [envelope]


# ------------------------------------------------------------------------------------------ ledger


def ledger_table(
    node: str, blocks: Iterable[tuple[int, Runs]], steps: Mapping[int, str]
) -> pa.Table:
    """Rows of `ledger`: every column of every block is spread over its runs at once."""
    return pa.concat_tables([_block_table(node, first, runs, steps) for first, runs in blocks])


def _block_table(node: str, first_row: int, runs: Runs, steps: Mapping[int, str]) -> pa.Table:
    lengths = np.asarray(runs.lengths, np.int64)
    ids = np.frombuffer(runs.ids, "<i8")
    count = len(ids)
    words = text(runs.words)
    numbers = sorted(steps)
    known = text([steps[number] for number in numbers])

    def spread(values: list[int]) -> Any:
        return np.repeat(np.asarray(values, np.int64), lengths)

    def text_column(values: list[int]) -> pa.Array:
        return words.take(integers(spread(values)))

    columns = {
        "node": text([node] * count),
        "seq": integers(np.arange(first_row, first_row + count)),
        "id": integers(ids),
        "time": integers(spread(runs.times)),
        "step": known.take(integers(np.searchsorted(numbers, spread(runs.steps)))),
        "destination": text_column(runs.destinations),
        "protocol": text_column(runs.protocols),
        "connection": text_column(runs.connections),
        "principal": text_column(runs.principals),
        "attempt": int32s(spread(runs.attempts)),
        "detail": text_column(runs.details),
        "count": integers(_counts(runs, lengths, count)),
    }
    return _table(columns, LEDGER)


def _counts(runs: Runs, lengths: Any, count: int) -> Any:
    """1, where a run does not say otherwise."""
    counts = np.ones(count, np.int64)
    if runs.counts:
        counts[np.repeat(np.asarray(runs.counted, bool), lengths)] = np.frombuffer(
            runs.counts, "<i8"
        )
    return counts


def _gaps_table(node: str, first_seq: int, gaps: Sequence[MissingRows]) -> pa.Table:
    columns = {
        "node": text([node] * len(gaps)),
        "seq": integers(np.arange(first_seq, first_seq + len(gaps))),
        "time": integers([gap.time for gap in gaps]),
        "table": text([gap.table for gap in gaps]),
        "first": integers([gap.first for gap in gaps]),
        "last": integers([gap.last for gap in gaps]),
        "reason": text([gap.reason for gap in gaps]),
    }
    return _table(columns, GAPS)
