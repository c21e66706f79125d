"""`crosswire bench` through every protocol, with a hub of its own and with one that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from crosswire.cli.bench.contract import Work
from crosswire.cli.bench.hub import started_hub
from crosswire.cli.bench.run import load
from crosswire.lake.files import find_all
from crosswire.wire.registry import PROTOCOL_NAMES


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crosswire.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _figures(*arguments: str) -> dict[str, Any]:
    done = _bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("via", PROTOCOL_NAMES)
def test_a_queue_brings_every_message_once(via: str) -> None:
    figures = _figures("--via", via, "--count", "300", "--window", "50", "--no-lake")
    assert figures["destination"] == "queue/bench"
    assert figures["deliveries"] == figures["messages"] == 300
    assert figures["hub_cpu_us"] > 0
    assert figures["answered_p50_us"] > 0


@pytest.mark.parametrize("via", PROTOCOL_NAMES)
def test_a_topic_brings_every_message_to_every_consumer(via: str) -> None:
    figures = _figures(
        *("--via", via, "--topic", "--not-durable", "--consumers", "3"),
        *("--count", "300", "--window", "50", "--no-lake"),
    )
    assert figures["durable"] is False
    assert figures["deliveries"] == 3 * figures["messages"] == 900


def test_the_cpu_clock_stops_when_the_lake_has_everything() -> None:
    with started_hub("micromsg2") as hub:
        work = Work(via="micromsg2", destination="queue/bench", ports=hub.ports)
        in_lake: list[int] = []

        def wait() -> None:
            hub.wait_for_lake()
            files = find_all(Path(hub.data, "lake"), ("messages",))
            in_lake.append(sum(pq.read_metadata(file.path).num_rows for file in files))

        load(work, 200, hub.cpu_s, wait)
    assert in_lake == [20, 220]


def test_a_hub_that_runs_keeps_its_cpu_time_to_itself() -> None:
    with started_hub("micromsg2") as hub:
        port = str(hub.ports["micromsg2"])
        figures = _figures("--via", "micromsg2", "--port", port, "--count", "200")
    assert figures["deliveries"] == 200
    assert figures["hub_cpu_us"] is None


def test_for_people_it_is_told_in_words() -> None:
    done = _bench("--via", "emp", "--count", "100", "--size", "10", "--no-lake")
    assert done.returncode == 0
    assert "emp, queue/bench, durable, 10 bytes" in done.stdout
    assert "one at a time" in done.stdout


def test_nobody_there_is_said_in_one_line() -> None:
    done = _bench("--via", "emp", "--port", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("crosswire bench: can't connect to 127.0.0.1:1")


def test_a_count_of_nothing_is_wrong_usage() -> None:
    assert _bench("--count", "0").returncode == 2
