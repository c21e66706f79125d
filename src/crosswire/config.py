"""crosswire.toml as one frozen Config; every part of the program defines its own settings."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from crosswire.access import User
from crosswire.commitlog.records import LEAST_RECORD_BYTES, RECORD_BYTES
from crosswire.envelope import LARGEST_INTEGER, Property, check_properties, parse_destination
from crosswire.errors import ConfigError, InvalidDestination, InvalidEnvelope, InvalidSchedule
from crosswire.hub.cron import check_cron
from crosswire.hub.policies import QueuePolicy, ServicePolicy, StagingLimits, TopicPolicy
from crosswire.hub.schedules import check_id, check_interval
from crosswire.listeners import HTTP_LISTENERS, LISTENERS, PLAIN_LISTENERS, is_loopback
from crosswire.store.engine import LEAST_BUFFER_BYTES, StoreLimits
from crosswire.store.reserve import flush_bytes
from crosswire.tokens import MOST_WORK, distinct_salts
from crosswire.toml import Lines, Mistake, dotted, read, read_valid
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
    "Examined",
    "HttpSettings",
    "LakeSettings",
    "ReplicationSettings",
    "ScheduleEntry",
    "TapSettings",
    "TlsFiles",
    "check",
    "examine",
    "load",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_MOST_RECORD_BYTES: Final = 64 << 20
_LONGEST_S: Final = 300 * 365 * 86_400
"""The longest duration: added to today's time in microseconds it still has 63 bits."""


