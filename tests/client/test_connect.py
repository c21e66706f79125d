"""URLs, credentials and messages, without a hub."""

from __future__ import annotations

import pytest

import crosswire
from crosswire.client.address import parse_url
from crosswire.client.connect import connect
from crosswire.client.message import Message
from crosswire.errors import ConfigError


def test_urls() -> None:
    assert parse_url("emp://hub").addresses == (("hub", 5040),)
    assert parse_url("emp+tls://hub").addresses == (("hub", 5041),)
    assert parse_url("relink://a:1,b,[::1]:3").addresses == (("a", 1), ("b", 7350), ("::1", 3))
    emqp = parse_url("emqp://a,b:5?workers=7")
    assert emqp.of_role("clients") == (("a", 47291), ("b", 5))
    assert emqp.of_role("workers") == (("a", 7), ("b", 7))
    assert emqp.of_role("subscribers") == (("a", 47299), ("b", 47299))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://hub", "begins with one of emp://"),
        ("hub:5040", "begins with one of"),
        ("emp+ssl://hub", r"\+tls only"),
        ("emqp+tls://hub", "only CURVE"),
        ("emp://hub:0", "no port"),
        ("emp://hub:x", "no port"),
        ("emp://", "needs a host"),
        ("emp://hub/path", "more than a protocol"),
        ("emp://token@hub", "pass a token apart"),
        ("emp://hub?workers=1", "only an eMQP address"),
        ("emqp://hub?worker=1", "none of workers"),
    ],
)
def test_urls_that_are_none(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_url(url)


def test_credentials_that_a_protocol_can_not_carry() -> None:
    with pytest.raises(crosswire.Unsupported, match="certificates only"):
        connect("relink://hub", token="x")
    with pytest.raises(crosswire.Unsupported, match="CURVE"):
        connect("emqp://hub", token="x")
    with pytest.raises(crosswire.Unsupported, match="CURVE keys are for eMQP"):
        connect("emp://hub", curve_server="x")
    with pytest.raises(ValueError, match="CURVE key can't be used"):
        connect("emqp://hub", curve_server="short")
    with pytest.raises(ValueError, match="needs the hub's public key"):
        connect("emqp://hub", curve_secret="x")
    with pytest.raises(ConfigError, match="TLS can't be used"):
        connect("emp+tls://hub", ca="/no/such/file")
    with pytest.raises(ConfigError, match="bond file"):
        connect("epoxy://hub", bond=["/no/such/file.bond"])


def test_tls_without_the_scheme_takes_the_port_of_tls() -> None:
    assert connect("emp://hub", tls=True)._adapter.target.url.addresses == (("hub", 5041),)


def test_what_a_message_shows() -> None:
    message = Message(
        "queue/q",
        b'{"item":"tea"}',
        content_type="application/json",
        properties={"n": 1},
        id=7,
        attempt=2,
    )
    assert repr(message) == "<Message queue/q #7 attempt 2 {'item': 'tea'} {'n': 1}>"
    assert (message.body, message.text, message.settled) == ({"item": "tea"}, message.text, True)
    broken = Message("queue/q", b"{", content_type="application/json")
    assert repr(broken) == "<Message queue/q b'{'>"
    with pytest.raises(ValueError, match="not JSON"):
        _ = broken.body
    assert Message("topic/t", b"\xff").body == b"\xff"
    assert Message("topic/t", "ä".encode(), content_type="text/plain").body == "ä"


def test_the_package_has_what_its_list_says() -> None:
    assert {name for name in crosswire.__all__ if hasattr(crosswire, name)} == set(
        crosswire.__all__
    )
    with pytest.raises(AttributeError):
        _ = crosswire.no_such_name
