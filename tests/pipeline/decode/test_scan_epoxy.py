"""Epoxy's columnar scanner gives what its decoder gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.scanners.epoxy import EpoxyScanner
from crosswire.pipeline.decode.scanners.scanner import STOP_REASON, UNSURE
from crosswire.wire.contract import Frame
from crosswire.wire.epoxy.frames import (
    ConfigFrame,
    EpoxyLimits,
    Message,
    MessageType,
    ProtocolError,
    serialize,
)
from tests.pipeline.decode.scanned import Noisy, Slices, Typed, check, check_alone, noisy
from tests.wire.epoxy.strategies import contents, messages, streams
from tests.wire.stream import Stream

SCANNER = EpoxyScanner()


def typed(frame: Frame, raw: bytes) -> Typed:
    if not isinstance(frame, Message):
        return 0, NONE, NONE, {}
    slices: Slices = {
        "service": frame.service_name.encode(),
        "method": frame.method_name.encode(),
        "payload": frame.payload if frame.error is None else frame.error,
    }
    if frame.layer_data is not None:
        slices["layer_data"] = frame.layer_data
    detail = frame.message_type + (0 if frame.error is None else 4)
    return frame.conversation_id, detail, NONE, slices


@settings(max_examples=100)
@given(cases=st.lists(noisy(streams("client"), 3), min_size=1, max_size=4), step=st.integers(1, 64))
def test_scanner_and_decoder_give_the_decoders_rows(cases: list[Noisy], step: int) -> None:
    check(SCANNER, "epoxy", "client", cases, typed, step_bytes=step)


@settings(max_examples=30)
@given(sent=st.lists(st.lists(messages, max_size=5), min_size=1, max_size=4))
def test_usual_streams_need_no_decoder(sent: list[list[Message]]) -> None:
    sent_bytes = [Stream(b"".join(map(serialize, [ConfigFrame(), *each]))) for each in sent]
    check_alone(SCANNER, "epoxy", "server", sent_bytes, typed)


@settings(max_examples=30)
@given(cases=st.lists(noisy(streams("client"), 2), min_size=1, max_size=2))
def test_a_decoder_that_joined_late_gives_back(cases: list[Noisy]) -> None:
    check(SCANNER, "epoxy", "client", cases, typed, late=True)


def framelets(*pairs: tuple[bytes, bytes]) -> bytes:
    framed = [kind + len(content).to_bytes(4, "little") + content for kind, content in pairs]
    return len(pairs).to_bytes(2, "little") + b"".join(framed)


kinds = st.sampled_from([b"CG", b"HR", b"LY", b"PD", b"ED", b"ER"])
fields = st.sampled_from(
    [
        bytes.fromhex("060000 0700000000000000"),
        bytes.fromhex("100100 01000000"),
        bytes.fromhex("100100 04000000"),
        bytes.fromhex("090200 01 61"),
        bytes.fromhex("090200 8100 61"),
        bytes.fromhex("090200 01 ff"),
        bytes.fromhex("090300 ff"),
        bytes.fromhex("090300 00"),
        bytes.fromhex("00"),
    ]
)
MESSAGE_TYPE = bytes.fromhex("100100 01000000")


def judged_alike(sent_bytes: bytes) -> None:
    case = Stream(sent_bytes + serialize(ConfigFrame()))
    check(SCANNER, "epoxy", "client", [Noisy(case, case.data, (case.data,))], typed)


@settings(max_examples=200)
@given(first=fields | st.just(MESSAGE_TYPE), more=st.lists(fields, max_size=4))
def test_headers_are_judged_alike(first: bytes, more: list[bytes]) -> None:
    judged_alike(framelets((b"HR", first + b"".join(more)), (b"PD", b"x")))


@settings(max_examples=100)
@given(layers=st.lists(st.tuples(kinds, contents | st.just(b"")), min_size=1, max_size=3))
def test_framelets_are_judged_alike(layers: list[tuple[bytes, bytes]]) -> None:
    judged_alike(framelets((b"HR", MESSAGE_TYPE + b"\0"), *layers))


def stop_of(scanner: EpoxyScanner, sent_bytes: bytes) -> tuple[int, int]:
    at, states = np.zeros(1, np.int64), scanner.new_states("client", 1)
    scanner.scan(np.frombuffer(sent_bytes, np.uint8), at, np.array([len(sent_bytes)]), states)
    return int(at[0]), int(states[0, STOP_REASON])


def test_it_leaves_a_protocol_error_to_the_decoder() -> None:
    config = serialize(ConfigFrame())
    assert stop_of(SCANNER, config + serialize(ProtocolError(3))) == (len(config), UNSURE)


def test_it_keeps_the_limits_before_the_bytes_are_there() -> None:
    scanner = EpoxyScanner(EpoxyLimits(framelet_bytes=600))
    message = Message(1, MessageType.EVENT, "s", "m", payload=b"x" * 601)
    assert stop_of(scanner, serialize(message)[:-600]) == (0, UNSURE)
