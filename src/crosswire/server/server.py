"""The server: opens store, hub, lake and listeners; runs timers; reloads, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import ssl
import tempfile
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

import msgspec

from crosswire.access import Access
from crosswire.commitlog.contract import CommitLog
from crosswire.config import Address, Config, ScheduleEntry
from crosswire.envelope import Envelope, message_kind
from crosswire.errors import (
    BondError,
    ConfigError,
    HubError,
    InvalidSchedule,
    RecordDamaged,
    StoreDamaged,
    StoreError,
)
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.payloads import JSON, TEXT, Schemas
from crosswire.hub.hub import Hub
from crosswire.hub.policies import HubConfig
from crosswire.hub.schedules import Schedule
from crosswire.hub.wall import Clock
from crosswire.lake.files import find
from crosswire.listeners import HTTP_LISTENERS, PLAIN_LISTENERS
from crosswire.logs import log_event
from crosswire.resources import memory_limit_bytes, raise_file_limit
from crosswire.server.exposure import refuse_exposures
from crosswire.server.lake_feed import LakeFeed, note_absence
from crosswire.server.leftovers import LeftoverCheck
from crosswire.server.listener import Listener
from crosswire.server.log_reader import Log
from crosswire.server.metrics import Metrics
from crosswire.server.private_files import create_private_files, make_private
from crosswire.server.revocation import revoke
from crosswire.server.tap_feed import TapFeed, has_spool
from crosswire.server.tls import RenewableContext, server_context
from crosswire.server.watchdog import Watchdog
from crosswire.store.contract import Store
from crosswire.store.records import reader
from crosswire.store.reserve import flush_bytes, room_for_others
from crosswire.store.rocks import RocksStore, is_new

__all__ = ["GATEWAYS", "HttpListener", "Server"]

_log = logging.getLogger("crosswire.server")

_POLL_S: Final = 0.02
_TICK_S: Final = 0.1
_AFTER_FAILURE_S: Final = 1.0
_IDLE_CHECK_S: Final = 10.0
_GOODBYE_S: Final = 2.0
_WINDOWS_PART: Final = 4
"""Queues and subscriptions together keep messages in memory up to this part of the limit."""
_OWN_FILES: Final = 1_024
"""Files that are open beside connections: those of store and lake, and listeners."""
_CONFIGURED: Final = "configured"
_STORE_FILES: Final = re.compile(
    r"LOCK|LOG.*|IDENTITY|MANIFEST-\d+|OPTIONS-\d+(\.dbtmp)?|\d+\.(sst|log|dbtmp)|RESERVE"
    r"|rocksdict-config\.json|crosswire\..*"
)
"""Names of files that a hub may leave when it is killed while it creates its store."""
_read_names: Callable[[bytes], list[str]] = reader(list[str], "the configured schedules")
_RESTART: Final = ("data", "emqp", "insecure", "lake", "listen", "store")
"""Settings that take effect only after a restart."""

GATEWAYS: Final = {
    "emp": "emp.gateway:EmpGateway",
    "emqp-admin": "emqp.administration:AdminGateway",
    "emqp-clients": "emqp.clients:ClientGateway",
    "emqp-publishers": "emqp.clients:PublisherGateway",
    "emqp-subscribers": "emqp.subscribers:SubscriberGateway",
    "emqp-workers": "emqp.workers:WorkerGateway",
    "epoxy": "epoxy.gateway:EpoxyGateway",
    "micromsg2": "micromsg2.gateway:MicroMsg2Gateway",
    "relink": "relink.gateway:RelinkGateway",
}
"""Module and class of a listener, by its name without `-tls`."""


class HttpListener(Protocol):
    """The HTTP listener, as the server uses it; `web` is above `server` and passes it in."""

    address: Address

    def named(self, name: str, tls: ssl.SSLContext | None) -> HttpListener:
        """A listener of this name for the same application."""
        ...

    async def open(self, address: Address) -> Address:
        """Listen; returns the address with the port that was taken. Raises ConfigError."""
        ...

    def close(self) -> None:
        """Accept no more connections."""

    async def finish(self) -> None:
        """Wait for the last responses, a second at most, and close the connections."""


class Server:
    """One hub with its listeners: `start` opens everything, `stop` drains and closes it.

    `http` makes the listeners `http` and `https`; without it they must be off.
    """

    def __init__(
        self,
        config: Config,
        *,
        http: Callable[[Server], HttpListener] | None = None,
        clock: Clock | None = None,
        watchdog: Watchdog | None = None,
        open_store: Callable[[Config], Store] | None = None,
        make_log: Callable[[Store], CommitLog] | None = None,
    ) -> None:
        """The other arguments replace what a hub takes from its machine: clocks, the thread that
        watches the event loop, the files of its store, and the log that makes groups durable."""
        self.config = config
        self.clock = clock or Clock()
        self.watchdog = watchdog or Watchdog()
        self._open_store = open_store or _open_store
        self._make_log = make_log
        self.listeners: dict[str, Listener | HttpListener] = {}
        self.started_at = 0.0
        self._http = http
        self._web: HttpListener | None = None
        self._tls: RenewableContext | None = None
        if config.tls is not None:
            self._tls = RenewableContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.current = server_context(config.tls)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._hurried = False
        self._idle_at = 0.0
        self._lake: LakeFeed | None = None
        self._tap: TapFeed | None = None
        self.log: Log | None = None

    async def start(self) -> dict[str, Address]:
        """Open everything; returns the address of every listener. Raises ConfigError or StoreError.

        Order matters: the configuration is checked before the store is opened, which may be slow;
        schedules and gateways are restored before a listener accepts, so that the first peer finds
        everything; timers start last, since they may deliver to peers.
        """
        config = self.config
        addresses = self._addresses()
        refuse_exposures(config)
        schemas = _schemas(config.bond.files)
        store = self._open_store(config)
        _log_damage(store)
        clock = self.clock.now
        now = clock()
        log = self._make_log(store) if self._make_log is not None else None
        try:
            self.hub = Hub(
                store,
                _hub_config(config),
                now=now,
                random=random.Random(random.getrandbits(64)),
                clock=clock,
                log=log,
            )
        except BaseException:
            # The lock on the store's files must not outlive the attempt.
            store.close()
            raise
        try:
            self.metrics = Metrics(self.hub)
            self.context = GatewayContext(self.hub, config, schemas=schemas, clock=clock)
            if self._tls is not None:
                self.context.authorities = self._tls.current.authorities
            names = addresses.keys() - set(HTTP_LISTENERS)
            gateways = {each.protocol: each for each in map(_gateway, names)}
            sources = [each.leftovers for each in gateways.values()]
            self.leftovers = LeftoverCheck(self.context, sources)
        except BaseException:
            await self.hub.commits.close()
            raise
        self.hub.commits.start(asyncio.get_running_loop())
        try:
            self._follow_file_limit()
            await self._open_lake()
            self._follow_schedules(config.schedules)
            for name in addresses:
                if name not in HTTP_LISTENERS:
                    _gateway(name).prepare(self.context)
            for name, address in addresses.items():
                listener = self._listener(name)
                await listener.open(address)
                self.listeners[name] = self.context.listeners[name] = listener
        except BaseException:
            # Peers may be connected already: the same stop as always, but without the grace time.
            self.hurry()
            await self.stop()
            raise
        self.leftovers.start()
        self.started_at = now
        self.hub.on_earlier_deadline(self._advance_timer)
        self._timer_at = asyncio.get_running_loop().time()
        self.watchdog.start()
        self.hub.turns.on_turn = self.watchdog.note_turn
        self._keep_time()
        return {name: listener.address for name, listener in self.listeners.items()}

    async def _open_lake(self) -> None:
        settings = self.config.lake
        path = Path(settings.directory or Path(self.config.data) / "lake")
        least_bytes = flush_bytes(self.config.store.buffer_bytes)
        has_room = room_for_others(path, Path(self.config.data) / "store", least_bytes)
        try:
            await self._start_lake(path, has_room)
        except OSError as error:
            raise ConfigError(f"can't keep the lake in {path}: {error.strerror}") from error

    async def _start_lake(self, path: Path, has_room: Callable[[], bool]) -> None:
        settings, hub, count = self.config.lake, self.hub, self.context.count
        if settings.messages or settings.ledger:
            self._lake = LakeFeed(hub, settings, path, count=count, has_room=has_room)
            await self._lake.start()
        else:
            await note_absence(hub)
        self.log = Log(hub, path, self._lake, count=count)
        if settings.tap.listeners or has_spool(path):
            self._tap = TapFeed(settings, path, hub.node, count=count, has_room=has_room)
            self.context.tap = self._tap
            await self._tap.start()

    async def _close_lake(self) -> None:
        if self.log is not None:
            await self.log.close()
        if self._tap is not None:
            await self._tap.stop()
        if self._lake is not None:
            await self._lake.stop()

    def _addresses(self) -> dict[str, Address]:
        addresses = self.config.addresses()
        for name in addresses:
            is_http = name in HTTP_LISTENERS and self._http is not None
            if name.removesuffix("-tls") not in GATEWAYS and not is_http:
                raise ConfigError(f"the listener {name} has no application")
        return addresses

    def _listener(self, name: str) -> Listener | HttpListener:
        secure = None if name in PLAIN_LISTENERS else self._tls
        if name in HTTP_LISTENERS and self._http is not None:
            self._web = self._web or self._http(self)
            return self._web.named(name, secure)
        return Listener(name, _gateway(name), self.context, tls=secure)

    # Stopping.

    async def stop(self) -> None:
        """Drain and close: no new connections, a grace time for settlements, goodbyes, files.

        HTTP closes last: `/readyz` reports "draining" meanwhile. Raises StoreError if the last
        changes can't be written.
        """
        # First of all, so that gateways refuse new work from peers that are still connected.
        self.context.draining = True
        for name, listener in self.listeners.items():
            if name not in HTTP_LISTENERS:
                listener.close()
        deadline = self.context.now() + self.config.drain_s
        run = self.hub.callbacks.run
        # Deliveries stop, but settlements and responses to what was delivered are still accepted:
        # without the wait all of it would be redelivered after the restart.
        for gateway in list(self.context.gateways.values()):
            run("drain", gateway.drain)
        while self._under_way() and self.context.now() < deadline and not self._hurried:
            await asyncio.sleep(_POLL_S)
        for gateway in list(self.context.gateways.values()):
            run("close", gateway.session.connection.close)
            gateway.session.wake()
        deadline = self.context.now() + _GOODBYE_S
        while self.context.gateways and self.context.now() < deadline and not self._hurried:
            await asyncio.sleep(_POLL_S)
        # Peers that did not answer the goodbye in time.
        for gateway in list(self.context.gateways.values()):
            gateway.session.transport.abort()
        for listener in self.listeners.values():
            listener.close()
        if self._timer is not None:
            self._timer.cancel()
        self.watchdog.stop()
        self.leftovers.stop()
        # One turn of the loop: aborted transports report their end to the gateways, which release
        # consumers and record it, before the store is closed.
        await asyncio.sleep(0)
        # The lake before the store: sealing its last files commits to the store. Each step runs
        # even if the one before it fails.
        try:
            await self._close_lake()
        finally:
            try:
                await self._close_store()
            finally:
                for listener in self.listeners.values():
                    if not isinstance(listener, Listener):
                        await listener.finish()

    async def _close_store(self) -> None:
        """Commit what is left and close the files, in any case. Raises StoreError."""
        try:
            await self.hub.commits.close()
        except StoreError as error:
            raise type(error)(
                f"it has stopped, but its last changes are not on the disk: {error}. Everything"
                " acknowledged is; messages settled last are delivered again after the next start"
            ) from error

    def hurry(self) -> None:
        """End the grace time of `stop`, now or when it begins."""
        self._hurried = True

    def _under_way(self) -> bool:
        return any(gateway.is_busy for gateway in self.context.gateways.values())

    # Reload.

    def reload(self, config: Config) -> list[str]:
        """Apply a configuration; returns the names of settings that need a restart.

        Raises ConfigError; then nothing has changed: all that can fail is checked before the first
        change.
        """
        old = self.config
        waiting = [name for name in _RESTART if getattr(config, name) != getattr(old, name)]
        kept = {name: getattr(old, name) for name in waiting}
        if (config.tls is None) != (old.tls is None):
            waiting.append("tls")
            kept["tls"] = old.tls
        config = msgspec.structs.replace(config, **kept)
        refuse_exposures(config)
        schemas = _schemas(config.bond.files)
        context = self.context
        if config.tls is not None and self._tls is not None:
            self._tls.current = server_context(config.tls)
            context.authorities = self._tls.current.authorities
        self._follow_schedules(config.schedules)
        self.hub.reconfigure(_hub_config(config))
        self.config = config
        before = context.access
        context.reconfigure(config, Access(config.users), schemas)
        self._follow_file_limit()
        names = self.listeners.keys() - set(HTTP_LISTENERS)
        revoke(context, before, {_gateway(name) for name in names})
        return sorted(waiting)

    def _follow_schedules(self, entries: Sequence[ScheduleEntry]) -> None:
        """Add, replace and remove schedules so that they match the configuration.

        Schedules that peers or users added are not touched: the store has the ids of the configured
        ones. One that the configuration did not change keeps its next fire time and its count.
        """
        schedules, store = self.hub.schedules, self.hub.store
        stored = store.get(_CONFIGURED, b"schedules")
        before: list[str] = []
        if stored is not None:
            try:
                before = _read_names(stored)
            except RecordDamaged as error:
                self.hub.damage.set_aside_state(_CONFIGURED, b"schedules", stored, error)
        now = self.context.now()
        for entry in entries:
            schedule = _schedule(entry)
            known = schedules.get(entry.id)
            if known is None or not known.is_equivalent(schedule):
                try:
                    schedules.add(schedule, now)
                except HubError as error:
                    # Such as a cron expression whose last year has passed: the hub runs without it.
                    self.hub.damage.report(
                        InvalidSchedule(f"schedule {entry.id} is left out: {error}")
                    )
                    log_event(
                        _log,
                        logging.WARNING,
                        "a configured schedule is left out",
                        schedule=entry.id,
                        reason=str(error),
                    )
        names = [entry.id for entry in entries]
        for name in before:
            if name not in names and schedules.get(name) is not None:
                try:
                    schedules.remove(name)
                except HubError as error:
                    # It stays in the stored list, and is removed when the configuration is applied
                    # again.
                    names.append(name)
                    log_event(
                        _log,
                        logging.WARNING,
                        "a schedule that is no longer configured is not removed yet",
                        schedule=name,
                        reason=str(error),
                    )
        if names != before:
            store.save(_CONFIGURED, b"schedules", msgspec.msgpack.encode(names))
            self.hub.commits.request()

    # Timers.

    def _advance_timer(self) -> None:
        """Run timers earlier: a new deadline is before the next run."""
        loop, deadline = asyncio.get_running_loop(), self.hub.next_deadline()
        if self._timer is None or deadline is None:
            return
        wait = max(deadline - self.context.now(), 0.0)
        if loop.time() + wait < self._timer_at:
            self._timer.cancel()
            self._set_timer(wait)

    def _keep_time(self) -> None:
        """Run the hub's timers at their deadlines, and at least every tenth of a second, in which
        the watchdog and the wall clock are checked."""
        self._timer = None
        loop = asyncio.get_running_loop()
        self.hub.turns.enter()
        self.watchdog.beat(max(loop.time() - self._timer_at, 0.0))
        shortest_s = 0.0
        try:
            self._run_timers()
        except Exception:
            self.context.count("failed", "", "clock")
            _log.exception("running timers failed")
            shortest_s = _AFTER_FAILURE_S
        finally:
            # In any case: without this no timer would ever run again.
            deadline = self.hub.next_deadline()
            wait_s = _TICK_S if deadline is None else min(deadline - self.context.now(), _TICK_S)
            self._set_timer(max(wait_s, shortest_s))

    def _run_timers(self) -> None:
        now = self.context.now()
        look = self.clock.look()
        if look is not None:
            self.hub.follow_wall(*look)
        deadline = self.hub.next_deadline()
        if deadline is not None and deadline <= now:
            self.hub.handle_deadline(now)
        self._close_idle()
        loop_time = asyncio.get_running_loop().time()
        self.context.budget.check(loop_time)
        expired = self.context.newcomers.check(loop_time)
        if expired:
            self.context.count("turned_away", "", "time", by=expired)

    def _follow_file_limit(self) -> None:
        """Every connection needs an open file: where the process may not have as many, it has fewer
        connections."""
        config = self.config
        wanted = config.connections.connections + config.http.connections + _OWN_FILES
        allowed = raise_file_limit(wanted)
        if allowed >= wanted:
            return
        others = min(config.http.connections + _OWN_FILES, allowed // 2)
        most = self.context.connection_slots.most = max(allowed - others, 1)
        log_event(
            _log,
            logging.WARNING,
            "fewer connections than configured: the limit of open files is too low",
            connections=most,
            configured=config.connections.connections,
            open_files=allowed,
            needed=wanted,
        )

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        idle_s = self.config.connections.idle_s
        if idle_s and loop.time() >= self._idle_at:
            self._idle_at = loop.time() + min(idle_s / 4, _IDLE_CHECK_S)
            for gateway in list(self.context.gateways.values()):
                self.hub.callbacks.run("idle", gateway.close_idle, idle_s, loop.time())

    def timers_late_s(self) -> float:
        """How long the hub's next deadline has been overdue; 0 if it is not."""
        deadline = self.hub.next_deadline()
        return 0.0 if deadline is None else max(self.context.now() - deadline, 0.0)

    def _set_timer(self, wait_s: float) -> None:
        # Kept beside the handle: uvloop's handles don't have the time at which they run.
        loop = asyncio.get_running_loop()
        self._timer_at = loop.time() + wait_s
        self._timer = loop.call_later(wait_s, self._keep_time)


