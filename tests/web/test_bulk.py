"""Requests that take long: others are served meanwhile, and what is too much is refused early."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from crosswire.errors import InvalidDestination, RequestFailed, ServiceUnavailable
from crosswire.hub.intake_gate import IntakeGate
from crosswire.server.log_selection import MOST_DESTINATIONS, MOST_PATTERNS, LogSelection
from crosswire.server.log_snapshot import DestinationTally
from crosswire.web.long_work import LongWork
from tests.web.conftest import WebHub


async def test_many_messages_and_many_new_queues_are_accepted_in_order(web: WebHub) -> None:
    messages = [{"destination": f"queue/n{n % 500}", "text": str(n)} for n in range(2_000)]
    messages[7]["destination"] = "service/x"
    made = await web.post("/v1/messages", {"messages": messages})
    assert [each["index"] for each in made["refused"]] == [7]
    assert made["ids"][7] == 0
    taken = [each for each in made["ids"] if each]
    assert taken == sorted(taken) and len(taken) == 1_999
    assert (await web.get("/v1/state"))["queues"] == 500


async def test_properties_are_measured_before_they_are_parsed(web: WebHub) -> None:
    properties = {f"p{n}": 1 for n in range(20_000)}
    message = {"destination": "queue/q", "text": "x", "properties": properties}
    with pytest.raises(RequestFailed, match="at most 65536 bytes"):
        await web.post("/v1/messages", {"messages": [message]})
    wrong = {"destination": "queue/q", "text": "x", "properties": {"a": []}}
    with pytest.raises(RequestFailed, match="properties"):
        await web.post("/v1/messages", {"messages": [wrong]})


async def test_producers_wait_while_too_much_waits_for_the_log(web: WebHub) -> None:
    pending = 101
    gate = web.hub.commits.gate = IntakeGate(lambda: pending, 100)
    one = {"messages": [{"destination": "queue/q", "text": "x"}]}
    many = {"messages": [{"destination": "queue/q", "text": "x"}] * 200}
    requests = [asyncio.ensure_future(web.post("/v1/messages", each)) for each in (one, many)]
    async with asyncio.timeout(20):
        while gate.waiting < 2:
            await asyncio.sleep(0.01)
    assert "queue/q" not in web.hub.store.destinations()
    pending = 0
    gate.look()
    made = await asyncio.gather(*requests)
    assert [len(each["ids"]) for each in made] == [1, 200]


async def test_too_many_messages_are_refused(web: WebHub) -> None:
    messages = [{"destination": "queue/q", "text": ""}] * 50_001
    with pytest.raises(RequestFailed, match="at most 50000 messages, not 50001"):
        await web.post("/v1/messages", {"messages": messages})
    assert "queue/q" not in web.hub.store.destinations()


async def test_work_of_several_requests_takes_one_turn_at_a_time() -> None:
    work = LongWork()
    rounds = 0
    steps: Counter[int] = Counter()

    async def busy() -> None:
        async with work.turn() as turn:
            for _ in range(10):
                time.sleep(0.002)
                steps[rounds] += 1
                await turn.pause()

    together = asyncio.gather(*(busy() for _ in range(10)))
    while not together.done():
        await asyncio.sleep(0)
        rounds += 1
    # A turn has three steps; ten requests at once would take thirty in a round of the loop.
    assert max(steps.values()) <= 6


async def test_a_cancelled_request_gives_its_turn_back() -> None:
    work = LongWork()

    async def endless() -> None:
        async with work.turn() as turn:
            while True:
                time.sleep(0.002)
                await turn.pause()

    task = asyncio.create_task(endless())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), work.turn():
        pass


@pytest.mark.parametrize(
    "destinations",
    [
        [f"queue/q{n}" for n in range(MOST_DESTINATIONS + 1)],
        [f"topic/t{n}/+" for n in range(MOST_PATTERNS + 1)],
    ],
)
async def test_a_plan_of_too_many_destinations_is_refused(
    web: WebHub, destinations: list[str]
) -> None:
    with pytest.raises(RequestFailed, match="at once, not"):
        await web.post("/v1/log/plan", {"destinations": destinations})
    with pytest.raises(InvalidDestination):
        LogSelection(destinations, may=bool)


def test_a_plan_ends_when_the_hub_stops() -> None:
    asked = 0

    def go_on() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise ServiceUnavailable("the hub is stopping")

    numbers = {f"queue/q{n}": n for n in range(10_000)}
    with pytest.raises(ServiceUnavailable):
        LogSelection(["queue/+"], may=bool).logs(numbers, go_on)
    assert asked == 3


def test_what_selects_a_destination() -> None:
    asked = ["queue/a", "queue/+", "service/s", "service/s/add", "topic/#"]
    chosen = LogSelection(asked, may=bool)
    assert list(chosen.selecting("queue/a")) == ["queue/a", "queue/+"]
    assert list(chosen.selecting("service/s/add")) == ["service/s/add", "service/s"]
    assert list(chosen.selecting("service/s")) == ["service/s"]
    assert list(chosen.selecting("queue/a/b")) == []


async def test_sums_of_many_patterns_end_when_the_hub_stops(web: WebHub) -> None:
    log = web.server.log
    assert log is not None
    asked = [f"queue/q{n}" for n in range(MOST_DESTINATIONS)]
    chosen = LogSelection(asked, may=bool)
    counted = {f"queue/q{n}": DestinationTally(messages=n) for n in range(25_000)}
    found = log._summed(chosen, asked, counted)
    assert [found[name].messages for name in asked] == list(range(MOST_DESTINATIONS))
    await log.close()
    with pytest.raises(ServiceUnavailable):
        log._summed(chosen, asked, counted)
