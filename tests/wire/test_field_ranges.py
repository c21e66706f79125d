"""The ranges of fields hold exactly the bytes that the fields were read from."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

import pytest

from crosswire.testing.traffic import SampleTraffic
from crosswire.wire.contract import Decoder, Frame, FrameError
from crosswire.wire.field_ranges import FieldRange, field_ranges
from crosswire.wire.micromsg2.values import parse_value
from crosswire.wire.registry import PROTOCOL_NAMES, protocol
from crosswire.wire.zmtp.frames import serialize_message
from tests.wire.vectors import load

FLAGS = {"multicast", "continued", "as_server", "operation", "acknowledgement", "message_type"}
"""Fields that share a byte with others, or are names for a number in it."""
PARTLY = {"connector_transactions", "listener_transactions", "require_old_link", "error_code"}


def value_at(fields: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        fields = fields[step]
    return fields


def meanings(data: bytes) -> list[Any]:
    """What these bytes may be read as."""
    found: list[Any] = [
        data.hex(),
        int.from_bytes(data),
        int.from_bytes(data, "little"),
        data.rstrip(b"\0").decode("latin-1"),
        ".".join(map(str, data)),
    ]
    for read in (
        lambda: data.decode(),
        lambda: unquote(data.decode()),
        lambda: parse_value(data.decode()),
        lambda: json.loads(data),
    ):
        try:
            found.append(read())
        except (ValueError, FrameError):
            continue
    return found


def is_omitted(value: Any) -> bool:
    """Whether it may be on the wire without a byte: what is empty, Bond's defaults, and channels
    whose ids have no bytes."""
    if isinstance(value, list):
        return not any(value)
    return value in ({}, "", 0, "generic-error")


def check(found: list[FieldRange], fields: dict[str, Any], data: bytes, *, whole: bool) -> None:
    covered: set[int] = set()
    for each in found:
        assert 0 <= each.start <= each.end <= len(data)
        covered.update(range(each.start, each.end))
        if not each.is_field:
            continue
        value = value_at(fields, each.path)
        if each.path[-1] in FLAGS | PARTLY or isinstance(value, dict | list):
            continue
        assert value in meanings(data[each.start : each.end]), each
    names = {each.path[0] for each in found if each.is_field}
    written = {name for name, value in fields.items() if not is_omitted(value)}
    assert written <= names
    if whole:
        assert covered == set(range(len(data)))


def decoded(name: str, decoder: Decoder, data: bytes) -> int:
    count = 0
    for offset, length, item in decoder.feed(data):
        assert isinstance(item, Frame)
        fields = json.loads(json.dumps(decoder.describe(offset, length, item).fields, default=raw))
        own = data[offset : offset + length]
        # JSON has signs between its values, text has separators, and layer 1 is inside of layer 0.
        whole = item.layer == 0 and name in ("relink", "epoxy")
        check(field_ranges(name, item, own, decoder), fields, own, whole=whole)
        count += 1
    return count


def raw(value: Any) -> Any:
    return json.loads(bytes(value))


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_ranges_in_whole_conversations(name: str) -> None:
    talk = SampleTraffic(messages=40, payload_bytes=300).conversation(0, name)
    roles = protocol(name).roles
    forward = protocol(name).decoder(roles[0])
    backward = protocol(name).decoder(roles[-1], peer=forward)
    there = b"".join(data for _, is_forward, data in talk.chunks if is_forward)
    back = b"".join(data for _, is_forward, data in talk.chunks if not is_forward)
    assert decoded(name, forward, there) > 20
    assert decoded(name, backward, back) > 20


@pytest.mark.parametrize("name", ["emp", "epoxy"])
def test_ranges_in_recorded_frames(name: str) -> None:
    seen = 0
    for vector in load(name):
        if "frame" in vector:
            decoder = protocol(name).decoder(protocol(name).roles[0])
            seen += decoded(name, decoder, bytes.fromhex(vector["wire"]))
    assert seen > 10


@pytest.mark.parametrize("name", ["relink", "micromsg2"])
def test_ranges_in_frames_of_every_form(name: str) -> None:
    seen = 0
    for vector in load(name):
        if "error" in vector or not vector.get("frames"):
            continue
        context, sender = vector["context"], vector["direction"]
        is_late = context["phase"] == "packets"
        hints = {key: value for key, value in context.items() if isinstance(value, int)}
        if is_late and name == "micromsg2":
            hints = {"next_sequence": 1} | hints
        decoder = protocol(name).decoder(sender, hints=hints)
        data = bytes.fromhex(vector["wire"])
        if is_late and name == "relink":
            decoder._stage = type(decoder._stage)("packets")  # type: ignore[attr-defined]
        placed = decoder.feed(data)
        for offset, length, item in placed:
            assert isinstance(item, Frame)
            row = decoder.describe(offset, length, item)
            if row.fields is None:
                continue
            own = data[offset : offset + length]
            found = field_ranges(name, item, own, decoder)
            check(found, row.fields, own, whole=name == "relink")
            seen += 1
    assert seen > 20


def test_ranges_in_recorded_commands() -> None:
    for vector in load("emqp"):
        decoder = protocol("emqp").decoder(vector["direction"].split("->")[0], late=False)
        decoder._stage = type(decoder._stage)("traffic")  # type: ignore[attr-defined]
        data = serialize_message([bytes.fromhex(part) for part in vector["frames"]])
        placed = decoder.feed(data)
        for offset, length, item in placed:
            assert isinstance(item, Frame)
            row = decoder.describe(offset, length, item)
            if row.fields is not None:
                check(field_ranges("emqp", item, data, decoder), row.fields, data, whole=False)


def test_a_value_that_occurs_twice_is_not_confused() -> None:
    body = b'{"data":{"op":"op","x":["op",{"op":1}]},"op":"op"}'
    data = (12 + len(body)).to_bytes(4) + b"\x05\0\0\0" + (7).to_bytes(8) + body
    decoder = protocol("emp").decoder("client")
    ((_, _, frame),) = decoder.feed(data)
    assert isinstance(frame, Frame)
    found = {each.path: data[each.start : each.end] for each in _fields(frame, data, decoder)}
    assert found[("op",)] == b'"op"' and found[("data", "x", 1, "op")] == b"1"
    (last,) = [each for each in _fields(frame, data, decoder) if each.path == ("op",)]
    assert last.end == len(data) - 1


def _fields(frame: Frame, data: bytes, decoder: Decoder) -> list[FieldRange]:
    return [each for each in field_ranges("emp", frame, data, decoder) if each.is_field]


def test_a_frame_of_very_many_parts_has_few_ranges() -> None:
    decoder = protocol("emqp").decoder("client")
    decoder._stage = type(decoder._stage)("traffic")  # type: ignore[attr-defined]
    data = serialize_message([b""] * 60_000)
    (_, _, frame), *_ = decoder.feed(data)
    assert isinstance(frame, Frame)
    assert len(field_ranges("emqp", frame, data, decoder)) == 1000
