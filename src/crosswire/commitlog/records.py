"""Records of a replicated log: their bytes, their chain, and the groups that they carry.

A record, big-endian:

    magic        4   "CWL" and the version of this layout
    kind         1   RecordKind
    format       2   of what the body means to a store; the layout here is the same for all
    size         4   of the body
    log id      16   random, made with the log
    number       8   1, 2, 3 …
    term         8   the number of the takeover record of its leader; genesis: 1
    writer      16   random, made when a process starts
    time         8   microseconds since 1970
    part         4   1 … parts
    parts        4   of a group that is larger than a record may be; else 1
    predecessor 32   the digest of the record before it; genesis: zeros
    body      size
    digest      32   SHA-256 of all of the above: checksum of this record, and the next one's chain

The body of a group is described in `body.py`. Those of other kinds are JSON (`Genesis`, `Takeover`,
`HandOver`, `Trim`); heartbeats have none.
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import sha256
from struct import Struct as Layout
from typing import Final, TypeVar

import msgspec

from crosswire.errors import LogDamaged, LogTooNew

__all__ = [
    "FORMAT",
    "LEAST_RECORD_BYTES",
    "MAX_GROUP_BYTES",
    "ORIGIN",
    "RECORD_BYTES",
    "Genesis",
    "GroupAssembler",
    "HandOver",
    "LogRecord",
    "RecordChain",
    "RecordKind",
    "RecordPosition",
    "Takeover",
    "Trim",
    "decode_record",
]

FORMAT: Final = 1
"""The newest format of bodies that this version reads."""
RECORD_BYTES: Final = 4 << 20
"""A record's largest size, by default."""
LEAST_RECORD_BYTES: Final = 4 << 10
MAX_GROUP_BYTES: Final = 1 << 30
"""A group of several records that would be larger is refused before it is put together."""

_MAGIC: Final = b"CWL\x01"
_HEADER: Final = Layout(">4sBHI16sQQ16sQII32s")
_DIGEST_BYTES: Final = 32
_MAX_NUMBER: Final = (1 << 63) - 1


class RecordPosition(msgspec.Struct, frozen=True, gc=False):
    """A record by number and digest: all that came before it is the same wherever it is found."""

    number: int
    digest: bytes


ORIGIN: Final = RecordPosition(0, bytes(_DIGEST_BYTES))
"""What genesis stands on."""


class RecordKind(IntEnum):
    """What a record is for."""

    GENESIS = 1
    GROUP = 2
    HEARTBEAT = 3
    TAKEOVER = 4
    HAND_OVER = 5
    TRIM = 6


class Genesis(msgspec.Struct, frozen=True, omit_defaults=True):
    """The log starts from a data directory: its node, the digest of a checkpoint of it, and the
    identity of the lake's folder."""

    node: str
    checkpoint: str = ""
    lake: str = ""


class Takeover(msgspec.Struct, frozen=True, omit_defaults=True):
    """A replica leads from here on; clients reach it at `address`."""

    replica: str
    address: str = ""


class HandOver(msgspec.Struct, frozen=True):
    """The leader ends its term; this replica has everything, and takes over without waiting."""

    replica: str


class Trim(msgspec.Struct, frozen=True):
    """Records up to this number may be removed."""

    upto: int


