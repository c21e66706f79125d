"""Services: calls, answers, and the three ways to get none."""

from __future__ import annotations

import pytest

from crosswire.envelope import Envelope
from crosswire.errors import (
    CallError,
    CallTimeout,
    DestinationFull,
    InvalidDestination,
    NoProvider,
    ProviderFailed,
    ProviderLost,
)
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, ServicePolicy
from crosswire.hub.services import Call, Provider
from tests.hub.parties import Bench, Caller, Server, no_ids


def request(payload: bytes = b"?", service: str = "service/s") -> Envelope:
    return Envelope(destination=service, kind="request", payload=payload, correlation="c7")


def response(payload: bytes) -> Envelope:
    return Envelope(destination="", kind="response", payload=payload)


def call(bench: Bench, caller: Caller, *envelopes: Envelope, **options: float) -> list[Call]:
    return bench.hub.call(
        envelopes or [request()],
        bench.now,
        answered=caller,
        peer=LedgerPeer("test", "caller"),
        **options,  # type: ignore[arg-type]
    )


def provide(bench: Bench, server: Server, *names: str, window: int = 256) -> Provider:
    return bench.hub.provide(
        names or ["service/s"], server, bench.now, peer=LedgerPeer("test", "server"), window=window
    )


def test_an_answer_comes_back_to_its_call() -> None:
    bench, server, caller = Bench(), Server(), Caller()
    provider = provide(bench, server)
    calls = call(bench, caller)
    assert [each.envelope.payload for each in server.requests] == [b"?"]
    assert provider.answer(calls[0].id, response(b"!"), bench.now)
    (answer,) = caller.answers
    assert isinstance(answer, Envelope)
    assert (answer.payload, answer.kind, answer.correlation) == (b"!", "response", "c7")
    assert not provider.answer(calls[0].id, response(b"twice"), bench.now)
    assert len(caller.answers) == 1
    assert [row.step for row in bench.hub.trace(calls[0].id)] == [
        "accepted",
        "delivered",
        "answered",
    ]


def test_requests_and_responses_are_journaled() -> None:
    bench, server, caller = Bench(), Server(), Caller()
    provider = provide(bench, server)
    calls = call(bench, caller, request(service="service/s/m"))
    provider.answer(calls[0].id, response(b"!"), bench.now)
    bench.hub.commits.commit_now()
    assert len([key for key in bench.disk.keys if key.startswith(b"m")]) == 2
    # Only the group with the new name of a destination was synced.
    calls = call(bench, caller, request(service="service/s/m"))
    provider.answer(calls[0].id, response(b"!"), bench.now)
    bench.hub.commits.commit_now()
    assert bench.disk.unsynced


def test_providers_take_turns() -> None:
    bench, caller = Bench(), Caller()
    servers = [Server() for _ in range(3)]
    for server in servers:
        provide(bench, server)
    call(bench, caller, *(request() for _ in range(6)))
    assert [len(server.requests) for server in servers] == [2, 2, 2]


def test_a_method_of_its_own_comes_before_the_whole_service() -> None:
    bench, whole, method, caller = Bench(), Server(), Server(), Caller()
    provide(bench, whole, "service/s")
    provide(bench, method, "service/s/m")
    call(bench, caller, request(service="service/s/m"), request(service="service/s/n"))
    assert len(method.requests) == len(whole.requests) == 1
    assert bench.hub.is_served("service/s/anything") and not bench.hub.is_served("service/t")


def test_no_provider_timeout_loss_and_failure_are_told_apart() -> None:
    bench, server, caller = Bench(), Server(), Caller()
    call(bench, caller)
    provider = provide(bench, server)
    call(bench, caller, timeout_s=2.0)
    bench.wait(3)
    call(bench, caller)
    provider.fail(server.requests[-1].id, ProviderFailed("oops", "it broke"), bench.now)
    call(bench, caller)
    provider.close(bench.now)
    assert [type(each) for each in caller.answers] == [
        NoProvider,
        CallTimeout,
        ProviderFailed,
        ProviderLost,
    ]
    codes = [each.code for each in caller.answers if isinstance(each, CallError)]
    assert codes == ["unknown_op", "timeout", "oops", "provider_lost"]
    assert server.cancelled == [server.requests[0].id]


def test_the_deadline_is_thirty_seconds_unless_told() -> None:
    bench, caller = Bench(), Caller()
    provide(bench, Server())
    call(bench, caller)
    bench.wait(29.9)
    assert caller.answers == []
    bench.wait(0.2)
    assert [type(each) for each in caller.answers] == [CallTimeout]


def test_a_caller_that_leaves_cancels_its_calls() -> None:
    bench, server, caller = Bench(), Server(), Caller()
    provider = provide(bench, server, window=1)
    calls = call(bench, caller, request(b"1"), request(b"2"))
    bench.hub.cancel(calls, bench.now)
    assert server.cancelled == [calls[0].id]
    assert caller.answers == []
    assert not provider.answer(calls[0].id, response(b"late"), bench.now)
    call(bench, caller, request(b"3"))
    assert server.requests[-1].envelope.payload == b"3"


def test_busy_providers_keep_calls_waiting_within_a_bound() -> None:
    bench, server, caller = Bench(HubConfig(service=ServicePolicy(waiting=2))), Server(), Caller()
    provider = provide(bench, server, window=1)
    calls = call(bench, caller, *(request(b"%d" % each) for each in range(4)))
    assert len(server.requests) == 1
    assert [type(each) for each in caller.answers] == [DestinationFull]
    provider.answer(calls[0].id, response(b""), bench.now)
    assert [each.envelope.payload for each in server.requests] == [b"0", b"1"]
    provider.close(bench.now)
    assert {type(each) for each in caller.answers[2:]} == {ProviderLost, NoProvider}


def test_a_call_to_what_is_no_service_is_refused() -> None:
    bench, caller = Bench(), Caller()
    call(bench, caller, request(service="queue/q"))
    assert [type(each) for each in caller.answers] == [InvalidDestination]
    with pytest.raises(InvalidDestination):
        provide(bench, Server(), "topic/t")


def test_calls_and_answers_are_refused_while_no_ids_can_be_reserved() -> None:
    bench, server, caller = Bench(), Server(), Caller()
    provider = provide(bench, server)
    (waiting,) = call(bench, caller)
    with no_ids(bench):
        (refused,) = call(bench, caller)
        assert refused.is_done
        assert provider.answer(waiting.id, response(b"!"), bench.now)
    assert [type(answer) for answer in caller.answers] == [DestinationFull, DestinationFull]
    (again,) = call(bench, caller)
    assert provider.answer(again.id, response(b"!"), bench.now)
    assert isinstance(caller.answers[-1], Envelope)
