"""Staged batches: written by many tasks, then committed or dropped as a whole.

A task stages its rows as an *attempt*, in parts that are on disk when they are acknowledged. The
commit of a batch names the attempts that count. That decision is one small record of the
*producer*; after it nothing can be undone, and a restarted hub continues where it was: chunk by
chunk, each turned into messages and deleted here in the same commit group, so each exactly once. A
second commit of the same batch succeeds and changes nothing.

    producer   principal, producer → its last batch, and the attempts that are being taken over
    moved      principal, producer → the last chunk of them that was taken over
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import isfinite
from typing import Final

import msgspec

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope
from crosswire.errors import (
    AttemptLost,
    BatchConflict,
    DestinationFull,
    HubError,
    InvalidEnvelope,
    QuotaExceeded,
    RecordDamaged,
    StagingFull,
    UnknownMessage,
)
from crosswire.hub.core import Core
from crosswire.hub.destinations import Destinations
from crosswire.hub.ingest import records as staged
from crosswire.hub.ingest.records import (
    CHUNKS,
    NamedAttempt,
    ProducerKey,
    StagedAttempt,
    StagedPart,
    Totals,
    unpack,
)
from crosswire.hub.policies import StagingLimits
from crosswire.hub.shares import Quota
from crosswire.store.records import Count, reader

__all__ = ["PART_NAMES", "BatchCommit", "BatchProducer", "Staging"]

_PRODUCERS: Final = "producer"
_MOVED: Final = "moved"
_STEP_MESSAGES: Final = 1024
_STEP_BYTES: Final = 1024 * 1024
_RETRY_S: Final = 0.25
_ONCE_S: Final = 3600.0
_NAME_BYTES: Final = 200
_NAMES: Final = 1_000_000
"""Destinations of all attempts together, each counted once for each attempt: they are in memory."""
PART_NAMES: Final = 10_000
"""Destinations of one part: they are counted, and stored, in one turn of the event loop."""
_CHECKED: Final = 64
"""Destinations that are checked before others may have a turn."""
_CHUNK_KEY: Final = 16
"""The size of a chunk's key: attempt, part and chunk."""


class _BatchRecord(msgspec.Struct, frozen=True, array_like=True):
    """`attempts` are numbers, in order; empty when the batch is done."""

    owner: ProducerKey
    batch: Count
    run: str
    once: bool
    messages: Count
    time: float
    attempts: list[Count] = []


_encode = msgspec.msgpack.Encoder().encode
_read_record: Callable[[bytes], _BatchRecord] = reader(_BatchRecord, "a producer")


class _StagedBatch:
    """The attempts of one batch, and when a part of it was last staged."""

    __slots__ = ("attempts", "touched")

    def __init__(self, now: float) -> None:
        self.attempts: dict[str, StagedAttempt] = {}
        self.touched = now


class BatchCommit:
    """A committed batch: `receipt` is done when all its messages are taken over."""

    __slots__ = ("messages", "receipt")

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.receipt = Receipt([], {})


class BatchProducer:
    """Its last batch, and the chunks of it that are not taken over yet, the next one last."""

    __slots__ = ("attempts", "chunks", "commit", "record", "since")

    def __init__(self, record: _BatchRecord, now: float) -> None:
        self.record = record
        self.since = now
        """When it committed, or the hub started: its record's time may be another clock's."""
        self.commit = BatchCommit(record.messages)
        self.attempts: list[StagedAttempt] = []
        self.chunks: list[tuple[StagedAttempt, bytes, int]] = []

    @property
    def is_done(self) -> bool:
        """Whether its last batch is taken over completely."""
        return self.commit.receipt.done

    def begin(self, attempts: list[StagedAttempt], moved: bytes = b"") -> None:
        """These are to be taken over, except the chunks up to and including `moved`."""
        order = {number: index for index, number in enumerate(self.record.attempts)}
        last = order.get(int.from_bytes(moved[:8]), -1)
        self.attempts = attempts
        self.chunks = [
            (attempt, key, size)
            for attempt in attempts
            for key, size in attempt.chunks()
            if (order[attempt.number], key) > (last, moved)
        ]
        self.chunks.reverse()

    def finish(self) -> None:
        """All chunks are taken over."""
        self.attempts, self.chunks = [], []
        self.record = msgspec.structs.replace(self.record, attempts=[])


