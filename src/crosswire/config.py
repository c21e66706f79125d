"""crosswire.toml: one frozen Config, passed down; every part brings the settings of its own."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from crosswire.access import User
from crosswire.envelope import LARGEST_INTEGER, Property, check_properties, parse_destination
from crosswire.errors import ConfigError, InvalidDestination, InvalidEnvelope, InvalidSchedule
from crosswire.hub.policies import QueuePolicy, ServicePolicy, StagingLimits, TopicPolicy
from crosswire.hub.schedules import check_cron, check_id, check_interval
from crosswire.listeners import LISTENERS, PLAIN_LISTENERS
from crosswire.store.engine import LEAST_BUFFER_BYTES, StoreLimits
from crosswire.store.reserve import flush_bytes
from crosswire.toml import Lines, Mistake, dotted, read
from crosswire.wire.emp.frames import EmpLimits
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.epoxy.frames import EpoxyLimits
from crosswire.wire.micromsg2.frames import MicroMsg2Limits
from crosswire.wire.relink.frames import RelinkLimits
from crosswire.wire.zmtp.curve import decode_key

__all__ = [
    "LISTENERS",
    "PLAIN_LISTENERS",
    "Address",
    "BondFiles",
    "Config",
    "ConnectionLimits",
    "EmqpSettings",
    "HttpSettings",
    "LakeSettings",
    "ScheduleEntry",
    "TapSettings",
    "TlsFiles",
    "check",
    "load",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_LONGEST_S: Final = 300 * 365 * 86_400
"""Added to the time of today it still has 63 bits in microseconds."""


class Address(msgspec.Struct, frozen=True):
    """Where a listener is opened; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`HOST:PORT`, with brackets around an IPv6 address. Raises ConfigError."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535 or not host:
            raise ConfigError(f"{text!r} is not HOST:PORT")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_loopback(self) -> bool:
        """Can only this machine reach it?"""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What all peers together, and each of them, may take. 0 for `idle_s` means for ever.

    With `congested_bytes` waiting to be written a peer gets nothing more, and nothing is read from
    it, until it has read.
    """

    connections: Positive = 20_000
    connections_per_address: Positive = 10_000
    idle_s: NotNegative = 0.0
    subscriptions: Positive = 1_000
    congested_bytes: Positive = 1024 * 1024
    window: Positive = 256


class ProtocolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What each protocol has limits for: see its page."""

    emp: EmpLimits = EmpLimits()
    emqp: EmqpLimits = EmqpLimits()
    relink: RelinkLimits = RelinkLimits()
    epoxy: EpoxyLimits = EpoxyLimits()
    micromsg2: MicroMsg2Limits = MicroMsg2Limits()


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. With `client_ca` peers may show a certificate of that authority, or must."""

    certificate: str
    key: str
    client_ca: str | None = None
    client_certificates: Literal["optional", "required"] = "optional"


class BondFiles(msgspec.Struct, frozen=True, kw_only=True):
    """IDL files whose services JSON peers can call, and provide."""

    files: tuple[str, ...] = ()


class EmqpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`curve_secret_key` (Z85) makes every eMQP listener ask for CURVE."""

    default_queue: str = "default"
    unknown_queue: Literal["default", "hold"] = "default"
    scheduler: Literal["builtin", "external"] = "builtin"
    curve_secret_key: str | None = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`hosts` are names that browsers and tools may call the hub by, beside addresses and
    localhost; a request for any other is refused. `body_bytes` bounds what one may carry."""

    hosts: tuple[str, ...] = ()
    body_bytes: Positive = 8 * 1024 * 1024


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The raw bytes of these listeners' connections, of a `sample` of them (1.0 is all)."""

    listeners: tuple[str, ...] = ()
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class LakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What goes to Parquet files, where, how soon, and for how long it stays.

    A file is sealed after `seal_s`, or earlier with `seal_bytes`. `memory_bytes` wait in memory for
    a slow disk, then they are read from the store again, which keeps `backlog_bytes` for the lake:
    what is more than that becomes a gap. `directory` is DATA/lake if it is not given. 0 days or
    bytes of retention mean for ever and any number.
    """

    messages: bool = True
    ledger: bool = True
    tap: TapSettings = TapSettings()
    directory: str | None = None
    seal_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    seal_bytes: Positive = 16 * 1024 * 1024
    memory_bytes: Positive = 64 * 1024 * 1024
    backlog_bytes: Positive = 4 * 1024 * 1024 * 1024
    retention_days: NotNegative = 30.0
    retention_bytes: Annotated[int, msgspec.Meta(ge=0)] = 50 * 1024 * 1024 * 1024


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that is there as soon as the hub is; one of `json`, `text` is its message."""

    id: str
    destination: str
    interval_s: float = 0.0
    cron: str = ""
    json: Any = None
    text: str | None = None
    run_count: int = 0
    missed: Literal["skip", "once", "all"] = "once"
    nohaste: bool = False
    properties: dict[str, Property] = {}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All that `crosswire serve` can be told. Without a file, everything on loopback."""

    data: str = "./crosswire-data"
    listen: dict[str, str] = {}
    insecure: bool = False
    drain_s: NotNegative = 10.0
    log: Literal["debug", "info", "warning", "error"] = "warning"
    connections: ConnectionLimits = ConnectionLimits()
    limits: ProtocolLimits = ProtocolLimits()
    store: StoreLimits = StoreLimits()
    queues: dict[str, QueuePolicy] = {}
    topics: dict[str, TopicPolicy] = {}
    services: ServicePolicy = ServicePolicy()
    schedules: tuple[ScheduleEntry, ...] = ()
    tls: TlsFiles | None = None
    users: tuple[User, ...] = ()
    bond: BondFiles = BondFiles()
    emqp: EmqpSettings = EmqpSettings()
    http: HttpSettings = HttpSettings()
    ingest: StagingLimits = StagingLimits()
    lake: LakeSettings = LakeSettings()

    def addresses(self) -> dict[str, Address]:
        """Every listener that is to be opened. `"off"` leaves one out. Raises ConfigError."""
        names = LISTENERS if self.tls is not None else PLAIN_LISTENERS
        addresses = {
            name: self.listen.get(name, f"127.0.0.1:{port}") for name, port in names.items()
        }
        return {name: Address.parse(text) for name, text in addresses.items() if text != "off"}

    def exposed(self) -> dict[str, Address]:
        """The listeners that other machines reach, if anybody there could do anything."""
        if self.users or self.insecure:
            return {}
        return {name: each for name, each in self.addresses().items() if not each.is_loopback}


def check(text: str) -> tuple[Config | None, list[Mistake]]:
    """The configuration in a file's text, or all its mistakes in the order of their lines."""
    config, mistakes = read(text, Config)
    if config is None:
        return None, mistakes
    mistakes = sorted(_contradictions(config, Lines(text)))
    return (None, mistakes) if mistakes else (config, [])