def _gateway(listener: str) -> type[Gateway]:
    module, name = GATEWAYS[listener.removesuffix("-tls")].split(":")
    kind: type[Gateway] = getattr(import_module(f"crosswire.gateways.{module}"), name)
    return kind


def _hub_config(config: Config) -> HubConfig:
    return HubConfig(
        queues=config.queues,
        topics=config.topics,
        service=config.services,
        staging=config.ingest,
        lake=config.lake.messages or config.lake.ledger,
        windows_bytes=memory_limit_bytes(config.limits.memory_bytes) // _WINDOWS_PART,
        expire_s=config.store.expire_s,
        subscriptions=config.limits.subscriptions,
        schedules=config.limits.schedules,
        share=config.limits.share,
    )


def _open_store(config: Config) -> RocksStore:
    data = Path(config.data)
    path = data / "store"
    needed = flush_bytes(config.store.buffer_bytes)
    if config.store.spare_bytes < needed:
        raise ConfigError(
            f"store.spare_bytes = {config.store.spare_bytes} is less than the {needed} bytes that"
            f" the store's own work may take with buffer_bytes = {config.store.buffer_bytes}"
        )
    if is_new(path) and _has_lake(Path(config.data)):
        raise StoreDamaged(
            f"there is no store in {path}, but a lake beside it: the store is missing. "
            f"`crosswire store repair {config.data}` makes one from the lake; "
            "to start with an empty store, move the lake away"
        )
    try:
        _check_folder(path)
        create_private_files()
        path.mkdir(parents=True, exist_ok=True)
        store = RocksStore(path, config.store)
    except OSError as error:
        raise ConfigError(f"can't keep data in {path}: {error.strerror}") from error
    # After it was opened: only then is it known to be a hub's, and not another program's database.
    make_private(data, Path(config.lake.directory) if config.lake.directory else None)
    return store


