"""Envelopes and destinations: what is written is what is read, and what is no name is refused."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.envelope import (
    PROPERTIES,
    PROPERTIES_BYTES,
    Destination,
    Envelope,
    Property,
    check_properties,
    decode,
    encode,
    parse_destination,
    parse_pattern,
    stamp,
)
from crosswire.errors import InvalidDestination, InvalidEnvelope, RecordDamaged

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT64 = st.integers(-(2**63), 2**63 - 1)
ENVELOPES = st.builds(
    Envelope,
    destination=WORDS,
    kind=st.sampled_from(["send", "publish", "request", "response"]),
    payload=st.binary(max_size=100),
    node=WORDS,
    id=INT64,
    time=INT64,
    protocol=WORDS,
    connection=WORDS,
    principal=WORDS,
    key=WORDS,
    correlation=WORDS,
    reply_to=WORDS,
    durable=st.booleans(),
    expires=INT64,
    properties=st.dictionaries(
        WORDS, st.one_of(INT64, st.floats(allow_nan=False), st.booleans(), WORDS), max_size=4
    ),
    native=st.dictionaries(WORDS, st.binary(max_size=20), max_size=3),
    content_type=WORDS,
    crc=st.integers(0, 2**32 - 1),
)


@given(ENVELOPES)
def test_what_is_encoded_is_decoded_with_its_types(envelope: Envelope) -> None:
    again = decode(encode(envelope))
    assert again == envelope
    for key, value in envelope.properties.items():
        assert type(again.properties[key]) is type(value)


@given(ENVELOPES, st.data())
def test_a_changed_byte_is_noticed(envelope: Envelope, data: st.DataObject) -> None:
    record = bytearray(encode(envelope))
    index = data.draw(st.integers(0, len(record) - 1))
    record[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordDamaged):
        decode(bytes(record))


@given(ENVELOPES, st.data())
def test_a_cut_is_noticed(envelope: Envelope, data: st.DataObject) -> None:
    record = encode(envelope)
    with pytest.raises(RecordDamaged):
        decode(record[: data.draw(st.integers(0, len(record) - 1))])


def test_a_record_of_another_kind_is_noticed_even_with_its_checksum() -> None:
    body = b"\x93\x01\x02\x03"
    with pytest.raises(RecordDamaged):
        decode(b"\x01" + zlib.crc32(body).to_bytes(4) + body)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidEnvelope):
        encode(Envelope(destination="queue/q", kind="send", properties={"n": 1 << 64}))


def test_a_stamp_completes_and_replace_copies() -> None:
    envelope = Envelope(destination="queue/q", kind="send", payload=b"one")
    stamp(envelope, "node", 7, 8)
    assert (envelope.node, envelope.id, envelope.time) == ("node", 7, 8)
    copy = envelope.replace(payload=b"two")
    assert copy.payload == b"two" and copy.intact() and envelope.payload == b"one"
    with pytest.raises(AttributeError):
        envelope.payload = b"no"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("queue/a", Destination("queue", "a")),
        ("queue/a/dead", Destination("queue", "a/dead")),
        ("topic/a/b c", Destination("topic", "a/b c")),
        ("service/s", Destination("service", "s")),
        ("service/s/m", Destination("service", "s", "m")),
        ("service/s/m/n", Destination("service", "s", "m/n")),
        ("queue/" + "ü" * 124 + "x", Destination("queue", "ü" * 124 + "x")),
        ("queue/a+b#", Destination("queue", "a+b#")),
    ],
)
def test_destinations(text: str, expected: Destination) -> None:
    assert parse_destination(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "queue",
        "queue/",
        "Queue/a",
        "reply/a",
        "service//m",
        "topic/a\n",
        "queue/\x7f",
        "queue/\x85",
        "queue/\udc00",
        "queue/" + "ü" * 125,
        "topic/+",
        "topic/a/#",
        "topic/c++",
    ],
)
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(InvalidDestination):
        parse_destination(text)


@pytest.mark.parametrize("text", ["topic/+", "topic/#", "topic/a/+/b/#", "topic/a", "queue/a"])
def test_patterns(text: str) -> None:
    assert str(parse_pattern(text)) == text


@pytest.mark.parametrize("text", ["topic/#/a", "topic/a#", "topic/+a", "topic/a/b+", "topic/"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(InvalidDestination):
        parse_pattern(text)


def test_properties_are_limited_in_number_and_size() -> None:
    most: dict[str, Property] = {f"{number}": True for number in range(PROPERTIES)}
    assert check_properties(most) is most
    with pytest.raises(InvalidEnvelope, match="at most 1000 properties, not 1001"):
        check_properties({**most, "one": "more"})
    check_properties({"a": "x" * (PROPERTIES_BYTES - 1)})
    with pytest.raises(InvalidEnvelope, match="at most 65536 bytes, not 65537"):
        check_properties({"a": "x" * PROPERTIES_BYTES})
