"""Queues: order, windows, retries, leases, limits, and what a restart leaves of them."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from crosswire.errors import DestinationFull, InvalidDestination, InvalidEnvelope, StoreFull
from crosswire.hub.attachment import Window
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import Step
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry
from crosswire.hub.seals import Seal
from tests.hub.parties import Bench, Recorder, no_ids, send
from tests.store.busy import BusyStore


def numbered(count: int, **fields: object) -> list:  # type: ignore[type-arg]
    return [send(b"%d" % each, **fields) for each in range(count)]


def payloads(count: int) -> list[bytes]:
    return [b"%d" % each for each in range(count)]


# ------------------------------------------------------------------------------------- the basics


def test_messages_come_in_order_in_one_call() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker, window=100)
    bench.produce(*numbered(10))
    assert taker.payloads == payloads(10)
    assert taker.calls == 1


def test_a_durable_message_is_seen_when_it_is_committed_and_not_before() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker)
    receipt = bench.hub.produce([send(b"x")], bench.now)
    assert not receipt.done and not taker.deliveries
    bench.commit()
    assert receipt.done and taker.payloads == [b"x"]


def test_messages_that_only_arrive_do_not_save_the_cursor_again() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.consume("queue/q", taker)
    cursor = bench.hub.queue("queue/q").cursor

    def saved() -> bytes | None:
        return bench.hub.store.get("cursor", cursor.key)

    bench.produce(send(b"1"))
    bench.commit()
    before = saved()
    assert before is not None
    taker.settles = False
    bench.produce(send(b"2"))
    assert saved() == before
    bench.kill()
    again = Recorder(settles=True)
    bench.consume("queue/q", again)
    assert again.payloads == [b"2"]
    bench.commit()
    assert saved() != before


def test_one_that_need_not_be_durable_is_seen_at_once() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker)
    receipt = bench.hub.produce([send(b"x", durable=False)], bench.now)
    assert receipt.done and taker.payloads == [b"x"]
    bench.commit()
    bench.kill()
    again = Recorder()
    bench.consume("queue/q", again)
    assert again.payloads == [b"x"]


def test_one_that_need_not_be_durable_does_not_overtake() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker, window=10)
    bench.hub.produce([send(b"1")], bench.now)
    bench.hub.produce([send(b"2", durable=False)], bench.now)
    assert not taker.deliveries
    bench.commit()
    assert taker.payloads == [b"1", b"2"]


def test_the_hub_stamps_what_it_accepts() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker, window=2)
    ids = bench.produce(*numbered(2))
    envelopes = [each.envelope for each in taker.deliveries]
    assert [each.id for each in envelopes] == ids and ids[0] < ids[1]
    assert {each.node for each in envelopes} == {bench.hub.node}
    assert {each.time for each in envelopes} == {int(bench.now * 1_000_000)}


def test_an_envelope_that_is_given_twice_is_two_messages() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker, window=10)
    envelope = send(b"1")
    ids = bench.produce(envelope, envelope, send(b"2"))
    ids += bench.produce(envelope)
    bench.hub.inject(envelope, bench.now)
    bench.commit()
    assert taker.payloads == [b"1", b"1", b"2", b"1", b"1"]
    assert taker.ids[:4] == ids and len(set(taker.ids)) == 5
    assert envelope.id == ids[0]
    stored = bench.hub.fetch("queue/q", taker.ids)
    assert [each.id for each in stored if each is not None] == taker.ids


async def test_what_is_written_does_not_wait_for_the_disk() -> None:
    store = BusyStore()
    hub = Hub(store, now=0.0, random=Random(1))
    store.reserve(1)
    hub.commits.start(asyncio.get_running_loop())
    store.is_busy = True
    stored = hub.produce([send()], 0.0)
    written = hub.written()
    await asyncio.wait_for(written, 10)
    assert not stored.done
    store.may_end.set()
    assert await asyncio.wait_for(stored, 10) == stored.ids
    await hub.commits.close()


def test_there_may_be_nothing_to_write() -> None:
    bench = Bench()
    bench.commit()
    written = bench.hub.written()
    bench.hub.commits.commit_now()
    assert written.done and written.error is None


@pytest.mark.parametrize("power", [False, True])
def test_what_is_settled_does_not_come_back(power: bool) -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.consume("queue/q", taker, window=10)
    ids = bench.produce(*numbered(3))
    assert taker.ids == ids
    bench.commit()
    bench.kill(power=power)
    assert bench.hub.queue("queue/q").length == 0
    assert bench.hub.queue("queue/q").browse(0, 10) == []


@pytest.mark.parametrize("power", [False, True])
def test_what_is_settled_is_on_disk_with_what_was_sent_after_it(power: bool) -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, window=1)
    ids = bench.produce(*numbered(2))
    consumer.settle(ids[:1], bench.now)
    ids += bench.produce(send(b"3"))
    bench.kill(power=power)
    assert [each.id for each in bench.hub.queue("queue/q").browse(0, 10)] == ids[1:]


def test_a_batch_may_be_for_many_and_part_of_it_refused() -> None:
    bench = Bench()
    receipt = bench.hub.produce(
        [
            send(b"1", queue="queue/a"),
            send(b"2", queue="nowhere"),
            send(b"3", queue="queue/a", properties={"big": 1 << 70}),
            send(b"4", queue="queue/b"),
        ],
        bench.now,
    )
    bench.commit()
    assert [bool(each) for each in receipt.ids] == [True, False, False, True]
    assert isinstance(receipt.refused[1], InvalidDestination)
    assert isinstance(receipt.refused[2], InvalidEnvelope)
    assert bench.hub.queue("queue/a").length == bench.hub.queue("queue/b").length == 1


async def test_a_receipt_can_be_awaited() -> None:
    bench = Bench()
    receipt = bench.hub.produce(numbered(3), bench.now)
    bench.commit()
    assert await receipt == receipt.ids


# ----------------------------------------------------------------------------- windows and fairness


def test_a_window_bounds_what_is_on_its_way() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, window=3)
    bench.produce(*numbered(5))
    assert taker.payloads == payloads(3)
    assert consumer.settle(taker.ids[:2], bench.now) == 2
    assert taker.payloads == payloads(5)


def test_a_granted_window_does_not_grow_by_settling() -> None:
    bench, taker = Bench(), Recorder()
    window = Window(1, granted=True)
    consumer = bench.consume("queue/q", taker, window=window)
    bench.produce(*numbered(3))
    consumer.settle(taker.ids, bench.now)
    assert taker.payloads == payloads(1)
    window.grant(1, bench.now)
    assert taker.payloads == payloads(2)


def test_a_window_shared_by_queues_serves_the_weightier_first() -> None:
    bench, taker = Bench(), Recorder()
    window = Window(0, granted=True)
    bench.consume("queue/light", taker, window=window, weight=1)
    bench.consume("queue/heavy", taker, window=window, weight=9)
    bench.produce(send(b"light", queue="queue/light"), send(b"heavy", queue="queue/heavy"))
    window.grant(1, bench.now)
    assert taker.payloads == [b"heavy"]
    window.grant(1, bench.now)
    assert taker.payloads == [b"heavy", b"light"]


def test_equals_take_turns_by_least_recent_use() -> None:
    bench = Bench()
    takers = [Recorder() for _ in range(3)]
    for taker in takers:
        bench.consume("queue/q", taker, window=100)
    bench.produce(*numbered(6))
    assert [len(taker.deliveries) for taker in takers] == [2, 2, 2]
    bench.produce(*numbered(1))
    bench.produce(*numbered(1))
    assert sorted(len(taker.deliveries) for taker in takers) == [2, 3, 3]


def test_the_weightier_is_filled_first() -> None:
    bench, light, heavy = Bench(), Recorder(), Recorder()
    bench.consume("queue/q", light, window=100, weight=5)
    bench.consume("queue/q", heavy, window=4, weight=50)
    bench.produce(*numbered(6))
    assert (len(heavy.deliveries), len(light.deliveries)) == (4, 2)


def test_a_filter_passes_over_what_others_may_want() -> None:
    bench, red, any_colour = Bench(), Recorder(), Recorder()
    bench.consume("queue/q", red, window=10, filter="colour=Tred")
    bench.produce(
        send(b"blue", properties={"colour": "blue"}), send(b"red", properties={"colour": "red"})
    )
    assert red.payloads == [b"red"]
    bench.consume("queue/q", any_colour, window=10)
    assert any_colour.payloads == [b"blue"]


# -------------------------------------------------------------------------------------- retries


def test_a_refused_message_comes_again_later_and_later() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    delays = []
    for _ in range(4):
        consumer.refuse([taker.ids[-1]], bench.now, cause="no")
        before, seen = bench.now, len(taker.deliveries)
        while len(taker.deliveries) == seen:
            bench.wait(0.005)
        delays.append(bench.now - before)
    assert [each.attempt for each in taker.deliveries] == [1, 2, 3, 4, 5]
    for delay, longest in zip(delays, (0.1, 0.2, 0.4, 0.8), strict=True):
        assert 0.8 * longest - 0.001 <= delay <= longest + 0.006


def test_delays_have_a_cap() -> None:
    retry = Retry(max_attempts=0)
    assert retry.delay_s(1, 0.0) == 0.1
    assert retry.delay_s(100, 0.0) == 60.0
    assert retry.delay_s(100, 0.999) < 60.0


def test_a_refusal_may_name_its_delay() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    consumer.refuse(taker.ids, bench.now, delay_s=0)
    assert len(taker.deliveries) == 2


def test_who_leaves_gives_back_at_once_and_in_order() -> None:
    bench, first, second = Bench(), Recorder(), Recorder()
    consumer = bench.consume("queue/q", first, window=3)
    bench.produce(*numbered(5))
    consumer.close(bench.now)
    bench.consume("queue/q", second, window=10)
    assert second.payloads == payloads(5)
    assert [each.attempt for each in second.deliveries] == [2, 2, 2, 1, 1]


def test_a_settlement_that_comes_too_late_is_ignored() -> None:
    bench, first, second = Bench(), Recorder(), Recorder()
    consumer = bench.consume("queue/q", first)
    bench.produce(send(b"x"))
    consumer.close(bench.now)
    bench.consume("queue/q", second)
    assert consumer.settle(first.ids, bench.now) == 0
    assert bench.hub.queue("queue/q").length == 1


def test_without_a_lease_a_message_stays_with_its_consumer() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    bench.wait(100_000)
    assert len(taker.deliveries) == 1


def test_a_lease_runs_out_unless_it_is_extended() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, lease_s=10.0)
    bench.produce(send(b"x"))
    bench.wait(8)
    assert consumer.extend(taker.ids, bench.now, 10.0) == 1
    bench.wait(8)
    assert len(taker.deliveries) == 1
    bench.wait(3)
    assert [each.attempt for each in taker.deliveries] == [1, 2]


@pytest.mark.parametrize("leases", [(10.0, 2.0), (2.0, 10.0, 3.0), (9.0, 1.0, 20.0, 3.0)])
def test_the_last_extension_counts(leases: tuple[float, ...]) -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, lease_s=5.0)
    bench.produce(send(b"x"))
    for lease_s in leases:
        consumer.extend(taker.ids, bench.now, lease_s)
    bench.wait(leases[-1] - 0.1)
    assert len(taker.deliveries) == 1
    bench.wait(0.5)
    assert [each.attempt for each in taker.deliveries] == [1, 2]


def test_a_lease_of_a_consumer_without_one() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    consumer.extend(taker.ids, bench.now, 5.0)
    bench.wait(5.5)
    assert [each.attempt for each in taker.deliveries] == [1, 2]
    # That one has none again.
    bench.wait(100)
    assert len(taker.deliveries) == 2


def test_extensions_cost_nothing_that_stays() -> None:
    """One message may be extended ten thousand times by one request, and at any time."""
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    for lease_s in (100.0, 50.0, 60.0, 20.0) * 1000:
        consumer.extend(taker.ids * 10, bench.now, lease_s)
    queue = bench.hub.queue("queue/q")
    assert len(queue._retries._leases) <= 2 * 1024
    bench.wait(21)
    assert [each.attempt for each in taker.deliveries] == [1, 2]


def test_reasons_of_refusals_are_short_where_there_are_many() -> None:
    """They are in every snapshot, for each message; the ledger has all of it."""
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, window=10_000)
    bench.produce(*numbered(3000))
    consumer.refuse(taker.ids, bench.now, cause="x" * 1000, delay_s=100.0)
    bench.commit()
    kept = [each.attempts for each in bench.hub.queue("queue/q").memory.items.values()]
    assert len(kept) == 3000
    assert sum(len(attempt.cause) for [attempt] in kept) < 300_000


def test_one_refusal_has_its_whole_reason() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    consumer.refuse(taker.ids, bench.now, cause="x" * 1000, delay_s=0.0)
    [item] = bench.hub.queue("queue/q").memory.items.values()
    assert item.attempts[0].cause == "x" * 1000


def test_attempts_survive_a_restart() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    for _ in range(2):
        consumer.refuse([taker.ids[-1]], bench.now, delay_s=0)
    bench.commit()
    bench.kill(power=True)
    again = Recorder()
    bench.consume("queue/q", again)
    assert [each.attempt for each in again.deliveries] == [3]


# --------------------------------------------------------------------------------------- limits


def limited(**policy: object) -> Bench:
    return Bench(HubConfig(queue=QueuePolicy(**policy)))  # type: ignore[arg-type]


def test_a_full_queue_refuses_and_takes_again() -> None:
    bench = limited(max_length=3)
    receipt = bench.hub.produce(numbered(5), bench.now)
    bench.commit()
    assert [bool(each) for each in receipt.ids] == [True] * 3 + [False] * 2
    assert all(isinstance(error, DestinationFull) for error in receipt.refused.values())
    bench.consume("queue/q", Recorder(settles=True), window=1)
    assert all(bench.produce(*numbered(3)))


def test_bytes_are_limited_too() -> None:
    bench = limited(max_bytes=1000)
    receipt = bench.hub.produce([send(bytes(300)) for _ in range(5)], bench.now)
    bench.commit()
    assert sum(map(bool, receipt.ids)) == 2
    assert bench.hub.queue("queue/q").size_bytes <= 1000


def test_drop_oldest_keeps_the_newest() -> None:
    bench = limited(max_length=3, overflow="drop-oldest")
    for each in numbered(6):
        bench.produce(each)
    taker = Recorder()
    bench.consume("queue/q", taker, window=10)
    assert taker.payloads == [b"3", b"4", b"5"]


def test_what_expired_is_not_delivered() -> None:
    bench, taker = limited(ttl_s=5.0), Recorder()
    ids = bench.produce(send(b"old"))
    bench.wait(6)
    bench.produce(send(b"new"))
    bench.consume("queue/q", taker, window=10)
    assert taker.payloads == [b"new"]
    assert [row.step for row in bench.hub.trace(ids[0])] == ["accepted", "expired"]


def test_expiry_needs_no_consumer() -> None:
    bench = limited(ttl_s=5.0)
    bench.produce(*numbered(2000))
    bench.wait(6)
    assert bench.hub.queue("queue/q").length == 0


# -------------------------------------------------------------------------------- memory and disk


def test_beyond_the_window_messages_are_on_disk_only() -> None:
    bench, taker = limited(window_messages=20), Recorder(settles=True)
    bench.produce(*numbered(500))
    queue = bench.hub.queue("queue/q")
    assert len(queue.memory.items) <= 20 and queue.length == 500
    bench.consume("queue/q", taker, window=7)
    assert taker.payloads == payloads(500)
    assert queue.length == 0


def test_large_messages_are_bounded_by_bytes() -> None:
    bench = limited(window_bytes=10_000)
    bench.produce(*(send(bytes(1000)) for _ in range(100)))
    queue = bench.hub.queue("queue/q")
    assert queue.memory.size_bytes <= 11_100
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=3)
    assert len(taker.deliveries) == 100


def test_a_restart_gives_back_what_was_not_settled() -> None:
    bench, taker = limited(window_messages=16), Recorder()
    consumer = bench.consume("queue/q", taker, window=40)
    bench.produce(*numbered(100))
    consumer.settle(taker.ids[1::2], bench.now)
    bench.commit()
    settled = {int(each) for each in taker.payloads[1:40:2]}
    bench.kill(power=True)
    again = Recorder(settles=True)
    bench.consume("queue/q", again, window=9)
    assert sorted(int(each) for each in again.payloads) == sorted(set(range(100)) - settled)
    assert bench.hub.queue("queue/q").length == 0


def test_many_restarts_and_snapshots_forget_nothing() -> None:
    bench = limited(window_messages=64)
    left: set[int] = set()
    for life in range(6):
        batch = [send(b"%d" % (life * 3000 + each)) for each in range(3000)]
        bench.produce(*batch)
        left |= set(range(life * 3000, life * 3000 + 3000))
        taker = Recorder()
        consumer = bench.consume("queue/q", taker, window=50)
        for _ in range(60):
            chosen = [each for each in consumer.held if each % 7]
            keys = {int(consumer.held[each].envelope.payload) for each in chosen}
            if not chosen:
                break
            consumer.settle(chosen, bench.now)
            left -= keys
            bench.commit()
        bench.kill(power=True)
        assert bench.hub.queue("queue/q").length == len(left)
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=100)
    assert sorted(int(each) for each in taker.payloads) == sorted(left)


def test_settled_messages_are_reclaimed() -> None:
    bench = Bench()
    bench.consume("queue/q", Recorder(settles=True), window=100)
    bench.produce(*numbered(200))
    bench.commit()
    bench.wait(11)
    bench.commit()
    assert not [key for key in bench.disk.keys if key.startswith(b"m")]


def test_with_a_lake_only_what_is_sealed_is_reclaimed() -> None:
    bench = Bench(HubConfig(lake=True))
    bench.consume("queue/q", Recorder(settles=True), window=100)
    ids = bench.produce(*numbered(200))
    bench.commit()
    bench.wait(11)
    bench.commit()
    assert len([key for key in bench.disk.keys if key.startswith(b"m")]) == 200
    seal = Seal(first_row=1, last_row=1, first_seq=1, last_seq=150, newest=ids[149])
    bench.hub.seals.save(seal)
    bench.commit()
    bench.hub.seals.release(seal)
    bench.wait(11)
    bench.commit()
    assert len([key for key in bench.disk.keys if key.startswith(b"m")]) == 50
    assert bench.hub.seals.last() == seal


def test_a_peer_keeps_what_it_held_across_a_restart() -> None:
    bench, taker = limited(window_messages=8), Recorder()
    bench.consume("queue/q", taker, window=12)
    bench.produce(*numbered(30))
    held = taker.ids[3:12:2]
    bench.kill()
    owner, other = Recorder(), Recorder(settles=True)
    consumer = bench.consume("queue/q", owner, window=5, holding=held)
    bench.consume("queue/q", other, window=100)
    assert owner.deliveries == []
    assert len(other.deliveries) == 25 and not set(other.ids) & set(held)
    assert consumer.settle(held, bench.now) == 5
    assert bench.hub.queue("queue/q").length == 0


def test_settled_ids_whose_messages_are_deleted_are_not_kept() -> None:
    """They are on no page that is read: when all is read, they are forgotten all the same."""
    bench = limited(window_messages=2)
    ids = bench.produce(*numbered(6))
    queue = bench.hub.queue("queue/q")
    queue.remove(ids[4:], Step.DROPPED, bench.now)
    assert queue.cursor.later == set(ids[4:])
    for key in [each for each in bench.disk.keys if each[:1] == b"m"][4:]:
        bench.disk.keys.remove(key)
        del bench.disk.rows[key]
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=10)
    assert taker.ids == ids[:4]
    assert not queue.cursor.later


def test_what_a_peer_held_is_all_that_is_read_for_it_after_a_restart() -> None:
    """Not a page beyond it, whatever the window of the queue."""
    bench, taker = limited(window_messages=8), Recorder()
    bench.consume("queue/q", taker, window=2)
    bench.produce(*numbered(200))
    bench.kill()
    bench.consume("queue/q", Recorder(), window=2, holding=taker.ids)
    memory = bench.hub.queue("queue/q").memory
    assert len(memory.items) <= 2 + 8


def test_the_report_of_a_missing_message_waits_for_no_other_commit() -> None:
    bench = Bench()
    (identifier,) = bench.produce(send(b"x"))
    assert not bench.store.group.sync
    bench.hub.damage.report_missing(bench.store.number("queue/q"), identifier, 0)
    assert bench.store.group.sync
    bench.commit()
    bench.kill()
    assert [row.step for row in bench.hub.trace(identifier)] == ["accepted", "damaged"]


def test_producers_are_refused_while_no_ids_can_be_reserved() -> None:
    bench = Bench()
    (before,) = bench.produce(send(b"before"))
    with no_ids(bench):
        receipt = bench.hub.produce([send(b"x"), send(b"y")], bench.now)
        assert receipt.done and receipt.ids == [0, 0]
        assert [type(receipt.refused[index]) for index in (0, 1)] == [StoreFull, StoreFull]
    (after,) = bench.produce(send(b"after"))
    assert after > before and bench.hub.queue("queue/q").length == 2


def test_a_full_disk_stops_producers_only() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.produce(*numbered(3))
    bench.disk.room_bytes = 500
    failed = bench.hub.produce([send(bytes(600))], bench.now)
    bench.commit()
    assert isinstance(failed.error, StoreFull)
    assert bench.hub.queue("queue/q").length == 3
    bench.consume("queue/q", taker, window=1)
    assert taker.payloads == payloads(3)
    refused = bench.hub.produce([send(b"x")], bench.now)
    assert isinstance(refused.refused[0], StoreFull)
    bench.disk.room_bytes = 1 << 20
    bench.commit()
    bench.now += 1
    assert all(bench.produce(send(b"again")))
    assert taker.payloads[-1] == b"again"
    bench.commit()
    bench.kill(power=True)
    assert bench.hub.queue("queue/q").length == 0


def test_purging_leaves_what_consumers_hold() -> None:
    bench, taker = limited(window_messages=16), Recorder()
    consumer = bench.consume("queue/q", taker, window=2)
    bench.produce(*numbered(100))
    queue = bench.hub.queue("queue/q")
    queue.purge(bench.now)
    assert queue.length == 2
    consumer.settle(taker.ids, bench.now)
    bench.commit()
    bench.kill(power=True)
    assert bench.hub.queue("queue/q").length == 0


@pytest.mark.parametrize("destination", ["topic/t", "service/s", "queue/", "queue", "q", ""])
def test_only_queues_are_consumed(destination: str) -> None:
    with pytest.raises(InvalidDestination):
        Bench().consume(destination, Recorder())


def test_a_damaged_cursor_stops_its_own_queue_alone() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker, window=10)
    bench.produce(*numbered(5))
    consumer.settle(taker.ids[:2], bench.now)
    bench.commit()
    (key,) = [key for key in bench.disk.keys if b"change/" in key]
    bench.disk.rows[key] = b"\xc1"
    bench.kill()
    again = Recorder()
    bench.consume("queue/q", again, window=10)
    assert again.payloads == [], "nobody knows what is settled"
    assert len(bench.hub.reports) == 1
    assert [each.title for each in bench.hub.stopped()] == ["queue/q"]
    bench.produce(*numbered(3))
    bench.produce(*numbered(1, queue="queue/other"))
    bench.consume("queue/other", again, window=10)
    bench.commit()
    assert again.payloads == payloads(1)
    bench.kill()
    assert len(bench.hub.queue("queue/q").stopped) > 0, "nothing of it was written"


def test_a_snapshot_remembers_what_is_settled_behind_it() -> None:
    bench, taker = limited(window_messages=16), Recorder()
    consumer = bench.consume("queue/q", taker, window=600)
    bench.produce(*numbered(1000))
    consumer.settle(taker.ids[300:600], bench.now)
    bench.commit()
    bench.kill(power=True)
    queue = bench.hub.queue("queue/q")
    assert queue.cursor.later
    queue.snapshot()
    bench.commit()
    bench.kill(power=True)
    again = Recorder(settles=True)
    bench.consume("queue/q", again, window=100)
    assert again.payloads == payloads(1000)[:300] + payloads(1000)[600:]
