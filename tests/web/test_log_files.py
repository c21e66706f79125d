"""Row groups of the lake over HTTP: complete, for who may read all of them, and checked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crosswire.access import User
from crosswire.errors import PipelineError, RequestFailed
from crosswire.lake import files as lake_files
from crosswire.lake.compaction import compact
from crosswire.lake.files import find
from crosswire.pipeline.connector.ranges import LogPartition
from crosswire.pipeline.connector.ranges import fetch as fetch_partition
from crosswire.server import log_reader
from tests.web.conftest import StartWeb, WebHub
from tests.web.test_log import ANNA, NEVER, PLANNED, QUICK, address, code_of, plan, sealed

ANNAS = "a-secret-of-anna"
BOSS = User(name="boss", token="the-secret-of-boss", administer=True, produce=("#",))


async def files(
    web: WebHub, *destinations: str, token: str = "", **changes: Any
) -> list[tuple[int, int, pa.Table]]:
    """First and last id and the rows of each file."""
    planned = await plan(web, *destinations, token=token)
    body = {key: planned[key] for key in PLANNED} | {"destinations": list(destinations)} | changes

    def ask() -> list[tuple[int, int, pa.Table]]:
        answer = address(web, token).files("/v1/log/files", body)
        return [(first, last, pq.read_table(pa.BufferReader(data))) for first, last, data in answer]

    return await asyncio.to_thread(ask)


async def rows_of(
    web: WebHub, *destinations: str, token: str = "", first: int = 0, end: int = 0
) -> list[tuple[int, str]]:
    """Ids and texts of a range, as a task of Spark reads it."""
    planned = await plan(web, *destinations, token=token)
    part = LogPartition(
        planned["node"],
        list(destinations),
        planned["starts"],
        planned["ends"],
        first or planned["first"],
        end or planned["behind"],
    )

    def ask() -> list[tuple[int, str]]:
        found = []
        for batch in fetch_partition(address(web, token), part, ["offset", "value"], strict=True):
            values = [each.decode() for each in batch.column("value").to_pylist()]
            found += list(zip(batch.column("offset").to_pylist(), values, strict=True))
        return found

    return await asyncio.to_thread(ask)


async def test_sealed_messages_are_given_as_they_are(start_web: StartWeb) -> None:
    web = await start_web(lake=QUICK)
    first = await web.produce("queue/a", "1", "2", properties={"n": 1})
    await sealed(web)
    second = await web.produce("queue/a", "3")
    await sealed(web)
    found = await files(web, "queue/#", columns=["payload", "properties"])
    assert [table.column_names for *_, table in found] == [["payload", "properties", "id"]] * 2
    assert [(begin, end) for begin, end, _ in found] == [
        (1, first[-1]),
        (first[-1] + 1, second[-1]),
    ]
    assert found[0][2]["payload"].to_pylist() == [b"1", b"2"]


async def test_nothing_that_is_not_selected_is_given_away(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_files, "_ROW_GROUP", 2)
    web = await start_web(lake=NEVER, users=(BOSS, ANNA))
    messages = [
        {"destination": name, "text": text}
        for name, text in [
            ("queue/a", "1"),
            ("queue/a", "2"),
            ("queue/b", "secret 1"),
            ("queue/a", "3"),
            ("queue/b", "secret 2"),
            ("queue/b", "secret 3"),
            ("queue/a", "4"),
        ]
    ]
    sent = await web.post("/v1/messages", {"messages": messages}, token=BOSS.token)
    ids = sent["ids"]
    await web.server.stop()
    web = await start_web(lake=QUICK, users=(BOSS, ANNA))
    await sealed(web)
    found = await files(web, "queue/a", token=ANNAS)
    # One row group is hers alone; from there on the hub chooses rows.
    assert [table["payload"].to_pylist() for *_, table in found] == [[b"1", b"2"]]
    whole = await rows_of(web, "queue/a", token=ANNAS)
    assert whole == [(ids[0], "1"), (ids[1], "2"), (ids[3], "3"), (ids[6], "4")]
    asked = files(web, "queue/a", token=ANNAS, destinations=["queue/a", "queue/b"])
    assert await code_of(asked) == "forbidden"
    assert len(await files(web, "queue/a", "queue/b", token=BOSS.token or "")) == 4


async def test_each_message_comes_once_wherever_a_range_begins_and_ends(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_files, "_ROW_GROUP", 3)
    web = await start_web(lake=QUICK)
    expected = await web.produce("queue/q", *"abcdefgh")
    await sealed(web)
    expected += await web.produce("queue/q", *"ij")
    await sealed(web)
    await web.server.stop()
    web = await start_web(lake=NEVER)
    expected += await web.produce("queue/q", *"kl")
    every = list(zip(expected, "abcdefghijkl", strict=True))
    assert await rows_of(web, "queue/q") == every
    for first in expected[::3]:
        for end in (first + 1, first + 4, expected[9], expected[-1]):
            found = await rows_of(web, "queue/q", first=first, end=end)
            assert found == [each for each in every if first <= each[0] < end]


async def test_files_may_be_joined_and_answers_may_end_early(
    start_web: StartWeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "_STREAM_S", 0.0)
    web = await start_web(lake=QUICK)
    expected = []
    for text in "123":
        expected += await web.produce("queue/q", text)
        await sealed(web)
    assert await rows_of(web, "queue/q") == list(zip(expected, "123", strict=True))
    monkeypatch.setattr(log_reader, "_STREAM_S", 20.0)
    assert len(await files(web, "queue/q")) == 3
    await asyncio.to_thread(lambda: list(compact(tmp_path / "data/lake", before="9999")))
    assert len(await files(web, "queue/q")) == 1
    assert await rows_of(web, "queue/q") == list(zip(expected, "123", strict=True))


@pytest.mark.parametrize("limit", ["_FILE_BYTES", "_DECODED_BYTES"])
async def test_large_row_groups_are_decoded_by_the_hub(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(log_reader, limit, 100)
    web = await start_web(lake=QUICK)
    expected = await web.produce("queue/q", "1", "2")
    await sealed(web)
    assert await files(web, "queue/q") == []
    assert await rows_of(web, "queue/q") == list(zip(expected, "12", strict=True))


async def test_starts_of_single_destinations_are_left_to_the_hub(start_web: StartWeb) -> None:
    web = await start_web(lake=QUICK)
    ids = await web.produce("queue/q", "1", "2")
    await sealed(web)
    assert await files(web, "queue/q", starts={"*": 1, "queue/q": ids[1]}) == []
    assert len(await files(web, "queue/q", starts={"*": ids[1]})) == 1


@pytest.mark.parametrize("column", ["payload", "destination"])
async def test_damage_is_reported_and_nothing_of_it_is_given(
    start_web: StartWeb, tmp_path: Path, column: str
) -> None:
    web = await start_web(lake=QUICK)
    await web.produce("queue/q", *(["some text"] * 10))
    await sealed(web)
    (file,) = find(tmp_path / "data/lake", ("messages",))
    group = pq.read_metadata(file.path).row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    (chunk,) = [each for each in chunks if each.path_in_schema == column]
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(file.path.read_bytes())
    data[start + chunk.total_compressed_size - 5] ^= 1
    file.path.write_bytes(data)
    with pytest.raises(RequestFailed) as caught:
        await rows_of(web, "queue/q")
    assert caught.value.code == "lake_damaged"
    assert str(file.path) in caught.value.description


async def test_another_node_is_reported(start_web: StartWeb) -> None:
    web = await start_web(lake=QUICK)
    await web.produce("queue/q", "1")
    assert await code_of(files(web, "queue/q", node="another")) == "gone"
    part = LogPartition("another", ["queue/q"], {"*": 1}, {"*": 2}, 1, 2)

    def ask() -> None:
        list(fetch_partition(address(web), part, ["value"], strict=True))

    with pytest.raises(PipelineError, match="failOnDataLoss"):
        await asyncio.to_thread(ask)


async def test_rights_that_are_taken_away_cut_the_answer_off(
    start_web: StartWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = await start_web(lake=QUICK, users=(BOSS, ANNA))
    message = {"destination": "queue/a", "text": "x"}
    for _ in range(2):
        await web.post("/v1/messages", {"messages": [message]}, token=BOSS.token)
        await sealed(web)
    log = web.server.log
    assert log is not None
    original, calls = log._sealed, []

    def sealed_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            context = web.server.context
            context.access = type(context.access)((BOSS,))
        return original(*arguments)

    monkeypatch.setattr(log, "_sealed", sealed_once)
    assert len(await files(web, "queue/a", token=ANNAS)) == 1
