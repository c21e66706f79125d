"""MicroMsg2's columnar scanner gives what its decoder gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.scanners.micromsg2 import MicroMsg2Scanner
from crosswire.pipeline.decode.scanners.scanner import OFFSET, STOP_REASON, UNSURE
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.frames import (
    Command,
    Error,
    Extension,
    ExtensionFrame,
    Handshake,
    Message,
    serialize,
)
from crosswire.wire.micromsg2.values import MAX_CALL_BYTES, MAX_ITEMS
from tests.pipeline.decode.scanned import Noisy, Typed, check, check_alone, noisy
from tests.wire.micromsg2.strategies import frames, streams
from tests.wire.stream import Stream

SCANNER = MicroMsg2Scanner()


def typed(frame: Frame, raw: bytes) -> Typed:
    match frame:
        case Message():
            slices = {
                "destination": frame.destination.encode(),
                "properties": frame.raw_properties,
                "payload": frame.payload,
            }
            return 0, frame.continued, frame.sequence, slices
        case ExtensionFrame(id=number, payload=payload):
            return number, NONE, NONE, {"payload": payload}
        case Command() | Error():
            return 0, NONE, NONE, {"payload": raw[5 if raw[0] & 8 else 2 :]}
        case Handshake():
            number = frame.major << 16 | frame.minor << 8 | frame.flags
            identity = frame.identity.encode("latin-1")
            lists = raw[4 + len(identity) :]
            return number, NONE, NONE, {"destination": identity, "payload": lists}
    return 0, NONE, NONE, {}


@pytest.mark.parametrize("sender", ["client", "server"])
@settings(max_examples=60)
@given(data=st.data(), step=st.integers(1, 64))
def test_scanner_and_decoder_give_the_decoders_rows(
    sender: str, data: st.DataObject, step: int
) -> None:
    cases = data.draw(st.lists(noisy(streams(sender), 3), min_size=1, max_size=4))
    check(SCANNER, "micromsg2", sender, cases, typed, step_bytes=step)


@pytest.mark.parametrize("sender", ["client", "server"])
@settings(max_examples=25)
@given(data=st.data())
def test_valid_streams_need_no_decoder(sender: str, data: st.DataObject) -> None:
    sent = data.draw(st.lists(streams(sender), min_size=1, max_size=4))
    check_alone(SCANNER, "micromsg2", sender, sent, typed)


@settings(max_examples=20)
@given(data=st.data(), first=st.integers(65530, 65535))
def test_sequence_numbers_start_anew_after_the_last(data: st.DataObject, first: int) -> None:
    sent = b"".join(map(serialize, data.draw(frames(first, max_size=12))))
    case = data.draw(noisy(st.just(Stream(sent, hints={"next_sequence": first})), 2))
    check(SCANNER, "micromsg2", "server", [case], typed)


@settings(max_examples=20)
@given(cases=st.lists(noisy(streams("client"), 2), min_size=1, max_size=2))
def test_a_decoder_that_joined_late_gives_back(cases: list[Noisy]) -> None:
    check(SCANNER, "micromsg2", "client", cases, typed, late=True)


anything = st.builds(
    Message,
    st.integers(0, 3),
    st.sampled_from(["", "d"]),
    st.sampled_from([b"", b"k:N1;"]),
    st.just(b"x"),
    st.booleans(),
)


@settings(max_examples=150)
@given(sent=st.lists(anything, min_size=1, max_size=4))
def test_sequence_and_continuation_are_judged_alike(sent: list[Message]) -> None:
    case = Stream(b"".join(map(serialize, sent)), hints={"next_sequence": 1})
    check(SCANNER, "micromsg2", "server", [Noisy(case, case.data, (case.data,))], typed)


texts = st.text("ab-_%4cC39aé;,=:+ ", max_size=12).map(str.encode)


@settings(max_examples=150)
@given(kind=st.sampled_from([1, 4]), text=texts | texts.map(lambda text: b"n;k=" + text))
def test_commands_and_errors_are_judged_alike(kind: int, text: bytes) -> None:
    case = Stream(bytes((kind, len(text))) + text, hints={"next_sequence": 1})
    check(SCANNER, "micromsg2", "server", [Noisy(case, case.data, (case.data,))], typed)


@settings(max_examples=150)
@given(required=texts, optional=texts | texts.map(lambda text: b"n:k=" + text), more=texts)
def test_lists_of_extensions_are_judged_alike(
    required: bytes, optional: bytes, more: bytes
) -> None:
    lists = b"".join(len(each).to_bytes(2) + each for each in (required, optional))
    case = Stream(b"\1\0\0\1i" + lists + b"\2\1\0\2\2\0" + more)
    check(SCANNER, "micromsg2", "server", [Noisy(case, case.data, (case.data,))], typed)


@pytest.mark.parametrize(
    "text",
    [
        b"n;" + b"k=1," * MAX_ITEMS + b"k=1",
        b"n;" + b"k=1," * (MAX_ITEMS + 1) + b"k=1",
        b"n;k=" + b"x" * (MAX_CALL_BYTES - 4),
        b"n;k=" + b"x" * (MAX_CALL_BYTES - 3),
    ],
)
def test_limits_of_commands_are_those_of_the_decoder(text: bytes) -> None:
    sent = b"\x09" + len(text).to_bytes(4) + text + b"\x01\x01n"
    case = Stream(sent, hints={"next_sequence": 1})
    check(SCANNER, "micromsg2", "server", [Noisy(case, case.data, (case.data,))], typed)


@pytest.mark.parametrize("item", [b"n;", b"n:k=1,"])
@pytest.mark.parametrize("count", [MAX_ITEMS, MAX_ITEMS + 1])
def test_limits_of_extensions_are_those_of_the_decoder(item: bytes, count: int) -> None:
    extensions = item[:2] + item[2:] * count + item[2:-1] if b":" in item else item * count
    case = Stream(b"\1\0\0\1i" + len(extensions).to_bytes(2) + extensions + b"\0\0")
    check(SCANNER, "micromsg2", "server", [Noisy(case, case.data, (case.data,))], typed)


def test_a_server_has_the_extensions_of_its_client() -> None:
    hello = Handshake(1, 0, 0, "me", (Extension("ack", {}),), ())
    sent_bytes = serialize(hello) * 2
    client = SCANNER.new_states("client", 1)
    data = np.frombuffer(sent_bytes, np.uint8)
    SCANNER.scan(data, np.zeros(1, np.int64), np.array([len(sent_bytes)]), client)
    server = SCANNER.new_states("server", 1)
    SCANNER.share_handshake(server, client)
    answer = serialize(hello) + b"".join(
        serialize(ExtensionFrame(number, b"\0\1")) for number in (1, 2)
    )
    at = np.zeros(1, np.int64)
    columns = SCANNER.scan(np.frombuffer(answer, np.uint8), at, np.array([len(answer)]), server)
    assert columns.number.tolist()[1:] == [1]
    assert (at[0], server[0, STOP_REASON]) == (server[0, OFFSET], UNSURE)


def test_what_only_the_decoder_keeps_it_reads_itself() -> None:
    hello = serialize(Handshake(1, 0, 0, "me", (Extension("ack", {}),), ()))
    sent_bytes = hello * 2 + serialize(Message(1, "d", b"", b"x"))
    data, states = np.frombuffer(sent_bytes, np.uint8), SCANNER.new_states("client", 1)
    SCANNER.scan(data, np.zeros(1, np.int64), np.array([len(sent_bytes)]), states)
    decoder = MicroMsg2Decoder("client")
    SCANNER.hand_over(decoder, states[0], data, 0)
    assert decoder.agreed == ["ack"]
