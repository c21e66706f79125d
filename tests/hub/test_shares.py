"""What one user may have of destinations, subscriptions and schedules; others keep theirs."""

from __future__ import annotations

import pytest

from crosswire.envelope import Envelope
from crosswire.errors import DestinationFull, InvalidEnvelope, QuotaExceeded, StagingFull
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, pack
from crosswire.hub.ingest.staging import PART_NAMES
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, ServicePolicy, StagingLimits
from crosswire.hub.schedules import Schedule
from crosswire.hub.shares import holder_of_address
from crosswire.store.contract import StoreLimits
from tests.hub.parties import Bench, Caller, Recorder, Server, send

LIMITS = StoreLimits(destinations=40)
CONFIG = HubConfig(subscriptions=40, schedules=40)
EACH = 10
ANNA, BERT = LedgerPeer(principal="anna"), LedgerPeer(principal="bert")


def start() -> Bench:
    return Bench(CONFIG, limits=LIMITS)


def refused(bench: Bench, peer: LedgerPeer, name: str) -> bool:
    message = send(b"", f"queue/{name}", principal=peer.principal)
    receipt = bench.hub.produce([message], bench.now)
    bench.commit()
    return isinstance(receipt.refused.get(0), DestinationFull)


def fill(bench: Bench, peer: LedgerPeer) -> None:
    for number in range(EACH):
        assert not refused(bench, peer, f"{peer.principal}/{number}")


def test_who_has_its_share_of_destinations_gets_no_more_and_others_do() -> None:
    bench = start()
    fill(bench, ANNA)
    assert refused(bench, ANNA, "more")
    with pytest.raises(DestinationFull):
        bench.hub.consume("queue/more", Recorder(), bench.now, peer=ANNA)
    assert not refused(bench, ANNA, "anna/0")
    fill(bench, BERT)
    assert not refused(bench, ANNA, "bert/0")


def test_a_restart_gives_nobody_another_share() -> None:
    bench = start()
    fill(bench, ANNA)
    bench.kill(power=True)
    assert refused(bench, ANNA, "more")
    assert not refused(bench, BERT, "more")


def test_a_removed_destination_makes_room() -> None:
    bench = start()
    fill(bench, ANNA)
    bench.hub.queue("queue/anna/3").purge(bench.now)
    bench.commit()
    bench.hub.remove("queue/anna/3", bench.now)
    assert not refused(bench, ANNA, "more")
    assert refused(bench, ANNA, "again")


def test_without_users_all_may_be_used() -> None:
    bench = start()
    for number in range(LIMITS.destinations):
        assert not refused(bench, LedgerPeer(), str(number))
    assert refused(bench, LedgerPeer(), "more")


def test_a_staged_batch_counts() -> None:
    bench = start()
    owner = ProducerKey("anna", "p")
    batch = [send(b"", f"queue/{number}", principal="anna") for number in range(EACH + 1)]
    with pytest.raises(DestinationFull):
        bench.hub.staging.stage(owner, 1, "a", 0, pack(batch), bench.now)
    bench.hub.staging.stage(owner, 1, "a", 0, pack(batch[:EACH]), bench.now)
    bench.commit()
    bench.hub.staging.commit(owner, 1, [NamedAttempt("a", 1, EACH)], bench.now)
    assert refused(bench, ANNA, "more")


def test_services_count_for_who_provides_them() -> None:
    bench = start()
    names = [f"service/{number}" for number in range(EACH + 1)]
    bench.hub.provide(names, Server(), bench.now, peer=ANNA)
    calls = [Envelope(destination=name, kind="request", payload=b"") for name in names]
    bench.hub.call(calls, bench.now, answered=Caller(), peer=BERT)
    assert len(bench.store.destinations()) == EACH
    assert refused(bench, ANNA, "more")
    assert not refused(bench, BERT, "more")


def test_named_subscriptions() -> None:
    bench = start()

    def subscribe(peer: LedgerPeer, name: str) -> None:
        bench.hub.subscribe("topic/t", Recorder(), bench.now, peer=peer, name=name).close(bench.now)
        bench.commit()

    for number in range(EACH):
        subscribe(ANNA, str(number))
    with pytest.raises(DestinationFull):
        subscribe(ANNA, "more")
    subscribe(ANNA, "3")
    subscribe(BERT, "more")
    bench.kill()
    with pytest.raises(DestinationFull):
        subscribe(ANNA, "more")
    bench.hub.subscriptions.remove("3", "anna")
    subscribe(ANNA, "more")
    bench.hub.subscriptions.assign("more", "anna", "carl")
    subscribe(ANNA, "again")


