"""The steps of a run add up to its duration, also where several run side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from crosswire.pipeline.progress import Progress, process_start

WAIT_S = 10


def test_a_step_begins_where_the_one_before_ended() -> None:
    start = time.monotonic() - 100
    progress = Progress(quiet=True, start=start)
    progress.end("first")
    with progress.step("second"):
        pass
    progress.end("first")
    assert list(progress.seconds) == ["first", "second"]
    assert progress.seconds["first"] >= 100
    assert sum(progress.seconds.values()) == pytest.approx(time.monotonic() - start, abs=0.1)


def test_steps_side_by_side_share_the_time() -> None:
    start = time.monotonic()
    progress = Progress(quiet=True, start=start)
    together = Barrier(3)

    def named(name: str) -> Callable[[], None]:
        def work() -> None:
            with progress.step(name):
                together.wait(WAIT_S)

        return work

    def nested() -> None:
        with progress.waiting(), ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(progress.beside, named(each)) for each in ("a", "b")]:
                done.result()
        progress.end("after them")

    with progress.waiting(), ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(progress.beside, each) for each in (nested, named("c"))]:
            done.result()
    progress.end("end")
    assert progress.seconds.keys() == {"a", "b", "c", "after them", "end"}
    assert sum(progress.seconds.values()) == pytest.approx(time.monotonic() - start, abs=0.01)


def test_what_precedes_a_failed_step_belongs_to_the_next() -> None:
    start = time.monotonic() - 5
    progress = Progress(quiet=True, start=start)
    with pytest.raises(ValueError, match="no"), progress.step("failed"):
        raise ValueError("no")
    progress.end("next")
    assert progress.seconds.keys() == {"next"}
    assert progress.seconds["next"] >= 5


def test_this_process_was_started_before() -> None:
    assert process_start() < time.monotonic()
