"""The life of a replica: it follows the log, takes over when the leader is gone, leads, and follows
again.

What it decides is in `succession.py`. Here is what it does: read and apply records, append a
takeover, have the server begin and end terms, report, and trim. The server is known as a `TermHost`
only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

import msgspec

from crosswire import __version__
from crosswire.commitlog.contract import (
    LogBookmark,
    LogState,
    RecordReader,
    ReplicaState,
    ReplicatedLog,
)
from crosswire.commitlog.leader import LeaderLog, boot_time
from crosswire.commitlog.records import (
    FORMAT,
    Genesis,
    GroupAssembler,
    HandOver,
    LogRecord,
    RecordChain,
    RecordKind,
    RecordPosition,
    Takeover,
    Trim,
)
from crosswire.config import ReplicationSettings
from crosswire.envelope import MICROSECONDS
from crosswire.errors import (
    ConfigError,
    CrosswireError,
    LogConflict,
    LogError,
    LogNameTaken,
    LogRefused,
    LogTrimmed,
    LogUnavailable,
    NotLeading,
    StoreError,
)
from crosswire.hub.wall import Clock
from crosswire.logs import log_event
from crosswire.server.succession import Role, Succession, TrimRule, are_here, successor
from crosswire.store.replica import ReplicaStore

__all__ = ["CheckpointSource", "Replica", "TermHost"]

_log = logging.getLogger("crosswire.replication")

_HEARTBEAT_S: Final = 1.0
_REPORT_S: Final = 1.0
_TRIM_S: Final = 5.0
_RETRY_S: Final = 0.5
_HAND_OVER_S: Final = 5.0
_FETCH_AGAIN_S: Final = 2.0
_CLOCK_OFF_S: Final = 5.0
_SERVERS: Final = "servers"
_INSTANCE: Final = "instance"
_MACHINE_ID: Final = Path("/etc/machine-id")


class TermHost(Protocol):
    """What runs a hub while its replica leads: the server."""

    async def begin_term(self, store: ReplicaStore, commits: LeaderLog) -> None:
        """Build the hub, commit its first group, and open the listeners. Raises StoreError."""

    async def end_term(self, hand_over: Callable[[], Awaitable[None]]) -> None:
        """Drain and stop the hub; `hand_over` is called when its last group is durable. The store
        stays open."""

    async def abandon_term(self) -> None:
        """Stop the hub at once, without an answer to anybody. The store stays open."""

    @property
    def is_fetched(self) -> bool:
        """Is there a checkpoint that somebody fetches? He needs what follows it in the log."""


class CheckpointSource(Protocol):
    """Brings another replica's data here; both are called on a thread."""

    def fetch(self, address: str, log_id: bytes) -> RecordPosition:
        """Fetch it from a replica's address, beside the store; returns how far it is. Raises
        CrosswireError."""

    def install(self) -> None:
        """Make it the store, which is not open. Raises StoreError."""


