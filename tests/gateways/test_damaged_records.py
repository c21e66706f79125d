"""One damaged record of what a hub reads when it starts: it starts, reports it, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from crosswire.config import Config, ScheduleEntry
from crosswire.envelope import Envelope, message_kind
from crosswire.errors import ClockJumped, HubError
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.emqp.broker import Broker
from crosswire.gateways.relink.links import Links
from crosswire.hub.hub import Hub
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, StagedAttempt, pack
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig
from crosswire.hub.schedules import Schedule
from crosswire.server.configured_schedules import follow_schedules
from crosswire.server.server import Server
from crosswire.store.memory import MemoryDisk, MemoryStore
from tests.gateways.conftest import StartServer
from tests.gateways.test_relink import abandon, client, send, take, until
from tests.hub.parties import Recorder
from tests.store.committing import commit

NOW = 2e9
PEER = LedgerPeer("test", "test-1")
CONFIGURED = ScheduleEntry(id="configured", destination="queue/ticks", interval_s=3600.0, text="x")
OWNER = ProducerKey("", "producer")
BATCH = 7
CONFIG = Config()

SPACES = {
    *("boot", "change", "configured", "cursor", "depth", "mark", "moved", "part", "producer"),
    *("reclaimed", "relink-epoch", "relink-link", "relink-row", "schedule", "seal", "staged"),
    "subscription",
}

Rows = dict[bytes, bytes]


def envelope(destination: str, payload: bytes = b"x", **options: Any) -> Envelope:
    kind: Any = message_kind(destination)
    return Envelope(destination=destination, kind=kind, payload=payload, **options)


async def busy_rows(start_server: StartServer) -> Rows:
    """All that the store of a hub has that was killed while it did a bit of everything."""
    server = await start_server(schedules=(CONFIGURED,))
    hub, now = server.hub, server.context.now()
    hub.subscribe("topic/t/#", Recorder(), now, peer=PEER, name="named", window=2)
    hub.produce([envelope("topic/t/a", b"%d" % number) for number in range(6)], now)
    await hub.produce([envelope("queue/q", b"%d" % number) for number in range(6)], now)
    taker = Recorder()
    consumer = hub.consume("queue/q", taker, now, peer=PEER, window=4)
    consumer.settle(taker.ids[1:2], now)
    consumer.refuse(taker.ids[:1], now, delay_s=1000.0)
    schedule = Schedule(id="every", envelope=envelope("queue/ticks"), cron="0 0 * * *")
    hub.schedules.add(schedule, now)
    hub._core.floors.save(hub.topic("topic/t/a").number, 1)
    server.context.shared(Broker).expect("queue/jobs")
    await stage(hub, now)
    await send(server, "queue/links", b"one", b"two", b"three")
    holder = client(server, "queue/links?consume")
    undecided = client(server, "queue/undecided", connector_transactions=True)
    await holder.__aenter__()
    await undecided.__aenter__()
    (await take(holder)).consume()
    await take(holder)
    undecided.link.send(0, (b"open",))
    undecided.wake()
    await until(server, lambda: kinds(state_of(server)) >= {b"r", b"m", b"s", b"u"})
    rows = state_of(server)
    abandon(holder)
    abandon(undecided)
    decide(server, rows)
    return rows


async def stage(hub: Hub, now: float) -> None:
    """A batch that waits for its commit, and the chunks of one that is decided."""
    part = pack([envelope("queue/batch", b"%d" % number) for number in range(600)])
    for batch in (BATCH, BATCH + 1):
        await hub.staging.stage(OWNER, batch, "attempt", 0, part, now)


def decide(server: Server, rows: Rows) -> None:
    """The producer's record as it is when the hub is killed between two steps of a commit."""
    staging = server.hub.staging
    (attempt,) = staging._find(OWNER, BATCH, [NamedAttempt("attempt", 1, 600)])
    key = msgspec.msgpack.encode(OWNER)
    record = (OWNER, BATCH, "run", False, 600, NOW, [attempt.number])
    rows[b"sproducer/" + key] = msgspec.msgpack.encode(record)
    first = next(iter(attempt.chunks()))[0]
    rows[b"smoved/" + key] = first
    del rows[b"sstaged/" + first]