class Address(msgspec.Struct, frozen=True):
    """The address of a listener; port 0 takes a free one."""

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
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for all connections together, and for each of them; `idle_s` 0 means no limit.

    A peer with more than `congested_bytes` that are not written gets nothing more, and nothing is
    read from it, until it has read.
    """

    connections: Positive = 10_000
    connections_per_address: Positive = 10_000
    idle_s: NotNegative = 0.0
    subscriptions: Positive = 1_000
    congested_bytes: Positive = 1024 * 1024
    window: Positive = 256


class ProtocolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of each protocol: see its page.

    `memory_bytes` is what all peers together may cause the hub to hold in memory; 0 is half of what
    the process may use. There are at most this many named `subscriptions` and `schedules`. `share`
    is the part of these limits, and of the store's destinations, that one user may have.
    """

    memory_bytes: int = 0
    subscriptions: Positive = 10_000
    schedules: Positive = 10_000
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    emp: EmpLimits = EmpLimits()
    emqp: EmqpLimits = EmqpLimits()
    relink: RelinkLimits = RelinkLimits()
    epoxy: EpoxyLimits = EpoxyLimits()
    micromsg2: MicroMsg2Limits = MicroMsg2Limits()


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. With `client_ca` peers may, or must, present a certificate of that authority."""

    certificate: str
    key: str
    client_ca: str | None = None
    client_certificates: Literal["optional", "required"] = "optional"


class BondFiles(msgspec.Struct, frozen=True, kw_only=True):
    """IDL files of services that JSON peers can call, and provide."""

    files: tuple[str, ...] = ()


class EmqpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """eMQP's broker; with `curve_secret_key` (Z85) every eMQP listener requires CURVE."""

    default_queue: str = "default"
    unknown_queue: Literal["default", "hold"] = "default"
    scheduler: Literal["builtin", "external"] = "builtin"
    curve_secret_key: str | None = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`hosts` are names that the hub may be addressed by, beside addresses and localhost: requests
    for any other are refused. `body_bytes` is the largest body of a request, `capture_bytes` the
    largest capture that is analyzed. `connections` don't count in those of all other listeners."""

    hosts: tuple[str, ...] = ()
    connections: Positive = 1_000
    body_bytes: Positive = 8 * 1024 * 1024
    capture_bytes: Positive = 64 * 1024 * 1024


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Listeners whose connections are recorded, and the share of these (`sample`, 1.0 is all)."""

    listeners: tuple[str, ...] = ()
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class LakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is written to Parquet files, where, how soon, and how long it is kept.

    A file is sealed after `seal_s`, or at `seal_bytes`. While the disk is slow, up to
    `memory_bytes` wait in memory; more is read from the store again, which keeps `backlog_bytes`
    for the lake, and what is lost beyond that is recorded as a gap. `directory` is DATA/lake by
    default. A retention of 0 days or bytes means no limit.
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


class ReplicationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which log makes commits durable: `local`, the disk of this machine, or `postgresql://…`, for
    several replicas of one hub.

    `name` is this replica's (the host's by default), `advertise` the address of its HTTP listener
    for the others, `http://HOST:PORT`. A standby takes over after `takeover_s` without a sign of
    the leader. Records are removed from the log when all replicas have them, or when they are older
    than `retain_s` and `copies` replicas have them; more than `retain_bytes` in the log is an
    alarm, and at `limit_bytes` producers are refused. What waits for the log takes `pending_bytes`
    of memory at most, a record `record_bytes`. `durability` is "trust" for servers that replicate
    synchronously and hide their settings. `token_file` has the token of a user with `replicate`,
    with which this replica fetches checkpoints from others.
    """

    log: str = "local"
    name: str = ""
    advertise: str = ""
    takeover_s: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    retain_s: NotNegative = 3600.0
    retain_bytes: Positive = 8 * 1024 * 1024 * 1024
    limit_bytes: Positive = 32 * 1024 * 1024 * 1024
    copies: Positive = 2
    pending_bytes: Positive = 64 * 1024 * 1024
    record_bytes: Positive = RECORD_BYTES
    durability: Literal["verify", "trust"] = "verify"
    token_file: str | None = None

    @property
    def is_on(self) -> bool:
        """Is this hub one of several replicas?"""
        return self.log != "local"

    @property
    def replica(self) -> str:
        """The name of this replica."""
        return self.name or socket.gethostname()


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule of the configuration; its message is `json` or `text`."""

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
    """All settings of `crosswire serve`. By default every listener is on loopback."""

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
    replication: ReplicationSettings = ReplicationSettings()

    def addresses(self) -> dict[str, Address]:
        """The listeners to open, without those that are `"off"`. Raises ConfigError."""
        names = LISTENERS if self.tls is not None else PLAIN_LISTENERS
        addresses = {
            name: self.listen.get(name, f"127.0.0.1:{port}") for name, port in names.items()
        }
        return {name: Address.parse(text) for name, text in addresses.items() if text != "off"}

    def exposed(self) -> dict[str, Address]:
        """Listeners that other machines reach, if no user is configured and not `insecure`."""
        if self.users or self.insecure:
            return {}
        return {name: each for name, each in self.addresses().items() if not each.is_loopback}


class Examined(msgspec.Struct, frozen=True):
    """What was read from a configuration: its mistakes, in the order of lines, and its settings.

    With mistakes `config` has only those tables that are right by themselves; `wrong` are the names
    of the others.
    """

    config: Config | None
    mistakes: list[Mistake]
    wrong: set[str]


def check(text: str, folder: Path | None = None) -> tuple[Config | None, list[Mistake]]:
    """The configuration in a file's text; or None and all mistakes, in the order of lines.

    Relative paths in it are relative to `folder`, that of the file.
    """
    examined = examine(text, folder)
    return (None if examined.mistakes else examined.config), examined.mistakes


def examine(text: str, folder: Path | None = None) -> Examined:
    """Like `check`, for those who look for more mistakes."""
    config, mistakes = read(text, Config)
    wrong: set[str] = set()
    if config is None:
        config, wrong = read_valid(text, Config)
    if config is None:
        return Examined(None, mistakes, wrong)
    lines = Lines(text)
    if folder is not None:
        config = _in_folder(config, folder, has_data=bool(lines.of(("data",))))
    config, missing = _with_tokens(config, lines)
    # What refers to a table that is wrong itself can't be judged: here, whether there is [tls].
    judged = config
    if "tls" in wrong:
        judged = msgspec.structs.replace(config, tls=TlsFiles(certificate="", key=""))
    mistakes = sorted([*mistakes, *missing, *_contradictions(judged, lines)])
    return Examined(config, mistakes, wrong)


def _in_folder(config: Config, folder: Path, *, has_data: bool) -> Config:
    """With paths relative to the folder of the file they are in; the default of `data` is none."""

    def of(path: str) -> str:
        return str(folder / path)

    replace = msgspec.structs.replace
    tls = config.tls
    if tls is not None:
        authority = None if tls.client_ca is None else of(tls.client_ca)
        certificate, key = of(tls.certificate), of(tls.key)
        tls = replace(tls, certificate=certificate, key=key, client_ca=authority)
    users = [
        user if user.token_file is None else replace(user, token_file=of(user.token_file))
        for user in config.users
    ]
    directory = config.lake.directory
    return replace(
        config,
        data=of(config.data) if has_data else config.data,
        tls=tls,
        users=tuple(users),
        bond=replace(config.bond, files=tuple(map(of, config.bond.files))),
        lake=replace(config.lake, directory=None if directory is None else of(directory)),
    )


def _with_tokens(config: Config, lines: Lines) -> tuple[Config, list[Mistake]]:
    """Tokens that are in files and environment variables, read into the users that name them."""
    users, mistakes = list(config.users), []
    for number, user in enumerate(users):
        field = "token_file" if user.token_file is not None else "token_env"
        if getattr(user, field) is None:
            continue
        try:
            users[number] = msgspec.structs.replace(user, token=_secret(user))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            where = f"users[{number + 1}].{field}"
            mistakes.append(Mistake(lines.of(("users", number, field)), where, str(reason)))
    return msgspec.structs.replace(config, users=tuple(users)), mistakes


def _secret(user: User) -> str:
    """Raises OSError and ValueError."""
    if user.token is not None:
        raise ValueError(f"{user.name} has a token, too: give one of them")
    if user.token_file is not None:
        return Path(user.token_file).read_text().partition("\n")[0].strip()
    name = user.token_env or ""
    if name not in os.environ:
        raise ValueError(f"there is no environment variable {name}")
    return os.environ[name].strip()


def load(path: Path) -> Config:
    """The configuration in a file. Raises ConfigError, which lists every mistake."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"can't read {path}: {reason}") from error
    config, mistakes = check(text, path.parent)
    if config is None:
        raise ConfigError("\n".join(f"{path}: {mistake}" for mistake in mistakes))
    return config


