"""Which protocol a connection uses, and which side opened it."""

from __future__ import annotations

import pytest

from crosswire.capture.classify import Classified, PortMap, classify
from crosswire.capture.reassembly import ReassembledRun
from crosswire.errors import InvalidInput
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES, protocol

UNUSED = 61_000


def runs(
    *parts: tuple[bool, bytes], opener: bool | None = True, late: bool = False, number: int = 0
) -> list[ReassembledRun]:
    offsets = {True: 0, False: 0}
    made = []
    for forward, data in parts:
        made.append(
            ReassembledRun(
                number, opener, forward, "data", offsets[forward], len(data), 0, data, late
            )
        )
        offsets[forward] += len(data)
    return made


def classified(
    given: list[ReassembledRun],
    forward_port: int = 60_000,
    backward_port: int = UNUSED,
    **ports: str,
) -> list[Classified]:
    configured = {int(port[1:]): name for port, name in ports.items()}
    return list(classify(given, forward_port, backward_port, PortMap(configured)))


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_by_the_port_of_the_acceptor(name: str) -> None:
    listener, port = next(iter(protocol(name).ports.items()))
    (item,) = classified(runs((True, b"?")), backward_port=port)
    assert item.detected == (name, listener)


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_by_the_first_bytes(name: str) -> None:
    talk = SampleTraffic(messages=3).conversation(0, name)
    given = runs(*((forward, data) for _, forward, data in talk.chunks))
    found = classified(given)
    assert [item.run for item in found] == given
    assert {item.detected.protocol for item in found} == {name}


def test_configuration_takes_precedence_over_the_default() -> None:
    (item,) = classified(runs((True, b"?")), backward_port=5040, p5040="epoxy")
    assert item.detected == ("epoxy", "emp")


def test_a_port_with_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'nope'"):
        PortMap({1: "nope"})


def test_tls_by_port_and_by_its_hello() -> None:
    hello = bytes.fromhex("160301020001") + b"x" * 20
    assert classified(runs((True, b"?")), backward_port=5041)[0].detected.protocol == "tls"
    assert classified(runs((True, hello)))[0].detected.protocol == "tls"


def test_other_protocols_stay_unknown() -> None:
    found = classified(runs((True, b"SSH-2.0-x\r\n" * 40), (False, b"SSH-2.0-y\r\n")))
    assert {item.detected.protocol for item in found} == {None}


def test_the_middle_of_a_connection_is_not_sniffed() -> None:
    hello = bytes.fromhex("000000080000000001000000")
    (item,) = classified(runs((True, hello), opener=None, late=True))
    assert item.detected.protocol is None


@pytest.mark.parametrize(("forward_port", "opener"), [(5040, False), (UNUSED, True)])
def test_the_opener_is_guessed_by_the_port(forward_port: int, opener: bool) -> None:
    backward_port = UNUSED if forward_port == 5040 else 5040
    (item,) = classified(runs((True, b"?"), opener=None, late=True), forward_port, backward_port)
    assert (item.opener_is_forward, item.forward) == (opener, opener)


@pytest.mark.parametrize(
    ("forward_port", "backward_port", "opener", "protocol"),
    [
        # A client may be given a port of eMQP's: the other end's decides.
        (47291, 5040, True, "emp"),
        (5040, 47291, False, "emp"),
        (47291, 8080, True, None),
        (8080, 47291, False, None),
        # Both are in that range: one of them listens there.
        (47291, 40000, False, "emqp"),
        (40000, 47291, True, "emqp"),
    ],
)
def test_a_port_that_clients_have_too_does_not_decide_alone(
    forward_port: int, backward_port: int, opener: bool, protocol: str | None
) -> None:
    (item,) = classified(runs((True, b"?"), opener=None, late=True), forward_port, backward_port)
    assert (item.opener_is_forward, item.detected.protocol) == (opener, protocol)


def test_a_port_that_was_configured_decides() -> None:
    late = runs((True, b"?"), opener=None, late=True)
    (item,) = classified(late, 50_000, 8080, p50000="relink")
    assert (item.opener_is_forward, item.detected.protocol) == (False, "relink")


def test_each_connection_of_a_flow_is_classified_on_its_own() -> None:
    first = SampleTraffic(messages=1).conversation(0, "emp")
    second = SampleTraffic(messages=1).conversation(0, "epoxy")
    given = runs(*((forward, data) for _, forward, data in first.chunks))
    given += runs(*((forward, data) for _, forward, data in second.chunks), number=1)
    found = classified(given)
    assert [item.run for item in found] == given
    assert {(item.run.connection, item.detected.protocol) for item in found} == {
        (0, "emp"),
        (1, "epoxy"),
    }
