"""Secrets are masked in frames, also for who joins late, and nothing else is."""

from __future__ import annotations

import json

import pytest

from crosswire.analyzer.analysis import CaptureAnalysis
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire.emp.frames import Hello, Request, serialize_call
from crosswire.wire.emp.frames import serialize as serialize_emp
from crosswire.wire.epoxy.comm import marshal_credentials
from crosswire.wire.epoxy.frames import ConfigFrame, Message, MessageType
from crosswire.wire.epoxy.frames import serialize as serialize_epoxy
from crosswire.wire.micromsg2.frames import Extension, Handshake
from crosswire.wire.micromsg2.frames import serialize as serialize_micromsg2
from crosswire.wire.registry import PROTOCOL_NAMES
from crosswire.wire.zmtp.frames import Greeting, serialize_command
from crosswire.wire.zmtp.frames import serialize as serialize_zmtp

SECRET = "the-secret-of-anna"

_CALL = serialize_call("$authenticate", b'{"token":"%b"}' % SECRET.encode())
EMP = serialize_emp(Hello(1)) + 3 * serialize_emp(Request(1, _CALL))
EPOXY = serialize_epoxy(ConfigFrame()) + 3 * serialize_epoxy(
    Message(1, MessageType.REQUEST, "S", "M", marshal_credentials(SECRET), b"CB\x01\x00\x00")
)
MICROMSG2 = serialize_micromsg2(
    Handshake(1, 0, 0, "anna", (Extension("x-auth", {"token": SECRET}),), ())
)
_LARGE = bytes(2 << 20)
LARGE_EMP = serialize_emp(
    Request(1, serialize_call("$authenticate", b'{"token":"%b","a":"%b"}' % (
        SECRET.encode(), _LARGE.replace(b"\x00", b"x")
    )))
)  # fmt: skip
LARGE_EPOXY = serialize_epoxy(
    Message(1, MessageType.REQUEST, "S", "M", marshal_credentials(SECRET), _LARGE)
)
PLAIN = bytes((4,)) + b"anna" + bytes((len(SECRET),)) + SECRET.encode()
ZMTP = serialize_zmtp(Greeting("PLAIN")) + serialize_command("HELLO", PLAIN)
BROKEN = serialize_emp(Hello(1)) + serialize_emp(Request(1, _CALL[:-1]))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("emp", EMP),
        ("epoxy", EPOXY),
        ("micromsg2", MICROMSG2),
        ("emqp", ZMTP),
        ("emp", BROKEN),
        ("micromsg2", MICROMSG2.replace(b"anna", b"an\xffa")),
        ("emqp", ZMTP[:64] + b"\x04" + ZMTP[65:66] + b"\xff" + ZMTP[67:]),
    ],
)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cut", [0, 9])
def test_secrets_are_masked(name: str, data: bytes, late: bool, cut: int) -> None:
    frames = list(CaptureAnalysis().raw_frames([data[cut:]], name, late=late))
    if not late and not cut:
        assert frames
    for each in frames:
        assert SECRET.encode() not in each.decoded.data
        shown = json.dumps(each.decoded.fields, default=lambda value: bytes(value).decode())
        assert SECRET not in shown and SECRET.encode().hex() not in shown
        assert len(each.decoded.data) == each.decoded.length


def test_what_is_masked_is_marked() -> None:
    hello, first, *_ = CaptureAnalysis().raw_frames([EMP], "emp")
    assert not hello.decoded.is_masked and first.decoded.is_masked
    assert first.decoded.data.count(b"*") == len(SECRET)


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_nothing_else_is_masked(name: str) -> None:
    talk = SampleTraffic(messages=20).conversation(0, name)
    sent = b"".join(data for _, forward, data in talk.chunks if forward)
    frames = list(CaptureAnalysis().raw_frames([sent], name))
    assert frames and not any(each.decoded.is_masked for each in frames)


@pytest.mark.parametrize(
    ("name", "data", "shown"),
    [("emp", LARGE_EMP, "$authenticate"), ("epoxy", LARGE_EPOXY, "S")],
    ids=["emp", "epoxy"],
)
def test_secrets_in_frames_whose_bytes_are_not_kept(name: str, data: bytes, shown: str) -> None:
    """They can't be masked, so nothing is shown that may be one."""
    start = serialize_emp(Hello(1)) if name == "emp" else serialize_epoxy(ConfigFrame())
    parts = [data[at : at + (1 << 19)] for at in range(0, len(data), 1 << 19)]
    [_, frame] = CaptureAnalysis().raw_frames([start, *parts], name)
    fields = json.dumps(frame.decoded.fields)
    assert frame.decoded.data == b"" and shown in fields
    assert SECRET not in fields and SECRET.encode().hex() not in fields
