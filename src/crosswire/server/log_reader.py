"""Reads of the hub's log in bulk: old messages from the lake, recent ones from the store.

Ids that the lake covers come from its files, all others from the store, so each message comes once.
Reading is done on threads beside the event loop, in slices with pauses in between; the loop only
gives them a view of the store and how far the lake goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import Struct as Layout
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from crosswire.errors import (
    CrosswireError,
    HistoryMissing,
    InvalidEnvelope,
    RecordDamaged,
    ServiceUnavailable,
)
from crosswire.hub.hub import Hub
from crosswire.lake.columns import booleans
from crosswire.lake.history import History
from crosswire.lake.ledger_history import LedgerHistory
from crosswire.lake.row_groups import RowGroupFile
from crosswire.lake.schemas import MESSAGES
from crosswire.server.lake_feed import LakeFeed
from crosswire.server.log_selection import EARLIEST, LATEST, OTHERS, LogSelection
from crosswire.server.log_slots import LogSlots
from crosswire.server.log_snapshot import (
    DestinationTally,
    LogPiece,
    LogSnapshot,
    MissingMessages,
    Moment,
    cut,
    ids_of,
)
from crosswire.store.keys import MAX_ID
from crosswire.store.records import Count

__all__ = ["COLUMNS", "FILE_HEADER", "Log", "LogRange", "LogUser", "ReadPlan", "ReadSplit"]

COLUMNS: Final = tuple(
    name for name in MESSAGES.names if name not in ("node", "seq", "native", "crc")
)
"""What can be read of a message; `partition` in Spark is the node, which is in the plan."""

_THREADS: Final = 2
_COUNT_S: Final = 5.0
_STREAM_S: Final = 20.0
_STEP_S: Final = 0.25
_FULL_BYTES: Final = 2 << 20
_FULL_ROWS: Final = 16_384
_CHUNK_BYTES: Final = 256 << 10
_SEND_S: Final = 20.0
_CHUNK_S: Final = 1.0
"""How long a reader may take for each of these on average, after `_SEND_S`."""
_PART_ROWS: Final = 500_000
_PART_BYTES: Final = 256 << 20
_MOST_PARTS: Final = 1000
_MOVED: Final = 5
_PIECE_BYTES: Final = 1 << 20
_FILE_BYTES: Final = 64 << 20
_DECODED_BYTES: Final = 256 << 20
"""Row groups that are larger are decoded here, a piece at a time: a reader of files has to hold a
whole one."""
FILE_HEADER: Final = Layout("<qqq")
"""Before each file in `Log.files`: its first and its last id in the range, and its size."""
_WINDOW: Final = 16_384
_SUMMED: Final = 256
"""Destinations whose messages are added to those of all patterns before others have a turn."""

T = TypeVar("T")


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True, rename={"end": "behind"}):
    """What a client wants to read. Destinations may have wildcards; `starts` and `ends` (exclusive)
    are ids by destination, `*` for all others, -2 for the earliest that is left, -1 for the one
    after the latest.

    Ids below `first` and from `end` on are left out. `since` and `until` are µs since 1970: ids are
    chosen so that they include everything that was accepted in between. `limit` is the number of
    messages after which it ends, or earlier if finding them takes seconds; `parts` is the least
    number of ranges that it is divided into, 0 for none. `tally`, with a limit, has the messages
    of each destination counted, up to the limit or a little beyond it, or also the bytes of their
    payloads, which takes as long as reading them."""

    destinations: list[str]
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    first: Count = 1
    end: Count = MAX_ID
    since: int | None = None
    until: int | None = None
    limit: Count = 0
    parts: Count = 0
    tally: Literal["none", "messages", "bytes"] = "none"


class LogRange(msgspec.Struct, frozen=True, kw_only=True, rename={"end": "behind"}):
    """The plan in ids of this `node`: `first` to before `end`, in `splits`. `missing` are messages
    that existed and were deleted. `found` is False if there is nothing to read; with splits that is
    not looked up, and it is True. `count` is, with a limit, the number of messages up to `end`;
    `tallies` has, if they were asked for, those of each destination as the plan has it."""

    node: str
    starts: dict[str, int]
    ends: dict[str, int]
    first: int
    end: int
    splits: list[tuple[int, int]]
    missing: list[MissingMessages]
    found: bool
    count: int
    tallies: dict[str, DestinationTally] = {}


class ReadSplit(msgspec.Struct, frozen=True, kw_only=True, rename={"end": "behind"}):
    """A split of a plan, or the rest of one; `starts` and `ends` are those of the `LogRange`.
    With `strict`, messages that were deleted since then are an error."""

    node: str
    destinations: list[str]
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    first: Count
    end: Count
    columns: tuple[str, ...] = COLUMNS
    strict: bool = True


class LogUser(NamedTuple):
    """Who reads: whose share it counts for, "" for nobody's, and which destinations it may read.
    That is asked on threads, and anew for each batch: rights may be taken away. `hold` is called
    with how many bytes more, or less, wait to be sent; raises ServiceUnavailable."""

    holder: str
    may: Callable[[str], bool]
    hold: Callable[[int], None]


class Log:
    """Plans and serves reads of the log. Use it on the event loop."""

    def __init__(
        self, hub: Hub, lake: Path, feed: LakeFeed | None, *, count: Callable[..., None]
    ) -> None:
        self._hub = hub
        self._count = count
        self._feed = feed
        self.history = History(lake, hub.node)
        self.ledger = LedgerHistory(lake, hub.node)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="crosswire-log")
        self.slots = LogSlots()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self.ends_streams = False
        """Whether streams end after their next batch, in order: their clients continue there."""

    async def close(self) -> None:
        """Refuse further reads; when this returns, no thread uses the store any more."""
        self._is_closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # Planning.

    async def plan(self, plan: ReadPlan, user: LogUser) -> LogRange:
        """Resolve a plan to ids. Raises InvalidDestination, LakeError, ServiceUnavailable."""
        chosen = LogSelection(plan.destinations, may=user.may)
        async with self.slots.search(user.holder):
            logs = await self._logs(chosen)
            work = functools.partial(self._plan, plan, user, logs, self.moment())
            return await self.with_files(work)

    def _plan(
        self, plan: ReadPlan, user: LogUser, logs: Mapping[str, int], moment: Moment
    ) -> LogRange:
        """On a thread."""
        choice = LogSelection(plan.destinations, plan.starts, plan.ends, may=user.may)
        pieces, committed = self.snapshot(moment, choice, logs), moment.committed
        self._resolve(choice, pieces)
        first, end = plan.first, plan.end
        if plan.since is not None:
            first = max(first, pieces.since(plan.since, 1, committed) or committed + 1)
        if plan.until is not None:
            end = min(end, pieces.since(plan.until, 1, committed) or committed + 1)
        choice.starts = {name: max(each, first) for name, each in choice.starts.items()}
        choice.ends = {name: min(each, end) for name, each in choice.ends.items()}
        names = list(pieces.logs) or [OTHERS]
        first = min(choice.start(name) for name in names)
        end = max(max(choice.end(name) for name in names), first)
        missing = pieces.missing(first, end - 1)
        found, count = True, 0
        tallies: dict[str, DestinationTally] = {}
        if plan.limit or not plan.parts:
            most = plan.limit or 1
            if plan.limit and plan.tally != "none":
                by_name, upto = pieces.tally(
                    most, first, end - 1, sized=plan.tally == "bytes", within_s=_COUNT_S
                )
                tallies = self._summed(choice, plan.destinations, by_name)
                count = sum(each.messages for each in by_name.values())
            else:
                count, upto = pieces.count(most, first, end - 1, within_s=_COUNT_S)
            found = count > 0
            if plan.limit or not found:
                end = min(end, upto + 1)
                choice.ends = {name: min(each, end) for name, each in choice.ends.items()}
        splits: list[tuple[int, int]] = []
        if plan.parts and first < end:
            shares = pieces.shares(first, end - 1)
            rows = sum(share.rows for share in shares)
            size_bytes = sum(share.size_bytes for share in shares)
            least = max(rows // _PART_ROWS, size_bytes // _PART_BYTES)
            # A multiple of what is asked for, which is often the number of cores: the last tasks
            # would leave some of them idle.
            parts = min(max(-(-least // plan.parts), 1) * plan.parts, _MOST_PARTS)
            splits = cut(shares, first, end, parts) if shares else []
        return LogRange(
            node=self._hub.node,
            starts=choice.starts,
            ends=choice.ends,
            first=first,
            end=end,
            splits=splits,
            missing=missing,
            found=found,
            count=count if plan.limit else 0,
            tallies=tallies,
        )

    def _summed(
        self, choice: LogSelection, patterns: list[str], counted: Mapping[str, DestinationTally]
    ) -> dict[str, DestinationTally]:
        """The sums of what each of the plan's destinations selects; two may select the same."""
        found = {pattern: DestinationTally() for pattern in patterns}
        for position, (name, tally) in enumerate(counted.items()):
            if not position % _SUMMED:
                self._go_on()
            for pattern in choice.selecting(name):
                found[pattern].messages += tally.messages
                found[pattern].bytes += tally.bytes
        return found

    @staticmethod
    def _resolve(choice: LogSelection, pieces: LogSnapshot) -> None:
        """Earliest and latest in ids. The earliest of a destination is after what is missing."""
        end = pieces.moment.committed + 1
        given = choice.starts
        choice.starts = {
            name: {EARLIEST: 1, LATEST: end}.get(position, position)
            for name, position in given.items()
        }
        for gone in pieces.missing(1, end - 1):
            if given.get(gone.destination, given[OTHERS]) == EARLIEST:
                choice.starts[gone.destination] = gone.last + 1
        choice.ends = {
            name: {EARLIEST: 1, LATEST: end}.get(position, min(position, end))
            for name, position in choice.ends.items()
        }

    # Reading.

    async def read(self, reading: ReadSplit, user: LogUser) -> AsyncGenerator[bytes, None]:
        """An Arrow stream, in chunks. The metadata `last` of each batch is the id up to which
        nothing was left out. The stream may end before the range does: the client continues there.

        Raises HistoryMissing, InvalidDestination, InvalidEnvelope, LakeError, ServiceUnavailable
        before the first chunk.
        """
        choice = self._chosen(reading, user)
        async with self.slots.stream(user.holder):
            logs = await self._logs(choice)
            async with contextlib.aclosing(
                self._stream(_RangeReader(reading, choice, logs), user.hold)
            ) as stream:
                async for chunk in stream:
                    yield chunk

    def _chosen(self, reading: ReadSplit, user: LogUser) -> LogSelection:
        unknown = [name for name in reading.columns if name not in COLUMNS]
        if unknown:
            raise InvalidEnvelope(f"there is no column {unknown[0]!r}")
        if len(set(reading.columns)) < len(reading.columns):
            # Each would be sent as often as it is named.
            raise InvalidEnvelope("a column is named twice")
        if reading.node != self._hub.node:
            raise HistoryMissing(f"this is node {self._hub.node}, not {reading.node}")
        if reading.end > self._hub.committed_id + 1:
            raise InvalidEnvelope(f"ids from {self._hub.committed_id + 1} on are not there yet")
        return LogSelection(
            reading.destinations,
            reading.starts,
            {OTHERS: reading.end, **reading.ends},
            may=user.may,
        )

    async def files(self, reading: ReadSplit, user: LogUser) -> AsyncGenerator[bytes, None]:
        """Row groups of the lake, as Parquet files one after the other, each after a header with
        its first and last id of the range and its size. A file may have more ids than these, and
        has the column `id`. It has no row of a destination that is not selected.

        The stream ends before the range does where messages are not in the lake, or together with
        others: the client reads them with `read`. Raises what that raises, before the first chunk.
        """
        choice = self._chosen(reading, user)
        names = tuple(dict.fromkeys((*reading.columns, "id")))
        position, last = max(reading.first, 1), reading.end - 1
        ends_at = time.monotonic() + _STREAM_S
        # Which rows are selected is then a matter of their ids alone.
        is_simple = len(choice.starts) == 1 and len(choice.ends) == 1
        position = max(position, choice.starts[OTHERS])
        last = min(last, choice.ends[OTHERS] - 1)
        async with self.slots.stream(user.holder):
            while is_simple and position <= last and time.monotonic() < ends_at:
                step = functools.partial(self._sealed, choice, names, self.moment(), position, last)
                sealed = await self.with_files(step)
                if sealed is None or self.ends_streams:
                    break
                with sealed.file as file:
                    yield FILE_HEADER.pack(position, sealed.last, file.size_bytes)
                    pieces = file.pieces(_PIECE_BYTES)
                    while piece := await self.in_thread(next, pieces, b""):
                        if time.monotonic() >= ends_at + _STREAM_S:
                            # A reader that takes very long: it discards what is not whole.
                            return
                        for start in range(0, len(piece), _CHUNK_BYTES):
                            yield piece[start : start + _CHUNK_BYTES]
                self._count("log", "http", "messages", by=sealed.rows)
                position = sealed.last + 1

    def _sealed(
        self, choice: LogSelection, names: Sequence[str], moment: Moment, first: int, last: int
    ) -> _SealedFile | None:
        """On a thread: the next row group, if all its messages are selected."""
        pieces = self.snapshot(moment, choice, {})
        piece = next(pieces(first, last))
        group = self.history.group_at(first, piece.last) if piece.in_lake else None
        if group is None:
            return None
        file = self.history.open_group(group, names)
        if file is None:
            return None
        if (
            file.size_bytes > _FILE_BYTES
            or file.decoded_bytes > _DECODED_BYTES
            or not all(map(choice.wants, file.destinations))
        ):
            file.close()
            return None
        upto = min(group.last, piece.last)
        width = group.last - group.first + 1
        rows = group.rows * (upto - max(first, group.first) + 1) // width
        return _SealedFile(file, upto, rows)

    async def _stream(
        self, cursor: _RangeReader, hold: Callable[[int], None]
    ) -> AsyncGenerator[bytes, None]:
        ends_at = time.monotonic() + _STREAM_S
        out = _Out(cursor.names)
        is_begun = False
        while cursor.position < cursor.end:
            if is_begun and (time.monotonic() >= ends_at or self.ends_streams):
                break
            try:
                # A view of the store is in no variable: a slow reader would keep it open.
                chunk, rows = await self.with_files(
                    functools.partial(self._step, cursor, self.moment(), out)
                )
                hold(len(chunk))
            except CrosswireError:
                if not is_begun:
                    raise
                # The stream ends early: the client's next request gets the error.
                return
            self._count("log", "http", "messages", by=rows)
            is_begun = True
            sent_at = time.monotonic()
            try:
                for number, start in enumerate(range(0, len(chunk), _CHUNK_BYTES)):
                    if time.monotonic() >= sent_at + _SEND_S + number * _CHUNK_S:
                        raise ServiceUnavailable("the client reads too slowly")
                    yield chunk[start : start + _CHUNK_BYTES]
            finally:
                hold(-len(chunk))
        yield out.end()

    def _step(self, cursor: _RangeReader, moment: Moment, out: _Out) -> tuple[bytes, int]:
        """On a thread: the next batch, and how many messages it has; an empty one if none is found
        within `_STEP_S`, so that the client sees progress."""
        deadline = time.monotonic() + _STEP_S
        pieces = self.snapshot(moment, cursor.choice, cursor.logs)
        piece = next(pieces(cursor.position, cursor.end - 1))
        if not piece.in_lake and cursor.strict:
            missing = pieces.missing(piece.first, piece.last)
            if missing:
                raise HistoryMissing(_describe_missing(missing))
        found: list[pa.RecordBatch] = []
        size_bytes = rows = 0
        while cursor.position <= piece.last and time.monotonic() < deadline:
            try:
                batch, upto = cursor.take(pieces, piece)
            except FileNotFoundError:
                if not found:
                    raise
                break
            cursor.position = upto + 1
            if batch is not None:
                found.append(batch)
                size_bytes += batch.nbytes
                rows += len(batch)
            if size_bytes >= _FULL_BYTES or rows >= _FULL_ROWS:
                break
        return out.write(found, cursor.position - 1), rows

    # What both use.

    async def _logs(self, choice: LogSelection) -> dict[str, int]:
        """Numbers of the store's logs that may have selected messages, by destination."""
        numbers = dict(self._hub.store.destinations())
        return await self.in_thread(choice.logs, numbers, self._go_on)

    def _go_on(self) -> None:
        """On a thread: lets the event loop in, and ends when the hub stops."""
        if self._is_closed:
            raise ServiceUnavailable("the hub is stopping")
        time.sleep(0)

    def moment(self) -> Moment:
        """What a thread needs to read the log as it is now."""
        hub = self._hub
        kept = None if self._feed is None else self._feed.kept
        limit = MAX_ID if kept is None else max(kept.upto, hub.seals.reclaim_limit)
        return Moment(hub.store.view(), kept, hub.committed_id, limit)

    def snapshot(
        self, moment: Moment, choice: LogSelection, logs: Mapping[str, int]
    ) -> LogSnapshot:
        """On a thread: the log of some destinations at one moment."""
        return LogSnapshot(
            self.history, moment, choice, logs, report=self.report, breathe=self.pause
        )

    def pause(self, pause_s: float) -> None:
        """On a thread: pauses, and ends when the hub stops."""
        self._go_on()
        time.sleep(pause_s)

    def report(self, error: RecordDamaged) -> None:
        """From a thread: a record that can't be read."""
        self._loop.call_soon_threadsafe(self._hub.damage.report, error)

    async def with_files(self, work: Callable[[], T]) -> T:
        """Run it on a thread, again if files of the lake were merged or deleted meanwhile."""
        for _ in range(_MOVED):
            try:
                return await self.in_thread(work)
            except FileNotFoundError:
                self.history.forget()
        raise ServiceUnavailable("files of the lake were replaced while they were read")

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run it on a thread for reading. It calls `pause` often. Raises ServiceUnavailable."""
        if self._is_closed:
            raise ServiceUnavailable("the hub is stopping")
        return await self._loop.run_in_executor(self._threads, work, *arguments)


class _SealedFile(NamedTuple):
    """A row group whose messages are all selected, its last id of the range, and about how many
    messages of the range it has."""

    file: RowGroupFile
    last: int
    rows: int


class _RangeReader:
    """The position within a range. The file that is being read stays open between batches."""

    def __init__(self, reading: ReadSplit, choice: LogSelection, logs: dict[str, int]) -> None:
        self.choice = choice
        self.logs = logs
        self.node = reading.node
        self.position = max(reading.first, 1)
        self.end = reading.end
        self.strict = reading.strict
        self.names = reading.columns
        self._needed = tuple(dict.fromkeys((*self.names, "id", "destination")))
        self._width = _WINDOW
        self._files: Iterator[tuple[pa.RecordBatch | None, int]] | None = None
        self._files_at = 0
        self._files_upto = 0

    def take(self, pieces: LogSnapshot, piece: LogPiece) -> tuple[pa.RecordBatch | None, int]:
        """The next rows that are selected, and the id up to which nothing was left out."""
        first = self.position
        if piece.in_lake:
            batch, upto = self._from_lake(pieces, piece)
        else:
            rest = LogPiece(False, first, piece.last)
            batch, upto, self._width = pieces.stored(rest, self._needed, self.node, self._width)
        if batch is None:
            return None, upto
        ids = ids_of(batch)
        fits = self.choice.mask(batch.column("destination"), ids) & (ids >= first) & (ids <= upto)
        if not fits.any():
            return None, upto
        batch = batch.select(self.names)
        return (batch if fits.all() else batch.filter(booleans(fits))), upto

    def _from_lake(self, pieces: LogSnapshot, piece: LogPiece) -> tuple[pa.RecordBatch | None, int]:
        if self._files is None or self._files_at != self.position or self._files_upto > piece.last:
            self._files_upto = piece.last
            self._files = pieces.history.read(self.position, piece.last, self._needed)
        try:
            batch, upto = next(self._files)
        except FileNotFoundError:
            self._files = None
            raise
        self._files_at = upto + 1
        if upto >= self._files_upto:
            self._files = None
        return batch, upto


class _Out:
    """An Arrow stream that is written step by step: each call returns the bytes that it wrote."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._schema = pa.schema([MESSAGES.field(name) for name in names])
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), self._schema)

    def write(self, batches: list[pa.RecordBatch], last: int) -> bytes:
        """Write these as one batch."""
        table = pa.Table.from_batches(batches, self._schema).combine_chunks()
        batch = (table.to_batches() or [_empty(self._schema)])[0]
        self._writer.write_batch(batch, custom_metadata={"last": str(last)})
        return self._sink.take()

    def end(self) -> bytes:
        self._writer.close()
        return self._sink.take()


class _Sink:
    closed = False

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)


def _describe_missing(missing: list[MissingMessages]) -> str:
    each = [f"{one.destination} from {one.first} to {one.last}" for one in missing[:5]]
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return f"messages are missing: {', '.join(each)}{more}"
