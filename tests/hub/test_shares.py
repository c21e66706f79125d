"""What one user may have of destinations, subscriptions and schedules; others keep theirs."""

from __future__ import annotations

import pytest

from crosswire.envelope import Envelope
from crosswire.errors import DestinationFull
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, pack
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig
from crosswire.hub.schedules import Schedule
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