class Replica:
    """One replica of a hub. `open` it, then `run` it as a task until `stop`.

    `open_store` opens the data directory; with the id of a log it makes an empty one a replica of
    that. `checkpoints` fetches another replica's data, where the log does not have all that is
    missing here. `failed` is done with the error that ended `run`.
    """

    def __init__(
        self,
        settings: ReplicationSettings,
        log: ReplicatedLog,
        open_store: Callable[[bytes], ReplicaStore | None],
        host: TermHost,
        clock: Clock,
        *,
        random: Random,
        checkpoints: CheckpointSource | None = None,
        boot_clock: Callable[[], float] = boot_time,
    ) -> None:
        self.settings = settings
        self.name = settings.replica
        self.log = log
        self.writer = secrets.token_bytes(16)
        self.succession = Succession(self.name, settings.takeover_s, random.random)
        self.store: ReplicaStore
        self.failed: asyncio.Future[CrosswireError] = asyncio.get_running_loop().create_future()
        self.trouble = ""
        """Why the log does not answer at the moment; "" if it does."""
        self.log_state: LogState | None = None
        """How the leader saw the log last."""
        self.replicas: list[ReplicaState] = []
        """What the replicas reported last, as far as this one has asked."""
        self.commits: LeaderLog | None = None
        """What the leader appends to; None on a standby."""
        self._open_store = open_store
        self._host = host
        self._clock = clock
        self._boot_clock = boot_clock
        self._checkpoints = checkpoints
        self._trims = TrimRule(settings.retain_s, settings.copies)
        self._assembler = GroupAssembler()
        self._storing = asyncio.Lock()
        self._instance = self._made_instance = b""
        self._name_fault = ""
        self._has_reported = False
        self._synced = 0
        self._is_stopping = False
        self._wanted_successor = ""
        self._fetch_at = 0.0
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reports: asyncio.Task[None] | None = None

    # Opening and stopping.

    async def open(self) -> None:
        """Open data directory and log. Raises ConfigError, StoreError, LogError: all that a person
        has to do something about.

        A replica that belongs to a log already starts without it, and waits for it.
        """
        store = self._open_store(b"")
        if store is None:
            state = await self.log.open()
            store = self._open_store(state.log_id)
            assert store is not None
        self.store = store
        try:
            self._instance = self._identify()
            await self._open_log()
        except LogRefused:
            store.close()
            raise
        except LogUnavailable as error:
            self._miss_log(error)
        except BaseException:
            store.close()
            raise

    async def _open_log(self) -> None:
        store = self.store
        known: LogBookmark | None = None
        if store.position.number:
            servers = store.get_local(_SERVERS)
            system, timeline = msgspec.json.decode(servers) if servers else ("", 0)
            known = LogBookmark(store.log_id, store.position, system, timeline)
        state = await self.log.open(known)
        if known is None and state.log_id != store.log_id:
            raise ConfigError(
                f"{self.name} was about to join the log {store.log_id.hex()}, and the address is "
                f"that of {state.log_id.hex()}"
            )
        self._find_log()

    def _identify(self) -> bytes:
        """What distinguishes this data directory from others, copies of it included."""
        made = self.store.get_local(_INSTANCE)
        if made is None:
            made = self._made_instance or secrets.token_bytes(16)
            self.store.save_local(_INSTANCE, made)
        self._made_instance = made
        where = b""
        with suppress(OSError):
            where = _MACHINE_ID.read_bytes()
        path = getattr(self.store, "path", None)
        if path is not None:
            found = path.parent.stat()
            where += f"{found.st_dev}.{found.st_ino}".encode()
        return sha256(made + where).digest()[:16]

    def start(self) -> None:
        """Begin to follow the log."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="crosswire-replica")
        self._reports = asyncio.get_running_loop().create_task(
            self._report_always(), name="crosswire-replica-reports"
        )

    async def stop(self) -> None:
        """Hand over if it leads, and close everything."""
        self._is_stopping = True
        self._leave.set()
        task = self._task
        if task is not None:
            if self.succession.role is not Role.LEADER:
                task.cancel()
            await asyncio.wait({task})
        if self._reports is not None:
            self._reports.cancel()
            await asyncio.wait({self._reports})
        if not self.store.is_closed:
            with suppress(LogError, StoreError):
                await self._report()
        self.store.close()
        await self.log.close()

    def hand_over(self, to: str = "") -> None:
        """Have the leader end its term; `to` names its successor. Raises NotLeading, or
        ConfigError if there is no such standby."""
        if self.succession.role is not Role.LEADER:
            raise self.refusal()
        if to and not successor(self.replicas, self.name, to):
            raise ConfigError(f"there is no standby {to} that could take over now")
        self._wanted_successor = to
        self._leave.set()

    @property
    def newest(self) -> int:
        """The newest record that is known here: it may not be applied yet."""
        return max([self.store.position.number, *(each.synced for each in self.replicas)])

    @property
    def lag(self) -> int:
        """How many records that is ahead of what is applied."""
        return self.newest - self.store.position.number

    def refusal(self) -> NotLeading:
        """The error for requests that only a leader can serve."""
        leader = self.succession.leader
        where = f" at {leader.address}" if leader.address else ""
        known = f"the leader is {leader.replica}{where}" if leader.replica else "no leader is known"
        return NotLeading(f"{self.name} is a standby of {self.store.node or 'a hub'}: {known}")

    async def _run(self) -> None:
        try:
            while self.trouble:
                await asyncio.sleep(_RETRY_S)
                try:
                    await self._open_log()
                except LogUnavailable as error:
                    self._miss_log(error)
            while not self._is_stopping:
                chain = await self._follow()
                await self._lead(chain)
        except CrosswireError as error:
            log_event(_log, logging.ERROR, "this replica stops", reason=str(error))
            if not self.failed.done():
                self.failed.set_result(error)
        except Exception as error:
            # A fault of ours: the process ends with it, and another replica takes over.
            _log.exception("this replica stops")
            if not self.failed.done():
                self.failed.set_exception(error)

    # Following.

    async def _follow(self) -> RecordChain:
        """Apply what comes; returns when this replica's own takeover is applied."""
        self.succession.follows()
        self._assembler = GroupAssembler()
        reader = self.log.read(self.store.position)
        while True:
            try:
                page = await reader.next_page()
                self._find_log()
                await self._apply(page.records)
            except LogUnavailable as error:
                self._miss_log(error)
                continue
            except LogTrimmed as error:
                await self._rebuild(error)
                return await self._follow()
            if self.store.fault and self.store.node and await self._rebuild_damaged():
                return await self._follow()
            succession = self.succession
            succession.answered(self._boot_clock(), [*page.records, *page.tail], page.newest.number)
            succession.not_before(page.time_us)
            if not succession.should_try(has_reported=self._has_reported, fault=self.fault()):
                continue
            chain = RecordChain(
                self.store.log_id,
                self.writer,
                position=page.newest,
                record_bytes=self.settings.record_bytes,
            )
            if await self._take_over(chain, reader):
                return chain

    def fault(self) -> str:
        """Why this replica must not lead; "" if it may."""
        if self._name_fault:
            return self._name_fault
        if not self.store.node:
            return "it has no data yet"
        if self.store.fault:
            return self.store.fault
        if not self.store.has_room(self._clock.now()):
            return "there is no room on the disk"
        return ""

    async def _apply(self, records: list[LogRecord]) -> None:
        for record in records:
            if record.kind is RecordKind.GENESIS and record.read(Genesis).checkpoint:
                raise LogTrimmed("the log begins after the data that it was made from")
            body = self._assembler.add(record)
            while True:
                try:
                    async with self._storing:
                        if body is not None:
                            self.store.apply(body, record.position)
                        elif not self._assembler.is_open:
                            self.store.pass_over(record.position)
                    break
                except StoreError as error:
                    # A full disk, most likely: the record stays where it is until there is room.
                    if type(error) is not type(self.store.last_error):
                        log_event(_log, logging.ERROR, "can't apply the log", reason=str(error))
                    self.store.last_error = error
                    await asyncio.sleep(_RETRY_S)
                    self.store.mend()
            self.store.last_error = None
            # Others are served between two records, which may be large.
            await asyncio.sleep(0)

    async def _rebuild(self, why: LogTrimmed) -> None:
        """Continue from another replica's data, as soon as one gives it. Raises LogTrimmed if none
        ever can."""
        if self._checkpoints is None:
            raise why
        while True:
            error = await self._fetch(self._checkpoints)
            if error is None:
                return
            self.trouble = f"{why.reason}; no checkpoint could be fetched: {error}"
            log_event(_log, logging.WARNING, "no checkpoint could be fetched", reason=str(error))
            await asyncio.sleep(_FETCH_AGAIN_S)

    async def _rebuild_damaged(self) -> bool:
        """Replace a damaged store. Where nobody has another one at the moment, it goes on as it is:
        it never leads."""
        if self._checkpoints is None or self._boot_clock() < self._fetch_at:
            return False
        self._fetch_at = self._boot_clock() + _FETCH_AGAIN_S
        return await self._fetch(self._checkpoints) is None

    async def _fetch(self, checkpoints: CheckpointSource) -> CrosswireError | None:
        """The error, if it could not be done."""
        try:
            self.replicas = await self.log.replicas()
            found = [
                each.address
                for each in are_here(self.replicas)
                # What this replica reported before it was started again may still be there.
                if each.role == Role.LEADER and each.address and each.name != self.name
            ]
            if not found:
                return LogUnavailable("no leader reports an address ([replication] advertise)")
            log_event(_log, logging.WARNING, "fetching a checkpoint", address=found[0])
            position = await asyncio.to_thread(checkpoints.fetch, found[0], self.log.log_id)
            # Raises LogDamaged if the log has another record there, LogTrimmed if that is gone.
            await self.log.read(position).next_page()
            async with self._storing:
                self.store.close()
                await asyncio.to_thread(checkpoints.install)
                store = self._open_store(b"")
                assert store is not None
                self.store = store
                self._instance = self._identify()
        except CrosswireError as error:
            return error
        log_event(_log, logging.WARNING, "a checkpoint is installed", record=position.number)
        self.trouble = ""
        return None

    async def _take_over(self, chain: RecordChain, reader: RecordReader) -> bool:
        """Append a takeover on what was seen last, and apply everything up to it."""
        succession = self.succession
        succession.tries()
        takeover = Takeover(self.name, self.settings.advertise)
        record = chain.takeover(takeover, self._time_us())
        log_event(_log, logging.WARNING, "taking over", record=record.number, replica=self.name)
        try:
            await self.log.append(record)
        except LogConflict as error:
            log_event(_log, logging.WARNING, "another replica took over", reason=error.reason)
            succession.follows()
            return False
        while self.store.position.number < record.number:
            try:
                page = await reader.next_page()
            except LogUnavailable as error:
                self._miss_log(error)
                continue
            self._find_log()
            await self._apply(page.records)
            succession.answered(self._boot_clock(), page.records, page.newest.number)
        succession.leads(takeover, record.number)
        return True

    def _time_us(self) -> int:
        """The time of records: it does not run back, whichever replica leads."""
        self._clock.not_before(self.succession.time_us / MICROSECONDS)
        return int(self._clock.now() * MICROSECONDS)

    def _miss_log(self, error: LogUnavailable) -> None:
        self.succession.unanswered()
        if self.trouble != error.reason:
            self.trouble = error.reason
            log_event(_log, logging.WARNING, "the log does not answer", reason=error.reason)

    def _find_log(self) -> None:
        if self.trouble:
            self.trouble = ""
            log_event(_log, logging.WARNING, "the log answers again")

    # Leading.

    async def _lead(self, chain: RecordChain) -> None:
        """Run a hub until this replica is replaced, or hands over."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[LogError | StoreError] = loop.create_future()

        def end(error: LogError | StoreError) -> None:
            if not ended.done():
                ended.set_result(error)

        # Anew: what the hub needs of it is known when it is opened.
        await self._reopen()
        commits = LeaderLog(
            self.log,
            chain,
            self.store,
            self._time_us,
            end,
            heartbeat_s=min(_HEARTBEAT_S, self.settings.takeover_s / 3),
            # Half of a record: what the rest of a turn adds has room in it, too.
            group_bytes=self.settings.record_bytes // 2,
            pending_limit_bytes=self.settings.pending_bytes,
            clock=self._boot_clock,
        )
        self.commits = commits
        watch = loop.create_task(self._watch(commits, end))
        trims = loop.create_task(self._trim_always(commits))
        try:
            self._leave.clear()
            if self._is_stopping:
                self._leave.set()
            led = await _unless(ended, self._host.begin_term(self.store, commits))
            if led:
                log_event(
                    _log, logging.WARNING, "leading", replica=self.name, term=self.succession.term
                )
                led = await _unless(ended, self._leave.wait())
            if led:
                # A standby that is named takes over at once, unless another record comes after
                # that.
                trims.cancel()
                led = await _unless(
                    ended, self._host.end_term(lambda: self._append_hand_over(commits))
                )
            if not led:
                await self._host.abandon_term()
                self._judge(ended.result())
        except BaseException:
            await self._host.abandon_term()
            raise
        finally:
            for task in (watch, trims):
                task.cancel()
            self.commits = None
            self.succession.follows()
            await asyncio.wait({watch, trims})
        await self._reopen()

    def _judge(self, error: LogError | StoreError) -> None:
        """Raises what a replica can't go on after."""
        log_event(
            _log, logging.ERROR, "this replica leads no more", replica=self.name, reason=str(error)
        )
        if isinstance(error, LogError) and not isinstance(error, LogConflict | LogUnavailable):
            raise error

    async def _reopen(self) -> None:
        async with self._storing:
            self.store.close()
            store = self._open_store(b"")
            assert store is not None
            self.store = store

    async def _watch(
        self, commits: LeaderLog, end: Callable[[LogError | StoreError], None]
    ) -> None:
        """Ends a leader whose appends are not confirmed: another one may lead by now."""
        while True:
            await asyncio.sleep(self.settings.takeover_s / 10)
            silent_s = self._boot_clock() - commits.confirmed_at
            self.trouble = self.log.trouble
            if self.succession.is_overdue(silent_s):
                end(LogUnavailable(f"the log has confirmed nothing for {silent_s:.0f} s"))
            elif self._is_short_of_disk() and not self._leave.is_set():
                # It would refuse producers, while a standby can take them. Without such a standby
                # it stays: consumers can make room.
                name = successor(self.replicas, self.name)
                if name:
                    reason = "there is no room on the disk"
                    log_event(_log, logging.ERROR, "handing over", reason=reason, to=name)
                    self._leave.set()

    def _is_short_of_disk(self) -> bool:
        """Not of room in the log, which no other replica has more of."""
        return not self.store.is_log_full and not self.store.has_room(self._clock.now())

    async def _append_hand_over(self, commits: LeaderLog) -> None:
        """Name the standby that takes over at once. Without one, the next to come waits."""
        replicas: list[ReplicaState] = []
        with suppress(LogUnavailable):
            replicas = await self.log.replicas()
        name = successor(replicas, self.name, self._wanted_successor)
        self._wanted_successor = ""
        if name:
            try:
                async with asyncio.timeout(_HAND_OVER_S):
                    await commits.add(lambda chain, at: chain.hand_over(HandOver(name), at))
            except TimeoutError:
                log_event(_log, logging.WARNING, "the log does not answer, nobody is named")
            else:
                log_event(_log, logging.WARNING, "handed over", to=name)

    # Reports and trimming.

    async def _report_always(self) -> None:
        while True:
            try:
                await self._report()
                self._has_reported, self._name_fault = True, ""
            except LogNameTaken as error:
                # Of a process that has just ended, perhaps: its report gets old soon.
                if not self._name_fault:
                    log_event(_log, logging.ERROR, "the name is taken", reason=str(error))
                self._has_reported, self._name_fault = False, error.reason
            except (LogUnavailable, StoreError) as error:
                _log.debug("not reported: %s", error)
            except LogError as error:
                log_event(_log, logging.ERROR, "not reported", reason=error.reason)
            await asyncio.sleep(_REPORT_S)

    async def _report(self) -> None:
        """Bring what is applied to the disk, and report how far that is."""
        async with self._storing:
            # With a full disk it stays as it was, and is reported all the same.
            with suppress(StoreError):
                self._synced = await self._sync(self.store)
        if not self.log.log_id:
            return
        role = self.succession.role
        if role is not Role.LEADER and self.fault():
            role = Role.DAMAGED if self.store.node else Role.JOINING
        await self.log.report(
            ReplicaState(
                name=self.name,
                address=self.settings.advertise,
                version=__version__,
                format=FORMAT,
                synced=self._synced,
                writer=self._instance,
                time_us=int(self._clock.now() * MICROSECONDS),
                role=role,
            )
        )
        self.replicas = await self.log.replicas()

    async def _sync(self, store: ReplicaStore) -> int:
        """The number of the last record that is on the disk then. Raises StoreError."""
        position = store.write_position()
        if self.log.log_id:
            bookmark = self.log.bookmark(position)
            servers = msgspec.json.encode((bookmark.system, bookmark.timeline))
            if servers != store.get_local(_SERVERS):
                store.save_local(_SERVERS, servers)
        await asyncio.to_thread(store.sync)
        return position.number

    async def _trim_always(self, commits: LeaderLog) -> None:
        """Remove from the log what nobody needs; look at its size."""
        while True:
            await asyncio.sleep(_TRIM_S)
            try:
                await self._trim(commits)
            except LogUnavailable as error:
                _log.debug("not trimmed: %s", error)
            except LogError as error:
                # A record that is refused ends the term elsewhere; this has to be tried again, or
                # the log grows for as long as the term lasts.
                log_event(_log, logging.ERROR, "not trimmed", reason=error.reason)

    async def _trim(self, commits: LeaderLog) -> None:
        now, settings = self._boot_clock(), self.settings
        self._trims.note(now, commits.position.number)
        self.log_state = state = await self.log.state()
        replicas = await self.log.replicas()
        self.store.is_log_full = state.size_bytes >= settings.limit_bytes
        upto = self._trims.upto(now, replicas)
        if upto > state.first and not self._host.is_fetched:
            await commits.add(lambda chain, at: chain.trim(Trim(upto), at))
            await self.log.trim(upto)

    def alarms(self) -> list[str]:
        """What an operator should know, though all works."""
        found = []
        here, settings, state = are_here(self.replicas), self.settings, self.log_state
        if self.succession.role is Role.LEADER and len(here) < settings.copies:
            found.append(f"only {len(here)} of {settings.copies} replicas report")
        if state is not None and state.size_bytes > settings.retain_bytes:
            found.append(f"the log has {state.size_bytes} bytes, more than retain_bytes")
        clocks = {each.name: each.time_us / MICROSECONDS + each.age_s for each in here}
        leader = next((each.name for each in here if each.role == Role.LEADER), None)
        for name, clock in clocks.items():
            if leader is not None and abs(clock - clocks[leader]) > _CLOCK_OFF_S:
                found.append(f"the clock of {name} differs from the leader's by over 5 s")
        return found


async def _unless(ended: asyncio.Future[Any], work: Coroutine[Any, Any, object]) -> bool:
    """Do some work of a leader; False if its term ended before it was done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if ended.done():
        # What the work raised then is a consequence.
        if not task.cancelled():
            task.exception()
        return False
    task.result()
    return True