def test_schedules() -> None:
    bench = start()

    def add(peer: LedgerPeer, name: str) -> None:
        envelope = send(b"", "queue/q", principal=peer.principal)
        bench.hub.schedules.add(
            Schedule(id=name, envelope=envelope, interval_s=1000.0, nohaste=True), bench.now
        )
        bench.commit()

    for number in range(EACH):
        add(ANNA, str(number))
    with pytest.raises(DestinationFull):
        add(ANNA, "more")
    add(ANNA, "3")
    add(BERT, "more")
    bench.kill()
    with pytest.raises(DestinationFull):
        add(ANNA, "again")
    bench.hub.schedules.remove("3")
    add(ANNA, "again")


def test_a_schedule_creates_its_destination_for_who_made_it() -> None:
    """One that fires once is gone then, and its queue is not."""
    bench = start()
    for number in range(EACH):
        envelope = send(b"", f"queue/anna/{number}", principal="anna")
        once = Schedule(id="once", envelope=envelope, interval_s=1.0, run_count=1)
        bench.hub.schedules.add(once, bench.now)
        bench.commit()
        bench.now += 2.0
        bench.hub.handle_deadline(bench.now)
        bench.commit()
        assert bench.hub.schedules.all() == []
    with pytest.raises(QuotaExceeded):
        envelope = send(b"", "queue/more", principal="anna")
        bench.hub.schedules.add(Schedule(id="more", envelope=envelope, interval_s=1.0), bench.now)
    assert not refused(bench, BERT, "more")


def test_messages_of_schedules_are_limited_by_bytes() -> None:
    bench = Bench(HubConfig(schedules_bytes=400_000))

    def add(peer: LedgerPeer, name: str, size: int = 30_000) -> None:
        envelope = send(bytes(size), "queue/q", principal=peer.principal)
        bench.hub.schedules.add(Schedule(id=name, envelope=envelope, interval_s=1000.0), bench.now)
        bench.commit()

    for number in range(3):
        add(ANNA, str(number))
    with pytest.raises(QuotaExceeded, match="bytes of scheduled messages"):
        add(ANNA, "more")
    add(ANNA, "2", 10_000)
    add(BERT, "more")
    bench.kill()
    with pytest.raises(QuotaExceeded):
        add(ANNA, "again")
    add(ANNA, "again", 10_000)


def test_dead_letters_have_room_whatever_the_limits_are_and_count_for_their_queue() -> None:
    bench = start()
    fill(bench, ANNA)
    taker = Recorder()
    consumer = bench.hub.consume("queue/anna/0", taker, bench.now, peer=ANNA)
    consumer.refuse(taker.ids, bench.now, cause="no", final=True)
    bench.commit()
    assert bench.hub.queue("queue/anna/0/dead").length == 1
    bench.hub.queue("queue/anna/3").purge(bench.now)
    bench.commit()
    bench.hub.remove("queue/anna/3", bench.now)
    assert refused(bench, ANNA, "more")


def test_waiting_calls() -> None:
    bench = Bench(HubConfig(service=ServicePolicy(waiting=40)))
    bench.hub.provide(["service/s"], Server(), bench.now, peer=BERT, window=1)
    answers = {peer: Caller() for peer in (ANNA, BERT)}

    def call(peer: LedgerPeer, count: int) -> list[object]:
        calls = [Envelope(destination="service/s", kind="request") for _ in range(count)]
        return bench.hub.call(calls, bench.now, answered=answers[peer], peer=peer)

    waiting = call(ANNA, 1 + EACH + 5)
    assert [type(each) for each in answers[ANNA].answers] == [QuotaExceeded] * 5
    call(BERT, EACH)
    assert answers[BERT].answers == []
    bench.hub.cancel(waiting[1:4], bench.now)
    answers[ANNA].answers.clear()
    call(ANNA, 4)
    assert [type(each) for each in answers[ANNA].answers] == [QuotaExceeded]


