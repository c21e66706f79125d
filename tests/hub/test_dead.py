"""Dead letters: how messages get there, what they tell, and the way back."""

from __future__ import annotations

import pytest

from crosswire.access import subscription_dead_letters
from crosswire.envelope import NAME_BYTES
from crosswire.errors import InvalidDestination, UnknownMessage
from crosswire.hub.policies import HubConfig, QueuePolicy
from tests.hub.parties import Bench, Recorder, no_ids, publish, send

DEAD = "queue/q/dead"


def kill_message(bench: Bench, payload: bytes = b"x", **fields: object) -> int:
    """Have one refused until it is dead; gives the id it died with."""
    taker = Recorder()
    consumer = bench.consume("queue/q", taker, who="bad")
    ids = bench.produce(send(payload, **fields))
    for attempt in range(5):
        consumer.refuse(ids, bench.now, cause=f"cause {attempt + 1}", delay_s=0)
        bench.now += 1
    bench.commit()
    bench.commit()
    consumer.close(bench.now)
    return ids[0]


def test_after_five_attempts_it_is_dead_and_tells_why() -> None:
    bench = Bench()
    origin = kill_message(bench, properties={"mine": 1})
    assert bench.hub.queue("queue/q").length == 0
    (dead_letter,) = bench.hub.dead_letters.list(DEAD)
    assert (dead_letter.origin, dead_letter.origin_id, dead_letter.cause) == (
        "queue/q",
        origin,
        "cause 5",
    )
    assert [each.cause for each in dead_letter.attempts] == [f"cause {n}" for n in range(1, 6)]
    assert {each.connection for each in dead_letter.attempts} == {"bad"}
    properties = dead_letter.envelope.properties
    assert properties["dead-cause"] == "cause 5" and properties["dead-attempts"] == 5
    assert properties["dead-origin"] == "queue/q" and properties["mine"] == 1
    steps = [row.step for row in bench.hub.trace(origin)]
    assert steps.count("delivered") == 5 and steps[-1] == "dead"


def test_they_are_kept_while_no_ids_can_be_reserved() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    ids = bench.produce(send(b"x"))
    with no_ids(bench):
        consumer.refuse(ids, bench.now, final=True)
    bench.commit()
    bench.kill(power=True)
    (dead_letter,) = bench.hub.dead_letters.list(DEAD)
    assert dead_letter.origin_id == ids[0] and bench.hub.queue("queue/q").length == 0
    assert bench.produce(send(b"y"))[0] > dead_letter.id


def test_they_survive_a_restart_with_their_history() -> None:
    bench = Bench()
    origin = kill_message(bench)
    bench.kill(power=True)
    (dead_letter,) = bench.hub.dead_letters.list(DEAD)
    assert dead_letter.origin_id == origin and len(dead_letter.attempts) == 5
    assert bench.hub.queue("queue/q").length == 0


def test_a_dead_letter_queue_can_be_consumed_and_never_buries_again() -> None:
    bench, taker = Bench(), Recorder()
    kill_message(bench)
    consumer = bench.consume(DEAD, taker)
    for _ in range(20):
        consumer.refuse([taker.ids[-1]], bench.now, delay_s=0)
    assert len(taker.deliveries) == 21
    consumer.settle([taker.ids[-1]], bench.now)
    assert bench.hub.dead_letters.list(DEAD) == []


def test_replayed_it_is_as_it_was() -> None:
    bench, taker = Bench(), Recorder()
    kill_message(bench, b"again", properties={"mine": True})
    (dead_letter,) = bench.hub.dead_letters.list(DEAD)
    assert bench.hub.dead_letters.replay(DEAD, [dead_letter.id], bench.now) == [dead_letter.id]
    bench.commit()
    bench.kill(power=True)
    bench.consume("queue/q", taker)
    (delivery,) = taker.deliveries
    assert delivery.envelope.payload == b"again" and delivery.attempt == 1
    assert delivery.envelope.properties == {"mine": True} and delivery.envelope.native == {}
    assert bench.hub.dead_letters.list(DEAD) == []


def test_edited_and_replayed_to_somewhere_else() -> None:
    bench, taker = Bench(), Recorder()
    kill_message(bench, b"wrong")
    (dead_letter,) = bench.hub.dead_letters.list(DEAD)
    edited = bench.hub.dead_letters.edit(
        DEAD, dead_letter.id, payload=b"right", properties={"fixed": True}
    )
    assert edited.envelope.intact() and edited.cause == "cause 5"
    bench.commit()
    bench.kill(power=True)
    bench.hub.dead_letters.replay(DEAD, [dead_letter.id], bench.now, destination="queue/other")
    bench.commit()
    bench.consume("queue/other", taker)
    assert taker.payloads == [b"right"]
    assert taker.deliveries[0].envelope.properties == {"fixed": True}


