"""Messages and ledger into files: tables made column by column, prepared, then published.

Everything here runs on a thread beside the event loop. What Python does per message is done in
short slices with a pause in between, so that the event loop gets the interpreter lock soon; the
rest is Arrow's, which releases that lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
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

__all__ = [
    "LakeBatch",
    "LakeWriter",
    "LedgerColumns",
    "MissingRows",
    "ledger_table",
    "messages_table",
]

_SLICE: Final = 2000
"""Messages between two pauses: a few milliseconds of Python."""
_PAUSE_S: Final = 0.0003
_SLICE_BYTES: Final = 1 << 28
_ID_BYTES: Final = 8


class LedgerColumns(Protocol):
    """A block of the ledger, column by column, as the hub stores it.

    A run is the same step of several messages; `lengths` has their numbers. Text columns are
    indexes of `words`. `ids` has all messages of all runs, 64 bits each, little-endian; `counts`
    likewise, but only for runs that are `counted`.
    """

    @property
    def words(self) -> list[str]:
        """Every text of the block, once."""
        ...

    @property
    def times(self) -> list[int]:
        """µs since 1970, of each run."""
        ...

    @property
    def steps(self) -> list[int]:
        """Numbers of steps."""
        ...

    @property
    def destinations(self) -> list[int]:
        """Indexes of `words`."""
        ...

    @property
    def protocols(self) -> list[int]:
        """Indexes of `words`."""
        ...

    @property
    def connections(self) -> list[int]:
        """Indexes of `words`."""
        ...

    @property
    def principals(self) -> list[int]:
        """Indexes of `words`."""
        ...

    @property
    def attempts(self) -> list[int]:
        """Which delivery attempt it was, from 1; 0 where it was none."""
        ...

    @property
    def details(self) -> list[int]:
        """Indexes of `words`."""
        ...

    @property
    def subscriptions(self) -> list[int]:
        """Indexes of `words`."""
        ...

    @property
    def lengths(self) -> list[int]:
        """The number of messages of each run."""
        ...

    @property
    def counted(self) -> list[bool]:
        """Whether a run has counts."""
        ...

    @property
    def ids(self) -> bytes:
        """Of all messages of all runs."""
        ...

    @property
    def counts(self) -> bytes:
        """Of the messages of counted runs."""
        ...


class MissingRows(msgspec.Struct, frozen=True):
    """Rows that a table will never have, and the reason."""

    table: str
    first: int
    last: int
    time: int
    reason: str


class LakeBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one seal puts into the lake: messages, numbered from `first_seq` on; blocks of the
    ledger, each with its first row's seq; gaps, numbered from `first_gap` on."""

    first_seq: int = 1
    messages: Sequence[Envelope] = ()
    blocks: Sequence[tuple[int, LedgerColumns]] = ()
    first_gap: int = 1
    gaps: Sequence[MissingRows] = ()


