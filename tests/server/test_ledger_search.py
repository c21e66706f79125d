"""Steps of messages are found in memory and in the journal, wherever the border is."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import RecordDamaged, ServiceUnavailable
from crosswire.hub.ledger import NOBODY, LedgerRun, Step, serialize_block
from crosswire.lake.ledger_history import LedgerHistory
from crosswire.server.ledger_search import FoundSteps, LedgerSearch, LedgerSources
from crosswire.store.memory import MemoryStore


def run_of(step: Step, at: int, ids: list[int], detail: str = "") -> LedgerRun:
    return LedgerRun(0, at, step, "queue/a", NOBODY, 0, detail, array("q", ids))


def search(
    store: MemoryStore, runs: list[LedgerRun], ids: set[int], within_s: float = 10.0
) -> FoundSteps:
    sources = LedgerSources(runs, store.view(), store.next_row)
    lake = LedgerHistory(Path("/nonexistent"), "n")
    return LedgerSearch(sources, lake, pause=lambda _s: None, report=_fail, within_s=within_s).find(
        ids
    )


def _fail(error: RecordDamaged) -> None:
    raise error


def journaled(groups: list[list[LedgerRun]], kept: int) -> tuple[MemoryStore, list[LedgerRun]]:
    """A store with these groups in its journal, and the runs of the last `kept` of them."""
    store = MemoryStore()
    recent: list[LedgerRun] = []
    for number, runs in enumerate(groups):
        first = store.next_row
        rows = sum(len(run.ids) for run in runs)
        store.journal(serialize_block(runs), rows)
        group = store.seal()
        store.write_group(group)
        store.applied(group)
        if number >= len(groups) - kept:
            for run in runs:
                recent.append(
                    LedgerRun(
                        first, run.time, run.step, run.destination, NOBODY, 0, run.detail, run.ids
                    )
                )
                first += len(run.ids)
    return store, recent


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 40), max_size=3)), max_size=25),
    st.integers(0, 6),
)
def test_every_step_is_found(script: list[tuple[int, list[int]]], kept: int) -> None:
    newest, at = 0, 0
    groups: list[list[LedgerRun]] = []
    expected: dict[int, list[str]] = {}
    for accepted, settled in script:
        at += 10
        runs = []
        if accepted:
            ids = list(range(newest + 1, newest + 1 + accepted))
            newest += accepted
            runs.append(run_of(Step.ACCEPTED, at, ids))
            for each in ids:
                expected[each] = ["accepted"]
        ended = sorted({each for each in settled if expected.get(each) == ["accepted"]})
        if ended:
            runs.append(run_of(Step.SETTLED, at, ended))
            for each in ended:
                expected[each].append("settled")
        if runs:
            groups.append(runs)
    store, recent = journaled(groups, kept)
    for each, steps in expected.items():
        found = search(store, recent, {each})
        assert ([row.step for row in found.rows[each]], found.is_complete) == (steps, True)
    if expected:
        everything = search(store, recent, set(expected))
        assert {
            key: [row.step for row in rows] for key, rows in everything.rows.items()
        } == expected


def test_a_replay_leads_back() -> None:
    groups = [
        [run_of(Step.ACCEPTED, 1, [1])],
        [
            run_of(Step.ACCEPTED, 2, [2]),
            run_of(Step.REPLAYED, 2, [1], detail="sent again as 2"),
        ],
    ]
    for kept in (0, 1, 2):
        store, recent = journaled(groups, kept)
        assert search(store, recent, {2}).sent_again[2].id == 1


def test_a_search_ends_in_time_and_says_that_it_is_not_complete() -> None:
    store, recent = journaled([[run_of(Step.ACCEPTED, 1, [1])]], 0)
    found = search(store, recent, {1}, within_s=-1.0)
    assert not found.is_complete and found.rows == {1: []}


def test_a_hub_that_stops_ends_a_search() -> None:
    store, recent = journaled([[run_of(Step.ACCEPTED, 1, [1])]], 0)

    def stop(_pause_s: float) -> None:
        raise ServiceUnavailable("the hub is stopping")

    sources = LedgerSources(recent, store.view(), store.next_row)
    lake = LedgerHistory(Path("/nonexistent"), "n")
    ended = LedgerSearch(sources, lake, pause=stop, report=_fail, within_s=1.0)
    began = time.monotonic()
    with pytest.raises(ServiceUnavailable):
        ended.find({1})
    assert time.monotonic() - began < 1.0