def test_a_wrong_destination_leaves_it_where_it_is() -> None:
    bench = Bench()
    kill_message(bench)
    (dead_letter,) = bench.hub.dead_letters.list(DEAD)
    with pytest.raises(InvalidDestination):
        bench.hub.dead_letters.replay(DEAD, [dead_letter.id], bench.now, destination="nowhere")
    assert len(bench.hub.dead_letters.list(DEAD)) == 1
    with pytest.raises(UnknownMessage):
        bench.hub.dead_letters.get(DEAD, dead_letter.id + 1)


def test_lists_go_beyond_what_is_in_memory() -> None:
    bench = Bench(HubConfig(queue=QueuePolicy(window_messages=4)))
    queue = "queue/other"
    ids = bench.produce(*(send(b"%d" % each, queue=queue) for each in range(40)))
    dead_letters = bench.hub.dead_letters
    assert [each.id for each in dead_letters.list(queue, count=15)] == ids[:15]
    assert [each.id for each in dead_letters.list(queue, after=ids[14], count=100)] == ids[15:]
    assert dead_letters.purge(queue, [ids[0], ids[30]], bench.now) == [ids[0], ids[30]]
    taker = Recorder(settles=True)
    bench.commit()
    bench.kill(power=True)
    bench.consume(queue, taker, window=3)
    assert taker.ids == [each for each in ids if each not in (ids[0], ids[30])]


def test_a_subscriptions_dead_letters_have_its_name() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.subscribe("topic/t", taker, name="audit")
    bench.produce(publish(b"x"))
    for _ in range(5):
        consumer.refuse([taker.ids[-1]], bench.now, delay_s=0)
    bench.commit()
    (dead_letter,) = bench.hub.dead_letters.list("queue/@audit/dead")
    assert dead_letter.origin == "topic/t" and dead_letter.cause == "refused"


def test_a_full_disk_does_not_lose_the_dying() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    bench.disk.room_bytes = 1
    for _ in range(5):
        consumer.refuse([taker.ids[-1]], bench.now, delay_s=0)
        bench.commit()
    bench.disk.room_bytes = 1 << 20
    bench.commit()
    bench.kill(power=True)
    assert [each.envelope.payload for each in bench.hub.dead_letters.list(DEAD)] == [b"x"]
    assert bench.hub.queue("queue/q").length == 0


@pytest.mark.parametrize("name", ["@audit", "a//b", "+", "#", "/", "n" * 200])
def test_those_of_a_subscription_with_any_name(name: str) -> None:
    """Names of subscriptions are no names of destinations: they need not keep to their rules."""
    bench, taker = Bench(), Recorder()
    consumer = bench.subscribe("topic/t", taker, name=name)
    bench.produce(publish(b"x", "topic/t"))
    for _ in range(5):
        consumer.refuse([taker.ids[-1]], bench.now, delay_s=0)
        bench.now += 1
    bench.commit()
    bench.kill()
    queue = subscription_dead_letters("", name)
    (dead_letter,) = bench.hub.dead_letters.list(queue)
    assert dead_letter.origin == "topic/t"
    assert len(bench.hub.queues()) == 1
    consumer = bench.subscribe("topic/t", taker, name=name)
    assert bench.hub.dead_letters.replay(queue, [dead_letter.id], bench.now)


def test_those_of_a_queue_with_the_longest_name() -> None:
    queue = "queue/" + "q" * (NAME_BYTES - 6)
    bench, taker = Bench(), Recorder()
    consumer = bench.consume(queue, taker)
    bench.produce(send(b"x", queue))
    for _ in range(5):
        consumer.refuse([taker.ids[-1]], bench.now, delay_s=0)
        bench.now += 1
    bench.commit()
    (dead_letter,) = bench.hub.dead_letters.list(f"{queue}/dead")
    assert dead_letter.origin == queue


def test_names_of_an_earlier_version_stay() -> None:
    """Rules for names came later: what was made before can be used and listed."""
    bench, taker = Bench(), Recorder(settles=True)
    bench.hub.store.number("queue/a//b")
    bench.consume("queue/a//b", taker)
    bench.produce(send(b"x", "queue/a//b"))
    bench.commit()
    assert taker.payloads == [b"x"]
    assert [queue.destination for queue in bench.hub.queues()] == ["queue/a//b"]
    receipt = bench.hub.produce([send(b"x", "queue/@a")], bench.now)
    assert isinstance(receipt.refused[0], InvalidDestination)
    bench.hub.store.number("queue/@a/dead")
    receipt = bench.hub.produce([send(b"x", "queue/@a/dead")], bench.now)
    assert isinstance(receipt.refused[0], InvalidDestination)
