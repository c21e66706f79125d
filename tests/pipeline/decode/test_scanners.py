"""Scanner and decoders together: which of them reads what, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crosswire.pipeline.decode.scanners.emp import EmpScanner
from crosswire.pipeline.decode.scanners.fallback import DecoderOutput, scan_and_decode
from crosswire.pipeline.decode.scanners.scanner import DECODER_ONLY, OFFSET, STOP_REASON, Columns
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import Hello, Ping, Request, serialize

SCANNER = EmpScanner()
PING = serialize(Ping())
UNKNOWN = b"\0\0\0\4\x09\0\0\0"


class Decoders:
    """Makes them as they are asked for."""

    def __init__(self) -> None:
        self.made: dict[int, EmpDecoder] = {}

    def __call__(self, run: int) -> EmpDecoder:
        return self.made.setdefault(run, EmpDecoder("client"))


def together(
    runs: list[bytes], decoders: Decoders, **options: Any
) -> list[Columns | DecoderOutput]:
    lengths = np.array([len(run) for run in runs], np.int64)
    ends = np.cumsum(lengths)
    data = np.frombuffer(b"".join(runs), np.uint8)
    offsets = np.zeros(len(runs), np.int64)
    states = options.pop("states", SCANNER.new_states("client", len(runs)))
    bounds = (ends - lengths, ends, offsets)
    return list(scan_and_decode(SCANNER, data, *bounds, states, decoders, **options))


def test_no_decoder_is_made_for_whole_runs() -> None:
    decoders = Decoders()
    (columns,) = together([PING * 3, PING], decoders)
    assert isinstance(columns, Columns)
    assert columns.run.tolist() == [0, 0, 0, 1]
    assert decoders.made == {}


def test_a_decoder_is_made_for_an_unsure_frame() -> None:
    decoders = Decoders()
    together([PING, PING + UNKNOWN + PING, PING], decoders)
    assert list(decoders.made) == [1]


def test_after_an_unsure_frame_the_scanner_goes_on() -> None:
    run = PING + UNKNOWN + PING * 1000
    parts = together([run], Decoders())
    shown = [len(part) if isinstance(part, Columns) else len(part.placed) for part in parts]
    fed = [part.stop for part in parts if isinstance(part, DecoderOutput)]
    assert sum(shown) == 1002
    assert fed == [8 + 4096]


def test_an_unfinished_frame_waits_in_its_decoder() -> None:
    decoders = Decoders()
    states = SCANNER.new_states("client", 1)
    together([PING + PING[:3]], decoders, states=states)
    assert decoders.made[0].pending == 3
    assert states[0, OFFSET] == len(PING)


def test_a_decoder_is_fed_up_to_a_cut_at_most() -> None:
    request = serialize(Request(1, b"{}"))
    cuts = np.array([5, 10, 12], np.int64)
    parts = together([request[:-1]], Decoders(), cuts=cuts)
    assert [part.stop for part in parts if isinstance(part, DecoderOutput)] == [
        5,
        10,
        12,
        len(request) - 1,
    ]


def test_a_run_that_goes_on_leaves_its_decoder_at_its_end() -> None:
    decoders = Decoders()
    together([PING * 3, PING], decoders, continues=np.array([True, False]))
    assert list(decoders.made) == [0]
    assert decoders.made[0].offset == 3 * len(PING)


def test_a_decoder_in_the_middle_of_a_frame_finishes_it_first() -> None:
    decoders = Decoders()
    whole = serialize(Hello(1)) + PING
    decoders(0).feed(whole[:6])
    states = np.array([SCANNER.state_of(decoders(0))])
    data = np.frombuffer(whole[6:] + PING, np.uint8)
    bounds = (np.array([0]), np.array([len(data)]), np.array([6]))
    parts = list(scan_and_decode(SCANNER, data, *bounds, states, decoders, step_bytes=6))
    rows: list[tuple[int, int]] = []
    for part in parts:
        if isinstance(part, Columns):
            rows += zip(part.offset.tolist(), part.length.tolist(), strict=True)
        else:
            rows += [(offset, length) for offset, length, _ in part.placed]
    assert rows == [(0, 12), (12, 8), (20, 8)]


def test_a_lost_decoder_is_not_taken_over() -> None:
    decoder = EmpDecoder("client")
    decoder.feed(b"\xff" * 8)
    assert SCANNER.state_of(decoder)[STOP_REASON] == DECODER_ONLY


def test_a_decoder_that_missed_the_beginning_can_not_continue() -> None:
    state = SCANNER.new_states("client", 1)[0]
    with pytest.raises(ValueError, match="not where the run began"):
        SCANNER.hand_over(EmpDecoder("client"), state, np.zeros(8, np.uint8), 100)