class LakeWriter:
    """Writes the tables of one node into one lake. `steps` has the names of the ledger's steps.

    The caller prepares files, commits the seal, then publishes: see `lake.files` for the reason.
    """

    def __init__(
        self,
        lake: Path,
        node: str,
        steps: Mapping[int, str],
        *,
        term: int = 0,
        writer: str = "",
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`term` and `writer` are those of the leader, where the hub has replicas."""
        self.lake = lake
        self._term = term
        self._writer = writer
        self.node = node
        self._steps = steps
        self._pause = pause

    def prepare(self, batch: LakeBatch) -> list[FinishedFile]:
        """Files of the batch that are complete and synced, but not published.

        Raises OSError, after which it may be tried again, and CrosswireError for a batch that can
        never be written; then no file is left.
        """
        parts: list[FinishedFile] = []
        try:
            if batch.messages:
                rows = self._messages(batch)
                parts += self._prepare("messages", rows)
            if batch.blocks:
                rows = ledger_table(self.node, batch.blocks, self._steps)
                parts += self._prepare("ledger", rows)
            if batch.gaps:
                rows = _gaps_table(self.node, batch.first_gap, batch.gaps)
                parts += self._prepare("gaps", rows)
        except BaseException as error:
            discard(parts)
            # Arrow and Python reject such values every time, so that retrying is pointless.
            if isinstance(error, ValueError | TypeError | OverflowError | pa.ArrowException):
                raise CrosswireError(f"can't be written as Parquet: {error}") from error
            raise
        return parts

    def _prepare(self, table: str, rows: pa.Table) -> list[FinishedFile]:
        return prepare(self.lake, table, rows, term=self._term, writer=self._writer)

    def _messages(self, batch: LakeBatch) -> pa.Table:
        tables = []
        seq = batch.first_seq
        for some in _slices(batch.messages):
            tables.append(messages_table(self.node, seq, some, pause=self._pause))
            seq += len(some)
        return pa.concat_tables(tables)

    @staticmethod
    def publish(parts: Iterable[FinishedFile]) -> None:
        """Make prepared files visible. Raises OSError, and may then be called again."""
        publish(parts)

    @staticmethod
    def discard(parts: Iterable[FinishedFile]) -> None:
        """Remove prepared files, whose seal was not committed."""
        discard(parts)

    def has(self, table: str, first: int, last: int) -> bool:
        """Whether published files hold these rows: a restart redoes only those that they don't."""
        return is_covered(self.lake, table, self.node, first, last)

    def clear(self) -> None:
        """Remove what an earlier process prepared and did not publish. A committed seal among them
        is redone from the store, so nothing is lost."""
        for table in ("messages", "ledger", "gaps"):
            clear(self.lake, table, self.node, self._writer)


# ---------------------------------------------------------------------------------------- messages

_names: Final = Envelope.__struct_fields__
_json: Final = msgspec.json.Encoder().encode


def messages_table(
    node: str,
    first_seq: int,
    envelopes: Sequence[Envelope],
    *,
    names: Sequence[str] = tuple(MESSAGES.names),
    pause: Callable[[float], None] = time.sleep,
) -> pa.Table:
    """Rows of `messages`, numbered from `first_seq` on, with the columns `names`."""
    values = zip(*map(msgspec.structs.astuple, envelopes), strict=True)
    fields: dict[str, Any] = dict(zip(_names, values, strict=True))
    fields["node"] = [node] * len(envelopes)
    fields["seq"] = np.arange(first_seq, first_seq + len(envelopes))
    pause(_PAUSE_S)
    columns = {name: _COLUMNS[name](fields[name]) for name in names}
    pause(_PAUSE_S)
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
"""The function that makes each column of `messages`."""


def _table(columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _slices(envelopes: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
    """Slices that are short, for the event loop's sake, and far from 2 GiB of payloads, which is
    the most that a column of Arrow can hold."""
    for start in range(0, len(envelopes), _SLICE):
        some = envelopes[start : start + _SLICE]
        if sum(len(each.payload) for each in some) < _SLICE_BYTES:
            yield some
        else:
            for envelope in some:
                yield [envelope]


# ------------------------------------------------------------------------------------------ ledger


def ledger_table(
    node: str, blocks: Iterable[tuple[int, LedgerColumns]], steps: Mapping[int, str]
) -> pa.Table:
    """Rows of `ledger`: each column is repeated over its runs in one operation for all blocks,
    without a Python object per row. A hub with little to do has a block for each message, so
    nothing here is done per block either, but for chaining their columns."""
    first_rows, runs = zip(*blocks, strict=True)
    run_counts = np.fromiter((len(each.lengths) for each in runs), np.int64, len(runs))
    total = int(run_counts.sum())

    def chained(column: str) -> Any:
        """One value for each run."""
        values = chain.from_iterable(map(attrgetter(column), runs))
        return np.fromiter(values, np.int64, total)

    lengths = chained("lengths")
    ids = np.frombuffer(b"".join([each.ids for each in runs]), "<i8")
    count = len(ids)
    words = text(list(chain.from_iterable(each.words for each in runs)))
    # The words of a block begin after those of the blocks before it.
    word_counts = np.fromiter((len(each.words) for each in runs), np.int64, len(runs))
    first_words = np.repeat(np.cumsum(word_counts) - word_counts, run_counts)
    row_counts = np.fromiter((len(each.ids) // _ID_BYTES for each in runs), np.int64, len(runs))
    rows_before = np.cumsum(row_counts) - row_counts
    numbers = sorted(steps)
    known = text([steps[number] for number in numbers])

    def spread(values: Any) -> Any:
        return np.repeat(values, lengths)

    def text_column(column: str) -> pa.Array:
        return words.take(integers(spread(chained(column) + first_words)))

    columns = {
        "node": text([node] * count),
        "seq": integers(np.repeat(first_rows - rows_before, row_counts) + np.arange(count)),
        "id": integers(ids),
        "time": integers(spread(chained("times"))),
        # Steps are numbers with gaps: the index among the sorted ones is that of the name.
        "step": known.take(integers(np.searchsorted(numbers, spread(chained("steps"))))),
        "destination": text_column("destinations"),
        "protocol": text_column("protocols"),
        "connection": text_column("connections"),
        "principal": text_column("principals"),
        "attempt": int32s(spread(chained("attempts"))),
        "detail": text_column("details"),
        "count": integers(_counts(runs, spread(chained("counted")).astype(bool))),
        "subscription": text_column("subscriptions"),
    }
    return _table(columns, LEDGER)


def _counts(blocks: Sequence[LedgerColumns], is_counted: Any) -> Any:
    """The column `count`: 1 for rows of runs that are not counted."""
    counts = np.ones(len(is_counted), np.int64)
    if is_counted.any():
        counts[is_counted] = np.frombuffer(b"".join([each.counts for each in blocks]), "<i8")
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