def state_of(server: Server) -> Rows:
    return dict(server.hub.store._scan(b"", b"\xff"))


def kinds(rows: Rows) -> set[bytes]:
    """Of the rows of links."""
    return {key[20:21] for key in rows if key.startswith(b"srelink-row/")}


# --------------------------------------------------------------------------------------- damaging


def huge(value: Any) -> Any:
    """The same with every number as large as it can be written."""
    if isinstance(value, list):
        return [huge(each) for each in value]
    if isinstance(value, dict):
        return {key: huge(each) for key, each in value.items()}
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return 2**64 - 1
    return float("inf") if isinstance(value, float) else value


def with_huge_numbers(value: bytes) -> bytes:
    try:
        decoded = msgspec.msgpack.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return b"\xff" * len(value)
    changed = msgspec.msgpack.encode(huge(decoded))
    return b"\xff" * len(value) if changed == value or isinstance(decoded, int) else changed


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda value: bytes(range(193, 193 + 40)),
    "empty": lambda value: b"",
    "truncated": lambda value: value[: len(value) // 2],
    "longer": lambda value: value + b"\x00\xff",
    "no text": lambda value: msgspec.msgpack.encode([["a", "b"]]).replace(b"a", b"\xff"),
    "another type": lambda value: msgspec.msgpack.encode({"a": [None, 1.5, "text"]}),
    "nested": lambda value: b"\x91" * 5000 + b"\x90",
    "huge numbers": with_huge_numbers,
}

UNREAD = (b"semqp.asked/", b"sdamaged/")
"""Their keys are all that there is to them."""


def cases(rows: Rows) -> Iterator[tuple[str, bytes, bytes]]:
    for key, value in rows.items():
        if key[:1] in b"sl" and not key.startswith(UNREAD):
            for name, damage in DAMAGES.items():
                damaged = damage(value)
                if damaged != value:
                    yield name, key, damaged


# ----------------------------------------------------------------------------------------- judging


def restart(rows: Rows) -> Hub:
    """What a server does when it starts, up to its listeners."""
    disk = MemoryDisk()
    # Of another store: a value that differs from this one's would mean a power cut.
    disk.rows = {key: value for key, value in rows.items() if key != b"!running"}
    disk.keys = sorted(disk.rows)
    hub = Hub(MemoryStore(disk), HubConfig(lake=True), now=NOW, random=Random(1))
    hub.seals.last()
    context = GatewayContext(hub, CONFIG, clock=lambda: NOW)
    follow_schedules(hub, [CONFIGURED], NOW)
    context.shared(Broker)
    context.shared(Links)
    hub.queues()
    for _ in range(20):
        hub.handle_deadline(NOW)
        assert hub.commits.commit_now() is None
    return hub


def reports(hub: Hub) -> list[HubError]:
    """Without those of the clock: the records are of another time than the next start."""
    return [error for error in hub.reports if not isinstance(error, ClockJumped)]


def check_others(hub: Hub, payload: bytes) -> None:
    taker = Recorder(settles=True)
    hub.consume("queue/other", taker, NOW, peer=PEER, window=10)
    receipt = hub.produce([envelope("queue/other", payload)], NOW)
    assert hub.commits.commit_now() is None
    assert receipt.done
    assert not receipt.refused
    assert taker.payloads == [payload]


@pytest.fixture
async def rows(start_server: StartServer) -> Rows:
    return await busy_rows(start_server)


