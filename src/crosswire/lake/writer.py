"""Messages and ledger into files: tables made column by column, prepared, then published.

Everything here runs on a thread beside the event loop. What Python has to do for a message is done
in short slices with a breath in between, so that the loop is never kept waiting; the rest is
Arrow's, which lets go of the interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from crosswire.envelope import Envelope
from crosswire.errors import CrosswireError
from crosswire.lake.files import Part, discard, is_covered, prepare, publish
from crosswire.lake.schemas import GAPS, LEDGER, MESSAGES

__all__ = ["Batch", "Missing", "Runs", "Writer", "ledger_table", "messages_table"]

_SLICE: Final = 500
_BREATH_S: Final = 0.0003
_INT64: Final = 1 << 63
_CONSTANT: Final = (
    "protocol",
    "connection",
    "principal",
    "kind",
    "destination",
    "key",
    "reply_to",
    "durable",
    "expires",
    "content_type",
)
"""Columns in which a slice often has one value only, which then costs nothing per message."""


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


class Missing(msgspec.Struct, frozen=True):
    """Rows that a table will never have, and why."""

    table: str
    first: int
    last: int
    time: int
    reason: str


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the lake as one: messages from `first_seq` on, blocks by their first rows."""

    first_seq: int = 1
    messages: Sequence[Envelope] = ()
    blocks: Sequence[tuple[int, Runs]] = ()
    first_gap: int = 1
    gaps: Sequence[Missing] = ()


class Writer:
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

    def prepare(self, batch: Batch) -> list[Part]:
        """Files that are complete and synced, but not in place.

        Raises OSError, and CrosswireError for what can never be written; then nothing is left.
        """
        parts: list[Part] = []
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
            if isinstance(error, ValueError | TypeError | pa.ArrowException):
                raise CrosswireError(f"can't be written as Parquet: {error}") from error
            raise
        return parts

    def _messages(self, batch: Batch) -> pa.Table:
        tables = []
        for start in range(0, len(batch.messages), _SLICE):
            some = batch.messages[start : start + _SLICE]
            tables.append(messages_table(self.node, batch.first_seq + start, some))
            self._breathe(_BREATH_S)
        return pa.concat_tables(tables)

    @staticmethod
    def publish(parts: Iterable[Part]) -> None:
        """Raises OSError; may be tried again."""
        publish(parts)

    @staticmethod
    def discard(parts: Iterable[Part]) -> None:
        discard(parts)

    def has(self, table: str, first: int, last: int) -> bool:
        """Are these rows in place already?"""
        return is_covered(self.lake, table, self.node, first, last)

    def clear(self) -> None:
        """Throw away what an earlier life prepared and did not publish."""
        for part in (self.lake / ".parts").glob(f"*-{self.node}-*.part"):
            part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- messages

_names: Final = Envelope.__struct_fields__
_json: Final = msgspec.json.Encoder().encode


def messages_table(node: str, first_seq: int, envelopes: Sequence[Envelope]) -> pa.Table:
    """Rows of `messages`, numbered from `first_seq` on."""
    count = len(envelopes)
    values = zip(*map(msgspec.structs.astuple, envelopes), strict=True)
    fields = dict(zip(_names, values, strict=True))
    columns: dict[str, Any] = {
        "node": pa.repeat(node, count),
        "seq": pa.array(np.arange(first_seq, first_seq + count)),
        "properties": _properties(fields["properties"]),
        "native": _natives(fields["native"]),
    }
    for name in MESSAGES.names:
        if name not in columns:
            columns[name] = _column(name, fields[name], MESSAGES.field(name).type)
    return pa.table([columns[name] for name in MESSAGES.names], schema=MESSAGES)


def _column(name: str, values: tuple[Any, ...], kind: pa.DataType) -> pa.Array:
    if name in _CONSTANT and len(set(values)) == 1:
        return pa.repeat(pa.scalar(values[0], kind), len(values))
    try:
        return pa.array(values, kind)
    except OverflowError:
        # A peer may name any time: one that is too far away is as good as never.
        return pa.array([min(max(each, -_INT64), _INT64 - 1) for each in values], kind)


def _properties(values: tuple[dict[str, Any], ...]) -> pa.Array:
    if not any(values):
        return pa.repeat("{}", len(values))
    return pa.array([_json(each).decode() if each else "{}" for each in values], pa.string())


def _natives(values: tuple[dict[str, bytes], ...]) -> pa.Array:
    kind = MESSAGES.field("native").type
    if not any(values):
        empty = pa.array(np.zeros(len(values) + 1, np.int32))
        return pa.MapArray.from_arrays(empty, pa.array([], pa.string()), pa.array([], pa.binary()))
    return pa.array([list(each.items()) for each in values], kind)


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
    words = pa.array(runs.words, pa.string())
    numbers = sorted(steps)
    known = pa.array([steps[number] for number in numbers], pa.string())

    def spread(values: list[int], kind: type[np.generic] = np.int64) -> Any:
        return np.repeat(np.asarray(values, kind), lengths)

    def text(values: list[int]) -> pa.Array:
        return words.take(pa.array(spread(values)))

    columns = {
        "node": pa.repeat(node, count),
        "seq": pa.array(np.arange(first_row, first_row + count)),
        "id": pa.array(ids),
        "time": pa.array(spread(runs.times)),
        "step": known.take(pa.array(np.searchsorted(numbers, spread(runs.steps)))),
        "destination": text(runs.destinations),
        "protocol": text(runs.protocols),
        "connection": text(runs.connections),
        "principal": text(runs.principals),
        "attempt": pa.array(spread(runs.attempts, np.int32)),
        "detail": text(runs.details),
        "count": pa.array(_counts(runs, lengths, count)),
    }
    return pa.table([columns[name] for name in LEDGER.names], schema=LEDGER)


def _counts(runs: Runs, lengths: Any, count: int) -> Any:
    """1, where a run does not say otherwise."""
    counts = np.ones(count, np.int64)
    if runs.counts:
        counts[np.repeat(np.asarray(runs.counted, bool), lengths)] = np.frombuffer(
            runs.counts, "<i8"
        )
    return counts


def _gaps_table(node: str, first_seq: int, gaps: Sequence[Missing]) -> pa.Table:
    rows = [
        {"node": node, "seq": first_seq + place, **msgspec.structs.asdict(gap)}
        for place, gap in enumerate(gaps)
    ]
    return pa.Table.from_pylist(rows, schema=GAPS)
