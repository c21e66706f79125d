"""MicroMsg2's columnar scanner gives what its decoder gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.wire.bulk import NONE, OFFSET, STOP
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.bulk import MicroMsg2Scanner
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
from tests.wire.columns import Noisy, Typed, check, check_alone, noisy
from tests.wire.micromsg2.strategies import frames, streams
from tests.wire.stream import Stream

SCANNER = MicroMsg2Scanner()


def typed(frame: Frame) -> Typed:
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
            # How the peer escaped it is not kept in the frame: read it back instead.
            return 0, NONE, NONE, {}
        case Handshake():
            number = frame.major << 16 | frame.minor << 8 | frame.flags
            return number, NONE, NONE, {"destination": frame.identity.encode("latin-1")}
    return 0, NONE, NONE, {}


def comparable(scanner: MicroMsg2Scanner) -> MicroMsg2Scanner:
    return scanner


@pytest.mark.parametrize("sender", ["client", "server"])
@settings(max_examples=120)
@given(data=st.data(), step=st.integers(1, 64))
def test_scanner_and_decoder_give_the_decoders_rows(
    sender: str, data: st.DataObject, step: int
) -> None:
    cases = data.draw(st.lists(noisy(streams(sender), 3), min_size=1, max_size=4))
    check(SCANNER, "micromsg2", sender, cases, typed, step_bytes=step)
