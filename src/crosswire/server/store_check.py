"""Compares a stopped hub's store with its own ledger and with the lake: what is damaged or missing.

Reads everything and changes nothing. What `store_repair` needs to know is collected here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.envelope import ONLY_FOR, decode, decode_at
from crosswire.errors import CrosswireError, RecordDamaged
from crosswire.hub.cursor import Cursor
from crosswire.hub.ledger import Step, parse_block
from crosswire.hub.pattern_index import PatternIndex
from crosswire.hub.subscriptions import Definition, predicate
from crosswire.lake.files import LakeFile, find
from crosswire.store.recovery import REMOVALS, Removals
from crosswire.store.salvage import Salvage

__all__ = ["Evidence", "Finding", "SubscriptionEvidence"]

_ENDED: Final = {Step.SETTLED, Step.EXPIRED, Step.DEAD, Step.DROPPED, Step.REPLAYED}
"""Steps after which a message is not delivered again by the queue or subscription they name."""
_ENDED_NAMES: Final = [step.name.lower() for step in _ENDED]
_SHOWN: Final = 5
_EVERY: Final = 100_000

_read_definition = msgspec.msgpack.Decoder(Definition).decode


class Finding(msgspec.Struct, frozen=True):
    """Something that is damaged or missing; `part` as in `Damage`, and `messages`, `ledger`,
    `lake`."""

    part: str
    destination: str
    detail: str


class SubscriptionEvidence(msgspec.Struct):
    """A named subscription, its record's key, and the numbers of the topics that it has now."""

    key: bytes
    definition: Definition
    cursor: Cursor
    numbers: set[int]

    @property
    def destination(self) -> str:
        """How the ledger names what the subscription settled."""
        return f"topic/{self.definition.pattern}"


