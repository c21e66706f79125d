"""Named subscriptions have an owner: by principal and name they are found, used and removed."""

from __future__ import annotations

import msgspec
import pytest

from crosswire.access import parse_subscription_dead_letters, subscription_dead_letters
from crosswire.errors import SubscriptionConflict, UnknownMessage
from crosswire.hub.attachment import Attachment
from crosswire.hub.ledger import LedgerPeer
from tests.hub.parties import Bench, Recorder, publish

ANNA = "queue/@anna.n/dead"


def subscribe(
    bench: Bench, owner: str, taker: Recorder, pattern: str = "topic/t", **options: object
) -> Attachment:
    return bench.hub.subscribe(
        pattern,
        taker,
        bench.now,
        peer=LedgerPeer("test", "c", owner),
        **{"name": "n", **options},  # type: ignore[arg-type]
    )


def owners(bench: Bench) -> list[tuple[str, str]]:
    return [(each.owner, each.name) for each in bench.hub.subscriptions.all()]


def bury(bench: Bench, taker: Recorder, consumer: Attachment) -> None:
    """Have its only message refused until it is dead."""
    consumer.refuse([taker.ids[-1]], bench.now, cause="no", final=True)
    bench.commit()


def test_two_users_have_a_subscription_of_the_same_name() -> None:
    bench, anna, bert = Bench(), Recorder(settles=True), Recorder(settles=True)
    subscribe(bench, "anna", anna).close(bench.now)
    subscribe(bench, "bert", bert, "topic/u", filter="a=N1").close(bench.now)
    bench.produce(publish(b"t"), publish(b"u", topic="topic/u", properties={"a": 1}))
    bench.kill(power=True)
    assert owners(bench) == [("anna", "n"), ("bert", "n")]
    subscribe(bench, "anna", anna)
    subscribe(bench, "bert", bert, "topic/u", filter="a=N1")
    assert (anna.payloads, bert.payloads) == ([b"t"], [b"u"])


def test_the_same_pattern_takes_nothing_from_another_user() -> None:
    bench, anna, bert = Bench(), Recorder(settles=True), Recorder(settles=True)
    subscribe(bench, "anna", anna).close(bench.now)
    bench.produce(publish(b"1"))
    subscribe(bench, "bert", bert)
    bench.produce(publish(b"2"))
    assert bert.payloads == [b"2"]
    subscribe(bench, "anna", anna)
    assert anna.payloads == [b"1", b"2"]


def test_one_without_an_owner_is_nobodys_until_it_is_assigned() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.subscribe("topic/t", Recorder(), name="n").close(bench.now)
    bench.produce(publish(b"1"))
    subscribe(bench, "bert", taker).close(bench.now)
    assert taker.payloads == [], "it is another subscription"
    bench.hub.subscriptions.assign("n", "", "anna")
    bench.commit()
    bench.kill(power=True)
    assert owners(bench) == [("anna", "n"), ("bert", "n")]
    subscribe(bench, "anna", taker)
    assert taker.payloads == [b"1"]


def test_after_it_was_assigned_the_name_is_free_again() -> None:
    bench = Bench()
    bench.subscribe("topic/t", Recorder(), name="n").close(bench.now)
    bench.hub.subscriptions.assign("n", "", "anna")
    bench.subscribe("topic/u", Recorder(), name="n").close(bench.now)
    bench.produce(publish(b"t"), publish(b"u", topic="topic/u"))
    bench.kill(power=True)
    taker = Recorder(settles=True)
    bench.subscribe("topic/u", taker, name="n").close(bench.now)
    assert taker.take() == [b"u"]
    subscribe(bench, "anna", taker)
    assert taker.take() == [b"t"]


def test_what_can_not_be_assigned() -> None:
    bench = Bench()
    consumer = subscribe(bench, "anna", Recorder())
    subscriptions = bench.hub.subscriptions
    with pytest.raises(UnknownMessage):
        subscriptions.assign("n", "", "bert")
    with pytest.raises(SubscriptionConflict, match="in use"):
        subscriptions.assign("n", "anna", "bert")
    consumer.close(bench.now)
    subscribe(bench, "bert", Recorder()).close(bench.now)
    with pytest.raises(SubscriptionConflict, match="already"):
        subscriptions.assign("n", "anna", "bert")
    assert owners(bench) == [("anna", "n"), ("bert", "n")]


def test_removing_one_leaves_those_of_others() -> None:
    bench = Bench()
    subscribe(bench, "anna", Recorder()).close(bench.now)
    subscribe(bench, "bert", Recorder()).close(bench.now)
    bench.commit()
    with pytest.raises(UnknownMessage):
        bench.hub.subscriptions.remove("n")
    bench.hub.subscriptions.remove("n", "anna")
    bench.commit()
    bench.kill(power=True)
    assert owners(bench) == [("bert", "n")]