class Staging:
    """The staged batches of this hub, and the last batch of each producer."""

    def __init__(
        self,
        core: Core,
        destinations: Destinations,
        limits: StagingLimits,
        share: float,
        *,
        take_over: Callable[[Sequence[Envelope], float], None],
    ) -> None:
        """`take_over` accepts messages whose acceptance was promised: `Intake.take_over`. `share`
        is the part of the limits that one user may have."""
        self.limits = limits
        self._bytes_share = Quota("staged bytes", limits.staged_bytes, share)
        self._attempts_share = Quota("staged attempts", limits.attempts, share)
        self._producers_share = Quota("producers of batches", limits.producers, share)
        self._names_share = Quota("destinations in staged attempts", _NAMES, share)
        self._core = core
        self._store = core.store
        self._commits = core.commits
        self._destinations = destinations
        self._take_over = take_over
        self._batches: dict[tuple[ProducerKey, int], _StagedBatch] = {}
        self._producers: dict[ProducerKey, BatchProducer] = {}
        self._addresses: dict[ProducerKey, str] = {}
        """Holders of what producers without a user have staged, if they have a share."""

    def reconfigure(self, limits: StagingLimits, share: float) -> None:
        """Other limits from now on; what is staged stays."""
        self.limits = limits
        self._bytes_share.configure(limits.staged_bytes, share)
        self._attempts_share.configure(limits.attempts, share)
        self._producers_share.configure(limits.producers, share)
        self._names_share.configure(_NAMES, share)

    @property
    def staged_bytes(self) -> int:
        """The size of all that is staged."""
        return self._bytes_share.total

    @property
    def attempts(self) -> int:
        """How many attempts are staged."""
        return self._attempts_share.total

    # Staging.

    def claim(self, owner: ProducerKey, holder: str) -> None:
        """What this producer stages counts for the holder, an address, unless it counts for another
        one already, or for a user."""
        is_new = owner not in self._addresses and owner not in self._producers
        if (
            holder
            and is_new
            and not owner.principal
            and all(each != owner for each, _ in self._batches)
        ):
            self._addresses[owner] = holder

    def _holder(self, owner: ProducerKey) -> str:
        return owner.principal or self._addresses.get(owner, "")

    def stage(
        self,
        owner: ProducerKey,
        batch: int,
        name: str,
        number: int,
        part: StagedPart,
        now: float,
        *,
        is_checked: bool = False,
    ) -> Receipt:
        """Store a part of the attempt `name`; the receipt is done when it is on disk.

        Parts are numbered from 0, in order; one that is stored already is not stored again. Raises
        BatchConflict, AttemptLost, StagingFull, StoreFull, InvalidEnvelope and, as the commit
        would, DestinationFull, unless `check_part` has just checked its destinations.
        """
        _check_name(owner.producer)
        _check_name(name)
        producer = self._producers.get(owner)
        if producer is not None and batch <= producer.record.batch:
            raise BatchConflict(f"batch {batch} of {owner.producer} is committed already")
        found = self._batches.get((owner, batch))
        attempt = found.attempts.get(name) if found is not None else None
        have = len(attempt.parts) if attempt is not None else 0
        if number > have:
            raise AttemptLost(
                f"attempt {name} of batch {batch} has {have} parts here, and part {number} is not"
                " the next: the task has to be done again"
            )
        if attempt is None or number == have:
            self._check_room(owner, attempt, part, now)
            if not is_checked:
                for _ in self.check_part(owner, batch, name, part):
                    pass
            attempt = self._keep(owner, batch, name, part, now)
        self._batches[owner, batch].touched = now
        receipt = self._commits.committed()
        kept = attempt
        receipt.add_done_callback(lambda done: _note_written(kept, number + 1, done))
        return receipt

    def _keep(
        self, owner: ProducerKey, batch: int, name: str, part: StagedPart, now: float
    ) -> StagedAttempt:
        found = self._batches.setdefault((owner, batch), _StagedBatch(now))
        attempt = found.attempts.get(name)
        if attempt is None:
            store = self._store
            attempt = found.attempts[name] = StagedAttempt(store, store.reserve_in_group(1))
            self._attempts_share.add(self._holder(owner))
        known = len(attempt.totals)
        attempt.stage(owner, batch, name, part)
        self._bytes_share.add(self._holder(owner), part.size_bytes)
        self._names_share.add(self._holder(owner), len(attempt.totals) - known)
        self._commits.added([part.size_bytes])
        return attempt

    def _release(self, owner: ProducerKey, attempts: Collection[StagedAttempt]) -> None:
        """These are gone; their bytes are counted where chunks are deleted."""
        names = sum(len(attempt.totals) for attempt in attempts)
        self._attempts_share.remove(self._holder(owner), len(attempts))
        self._names_share.remove(self._holder(owner), names)

    def _check_room(
        self, owner: ProducerKey, attempt: StagedAttempt | None, part: StagedPart, now: float
    ) -> None:
        obstacle = self._store.obstacle(now)
        if obstacle is not None:
            raise obstacle
        names = len(part.totals)
        if names > PART_NAMES:
            raise InvalidEnvelope(
                f"a part has messages for at most {PART_NAMES} destinations, not {names}"
            )
        if attempt is not None:
            names -= len(part.totals.keys() & attempt.totals.keys())
        holder = self._holder(owner)
        _check(self._bytes_share, holder, part.size_bytes, "[ingest] staged_bytes")
        _check(self._names_share, holder, names, "commit some of them first")
        if attempt is None:
            _check(self._attempts_share, holder, 1, "[ingest] attempts")
        self._check_producers(owner)

    def check_part(
        self, owner: ProducerKey, batch: int, name: str, part: StagedPart
    ) -> Iterator[None]:
        """Check that there is room for a part's messages, beside what is staged of its attempt.

        Yields now and then, so that others are served meanwhile. Raises DestinationFull.
        """
        found = self._batches.get((owner, batch))
        attempt = found.attempts.get(name) if found is not None else None
        staged = attempt.totals if attempt is not None else {}
        # Those of earlier parts were checked with them.
        totals: Totals = {}
        for number, (destination, (count, size)) in enumerate(part.totals.items(), 1):
            before, bytes_before = staged.get(destination, (0, 0))
            totals[destination] = (before + count, bytes_before + size)
            if not number % _CHECKED:
                yield
        yield from self._check_destinations(owner, totals)

    def _check_producers(self, owner: ProducerKey) -> None:
        if owner not in self._producers:
            _check(self._producers_share, self._holder(owner), 1, "[ingest] producers")

    def _check_destinations(self, owner: ProducerKey, totals: Totals) -> Iterator[None]:
        """Raises DestinationFull if a queue has no room, or there are too many destinations."""
        known = self._store.destinations()
        created = 0
        for number, (name, (count, size)) in enumerate(totals.items(), 1):
            if not number % _CHECKED:
                yield
            if name not in known:
                created += 1
            if not name.startswith("queue/"):
                continue
            queue = self._destinations.queue(name) if name in known else None
            length = queue.length if queue is not None else 0
            size_bytes = queue.size_bytes if queue is not None else 0
            policy = self._destinations.queue_policy(name)
            if not policy.takes(length + count, size_bytes + size):
                raise DestinationFull(
                    f"{name} has no room for {count} messages of {size} bytes: it holds"
                    f" {length} of {size_bytes} bytes"
                )
        if created:
            self._destinations.owners.check(self._holder(owner), created)

    # Committing.

    def is_taking_over(self) -> bool:
        """Whether messages of a committed batch are still on their way to their destinations."""
        return not all(producer.is_done for producer in self._producers.values())

    def is_committed(self, owner: ProducerKey, batch: int, run: str) -> bool:
        """Whether it is the producer's last batch.

        Raises BatchConflict for one before it, and for the same one of another run.
        """
        producer = self._producers.get(owner)
        if producer is None or batch > producer.record.batch:
            return False
        record = producer.record
        if batch < record.batch or run != record.run:
            raise BatchConflict(
                f"the last batch that {owner.producer} committed is {record.batch}"
                f"{' of another query' if run != record.run else ''}, and now it writes {batch}:"
                " a query that starts from the beginning needs another `producer`"
            )
        return True

    def commit(
        self,
        owner: ProducerKey,
        batch: int,
        named: Sequence[NamedAttempt],
        now: float,
        *,
        run: str = "",
        once: bool = False,
        is_checked: bool = False,
    ) -> BatchCommit:
        """Take over these attempts, in this order; drop others of the batch and of earlier ones.

        A batch that is committed already is not committed again. `run` distinguishes two queries
        of the same name; a producer that commits only `once` is forgotten after an hour. Raises
        BatchConflict, AttemptLost, DestinationFull, StoreFull, StagingFull; then nothing changed.
        `is_checked`: `check_commit` has just checked these attempts.
        """
        _check_name(owner.producer)
        if self.is_committed(owner, batch, run):
            return self._producers[owner].commit
        before = self._producers.get(owner)
        if before is not None and not before.is_done:
            raise StagingFull(
                f"batch {before.record.batch} of {owner.producer} is still being taken over"
            )
        self._check_producers(owner)
        attempts = self._find(owner, batch, named)
        obstacle = self._store.obstacle(now) if attempts else None
        if obstacle is not None:
            raise obstacle
        if not is_checked:
            for _ in self.check_commit(owner, batch, named):
                pass
        self._decide(owner, batch, run, once, attempts, now)
        return self._producers[owner].commit

    def check_commit(
        self,
        owner: ProducerKey,
        batch: int,
        named: Sequence[NamedAttempt],
        require: Callable[[str], None] | None = None,
    ) -> Iterator[None]:
        """Check that there is room for the messages of these attempts, and create what does not
        exist of their destinations; `require` raises if the producer may not send to one.

        Yields now and then, so that others are served meanwhile, and may take some of that room.
        Raises AttemptLost, BatchConflict, DestinationFull.
        """
        totals: Totals = {}
        for attempt in self._find(owner, batch, named):
            # A copy: another part may be staged meanwhile, and then the commit is refused.
            for number, (name, (count, size)) in enumerate(list(attempt.totals.items()), 1):
                before, bytes_before = totals.get(name, (0, 0))
                totals[name] = (before + count, bytes_before + size)
                if require is not None and not before:
                    require(name)
                if not number % _CHECKED:
                    yield
        yield from self._check_destinations(owner, totals)
        for number, name in enumerate(totals, 1):
            self._destinations.owners.create(name, self._holder(owner))
            if not number % _CHECKED:
                yield

    def _find(
        self, owner: ProducerKey, batch: int, named: Sequence[NamedAttempt]
    ) -> list[StagedAttempt]:
        found = self._batches.get((owner, batch))
        attempts: dict[str, StagedAttempt] = {}
        for each in named:
            if each.attempt in attempts:
                raise BatchConflict(f"attempt {each.attempt} is named twice")
            attempt = found.attempts.get(each.attempt) if found is not None else None
            if (
                attempt is None
                or attempt.written != each.parts
                or len(attempt.parts) != each.parts
                or attempt.messages != each.messages
            ):
                raise AttemptLost(
                    f"attempt {each.attempt} of batch {batch} is not here, or not the {each.parts}"
                    f" parts with {each.messages} messages that were staged: the batch has to be"
                    " written again"
                )
            attempts[each.attempt] = attempt
        return list(attempts.values())

    def _decide(
        self,
        owner: ProducerKey,
        batch: int,
        run: str,
        once: bool,
        attempts: list[StagedAttempt],
        now: float,
    ) -> None:
        messages = sum(attempt.messages for attempt in attempts)
        numbers = [attempt.number for attempt in attempts]
        record = _BatchRecord(owner, batch, run, once, messages, now, numbers)
        self._store.save(_PRODUCERS, _encode(owner), _encode(record))
        producer = self._add_producer(record, now)
        self._drop_upto(owner, batch, keep=set(numbers))
        producer.begin(attempts)
        self._continue(producer, now)

    def _continue(self, producer: BatchProducer, now: float) -> None:
        """Take over some more of it, in a turn that has time for it."""
        loop = self._core.loop
        loop.defer("staging", self._step, producer, now)
        loop.pump(now)

    def _add_producer(self, record: _BatchRecord, now: float) -> BatchProducer:
        if record.owner not in self._producers:
            self._producers_share.add(self._holder(record.owner))
        producer = self._producers[record.owner] = BatchProducer(record, now)
        return producer

    def _step(self, producer: BatchProducer, now: float) -> None:
        """Take over some chunks, all in one commit group.

        Not all chunks: a large batch must not block the event loop, nor make a huge group. A chunk
        at least, even if the turn of the event loop is over.
        """
        store, turns = self._store, self._core.loop.turns
        messages = size_bytes = 0
        key = b""
        while (
            producer.chunks
            and messages < _STEP_MESSAGES
            and size_bytes < _STEP_BYTES
            and not (key and turns.is_over())
        ):
            attempt, key, size = producer.chunks.pop()
            self._bytes_share.remove(self._holder(producer.record.owner), size)
            size_bytes += size
            chunk = attempt.take(key)
            try:
                envelopes = unpack(chunk)
                self._take_over(envelopes, now)
                messages += len(envelopes)
            except HubError as error:
                # All was checked when it was staged: this is a damaged record.
                self._core.damage.set_aside_state(CHUNKS, key, chunk or b"", error)
        owner = _encode(producer.record.owner)
        if producer.chunks:
            store.save(_MOVED, owner, key)
        else:
            for attempt in producer.attempts:
                attempt.forget()
            self._release(producer.record.owner, producer.attempts)
            producer.finish()
            store.drop(_MOVED, owner)
            store.save(_PRODUCERS, owner, _encode(producer.record))
        self._wait_for_disk(producer)
        self._core.loop.pump(now)

    def _wait_for_disk(self, producer: BatchProducer) -> None:
        self._commits.committed().add_done_callback(lambda written: self._go_on(producer, written))

    def _go_on(self, producer: BatchProducer, written: Receipt) -> None:
        if written.error is not None:
            # What was taken over goes into the next group by itself: only wait for that.
            due = self._core.loop.now + _RETRY_S
            self._core.timers.at(due, lambda _now: self._wait_for_disk(producer))
        elif producer.chunks:
            self._continue(producer, self._core.loop.now)
        else:
            self._commits.finish(producer.commit.receipt)

    # Dropping.

    def abort(self, owner: ProducerKey, batch: int) -> int:
        """Drop what is staged of a batch, not a committed one. Returns how many attempts."""
        return self._drop(owner, batch)

    def _drop(self, owner: ProducerKey, batch: int, *, keep: set[int] | None = None) -> int:
        """Drop the attempts of a batch, except those in `keep`, which are being taken over."""
        found = self._batches.pop((owner, batch), None)
        attempts = found.attempts.values() if found is not None else ()
        dropped = [attempt for attempt in attempts if keep is None or attempt.number not in keep]
        for attempt in dropped:
            attempt.drop()
            self._bytes_share.remove(self._holder(owner), attempt.size_bytes)
        self._release(owner, dropped)
        if dropped:
            self._commits.request(urgent=False)
        return len(dropped)

    def _drop_upto(self, owner: ProducerKey, batch: int, *, keep: set[int]) -> None:
        """Drop what can't be committed any more: this batch and earlier ones."""
        for each, number in [key for key in self._batches if key[0] == owner and key[1] <= batch]:
            self._drop(each, number, keep=keep)

    def keep_house(self, now: float) -> None:
        """Drop batches without activity, and forget producers that commit only once."""
        late = now - self.limits.staged_s
        for owner, batch in [key for key, each in self._batches.items() if each.touched < late]:
            self._drop(owner, batch)
        for owner, producer in list(self._producers.items()):
            if producer.record.once and producer.since < now - _ONCE_S and producer.is_done:
                self._forget(owner)
        known = {owner for owner, _ in self._batches} | self._producers.keys()
        self._addresses = {each: self._addresses[each] for each in self._addresses.keys() & known}

    def forget(self, owner: ProducerKey) -> None:
        """Forget a producer, and drop what it has staged. Raises UnknownMessage, StagingFull."""
        producer = self._producers.get(owner)
        batches = [key for key in self._batches if key[0] == owner]
        if producer is None and not batches:
            raise UnknownMessage(f"there is no producer {owner.producer!r}")
        if producer is not None and not producer.is_done:
            raise StagingFull(f"a batch of {owner.producer} is still being taken over")
        for _, batch in batches:
            self._drop(owner, batch)
        if producer is not None:
            self._forget(owner)

    def _forget(self, owner: ProducerKey) -> None:
        del self._producers[owner]
        self._producers_share.remove(self._holder(owner))
        self._store.drop(_PRODUCERS, _encode(owner))
        self._commits.request(urgent=False)

    # Lists.

    def producers(self) -> dict[ProducerKey, BatchProducer]:
        """All producers that ever committed a batch and are not forgotten."""
        return self._producers

    def waiting(self) -> Iterator[tuple[ProducerKey, int, list[StagedAttempt]]]:
        """The batches that are not committed, and their attempts."""
        for (owner, batch), found in self._batches.items():
            yield owner, batch, list(found.attempts.values())

    # After a restart.

    def recover(self, now: float) -> None:
        """Load what was staged, and continue to take over what was committed."""
        attempts: dict[int, StagedAttempt] = {}
        for owner, batch, name, attempt in staged.recover(self._store, self._core.damage):
            attempts[attempt.number] = attempt
            self._batches.setdefault((owner, batch), _StagedBatch(now)).attempts[name] = attempt
        for (owner, _), each in self._batches.items():
            for attempt in each.attempts.values():
                self._count(owner, attempt)
        for key, value in self._store.load(_PRODUCERS):
            try:
                record = _read_record(value)
                if _encode(record.owner) != key or not isfinite(record.time):
                    raise RecordDamaged(f"the producer {record.owner.producer[:80]!r} is not one")
            except RecordDamaged as error:
                self._core.damage.set_aside_state(_PRODUCERS, key, value, error)
                continue
            self._resume(record, attempts, now)

    def _count(self, owner: ProducerKey, attempt: StagedAttempt) -> None:
        self._attempts_share.add(self._holder(owner))
        self._bytes_share.add(self._holder(owner), attempt.size_bytes)
        self._names_share.add(self._holder(owner), len(attempt.totals))

    def _lost(self, owner: ProducerKey, number: int) -> StagedAttempt:
        """An attempt of a committed batch without a record of any of its parts."""
        attempt = StagedAttempt(self._store, number)
        self._count(owner, attempt)
        return attempt

    def _resume(self, record: _BatchRecord, attempts: dict[int, StagedAttempt], now: float) -> None:
        producer = self._add_producer(record, now)
        self._drop_upto(record.owner, record.batch, keep=set(record.attempts))
        if not record.attempts:
            producer.commit.receipt.finish()
            return
        found = [
            attempts.get(number) or self._lost(record.owner, number) for number in record.attempts
        ]
        # If the record of a part is damaged, its chunks may be readable all the same.
        is_damaged = sum(attempt.messages for attempt in found) != record.messages
        owner = _encode(record.owner)
        moved = self._store.get(_MOVED, owner)
        if moved is not None and not _is_chunk_of(record.attempts, moved):
            damaged = RecordDamaged(f"how far {record.owner.producer} was taken over is unknown")
            self._core.damage.set_aside_state(_MOVED, owner, moved, damaged)
            # Chunks are deleted when they are taken over: those that are left are to be taken over.
            moved, is_damaged = b"", True
        if is_damaged:
            for attempt in found:
                before = attempt.size_bytes
                attempt.find_chunks()
                self._bytes_share.add(self._holder(record.owner), attempt.size_bytes - before)
        producer.begin(found, moved or b"")
        left = sum(size for _, _, size in producer.chunks)
        done = sum(attempt.size_bytes for attempt in found) - left
        self._bytes_share.remove(self._holder(record.owner), done)
        self._core.timers.at(now, lambda at: self._step(producer, at))


def _check(share: Quota, holder: str, count: int, hint: str) -> None:
    """Raises StagingFull."""
    try:
        share.check(holder, count)
    except QuotaExceeded as error:
        raise StagingFull(f"{error} ({hint})") from None


def _is_chunk_of(attempts: Sequence[int], key: bytes) -> bool:
    return len(key) == _CHUNK_KEY and int.from_bytes(key[:8]) in attempts


def _note_written(attempt: StagedAttempt, parts: int, receipt: Receipt) -> None:
    if receipt.error is None:
        attempt.written = max(attempt.written, parts)


def _check_name(name: str) -> None:
    """Raises InvalidEnvelope for a name that is empty, too long or not printable."""
    if not name or not name.isprintable() or len(name.encode(errors="replace")) > _NAME_BYTES:
        raise InvalidEnvelope(f"{name!r} can't be the name of a producer or of an attempt")
