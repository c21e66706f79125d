"""Start a log for several replicas of a hub, show them, and take part in it no more."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from crosswire import config as configuration
from crosswire.cli.hub import add_hub_options, api_of, print_json, size
from crosswire.cli.parsers import add_action, add_actions
from crosswire.cli.table import harmless, print_table
from crosswire.config import Config
from crosswire.errors import ConfigError
from crosswire.plurals import plural

if TYPE_CHECKING:
    from crosswire.commitlog.contract import LogState, ReplicaState
    from crosswire.commitlog.replicated import EngineLog

__all__ = ["configure", "run"]

_WITHIN_LOG_BYTES: Final = 64 << 20
"""A smaller store goes into the log as a whole, so that other replicas need nothing else."""
_AWAY_S: Final = 10.0

T = TypeVar("T")


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    actions = add_actions(parser)
    config = "--config crosswire.toml"
    making = add_action(
        actions,
        "init",
        "make the log, from the data directory of this hub",
        f"crosswire replication init {config}",
    )
    making.add_argument(
        "--as",
        dest="owner",
        metavar="ROLE",
        help="the database role that makes the tables, if the hub's own may not",
    )
    showing = add_action(
        actions,
        "status",
        "who leads, and how far the others are",
        f"crosswire replication status {config}",
    )
    removing = add_action(
        actions,
        "remove",
        "forget a replica that does not come back",
        f"crosswire replication remove second {config}",
    )
    removing.add_argument("name", metavar="NAME", help="the replica's name")
    leaving = add_action(
        actions,
        "leave",
        "make the data directory a hub's of its own",
        f"crosswire replication leave {config}",
    )
    raising = add_action(
        actions,
        "upgrade",
        "use the newest format that all replicas read",
        f"crosswire replication upgrade {config}",
    )
    for each in (making, showing, removing, leaving, raising):
        each.add_argument(
            "--config", metavar="FILE", required=True, help="the hub's crosswire.toml"
        )
        each.add_argument("--data", metavar="DIR", help="folder of the store")
        each.add_argument("--json", action="store_true", help="print JSON")
    handing = add_action(
        actions,
        "hand-over",
        "have a running leader hand over to a standby",
        "crosswire replication hand-over --to second",
    )
    handing.add_argument("--to", metavar="NAME", default="", help="the standby that takes over")
    add_hub_options(handing)


def run(options: argparse.Namespace) -> int:
    """Run the action. Raises ConfigError, StoreError, LogError, ClientError."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "init": _init,
        "status": _status,
        "remove": _remove,
        "leave": _leave,
        "upgrade": _upgrade,
        "hand-over": _hand_over,
    }
    return actions[options.action](options)


def _config(options: argparse.Namespace) -> Config:
    config = configuration.load(Path(options.config))
    if options.data is not None:
        config = msgspec.structs.replace(config, data=options.data)
    return config


def _replicated(options: argparse.Namespace) -> Config:
    config = _config(options)
    if not config.replication.is_on:
        raise ConfigError(f"{options.config} names no log: [replication] log is local")
    return config


def _ask(config: Config, work: Callable[[EngineLog], Awaitable[T]]) -> T:
    """Do something with the log. Raises LogError."""
    from crosswire.server.store_opening import open_log

    async def connected() -> T:
        log = open_log(config)
        try:
            return await work(log)
        finally:
            await log.close()

    return asyncio.run(connected())


# ----------------------------------------------------------------------------------- making a log


