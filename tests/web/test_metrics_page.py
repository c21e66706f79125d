"""What Prometheus is told."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import crosswire.hub.commits as commits_module
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.ledger import Step
from crosswire.server.metrics import Histogram, Metrics
from tests.hub.parties import Bench, Recorder, send
from tests.web.conftest import Taker, WebHub, bury

_LINE = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? \S+')


async def metrics(web: WebHub) -> dict[str, float]:
    status, body = await web.ask("GET /metrics HTTP/1.1\nhost: localhost")
    assert status == 200
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert all(_LINE.fullmatch(line) for line in lines)
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_messages_are_counted_by_protocol_kind_and_outcome(web: WebHub) -> None:
    await web.produce("queue/a", "1", "2")
    await web.produce("topic/t", "1")
    Taker(web, "queue/a", does="settle")
    await bury(web, "1")
    await web.hub.committed()
    told = await metrics(web)
    name = "crosswire_messages_total"
    assert told[f'{name}{{protocol="http",kind="queue",outcome="accepted"}}'] == 4
    assert told[f'{name}{{protocol="http",kind="topic",outcome="accepted"}}'] == 1
    assert told[f'{name}{{protocol="test",kind="queue",outcome="settled"}}'] == 2
    assert told[f'{name}{{protocol="test",kind="queue",outcome="refused"}}'] == 1
    assert told[f'{name}{{protocol="hub",kind="queue",outcome="dead"}}'] == 1
    assert told["crosswire_dead_letters"] == 1


async def test_latencies_and_commits_are_measured(web: WebHub) -> None:
    await web.produce("queue/a", *"12345")
    Taker(web, "queue/a", does="settle")
    await web.hub.committed()
    told = await metrics(web)
    for step in ("delivered", "settled"):
        labels = f'protocol="test",kind="queue",step="{step}"'
        assert told[f"crosswire_latency_seconds_count{{{labels}}}"] == 5
        assert told[f"crosswire_latency_seconds_sum{{{labels}}}"] > 0
    assert told["crosswire_commit_messages_sum"] == 5
    assert told["crosswire_commit_seconds_count"] >= 2


def test_a_commit_takes_as_long_as_the_disk_not_as_those_who_get_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(commits_module, "perf_counter", lambda: clock[0])

    class Slow(Recorder):
        def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
            clock[0] += 100.0

    bench = Bench()
    measured = Metrics(bench.hub)
    bench.consume("queue/q", Slow(), window=10)
    bench.produce(send(b"a"))
    sync = bench.disk.sync

    def slow_sync() -> None:
        clock[0] += 2.0
        sync()

    monkeypatch.setattr(bench.disk, "sync", slow_sync)
    bench.produce(send(b"b"))
    assert clock == [202.0]
    assert "s_sum 2.000000" in list(measured.commit_seconds.lines("s"))


def test_a_large_group_is_counted_in_parts_of_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    measured = Metrics(bench.hub)
    deferred: list[Callable[[], None]] = []
    monkeypatch.setattr(bench.hub, "defer", lambda _kind, callback: deferred.append(callback))
    names = [f"queue/q{number}" for number in range(1000)]
    bench.produce(*(send(b"a", name) for name in names))
    bench.produce(send(b"b", "queue/b"))
    assert not measured._destinations.by_name
    deferred.pop()()
    assert 0 < len(measured._destinations.by_name) < 500
    # Who looks has it all, in order, and what was deferred finds nothing to do.
    assert measured.total.totals[Step.ACCEPTED] == 1001
    assert list(measured.destinations.by_name) == [*names, "queue/b"]
    assert "m_sum 1001.000000" in list(measured.commit_messages.lines("m"))
    deferred.pop()()
    assert not deferred and measured.total.totals[Step.ACCEPTED] == 1001


async def test_no_name_of_anybody_becomes_a_label(web: WebHub) -> None:
    for number in range(50):
        await web.produce(f"queue/secret-{number}", "x")
    before = len(await metrics(web))
    for number in range(50, 100):
        await web.produce(f"queue/secret-{number}", "x")
    told = await metrics(web)
    assert len(told) == before
    assert not any("secret" in name for name in told)


def test_a_histogram_counts_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, weight in ((1.0, 1), (1.5, 2), (9.0, 1)):
        histogram.add(value, weight)
    assert list(histogram.lines("h", 'a="b"')) == [
        'h_bucket{a="b",le="1"} 1',
        'h_bucket{a="b",le="2"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_sum{a="b"} 13.000000',
        'h_count{a="b"} 4',
    ]
