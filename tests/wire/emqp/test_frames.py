"""eMQP's commands against recorded messages, and round trips."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import FrameError, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Frame
from crosswire.wire.emqp.frames import (
    Admin,
    DeliveryFrame,
    Inform,
    Kbai,
    Malformed,
    Publish,
    Reply,
    Request,
    ScheduleFrame,
    parse,
    parse_delivery,
    parse_queues,
    serialize,
    serialize_queues,
)
from crosswire.wire.emqp.layout import ADMIN_COMMANDS
from tests.wire.emqp.strategies import commands
from tests.wire.vectors import load

VECTORS = load("emqp")
DELIVERIES = [vector for vector in VECTORS if vector["direction"] == "broker->subscriber"]
COMMANDS = [vector for vector in VECTORS if vector not in DELIVERIES]
VALID = [vector for vector in COMMANDS if "frame" in vector]
ADMIN = [
    vector
    for vector in COMMANDS
    if "frame" not in vector and vector["direction"] == "admin->broker"
]
REFUSED = [vector for vector in COMMANDS if vector not in VALID and vector not in ADMIN]

HEAD = [b"", b"eMQP/1.0"]


def parts_of(vector: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(part) for part in vector["frames"]]


def name_of(vector: dict[str, Any]) -> str:
    return str(vector["name"])


def test_all_vectors_are_used() -> None:
    sizes = [len(group) for group in (VALID, ADMIN, REFUSED, DELIVERIES)]
    assert (sum(sizes), all(sizes)) == (109, True)


@pytest.mark.parametrize("vector", VALID, ids=name_of)
class TestVectors:
    def test_parsed(self, vector: dict[str, Any]) -> None:
        frame = parse(parts_of(vector))
        assert (frame.frame_name, frame.fields()) == (vector["frame"], vector["fields"])
        assert frame.layer == 1

    def test_serialized(self, vector: dict[str, Any]) -> None:
        parts = parts_of(vector)
        assert serialize(parse(parts)) == parts

    def test_parts_after_it_are_ignored(self, vector: dict[str, Any]) -> None:
        parts = parts_of(vector)
        if vector["frame"] == "publish" and len(parts) == 6:
            parts.append(b"then it is one with headers")
            assert isinstance(parse(parts), Publish)
        elif vector["frame"] == "reply" and len(parts) == 5:
            assert parse([*parts, b"id", b"more"]) == parse([*parts, b"id"])
        else:
            assert parse([*parts, b"more"]) == parse(parts)

    def test_every_part_is_needed(self, vector: dict[str, Any]) -> None:
        parts = parts_of(vector)
        short = parse(parts[:-1])
        if (vector["frame"], len(parts)) in (("publish", 7), ("reply", 6)):
            assert type(short) is type(parse(parts))
        else:
            assert isinstance(short, Malformed)


@pytest.mark.parametrize("vector", ADMIN, ids=name_of)
def test_administration(vector: dict[str, Any]) -> None:
    parts = parts_of(vector)
    frame = parse(parts)
    assert isinstance(frame, Admin)
    assert frame.frame_name == "admin"
    assert frame.fields() == {"msgid": parts[3].decode(), "command": parts[2].decode()}
    assert serialize(frame) == parts


@pytest.mark.parametrize("vector", REFUSED, ids=name_of)
def test_what_is_no_command_has_a_reason(vector: dict[str, Any]) -> None:
    frame = parse(parts_of(vector))
    assert isinstance(frame, Malformed)
    with pytest.raises(FrameError):
        frame.fields()


@pytest.mark.parametrize("vector", DELIVERIES, ids=name_of)
def test_publications_are_bare(vector: dict[str, Any]) -> None:
    parts = parts_of(vector)
    frame = parse_delivery(parts)
    assert frame.frame_name == "publish"
    assert frame.fields() == {"topic": "topic", "message": parts[1].hex()}
    assert serialize(frame) == parts


@given(commands)
def test_round_trip(frame: Frame) -> None:
    assert parse(serialize(frame)) == frame


@given(st.lists(st.binary(max_size=12), max_size=10))
def test_any_byte_strings_are_parsed(parts: list[bytes]) -> None:
    assert isinstance(parse(parts), Malformed)
    assert isinstance(parse_delivery(parts), Malformed | DeliveryFrame)


names = st.sampled_from(
    [
        *("ACK", "REPLY", "HEARTBEAT", "DISCONNECT", "KBAI", "KBYE", "READY", "REQUEST"),
        *("PUBLISH", "SCHEDULE", "UNSCHEDULE", "INFORM", *map(bytes.decode, ADMIN_COMMANDS)),
    ]
)


@given(names, st.lists(st.binary(max_size=12), max_size=10))
def test_any_parts_after_a_known_command_are_parsed(name: str, rest: list[bytes]) -> None:
    parts = [*HEAD, name.encode(), *rest]
    frame = parse(parts)
    if not isinstance(frame, Malformed):
        written = serialize(frame)
        assert written == parts[: len(written)]


@pytest.mark.parametrize(
    ("parts", "error", "reason"),
    [
        ([], MalformedFrame, "at least 4 frames, not 0"),
        ([*HEAD, b"READY"], MalformedFrame, "at least 4 frames, not 3"),
        ([b"x", b"eMQP/1.0", b"READY", b"1"], MalformedFrame, "first frame is not empty"),
        ([b"", b"eMQP/1.1", b"READY", b"1"], MalformedFrame, "version is not"),
        ([*HEAD, b"ready", b"1"], UnknownFrame, "'ready' is not defined"),
        ([*HEAD, b"\xff" * 99, b"1"], UnknownFrame, "is not defined"),
        ([*HEAD, b"READY", b"\xff"], MalformedFrame, "'READY' has a frame that is not UTF-8"),
        ([*HEAD, b"REQUEST", b"1", b"\xff", b"", b""], MalformedFrame, "not UTF-8"),
        ([*HEAD, b"REQUEST", b"1", b"q", b""], MalformedFrame, "at least 7 frames, not 6"),
        ([*HEAD, b"SCHEDULE", *[b"1"] * 5], MalformedFrame, "7 or 9 frames, not 8"),
        ([*HEAD, b"REPLY", b"1", b"", b"\xff"], MalformedFrame, "not UTF-8"),
    ],
)
def test_errors_in_words(parts: list[bytes], error: type[FrameError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        parse(parts).fields()


def test_a_peers_words_are_repeated_short_and_printable() -> None:
    frame = parse([*HEAD, b"\x1b[31m" * 1000, b"1"])
    assert isinstance(frame, Malformed)
    assert frame.reason.isprintable() and len(frame.reason) < 200


def test_bodies_may_be_any_bytes() -> None:
    for frame in (
        Request("1", "q", "", b"\xff\0"),
        Reply("1", b"\xff\0", "2"),
        Publish("1", "t", None, b"\xff\0"),
        ScheduleFrame("1", "q", "", "5", b"\xff\0", ""),
        ScheduleFrame("1", "q", "interval:5", None, b"\xff\0", None),
    ):
        assert parse(serialize(frame)) == frame


def test_the_spelling_of_the_goodbye_is_kept() -> None:
    assert serialize(Kbai("1", "KBAI"))[2] == b"KBAI"
    assert serialize(Kbai("1"))[2] == b"KBYE"


def test_only_commands_are_serialized() -> None:
    with pytest.raises(TypeError, match="Malformed is not"):
        serialize(Malformed("x"))


class TestQueues:
    @pytest.mark.parametrize(
        ("text", "queues"),
        [
            ("", ()),
            ("  ", ()),
            ("[]", ()),
            ('[[20, "heavy"], [10, "default"]]', ((20, "heavy"), (10, "default"))),
            ("[40, 'email'],[10, 'default']", ((40, "email"), (10, "default"))),
            ("[40, 'email']", ((40, "email"),)),
            ('[40, "email"], [1,"x,y"]', ((40, "email"), (1, "x,y"))),
            ('[[1, "\u00fc"]]', ((1, "\u00fc"),)),
        ],
    )
    def test_read(self, text: str, queues: tuple[tuple[int, str], ...]) -> None:
        assert parse_queues(text) == queues

    @pytest.mark.parametrize(
        "text",
        ["email", "{}", "[[1]]", '[["a", 1]]', "[1, 'a'", "[1, 'a'],", '[[1, ""]]', "[" * 9999],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(MalformedFrame):
            parse_queues(text)

    @given(st.text())
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        try:
            queues = parse_queues(text)
        except MalformedFrame:
            return
        assert all(name for _, name in queues)

    @given(
        st.lists(
            st.tuples(st.integers(0, 10**6), st.text(st.characters(codec="utf-8"), min_size=1))
        )
    )
    def test_round_trip(self, queues: list[tuple[int, str]]) -> None:
        assert parse_queues(serialize_queues(queues)) == tuple(queues)

    @pytest.mark.parametrize(
        "vector",
        [v for v in VALID if v["frame"] == "inform" and v["fields"]["peer"] == "worker"],
        ids=name_of,
    )
    def test_recorded(self, vector: dict[str, Any]) -> None:
        frame = parse(parts_of(vector))
        assert isinstance(frame, Inform)
        parse_queues(frame.queues)
