"""EMP's columnar scanner gives what its decoder gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.scanners.emp import EmpScanner
from crosswire.pipeline.decode.scanners.scanner import INCOMPLETE, STOP_REASON, UNSURE
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import (
    EmpLimits,
    Error,
    Hello,
    Ping,
    Request,
    Response,
    serialize,
)
from tests.pipeline.decode.scanned import Noisy, Typed, check, check_alone, noisy
from tests.wire.emp.strategies import streams
from tests.wire.stream import Stream

SCANNER = EmpScanner()


def typed(frame: Frame, raw: bytes) -> Typed:
    match frame:
        case Request(id=identifier, body=body) | Response(id=identifier, body=body):
            return identifier, NONE, NONE, {"body": body}
        case Error(code=code, description=description):
            return 0, code, NONE, {"body": description.encode()}
        case Hello(version=version):
            return 0, version, NONE, {}
    return 0, NONE, NONE, {}


@settings(max_examples=100)
@given(cases=st.lists(noisy(streams("client"), 3), min_size=1, max_size=4), step=st.integers(1, 64))
def test_scanner_and_decoder_give_the_decoders_rows(cases: list[Noisy], step: int) -> None:
    check(SCANNER, "emp", "client", cases, typed, step_bytes=step)


@settings(max_examples=30)
@given(sent=st.lists(streams("server"), min_size=1, max_size=5))
def test_valid_streams_need_no_decoder(sent: list[Stream]) -> None:
    check_alone(SCANNER, "emp", "server", sent, typed)


@settings(max_examples=30)
@given(cases=st.lists(noisy(streams("client"), 2), min_size=1, max_size=2))
def test_a_decoder_that_joined_late_gives_back(cases: list[Noisy]) -> None:
    check(SCANNER, "emp", "client", cases, typed, late=True)


octets = st.sampled_from([0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF])
leads = st.sampled_from([0xE0, 0xE1, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF])
descriptions = st.lists(octets | leads, max_size=6).map(bytes)


@settings(max_examples=200)
@given(text=descriptions | st.text(max_size=4).map(str.encode))
def test_text_is_judged_alike(text: bytes) -> None:
    head = (10 + len(text)).to_bytes(4) + b"\4\0\0\0\1\0\0\0" + len(text).to_bytes(2)
    case = Stream(head + text + serialize(Ping()))
    check(SCANNER, "emp", "client", [Noisy(case, case.data, (case.data,))], typed)


def stop_of(data: bytes, scanner: EmpScanner = SCANNER) -> tuple[int, int]:
    at, states = np.zeros(1, np.int64), scanner.new_states("client", 1)
    scanner.scan(np.frombuffer(data, np.uint8), at, np.array([len(data)]), states)
    return int(at[0]), int(states[0, STOP_REASON])


def test_it_stops_before_a_message_that_is_not_whole() -> None:
    ping = serialize(Ping())
    assert stop_of(ping + ping[:5]) == (len(ping), INCOMPLETE)


def test_it_stops_before_a_violation() -> None:
    ping = serialize(Ping())
    assert stop_of(ping + b"\0\0\0\4\x09\0\0\0" + ping) == (len(ping), UNSURE)


def test_it_keeps_the_limit_before_the_bytes_are_there() -> None:
    scanner = EmpScanner(EmpLimits(frame_bytes=100))
    assert stop_of((101).to_bytes(4), scanner) == (0, UNSURE)


def test_more_rows_than_room_was_made_for() -> None:
    count = 1000
    data = serialize(Ping()) * count
    at, states = np.zeros(1, np.int64), SCANNER.new_states("client", 1)
    columns = SCANNER.scan(np.frombuffer(data, np.uint8), at, np.array([len(data)]), states)
    assert columns.offset.tolist() == list(range(0, 8 * count, 8))