def _init(options: argparse.Namespace) -> int:
    from crosswire.commitlog.postgres.address import parse_address
    from crosswire.commitlog.postgres.engine import PostgresEngine
    from crosswire.commitlog.records import Genesis, RecordChain
    from crosswire.server.store_opening import open_store
    from crosswire.store.rocks_replica import content_digest, convert, record_content

    config = _replicated(options)
    settings = config.replication
    hub_role = parse_address(settings.log).servers[0].parameters.get("user")
    owner = parse_address(settings.log)
    if options.owner:
        owner = parse_address(settings.log, role=options.owner)
    path = Path(config.data) / "store"
    store = open_store(config)
    try:
        if store.damages.known:
            raise ConfigError(
                f"the store in {path} is damaged: `crosswire store repair {config.data}` first"
            )
        bodies = record_content(store, settings.record_bytes // 2, _WITHIN_LOG_BYTES)
        digest = "" if bodies else content_digest(store)
        node = store.node
    finally:
        store.close()
    chain = RecordChain(
        secrets.token_bytes(16), secrets.token_bytes(16), record_bytes=settings.record_bytes
    )
    genesis = chain.genesis(Genesis(node, digest), _now_us())

    async def create() -> None:
        engine = PostgresEngine(owner, durability=settings.durability)
        try:
            await engine.create_for(genesis, str(hub_role) if hub_role else None)
        finally:
            await engine.close()

    async def fill(log: EngineLog) -> None:
        await log.open()
        for body in bodies:
            for record in chain.group(body, _now_us()):
                await log.append(record)
        # A record is applied when another one stands on it.
        await log.append(chain.heartbeat(_now_us()))

    asyncio.run(create())
    _ask(config, fill)
    convert(path, config.store, chain.log_id, settings.replica, chain.position)
    if options.json:
        print_json({"log": chain.log_id.hex(), "node": node, "records": chain.position.number})
    else:
        how = (
            "other replicas start with an empty data directory"
            if bodies
            else "other replicas start with an empty data directory and fetch a checkpoint"
        )
        print(f"The log {chain.log_id.hex()} of {node} is made; {how}.", file=sys.stderr)
    return 0


def _now_us() -> int:
    return time.time_ns() // 1000


def _leave(options: argparse.Namespace) -> int:
    from crosswire.store.rocks_replica import RocksReplica, read_replica_file

    config = _config(options)
    path = Path(config.data) / "store"
    if read_replica_file(path) is None:
        raise ConfigError(f"{path} is not the store of a replica")
    store = RocksReplica(path, config.store)
    try:
        if store.fault:
            raise ConfigError(f"the store in {path} is damaged: {store.fault}")
        node, number = store.node, store.position.number
        store.leave()
    finally:
        store.close()
    if options.json:
        print_json({"node": node, "applied": number})
    else:
        print(
            f"{path} is a hub's of its own now, with all up to record {number} of its log. Other"
            " replicas are not affected; never start it beside them under the same address.",
            file=sys.stderr,
        )
    return 0


# ------------------------------------------------------------------------------------- the others


class _Found(msgspec.Struct):
    state: LogState
    replicas: list[ReplicaState]


async def _look(log: EngineLog) -> _Found:
    state = await log.state()
    return _Found(state, await log.replicas())


def _status(options: argparse.Namespace) -> int:
    """Works without a running hub: what the replicas report is beside the log."""
    found = _ask(_replicated(options), _look)
    state, replicas = found.state, found.replicas
    newest = state.head.number
    if options.json:
        rows = [
            {
                "name": each.name,
                "address": each.address,
                "role": each.role,
                "version": each.version,
                "format": each.format,
                "synced": each.synced,
                "lag": max(newest - each.synced, 0),
                "age_s": each.age_s,
            }
            for each in replicas
        ]
        log = {
            "id": state.log_id.hex(),
            "address": state.address,
            "first": state.first,
            "newest": newest,
            "size_bytes": state.size_bytes,
            "unsafe": state.unsafe,
        }
        print_json({"log": log, "replicas": rows})
    else:
        table = [
            (
                harmless(each.name),
                each.role if each.age_s < _AWAY_S else "away",
                harmless(each.address) or "-",
                str(each.synced),
                str(max(newest - each.synced, 0)),
                f"{each.age_s:.0f}s",
                harmless(each.version),
            )
            for each in replicas
        ]
        print_table(("replica", "role", "address", "synced", "lag", "report", "version"), table)
        sys.stdout.flush()
        print(
            f"log {state.log_id.hex()} at {state.address}: records {state.first} to {newest},"
            f" {size(state.size_bytes)}"
            + (f"; it confirms nothing: {state.unsafe}" if state.unsafe else ""),
            file=sys.stderr,
        )
    return 1 if state.unsafe else 0


def _remove(options: argparse.Namespace) -> int:
    async def remove(log: EngineLog) -> bool:
        for each in await log.replicas():
            if each.name == options.name and each.age_s < _AWAY_S:
                raise ConfigError(f"{each.name} reports {each.age_s:.0f} s ago: stop it first")
        return await log.remove(options.name)

    if not _ask(_replicated(options), remove):
        raise ConfigError(f"no replica {options.name} has reported")
    if options.json:
        print_json({"removed": options.name})
    else:
        text = f"{harmless(options.name)} is forgotten: the log keeps nothing for it any more."
        print(text, file=sys.stderr)
    return 0


def _upgrade(options: argparse.Namespace) -> int:
    from crosswire.commitlog.records import FORMAT, decode_record

    async def look(log: EngineLog) -> tuple[int, list[ReplicaState]]:
        state = await log.state()
        newest = await log.engine.fetch(state.head.number - 1, 1)
        return decode_record(newest.records[0]).format, await log.replicas()

    used, replicas = _ask(_replicated(options), look)
    readable = min([FORMAT, *(each.format for each in replicas)])
    if options.json:
        print_json({"format": used, "readable": readable})
    elif used >= readable:
        print(
            f"The log has format {used}, the newest that {plural(len(replicas), 'replica')} and"
            " this version read: nothing to do.",
            file=sys.stderr,
        )
    else:
        print(f"The next leader writes format {readable}; the log has {used}.", file=sys.stderr)
    return 0


def _hand_over(options: argparse.Namespace) -> int:
    answer = api_of(options).post("/v1/replication/hand-over", {"to": options.to})
    if options.json:
        print_json(answer)
    else:
        print(f"{harmless(answer['name'])} drains and hands over", file=sys.stderr)
    return 0
