"""The ledger: a row for every step, in blocks, in memory and on disk."""

from __future__ import annotations

import tracemalloc
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.envelope import Envelope, decode
from crosswire.errors import RecordDamaged
from crosswire.hub.ledger import (
    NOBODY,
    Ledger,
    LedgerPeer,
    LedgerRun,
    Step,
    parse_block,
    serialize_block,
)
from crosswire.hub.policies import HubConfig, TopicPolicy
from tests.hub.parties import Bench, Caller, Recorder, Server, publish, send

IDS = st.lists(st.integers(1, 2**62), max_size=5)
RUNS = st.lists(
    st.builds(
        lambda time, step, name, peer, attempt, ids, counted, subscription: LedgerRun(
            1,
            time,
            step,
            name,
            LedgerPeer(*peer),
            attempt,
            name,
            array("q", ids),
            counted(ids),
            subscription,
        ),
        st.integers(0, 2**60),
        st.sampled_from(Step),
        st.text(max_size=8),
        st.tuples(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3)),
        st.integers(0, 1000),
        IDS,
        st.sampled_from([lambda ids: None, lambda ids: array("q", ids)]),
        st.text(max_size=3),
    ),
    max_size=6,
)


@given(RUNS)
def test_a_block_reads_back(runs: list[LedgerRun]) -> None:
    again = parse_block(100, serialize_block(runs))
    without_rows = [(*[getattr(run, n) for n in run.__struct_fields__[1:]],) for run in runs]
    assert [(*[getattr(run, n) for n in run.__struct_fields__[1:]],) for run in again] == (
        without_rows
    )
    rows = [row.seq for run in again for row in run.rows()]
    assert rows == list(range(100, 100 + len(rows)))


@given(st.binary(max_size=60))
def test_what_is_no_block_is_said_to_be_damaged(garbage: bytes) -> None:
    with pytest.raises(RecordDamaged):
        parse_block(1, garbage)


def test_a_message_can_be_followed() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, who="worker")
    ids = bench.produce(send(b"x"))
    consumer.refuse(ids, bench.now, cause="busy", delay_s=0)
    consumer.settle(ids, bench.now)
    rows = bench.hub.trace(ids[0])
    assert [(row.step, row.attempt, row.connection, row.detail) for row in rows] == [
        ("accepted", 0, "p", ""),
        ("delivered", 1, "worker", ""),
        ("refused", 1, "worker", "busy"),
        ("delivered", 2, "worker", ""),
        ("settled", 0, "worker", ""),
    ]


def test_a_step_names_its_subscription() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.subscribe("topic/t", taker, name="a.b", who="worker")
    bench.subscribe("topic/t", Recorder(), who="passer-by")
    (identifier,) = bench.produce(publish(b"x"))
    rows = bench.hub.trace(identifier)
    assert {(row.step, row.connection, row.subscription) for row in rows} == {
        ("accepted", "p", ""),
        ("delivered", "passer-by", ""),
        ("delivered", "worker", "a%2Eb"),
        ("settled", "worker", "a%2Eb"),
    }


def test_what_the_slow_read_from_disk_is_delivered_too() -> None:
    bench, slow = Bench(), Recorder()
    lagging = bench.subscribe("topic/#", slow, window=2, who="slow")
    ids = bench.produce(*(publish(b"%d" % n, topic=f"topic/{n % 2}") for n in range(5)))
    while len(slow.ids) < len(ids):
        lagging.settle(slow.ids[-2:], bench.now)
    steps = [
        [(row.destination, row.connection, row.attempt) for row in bench.hub.trace(identifier)][1:]
        for identifier in ids
    ]
    assert steps == [[(f"topic/{n % 2}", "slow", 1)] for n in range(5)]


def test_questions_by_destination_and_connection() -> None:
    bench = Bench()
    bench.consume("queue/q", Recorder(settles=True), who="worker", window=10)
    bench.produce(send(b"1"), send(b"2"), send(b"3", queue="queue/other"))
    ledger = bench.hub.ledger
    assert len(ledger.of_destination("queue/q")) == 6
    assert len(ledger.of_destination("queue/q", limit=2)) == 2
    assert {row.step for row in ledger.of_connection("worker")} == {"delivered", "settled"}
    assert len(ledger.of_connection("p")) == 3


def test_a_group_makes_one_block_and_rows_count_up() -> None:
    bench = Bench()
    bench.consume("queue/q", Recorder(settles=True), window=10)
    for _ in range(3):
        bench.produce(send(b"1"), send(b"2"))
    bench.commit()
    blocks = bench.store.blocks(0, 100)
    assert len(blocks) == bench.store.groups
    rows = [
        row for first, _, block in blocks for run in parse_block(first, block) for row in run.rows()
    ]
    assert [row.seq for row in rows] == list(range(1, 19))
    assert bench.store.next_row == 19


