"""Staged messages on disk: attempts consist of parts, parts of chunks, chunks of messages.

staged     attempt number ‖ part ‖ chunk → CRC-32, MessagePack list of envelopes
part       attempt number ‖ part         → its owner, and what is in it
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from crosswire.envelope import Envelope, parse_destination
from crosswire.errors import InvalidDestination, InvalidEnvelope, RecordDamaged
from crosswire.hub.damage import DamageReports
from crosswire.store.contract import Store
from crosswire.store.records import Count, reader

__all__ = [
    "CHUNKS",
    "NamedAttempt",
    "ProducerKey",
    "StagedAttempt",
    "StagedPart",
    "Totals",
    "pack",
    "recover",
    "unpack",
]

CHUNKS: Final = "staged"
_PARTS: Final = "part"
_CHUNK_MESSAGES: Final = 64
"""A chunk is taken over at once: with as many new queues that is a few milliseconds."""
_CHUNK_BYTES: Final = 512 * 1024
_STAMP_BYTES: Final = 40
"""How much larger a stored message is than a staged one: by its header, node, id and time."""
_ARRAY: Final = b"\xdc"
"""MessagePack's mark of an array with a length of 16 bits."""

Totals: TypeAlias = dict[str, tuple[int, int]]
"""Messages and bytes by destination."""


class ProducerKey(msgspec.Struct, frozen=True, array_like=True):
    """Producers with the same name of different principals are different producers."""

    principal: str
    producer: str


class NamedAttempt(msgspec.Struct, frozen=True):
    """An attempt that a commit names, and how many parts and messages it must have."""

    attempt: str
    parts: int
    messages: int


class StagedPart(msgspec.Struct, frozen=True, gc=False):
    """Some messages of an attempt, encoded; `totals` are counted by destination."""

    chunks: list[bytes]
    messages: int
    totals: Totals

    @property
    def size_bytes(self) -> int:
        """The size of its chunks."""
        return sum(map(len, self.chunks))


