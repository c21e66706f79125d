"""Which attempts count, and what a trace shows of those that don't."""

from __future__ import annotations

import pytest

from tests.hub.parties import Bench, Recorder, send

DELAY_S = 120.0


def attempts_of(bench: Bench, identifier: int) -> list[tuple[str, int]]:
    steps = ("delivered", "refused", "returned")
    return [(row.step, row.attempt) for row in bench.hub.trace(identifier) if row.step in steps]


@pytest.mark.parametrize("power", [False, True])
def test_what_ended_counts_across_restarts(power: bool) -> None:
    """A refusal, and a consumer that left; the trace has the same numbers as the deliveries."""
    bench = Bench()
    (identifier,) = bench.produce(send(b"x"))
    for attempt in (1, 2):
        taker = Recorder()
        consumer = bench.consume("queue/q", taker)
        assert [each.attempt for each in taker.deliveries] == [attempt]
        if attempt == 1:
            consumer.refuse([identifier], bench.now)
        consumer.close(bench.now)
        bench.hub.committed()
        bench.commit()
        bench.kill(power=power)
        bench.wait(DELAY_S)
    taker = Recorder()
    bench.consume("queue/q", taker)
    assert [each.attempt for each in taker.deliveries] == [3]
    assert attempts_of(bench, identifier) == [
        ("delivered", 1),
        ("refused", 1),
        ("delivered", 2),
        ("returned", 2),
        ("delivered", 3),
    ]


def test_what_a_kill_interrupted_does_not_count_and_is_in_the_trace() -> None:
    bench = Bench()
    (identifier,) = bench.produce(send(b"x"))
    for _ in range(3):
        taker = Recorder()
        bench.consume("queue/q", taker)
        assert [each.attempt for each in taker.deliveries] == [1]
        bench.commit()
        bench.kill()
    assert attempts_of(bench, identifier) == [("delivered", 1)] * 3
