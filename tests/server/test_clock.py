"""A server's clock: it goes on whatever raises, and whatever the system's clock is set to."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from crosswire.config import ScheduleEntry
from crosswire.envelope import Envelope
from crosswire.errors import CallTimeout, InvalidSchedule
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.schedules import Schedule
from crosswire.hub.wall import Clock
from crosswire.server import timekeeper
from crosswire.server.server import Server
from crosswire.store.contract import StoreLimits
from tests.gateways.conftest import StartServer
from tests.hub.parties import Caller
from tests.hub.parties import Server as Provider

DAY = 86_400.0
OVER = "0 0 1 1 * 0 2020"


class SetClock:
    """A system's clock that can be set."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.clock = Clock(wall=lambda: time.time() + self.ahead)


async def ticks(server: Server, within_s: float = 0.01) -> None:
    """A timer of the hub comes."""
    came = asyncio.Event()
    server.hub.call_at(server.context.now() + within_s, lambda _now: came.set())
    async with asyncio.timeout(10):
        await came.wait()


def test_the_steady_clock_follows_the_monotonic_one() -> None:
    wall, monotonic = [1000.0], [5.0]
    clock = Clock(lambda: wall[0], lambda: monotonic[0])
    monotonic[0] += 7.0
    wall[0] -= 3600.0
    assert clock.now() == 1007.0
    assert clock.look() == (-2600.0, 1007.0)


def test_an_interrupted_look_at_the_clock_does_not_count() -> None:
    monotonic = iter([0.0, 10.0, 12.0])
    clock = Clock(lambda: 1000.0, lambda: next(monotonic))
    assert clock.look() is None


@pytest.mark.parametrize("seconds", [-3600.0, -40 * DAY, 40 * DAY])
async def test_deadlines_come_when_the_clock_was_set(
    start_server: StartServer, seconds: float
) -> None:
    system = SetClock()
    server = await start_server(clock=system.clock)
    await ticks(server)
    system.ahead = seconds
    await ticks(server)
    await ticks(server)
    caller, peer = Caller(), LedgerPeer("test", "p")
    now = server.context.now()
    server.hub.provide(["service/slow"], Provider(), now, peer=peer)
    request = Envelope(destination="service/slow", kind="request")
    server.hub.call([request], now, answered=caller, peer=peer, timeout_s=0.1)
    await ticks(server, 0.15)
    assert [type(each) for each in caller.answers] == [CallTimeout]
    assert server.hub.wall.forward + server.hub.wall.backward == 1


async def test_messages_are_stamped_with_the_clock_as_it_was_set(start_server: StartServer) -> None:
    system = SetClock()
    server = await start_server(clock=system.clock)
    system.ahead = 40 * DAY
    await ticks(server)
    await ticks(server, 0.2)
    envelope = Envelope(destination="queue/q", kind="send")
    ids = await server.hub.produce([envelope], server.context.now())
    stored = server.hub.fetch("queue/q", ids)[0]
    assert stored is not None
    assert stored.time / 1e6 == pytest.approx(time.time() + 40 * DAY, abs=5)


async def test_a_turn_that_raises_does_not_stop_the_clock(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timekeeper, "_AFTER_FAILURE_S", 0.01)
    follow, calls = server.hub.follow_wall, []

    def fail(wall: float, now: float) -> None:
        calls.append(now)
        if len(calls) < 3:
            raise RuntimeError("a turn that fails")
        follow(wall, now)

    monkeypatch.setattr(server.hub, "follow_wall", fail)
    await ticks(server)
    assert len(calls) >= 3
    assert server.context.counters["failed", "", "clock"] == 2


async def test_a_timer_that_raises_does_not_stop_the_clock(server: Server) -> None:
    def fail(_now: float) -> None:
        raise RuntimeError("a timer that fails")

    server.hub.call_at(server.context.now(), fail)
    await ticks(server)
    assert server.hub.callbacks.failed["timer"] == 1


async def test_a_hub_starts_with_schedules_that_can_t_fire(start_server: StartServer) -> None:
    server = await start_server()
    due = server.context.now() - 10
    for name, cron, queue in (("over", OVER, "queue/q"), ("new", "* * * * *", "queue/new")):
        envelope = Envelope(destination=queue, kind="send")
        stored = Schedule(id=name, envelope=envelope, cron=cron, next_due=due)
        server.hub.store.save("schedule", name.encode(), msgspec.msgpack.encode(stored))
    await server.hub.produce([Envelope(destination="queue/q", kind="send")], server.context.now())
    await server.stop()
    entry = ScheduleEntry(id="configured", destination="queue/q", cron=OVER, text="x")
    tick = ScheduleEntry(id="tick", destination="queue/q", interval_s=0.1, text="x")
    server = await start_server(store=StoreLimits(destinations=1), schedules=(entry, tick))
    await ticks(server, 0.25)
    assert sorted(each.id for each in server.hub.schedules.all()) == ["new", "tick"]
    assert server.hub.queue("queue/q").length >= 3
    assert server.hub.queue("queue/new").length == 1, "a message of the hub itself is not refused"
    reports = " ".join(str(e) for e in server.hub.reports if isinstance(e, InvalidSchedule))
    assert "over" in reports and "configured" in reports
