"""Staged batches: what counts is there once, what does not never, whatever is killed when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.envelope import Envelope
from crosswire.errors import (
    AttemptLost,
    BatchConflict,
    DestinationFull,
    HubError,
    InvalidDestination,
    InvalidEnvelope,
    StagingFull,
    StoreFull,
    UnknownMessage,
)
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, pack
from crosswire.hub.policies import HubConfig, QueuePolicy, StagingLimits, TopicPolicy
from tests.hub.parties import Bench, Recorder, no_ids, publish, send

OWNER = ProducerKey("anna", "job")


def numbered(count: int, first: int = 0, queue: str = "queue/q") -> list[Envelope]:
    return [send(b"%d" % each, queue) for each in range(first, first + count)]


def stage(
    bench: Bench,
    envelopes: list[Envelope],
    *,
    attempt: str = "a",
    batch: int = 0,
    part: int = 0,
    owner: ProducerKey = OWNER,
) -> None:
    receipt = bench.hub.staging.stage(owner, batch, attempt, part, pack(envelopes), bench.now)
    bench.commit()
    assert receipt.done and receipt.error is None


def commit(
    bench: Bench, *named: NamedAttempt, batch: int = 0, run: str = "", once: bool = False
) -> int:
    """Committed, with all groups that it takes; how many."""
    done = bench.hub.staging.commit(OWNER, batch, named, bench.now, run=run, once=once)
    groups = 0
    while not done.receipt.done:
        bench.commit()
        groups += 1
    return groups


def payloads(bench: Bench, queue: str = "queue/q") -> list[bytes]:
    return [envelope.payload for envelope in bench.hub.queue(queue).browse(0, 100_000)]


def texts(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % each for each in range(first, first + count)]


def test_nothing_of_a_staged_attempt_is_seen_before_its_commit() -> None:
    bench = Bench()
    taker = Recorder()
    bench.consume("queue/q", taker, window=10)
    stage(bench, numbered(3))
    assert (taker.payloads, bench.hub.queue("queue/q").length) == ([], 0)
    commit(bench, NamedAttempt("a", 1, 3))
    assert (taker.payloads, bench.hub.queue("queue/q").length) == (texts(3), 3)


def test_a_small_batch_is_one_group_with_the_producers_record() -> None:
    bench = Bench()
    stage(bench, numbered(3))
    bench.hub.staging.commit(OWNER, 0, [NamedAttempt("a", 1, 3)], bench.now)
    bench.kill()
    assert payloads(bench) == []
    assert commit(bench, NamedAttempt("a", 1, 3)) == 1
    bench.kill()
    assert payloads(bench) == texts(3)
    assert commit(bench, NamedAttempt("a", 1, 3)) == 0


def test_only_the_named_attempts_count_in_their_order() -> None:
    bench = Bench()
    stage(bench, numbered(2, 10), attempt="b")
    stage(bench, numbered(2), attempt="a")
    stage(bench, numbered(2), attempt="a-speculative")
    commit(bench, NamedAttempt("a", 1, 2), NamedAttempt("b", 1, 2))
    assert payloads(bench) == [*texts(2), *texts(2, 10)]
    assert (bench.hub.staging.attempts, bench.hub.staging.staged_bytes) == (0, 0)
    assert not [key for key in bench.disk.keys if key.startswith((b"sstaged", b"spart"))]


def test_parts_follow_each_other_and_a_repeated_one_is_not_kept_twice() -> None:
    bench = Bench()
    stage(bench, numbered(2), part=0)
    stage(bench, numbered(2), part=0)
    stage(bench, numbered(2, 2), part=1)
    with pytest.raises(AttemptLost, match="part 3 is not the next"):
        stage(bench, numbered(1), part=3)
    commit(bench, NamedAttempt("a", 2, 4))
    assert payloads(bench) == texts(4)


def test_a_large_batch_survives_a_kill_after_every_group() -> None:
    bench = Bench()
    count = 5000
    stage(bench, numbered(count // 2), part=0)
    stage(bench, numbered(count - count // 2, count // 2), part=1)
    named = NamedAttempt("a", 2, count)
    bench.hub.staging.commit(OWNER, 0, [named], bench.now)
    bench.commit()
    kills = 0
    while not bench.hub.staging.producers()[OWNER].is_done:
        bench.kill()
        kills += 1
        bench.wait(0)
        assert bench.hub.reports == []
        bench.commit()
    assert kills >= 4
    assert payloads(bench) == texts(count)
    assert bench.hub.queue("queue/q").length == count
    assert commit(bench, named) == 0
    assert bench.hub.staging.staged_bytes == 0


def test_a_kill_between_a_groups_writing_and_the_next_step_repeats_nothing() -> None:
    bench = Bench()
    stage(bench, numbered(5000))
    bench.hub.staging.commit(OWNER, 0, [NamedAttempt("a", 1, 5000)], bench.now)
    for _ in range(3):
        bench.commit()
        # Taken over in memory, not on disk: the power goes.
        bench.kill(power=True)
        bench.wait(0)
    commit(bench, NamedAttempt("a", 1, 5000))
    assert payloads(bench) == texts(5000)


def test_staged_attempts_survive_a_restart_and_unfinished_ones_are_not_whole() -> None:
    bench = Bench()
    stage(bench, numbered(2), part=0)
    bench.hub.staging.stage(OWNER, 0, "a", 1, pack(numbered(2, 2)), bench.now)
    bench.kill()
    with pytest.raises(AttemptLost, match="written again"):
        commit(bench, NamedAttempt("a", 2, 4))
    stage(bench, numbered(2, 2), part=1)
    commit(bench, NamedAttempt("a", 2, 4))
    assert payloads(bench) == texts(4)


def test_what_is_not_on_disk_can_t_be_committed() -> None:
    bench = Bench()
    bench.hub.staging.stage(OWNER, 0, "a", 0, pack(numbered(2)), bench.now)
    with pytest.raises(AttemptLost):
        bench.hub.staging.commit(OWNER, 0, [NamedAttempt("a", 1, 2)], bench.now)


@pytest.mark.parametrize(
    "named",
    [
        NamedAttempt("b", 1, 2),
        NamedAttempt("a", 2, 2),
        NamedAttempt("a", 1, 3),
        NamedAttempt("a", 0, 0),
    ],
)
def test_an_attempt_that_is_not_what_the_commit_counts_on_is_lost(named: NamedAttempt) -> None:
    bench = Bench()
    stage(bench, numbered(2))
    with pytest.raises(AttemptLost):
        commit(bench, named)
    assert payloads(bench) == []


def test_a_batch_is_committed_once_and_then_the_next() -> None:
    bench = Bench()
    for batch in range(3):
        stage(bench, numbered(2, batch * 2), batch=batch)
        commit(bench, NamedAttempt("a", 1, 2), batch=batch)
        commit(bench, NamedAttempt("never staged", 1, 2), batch=batch)
    assert payloads(bench) == texts(6)
    with pytest.raises(BatchConflict, match="committed is 2, and now it writes 1"):
        commit(bench, batch=1)
    with pytest.raises(BatchConflict, match="already"):
        stage(bench, numbered(1), batch=2)


def test_the_same_batch_of_another_query_is_a_conflict() -> None:
    bench = Bench()
    commit(bench, run="one")
    commit(bench, run="one")
    with pytest.raises(BatchConflict, match="another query"):
        commit(bench, run="two")


def test_an_empty_batch_counts() -> None:
    bench = Bench()
    commit(bench)
    bench.kill()
    assert bench.hub.staging.is_committed(OWNER, 0, "")


def test_an_attempt_can_t_be_named_twice() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    with pytest.raises(BatchConflict, match="twice"):
        commit(bench, NamedAttempt("a", 1, 2), NamedAttempt("a", 1, 2))


def test_a_commit_waits_for_the_one_before_it() -> None:
    bench = Bench()
    stage(bench, numbered(5000))
    stage(bench, numbered(1), batch=1)
    bench.hub.staging.commit(OWNER, 0, [NamedAttempt("a", 1, 5000)], bench.now)
    with pytest.raises(StagingFull, match="batch 0 of job is still being taken over"):
        commit(bench, NamedAttempt("a", 1, 1), batch=1)
    with pytest.raises(StagingFull):
        bench.hub.staging.forget(OWNER)


def test_an_aborted_batch_leaves_nothing() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    stage(bench, numbered(2), attempt="b")
    assert bench.hub.staging.abort(OWNER, 0) == 2
    assert bench.hub.staging.abort(OWNER, 0) == 0
    bench.commit()
    bench.kill()
    assert not [key for key in bench.disk.keys if key.startswith((b"sstaged", b"spart"))]
    with pytest.raises(AttemptLost):
        commit(bench, NamedAttempt("a", 1, 2))


def test_aborting_a_committed_batch_changes_nothing() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    commit(bench, NamedAttempt("a", 1, 2))
    assert bench.hub.staging.abort(OWNER, 0) == 0
    assert payloads(bench) == texts(2)


def test_attempts_that_nobody_comes_back_for_are_dropped() -> None:
    bench = Bench(HubConfig(staging=StagingLimits(staged_s=100)))
    stage(bench, numbered(2))
    bench.wait(80)
    stage(bench, numbered(2), attempt="b")
    bench.wait(80)
    assert bench.hub.staging.attempts == 2
    bench.wait(40)
    assert (bench.hub.staging.attempts, bench.hub.staging.staged_bytes) == (0, 0)
    with pytest.raises(AttemptLost):
        commit(bench, NamedAttempt("a", 1, 2))


def test_a_producer_that_commits_once_is_forgotten_and_others_are_not() -> None:
    bench = Bench()
    commit(bench, once=True)
    other = ProducerKey("anna", "stream")
    bench.hub.staging.commit(other, 7, [], bench.now)
    bench.commit()
    bench.wait(3700)
    bench.commit()
    assert list(bench.hub.staging.producers()) == [other]
    bench.kill()
    assert list(bench.hub.staging.producers()) == [other]


def test_a_producer_is_forgotten_on_request() -> None:
    bench = Bench()
    commit(bench, batch=5)
    stage(bench, numbered(1), batch=6)
    bench.hub.staging.forget(OWNER)
    assert (bench.hub.staging.attempts, bench.hub.staging.producers()) == (0, {})
    with pytest.raises(UnknownMessage):
        bench.hub.staging.forget(OWNER)


def test_nobody_speaks_for_the_producer_of_another_principal() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    stranger = ProducerKey("bert", "job")
    assert bench.hub.staging.abort(stranger, 0) == 0
    with pytest.raises(AttemptLost):
        bench.hub.staging.commit(stranger, 0, [NamedAttempt("a", 1, 2)], bench.now)
    commit(bench, NamedAttempt("a", 1, 2))


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        (StagingLimits(staged_bytes=200), "staged_bytes"),
        (StagingLimits(attempts=1), "attempts"),
        (StagingLimits(producers=1), "producers"),
    ],
)
def test_there_is_only_so_much_room(limits: StagingLimits, what: str) -> None:
    bench = Bench(HubConfig(staging=limits, share=1.0))
    if what == "producers":
        bench.hub.staging.commit(ProducerKey("bert", "x"), 0, [], bench.now)
    else:
        stage(bench, numbered(1))
    before = bench.hub.staging.staged_bytes
    with pytest.raises(StagingFull, match=what):
        stage(bench, numbered(200), attempt="b")
    assert bench.hub.staging.staged_bytes == before


def test_a_full_disk_refuses_and_keeps_what_is_there() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    bench.disk.room_bytes = 0
    bench.now += 1
    with pytest.raises(StoreFull):
        stage(bench, numbered(2), attempt="b")
    with pytest.raises(StoreFull):
        commit(bench, NamedAttempt("a", 1, 2))
    bench.disk.room_bytes = 1 << 30
    bench.now += 1
    commit(bench, NamedAttempt("a", 1, 2))
    assert payloads(bench) == texts(2)


def test_a_group_that_can_t_be_written_delays_a_commit_and_repeats_nothing() -> None:
    bench = Bench()
    stage(bench, numbered(5000))
    done = bench.hub.staging.commit(OWNER, 0, [NamedAttempt("a", 1, 5000)], bench.now)
    bench.commit()
    bench.disk.room_bytes = 0
    for _ in range(3):
        bench.commit()
        bench.wait(0.3)
    assert not bench.hub.staging.producers()[OWNER].is_done
    bench.disk.room_bytes = 1 << 30
    while not done.receipt.done:
        bench.commit()
        bench.wait(0.3)
    assert payloads(bench) == texts(5000)
    bench.kill()
    assert payloads(bench) == texts(5000)


@pytest.mark.parametrize("policy", [QueuePolicy(max_length=3), QueuePolicy(max_bytes=300)])
def test_a_full_queue_refuses_the_whole_batch(policy: QueuePolicy) -> None:
    bench = Bench(HubConfig(queues={"q": policy}))
    stage(bench, numbered(2), attempt="a")
    stage(bench, numbered(2, 2), attempt="b")
    stage(bench, [send(b"x" * 150)], attempt="c")
    with pytest.raises(DestinationFull, match="queue/q has no room"):
        commit(bench, NamedAttempt("a", 1, 2), NamedAttempt("b", 1, 2), NamedAttempt("c", 1, 1))
    assert bench.hub.queue("queue/q").length == 0
    commit(bench, NamedAttempt("a", 1, 2))
    assert payloads(bench) == texts(2)


def test_what_can_never_fit_is_refused_when_it_is_staged() -> None:
    bench = Bench(HubConfig(queues={"q": QueuePolicy(max_length=3)}))
    with pytest.raises(DestinationFull):
        stage(bench, numbered(4))
    assert "queue/q" not in bench.store.destinations()


def test_a_queue_that_drops_its_oldest_does_so() -> None:
    bench = Bench(HubConfig(queues={"q": QueuePolicy(max_length=3, overflow="drop-oldest")}))
    bench.produce(*numbered(3, 100))
    stage(bench, numbered(2))
    commit(bench, NamedAttempt("a", 1, 2))
    assert payloads(bench) == [b"102", *texts(2)]


def test_queues_topics_and_those_that_are_not_durable_get_theirs() -> None:
    bench = Bench(HubConfig(topics={"passing": TopicPolicy(durable=False)}))
    everybody, named = Recorder(settles=True), Recorder()
    bench.subscribe("topic/#", everybody)
    bench.subscribe("topic/t", named, name="n", window=10)
    mixed = [send(b"1"), publish(b"2"), publish(b"3", "topic/passing"), send(b"4"), publish(b"5")]
    stage(bench, mixed)
    commit(bench, NamedAttempt("a", 1, 5))
    assert payloads(bench) == [b"1", b"4"]
    assert everybody.payloads == [b"2", b"3", b"5"]
    assert named.payloads == [b"2", b"5"]
    assert bench.store.last_id(bench.store.number("topic/passing")) == 0
    (accepted,) = bench.hub.ledger.of_destination("topic/passing")
    assert (accepted.step, accepted.count) == ("accepted", 1)


def test_a_queues_time_to_live_holds() -> None:
    bench = Bench(HubConfig(queues={"q": QueuePolicy(ttl_s=10)}))
    stage(bench, [send(b"1"), send(b"2", expires=5)])
    commit(bench, NamedAttempt("a", 1, 2))
    expires = [envelope.expires for envelope in bench.hub.queue("queue/q").browse(0, 10)]
    assert expires == [int((bench.now + 10) * 1e6), 5]


def test_the_ledger_knows_who_wrote() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    commit(bench, NamedAttempt("a", 1, 2))
    rows = bench.hub.ledger.of_destination("queue/q")
    assert [(row.step, row.protocol, row.connection) for row in rows] == [
        ("accepted", "test", "p"),
        ("accepted", "test", "p"),
    ]


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\udc80"])
def test_names_are_printable_and_short(name: str) -> None:
    bench = Bench()
    with pytest.raises(InvalidEnvelope):
        stage(bench, numbered(1), owner=ProducerKey("anna", name))
    with pytest.raises(InvalidEnvelope):
        stage(bench, numbered(1), attempt=name)


@pytest.mark.parametrize(
    ("envelope", "error"),
    [
        (send(b"", "service/s"), InvalidDestination),
        (send(b"", "nowhere"), InvalidDestination),
        (send(b"", properties={"a": 1 << 80}), InvalidEnvelope),
    ],
)
def test_what_could_not_be_accepted_is_not_packed(
    envelope: Envelope, error: type[HubError]
) -> None:
    with pytest.raises(error):
        pack([send(b"good"), envelope])


def test_a_batch_is_taken_over_while_no_ids_can_be_reserved() -> None:
    bench = Bench()
    stage(bench, numbered(5000))
    with no_ids(bench):
        done = bench.hub.staging.commit(OWNER, 0, [NamedAttempt("a", 1, 5000)], bench.now)
        bench.commit()
        bench.wait(0.3)
    while not done.receipt.done:
        bench.commit()
        bench.wait(0.3)
    assert payloads(bench) == texts(5000)


def test_damaged_chunks_are_reported_and_the_rest_is_taken_over() -> None:
    bench = Bench()
    stage(bench, numbered(300))
    (first, *_) = [key for key in bench.disk.keys if key.startswith(b"sstaged/")]
    bench.disk.rows[first] = b"\x00" * 10
    commit(bench, NamedAttempt("a", 1, 300))
    assert payloads(bench) == texts(236, 64)
    assert "checksum" in str(bench.hub.reports[-1])


def test_records_that_can_t_be_read_are_reported() -> None:
    bench = Bench()
    stage(bench, numbered(2))
    commit(bench, batch=0)
    stage(bench, numbered(2), batch=1)
    for key in bench.disk.keys:
        if key.startswith((b"spart/", b"sproducer/")):
            bench.disk.rows[key] = b"\xc1"
    bench.kill()
    assert len(bench.hub.reports) == 2
    with pytest.raises(AttemptLost):
        commit(bench, NamedAttempt("a", 1, 2), batch=1)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_is_killed_when_each_batch_is_there_once(data: st.DataObject) -> None:
    """A producer that is killed, repeats and goes on, over a hub that is killed as well."""
    bench = Bench()
    expected: list[bytes] = []
    attempts = 0
    for batch in range(data.draw(st.integers(1, 3))):
        rows = texts(data.draw(st.sampled_from([0, 1, 300, 2600])), batch * 10_000)
        while True:
            attempts += 1
            name = f"try-{attempts}"
            named = [NamedAttempt(name, 1, len(rows))] if rows else []
            if data.draw(st.booleans()):
                bench.kill(power=data.draw(st.booleans()))
                bench.wait(0)
            if not bench.hub.staging.is_committed(OWNER, batch, "") and rows:
                stage(bench, [send(row) for row in rows], attempt=name, batch=batch)
            if data.draw(st.booleans()):
                continue
            done = bench.hub.staging.commit(OWNER, batch, named, bench.now)
            for _ in range(4 - data.draw(st.integers(0, 4))):
                bench.commit()
            if done.receipt.done:
                break
            bench.kill(power=data.draw(st.booleans()))
            bench.wait(0)
        expected += rows
    assert payloads(bench) == expected
    assert (bench.hub.staging.attempts, bench.hub.staging.staged_bytes) == (0, 0)
