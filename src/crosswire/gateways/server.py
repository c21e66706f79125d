"""A whole hub: store, hub, listeners; how it starts, keeps time, changes its mind, and stops."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

import msgspec

from crosswire.access import Access
from crosswire.config import Address, Config, ScheduleEntry
from crosswire.envelope import Envelope
from crosswire.errors import BondError, ConfigError, StoreDamaged
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.lake import LakeFeed, note_absence
from crosswire.gateways.listener import Listener, fill_context, server_context
from crosswire.gateways.log import Log
from crosswire.gateways.logs import log_event
from crosswire.gateways.metrics import Metrics
from crosswire.gateways.payloads import JSON, TEXT, Schemas
from crosswire.gateways.site import Site
from crosswire.gateways.tap import TapFeed, has_spool
from crosswire.hub.hub import Hub, HubConfig
from crosswire.hub.schedules import Schedule
from crosswire.lake.files import find
from crosswire.store.rocks import RocksStore, is_new

__all__ = ["GATEWAYS", "Door", "Server"]

_log = logging.getLogger("crosswire.store")

_LOOK_S: Final = 0.02
_TICK_S: Final = 0.1
_IDLE_LOOK_S: Final = 10.0
_GOODBYE_S: Final = 2.0
_CONFIGURED: Final = "configured"
_RESTART: Final = ("data", "emqp", "insecure", "lake", "listen", "store")
"""Settings that a running hub can't change."""

GATEWAYS: Final = {
    "emp": "emp:EmpGateway",
    "emqp-admin": "emqp:AdminGateway",
    "emqp-clients": "emqp:ClientGateway",
    "emqp-publishers": "emqp:PublisherGateway",
    "emqp-subscribers": "emqp:SubscriberGateway",
    "emqp-workers": "emqp_workers:WorkerGateway",
    "epoxy": "epoxy:EpoxyGateway",
    "micromsg2": "micromsg2:MicroMsg2Gateway",
    "relink": "relink:RelinkGateway",
}
"""Module and class behind a listener, by its name without `-tls`."""


class Door(Protocol):
    """A listener that leads to no gateway: the one for HTTP."""

    address: Address

    async def open(self, address: Address) -> Address: ...

    def close(self) -> None:
        """Accept nobody any more."""

    async def finish(self) -> None:
        """Let the last answers go out, within a moment."""


