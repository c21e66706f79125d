"""Collections that stay short, and closed connections that don't stay in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from crosswire.gateways.slots import ConnectionSlots
from crosswire.server import collector
from crosswire.server.collector import Collector
from tests.hub.parties import Bench, Recorder

pytestmark = pytest.mark.asyncio


class _Connection:
    """One whose objects refer to each other, as those of gateways and sessions do."""

    protocol: ClassVar[str] = "emp"
    is_gone = False

    def __init__(self) -> None:
        self.session = [self]


@pytest.fixture
async def slots() -> ConnectionSlots:
    return ConnectionSlots(100_000, 100_000)


@pytest.fixture
async def started(slots: ConnectionSlots) -> AsyncIterator[Collector]:
    started = Collector([slots])
    started.start()
    yield started
    started.stop()


async def test_a_collection_looks_at_what_is_new_only(started: Collector) -> None:
    kept = [[{index: []}] for index in range(300_000)]

    assert len(gc.get_objects()) < 200_000, "of more than 600,000"
    assert len(kept) == 300_000


async def test_garbage_of_others_is_collected(started: Collector) -> None:
    looked_at = len(gc.get_objects())
    for _ in range(300_000):
        _Connection()

    assert len(gc.get_objects()) - looked_at < 150_000, "of 600,000"


async def test_connections_that_ended_after_they_were_frozen_are_freed(
    slots: ConnectionSlots, started: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_LONG_S", 0.0)
    monkeypatch.setattr(started, "_most_departed", 100)
    connections = [_Connection() for _ in range(101)]
    for connection in connections:
        slots.add(connection, "192.0.2.1")
    gc.collect()
    for connection in connections:
        slots.leave(connection)
    del connection, connections
    gc.collect()
    assert started.departed == 101

    started.free_departed()

    assert started.departed == 0


async def test_connections_that_are_still_used_are_not_looked_at_again(
    slots: ConnectionSlots, started: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_MOST_DEPARTED", 100)
    monkeypatch.setattr(started, "_most_departed", 100)
    monkeypatch.setattr(collector, "_LONG_S", 0.0)
    used = [_Connection() for _ in range(101)]
    for connection in used:
        slots.add(connection, "192.0.2.1")
        slots.leave(connection)
    gc.collect()
    collections = gc.get_stats()[2]["collections"]

    started.free_departed()
    started.free_departed()
    started.free_departed()

    assert gc.get_stats()[2]["collections"] == collections + 1
    assert started.departed == 101


async def test_queues_and_subscriptions_that_were_removed_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_LONG_S", 0.0)
    bench = Bench()
    started = Collector([bench.hub])
    started.start()
    try:
        monkeypatch.setattr(started, "_most_departed", 100)
        names = [f"queue/{number}" for number in range(101)]
        for name in names:
            bench.hub.queue(name)
            bench.subscribe("topic/t", Recorder(), name=name).close(bench.now)
        bench.commit()
        gc.collect()
        for name in names:
            bench.hub.remove(name, bench.now)
            bench.hub.subscriptions.remove(name)
        bench.commit()
        gc.collect()
        assert started.departed == 202

        started.free_departed()

        # An index remembers its latest changes.
        assert started.departed <= 64
    finally:
        started.stop()


async def test_a_hub_that_ceased_to_lead_is_freed(
    started: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_LONG_S", 0.0)
    bench = Bench()
    hub = weakref.ref(bench.hub)
    gc.collect()
    del bench
    gc.collect()
    assert hub() is not None

    started.free_departed()
    assert hub() is not None
    started.free_later()
    started.free_departed()

    assert hub() is None