def _check_folder(path: Path) -> None:
    """Raises ConfigError if the folder is neither a store nor empty, and OSError.

    RocksDB would accept any folder: it creates a store in it, and deletes files with names like
    those of its own.
    """
    for folder in (path.parent, path):
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(
                f"can't keep data in {folder}: it is a link to {folder.readlink()}, which does not"
                " exist"
            )
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"can't keep data in {folder}: it is not a folder")
    if not path.exists():
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        # Raises the system's own error, which distinguishes rights from a read-only disk.
        with tempfile.TemporaryFile(dir=path):
            pass
    if not (path / "CURRENT").exists():
        names = sorted(each.name for each in path.iterdir())
        others = [name for name in names if not _STORE_FILES.fullmatch(name)]
        if others:
            raise ConfigError(
                f"{path} is no store of a hub, but has files of something else"
                f" ({', '.join(others[:3])}): choose another folder for the data"
            )


def _has_lake(data: Path) -> bool:
    try:
        return any(find(data / "lake", ("messages", "ledger")))
    except OSError:
        return False


def _log_damage(store: Store) -> None:
    """Log damage of the store: what was found when it was opened, and what will be found."""

    def log(part: str, detail: str) -> None:
        log_event(_log, logging.ERROR, "the store is damaged", part=part, detail=detail)

    for entry in store.damages.entries:
        log(entry.part, entry.detail)
    store.on_damage = log


def _schemas(files: Sequence[str]) -> Schemas:
    try:
        return Schemas(tuple(files))
    except OSError as error:
        raise ConfigError(f"can't read {error.filename}: {error.strerror}") from error
    except (BondError, UnicodeDecodeError) as error:
        raise ConfigError(f"a .bond file can't be used: {error}") from error


def _schedule(entry: ScheduleEntry) -> Schedule:
    payload, content_type = (entry.text or "").encode(), TEXT
    if entry.text is None:
        payload, content_type = msgspec.json.encode(entry.json), JSON
    return Schedule(
        id=entry.id,
        envelope=Envelope(
            destination=entry.destination,
            kind=message_kind(entry.destination),
            payload=payload,
            content_type=content_type,
            properties=entry.properties,
            crc=zlib.crc32(payload),
        ),
        interval_s=entry.interval_s,
        cron=entry.cron,
        run_count=entry.run_count,
        missed=entry.missed,
        nohaste=entry.nohaste,
    )