class _PartRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is stored of a part beside its chunks: `chunks` are their sizes."""

    owner: ProducerKey
    batch: Count
    attempt: str
    chunks: list[Count]
    messages: Count
    totals: dict[str, tuple[Count, Count]]


_encode = msgspec.msgpack.Encoder().encode
_read_record: Callable[[bytes], _PartRecord] = reader(_PartRecord, "a staged part")
_read_chunk: Callable[[bytes], list[Envelope]] = reader(list[Envelope], "staged messages")


def pack(envelopes: Sequence[Envelope]) -> StagedPart:
    """Encode messages for staging. Uses nothing of the hub: call it on any thread.

    Raises InvalidEnvelope for what can't be encoded, InvalidDestination for services.
    """
    chunks: list[bytes] = []
    totals: Totals = {}
    bodies: list[bytes] = []
    open_bytes = 0
    for envelope in envelopes:
        body = _body(envelope)
        size = len(body) + _STAMP_BYTES
        count, total = totals.get(envelope.destination, (0, 0))
        if not count and parse_destination(envelope.destination).kind == "service":
            raise InvalidDestination(
                f"{envelope.destination!r} is called, nothing can be sent to it"
            )
        totals[envelope.destination] = (count + 1, total + size)
        bodies.append(body)
        open_bytes += size
        if len(bodies) == _CHUNK_MESSAGES or open_bytes >= _CHUNK_BYTES:
            chunks.append(_join(bodies))
            bodies, open_bytes = [], 0
    if bodies:
        chunks.append(_join(bodies))
    return StagedPart(chunks, len(envelopes), totals)


def _body(envelope: Envelope) -> bytes:
    try:
        return _encode(envelope)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidEnvelope(f"a message can't be stored: {error}") from None


def _join(bodies: list[bytes]) -> bytes:
    array = _ARRAY + len(bodies).to_bytes(2) + b"".join(bodies)
    return zlib.crc32(array).to_bytes(4) + array


def unpack(chunk: bytes | None) -> list[Envelope]:
    """The messages of a chunk, None if the store has none. Raises RecordDamaged."""
    if chunk is None:
        raise RecordDamaged("staged messages of a committed batch are missing")
    if zlib.crc32(chunk[4:]) != int.from_bytes(chunk[:4]):
        raise RecordDamaged("staged messages of a committed batch: the checksum does not fit")
    return _read_chunk(chunk[4:])


class StagedAttempt:
    """`parts` are the sizes of the chunks of each; the first `written` of them are on disk."""

    __slots__ = ("_number", "_store", "messages", "parts", "size_bytes", "totals", "written")

    def __init__(self, store: Store, number: int) -> None:
        self.parts: dict[int, list[int]] = {}
        self.written = 0
        self.messages = 0
        self.size_bytes = 0
        self.totals: Totals = {}
        self._store = store
        self._number = number

    @property
    def number(self) -> int:
        """Its number in the keys of the store."""
        return self._number

    def stage(self, owner: ProducerKey, batch: int, name: str, part: StagedPart) -> None:
        """Save the next part."""
        number = len(self.parts)
        for index, chunk in enumerate(part.chunks):
            self._store.save(CHUNKS, self._key(number, index), chunk)
        sizes = [len(chunk) for chunk in part.chunks]
        record = _PartRecord(owner, batch, name, sizes, part.messages, part.totals)
        self._store.save(_PARTS, self._key(number), _encode(record))
        self.add(number, sizes, part.messages, part.totals)

    def add(self, number: int, sizes: list[int], messages: int, totals: Totals) -> None:
        """Count a part that is in the store."""
        self.parts[number] = sizes
        self.messages += messages
        self.size_bytes += sum(sizes)
        _add_totals(self.totals, totals)

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """The key and the size of each, in order."""
        for part, sizes in self.parts.items():
            for index, size in enumerate(sizes):
                if size:
                    yield self._key(part, index), size

    def take(self, key: bytes) -> bytes | None:
        """Read a chunk for `unpack` and delete it; None if there is none."""
        chunk = self._store.get(CHUNKS, key)
        self._store.drop(CHUNKS, key)
        return chunk

    def find_chunks(self) -> None:
        """Count the chunks themselves where the record of a part is damaged."""
        self.parts.clear()
        self.size_bytes = 0
        for key, chunk in self._store.load(CHUNKS, self._number.to_bytes(8)):
            sizes = self.parts.setdefault(int.from_bytes(key[8:12]), [])
            index = int.from_bytes(key[12:])
            # Those before it may have been taken over already.
            sizes += [0] * (index - len(sizes)) + [len(chunk)]
            self.size_bytes += len(chunk)

    def drop(self) -> None:
        """Delete all of it."""
        for key, _ in self.chunks():
            self._store.drop(CHUNKS, key)
        self.forget()

    def forget(self) -> None:
        """Delete the records of its parts: its chunks are taken."""
        for part in self.parts:
            self._store.drop(_PARTS, self._key(part))

    def _key(self, *numbers: int) -> bytes:
        return self._number.to_bytes(8) + b"".join(index.to_bytes(4) for index in numbers)


def recover(
    store: Store, damage: DamageReports
) -> Iterator[tuple[ProducerKey, int, str, StagedAttempt]]:
    """The attempts that were staged before a restart. Records that can't be used are set aside."""
    attempts: dict[int, StagedAttempt] = {}
    for key, value in store.load(_PARTS):
        number, part = int.from_bytes(key[:8]), int.from_bytes(key[8:])
        try:
            record = _read_record(value)
        except RecordDamaged as error:
            damage.set_aside_state(_PARTS, key, value, error)
            continue
        attempt = attempts.get(number)
        if attempt is None:
            attempt = attempts[number] = StagedAttempt(store, number)
            yield record.owner, record.batch, record.attempt, attempt
        attempt.add(part, record.chunks, record.messages, record.totals)
        if part == len(attempt.parts) - 1:
            attempt.written = len(attempt.parts)


def _add_totals(to: Totals, more: Totals) -> None:
    """Add `more` to `to`."""
    for name, (count, size) in more.items():
        before, bytes_before = to.get(name, (0, 0))
        to[name] = (before + count, bytes_before + size)