class Server:
    """`start` opens everything, `stop` drains and closes it.

    `http` makes what stands behind the listener of that name, which must be off without it.
    """

    def __init__(self, config: Config, *, http: Callable[[Server], Door] | None = None) -> None:
        self.config = config
        self.listeners: dict[str, Listener | Door] = {}
        self.started_at = 0.0
        self._http = http
        self._tls = server_context(config.tls) if config.tls is not None else None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._hurried = False
        self._idle_at = 0.0
        self._lake: LakeFeed | None = None
        self.log: Log | None = None

    async def start(self) -> dict[str, Address]:
        """Every listener's address. Raises ConfigError or StoreError."""
        config = self.config
        addresses = self._addresses()
        _refuse_strangers(config)
        schemas = _schemas(config.bond.files)
        store = _open_store(config)
        _log_damage(store)
        try:
            now = time.time()
            self.hub = Hub(
                store, _hub_config(config), now=now, random=random.Random(), clock=time.time
            )
            self.metrics = Metrics(self.hub)
            self.site = Site(self.hub, config, schemas=schemas)
        except BaseException:
            await store.close()
            raise
        store.start(asyncio.get_running_loop())
        try:
            await self._open_lake()
            self._follow_schedules(config.schedules)
            for name in addresses:
                if name != "http":
                    _gateway(name).prepare(self.site)
            for name, address in addresses.items():
                listener = self._listener(name)
                await listener.open(address)
                self.listeners[name] = self.site.listeners[name] = listener
        except BaseException:
            self.hurry()
            await self.stop()
            raise
        self.started_at = now
        self.hub.on_earlier_deadline(self._look_sooner)
        self._keep_time()
        return {name: listener.address for name, listener in self.listeners.items()}

    async def _open_lake(self) -> None:
        settings, hub, count = self.config.lake, self.hub, self.site.count
        path = Path(settings.directory or Path(self.config.data) / "lake")
        if settings.messages or settings.ledger:
            self._lake = LakeFeed(hub, settings, path, count=count)
            await self._lake.start()
        else:
            await note_absence(hub)
        self.log = Log(hub, path, self._lake, count=count)
        if settings.tap.listeners or has_spool(path):
            self.site.tap = TapFeed(settings, path, hub.node, count=count)
            await self.site.tap.start()

    async def _close_lake(self) -> None:
        if self.log is not None:
            await self.log.close()
        if self.site.tap is not None:
            await self.site.tap.stop()
        if self._lake is not None:
            await self._lake.stop()

    def _addresses(self) -> dict[str, Address]:
        addresses = self.config.addresses()
        for name in addresses:
            if name.removesuffix("-tls") not in GATEWAYS and not (name == "http" and self._http):
                raise ConfigError(f"nothing stands behind the listener {name}")
        return addresses

    def _listener(self, name: str) -> Listener | Door:
        if name == "http" and self._http is not None:
            return self._http(self)
        secure = self._tls if name.endswith("-tls") else None
        return Listener(name, _gateway(name), self.site, tls=secure)

    # Stopping.

    async def stop(self) -> None:
        """Accept nobody, let what is under way be settled within a grace time, say goodbye.

        The door for HTTP is the last one to close: it tells that the hub is draining.
        """
        self.site.draining = True
        for name, listener in self.listeners.items():
            if name != "http":
                listener.close()
        deadline = self.site.now() + self.config.drain_s
        for gateway in list(self.site.gateways.values()):
            gateway.drain()
        while self._under_way() and self.site.now() < deadline and not self._hurried:
            await asyncio.sleep(_LOOK_S)
        for gateway in list(self.site.gateways.values()):
            gateway.session.connection.close()
            gateway.session.wake()
        deadline = self.site.now() + _GOODBYE_S
        while self.site.gateways and self.site.now() < deadline and not self._hurried:
            await asyncio.sleep(_LOOK_S)
        for gateway in list(self.site.gateways.values()):
            gateway.session.transport.abort()
        for listener in self.listeners.values():
            listener.close()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.sleep(0)
        try:
            await self._close_lake()
        finally:
            await self.hub.store.close()
        for listener in self.listeners.values():
            if not isinstance(listener, Listener):
                await listener.finish()

    def hurry(self) -> None:
        """No more grace."""
        self._hurried = True

    def _under_way(self) -> bool:
        return any(gateway.is_busy for gateway in self.site.gateways.values())

    # Other settings.

    def reload(self, config: Config) -> list[str]:
        """Take on what can be changed; gives the names of settings that wait for a restart.

        Raises ConfigError; then nothing has changed.
        """
        old = self.config
        waiting = [name for name in _RESTART if getattr(config, name) != getattr(old, name)]
        kept = {name: getattr(old, name) for name in waiting}
        if (config.tls is None) != (old.tls is None):
            waiting.append("tls")
            kept["tls"] = old.tls
        config = msgspec.structs.replace(config, **kept)
        _refuse_strangers(config)
        schemas = _schemas(config.bond.files)
        if config.tls is not None and self._tls is not None:
            server_context(config.tls)
            fill_context(self._tls, config.tls)
        site = self.site
        self._follow_schedules(config.schedules)
        self.hub.reconfigure(_hub_config(config))
        self.config = site.config = config
        site.access = Access(config.users)
        site.schemas = schemas
        site.rooms.limits = config.connections
        return sorted(waiting)

    def _follow_schedules(self, entries: Sequence[ScheduleEntry]) -> None:
        """Those of the configuration, no more and no less; others are nobody's business here.

        One that is there already goes on as it is, unless the configuration changed it.
        """
        schedules, store = self.hub.schedules, self.hub.store
        stored = store.get(_CONFIGURED, b"schedules")
        before: list[str] = msgspec.msgpack.decode(stored) if stored is not None else []
        now = self.site.now()
        for entry in entries:
            schedule = _schedule(entry)
            known = schedules.get(entry.id)
            if known is None or not known.says_the_same(schedule):
                schedules.add(schedule, now)
        names = [entry.id for entry in entries]
        for name in before:
            if name not in names and schedules.get(name) is not None:
                schedules.remove(name)
        if names != before:
            store.save(_CONFIGURED, b"schedules", msgspec.msgpack.encode(names))
            store.request()

    # Time.

    def _look_sooner(self) -> None:
        """Something is due before we would have looked."""
        loop, deadline = asyncio.get_running_loop(), self.hub.next_deadline()
        if self._timer is None or deadline is None:
            return
        wait = max(deadline - self.site.now(), 0.0)
        if loop.time() + wait < self._timer_at:
            self._timer.cancel()
            self._look_in(wait)

    def _keep_time(self) -> None:
        """The hub's deadlines, looked at when they come and at least every tenth of a second."""
        self._timer = None
        now = self.site.now()
        deadline = self.hub.next_deadline()
        if deadline is not None and deadline <= now:
            self.hub.handle_deadline(now)
            deadline = self.hub.next_deadline()
        loop = asyncio.get_running_loop()
        idle_s = self.config.connections.idle_s
        if idle_s and loop.time() >= self._idle_at:
            self._idle_at = loop.time() + min(idle_s / 4, _IDLE_LOOK_S)
            for gateway in list(self.site.gateways.values()):
                gateway.send_away(idle_s, loop.time())
        self._look_in(_TICK_S if deadline is None else min(max(deadline - now, 0.0), _TICK_S))

    def _look_in(self, wait_s: float) -> None:
        # Not every loop's handle can tell when it is due.
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
    )


def _open_store(config: Config) -> RocksStore:
    path = Path(config.data) / "store"
    if is_new(path) and any(find(Path(config.data) / "lake", ("messages", "ledger"))):
        raise StoreDamaged(
            f"there is no store in {path}, but a lake beside it: the store is missing. "
            f"`crosswire store repair {config.data}` makes one of what the lake has; "
            "to begin anew, move the lake away"
        )
    try:
        return RocksStore(path, config.store)
    except OSError as error:
        raise ConfigError(f"can't keep data in {path}: {error.strerror}") from error


def _log_damage(store: RocksStore) -> None:
    """What is damaged stands in the log, too: what was found so far, and what will be."""

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
            kind="publish" if entry.destination.startswith("topic/") else "send",
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


def _refuse_strangers(config: Config) -> None:
    """Without users anybody who can connect may do anything: not from another machine."""
    for name, address in config.exposed().items():
        raise ConfigError(
            f"{name} on {address} would let anybody do anything: configure users, or say --insecure"
        )
