"""The ledger: what happened to every message, step by step.

Steps come in runs: one call accepts, delivers or settles many messages at once, which differ in
nothing but their id. A run is kept as such, in memory and on disk; a commit group's runs make one
block, column by column.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import count, islice
from sys import getsizeof
from typing import Final

import msgspec

from crosswire.commitlog.contract import CommitGroup
from crosswire.errors import RecordDamaged, StoreError

__all__ = [
    "NOBODY",
    "Ledger",
    "LedgerBlock",
    "LedgerPeer",
    "LedgerRow",
    "LedgerRun",
    "Step",
    "parse_block",
    "parse_columns",
    "shortened",
]

DETAIL_CHARACTERS: Final = 1_000
"""How much is kept of a reason that a peer gave."""

_VERSION: Final = 2
_COLUMNS: Final = 11
"""Of a block, without words, ids and counts."""
_ROW_BYTES: Final = 8
_RUN_BYTES: Final = 64
_RUN_MEMORY_BYTES: Final = 260
"""Of a run of one row in memory, measured; a connection that nobody else names adds 100."""


class Step(IntEnum):
    """What can happen to a message."""

    ACCEPTED = 1
    DELIVERED = 2
    SETTLED = 3
    REFUSED = 4
    RETURNED = 5
    EXPIRED = 6
    DEAD = 7
    ANSWERED = 8
    FAILED = 9
    DROPPED = 10
    DAMAGED = 11
    REPLAYED = 12


class LedgerPeer(msgspec.Struct, frozen=True, gc=False):
    """The peer that produced or got a message; the fields are those of an envelope."""

    protocol: str = ""
    connection: str = ""
    principal: str = ""


NOBODY: Final = LedgerPeer()


class LedgerRun(msgspec.Struct, frozen=True, gc=False):
    """The same step of many messages.

    `first_row` is the number of its first row on this node, 0 before its group is sealed. `counts`
    is parallel to `ids` where a row stands for several deliveries: topics that are not durable.
    `subscription` is the named subscription whose step it is; empty for queues and all others.
    """

    first_row: int
    time: int
    step: Step
    destination: str
    peer: LedgerPeer
    attempt: int
    detail: str
    ids: array[int]
    counts: array[int] | None = None
    subscription: str = ""

    def rows(self) -> Iterator[LedgerRow]:
        """One row for each message."""
        for index, identifier in enumerate(self.ids):
            yield LedgerRow(
                self.first_row + index if self.first_row else 0,
                identifier,
                self.time,
                self.step.name.lower().replace("_", "-"),
                self.destination,
                self.peer.protocol,
                self.peer.connection,
                self.attempt,
                self.detail,
                1 if self.counts is None else self.counts[index],
                self.subscription,
            )


class LedgerRow(msgspec.Struct, frozen=True, gc=False):
    """A step of a message, with names instead of codes; `seq` numbers the rows of a node."""

    seq: int
    id: int
    time: int
    step: str
    destination: str
    protocol: str
    connection: str
    attempt: int
    detail: str
    count: int
    subscription: str


class LedgerBlock(msgspec.Struct, array_like=True, frozen=True):
    """Layout of a block: a column for each field of its runs.

    Text is an index into `words`; ids and counts are 64 bit little-endian. `counted` marks runs
    that have counts.
    """

    version: int
    words: list[str]
    times: list[int]
    steps: list[int]
    destinations: list[int]
    protocols: list[int]
    connections: list[int]
    principals: list[int]
    attempts: list[int]
    details: list[int]
    subscriptions: list[int]
    lengths: list[int]
    counted: list[bool]
    ids: bytes
    counts: bytes


_encode = msgspec.msgpack.Encoder().encode
_set = msgspec.structs.force_setattr
_decode = msgspec.msgpack.Decoder(LedgerBlock).decode


def shortened(text: str) -> str:
    """A reason as it is kept: peers choose it, and its length."""
    if len(text) <= DETAIL_CHARACTERS:
        return text
    return f"{text[: DETAIL_CHARACTERS - 1]}…"


class Ledger:
    """Collects the open group's runs, and keeps the most recent ones in memory.

    Steps are noted at once and count when their group is durable: until then they are in `_open`
    or, once sealed, in `_sealed`, a list for each group. `recent_rows` bounds what is kept, and so
    does `recent_bytes`, as peers choose reasons; `stamp` makes a timestamp of the hub's time, both
    in µs.
    """

    def __init__(
        self,
        recent_rows: int = 200_000,
        stamp: Callable[[int], int] | None = None,
        *,
        recent_bytes: int = 64 << 20,
    ) -> None:
        self.recent_rows = recent_rows
        self.recent_bytes = recent_bytes
        self.rows = 0
        """How many rows were noted since the start."""
        self.committed_runs: list[LedgerRun] = []
        """Those of the group that was committed last, for listeners of later stages."""
        self._stamp = stamp
        self._open: list[LedgerRun] = []
        self._sealed: deque[list[LedgerRun]] = deque()
        self._sealed_count = 0
        self._recent: deque[LedgerRun] = deque()
        self._recent_count = 0
        self._recent_held = 0

    def note(
        self,
        step: Step,
        time: int,
        destination: str,
        ids: Iterable[int],
        *,
        peer: LedgerPeer = NOBODY,
        attempt: int = 0,
        detail: str = "",
        counts: Sequence[int] | None = None,
        subscription: str = "",
    ) -> None:
        """Add a step of these messages to the open group; `time` is the hub's, in µs."""
        column = array("q", ids)
        self._open.append(
            LedgerRun(
                0,
                time if self._stamp is None else self._stamp(time),
                step,
                destination,
                peer,
                attempt,
                detail if len(detail) <= DETAIL_CHARACTERS else shortened(detail),
                column,
                None if counts is None else array("q", counts),
                subscription,
            )
        )
        self.rows += len(column)

    def note_each(
        self,
        step: Step,
        time: int,
        messages: Iterable[tuple[str, Sequence[int]]],
        *,
        peer: LedgerPeer,
    ) -> None:
        """`note` for the messages of several destinations: the name of each, and ids there."""
        if self._stamp is not None:
            time = self._stamp(time)
        add, rows = self._open.append, 0
        for destination, ids in messages:
            add(LedgerRun(0, time, step, destination, peer, 0, "", array("q", ids)))
            rows += len(ids)
        self.rows += rows

    # Groups.

    def seal(self, first_row: int) -> tuple[bytes, int] | None:
        """The open group's block and its number of rows, None without any; what is noted from now
        on is in the next group."""
        if not self._open:
            return None
        runs, self._open = self._open, []
        row = first_row
        for run in runs:
            _set(run, "first_row", row)
            row += len(run.ids)
        self._sealed.append(runs)
        self._sealed_count = self.rows
        return serialize_block(runs), row - first_row

    @property
    def open_runs(self) -> Sequence[LedgerRun]:
        """Those of the open group, so far."""
        return self._open

    @property
    def open_bytes(self) -> int:
        """The size of the open group's block, roughly."""
        return _ROW_BYTES * (self.rows - self._sealed_count) + _RUN_BYTES * len(self._open)

    def committed(self, group: CommitGroup) -> None:
        """The group's runs are durable."""
        self.committed_runs = self._runs_of(group)
        self._remember(self.committed_runs)

    def failed(self, group: CommitGroup, _error: StoreError) -> None:
        """The sealed runs go into the next group, without those about messages that were lost:
        they were never accepted."""
        sealed = self._runs_of(group)
        lost = {each for ids in group.accepted_ids for each in ids}
        again = []
        for run in sealed:
            if lost and run.step is Step.ACCEPTED:
                kept = array("q", (each for each in run.ids if each not in lost))
                if not kept:
                    continue
                run = msgspec.structs.replace(run, ids=kept)
            again.append(run)
        self.committed_runs = []
        # Before what was noted since: steps of a message stay in order.
        self._open[:0] = again

    def _runs_of(self, group: CommitGroup) -> list[LedgerRun]:
        """What was sealed for a group that has ended."""
        block, sealed = group.block, self._sealed
        if block is None or not sealed or sealed[0][0].first_row != block.first_row:
            return []
        return sealed.popleft()

    def remember(self, first_row: int, block: bytes) -> None:
        """Add a block that was committed before the start. Raises RecordDamaged."""
        self._remember(parse_block(first_row, block))

    def _remember(self, runs: Sequence[LedgerRun]) -> None:
        self._recent.extend(runs)
        self._recent_count += sum([len(run.ids) for run in runs])
        self._recent_held += sum(map(_memory_bytes, runs))
        while (
            self._recent_count > self.recent_rows or self._recent_held > self.recent_bytes
        ) and len(self._recent) > 1:
            oldest = self._recent.popleft()
            self._recent_count -= len(oldest.ids)
            self._recent_held -= _memory_bytes(oldest)

    # Queries.

    def runs(self) -> Iterator[LedgerRun]:
        """The recent ones, oldest first; those of the open group have no row numbers yet."""
        yield from self._recent
        for runs in self._sealed:
            yield from runs
        yield from self._open

    def of_message(self, identifier: int) -> list[LedgerRow]:
        """The steps of one message, in order."""
        found = []
        for run in self.runs():
            if identifier in run.ids:
                found += [row for row in run.rows() if row.id == identifier]
        return found

    def of_destination(self, destination: str, limit: int = 1000) -> list[LedgerRow]:
        """The latest steps at a destination, newest last."""
        return self._latest(limit, (run for run in self.runs() if run.destination == destination))

    def of_connection(self, connection: str, limit: int = 1000) -> list[LedgerRow]:
        """The latest steps that a connection took part in, newest last."""
        return self._latest(
            limit, (run for run in self.runs() if run.peer.connection == connection)
        )

    @staticmethod
    def _latest(limit: int, runs: Iterator[LedgerRun]) -> list[LedgerRow]:
        found: list[LedgerRow] = []
        for run in reversed(list(runs)):
            rows = list(run.rows())
            found += list(islice(reversed(rows), limit - len(found)))
            if len(found) >= limit:
                break
        return found[::-1]


