"""Searches messages in store and lake, the newest or the oldest first, on a thread.

Ids that the lake covers are searched in its files, row group by row group; all others in the store:
those of a few destinations in their logs, those of any destination by the journal, which has the
accepted messages of all in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from crosswire.envelope import Envelope, Property, decode_at
from crosswire.errors import RecordDamaged
from crosswire.hub.filters import Predicate
from crosswire.hub.ledger import Step, parse_block
from crosswire.lake.columns import numbers
from crosswire.lake.files import LakeFile
from crosswire.lake.history import History
from crosswire.server.log_snapshot import LogPiece, LogSnapshot, ids_of
from crosswire.store.keys import MAX_ID, ROWS, row_key

__all__ = [
    "ENVELOPE_COLUMNS",
    "FoundMessages",
    "MessageCriteria",
    "MessageSearch",
    "envelope_of",
]

_FEW: Final = 64
"""Destinations whose logs are searched one by one."""
_WIDTH: Final = 512
_WIDEST: Final = 1 << 20
_ROWS: Final = 4096
_PAUSE_S: Final = 0.0003
_BATCH: Final = 256
_HEADERS: Final = ("id", "time", "destination", "correlation", "key", "properties")
ENVELOPE_COLUMNS: Final = (
    "node",
    "id",
    "time",
    "protocol",
    "connection",
    "principal",
    "kind",
    "destination",
    "key",
    "correlation",
    "reply_to",
    "durable",
    "expires",
    "properties",
    "native",
    "content_type",
    "payload",
    "crc",
)
"""What `envelope_of` needs."""

_read_properties = msgspec.json.Decoder(dict[str, Property]).decode


class MessageCriteria(NamedTuple):
    """What a message must have. `wants` decides by the destination, `matches` by the properties;
    `text` is in lower case, and in the payload, the key or a property."""

    wants: Callable[[str], bool]
    since_us: int
    until_us: int
    correlation: str
    matches: Predicate | None
    text: str

    def takes(self, envelope: Envelope) -> bool:
        """Whether a message has all of it."""
        if not (
            self.since_us <= envelope.time < self.until_us
            and self.correlation in ("", envelope.correlation)
            and self.wants(envelope.destination)
            and (self.matches is None or self.matches(envelope.properties))
        ):
            return False
        return not self.text or self._has_text(envelope)

    def _has_text(self, envelope: Envelope) -> bool:
        if self.text in envelope.key.lower() or self.text.encode() in envelope.payload.lower():
            return True
        properties = envelope.properties.items()
        return any(self.text in f"{key}={value}".lower() for key, value in properties)


class FoundMessages(NamedTuple):
    """Messages in order; everything up to the id `examined` was looked at, from the newest down or
    from the oldest up."""

    messages: list[Envelope]
    examined: int


class _SearchedPart(NamedTuple):
    """Messages in order; all up to the id `examined` were looked at. `is_cut`: of what is directly
    beyond, some fitted and were not kept."""

    messages: list[Envelope]
    examined: int
    is_cut: bool = False


class MessageSearch:
    """One request's search. For one thread."""

    def __init__(
        self,
        snapshot: LogSnapshot,
        history: History,
        criteria: MessageCriteria,
        *,
        names: Mapping[int, str],
        next_row: int,
        pause: Callable[[float], None],
        oldest_first: bool = False,
    ) -> None:
        """`names` are those of the destinations whose logs may have some, by number."""
        self._snapshot = snapshot
        self._view = snapshot.moment.view
        self._history = history
        self._criteria = criteria
        self._names = names
        self._numbers = {name: number for number, name in names.items()}
        self._next_row = next_row
        self._pause = pause
        self._oldest_first = oldest_first
        self._is_beyond = False

    def find(
        self, first: int, last: int, *, most: int, most_bytes: int, ends_at: float
    ) -> FoundMessages:
        """Up to `most` messages with ids from `first` to `last`, in order, while there is time.
        Raises FileNotFoundError if files of the lake were replaced meanwhile, and LakeError."""
        end = last if self._oldest_first else first
        first, last = self._narrow(first, last)
        found: list[Envelope] = []
        size_bytes = 0
        pieces = list(self._snapshot(first, last))
        for piece in pieces if self._oldest_first else reversed(pieces):
            parts = (
                self._in_lake(piece, most, most_bytes) if piece.in_lake else self._in_store(piece)
            )
            for envelopes, examined, is_cut in parts:
                for envelope in envelopes:
                    found.append(envelope)
                    size_bytes += len(envelope.payload)
                    if len(found) >= most or size_bytes >= most_bytes:
                        return FoundMessages(found, envelope.id)
                if is_cut or time.monotonic() >= ends_at:
                    return FoundMessages(found, examined)
                self._pause(_PAUSE_S)
        return FoundMessages(found, end)

    def _narrow(self, first: int, last: int) -> tuple[int, int]:
        """The ids that the times allow, as far as that is found quickly."""
        criteria = self._criteria
        if len(self._names) > _FEW or last < first:
            return first, last
        if criteria.until_us <= MAX_ID >> 1:
            after = self._snapshot.since(criteria.until_us, first, last)
            last = last if after is None else after - 1
        if criteria.since_us and first <= last:
            begin = self._snapshot.since(criteria.since_us, first, last)
            first = last + 1 if begin is None else begin
        return first, last

    def _in_store(self, piece: LogPiece) -> Iterator[_SearchedPart]:
        if len(self._names) <= _FEW:
            return self._in_logs(piece)
        return self._by_journal(piece)

    def _in_logs(self, piece: LogPiece) -> Iterator[_SearchedPart]:
        first, last, width = piece.first, piece.last, _WIDTH
        while first <= last:
            ends = [self._view.bounds(number, first - 1, last) for number in self._names]
            bounds = [each for each in ends if each is not None]
            if not bounds:
                return
            # The next ids that there are: a step takes no more of what is between them.
            if self._oldest_first:
                bottom = min(each[0] for each in bounds)
                top = min(bottom + width - 1, last)
                first = top + 1
            else:
                top = max(each[1] for each in bounds)
                bottom = max(top - width + 1, first)
                last = bottom - 1
            envelopes = []
            for number in self._names:
                envelopes += self._read(number, bottom, top)
            envelopes.sort(key=lambda each: each.id, reverse=not self._oldest_first)
            yield _SearchedPart(envelopes, top if self._oldest_first else bottom)
            width = min(width * 2, _WIDEST) if len(envelopes) < _WIDTH // 4 else _WIDTH

    def _read(self, number: int, first: int, last: int) -> list[Envelope]:
        """The messages of a log that fit."""
        found = []
        position = first
        while position <= last:
            page = self._view.page([number], after=position - 1, upto=last, count=_BATCH)
            for _, identifier, record in page.records:
                envelope = self._decode(number, identifier, record)
                if envelope is not None and self._criteria.takes(envelope):
                    found.append(envelope)
            position = page.last + 1
            self._pause(0.0)
        return found

    def _decode(self, number: int, identifier: int, record: bytes) -> Envelope | None:
        try:
            return decode_at(record, self._names[number], identifier)
        except RecordDamaged:
            # Reported when it is read for its consumers.
            return None

    def _by_journal(self, piece: LogPiece) -> Iterator[_SearchedPart]:
        for first_row, block in self._blocks():
            accepted = sorted(self._accepted(first_row, block), reverse=not self._oldest_first)
            envelopes = [
                envelope
                for identifier, destination in accepted
                if piece.first <= identifier <= piece.last
                for envelope in self._fetch(destination, identifier)
            ]
            if accepted:
                # Rows before the range are passed over: what was examined before stays so.
                upto = accepted[-1][0]
                if self._oldest_first:
                    yield _SearchedPart(envelopes, max(min(upto, piece.last), piece.first - 1))
                else:
                    yield _SearchedPart(envelopes, min(max(upto, piece.first), piece.last + 1))
                if upto > piece.last if self._oldest_first else upto < piece.first:
                    return
            if self._is_beyond:
                return

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        """Blocks of the journal in order, each with the number of its first row."""
        oldest = self._view.first(*ROWS)
        least = self._next_row if oldest is None else int.from_bytes(oldest[1:])
        begins = range(least, self._next_row, _ROWS)
        for begin in begins if self._oldest_first else reversed(begins):
            end = min(begin + _ROWS, self._next_row)
            blocks = list(self._view.scan(row_key(begin), row_key(end)))
            for key, value in blocks if self._oldest_first else reversed(blocks):
                yield int.from_bytes(key[1:]), value[4:]

    def _accepted(self, first_row: int, block: bytes) -> Iterator[tuple[int, str]]:
        try:
            runs = parse_block(first_row, block)
        except RecordDamaged:
            return
        criteria = self._criteria
        for run in runs:
            if run.step is not Step.ACCEPTED:
                continue
            is_early, is_late = run.time < criteria.since_us, run.time >= criteria.until_us
            if is_late if self._oldest_first else is_early:
                self._is_beyond = True
            elif not is_early and criteria.wants(run.destination):
                for identifier in run.ids:
                    yield identifier, run.destination

    def _fetch(self, destination: str, identifier: int) -> list[Envelope]:
        """The message, if it is stored and fits. Calls are in the log of their service."""
        parts = destination.split("/")
        names = (destination, "/".join(parts[:2])) if parts[0] == "service" else (destination,)
        for name in names:
            number = self._numbers.get(name)
            found = [] if number is None else self._read(number, identifier, identifier)
            if found:
                return found
        return []

    def _in_lake(self, piece: LogPiece, most: int, most_bytes: int) -> Iterator[_SearchedPart]:
        """A row group at a time: it is read forward, and its first or last messages that fit are
        kept."""
        criteria = self._criteria
        groups = self._history.groups(
            piece.first,
            piece.last,
            criteria.since_us,
            criteria.until_us,
            oldest_first=self._oldest_first,
        )
        columns = (*_HEADERS, "payload") if criteria.text else _HEADERS
        for file, index, first_id, last_id in groups:
            kept: deque[int] = deque(maxlen=most)
            for batch in self._history.read_group(file, index, columns):
                fitting = self._fitting(batch, piece)
                kept.extend(islice(fitting, most - len(kept)) if self._oldest_first else fitting)
                self._pause(_PAUSE_S)
                if self._oldest_first and len(kept) == most:
                    break
            envelopes, is_cut = self._whole(file, index, kept, most_bytes)
            is_cut = is_cut or len(kept) == most
            # Of more than are asked for only these were kept: the next search goes on after them.
            if is_cut:
                examined = envelopes[-1].id
            elif self._oldest_first:
                examined = min(last_id, piece.last)
            else:
                examined = max(first_id, piece.first)
            yield _SearchedPart(envelopes, examined, is_cut)

    def _whole(
        self, file: LakeFile, index: int, kept: Collection[int], most_bytes: int
    ) -> tuple[list[Envelope], bool]:
        """Messages of a row group in order, and whether they have more bytes than `most_bytes`:
        then only the first of them, one at least."""
        envelopes: deque[Envelope] = deque()
        size_bytes, is_cut = 0, False
        for batch in self._history.read_group(file, index, ENVELOPE_COLUMNS) if kept else ():
            for row in np.nonzero(np.isin(ids_of(batch), list(kept)))[0].tolist():
                if self._oldest_first and size_bytes > most_bytes:
                    return list(envelopes), True
                envelopes.append(envelope_of(batch, row))
                size_bytes += len(envelopes[-1].payload)
                while not self._oldest_first and size_bytes > most_bytes and len(envelopes) > 1:
                    size_bytes -= len(envelopes.popleft().payload)
                    is_cut = True
            self._pause(_PAUSE_S)
        return list(envelopes if self._oldest_first else reversed(envelopes)), is_cut

    def _fitting(self, batch: pa.RecordBatch, piece: LogPiece) -> Iterator[int]:
        """The ids of the rows that fit, in order."""
        criteria = self._criteria
        coded = batch.column("destination").dictionary_encode()
        wanted = [criteria.wants(name) for name in coded.dictionary.to_pylist()]
        if not any(wanted):
            return
        ids = ids_of(batch)
        codes = np.frombuffer(
            coded.indices.buffers()[1], np.int32, len(coded), 4 * coded.indices.offset
        )
        times = numbers(pa.chunked_array([batch.column("time")]))
        fits = np.array(wanted, bool)[codes] & (ids >= piece.first) & (ids <= piece.last)
        fits &= (times >= criteria.since_us) & (times < criteria.until_us)
        is_plain = not criteria.correlation and not criteria.text and criteria.matches is None
        for row in np.nonzero(fits)[0].tolist():
            if is_plain or criteria.takes(_headers_of(batch, row)):
                yield int(ids[row])


def _headers_of(batch: pa.RecordBatch, row: int) -> Envelope:
    """As much of a message as criteria need."""
    payload = b""
    if "payload" in batch.schema.names:
        payload = batch.column("payload")[row].as_py()
    return Envelope(
        destination=batch.column("destination")[row].as_py(),
        kind="send",
        id=batch.column("id")[row].as_py(),
        time=batch.column("time")[row].as_py(),
        correlation=batch.column("correlation")[row].as_py(),
        key=batch.column("key")[row].as_py(),
        properties=_properties(batch.column("properties")[row].as_py()),
        payload=payload,
    )


def envelope_of(batch: pa.RecordBatch, row: int) -> Envelope:
    """A row of the lake's messages."""
    fields: dict[str, Any] = {name: batch.column(name)[row].as_py() for name in ENVELOPE_COLUMNS}
    fields["properties"] = _properties(fields["properties"])
    fields["native"] = dict(fields["native"])
    return Envelope(**fields)


def _properties(text: str) -> dict[str, Property]:
    return _read_properties(text) if text else {}