def _contradictions(config: Config, lines: Lines) -> Iterator[Mistake]:
    """Mistakes that the types of single settings can't express."""
    yield from _wrong_numbers(config, (), lines)
    yield from _wrong_listeners(config, lines)
    yield from _wrong_store(config, lines)
    yield from _wrong_users(config, lines)
    yield from _wrong_keys(config, lines)
    yield from _wrong_schedules(config, lines)
    yield from _wrong_replication(config, lines)
    for number, name in enumerate(config.lake.tap.listeners):
        if name not in LISTENERS or name in HTTP_LISTENERS:
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
    """Too small buffers and reserves: a full disk could then keep the store from flushing."""
    store = config.store
    for name, value, least in (
        ("buffer_bytes", store.buffer_bytes, LEAST_BUFFER_BYTES),
        ("destinations", store.destinations, 1),
    ):
        if 0 <= value < least:
            hint = f"set it to {least} or more"
            yield Mistake(lines.of(("store", name)), f"store.{name}", f"{value} is too small", hint)
    needed, given = flush_bytes(config.store.buffer_bytes), config.store.spare_bytes
    if given < needed:
        what = f"{given} is less than the {needed} bytes that the store's own work may take"
        hint = f"set it to {needed} or more, or buffer_bytes to less"
        yield Mistake(lines.of(("store", "spare_bytes")), "store.spare_bytes", what, hint)


