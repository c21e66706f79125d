"""The frames that carried a message, in what the tap recorded."""

from __future__ import annotations

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.lake.wire_history import RecordedRun
from crosswire.server.frame_search import find_frame
from crosswire.testing.traffic import SampleTraffic

SECOND_US = 1_000_000


def recorded() -> list[RecordedRun]:
    """A connection of EMP."""
    runs: list[RecordedRun] = []
    offsets = {FORWARD: 0, BACKWARD: 0}
    for time_us, is_forward, data in SampleTraffic(messages=5).conversation(1, "emp").chunks:
        direction = FORWARD if is_forward else BACKWARD
        runs.append(RecordedRun(direction, offsets[direction], time_us, data))
        offsets[direction] += len(data)
    return runs


def test_a_frame_with_the_payload_is_found_by_it() -> None:
    runs = recorded()
    last = [run for run in runs if run.direction == FORWARD][-1]
    payload = last.data[-20:]
    found = find_frame(runs, True, "emp", FORWARD, last.time + SECOND_US, payload)
    assert found is not None and found.has_payload
    assert found.data == last.data[-len(found.data) :]


def test_the_nearest_frame_stands_for_one_without_the_payload() -> None:
    runs = recorded()
    last = [run for run in runs if run.direction == FORWARD][-1]
    found = find_frame(runs, True, "emp", FORWARD, last.time + 10, b"not on the wire")
    assert found is not None and not found.has_payload
    assert found.time == last.time


def test_what_is_not_recorded_yet_is_no_other_frame() -> None:
    runs = recorded()
    last = [run for run in runs if run.direction == FORWARD][-1]
    assert find_frame(runs, True, "emp", FORWARD, last.time + SECOND_US, b"not on the wire") is None