def load(path: Path) -> Config:
    """Raises ConfigError that lists every mistake."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"can't read {path}: {reason}") from error
    config, mistakes = check(text)
    if config is None:
        raise ConfigError("\n".join(f"{path}: {mistake}" for mistake in mistakes))
    return config


def _contradictions(config: Config, lines: Lines) -> Iterator[Mistake]:
    """What each setting allows but all together do not."""
    yield from _wrong_numbers(config, (), lines)
    yield from _wrong_listeners(config, lines)
    yield from _wrong_store(config, lines)
    yield from _wrong_users(config, lines)
    yield from _wrong_keys(config, lines)
    yield from _wrong_schedules(config, lines)
    for number, name in enumerate(config.lake.tap.listeners):
        if name not in LISTENERS or name == "http":
            where, hint = f"lake.tap.listeners[{number + 1}]", "known: " + ", ".join(LISTENERS)
            line = lines.of(("lake", "tap", "listeners"))
            yield Mistake(line, where, f"there is no listener {name} to tap", hint)
    for table, names in (("queue", config.queues), ("topic", config.topics)):
        for name in names:
            try:
                parse_destination(f"{table}/{name}")
            except InvalidDestination as error:
                yield Mistake(lines.of((f"{table}s", name)), f"{table}s.{name}", str(error))


def _wrong_store(config: Config, lines: Lines) -> Iterator[Mistake]:
    """Below that a full disk could keep the log from being sorted into tables."""
    store = config.store
    for name, value, least in (
        ("buffer_bytes", store.buffer_bytes, LEAST_BUFFER_BYTES),
        ("destinations", store.destinations, 1),
    ):
        if 0 <= value < least:
            hint = f"set it to {least} or more"
            yield Mistake(lines.of(("store", name)), f"store.{name}", f"{value} is too few", hint)
    needed, given = flush_bytes(config.store.buffer_bytes), config.store.spare_bytes
    if given < needed:
        what = f"{given} is less than the {needed} bytes that the store's own work may take"
        hint = f"set it to {needed} or more, or buffer_bytes to less"
        yield Mistake(lines.of(("store", "spare_bytes")), "store.spare_bytes", what, hint)


def _wrong_numbers(value: object, path: tuple[str | int, ...], lines: Lines) -> Iterator[Mistake]:
    """No setting means anything below 0, beyond 64 bits or without end.

    What messages hold is not a setting.
    """
    if isinstance(value, int | float):
        if value < 0:
            yield Mistake(lines.of(path), dotted(path), f"{value} is below 0")
        elif not value <= LARGEST_INTEGER:
            yield Mistake(lines.of(path), dotted(path), "is no number that can be used")
        elif str(path[-1]).endswith("_s") and value > _LONGEST_S:
            yield Mistake(lines.of(path), dotted(path), f"{value:g} s is more than 300 years")
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            if field.name not in ("json", "properties"):
                yield from _wrong_numbers(getattr(value, field.name), (*path, field.name), lines)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _wrong_numbers(each, (*path, name), lines)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _wrong_numbers(each, (*path, number), lines)


def _wrong_listeners(config: Config, lines: Lines) -> Iterator[Mistake]:
    taken: dict[Address, str] = {}
    for name, text in config.listen.items():
        line, where = lines.of(("listen", name)), f"listen.{name}"
        if name not in LISTENERS:
            hint = "known: " + ", ".join(LISTENERS)
            yield Mistake(line, where, "there is no such listener", hint)
        elif name not in PLAIN_LISTENERS and config.tls is None and text != "off":
            yield Mistake(line, where, "needs a certificate", "add [tls]")
        elif text != "off":
            try:
                address = Address.parse(text)
            except ConfigError as error:
                yield Mistake(line, where, str(error), 'write "127.0.0.1:7000", or "off"')
                continue
            if address.port and taken.setdefault(address, name) != name:
                yield Mistake(line, where, f"{address} is the address of {taken[address]} too")


def _wrong_keys(config: Config, lines: Lines) -> Iterator[Mistake]:
    """A key is a secret, in this output too: only what is wrong with it is told."""
    secret = config.emqp.curve_secret_key
    keys: list[tuple[tuple[str | int, ...], str, str | None]] = [
        (("users", number, "curve_key"), f"users[{number + 1}].curve_key", user.curve_key)
        for number, user in enumerate(config.users)
    ]
    keys.append((("emqp", "curve_secret_key"), "emqp.curve_secret_key", secret))
    for path, where, key in keys:
        try:
            if key is not None:
                decode_key(key)
        except ValueError as error:
            yield Mistake(lines.of(path), where, str(error), "a key in Z85, as ZeroMQ writes it")
    if any(user.curve_key for user in config.users) and secret is None:
        hint = "add [emqp] curve_secret_key"
        yield Mistake(lines.of(("users",)), "users", "a curve_key needs the hub's own key", hint)


def _wrong_users(config: Config, lines: Lines) -> Iterator[Mistake]:
    for field in ("name", "token", "certificate", "curve_key"):
        seen: set[str] = set()
        for number, user in enumerate(config.users):
            value = getattr(user, field)
            if value is not None and value in seen:
                line = lines.of(("users", number, field))
                # A token is a secret, in this output too.
                what = value if field == "name" else f"the {field} of {user.name}"
                yield Mistake(line, f"users[{number + 1}].{field}", f"{what} is there twice")
            seen.add(value)


def _wrong_schedules(config: Config, lines: Lines) -> Iterator[Mistake]:
    twice = {name for name, n in Counter(each.id for each in config.schedules).items() if n > 1}
    for number, entry in enumerate(config.schedules):
        where = f"schedules[{number + 1}]"

        def wrong(field: str, what: object, number: int = number, where: str = where) -> Mistake:
            return Mistake(lines.of(("schedules", number, field)), f"{where}.{field}", str(what))

        if bool(entry.interval_s) == bool(entry.cron):
            line = lines.of(("schedules", number))
            yield Mistake(line, where, "needs interval_s or cron, one of them")
        try:
            check_id(entry.id)
        except InvalidSchedule as error:
            yield wrong("id", error)
        if entry.id in twice:
            yield wrong("id", f"{entry.id} is there more than once")
        try:
            if parse_destination(entry.destination).kind == "service":
                yield wrong("destination", "a schedule sends to a queue or a topic")
        except InvalidDestination as error:
            yield wrong("destination", error)
        try:
            if entry.cron:
                check_cron(entry.cron)
        except InvalidSchedule as error:
            yield wrong("cron", error)
        try:
            # A negative one is refused with all other negative numbers.
            if entry.interval_s and not entry.interval_s < 0:
                check_interval(entry.interval_s)
        except InvalidSchedule as error:
            yield wrong("interval_s", error)
        try:
            check_properties(entry.properties)
        except InvalidEnvelope as error:
            yield wrong("properties", error)