def _memory_bytes(run: LedgerRun) -> int:
    """What a run takes in memory, roughly: names are shared, a reason is its own."""
    size = _RUN_MEMORY_BYTES + _ROW_BYTES * len(run.ids)
    if run.counts is not None:
        size += _ROW_BYTES * len(run.counts)
    return size + getsizeof(run.detail) if run.detail else size


def serialize_block(runs: list[LedgerRun]) -> bytes:
    """The runs as one block, which `parse_block` reads."""
    # Each word gets the next number when it is asked for first, without a call for each that is
    # known: a group of one message has some twenty of them.
    words: defaultdict[str, int] = defaultdict(count().__next__)
    rows = []
    peer: LedgerPeer | None = None
    protocol = connection = principal = 0
    for run in runs:
        # A batch for many queues has a run for each, of the same peer.
        if run.peer is not peer:
            peer = run.peer
            protocol, connection = words[peer.protocol], words[peer.connection]
            principal = words[peer.principal]
        # One tuple a run, turned into columns by `zip`: a group of one message has three runs, and
        # a list for each of thirteen columns takes longer than all else.
        rows.append(
            (
                run.time,
                run.step,
                words[run.destination],
                protocol,
                connection,
                principal,
                run.attempt,
                words[run.detail],
                words[run.subscription],
                len(run.ids),
                run.counts is not None,
            )
        )
    counts = b"".join([run.counts.tobytes() for run in runs if run.counts is not None])
    ids = b"".join([run.ids.tobytes() for run in runs])
    columns = list(zip(*rows, strict=True)) or [()] * _COLUMNS
    # As a `LedgerBlock` is encoded, which is made of the same fields.
    return _encode((_VERSION, list(words), *columns, ids, counts))


