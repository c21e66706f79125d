"""Verifies and repairs a store: a new one of all that can be read, and of what the lake has."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.durable_files import sync_folder
from crosswire.envelope import Envelope, decode, decode_at, encode
from crosswire.errors import RecordDamaged, StoreFailed
from crosswire.hub.cursor import Cursor, UnsettledMessage
from crosswire.hub.queues import DEPTHS, Depth
from crosswire.hub.seals import stored_seal
from crosswire.lake.files import find
from crosswire.lake.verification import SealedRows
from crosswire.server.store_check import Evidence, Finding, SubscriptionEvidence
from crosswire.store.contract import StoreLimits
from crosswire.store.damage import DamageFile
from crosswire.store.keys import message_key, state_key
from crosswire.store.locks import check_unused
from crosswire.store.recovery import FORMAT, REMOVALS, Removals
from crosswire.store.rocks import DAMAGES, RocksStore
from crosswire.store.salvage import Salvage, build

__all__ = ["Repaired", "Verified", "repair", "sealed_rows", "verify"]

_ID_MARGIN: Final = 1 << 20
_WORK: Final = ".store-check"
_NEW: Final = ".store-repaired"
_NODE: Final = b"!node"
_AFTER_NODE: Final = b"!nodf"


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found, and how much it read."""

    findings: list[Finding]
    destinations: int
    messages: int
    ledger_rows: int

    @property
    def is_intact(self) -> bool:
        """Was nothing found?"""
        return not self.findings


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """What `repair` did. `restored` messages came from the lake or were hidden by damage, `lost`
    ones are nowhere; `rebuilt` are cursors; the old files are now in `aside`. `unsure` messages may
    be delivered again: it is unknown whether they were settled; without the whole ledger it may be
    others too."""

    findings: list[Finding]
    restored: dict[str, int] = {}
    lost: dict[str, list[int]] = {}
    rebuilt: list[str] = []
    unsure: int = 0
    is_ledger_whole: bool = True
    aside: str = ""


def verify(data: Path, lake: Path, progress: Callable[[str], None]) -> Verified:
    """Read everything, and report what is damaged or missing.

    Raises StoreFailed while a hub uses the directory, or where nothing can be read.
    """
    store = _salvage(data)
    try:
        evidence = Evidence(store, lake, progress)
        evidence.check_messages()
        return Verified(
            findings=evidence.findings,
            destinations=len(evidence.numbers),
            messages=sum(len(each) for each in evidence.sizes.values()),
            ledger_rows=evidence.next_row - 1,
        )
    finally:
        store.discard()


def sealed_rows(data: Path) -> SealedRows | None:
    """What a stopped hub has promised to be in its lake; None if it never had one.

    Raises StoreFailed while a hub uses the directory, or where nothing can be read.
    """
    store = _salvage(data)
    try:
        seal = stored_seal(store)
        if seal is None:
            return None
        last = {"ledger": seal.last_row, "messages": seal.last_seq}
        node = dict(store.rows(_NODE, _AFTER_NODE)).get(_NODE) or store.copies.values.get(_NODE)
        return SealedRows(
            node=(node or b"").decode(errors="replace"),
            last={name: last[name] for name in seal.tables if name in last},
        )
    except RecordDamaged as error:
        raise StoreFailed(f"the last seal of the lake can't be read: {error}") from error
    finally:
        store.discard()