_BODIES: Final[dict[RecordKind, type[Genesis | Takeover | HandOver | Trim]]] = {
    RecordKind.GENESIS: Genesis,
    RecordKind.TAKEOVER: Takeover,
    RecordKind.HAND_OVER: HandOver,
    RecordKind.TRIM: Trim,
}
_Body = TypeVar("_Body", Genesis, Takeover, HandOver, Trim)


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """A record that is complete and has its checksum. `data` are its bytes, digest included."""

    kind: RecordKind
    format: int
    log_id: bytes
    number: int
    term: int
    writer: bytes
    time_us: int
    part: int
    parts: int
    predecessor: bytes
    digest: bytes
    data: bytes

    @property
    def body(self) -> memoryview:
        """The bytes between header and digest, not copied."""
        return memoryview(self.data)[_HEADER.size : -_DIGEST_BYTES]

    @property
    def position(self) -> RecordPosition:
        """What the next record names as its predecessor."""
        return RecordPosition(self.number, self.digest)

    def read(self, kind: type[_Body]) -> _Body:
        """The body of a genesis, takeover, hand-over or trim. Raises LogDamaged."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise LogDamaged(
                f"the body of record {self.number} of the log is not a {kind.__name__}: {error}"
            ) from error


def decode_record(data: bytes, *, number: int = 0) -> LogRecord:
    """The record that these bytes are, all of them; `number` is where they were found, 0 if that
    is not known.

    Its own content is verified, not what it stands on. Raises LogDamaged, or LogTooNew for a
    format that this version doesn't read.
    """
    where = f"record {number}" if number else "a record"
    if len(data) < _HEADER.size + _DIGEST_BYTES:
        raise LogDamaged(f"{where} of the log is cut short: it has {len(data)} bytes")
    (
        magic,
        code,
        format_number,
        size,
        log_id,
        found,
        term,
        writer,
        time_us,
        part,
        parts,
        predecessor,
    ) = _HEADER.unpack_from(data)
    if magic[:3] != _MAGIC[:3]:
        raise LogDamaged(f"{where} of the log is not a record of Crosswire")
    if magic != _MAGIC:
        raise LogTooNew(f"{where} of the log has the layout {magic[3]}, this version reads 1")
    if size != len(data) - _HEADER.size - _DIGEST_BYTES:
        raise LogDamaged(f"{where} of the log has {len(data)} bytes, which is not its size")
    digest = data[-_DIGEST_BYTES:]
    if sha256(memoryview(data)[:-_DIGEST_BYTES]).digest() != digest:
        raise LogDamaged(f"the checksum of {where} of the log is wrong")
    if number and found != number:
        raise LogDamaged(f"{where} of the log has the number {found}")
    # After the checksum: what follows was written as it is, by this version or another one.
    if format_number > FORMAT:
        raise LogTooNew(
            f"record {found} of the log has the format {format_number}, this version reads up to "
            f"{FORMAT}"
        )
    try:
        kind = RecordKind(code)
    except ValueError:
        raise LogDamaged(f"record {found} of the log is of the unknown kind {code}") from None
    is_own_term = kind in (RecordKind.TAKEOVER, RecordKind.GENESIS)
    if not (
        1 <= part <= parts
        and (parts == 1 or kind is RecordKind.GROUP)
        and 1 <= found <= _MAX_NUMBER
        and (term == found if is_own_term else 1 <= term < found)
        and (found == 1) == (kind is RecordKind.GENESIS)
        and format_number >= 1
    ):
        raise LogDamaged(f"the header of record {found} of the log contradicts itself")
    return LogRecord(
        kind,
        format_number,
        log_id,
        found,
        term,
        writer,
        time_us,
        part,
        parts,
        predecessor,
        digest,
        data,
    )


class RecordChain:
    """Makes the records of one writer, each on top of the last.

    `position` is the newest record that was made or adopted with `continue_from`; `term` is set
    with the takeover. `data` of a record is final: an append that is not answered offers the same
    bytes again.
    """

    def __init__(
        self,
        log_id: bytes,
        writer: bytes,
        *,
        position: RecordPosition = ORIGIN,
        record_bytes: int = RECORD_BYTES,
        format_number: int = FORMAT,
    ) -> None:
        if len(log_id) != 16 or len(writer) != 16:
            raise ValueError("the ids of a log and of a writer have 16 bytes")
        if record_bytes < LEAST_RECORD_BYTES:
            raise ValueError(f"a record may have {LEAST_RECORD_BYTES} bytes at least")
        self.log_id = log_id
        self.writer = writer
        self.position = position
        self.term = 0
        self.format = format_number
        self.body_bytes = record_bytes - _HEADER.size - _DIGEST_BYTES
        """A group with a larger body is several records."""

    def continue_from(self, position: RecordPosition) -> None:
        """The next record stands on this one: for a takeover, and after one that failed."""
        self.position = position

    def genesis(self, body: Genesis, time_us: int) -> LogRecord:
        """The first record of a log."""
        return self._add(RecordKind.GENESIS, msgspec.json.encode(body), time_us)

    def takeover(self, body: Takeover, time_us: int) -> LogRecord:
        """Starts a term of this writer."""
        return self._add(RecordKind.TAKEOVER, msgspec.json.encode(body), time_us)

    def heartbeat(self, time_us: int) -> LogRecord:
        """Confirms, with nothing to write, that the leader leads."""
        return self._add(RecordKind.HEARTBEAT, b"", time_us)

    def hand_over(self, body: HandOver, time_us: int) -> LogRecord:
        """Ends the term."""
        return self._add(RecordKind.HAND_OVER, msgspec.json.encode(body), time_us)

    def trim(self, body: Trim, time_us: int) -> LogRecord:
        """Announces what is removed next."""
        return self._add(RecordKind.TRIM, msgspec.json.encode(body), time_us)

    def group(self, body: bytes, time_us: int) -> list[LogRecord]:
        """The records of a group, one or, if it is large, several: append all of them in order,
        with nothing between them."""
        step = self.body_bytes
        if len(body) <= step:
            return [self._add(RecordKind.GROUP, body, time_us)]
        parts = -(-len(body) // step)
        view = memoryview(body)
        return [
            self._add(RecordKind.GROUP, view[part * step :][:step], time_us, part + 1, parts)
            for part in range(parts)
        ]

    def _add(
        self,
        kind: RecordKind,
        body: bytes | memoryview,
        time_us: int,
        part: int = 1,
        parts: int = 1,
    ) -> LogRecord:
        number = self.position.number + 1
        if kind in (RecordKind.TAKEOVER, RecordKind.GENESIS):
            self.term = number
        elif not self.term:
            raise ValueError("a writer starts with a takeover")
        if len(body) > self.body_bytes:
            raise ValueError(f"a record's body may have {self.body_bytes} bytes")
        predecessor = self.position.digest
        header = _HEADER.pack(
            _MAGIC,
            kind,
            self.format,
            len(body),
            self.log_id,
            number,
            self.term,
            self.writer,
            time_us,
            part,
            parts,
            predecessor,
        )
        hashed = sha256(header)
        hashed.update(body)
        digest = hashed.digest()
        self.position = RecordPosition(number, digest)
        return LogRecord(
            kind,
            self.format,
            self.log_id,
            number,
            self.term,
            self.writer,
            time_us,
            part,
            parts,
            predecessor,
            digest,
            b"".join((header, body, digest)),
        )


class GroupAssembler:
    """Puts the parts of groups together, in the order of a log.

    A group counts when its last part is there. If a record of another term comes first, the parts
    are void: their leader was replaced, and has acknowledged nothing of that group.
    """

    def __init__(self, limit_bytes: int = MAX_GROUP_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._parts: list[LogRecord] = []
        self._size_bytes = 0

    @property
    def is_open(self) -> bool:
        """Are there parts of a group of which the last is missing?"""
        return bool(self._parts)

    def add(self, record: LogRecord) -> bytes | memoryview | None:
        """The body of the group that this record completes, None if it completes none.

        Give it records whose chain is verified, each once. Raises LogDamaged.
        """
        waiting = self._parts
        if waiting and waiting[0].term != record.term:
            waiting.clear()
        expected = len(waiting) + 1
        if (
            record.part != expected
            or (waiting and record.parts != waiting[0].parts)
            or (waiting and record.kind is not RecordKind.GROUP)
        ):
            raise LogDamaged(
                f"record {record.number} of the log is part {record.part} of {record.parts}, where "
                f"part {expected} was to be"
            )
        if record.kind is not RecordKind.GROUP:
            return None
        if record.parts == 1:
            return record.body
        self._size_bytes = len(record.body) + (self._size_bytes if waiting else 0)
        if self._size_bytes > self._limit_bytes:
            waiting.clear()
            raise LogDamaged(
                f"the group that ends with record {record.number} of the log or later has over "
                f"{self._limit_bytes} bytes"
            )
        waiting.append(record)
        if record.part < record.parts:
            return None
        body = b"".join(each.body for each in waiting)
        waiting.clear()
        return body