def parse_columns(block: bytes) -> LedgerBlock:
    """A block in columns, without runs: what the lake needs. Raises RecordDamaged."""
    try:
        read = _decode(block)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordDamaged(f"a ledger block can't be read: {error}") from None
    if read.version != _VERSION:
        raise RecordDamaged(f"a ledger block of version {read.version}")
    return read


def parse_block(first_row: int, block: bytes) -> list[LedgerRun]:
    """The runs of a block. Raises RecordDamaged."""
    read = parse_columns(block)
    try:
        ids, counts = array("q", read.ids), array("q", read.counts)
        runs, position, counted = [], 0, 0
        words = read.words
        for index, length in enumerate(read.lengths):
            own = counts[counted : counted + length] if read.counted[index] else None
            runs.append(
                LedgerRun(
                    first_row + position,
                    read.times[index],
                    Step(read.steps[index]),
                    words[read.destinations[index]],
                    LedgerPeer(
                        words[read.protocols[index]],
                        words[read.connections[index]],
                        words[read.principals[index]],
                    ),
                    read.attempts[index],
                    words[read.details[index]],
                    ids[position : position + length],
                    own,
                    words[read.subscriptions[index]],
                )
            )
            position += length
            counted += 0 if own is None else length
    except (ValueError, IndexError) as error:
        raise RecordDamaged(f"a ledger block can't be read: {error}") from None
    return runs