def repair(data: Path, lake: Path, progress: Callable[[str], None]) -> Repaired:
    """Replace a damaged store by a new one; the old files are kept. An intact store stays.

    Raises StoreFailed.
    """
    store = _salvage(data)
    try:
        evidence = Evidence(store, lake, progress)
        evidence.check_messages()
        if not evidence.findings and not store.is_empty:
            return Repaired(findings=[])
        work = _Repair(evidence, progress)
        work.plan()
        new = data / _NEW
        _remove(new)
        progress("writing the new store")
        own = work.own_rows()
        build(new, work.rows(own), {**own, b"!stopped": evidence.last_group.to_bytes(8)})
    finally:
        store.discard()
    # It must open without damage before it replaces the old one.
    _try_out(new)
    old, folder = data / "store", _aside(data)
    if old.exists():
        _carry_over(old, new)
        folder.mkdir()
        old.rename(folder / "store")
    new.rename(old)
    sync_folder(data)
    result = Repaired(
        findings=evidence.findings,
        restored={name: len(ids) for name, ids in work.restored.items() if ids},
        lost={name: sorted(ids) for name, ids in work.lost.items() if ids},
        rebuilt=work.rebuilt,
        unsure=work.unsure,
        is_ledger_whole=evidence.is_ledger_whole,
        aside=str(folder) if folder.exists() else "",
    )
    if folder.exists():
        (folder / "repair.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return result


def _salvage(data: Path) -> Salvage:
    if not data.is_dir():
        raise StoreFailed(f"there is no data directory {data}")
    check_unused(data / "store")
    work = data / _WORK
    try:
        return Salvage(data / "store", work)
    except OSError as error:
        raise StoreFailed(f"{error.filename}: {error.strerror}") from error


def _remove(folder: Path) -> None:
    if folder.exists():
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()


def _aside(data: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder, count = data / f"damaged-{stamp}", 1
    while folder.exists():
        count += 1
        folder = data / f"damaged-{stamp}-{count}"
    return folder


def _try_out(new: Path) -> None:
    store = RocksStore(new, StoreLimits(spare_bytes=0))
    found = [each.reason for each in store.damage]
    store.close()
    if found:
        raise StoreFailed(f"the repaired store is not intact: {found[0]}")


def _carry_over(old: Path, new: Path) -> None:
    """The hub is shown as damaged until an operator acknowledges it, repaired or not."""
    listed = old / DAMAGES
    if listed.exists():
        (new / DAMAGES).write_bytes(listed.read_bytes())
        DamageFile(new / DAMAGES, _ignore).close()


def _ignore(_error: OSError) -> None:
    """The list stays as it was copied."""


class _Repair:
    def __init__(self, evidence: Evidence, progress: Callable[[str], None]) -> None:
        self.restored: dict[str, set[int]] = {}
        self.lost: dict[str, set[int]] = {}
        self.rebuilt: list[str] = []
        self.unsure = 0
        self._evidence = evidence
        self._store = evidence.store
        self._progress = progress
        self._numbers = dict(evidence.numbers)
        self._messages: dict[bytes, bytes] = {}
        self._envelopes: dict[tuple[int, int], Envelope] = {}
        self._dropped: list[bytes] = []

    def plan(self) -> None:
        evidence = self._evidence
        missing = dict(evidence.missing())
        for name in missing:
            self._number(name)
        for name, ids in missing.items():
            self._uncover(name, ids)
        wanted = {
            name: (ids - self.restored.get(name, set())) & evidence.in_lake.get(name, set())
            for name, ids in missing.items()
        }
        self._restore(wanted)
        for name, ids in missing.items():
            self.lost[name] = ids - self.restored.get(name, set())
        for name, number in sorted(self._numbers.items()):
            if name.startswith("queue/"):
                self._mend_queue(name, number)
        for subscribed in evidence.subscriptions:
            self._mend_subscription(subscribed)

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._highest_number() + 1
        return number

    def _highest_number(self) -> int:
        return max(self._evidence.removals.highest, *self._numbers.values(), 0)

    # Messages.

    def _uncover(self, name: str, ids: set[int]) -> None:
        """Take those that damage only hides."""
        number = self._number(name)
        for identifier in ids & self._evidence.hidden_ids.get(number, set()):
            record = self._evidence.hidden[message_key(number, identifier)]
            try:
                envelope = decode_at(record, name, identifier)
            except RecordDamaged:
                continue
            self._keep(number, envelope, record)

    def _keep(self, number: int, envelope: Envelope, record: bytes) -> None:
        self._messages[message_key(number, envelope.id)] = record
        self._envelopes[number, envelope.id] = envelope
        self.restored.setdefault(envelope.destination, set()).add(envelope.id)

    def _restore(self, wanted: dict[str, set[int]]) -> None:
        """Read these from the lake, payloads included."""
        ids = {each for some in wanted.values() for each in some}
        if not ids:
            return
        self._progress(f"restoring {len(ids):,} messages from the lake")
        for file in find(self._evidence.lake, ("messages",)):
            if file.node != self._evidence.node or file in self._evidence.damaged_lake:
                continue
            for row in _rows(file.path, ids):
                envelope = _envelope(row)
                name = envelope.destination
                if envelope.id not in wanted.get(name, ()) or not envelope.intact():
                    continue
                self._keep(self._number(name), envelope, encode(envelope))

    def _sizes(self, number: int) -> dict[int, int]:
        """What the new store has of a destination."""
        sizes = dict(self._evidence.sizes.get(number, {}))
        for (its_number, identifier), _ in self._envelopes.items():
            if its_number == number:
                sizes[identifier] = len(self._messages[message_key(number, identifier)])
        return sizes

    # Cursors.

    def _mend_queue(self, name: str, number: int) -> None:
        evidence, restored = self._evidence, self.restored.get(name, set())
        key = b"q" + number.to_bytes(4)
        cursor = evidence.queues.get(name) or Cursor(self._store, key)
        sizes, ended = self._sizes(number), evidence.ended.get(name, set())
        if not cursor.damage and not self._store.is_empty:
            opened = {each.id for each in cursor.open} | {
                each for each in sizes if each > cursor.upto and each not in cursor.later
            }
            if not restored:
                return
        if cursor.damage or self._store.is_empty:
            known = evidence.accepted.get(name, set())
            self.unsure += len(sizes.keys() - ended - known)
            self._rebuild(cursor, name, ended, [(number, each) for each in sizes])
            opened = sizes.keys() - ended
        else:
            again = restored & ({each for each in restored if each <= cursor.upto} | cursor.later)
            cursor.later -= again
            self._reopen(cursor, [(number, each) for each in again - opened])
            opened |= again
        size_bytes = sum(sizes.get(each, 0) for each in opened)
        depth = Depth(len(opened), size_bytes, max(sizes, default=0))
        self._store.save(DEPTHS, number.to_bytes(4), msgspec.msgpack.encode(depth))

    def _mend_subscription(self, subscribed: SubscriptionEvidence) -> None:
        evidence, cursor = self._evidence, subscribed.cursor
        definition, wants = subscribed.definition, evidence.wants(subscribed)
        sharing, ended = evidence.sharing(subscribed), evidence.ended_of(subscribed)
        if not cursor.damage:
            # What it passed over since it began, and can be read again.
            again = [
                (number, identifier)
                for (number, identifier), envelope in self._envelopes.items()
                if number in subscribed.numbers
                and identifier <= cursor.upto
                and envelope.time >= definition.created_us
                and wants(envelope)
                and identifier not in evidence.ended.get(subscribed.destination, ())
            ]
            self._reopen(cursor, again)
            return
        ids = [
            (number, identifier)
            for number in subscribed.numbers
            for identifier in self._sizes(number)
            if identifier not in ended and self._belongs(number, identifier, definition, wants)
        ]
        self.unsure += len(ids) if sharing > 1 else 0
        name = f"subscription {definition.name!r}"
        self._rebuild(cursor, name, ended, ids, upto=evidence.newest_id)

    def _belongs(self, number: int, identifier: int, definition: Any, wants: Any) -> bool:
        """Is it one that the subscription takes, and came after its beginning?"""
        envelope = self._envelopes.get((number, identifier))
        if envelope is None:
            record = self._store._get_or_report(message_key(number, identifier))
            if record is None:
                return False
            envelope = decode(record)
        return bool(envelope.time >= definition.created_us and wants(envelope))

    def _rebuild(
        self,
        cursor: Cursor,
        name: str,
        ended: set[int],
        ids: list[tuple[int, int]],
        upto: int = 0,
    ) -> None:
        """Make a cursor anew, from the messages that there are and the ledger's last steps."""
        upto = max(upto, max(ended, default=0))
        # The last snapshot of the cursor, if that can be read.
        settled_before = cursor.upto if cursor.is_begun else 0
        opened_before = {each.id for each in cursor.open}
        opened = [
            UnsettledMessage(number, identifier)
            for number, identifier in sorted(ids, key=lambda each: each[1])
            if identifier <= upto
            and identifier not in ended
            and (identifier > settled_before or identifier in opened_before)
        ]
        cursor.later, cursor.refused_later = set(), {}
        self._dropped.append(state_key("change", len(cursor.key).to_bytes(2) + cursor.key))
        cursor.write_snapshot(max(upto, settled_before), opened)
        self.rebuilt.append(name)

    @staticmethod
    def _reopen(cursor: Cursor, ids: list[tuple[int, int]]) -> None:
        """Deliver these again, which the cursor has as settled."""
        if ids:
            before = [(number, each) for number, each in ids if each <= cursor.upto]
            opened = [*cursor.open, *(UnsettledMessage(number, each) for number, each in before)]
            cursor.write_snapshot(cursor.upto, sorted(opened, key=lambda each: each.id))

    # The new store.

    def own_rows(self) -> dict[bytes, bytes]:
        """The rows that have a second copy."""
        evidence = self._evidence
        own = {
            b"!format": FORMAT,
            b"!node": evidence.node.encode() or os.urandom(8).hex().encode(),
            # Ids may have been given out after the last one that is found anywhere.
            b"!ids": (evidence.newest_id + 1 + _ID_MARGIN).to_bytes(8),
        }
        if evidence.removals.count:
            highest = self._highest_number()
            removed = highest - len(self._numbers)
            own[REMOVALS] = Removals(removed, highest, evidence.removals.newest_id).pack()
        for name, number in self._numbers.items():
            own[b"d" + name.encode()] = number.to_bytes(4)
        for subscribed in evidence.subscriptions:
            key = state_key("subscription", subscribed.key)
            own[key] = msgspec.msgpack.encode(subscribed.definition)
        return own

    def rows(self, own: dict[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
        """All of the new store; of rows with the same key the last one counts."""
        evidence, changes = self._evidence, self._store.changes
        dropped = (*self._dropped, *(state_key("damaged", key[1:]) for key in self._messages))
        for key, value in self._store.rows():
            if key[:1] in (b"!", b"g", b"d") or key in changes or key in evidence.bad_records:
                continue
            if dropped and key.startswith(dropped):
                continue
            if key[:1] == b"l" and int.from_bytes(value[:4]) == 0:
                continue
            yield key, value
        for key, value in evidence.bad_records.items():
            yield state_key("damaged", key[1:13]), value
        for key, value in evidence.hidden.items():
            if key[:1] == b"l":
                yield key, value
        yield from self._messages.items()
        for key, saved in changes.items():
            if saved is not None:
                yield key, saved
        yield from own.items()
        last = evidence.newest_id.to_bytes(8)
        yield b"g" + evidence.last_group.to_bytes(8), evidence.next_row.to_bytes(8) + last


def _rows(path: Path, ids: set[int]) -> Iterator[dict[str, Any]]:
    wanted = pa.array(sorted(ids), pa.int64())
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as opened:
            for batch in opened.iter_batches(1024, use_threads=False):
                mask = pc.is_in(batch.column("id"), value_set=wanted)
                yield from batch.filter(mask).to_pylist()
    except (OSError, pa.ArrowException):
        # It is among the findings already.
        return


def _envelope(row: dict[str, Any]) -> Envelope:
    fields = {name: row[name] for name in Envelope.__struct_fields__ if name in row}
    fields["properties"] = msgspec.json.decode(row["properties"] or "{}")
    fields["native"] = dict(row["native"] or ())
    return Envelope(**fields)