@pytest.mark.slow
async def test_a_hub_starts_whatever_record_is_damaged(rows: Rows) -> None:
    spaces = {key.split(b"/")[0] for key in rows if key[:1] == b"s"}
    assert {space[1:].decode() for space in spaces} >= SPACES
    assert not reports(restart(rows))
    wrong = []
    for name, key, damaged in cases(rows):
        try:
            hub = restart({**rows, key: damaged})
            check_others(hub, b"still here")
        except Exception as error:
            wrong.append(f"{name} at {key!r}: {type(error).__name__}: {error}")
            continue
        if not reports(hub) and not is_undetectable(key, damaged):
            wrong.append(f"{name} at {key!r}: not reported")
        elif reports(hub) and is_set_aside(key) and (key, damaged) not in set_aside(hub):
            wrong.append(f"{name} at {key!r}: not kept")
        await asyncio.sleep(0)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:40])


def is_undetectable(key: bytes, damaged: bytes) -> bool:
    """The chunks of a batch that nobody committed are read when somebody does, and a block of the
    ledger without rows is no block."""
    return key.startswith(b"sstaged/") or (key[:1] == b"l" and not damaged)


def is_set_aside(key: bytes) -> bool:
    return not key.startswith((b"scursor/", b"schange/", b"l", b"sstaged/"))


def set_aside(hub: Hub) -> set[tuple[bytes, bytes]]:
    return {(b"s" + space.encode() + b"/" + key, value) for space, key, value in hub.damage.state()}


async def test_a_decided_batch_is_taken_over_without_the_record_of_its_part(rows: Rows) -> None:
    (part,) = [
        key
        for key in rows
        if key.startswith(b"spart/") and msgspec.msgpack.decode(rows[key])[1] == BATCH
    ]
    hub = restart({**rows, part: b"\xc1"})
    assert [type(error).__name__ for error in reports(hub)] == ["RecordDamaged"]
    taken = hub.queue("queue/batch").browse(0, 1000)
    assert [each.payload for each in taken] == [b"%d" % number for number in range(64, 600)]


async def test_the_length_of_a_queue_is_counted_where_it_can_not_be_read(rows: Rows) -> None:
    whole = restart(rows).queue("queue/q")
    number = restart(rows).store.number("queue/q")
    hub = restart({**rows, b"sdepth/" + number.to_bytes(4): b"\xc1"})
    queue = hub.queue("queue/q")
    assert (queue.length, queue.size_bytes) == (whole.length, whole.size_bytes)
    assert queue.length == 5


async def test_a_damaged_link_gives_back_what_it_held(rows: Rows) -> None:
    """The others stay, and so does the epoch."""
    heads = [key for key in rows if key.startswith(b"srelink-link/")]
    epoch = rows[b"srelink-epoch/epoch"]
    for key in heads:
        hub = restart({**rows, key: b"\xc1"})
        kept = [name for name, _ in hub.store.load("relink-link")]
        assert sorted(kept) == sorted(each[13:] for each in heads if each != key)
        assert hub.store.get("relink-epoch", b"epoch") == epoch
        assert not [row for row, _ in hub.store.load("relink-row") if row.startswith(key[13:])]


def test_attempts_skip_chunks_that_were_taken() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk)
    attempt = StagedAttempt(store, 5)
    attempt.stage(OWNER, 1, "a", pack([envelope("queue/q")] * 600))
    store.drop("staged", next(iter(attempt.chunks()))[0])
    assert commit(store) is None
    found = StagedAttempt(store, 5)
    found.find_chunks()
    assert list(found.chunks()) == list(attempt.chunks())[1:]


async def test_who_subscribes_by_the_name_of_a_damaged_one_goes_on_where_it_was(rows: Rows) -> None:
    hub = restart({**rows, b"ssubscription/named": b"\xc1"})
    assert hub.subscriptions.all() == []
    taker = Recorder(settles=True)
    hub.subscribe("topic/t/#", taker, NOW, peer=PEER, name="named", window=10)
    assert hub.commits.commit_now() is None
    assert taker.payloads == [b"%d" % number for number in range(6)]
    again = Hub(hub.store, HubConfig(lake=True), now=NOW, random=Random(1))
    assert [each.name for each in again.subscriptions.all()] == ["named"]
