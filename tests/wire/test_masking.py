"""Secrets never reach a recording; everything else does, byte for byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import Hello, Ping, Request, serialize, serialize_call
from crosswire.wire.emp.mask import EmpMask
from crosswire.wire.epoxy import frames as epoxy
from crosswire.wire.epoxy.comm import find_credentials, marshal_credentials
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.mask import EpoxyMask
from crosswire.wire.masking import Mask
from crosswire.wire.micromsg2 import frames as micromsg2
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.extensions import token
from crosswire.wire.micromsg2.mask import MicroMsg2Mask
from crosswire.wire.zmtp import frames as zmtp
from crosswire.wire.zmtp.mask import ZmtpMask

SECRET = b"s3cr3t-Token"


def request(number: int, op: str, data: bytes = b"{}") -> bytes:
    return serialize(Request(number, serialize_call(op, data)))


def call(service: str, layer_data: bytes | None, payload: bytes) -> bytes:
    kind = epoxy.MessageType.REQUEST
    return epoxy.serialize(
        epoxy.Message(7, kind, service, "m", layer_data, b"CB\x01\x00" + payload, None)
    )


def handshake(*extensions: micromsg2.Extension, minor: int = 0) -> bytes:
    other = micromsg2.Extension("x-other", {"token": "shown"})
    return micromsg2.serialize(
        micromsg2.Handshake(1, minor, 0, "me", (other,), (*extensions, other))
    )


def hello(name: bytes, password: bytes) -> bytes:
    body = bytes((len(name),)) + name + bytes((len(password),)) + password
    return zmtp.serialize_command("HELLO", body)


AUTH = token(SECRET.decode())
STREAMS: dict[str, tuple[type[Mask], bytes]] = {
    "emp": (
        EmpMask,
        b"".join(
            [
                serialize(Hello(1)),
                request(1, "$echo", b'{"token":"shown"}'),
                request(2, "$authenticate", b'{"token":"%s"}' % SECRET),
                serialize(Ping()),
                request(3, "$publish", b'{"text":"please $authenticate"}'),
                serialize(Request(4, b'{"data":{"token": "%s"},"op":"$authenticate"}' % SECRET)),
                serialize(
                    Request(5, b'{"op":"$auth\\u0065nticate","data":{"token":"%s"}}' % SECRET)
                ),
                serialize(Request(6, b'{"op":"$authenticate","data":{"token":"%s"' % SECRET)),
            ]
        ),
    ),
    "epoxy": (
        EpoxyMask,
        b"".join(
            [
                epoxy.serialize(epoxy.ConfigFrame()),
                call("a", marshal_credentials(SECRET.decode()), b"shown"),
                call("b", None, b"shown" * 20),
                call("c", b"FM\x01\x00other layer data", b"shown"),
                call("d", marshal_credentials(SECRET.decode()), b""),
            ]
        ),
    ),
    "micromsg2": (
        MicroMsg2Mask,
        handshake(AUTH)
        + handshake(micromsg2.Extension("X-Auth", {"token": SECRET.decode()}))
        + micromsg2.serialize(micromsg2.Message(1, "queue/q", b"", b"x-auth:token=shown")),
    ),
    "zmtp": (
        ZmtpMask,
        zmtp.serialize(zmtp.Greeting("PLAIN"))
        + hello(b"shown", SECRET)
        + zmtp.serialize_command("INITIATE", zmtp.serialize_metadata({"Socket-Type": b"DEALER"}))
        + zmtp.serialize_message([b"\x05HELLO", b"shown"]),
    ),
}


def masked(kind: type[Mask], stream: bytes, cuts: list[int]) -> bytes:
    mask = kind()
    indexes = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [mask.feed(stream[a:b]) for a, b in pairwise(indexes)]
    return b"".join(pieces) + mask.rest()


@pytest.mark.parametrize("name", STREAMS)
def test_a_secret_is_covered_and_nothing_else_changes(name: str) -> None:
    kind, stream = STREAMS[name]
    shown = masked(kind, stream, [])
    assert SECRET in stream
    assert shown == stream.replace(SECRET, b"*" * len(SECRET))


@pytest.mark.parametrize("name", STREAMS)
def test_byte_by_byte_it_is_the_same(name: str) -> None:
    kind, stream = STREAMS[name]
    assert masked(kind, stream, list(range(len(stream)))) == masked(kind, stream, [])


@pytest.mark.parametrize("name", STREAMS)
@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 2000), max_size=6))
def test_any_cut_gives_the_same(name: str, cuts: list[int]) -> None:
    kind, stream = STREAMS[name]
    assert masked(kind, stream, cuts) == masked(kind, stream, [])


@pytest.mark.parametrize("name", STREAMS)
@settings(max_examples=100)
@given(junk=st.binary(max_size=200), cut=st.integers(0, 400))
def test_whatever_comes_keeps_its_length(name: str, junk: bytes, cut: int) -> None:
    kind, stream = STREAMS[name]
    stream = stream[:cut] + junk
    assert len(masked(kind, stream, [cut, cut + 1])) == len(stream)


@pytest.mark.parametrize("name", STREAMS)
@given(cut=st.integers(0, 2000))
def test_a_connection_that_ends_early_shows_no_part_of_a_secret(name: str, cut: int) -> None:
    kind, stream = STREAMS[name]
    shown = masked(kind, stream[:cut], [])
    assert SECRET[:6] not in shown


def test_masked_frames_still_decode() -> None:
    shown = masked(*STREAMS["emp"], [])
    rows = EmpDecoder("client").rows(shown)
    assert [row.error for row in rows[:-1]] == [None] * (len(rows) - 1)
    shown = masked(*STREAMS["epoxy"], [])
    items = [item for _, _, item in EpoxyDecoder("client").feed(shown)]
    messages = [item for item in items if isinstance(item, epoxy.Message)]
    found = [find_credentials(each.layer_data or b"") for each in messages]
    assert found == ["*" * len(SECRET), None, None, "*" * len(SECRET)]
    rows = MicroMsg2Decoder("client").rows(masked(*STREAMS["micromsg2"], []))
    assert [row.frame for row in rows] == ["handshake", "handshake", "message"]


@pytest.mark.parametrize("name", ["micromsg2", "zmtp"])
def test_after_the_handshake_nothing_is_masked(name: str) -> None:
    kind, stream = STREAMS[name]
    mask = kind()
    assert not mask.is_done
    mask.feed(stream)
    assert mask.is_done


def test_a_mechanism_without_a_password_is_passed_through() -> None:
    mask = ZmtpMask()
    stream = zmtp.serialize(zmtp.Greeting("NULL")) + hello(b"a", SECRET)
    assert mask.feed(stream) == stream


def test_large_messages_are_not_held_back_where_no_secret_can_be() -> None:
    mask: Mask = EpoxyMask()
    start = call("a", None, bytes(1000))[:-500]
    assert mask.feed(start) == start
    mask = EmpMask()
    answer = bytes.fromhex("00001000 06000000") + bytes(100)
    assert mask.feed(answer) == answer