def test_recent_rows_are_bounded_and_come_back_after_a_restart() -> None:
    bench = Bench(HubConfig(recent_rows=50))
    for _ in range(30):
        ids = bench.produce(send(b"1"), send(b"2"), send(b"3"))
    assert sum(len(run.ids) for run in bench.hub.ledger.runs()) <= 53
    bench.kill()
    assert [row.step for row in bench.hub.trace(ids[0])] == ["accepted"]
    assert sum(len(run.ids) for run in bench.hub.ledger.runs()) <= 53


def test_reasons_that_peers_give_are_bounded_in_memory() -> None:
    ledger = Ledger(recent_bytes=1 << 20)

    def allocated_bytes(after: int) -> int:
        """With so many more refusals, each with a reason of its own."""
        for number in range(after):
            run = LedgerRun(1, 1 << 50, Step.REFUSED, "queue/q", NOBODY, 1, "", array("q", [1]))
            run = msgspec.structs.replace(run, detail=f"{number:06}{'x' * 994}")
            ledger.remember(1, serialize_block([run]))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        empty, filled, longer = allocated_bytes(0), allocated_bytes(2000), allocated_bytes(6000)
    finally:
        tracemalloc.stop()
    assert 1 << 19 < filled - empty < 3 << 19
    assert longer - filled < 100_000, "it grows with the number of messages"


def test_topics_that_are_not_durable_have_counts() -> None:
    bench = Bench(HubConfig(topic=TopicPolicy(durable=False)))
    for _ in range(3):
        bench.subscribe("topic/t", Recorder())
    bench.subscribe("topic/t", Recorder(), filter="n=N1")
    receipt = bench.hub.produce(
        [publish(b"1", properties={"n": 1}), publish(b"2", properties={"n": 2})], bench.now
    )
    counts = [[row.count for row in bench.hub.trace(each)] for each in receipt.ids]
    assert counts == [[4], [3]]


def test_or_a_row_for_every_delivery_on_request() -> None:
    bench = Bench(HubConfig(topic=TopicPolicy(durable=False, ledger="rows")))
    bench.subscribe("topic/t", Recorder(), who="one")
    bench.subscribe("topic/t", Recorder(), who="two")
    receipt = bench.hub.produce([publish(b"1")], bench.now)
    rows = bench.hub.trace(receipt.ids[0])
    assert {row.connection for row in rows if row.step == "delivered"} == {"one", "two"}


def test_a_group_that_failed_was_never_accepted() -> None:
    bench = Bench()
    ids = bench.produce(send(b"1"))
    bench.disk.room_bytes = 300
    consumer = bench.consume("queue/q", Recorder())
    consumer.settle(ids, bench.now)
    failed = bench.hub.produce([send(bytes(900))], bench.now)
    bench.commit()
    assert failed.error is not None
    assert bench.hub.trace(failed.ids[0]) == []
    bench.disk.room_bytes = 1 << 20
    bench.commit()
    assert [row.step for row in bench.hub.trace(ids[0])] == ["accepted", "delivered", "settled"]


def test_old_blocks_are_let_go() -> None:
    bench = Bench(HubConfig(ledger_rows=20))
    for _ in range(30):
        bench.produce(send(b"1"), send(b"2"))
    bench.wait(11)
    bench.commit()
    assert 20 <= sum(rows for _, rows, _ in bench.store.blocks(0, 1000)) <= 24


def test_an_empty_ledger_seals_nothing() -> None:
    assert Ledger().seal(1) is None


def test_the_lake_gets_every_stored_message_by_way_of_the_ledger() -> None:
    bench = Bench()
    ids = bench.produce(send(b"1"), publish(b"2"), send(b"3"))
    server, caller = Server(), Caller()
    peer = LedgerPeer("test", "s")
    bench.hub.provide(["service/s"], server, bench.now, peer=peer)
    request = Envelope(destination="service/s/m", kind="request", payload=b"4")
    bench.hub.call([request], bench.now, answered=caller, peer=peer)
    bench.commit()
    blocks = bench.store.blocks(0, 100)
    records = [bench.hub.seals.records_of(block) for *_, block in blocks]
    messages = [decode(record) for some in records for _, record in some]
    assert [each.id for each in messages] == [*ids, request.id]
    assert [each.payload for each in messages] == [b"1", b"2", b"3", b"4"]