def test_bytes_of_calls_in_progress() -> None:
    """Given to a provider or waiting; a user may have 128 MiB, however little memory there is."""
    bench = Bench(HubConfig(calls_bytes=1))
    bench.hub.provide(["service/s"], Server(), bench.now, peer=BERT, window=100)
    caller = Caller()
    large = Envelope(destination="service/s", kind="request", payload=bytes(60 << 20))
    calls = bench.hub.call([large] * 3, bench.now, answered=caller, peer=ANNA)
    assert [type(each) for each in caller.answers] == [QuotaExceeded]
    bench.hub.cancel(calls, bench.now)
    bench.hub.call([large], bench.now, answered=caller, peer=ANNA)
    assert len(caller.answers) == 1


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        (StagingLimits(staged_bytes=4000), "staged_bytes"),
        (StagingLimits(attempts=40), "attempts"),
        (StagingLimits(producers=40), "producers"),
    ],
)
def test_staged_batches(limits: StagingLimits, what: str) -> None:
    bench = Bench(HubConfig(staging=limits))

    def stage(peer: LedgerPeer, number: int) -> None:
        owner = ProducerKey(peer.principal, f"p{number}" if what == "producers" else "p")
        part = pack([send(bytes(70), "queue/q", principal=peer.principal)])
        bench.hub.staging.stage(owner, 1, str(number), 0, part, bench.now)
        bench.commit()
        if what == "producers":
            bench.hub.staging.commit(owner, 1, [NamedAttempt(str(number), 1, 1)], bench.now)
            bench.commit()

    count = 0
    with pytest.raises(StagingFull, match=what):
        for count in range(EACH + 1):
            stage(ANNA, count)
    assert 0 < count <= EACH
    stage(BERT, 0)
    bench.kill()
    with pytest.raises(StagingFull, match=what):
        stage(ANNA, 100)
    if what != "producers":
        bench.hub.staging.abort(ProducerKey("anna", "p"), 1)
        stage(ANNA, 100)


def test_an_address_has_a_share_without_users() -> None:
    bench = start()
    bench.hub.holders.add("c1", "192.0.2.1")
    here, there = LedgerPeer(connection="c0"), LedgerPeer(connection="c1")

    def is_refused(peer: LedgerPeer, name: str) -> bool:
        message = send(b"", f"queue/{name}").replace(connection=peer.connection)
        receipt = bench.hub.produce([message], bench.now)
        bench.commit()
        return isinstance(receipt.refused.get(0), QuotaExceeded)

    assert not any(is_refused(there, f"there/{number}") for number in range(EACH))
    assert is_refused(there, "more")
    assert not any(is_refused(here, f"here/{number}") for number in range(2 * EACH))
    bench.kill(power=True)
    bench.hub.holders.add("c2", "192.0.2.1")
    assert is_refused(LedgerPeer(connection="c2"), "more"), "who created what is stored"
    for number in range(EACH):
        peer = LedgerPeer(connection="c2")
        bench.hub.subscribe("topic/t", Recorder(), bench.now, peer=peer, name=str(number))
    with pytest.raises(QuotaExceeded):
        bench.hub.subscribe("topic/t", Recorder(), bench.now, peer=peer, name="more")
    bench.hub.subscribe("topic/t", Recorder(), bench.now, peer=here, name="more")


def test_what_comes_over_http_without_users_counts_for_its_address() -> None:
    bench = start()
    here, there = holder_of_address("203.0.113.5"), holder_of_address("203.0.113.6")

    def is_refused(connection: str, name: str) -> bool:
        message = send(b"", f"queue/{name}").replace(connection=connection)
        receipt = bench.hub.produce([message], bench.now)
        return isinstance(receipt.refused.get(0), DestinationFull)

    for number in range(EACH):
        assert not is_refused(here, str(number))
    assert is_refused(here, "more")
    assert not is_refused(there, "more") and not is_refused("", "another")


def test_staged_batches_without_users_count_for_their_address() -> None:
    bench = Bench(HubConfig(staging=StagingLimits(attempts=8)), limits=LIMITS)
    staging, owner = bench.hub.staging, ProducerKey("", "p")
    part = pack([send(b"x", "queue/q")])
    staging.claim(owner, holder_of_address("203.0.113.5"))
    # A second address that uses the same name changes nothing.
    staging.claim(owner, holder_of_address("203.0.113.6"))
    for number in range(2):
        staging.stage(owner, 1, str(number), 0, part, bench.now)
    with pytest.raises(StagingFull):
        staging.stage(owner, 1, "more", 0, part, bench.now)
    staging.stage(ProducerKey("", "another"), 1, "a", 0, part, bench.now)
    bench.commit()
    staging.commit(owner, 1, [NamedAttempt("0", 1, 1), NamedAttempt("1", 1, 1)], bench.now)
    bench.commit()
    staging.stage(owner, 2, "again", 0, part, bench.now)
    staging.abort(owner, 2)
    staging.forget(owner)
    staging.keep_house(bench.now)
    assert staging.attempts == 1


def test_a_part_has_a_limit_of_destinations() -> None:
    bench = Bench()
    batch = [send(b"", f"queue/{number}") for number in range(PART_NAMES + 1)]
    with pytest.raises(InvalidEnvelope, match="at most 10000 destinations"):
        bench.hub.staging.stage(ProducerKey("", "p"), 1, "a", 0, pack(batch), bench.now)