def _wrong_replication(config: Config, lines: Lines) -> Iterator[Mistake]:
    settings = config.replication

    def wrong(field: str, what: str, hint: str) -> Mistake:
        return Mistake(lines.of(("replication", field)), f"replication.{field}", what, hint)

    if not settings.log.startswith(("postgresql://", "postgres://")) and settings.is_on:
        yield wrong("log", "there is no such log", 'write "local", or "postgresql://…"')
    if not LEAST_RECORD_BYTES <= settings.record_bytes <= _MOST_RECORD_BYTES:
        hint = f"from {LEAST_RECORD_BYTES} to {_MOST_RECORD_BYTES}"
        yield wrong("record_bytes", f"{settings.record_bytes} is not possible", hint)
    if settings.limit_bytes < settings.retain_bytes:
        yield wrong("limit_bytes", "is less than retain_bytes", "set it to more")
    if not settings.is_on:
        return
    lake = config.lake
    if (lake.messages or lake.ledger or lake.tap.listeners) and lake.directory is None:
        hint = "set lake.directory to a folder that all replicas share, or messages and ledger off"
        line = lines.of(("lake",))
        yield Mistake(line, "lake.directory", "replicas have one lake together", hint)


def _wrong_numbers(value: object, path: tuple[str | int, ...], lines: Lines) -> Iterator[Mistake]:
    """Numbers below 0, above 63 bits or not finite, which no setting allows.

    Messages of schedules are not settings.
    """
    if isinstance(value, int | float):
        if value < 0:
            yield Mistake(lines.of(path), dotted(path), f"{value} is below 0")
        elif not value <= LARGEST_INTEGER:
            yield Mistake(lines.of(path), dotted(path), "the number is too large")
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
    """Keys that can't be decoded. A key is a secret: the message never contains it."""
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
    hashes = [user.token_hash for user in config.users if user.token_hash is not None]
    if sum(1 << each.cost for each in distinct_salts(hashes)) > MOST_WORK:
        what = "the hashes have too many different salts: each takes time when somebody signs in"
        hint = "`crosswire user hash --config FILE` uses the salt of the file's first hash"
        yield Mistake(lines.of(("users",)), "users", what, hint)
    for field in ("name", "token", "token_hash", "certificate", "curve_key"):
        seen: set[str] = set()
        for number, user in enumerate(config.users):
            value = getattr(user, field)
            if value is not None and value in seen:
                line = lines.of(("users", number, field))
                # A token is a secret: the message never contains it.
                what = value if field == "name" else f"the {field} of {user.name}"
                yield Mistake(line, f"users[{number + 1}].{field}", f"{what} is used twice")
            seen.add(value)


def _wrong_schedules(config: Config, lines: Lines) -> Iterator[Mistake]:
    twice = {name for name, n in Counter(each.id for each in config.schedules).items() if n > 1}
    for number, entry in enumerate(config.schedules):
        where = f"schedules[{number + 1}]"

        def wrong(field: str, what: object, number: int = number, where: str = where) -> Mistake:
            return Mistake(lines.of(("schedules", number, field)), f"{where}.{field}", str(what))

        if bool(entry.interval_s) == bool(entry.cron):
            line = lines.of(("schedules", number))
            yield Mistake(line, where, "needs either interval_s or cron")
        try:
            check_id(entry.id)
        except InvalidSchedule as error:
            yield wrong("id", error)
        if entry.id in twice:
            yield wrong("id", f"{entry.id} is used more than once")
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
            # A negative one is reported by `_wrong_numbers`.
            if entry.interval_s and not entry.interval_s < 0:
                check_interval(entry.interval_s)
        except InvalidSchedule as error:
            yield wrong("interval_s", error)
        try:
            check_properties(entry.properties)
        except InvalidEnvelope as error:
            yield wrong("properties", error)