def test_a_record_of_before_there_were_owners_is_read() -> None:
    bench = Bench()
    bench.subscribe("topic/t", Recorder(), name="n").close(bench.now)
    bench.produce(publish(b"1"))
    ((key, record),) = bench.store.load("subscription")
    fields = msgspec.msgpack.decode(record)
    assert (key, fields[-1]) == (b"n", "")
    bench.store.save("subscription", key, msgspec.msgpack.encode(fields[:-1]))
    bench.hub.commits.request()
    bench.commit()
    bench.kill()
    assert not bench.hub.reports and owners(bench) == [("", "n")]
    taker = Recorder(settles=True)
    bench.subscribe("topic/t", taker, name="n")
    assert taker.payloads == [b"1"]


@pytest.mark.parametrize(
    ("owner", "name", "queue"),
    [
        ("", "n", "queue/@n/dead"),
        ("anna", "n", "queue/@anna.n/dead"),
        ("a.b", "c/d e", "queue/@a%2Eb.c%2Fd%20e/dead"),
        ("", "a.n", "queue/@a%2En/dead"),
        ("ä", "%", "queue/@%C3%A4.%25/dead"),
    ],
)
def test_the_queue_of_dead_letters_names_owner_and_subscription(
    owner: str, name: str, queue: str
) -> None:
    assert subscription_dead_letters(owner, name) == queue
    assert parse_subscription_dead_letters(queue) == (owner, name)
    assert parse_subscription_dead_letters("queue/n/dead") is None


def test_a_replay_returns_to_that_subscription_alone() -> None:
    bench, anna, bert, other = Bench(), Recorder(), Recorder(settles=True), Recorder(settles=True)
    consumer = subscribe(bench, "anna", anna)
    subscribe(bench, "bert", bert)
    bench.subscribe("topic/#", other)
    bench.produce(publish(b"x"))
    bury(bench, anna, consumer)
    (dead_letter,) = bench.hub.dead_letters.list(ANNA)
    assert bench.hub.dead_letters.replay(ANNA, [dead_letter.id], bench.now) == [dead_letter.id]
    bench.commit()
    assert anna.payloads == [b"x", b"x"]
    assert anna.deliveries[-1].envelope.destination == "topic/t"
    assert (bert.payloads, other.payloads) == ([b"x"], [b"x"])
    consumer.settle(anna.ids, bench.now)
    bench.commit()
    # Those that read the topic's log from disk don't get it either.
    late, named = Recorder(settles=True), Recorder(settles=True)
    bench.subscribe("topic/t", late, start="earliest")
    subscribe(bench, "carl", named, start="earliest")
    assert (late.payloads, named.payloads) == ([b"x"], [b"x"])


def test_a_replay_survives_a_restart_and_ignores_the_filter() -> None:
    bench, anna, bert = Bench(), Recorder(), Recorder(settles=True)
    consumer = subscribe(bench, "anna", anna, filter="a=N1")
    subscribe(bench, "bert", bert).close(bench.now)
    bench.produce(publish(b"x", properties={"a": 1}))
    bury(bench, anna, consumer)
    consumer.close(bench.now)
    (dead_letter,) = bench.hub.dead_letters.list(ANNA)
    bench.hub.dead_letters.edit(ANNA, dead_letter.id, properties={"a": 2})
    bench.hub.dead_letters.replay(ANNA, [dead_letter.id], bench.now)
    bench.commit()
    bench.kill(power=True)
    again = Recorder()
    consumer = subscribe(bench, "anna", again, filter="a=N1")
    subscribe(bench, "bert", bert)
    assert (again.payloads, bert.payloads) == ([b"x"], [b"x"])
    bury(bench, again, consumer)
    (dead_letter,) = bench.hub.dead_letters.list(ANNA)
    bench.hub.dead_letters.replay(ANNA, [dead_letter.id], bench.now, destination="topic/t")
    bench.commit()
    assert bert.payloads == [b"x", b"x"], "sent to the topic, it is for all"


def test_dead_letters_of_a_subscription_that_is_gone_need_a_destination() -> None:
    bench, anna = Bench(), Recorder()
    consumer = subscribe(bench, "anna", anna)
    bench.produce(publish(b"x"))
    bury(bench, anna, consumer)
    consumer.close(bench.now)
    bench.hub.subscriptions.remove("n", "anna")
    (dead_letter,) = bench.hub.dead_letters.list(ANNA)
    with pytest.raises(UnknownMessage, match="is gone: choose a destination"):
        bench.hub.dead_letters.replay(ANNA, [dead_letter.id], bench.now)
    bench.hub.dead_letters.replay(ANNA, [dead_letter.id], bench.now, destination="queue/q")
    bench.commit()
    taker = Recorder()
    bench.consume("queue/q", taker)
    assert taker.payloads == [b"x"]
