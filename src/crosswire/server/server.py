"""The server: opens store, hub, lake and listeners; reloads, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

import msgspec

from crosswire.access import Access
from crosswire.commitlog.contract import CommitLog, ReplicatedLog
from crosswire.commitlog.leader import LeaderLog
from crosswire.config import Address, Config
from crosswire.errors import (
    BondError,
    ConfigError,
    NotLeading,
    StoreError,
)
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.payloads import Schemas
from crosswire.gateways.slots import PassingSockets
from crosswire.hub.hub import Hub
from crosswire.hub.wall import Clock
from crosswire.lake.writer import LakeWriter
from crosswire.listeners import HTTP_LISTENERS, PLAIN_LISTENERS
from crosswire.logs import log_event
from crosswire.resources import raise_file_limit
from crosswire.server import store_opening as _stores
from crosswire.server.checkpoint_fetch import CheckpointFetch
from crosswire.server.checkpoints import Checkpoints
from crosswire.server.configured_schedules import follow_schedules
from crosswire.server.exposure import refuse_exposures
from crosswire.server.hub_settings import hub_config
from crosswire.server.lake_encoder import LakeEncoder
from crosswire.server.lake_feed import STEP_NAMES, LakeFeed, note_absence
from crosswire.server.lake_identity import check_lake, claim_lake
from crosswire.server.leftovers import LeftoverCheck
from crosswire.server.listener import Listener
from crosswire.server.log_reader import Log
from crosswire.server.metrics import Metrics
from crosswire.server.replica import CheckpointSource, Replica
from crosswire.server.revocation import Revocations
from crosswire.server.standby_hub import StandbyHub
from crosswire.server.statistics import Statistics
from crosswire.server.tap_feed import TapFeed, has_spool
from crosswire.server.timekeeper import Timekeeper
from crosswire.server.tls import RenewableContext, server_context
from crosswire.server.watchdog import Watchdog
from crosswire.store.contract import Store
from crosswire.store.replica import ReplicaStore
from crosswire.store.reserve import flush_bytes, room_for_others

__all__ = ["GATEWAYS", "HttpListener", "Server"]

_log = logging.getLogger("crosswire.server")

_POLL_S: Final = 0.02
_GOODBYE_S: Final = 2.0
_OWN_FILES: Final = 1_024
"""Files that are open beside connections: those of store and lake, and listeners."""
_RESTART: Final = ("data", "emqp", "insecure", "lake", "listen", "replication", "store")
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

    async def end_requests(self, is_hurried: Callable[[], bool]) -> None:
        """Wait for the requests in progress, a few seconds at most; the rest is refused. None of
        them uses the store any more when this returns."""

    async def finish(self) -> None:
        """Wait for the last bytes of responses, a second at most, and close the connections."""

    def drop(self) -> None:
        """Close all connections now, and leave requests without a response."""


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
        open_log: Callable[[Config], ReplicatedLog] | None = None,
        open_replica: Callable[[Config, bytes], ReplicaStore | None] | None = None,
        fetcher: Callable[[Config], CheckpointSource | None] | None = None,
        make_encoder: type[LakeEncoder] | None = LakeEncoder,
    ) -> None:
        """The other arguments replace what a hub takes from its machine: clocks, the thread that
        watches the event loop, the files of its store, the log that makes groups durable, and the
        process that encodes for the lake; without one, this process does."""
        self.config = config
        """The settings that hold now."""
        self.configured = config
        """Those of the file: what needs a restart may differ."""
        self.waiting_for_restart: list[str] = []
        """The names of what differs."""
        self.clock = clock or Clock()
        self.watchdog = watchdog or Watchdog()
        self._open_store = open_store or _stores.open_store
        self._open_log = open_log or _stores.open_log
        self._open_replica = open_replica or _stores.open_replica
        self._fetcher = fetcher or CheckpointFetch
        self._make_log = make_log
        self._make_encoder = make_encoder
        self._hub: Hub | None = None
        self.replica: Replica | None = None
        """The part in a replicated hub; None for a hub alone."""
        self.listeners: dict[str, Listener | HttpListener] = {}
        self.started_at = 0.0
        """When the hub that runs began to serve; 0 on a standby."""
        self.opened_at = 0.0
        """When this process began to, in either role."""
        self._http = http
        self._web: HttpListener | None = None
        self._tls: RenewableContext | None = None
        if config.tls is not None:
            self._tls = RenewableContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.current = server_context(config.tls)
        self._hurried = False
        self._is_stopping = False
        self._standby_hub = StandbyHub(lambda: hub_config(self.config), self.clock.now)
        self._lake: LakeFeed | None = None
        self._tap: TapFeed | None = None
        self.log: Log | None = None
        self.checkpoints: Checkpoints | None = None
        self.on_role: Callable[[], None] = _ignore_role
        """Called when this replica begins or ceases to lead."""

    @property
    def hub(self) -> Hub:
        """The hub that runs. Raises NotLeading on a standby."""
        if self._hub is None:
            if self.replica is not None:
                raise self.replica.refusal()
            raise NotLeading("the hub has not started")
        return self._hub

    def require_hub(self) -> None:
        """Raises NotLeading, with the leader's address, on a standby."""
        _ = self.hub

    def enter_turn(self) -> None:
        """What a request causes in the hub is part of a turn, like what peers cause. A standby has
        no hub, and no turns."""
        if self._hub is not None:
            self._hub.turns.enter()

    def is_turn_over(self) -> bool:
        """Whether this turn of the event loop has had its time: see `Turns`."""
        return self._hub is not None and self._hub.turns.is_over()

    def hub_to_read(self) -> Hub:
        """The hub that runs; on a standby one that shows what it has applied, and changes nothing.
        Raises NotLeading where there is nothing to show yet, and StoreError."""
        replica = self.replica
        if self._hub is not None or replica is None:
            return self.hub
        if replica.store.is_closed or not replica.store.node:
            raise replica.refusal()
        return self._standby_hub.hub_of(replica.store)

    def metrics_to_read(self) -> Metrics:
        """Those of `hub_to_read`: a standby has counted nothing. Raises what that raises."""
        hub = self.hub_to_read()
        return self.metrics if hub is self._hub else self._standby_hub.metrics

    @property
    def is_leading(self) -> bool:
        """Whether a hub runs: always, unless this is a standby."""
        return self._hub is not None

    @property
    def departed(self) -> int:
        """How many queues and subscriptions of the hub were removed, and are still in memory."""
        return 0 if self._hub is None else self._hub.departed

    async def start(self) -> dict[str, Address]:
        """Open everything; returns the address of every listener. Raises ConfigError, StoreError
        or LogError.

        The configuration is checked before the store is opened, which may be slow. A replica opens
        `http` and `https` only: the others follow when it leads.
        """
        config = self.config
        self.opened_at = self.clock.now()
        addresses = self._addresses()
        refuse_exposures(config)
        self._schemas = _schemas(config.bond.files)
        self.context = GatewayContext(None, config, schemas=self._schemas, clock=self.clock.now)
        self._revocations = Revocations(self.context)
        if self._tls is not None:
            self.context.authorities = self._tls.current.authorities
        if config.replication.is_on:
            await self._start_replica(addresses)
        else:
            store = self._open_store(config)
            log = self._make_log(store) if self._make_log is not None else None
            await self._run_hub(store, log, addresses)
        return {name: listener.address for name, listener in self.listeners.items()}

    async def _start_replica(self, addresses: dict[str, Address]) -> None:
        config = self.config
        replica = Replica(
            config.replication,
            self._open_log(config),
            lambda log_id: self._open_replica(config, log_id),
            self,
            self.clock,
            random=random.Random(random.getrandbits(64)),
            checkpoints=self._fetcher(config),
        )
        try:
            await replica.open()
        except BaseException:
            await replica.log.close()
            raise
        self.replica = replica
        try:
            if self._has_lake:
                check_lake(replica.store, self.lake_path)
            await self._open_listeners(
                {name: each for name, each in addresses.items() if name in HTTP_LISTENERS}
            )
        except BaseException:
            await replica.stop()
            raise
        replica.start()

    async def _run_hub(
        self, store: Store, log: CommitLog | None, addresses: dict[str, Address]
    ) -> None:
        """Build the hub and open listeners.

        Order matters: schedules and gateways are restored before a listener accepts, so that the
        first peer finds everything; timers start last, since they may deliver to peers.
        """
        config = self.config
        _stores.log_damage(store)
        clock = self.clock.now
        now = clock()
        try:
            hub = Hub(
                store,
                hub_config(config),
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
            self.metrics = Metrics(hub)
            self.context.begin(hub)
            self.statistics = Statistics(
                hub,
                self.metrics,
                self.context,
                self.watchdog,
                store=Path(config.data) / "store",
                lake=self.lake_path,
            )
            names = addresses.keys() - set(HTTP_LISTENERS)
            gateways = {each.protocol: each for each in map(_gateway, names)}
            sources = [each.leftovers for each in gateways.values()]
            self.leftovers = LeftoverCheck(self.context, sources)
            self.timekeeper = Timekeeper(hub, self.context, self.clock, self.watchdog)
        except BaseException:
            hub.commits.abandon()
            store.close()
            raise
        self._hub = hub
        hub.commits.start(asyncio.get_running_loop())
        try:
            self._follow_file_limit()
            self.checkpoints = Checkpoints(store, Path(config.data), self.lake_path)
            self.checkpoints.start()
            await self._open_lake()
            follow_schedules(self.hub, config.schedules, self.context.now())
            for name in addresses:
                if name not in HTTP_LISTENERS:
                    _gateway(name).prepare(self.context)
            if self.replica is not None:
                # Ids, names of connections and what recovery changed are in the log before a peer
                # sees any of it.
                await hub.commits.flush()
            await self._open_listeners(addresses)
        except BaseException:
            if self.replica is None:
                # Peers may be connected already: the same stop as always, but without the grace
                # time.
                self.hurry()
                await self.stop()
            raise
        self.leftovers.start()
        self.started_at = now
        self.timekeeper.start()
        if self._http is not None:
            # Only the API shows them.
            self.statistics.start()

    async def _open_listeners(self, addresses: dict[str, Address]) -> None:
        for name, address in addresses.items():
            listener = self._listener(name)
            await listener.open(address)
            self.listeners[name] = self.context.listeners[name] = listener

    # Terms of a replica.

    @property
    def is_fetched(self) -> bool:
        """Is there a checkpoint that somebody may be fetching?"""
        return self.checkpoints is not None and bool(self.checkpoints.all())

    async def begin_term(self, store: ReplicaStore, commits: LeaderLog) -> None:
        """This replica leads: run a hub on its store, and open the protocols' listeners."""
        self._standby_hub.forget()
        addresses = self._addresses()
        for name in HTTP_LISTENERS:
            addresses.pop(name, None)
        await self._run_hub(store, commits, addresses)
        self.on_role()

    async def end_term(self, hand_over: Callable[[], Awaitable[None]]) -> None:
        """Stop the hub as `stop` does, and hand over; the HTTP listeners stay open."""
        await self._stop_hub(hand_over)
        # A standby does not drain, unless the process ends.
        self.context.draining = self._is_stopping
        self.on_role()

    async def abandon_term(self) -> None:
        """Another replica leads: stop at once, and answer nobody."""
        hub, self._hub = self._hub, None
        self.started_at = 0.0
        if hub is None:
            return
        hub.commits.abandon()
        self._close_protocols()
        for gateway in list(self.context.gateways.values()):
            gateway.session.abandon()
        for listener in self.listeners.values():
            if not isinstance(listener, Listener):
                listener.drop()
        self._stop_timers()
        # Aborted transports report their end to the gateways.
        await asyncio.sleep(0)
        if self.checkpoints is not None:
            await self.checkpoints.stop()
        if self.log is not None:
            await self.log.close()
        if self._lake is not None:
            await self._lake.abandon()
        if self._tap is not None:
            await self._tap.stop()
        self.log = self._lake = self._tap = self.checkpoints = None
        self.context.end()
        self.on_role()

    @property
    def lake_path(self) -> Path:
        """The folder of the lake, whether there is one or not."""
        return Path(self.config.lake.directory or Path(self.config.data) / "lake")

    def sealed(self) -> tuple[int, int]:
        """The last id of a message, and the last row of the ledger, that the lake has or has given
        up; 0 where they don't go to it."""
        if self._lake is None:
            return 0, 0
        kept = self._lake.kept
        return (0 if kept is None else kept.upto), self._lake.sealed_row

    @property
    def _has_lake(self) -> bool:
        lake = self.config.lake
        return lake.messages or lake.ledger or bool(lake.tap.listeners)

    async def _open_lake(self) -> None:
        path = self.lake_path
        least_bytes = flush_bytes(self.config.store.buffer_bytes)
        has_room = room_for_others(path, Path(self.config.data) / "store", least_bytes)
        try:
            await self._start_lake(path, has_room)
        except OSError as error:
            raise ConfigError(f"can't keep the lake in {path}: {error.strerror}") from error

    async def _start_lake(self, path: Path, has_room: Callable[[], bool]) -> None:
        settings, hub, count = self.config.lake, self.hub, self.context.count
        node, term, replica_name = hub.node, 0, ""
        if self.replica is not None:
            term, replica_name = self.replica.succession.term, _name_part(self.replica.name)
            # What the wire had is no part of the log: each replica numbers its own rows.
            node = f"{node}.{replica_name}"
            if self._has_lake:
                claim_lake(hub.store, path)
        if settings.messages or settings.ledger:
            writer = LakeWriter(path, hub.node, STEP_NAMES, term=term, writer=replica_name)
            encoder = None
            if self._make_encoder is not None:
                encoder = self._make_encoder(
                    path, hub.node, STEP_NAMES, term=term, writer=replica_name
                )
            self._lake = LakeFeed(
                hub,
                settings,
                path,
                count=count,
                writer=writer,
                encoder=encoder,
                term=term,
                has_room=has_room,
            )
            await self._lake.start()
        else:
            await note_absence(hub)
        self.log = Log(hub, path, self._lake, count=count)
        if settings.tap.listeners or has_spool(path):
            self._tap = TapFeed(settings, path, node, count=count, has_room=has_room)
            self.context.tap = self._tap
            await self._tap.start()

    async def _close_lake(self) -> None:
        if self.checkpoints is not None:
            await self.checkpoints.stop()
        if self.log is not None:
            await self.log.close()
        if self._tap is not None:
            await self._tap.stop()
        if self._lake is not None:
            await self._lake.stop()
        self._tap = self._lake = None

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

        HTTP closes last: `/readyz` reports "draining" meanwhile. A leader hands over to a standby.
        Raises StoreError if the last changes can't be written.
        """
        self._is_stopping = True
        try:
            if self.replica is not None:
                self.context.draining = True
                if not self.is_leading:
                    await self._end_requests()
                await self.replica.stop()
            else:
                await self._stop_hub()
        finally:
            for listener in self.listeners.values():
                if not isinstance(listener, Listener):
                    listener.close()
                    await listener.finish()

    async def _stop_hub(self, hand_over: Callable[[], Awaitable[None]] | None = None) -> None:
        # First of all, so that gateways refuse new work from peers that are still connected.
        self.context.draining = True
        self._close_protocols()
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
        await self._end_requests()
        self._stop_timers()
        # One turn of the loop: aborted transports report their end to the gateways, which release
        # consumers and record it, before the store is closed.
        await asyncio.sleep(0)
        # The lake before the store: sealing its last files commits to the store. Each step runs
        # even if the one before it fails. But a term that is over meanwhile commits nothing: to
        # wait for that would never end.
        is_over = False
        try:
            await self._close_lake()
        except asyncio.CancelledError:
            is_over = hand_over is not None
            raise
        finally:
            if hand_over is None:
                await self._close_store()
            elif not is_over:
                await self._close_term(hand_over)

    async def _end_requests(self) -> None:
        """Have no request in progress, and with the end of the process no others: the store and
        the threads that read it are closed next. A replica that goes on stays open for others."""
        if self.log is not None:
            self.log.ends_streams = True
        listeners = [each for each in self.listeners.values() if not isinstance(each, Listener)]
        if self.replica is None or self._is_stopping:
            for listener in listeners:
                listener.close()
        for listener in listeners:
            await listener.end_requests(lambda: self._hurried)

    async def _close_term(self, hand_over: Callable[[], Awaitable[None]]) -> None:
        """Commit what is left, and hand over. Nothing is appended after that."""
        hub = self.hub
        await hub.commits.flush()
        await hand_over()
        hub.commits.abandon()
        # The store stays open: the replica may be syncing it on a thread.
        self._hub, self.started_at = None, 0.0
        self.context.end()

    def _close_protocols(self) -> None:
        """No new connections, but to HTTP."""
        for name, listener in list(self.listeners.items()):
            if name not in HTTP_LISTENERS:
                listener.close()
                if self.replica is not None:
                    del self.listeners[name]

    def _stop_timers(self) -> None:
        self.timekeeper.stop()
        self.leftovers.stop()
        self.statistics.stop()

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

        Peers that lost something are disconnected: if they are many, in the next turns, see
        `when_revoked`. Raises ConfigError; then nothing has changed: all that can fail is checked
        before the first change.
        """
        old = self.config
        waiting = [name for name in _RESTART if getattr(config, name) != getattr(old, name)]
        configured = config
        kept = {name: getattr(old, name) for name in waiting}
        if (config.tls is None) != (old.tls is None):
            waiting.append("tls")
            kept["tls"] = old.tls
        config = msgspec.structs.replace(config, **kept)
        if old.users and not config.users and not config.insecure:
            raise ConfigError(
                "users: without any, every peer would have all rights: to run without users,"
                " restart the hub"
            )
        refuse_exposures(config)
        schemas = _schemas(config.bond.files)
        context = self.context
        if config.tls is not None and self._tls is not None:
            self._tls.current = server_context(config.tls)
            context.authorities = self._tls.current.authorities
        if self._hub is not None:
            follow_schedules(self.hub, config.schedules, self.context.now())
            self._hub.reconfigure(hub_config(config))
        self._schemas = schemas
        self.config, self.configured = config, configured
        self.waiting_for_restart = sorted(waiting)
        before = context.access
        context.reconfigure(config, Access(config.users), schemas)
        self._follow_file_limit()
        names = self.listeners.keys() - set(HTTP_LISTENERS)
        self._revocations.begin(before, {_gateway(name) for name in names})
        return self.waiting_for_restart

    def when_revoked(self, callback: Callable[[], None]) -> None:
        """Have it called when all peers have ended that lost something by a reload: at once, or
        after some turns if there are many."""
        self._revocations.when_done(callback)

    def _follow_file_limit(self) -> None:
        """Every connection needs an open file: where the process may not have as many, it has fewer
        connections."""
        config = self.config
        configured = config.connections.connections
        others = config.http.connections + 2 * PassingSockets.part_of(configured) + _OWN_FILES
        wanted = configured + others
        allowed = raise_file_limit(wanted)
        if allowed >= wanted:
            return
        # At least half of them for connections, unless that is more than was asked for.
        most = min(max(allowed - others, allowed // 2, 1), configured)
        self.context.limit_connections(most)
        if most == configured:
            return
        log_event(
            _log,
            logging.WARNING,
            "fewer connections than configured: the limit of open files is too low",
            connections=most,
            configured=configured,
            open_files=allowed,
            needed=wanted,
        )


def _name_part(name: str) -> str:
    """A replica's name as a part of names of files, which no other replica's name gives."""
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", name)


def _ignore_role() -> None:
    """Nobody registered for it."""


def _gateway(listener: str) -> type[Gateway]:
    module, name = GATEWAYS[listener.removesuffix("-tls")].split(":")
    kind: type[Gateway] = getattr(import_module(f"crosswire.gateways.{module}"), name)
    return kind


def _schemas(files: Sequence[str]) -> Schemas:
    try:
        return Schemas(tuple(files))
    except OSError as error:
        raise ConfigError(f"can't read {error.filename}: {error.strerror}") from error
    except (BondError, UnicodeDecodeError) as error:
        raise ConfigError(f"a .bond file can't be used: {error}") from error
