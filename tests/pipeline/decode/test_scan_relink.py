"""Relink's columnar scanner gives what its decoder gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.scanners.relink import RelinkScanner
from crosswire.pipeline.decode.scanners.scanner import STOP_REASON, UNSURE
from crosswire.wire.contract import Frame
from crosswire.wire.relink.frames import (
    Message,
    Ping,
    RelinkLimits,
    SequenceAcknowledgement,
    SequenceOperation,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    ListenerHello,
    ListenerVersion,
)
from tests.pipeline.decode.scanned import Slices, Typed, check, check_alone, noisy
from tests.wire.relink.strategies import (
    connector_start,
    hints_of,
    id_sizes,
    listener_start,
    packets,
    streams,
    written,
)
from tests.wire.stream import Stream

SCANNER = RelinkScanner()


def typed(frame: Frame, raw: bytes) -> Typed:
    match frame:
        case ConnectorVersion(version=version) | ListenerVersion(version=version):
            return version, NONE, NONE, {}
        case ListenerHello(epoch=epoch, link=link):
            return link, NONE, NONE, {"payload": epoch.to_bytes(8, "little")}
        case ConnectorHello(epoch=epoch, link=link):
            name = frame.endpoint.encode()
            slices = {
                "endpoint": name,
                "sizes": bytes((frame.connector_id_size, frame.listener_id_size)),
                "payload": epoch.to_bytes(8, "little"),
            }
            return link, raw[len(name) + 3], NONE, slices
    if not hasattr(frame, "channels"):
        return 0, NONE, NONE, {}
    return _of_channels(frame, raw)


def _of_channels(frame: Frame, raw: bytes) -> Typed:
    channels = list(frame.channels)  # type: ignore[attr-defined]
    sequence = NONE
    if isinstance(frame, SequenceOperation | SequenceAcknowledgement):
        sequence = frame.sequence
    slices: Slices = {"channels": channels}
    if isinstance(frame, Message):
        slices |= _parts(frame, raw)
    detail = raw[0] >> 5 | (8 if raw[0] & 2 else 0)
    return channels[0] if channels else 0, detail, sequence, slices


def _parts(frame: Message, raw: bytes) -> Slices:
    parts = [bytes(part) for part in frame.parts]
    width = 8 if raw[0] & 0x40 else 2
    slices = {"sizes": b"".join(len(part).to_bytes(width, "little") for part in parts)}
    if len(parts) <= 2:
        slices["payload"] = parts[-1] if parts else b""
        if len(parts) == 2:
            slices["properties"] = parts[0]
    else:
        # As they stand: nobody promises that padding is zero.
        padding = -len(parts[-1]) % 8
        padded = sum(len(part) + -len(part) % 8 for part in parts)
        slices["payload"] = raw[len(raw) - padded : len(raw) - padding]
    return slices


def read_channels(slices: Slices, raw: bytes) -> Slices:
    """A packet has the number of its channels, but not the size of their ids."""
    if "channels" in slices:
        ids = slices["channels"]
        count = int.from_bytes(raw[4:8], "little") if raw[0] & 2 else 1
        size = len(ids) // count if count else 0
        slices["channels"] = [
            int.from_bytes(ids[index * size : (index + 1) * size], "little")
            for index in range(count)
        ]
    return slices


@pytest.mark.parametrize("sender", ["connector", "listener"])
@settings(max_examples=60)
@given(data=st.data(), step=st.integers(1, 64))
def test_scanner_and_decoder_give_the_decoders_rows(
    sender: str, data: st.DataObject, step: int
) -> None:
    cases = data.draw(st.lists(noisy(streams(sender), 3), min_size=1, max_size=3))
    check(SCANNER, "relink", sender, cases, typed, step_bytes=step, reader=read_channels)


@settings(max_examples=25)
@given(sent=st.lists(streams("connector"), min_size=1, max_size=3))
def test_valid_streams_need_no_decoder(sent: list[Stream]) -> None:
    check_alone(SCANNER, "relink", "connector", sent, typed, reader=read_channels)


@settings(max_examples=25)
@given(data=st.data(), sizes=id_sizes)
def test_a_listener_has_the_sizes_of_ids_from_its_connector(
    data: st.DataObject, sizes: tuple[int, int]
) -> None:
    start = np.frombuffer(connector_start(sizes), np.uint8)
    peers = SCANNER.new_states("connector", 1)
    SCANNER.scan(start, np.zeros(1, np.int64), np.array([len(start)]), peers)
    sent = data.draw(st.lists(packets("listener", sizes), max_size=4))
    sent_bytes = listener_start() + written(sent, "listener", sizes)
    stream = Stream(sent_bytes, hints=hints_of(sizes))
    check_alone(SCANNER, "relink", "listener", [stream], typed, reader=read_channels, peers=peers)


@settings(max_examples=20)
@given(data=st.data(), sizes=id_sizes)
def test_a_decoder_that_joined_late_gives_back(data: st.DataObject, sizes: tuple[int, int]) -> None:
    sent = data.draw(st.lists(packets("connector", sizes), max_size=8))
    stream = Stream(written(sent, "connector", sizes), hints=hints_of(sizes))
    cases = [data.draw(noisy(st.just(stream), 2))]
    check(SCANNER, "relink", "connector", cases, typed, late=True, reader=read_channels)


def stop_of(scanner: RelinkScanner, sent_bytes: bytes) -> tuple[int, int]:
    at, states = np.zeros(1, np.int64), scanner.new_states("connector", 1)
    scanner.scan(np.frombuffer(sent_bytes, np.uint8), at, np.array([len(sent_bytes)]), states)
    return int(at[0]), int(states[0, STOP_REASON])


@pytest.mark.parametrize(
    "limits",
    [RelinkLimits(parts=2), RelinkLimits(targets=2), RelinkLimits(frame_bytes=32)],
    ids=["parts", "targets", "bytes"],
)
def test_it_stops_before_what_passes_a_limit(limits: RelinkLimits) -> None:
    start = connector_start((1, 1)) + written([Ping()], "connector", (1, 1))
    large = Message((1, 2, 3), True, (b"12345678",) * 3)
    sent_bytes = start + written([large], "connector", (1, 1))
    assert stop_of(RelinkScanner(limits), sent_bytes) == (len(start), UNSURE)
