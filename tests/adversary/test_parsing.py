"""Bodies that take long to parse, from peers without credentials and from users.

A peer that may not do something is refused before the body is parsed, and what a user may send has
limits on the lengths of its lists and texts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crosswire.bond import hub_module, marshal
from crosswire.wire.epoxy.comm import marshal_credentials
from crosswire.wire.micromsg2.frames import serialize_message
from tests.adversary.harness import TOKEN, Attacker, Target

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
Attack = Callable[[Target], tuple[Attacker, bytes]]
"""An attacker after its handshake, and the bytes that it sends."""
Body = bytes | Callable[[], bytes]
"""Large ones are made by the test that sends them, not whenever tests are collected."""


def made(body: Body) -> bytes:
    return body if isinstance(body, bytes) else body()


def emp(op: str, body: Body, token: str = "") -> Attack:
    def prepare(target: Target) -> tuple[Attacker, bytes]:
        data = made(body)
        peer = target.emp(token)
        peer.connection.send_request(op, data)
        return peer, b"".join(peer.connection.data_to_send())

    return prepare


def emp_names(count: int) -> Attack:
    """Calls of services with names of 1 MiB, each another: refused ones must not be remembered."""

    def prepare(target: Target) -> tuple[Attacker, bytes]:
        peer = target.emp()
        for number in range(count):
            peer.connection.send_request(f"{number}" + "x" * MIB, b"{}")
        return peer, b"".join(peer.connection.data_to_send())

    return prepare


def emqp(step: Callable[[Attacker], object]) -> Attack:
    def prepare(target: Target) -> tuple[Attacker, bytes]:
        peer = target.emqp()
        step(peer)
        return peer, b"".join(peer.connection.data_to_send())

    return prepare


def epoxy(service: str, method: str, body: Body, token: str = "") -> Attack:
    def prepare(target: Target) -> tuple[Attacker, bytes]:
        payload = made(body)
        peer = target.epoxy()
        credentials = marshal_credentials(token) if token else None
        peer.connection.send_request(service, method, payload, layer_data=credentials)
        return peer, b"".join(peer.connection.data_to_send())

    return prepare


def epoxy_event(service: str, payload: bytes) -> Attack:
    def prepare(target: Target) -> tuple[Attacker, bytes]:
        peer = target.epoxy()
        peer.connection.send_event(service, "m", payload)
        return peer, b"".join(peer.connection.data_to_send())

    return prepare


def micromsg2(destination: str, properties: bytes, count: int = 1, token: str = "") -> Attack:
    def prepare(target: Target) -> tuple[Attacker, bytes]:
        peer = target.micromsg2(token)
        frames = [
            b"".join(serialize_message(number, destination.encode(), properties, b""))
            for number in range(1, count + 1)
        ]
        return peer, b"".join(frames)

    return prepare


def micromsg2_command(call: bytes, token: str = TOKEN) -> Attack:
    def prepare(target: Target) -> tuple[Attacker, bytes]:
        return target.micromsg2(token), b"\x09" + len(call).to_bytes(4) + call

    return prepare


def services(count: int) -> bytes:
    return b'{"services":[%b]}' % b",".join(b'"s%d"' % number for number in range(count))


def properties(count: int) -> bytes:
    return b",".join(b'"p%d":1' % number for number in range(count))


def publish(destination: str, members: bytes) -> bytes:
    return b'{"destination":"%b","text":"x",%b}' % (destination.encode(), members)


# Compact Binary: field 20 (unknown to every struct of the hub), a bool, again and again.
UNKNOWN_FIELDS = b"CB\x01\x00" + b"\xc2\x14\x01" * (4 * MIB // 3) + b"\x00"
# The same with a slash, which a Blob's media type has.
UNKNOWN_FIELDS_OF_A_BLOB = b"CB\x01\x00" + b"\xc2\x2f\x01" * (4 * MIB // 3) + b"\x00"


def publication(count: int) -> bytes:
    module = hub_module()
    publication, value = module.struct("crosswire.Publication"), module.struct("crosswire.Value")
    one = value.python_class(integer=1)
    return marshal.marshal(
        publication.python_class(
            destination="queue/mallory/q",
            payload=b"x",
            properties={f"p{number}": one for number in range(count)},
        ),
        publication,
    )


def struct(name: str, **values: object) -> bytes:
    found = hub_module().struct(f"crosswire.{name}")
    return marshal.marshal(found.python_class(**values), found)


MANY = 300_000
CRON = "*/1," * 100_000 + "1 * * * *"

WITHOUT_CREDENTIALS: dict[str, Attack] = {
    "emp-serve": emp("$serve", lambda: services(1_000_000)),
    "emp-publish": emp(
        "$publish", lambda: publish("queue/q", b'"properties":{%b}' % properties(MANY))
    ),
    "emp-cron": emp("$schedule", publish("queue/q", b'"cron":"%b"' % CRON.encode())),
    "emp-subscribe": emp("$subscribe", b'{"destination":"queue/%b"}' % (b"x/" * MIB)),
    "emp-call": emp("x/" * MIB, b"{}"),
    "emp-names": emp_names(40),
    "emqp-commas": emqp(lambda peer: peer.connection.send_request("q", "," * 16 * MIB, b"x")),
    "emqp-names": emqp(
        lambda peer: peer.connection.send_request("q", "a:1," * (2 * MIB) + "b", b"x")
    ),
    "emqp-schedule": emqp(
        lambda peer: peer.connection.send_schedule("q", "a:1," * MIB, b"x", interval_s=60)
    ),
    "emqp-schedule-cron": emqp(
        lambda peer: peer.connection.send_schedule("q", "", b"x", cron=CRON)
    ),
    "emqp-publish": emqp(lambda peer: peer.connection.send_publish("t", b"x", "," * 16 * MIB)),
    "emqp-queue": emqp(lambda peer: peer.connection.send_request("q/" * MIB, "", b"x")),
    "epoxy-publish": epoxy("crosswire.Hub", "Publish", UNKNOWN_FIELDS),
    "epoxy-serve": epoxy("crosswire.Hub", "Serve", UNKNOWN_FIELDS),
    "epoxy-call": epoxy("s", "m", UNKNOWN_FIELDS_OF_A_BLOB),
    "epoxy-event": epoxy_event("s", UNKNOWN_FIELDS_OF_A_BLOB),
    "micromsg2-number": micromsg2("queue/q", b"a:D" + b"1" * 60_000 + b"x"),
    "micromsg2-properties": micromsg2("queue/q", b"a:1;" * 16_000, 16),
}
BY_A_USER: dict[str, Attack] = {
    "emp-serve": emp("$serve", lambda: services(1_000_000), TOKEN),
    "emp-publish": emp(
        "$publish",
        lambda: publish("queue/mallory/q", b'"properties":{%b}' % properties(MANY)),
        TOKEN,
    ),
    "emp-cron": emp("$schedule", publish("queue/mallory/q", b'"cron":"%b"' % CRON.encode()), TOKEN),
    "epoxy-publish": epoxy("crosswire.Hub", "Publish", lambda: publication(MANY), TOKEN),
    "epoxy-unknown": epoxy("crosswire.Hub", "Publish", UNKNOWN_FIELDS, TOKEN),
    "epoxy-serve": epoxy(
        "crosswire.Hub",
        "Serve",
        lambda: struct("Services", services=[f"s{n}" for n in range(MANY)]),
        TOKEN,
    ),
    "epoxy-call": epoxy("mallory", "m", UNKNOWN_FIELDS_OF_A_BLOB, TOKEN),
    "micromsg2-number": micromsg2("queue/mallory/q", b"a:D" + b"1" * 60_000 + b"x", 1, TOKEN),
    "micromsg2-properties": micromsg2(
        "queue/mallory/q", b"".join(b"p%d:1;" % n for n in range(8_000)), 16, TOKEN
    ),
    "micromsg2-command": micromsg2_command(b"subscribe;" + b"a=1," * (MIB // 5) + b"destination=q"),
}


@pytest.mark.parametrize("name", WITHOUT_CREDENTIALS)
def test_without_credentials(guarded: Target, name: str) -> None:
    guarded.assert_bearable(lambda: WITHOUT_CREDENTIALS[name](guarded))


@pytest.mark.parametrize("name", BY_A_USER)
def test_by_a_user(guarded: Target, name: str) -> None:
    guarded.assert_bearable(lambda: BY_A_USER[name](guarded))