class Evidence:
    """All that store, ledger and lake have. `sizes` are the messages that can be read, by number
    and id; `ended` and `accepted` those that the ledger has, by destination."""

    def __init__(self, store: Salvage, lake: Path, progress: Callable[[str], None]) -> None:
        self.store = store
        self.lake = lake
        self.findings: list[Finding] = []
        self.node = ""
        self.numbers: dict[str, int] = {}
        self.sizes: dict[int, dict[int, int]] = {}
        self.floors: dict[int, int] = {}
        self.beginnings: dict[int, int] = {}
        self.removals = Removals()
        self.accepted: dict[str, set[int]] = {}
        self.ended: dict[str, set[int]] = {}
        self.endings: dict[tuple[str, int], int] = {}
        self.unreadable: dict[int, list[tuple[int, int]]] = {}
        self.aside: dict[int, set[int]] = {}
        self.bad_records: dict[bytes, bytes] = {}
        self.in_lake: dict[str, set[int]] = {}
        self.hidden: dict[bytes, bytes] = {}
        self.hidden_ids: dict[int, set[int]] = {}
        self.queues: dict[str, Cursor] = {}
        self.subscriptions: list[SubscriptionEvidence] = []
        self.newest_id = 0
        self.next_row = 1
        self.last_group = 0
        self.damaged_lake: list[LakeFile] = []
        self._progress = progress
        self._definitions: dict[bytes, Definition] = {}
        """By the key of their record."""
        self._find_names()
        self._read_rows()
        self._read_lake()
        self._find_cursors()

    def find(self, part: str, detail: str, destination: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(part, destination, detail))

    # The store.

    def _find_names(self) -> None:
        """Both copies of the store's own keys."""
        store, copies = self.store, self.store.copies
        if not store.is_empty:
            self._check_copies()
        own = dict(store.rows(b"!", b'"'))
        for key, value in copies.values.items():
            if key[:1] == b"!" and (key not in own or own[key] < value):
                own[key] = value
        self.node = own.get(b"!node", b"").decode(errors="replace")
        self.newest_id = int.from_bytes(own.get(b"!ids", b"\x01")) - 1
        self.removals = Removals.unpack(own.get(REMOVALS))
        names = {key[1:]: value for key, value in store.rows(b"d", b"e")}
        for key, value in copies.values.items():
            if key[:1] == b"d":
                names.setdefault(key[1:], value)
        self.numbers = {key.decode(): int.from_bytes(value) for key, value in names.items()}
        store.know(self.numbers)
        mark = store.mark
        if mark is None and not store.is_empty and b"!stopped" not in copies.values:
            self.find("log", "the end of the log can't be verified: its mark can't be read")
        elif mark is not None:
            self.newest_id = max(self.newest_id, mark.newest_id)
            self.next_row = max(self.next_row, mark.next_row)

    def _check_copies(self) -> None:
        store, copies = self.store, self.store.copies
        if not copies.is_whole:
            what = "can't be read as a whole" if copies.is_there else "is missing"
            self.find("copies", f"the second copy of the store's own keys {what}")
        for name in ("format", "node", "ids"):
            key = f"!{name}".encode()
            try:
                first = store._get(key)
            except RecordDamaged as error:
                self.find("copies", f"{name!r} can't be read from the tables: {error}")
                continue
            if first is None and key in copies.values:
                self.find("copies", f"{name!r} is missing from the tables")

    def _read_rows(self) -> None:
        """Every row that there is, in order of keys."""
        names = {number: name for name, number in self.numbers.items()}
        last_group, due_row = -1, 0
        damage = self.store.damage
        for count, (key, value) in enumerate(self.store.rows(), 1):
            if count % _EVERY == 0:
                self._progress(f"{count:,} rows of the store read")
            match key[:1]:
                case b"m":
                    self._read_message(key, value, names)
                case b"l":
                    due_row = self._read_block(key, value, due_row)
                case b"g":
                    number = int.from_bytes(key[1:])
                    if last_group >= 0 and number != last_group + 1:
                        self._lose_groups(last_group + 1, number - 1)
                    last_group = number
                case b"s":
                    self._read_state(key[1:], value)
        mark, last_group = self.store.mark, max(last_group, 0)
        if mark is not None and mark.durable > last_group:
            self._lose_groups(last_group + 1, mark.durable)
        self.last_group = max(last_group, 0 if mark is None else mark.written)
        for each in damage:
            found = each.messages()
            if found is not None:
                number, first, last = found
                self.unreadable.setdefault(number, []).append((first, last))
        if any(each.part == "engine" for each in damage):
            self.find(
                "ledger",
                "rows may be missing with a table that is lost: what was settled in them may be "
                "delivered again",
            )
        self._read_hidden()
        seen: set[str] = set()
        for each in list(damage):
            detail = self.store._describe(each)
            if detail not in seen:
                seen.add(detail)
                found = each.messages()
                name = names.get(found[0], "") if found is not None else ""
                self.find(each.part, detail, name)

    def _lose_groups(self, first: int, last: int) -> None:
        self.find(
            "log",
            f"commit groups {first} to {last} are missing: so are messages that came with them, "
            "and what was settled in them may be delivered again",
        )

    @property
    def is_ledger_whole(self) -> bool:
        """Does the ledger have everything that was settled, as far as it goes back?"""
        parts = {each.part for each in self.findings}
        return parts.isdisjoint({"ledger", "log", "engine"}) and not any(
            each.first[:1] == b"l" for each in self.store.damage
        )

    def _read_hidden(self) -> None:
        """Rows that are hidden by damage, and not damaged themselves."""
        for key, value in self.store.hidden_rows():
            if key[:1] == b"l":
                self._read_block(key, value, 0)
                self.hidden[key] = value
                continue
            number, identifier = int.from_bytes(key[1:5]), int.from_bytes(key[5:13])
            if identifier not in self.sizes.get(number, {}):
                self.hidden[key] = value
                self.hidden_ids.setdefault(number, set()).add(identifier)

    def _read_message(self, key: bytes, value: bytes, names: dict[int, str]) -> None:
        number, identifier = int.from_bytes(key[1:5]), int.from_bytes(key[5:13])
        self.newest_id = max(self.newest_id, identifier)
        try:
            name = names.get(number)
            if name is None:
                name = names[number] = decode(value).destination
                self.find("copies", f"the name of destination {number} is missing", name)
                self.numbers[name] = number
            decode_at(value, name, identifier)
        except RecordDamaged as error:
            self.bad_records[key] = value
            self.aside.setdefault(number, set()).add(identifier)
            self.find("record", f"message {identifier}: {error}", names.get(number, ""))
            return
        self.sizes.setdefault(number, {})[identifier] = len(value)

    def _read_block(self, key: bytes, value: bytes, due_row: int) -> int:
        first, rows = int.from_bytes(key[1:]), int.from_bytes(value[:4])
        if due_row and first != due_row:
            self.find("ledger", f"rows {due_row} to {first - 1} are missing")
        self.next_row = max(self.next_row, first + rows)
        try:
            for run in parse_block(first, value[4:]):
                if run.step is Step.ACCEPTED and run.counts is None:
                    self.accepted.setdefault(run.destination, set()).update(run.ids)
                elif run.step in _ENDED:
                    self._end(run.destination, run.ids)
        except RecordDamaged as error:
            self.find("ledger", f"rows {first} to {first + rows - 1}: {error}")
        return first + rows

    def _end(self, destination: str, ids: Any) -> None:
        self.ended.setdefault(destination, set()).update(ids)
        if destination.startswith("topic/"):
            for each in ids:
                key = (destination, each)
                self.endings[key] = self.endings.get(key, 0) + 1

    def _read_state(self, key: bytes, value: bytes) -> None:
        space, _, rest = key.partition(b"/")
        if space == b"reclaimed" and len(rest) == 4:
            self.floors[int.from_bytes(rest)] = int.from_bytes(value)
        elif space == b"begun" and len(rest) == 4:
            self.beginnings[int.from_bytes(rest)] = int.from_bytes(value)
        elif space == b"damaged" and len(rest) == 12:
            self.aside.setdefault(int.from_bytes(rest[:4]), set()).add(int.from_bytes(rest[4:]))
        elif space == b"subscription":
            self._define(rest, value)

    def _define(self, name: bytes, value: bytes) -> None:
        try:
            definition = _read_definition(value)
        except msgspec.MsgspecError as error:
            self.find("record", f"subscription {name.decode(errors='replace')!r}: {error}")
            return
        self._definitions[name] = definition

    # The lake.

    def _read_lake(self) -> None:
        """Which messages it has, and what its ledger knows of."""
        files = list(find(self.lake, ("messages", "ledger")))
        if not self.node and files:
            self.node = max(files, key=lambda each: each.last).node
        for count, file in enumerate(each for each in files if each.node == self.node):
            if count and count % 100 == 0:
                self._progress(f"{count:,} files of the lake read")
            columns = ["id", "destination"] + (["step"] if file.table == "ledger" else [])
            try:
                for batch in _batches(file.path, columns):
                    if file.table == "ledger":
                        self._read_steps(batch)
                        self.next_row = max(self.next_row, file.last + 1)
                    else:
                        self._read_ids(batch)
            except (OSError, pa.ArrowException) as error:
                self.damaged_lake.append(file)
                self.find("lake", f"{file.path.name} can't be read: {' '.join(str(error).split())}")

    def _read_ids(self, batch: pa.RecordBatch) -> None:
        ids, names = batch.column("id").to_pylist(), batch.column("destination").to_pylist()
        for identifier, name in zip(ids, names, strict=True):
            self.in_lake.setdefault(name, set()).add(identifier)
        self.newest_id = max(self.newest_id, max(ids, default=0))

    def _read_steps(self, batch: pa.RecordBatch) -> None:
        rows = zip(
            batch.column("id").to_pylist(),
            batch.column("destination").to_pylist(),
            batch.column("step").to_pylist(),
            strict=True,
        )
        for identifier, name, step in rows:
            if step == "accepted":
                # Not all that a topic accepts is stored: the files with messages have what is.
                if name.startswith("topic/"):
                    continue
                self.accepted.setdefault(name, set()).add(identifier)
            elif step in _ENDED_NAMES and identifier not in self.ended.get(name, ()):
                self._end(name, (identifier,))

    # Cursors.

    def _find_cursors(self) -> None:
        for key, value in self.store.copies.values.items():
            space, _, rest = key.partition(b"/")
            known = rest in self._definitions
            if space == b"ssubscription" and not known:
                self._define(rest, value)
        for name, number in sorted(self.numbers.items()):
            if name.startswith("queue/"):
                cursor = self.queues[name] = Cursor(self.store, b"q" + number.to_bytes(4))
                if not cursor.damage:
                    _compare(cursor, self.ended.get(name, set()))
                if cursor.damage:
                    self.find("cursor", str(cursor.damage[0]), name)
        topics: PatternIndex[bytes] = PatternIndex()
        for key, definition in self._definitions.items():
            topics.add(definition.pattern, key)
        matching: dict[bytes, set[int]] = {}
        for name, number in self.numbers.items():
            if name.startswith("topic/"):
                for each in topics.match(name.removeprefix("topic/")):
                    matching.setdefault(each, set()).add(number)
        for key, definition in sorted(self._definitions.items()):
            cursor = Cursor(self.store, b"s" + key)
            if not cursor.is_begun and not cursor.damage:
                cursor.damage.append(RecordDamaged("it is missing"))
            subscribed = SubscriptionEvidence(key, definition, cursor, matching.get(key, set()))
            self.subscriptions.append(subscribed)
        for subscribed in self.subscriptions:
            cursor = subscribed.cursor
            if not cursor.damage:
                _compare(cursor, self.ended_of(subscribed))
            if cursor.damage:
                what = f"the cursor of {subscribed.definition.name!r}: {cursor.damage[0]}"
                self.find("cursor", what, subscribed.destination)

    def sharing(self, subscribed: SubscriptionEvidence) -> int:
        """How many subscriptions have the same pattern."""
        pattern = subscribed.definition.pattern
        return sum(each.definition.pattern == pattern for each in self.subscriptions)

    def ended_of(self, subscribed: SubscriptionEvidence) -> set[int]:
        """What a subscription has settled according to the ledger. That names the pattern, not the
        subscription: of several with the same pattern, what all of them settled."""
        least = self.sharing(subscribed)
        return {
            identifier
            for (destination, identifier), count in self.endings.items()
            if destination == subscribed.destination and count >= least
        }

    # Messages.

    def missing(self) -> Iterator[tuple[str, set[int]]]:
        """Messages that should be there and can't be read, by destination."""
        for name in sorted({*self.numbers, *self.in_lake, *self.accepted}):
            if name.startswith("queue/"):
                lost = self._missing_in_queue(name)
            elif name.startswith("topic/"):
                number = self.numbers.get(name, 0)
                floor, there = self.floors.get(number, 0), self.sizes.get(number, {})
                known = self.in_lake.get(name, set()) | self.accepted.get(name, set())
                known |= self.hidden_ids.get(number, set())
                lost = {each for each in known if each > floor and each not in there}
            else:
                continue
            begun = self._begun_after(name)
            lost = {each for each in lost if each > begun}
            if lost:
                yield name, lost

    def _begun_after(self, name: str) -> int:
        """Up to this id, messages of a destination are those of one that was removed."""
        number = self.numbers.get(name)
        if number is None:
            return self.removals.newest_id
        return self.beginnings.get(number, 0)

    def _missing_in_queue(self, name: str) -> set[int]:
        number = self.numbers.get(name, 0)
        there, cursor = self.sizes.get(number, {}), self.queues.get(name)
        ended = self.ended.get(name, set())
        known = self.accepted.get(name, set()) | self.hidden_ids.get(number, set())
        known = known - there.keys() - ended
        if cursor is not None and not cursor.damage:
            # What was skipped because it could not be read counts as settled in the cursor.
            opened = {each.id for each in cursor.open}
            known = {
                each
                for each in known
                if each in opened
                or (each > cursor.upto and each not in cursor.later)
                or self.was_damaged(number, each)
            }
            known |= opened - there.keys() - ended
        return known

    def was_damaged(self, number: int, identifier: int) -> bool:
        """Was this message there and could not be read?"""
        if identifier in self.aside.get(number, ()):
            return True
        ranges = self.unreadable.get(number, ())
        return any(first <= identifier <= last for first, last in ranges)

    def check_messages(self) -> None:
        """Add what is missing to the findings."""
        for name, lost in self.missing():
            hidden = self.hidden_ids.get(self.numbers.get(name, 0), set())
            kept = lost & (self.in_lake.get(name, set()) | hidden)
            shown = ", ".join(map(str, sorted(lost)[:_SHOWN]))
            shown += ", …" if len(lost) > _SHOWN else ""
            self.find(
                "messages",
                f"{len(lost):,} can't be read or are missing (ids {shown}); "
                f"{len(kept):,} of them can be restored",
                name,
            )

    def wants(self, subscribed: SubscriptionEvidence) -> Callable[[Any], bool]:
        """Does a subscription take a message?"""
        definition = subscribed.definition
        try:
            matches = predicate(definition.filter)
        except CrosswireError:
            matches = None

        def wants(envelope: Any) -> bool:
            only = envelope.native.get(ONLY_FOR)
            if only is not None:
                return bool(only == subscribed.key)
            return bool(
                envelope.time >= definition.since_us
                and (matches is None or matches(envelope.properties))
            )

        return wants


def _compare(cursor: Cursor, ended: set[int]) -> None:
    """A cursor may have lost changes, with a table or a part of the log, that the ledger has."""
    opened = {each.id for each in cursor.open}
    if any(each in opened or (each > cursor.upto and each not in cursor.later) for each in ended):
        cursor.damage.append(RecordDamaged("a cursor is older than the ledger"))


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, page_checksum_verification=True) as opened:
        yield from opened.iter_batches(16_384, columns=columns, use_threads=False)
