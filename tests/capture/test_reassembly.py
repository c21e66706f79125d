"""TCP reassembly without Spark: any order, repetition, overlap and loss of segments."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.capture import tcp
from crosswire.capture.reassembly import Flow, ReassembledRun, Segment
from crosswire.lake.schemas import DATA, FIN, GAP, OPEN, RESET

Pieces = list[tuple[int, int]]


def segment(
    forward: bool, time: int, number: int, payload: bytes = b"", flags: int = 0, ack: int = 0
) -> Segment:
    return Segment(forward, time, number % 2**32, ack, flags, len(payload), payload)


def opened(isn: int = 100, other: int = 500) -> list[Segment]:
    return [
        segment(True, 0, isn, flags=tcp.SYN),
        segment(False, 1, other, flags=tcp.SYN | tcp.ACK, ack=(isn + 1) % 2**32),
    ]


def runs_of(segments: list[Segment], reorder_bytes: int = 1 << 20) -> list[ReassembledRun]:
    flow = Flow(reorder_bytes=reorder_bytes)
    return [*chain.from_iterable(map(flow.add, segments)), *flow.finish()]


def bytes_of(runs: list[ReassembledRun], forward: bool = True) -> list[bytes | int]:
    """Bytes that follow one another as one, gaps as their length; checks offsets."""
    found: list[bytes | int] = []
    due = 0
    for run in runs:
        if run.forward is not forward or run.kind not in (DATA, GAP):
            continue
        assert run.offset == due
        due += run.length
        if run.kind == GAP:
            found.append(run.length)
        elif found and isinstance(found[-1], bytes):
            found[-1] += run.data or b""
        else:
            found.append(run.data or b"")
    return found


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[bytes, Pieces]:
    """Some bytes, and pieces in any order that cover them at least once."""
    data = bytes(range(1, draw(st.integers(2, 60))))
    marks = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=8))})
    pieces = list(pairwise(marks))
    extra = st.tuples(st.integers(0, len(data)), st.integers(0, len(data))).map(sorted)
    pieces += [(low, high) for low, high in draw(st.lists(extra, max_size=6)) if low < high]
    return data, draw(st.permutations(pieces))


isns = st.sampled_from([0, 100, 2**31 - 20, 2**32 - 1, 2**32 - 20])


@settings(max_examples=200)
@given(shuffled(), isns)
def test_any_order_and_overlap_gives_the_bytes(case: tuple[bytes, Pieces], isn: int) -> None:
    data, pieces = case
    segments = opened(isn)
    for time, (low, high) in enumerate(pieces, 2):
        segments.append(segment(True, time, isn + 1 + low, data[low:high]))
    assert bytes_of(runs_of(segments)) == [data]


@settings(max_examples=200)
@given(shuffled(), st.sets(st.integers(0, 59)), isns)
def test_lost_bytes_are_explicit_gaps(case: tuple[bytes, Pieces], lost: set[int], isn: int) -> None:
    data, pieces = case
    kept = [piece for position, piece in enumerate(pieces) if position not in lost]
    covered = {position for low, high in kept for position in range(low, high)}
    segments = opened(isn)
    for time, (low, high) in enumerate(kept, 2):
        segments.append(segment(True, time, isn + 1 + low, data[low:high]))
    segments.append(segment(True, 99, isn + 1 + len(data), flags=tcp.FIN))
    expected: list[bytes | int] = []
    for index in range(len(data)):
        last = expected[-1] if expected else None
        if index in covered:
            piece = data[index : index + 1]
            expected[len(expected) - isinstance(last, bytes) :] = [
                last + piece if isinstance(last, bytes) else piece
            ]
        else:
            expected[len(expected) - isinstance(last, int) :] = [
                last + 1 if isinstance(last, int) else 1
            ]
    assert bytes_of(runs_of(segments)) == expected


@settings(max_examples=100)
@given(shuffled(), st.integers(1, 30))
def test_a_small_window_gives_up_early_and_keeps_order(
    case: tuple[bytes, Pieces], window: int
) -> None:
    data, pieces = case
    segments = opened(7)
    for time, (low, high) in enumerate(pieces, 2):
        segments.append(segment(True, time, 8 + low, data[low:high]))
    found = bytes_of(runs_of(segments, reorder_bytes=window))
    at = 0
    for part in found:
        if isinstance(part, bytes):
            assert data[at : at + len(part)] == part
            at += len(part)
        else:
            at += part
    assert at == len(data)


def test_a_connection_is_opened_and_ended_by_both_sides() -> None:
    segments = [
        *opened(),
        segment(True, 2, 101, b"ask"),
        segment(False, 3, 501, b"answer"),
        segment(True, 4, 104, flags=tcp.FIN),
        segment(False, 5, 507, flags=tcp.FIN),
    ]
    assert [(run.forward, run.kind, run.offset) for run in runs_of(segments)] == [
        (True, OPEN, 0),
        (True, DATA, 0),
        (False, DATA, 0),
        (True, FIN, 3),
        (False, FIN, 6),
    ]


def test_the_first_bytes_seen_hold() -> None:
    segments = [
        *opened(),
        segment(True, 2, 104, b"DEF"),
        segment(True, 3, 101, b"abcdefg"),
        segment(True, 4, 101, b"zzzzzzz"),
    ]
    assert bytes_of(runs_of(segments)) == [b"abcDEFg"]


def test_without_syn_a_direction_is_late() -> None:
    runs = runs_of([segment(True, 1, 9_000, b"x"), segment(True, 2, 9_001, b"y")])
    assert [(run.kind, run.offset, run.late, run.opener) for run in runs] == [
        (DATA, 0, True, None),
        (DATA, 1, True, None),
    ]


def test_only_the_answering_syn_was_captured() -> None:
    runs = runs_of([opened()[1], segment(True, 2, 101, b"hello"), segment(False, 3, 501, b"hi")])
    assert (bytes_of(runs), bytes_of(runs, forward=False)) == ([b"hello"], [b"hi"])
    assert {run.opener for run in runs} == {True} and not any(run.late for run in runs)


def test_ports_used_again_make_another_connection() -> None:
    runs = runs_of(
        [*opened(), segment(True, 2, 101, b"one"), *opened(9000), segment(True, 5, 9001, b"two")]
    )
    assert [(run.connection, run.data) for run in runs if run.kind == DATA] == [
        (0, b"one"),
        (1, b"two"),
    ]


def test_ports_used_again_without_a_syn_make_a_late_connection() -> None:
    far = 101 + (1 << 31) - 5
    runs = runs_of([*opened(), segment(True, 2, 101, b"one"), segment(True, 3, far, b"two")])
    assert [(run.connection, run.data, run.late) for run in runs if run.kind == DATA] == [
        (0, b"one", False),
        (1, b"two", True),
    ]


def test_a_repeated_syn_changes_nothing() -> None:
    runs = runs_of([*opened(), opened()[0], segment(True, 2, 101, b"x"), opened()[1]])
    assert [run.kind for run in runs] == [OPEN, DATA]


def test_a_reset_ends_it_and_what_waited_comes_first() -> None:
    runs = runs_of(
        [*opened(), segment(True, 2, 103, b"late"), segment(False, 3, 501, flags=tcp.RST)]
    )
    assert [run.kind for run in runs] == [OPEN, GAP, DATA, RESET]


def test_a_hole_whose_bytes_were_acknowledged_is_a_gap_at_once() -> None:
    later = 1_000_000_000
    segments = [
        *opened(),
        segment(True, 2, 103, b"after!"),
        segment(False, later, 501, b"ok", tcp.ACK, ack=109),
        segment(True, later + 1, 109, b"next"),
    ]
    kinds = [(run.forward, run.kind) for run in runs_of(segments)]
    assert kinds.index((True, GAP)) < kinds.index((False, DATA)) + 2
    assert bytes_of(runs_of(segments)) == [2, b"after!next"]


def test_a_cut_payload_is_a_gap() -> None:
    cut = Segment(True, 2, 101, 0, 0, 10, b"abc")
    assert bytes_of(runs_of([*opened(), cut, segment(True, 3, 111, b"x")])) == [b"abc", 7, b"x"]


def test_data_with_the_syn() -> None:
    first = segment(True, 0, 100, b"fast", flags=tcp.SYN)
    assert bytes_of(runs_of([first, segment(True, 1, 105, b"open")])) == [b"fastopen"]


def test_time_never_runs_backwards_in_a_direction() -> None:
    segments = [*opened(), segment(True, 9, 102, b"b"), segment(True, 20, 101, b"a")]
    times = [run.time_ns for run in runs_of(segments) if run.forward]
    assert times == sorted(times)


# ------------------------------------------------------------------------ captures out of order


WHOLE = [
    segment(True, 0, 100, flags=tcp.SYN),
    segment(False, 0, 500, flags=tcp.SYN | tcp.ACK, ack=101),
    segment(True, 0, 101, b"ask", tcp.ACK, ack=501),
    segment(False, 0, 501, b"answer", tcp.ACK, ack=104),
    segment(True, 0, 104, b"more", tcp.ACK, ack=507),
    segment(False, 0, 507, b"done", tcp.ACK, ack=108),
    segment(True, 0, 108, flags=tcp.FIN | tcp.ACK, ack=511),
    segment(False, 0, 511, flags=tcp.FIN | tcp.ACK, ack=109),
]


@given(st.permutations(WHOLE), st.sampled_from([0, 1_000_000, 20_000_000]))
def test_any_order_with_rewritten_times_is_one_connection(
    segments: list[Segment], step_ns: int
) -> None:
    """All of it within 200 ms: bytes before their SYN, ends before bytes, SYN after the end."""
    runs = runs_of([each._replace(time_ns=at * step_ns) for at, each in enumerate(segments)])
    assert {run.connection for run in runs} == {0}
    assert {run.opener for run in runs} == {True} and not any(run.late for run in runs)
    assert (bytes_of(runs), bytes_of(runs, forward=False)) == ([b"askmore"], [b"answerdone"])
    assert Counter(run.kind for run in runs if run.kind != DATA) == {OPEN: 1, FIN: 2}


SLOW_NS = 1_000_000_000


@pytest.mark.parametrize("place", range(len(WHOLE)))
@pytest.mark.parametrize("moved", [0, 1, 6, 7])
def test_a_syn_or_fin_of_a_quiet_connection_may_come_at_any_time(moved: int, place: int) -> None:
    segments = [*WHOLE]
    segments.insert(place, segments.pop(moved))
    runs = runs_of([each._replace(time_ns=at * SLOW_NS) for at, each in enumerate(segments)])
    assert {run.connection for run in runs} == {0}
    assert (bytes_of(runs), bytes_of(runs, forward=False)) == ([b"askmore"], [b"answerdone"])


@given(st.permutations(WHOLE))
def test_in_any_order_of_a_quiet_connection_there_is_one(segments: list[Segment]) -> None:
    runs = runs_of([each._replace(time_ns=at * SLOW_NS) for at, each in enumerate(segments)])
    assert {run.connection for run in runs} == {0}


@given(st.permutations([*WHOLE, *WHOLE[2:6]]), st.sampled_from([0, 10_000_000]))
def test_in_any_order_what_was_sent_twice_is_there_once(
    segments: list[Segment], step_ns: int
) -> None:
    runs = runs_of([each._replace(time_ns=at * step_ns) for at, each in enumerate(segments)])
    assert {run.connection for run in runs} == {0}
    assert (bytes_of(runs), bytes_of(runs, forward=False)) == ([b"askmore"], [b"answerdone"])


@pytest.mark.parametrize("step_ns", [1, SLOW_NS])
def test_a_refusal_before_its_syn_is_one_connection(step_ns: int) -> None:
    refusal = segment(False, 0, 0, flags=tcp.RST | tcp.ACK, ack=101)
    runs = runs_of([refusal, WHOLE[0]._replace(time_ns=step_ns)])
    assert [(run.connection, run.forward, run.opener, run.kind) for run in runs] == [
        (0, True, True, OPEN),
        (0, False, True, RESET),
    ]


def test_ports_that_are_used_again_after_an_end_make_another_connection() -> None:
    """Also with the same numbers, which tools that make captures use: not at once, but a second
    later."""
    again = [each._replace(time_ns=SLOW_NS) for each in WHOLE]
    runs = runs_of([*WHOLE, *again])
    assert [run.data for run in runs if run.connection == 1 and run.forward and run.data] == [
        b"ask",
        b"more",
    ]


def test_a_syn_that_never_comes_is_not_waited_for_long() -> None:
    flow = Flow()
    count = 16
    for index in range(count):
        assert not list(flow.add(segment(True, index * 300_000_000, 9_000 + index, b"x")))
    runs = list(flow.add(segment(False, count * 300_000_000, 7_000, b"y")))
    assert [(run.data, run.late) for run in runs] == count * [(b"x", True)]


def test_an_answer_stays_after_its_request_without_a_syn() -> None:
    runs = runs_of(
        [segment(True, 0, 9_000, b"1"), segment(False, 1, 7, b"2"), segment(True, 2, 9_001, b"3")]
    )
    assert [run.data for run in runs] == [b"1", b"2", b"3"]


def test_a_syn_after_the_rest_of_an_older_connection_opens_another() -> None:
    runs = runs_of([segment(True, 0, 90, b"old"), *opened(9000), segment(True, 9, 9001, b"new")])
    assert [(run.connection, run.data) for run in runs if run.kind == DATA] == [
        (0, b"old"),
        (1, b"new"),
    ]


def test_bytes_that_the_capture_cut_at_the_end_are_a_gap() -> None:
    cut = Segment(True, 2, 101, 0, 0, 10, b"abc")
    assert bytes_of(runs_of([*opened(), cut])) == [b"abc", 7]
    nothing = Segment(True, 2, 101, 0, 0, 10, b"")
    assert bytes_of(runs_of([*opened(), nothing])) == [10]
