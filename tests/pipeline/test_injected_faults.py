"""Faults in the input: every kind of file deleted, copied, cut, changed, and what is found then.

A real hub's lake is copied once for each fault, under another node's name; one run reads them all.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from crosswire.errors import InvalidInput, PipelineError
from crosswire.lake.files import write
from crosswire.lake.schemas import SCHEMAS
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.manifests import newest_manifest
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.lake_input import inspect_lake
from crosswire.pipeline.stores import LocalStore
from crosswire.pipeline.stream.run import Stream, run_stream
from tests.pipeline.conftest import Made
from tests.pipeline.test_hub_lake import live

TABLES = ("ledger", "messages", "wire")
PAYLOAD = b'{"n":1}'
CHANGED = b'{"n":7}'

Fault = Callable[[Path], None]


def files(lake: Path, table: str) -> list[Path]:
    return sorted((lake / table).glob("date=*/*.parquet"), key=lambda path: path.name)


def middle(lake: Path, table: str) -> Path:
    found = files(lake, table)
    assert len(found) >= 3
    return found[len(found) // 2]


def deleted(table: str) -> Fault:
    return lambda lake: middle(lake, table).unlink()


def copied(table: str) -> Fault:
    """Into the folder of another date, as a careless backup would."""

    def fault(lake: Path) -> None:
        file = middle(lake, table)
        other = lake / table / "date=2030-01-01"
        other.mkdir()
        shutil.copy(file, other / file.name)

    return fault


def stray(table: str) -> Fault:
    """A copy with another name."""

    def fault(lake: Path) -> None:
        file = middle(lake, table)
        shutil.copy(file, file.with_name("copy of " + file.name))

    return fault


def cut(table: str) -> Fault:
    def fault(lake: Path) -> None:
        file = middle(lake, table)
        file.write_bytes(file.read_bytes()[:-20])

    return fault


def thinned(table: str) -> Fault:
    """Some rows of a file are dropped; its name stays."""

    def fault(lake: Path) -> None:
        file = middle(lake, table)
        rows = pq.ParquetFile(file).read()
        pq.write_table(rows.slice(0, max(len(rows) - 1, 0)), file)

    return fault


def in_lake(lake: Path) -> None:
    """A payload is another one in messages/."""
    change(lake, "messages", "payload", PAYLOAD, CHANGED)


def on_wire(lake: Path) -> None:
    """A payload is another one in wire/, everywhere."""
    change(lake, "wire", "data", PAYLOAD, CHANGED)


def answer_in_lake(lake: Path) -> None:
    """An answer's payload is another one in messages/."""
    for file in files(lake, "messages"):
        rows = pq.ParquetFile(file).read()
        payloads = rows["payload"].to_pylist()
        kinds = rows["kind"].to_pylist()
        if "response" in kinds:
            payloads[kinds.index("response")] += b"?"
            index = rows.schema.get_field_index("payload")
            column = pa.array(payloads, pa.binary())
            pq.write_table(rows.set_column(index, rows.schema.field(index), column), file)
            return
    raise AssertionError("nothing was answered")


def change(lake: Path, table: str, column: str, old: bytes, new: bytes) -> None:
    count = 0
    for file in files(lake, table):
        rows = pq.ParquetFile(file).read()
        values = rows[column].to_pylist()
        changed = [value and value.replace(old, new) for value in values]
        if changed != values:
            count += 1
            index = rows.schema.get_field_index(column)
            rows = rows.set_column(index, rows.schema.field(index), pa.array(changed, pa.binary()))
            pq.write_table(rows, file)
    assert count


FAULTS: dict[str, Fault] = {
    "clean": lambda _: None,
    **{
        f"{table}-{name}": kind(table)
        for table in TABLES
        for name, kind in (
            ("deleted", deleted),
            ("copied", copied),
            ("stray", stray),
            ("cut", cut),
            ("thinned", thinned),
        )
    },
    "no-messages": lambda lake: shutil.rmtree(lake / "messages"),
    "newest-ledger": lambda lake: files(lake, "ledger")[-1].unlink(),
    "payload-in-lake": in_lake,
    "answer-in-lake": answer_in_lake,
    "payload-on-wire": on_wire,
}
REFUSED = [name for name in FAULTS if name.endswith(("copied", "stray", "cut", "thinned"))]
"""What no run may read without being asked to skip it."""
HOLES = [name for name in FAULTS if name.endswith(("deleted", "cut", "thinned"))]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real hub left."""
    data = tmp_path_factory.mktemp("hub")
    asyncio.run(live(data))
    return data / "lake"


@pytest.fixture(scope="module")
def lakes(lake: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy for each fault; its node has the name of the fault."""
    folder = tmp_path_factory.mktemp("lakes")
    made = {}
    for name, fault in FAULTS.items():
        made[name] = folder / name
        rename(lake, made[name], name)
        fault(made[name])
    return made


def rename(lake: Path, target: Path, node: str) -> None:
    """The same rows of another node, each table in several files."""
    for table in TABLES:
        rows = pa.concat_tables([pq.ParquetFile(file).read() for file in files(lake, table)])
        rows = rows.set_column(0, rows.schema.field(0), pa.array([node] * len(rows)))
        size = -(-len(rows) // 4)
        for start in range(0, len(rows), size):
            write(target, table, rows.slice(start, size).cast(SCHEMAS[table]))


@pytest.mark.parametrize("kind", [stray, cut, thinned])
@pytest.mark.parametrize("table", TABLES)
def test_a_stream_refuses_what_can_not_be_trusted(
    spark: SparkSession,
    lake: Path,
    tmp_path: Path,
    table: str,
    kind: Callable[[str], Fault],
) -> None:
    """Before it makes a table of it."""
    rename(lake, tmp_path / "lake", "n")
    kind(table)(tmp_path / "lake")
    stream = Stream((str(tmp_path / "lake"),), str(tmp_path / "out"), once=True)
    with pytest.raises(InvalidInput, match="remove what does not belong there"):
        run_stream(spark, stream)
    assert newest_manifest(LocalStore(str(tmp_path / "out"))) is None


@pytest.fixture(scope="module")
def made(
    spark: SparkSession, lakes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Made:
    folder = tmp_path_factory.mktemp("out")
    batch = BatchJob(
        inputs=find_inputs([str(lake) for lake in lakes.values()]),
        output=str(folder / "out"),
        tables=frozenset({"deliveries", "reconciliation"}),
        late_us=600_000_000,
        skip_damaged=True,
    )
    return Made(folder / "out", run_batch(spark, batch, quiet=True))


def of(made: Made, table: str, node: str) -> list[dict[str, Any]]:
    return [row for row in made.rows(table) if row["node"] == node]


def verdicts(made: Made, node: str) -> Counter[str]:
    return Counter(row["verdict"] for row in of(made, "gold/reconciliation", node))


def accused(made: Made, node: str) -> set[tuple[str, str]]:
    """Destinations, and what gold.deliveries accuses the hub of there."""
    return {
        (row["destination"], fault)
        for table in ("gold/deliveries", "open/deliveries")
        for row in of(made, table, node)
        for fault in ("lost", "doubled")
        if row[fault]
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_trusted_is_refused(lakes: dict[str, Path], name: str) -> None:
    with pytest.raises(InvalidInput, match="--skip-damaged"):
        inspect_lake(find_inputs([str(lakes[name])]))


def test_only_one_refusal_and_one_double_happened(made: Made) -> None:
    assert verdicts(made, "clean").keys() == {"equal", "not accepted"}
    assert verdicts(made, "clean")["not accepted"] == 1
    assert accused(made, "clean") == {("queue/shaky", "doubled")}
    assert not any(row["reason"] for row in of(made, "gold/deliveries", "clean"))


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_of_the_input_becomes_one_of_the_hub(made: Made, name: str) -> None:
    assert verdicts(made, name).keys() <= {"equal", "not accepted", "uncertain"}
    assert verdicts(made, name)["not accepted"] <= 1
    assert accused(made, name) <= {("queue/shaky", "doubled")}


@pytest.mark.parametrize("name", [name for name in REFUSED if name.endswith(("copied", "stray"))])
def test_a_copy_changes_nothing(made: Made, name: str) -> None:
    assert verdicts(made, name) == verdicts(made, "clean")
    assert accused(made, name) == accused(made, "clean")


@pytest.mark.parametrize("name", HOLES)
def test_every_hole_is_reported(made: Made, name: str) -> None:
    table = name.partition("-")[0]
    (note,) = (note for note in made.summary.notes if f"of node {name}," in note)
    assert f"of {table}/ are missing" in note
    reasons = {row["reason"] for row in of(made, "gold/reconciliation", name) if row["reason"]}
    assert all(f"of {table}/ are missing" in reason for reason in reasons)
    if table == "ledger":
        assert reasons


@pytest.mark.parametrize("name", [name for name in HOLES if name.startswith("ledger")])
def test_deliveries_name_the_range_that_is_missing(
    made: Made, lakes: dict[str, Path], name: str
) -> None:
    rows = of(made, "gold/deliveries", name)
    (hole,) = (row for row in rows if row["message_id"] is None)
    assert hole["outcome"] == "unknown" and "of ledger/ are missing" in hole["reason"]
    assert made.summary.findings["uncertain deliveries"] > 0
    # Whatever was accepted has a row, also where only its envelope is left.
    assert ids_of(made, "clean") & stored_ids(lakes[name]) <= ids_of(made, name)


def ids_of(made: Made, name: str) -> set[int]:
    """The messages that have a row in gold.deliveries or open.deliveries."""
    tables = ("gold/deliveries", "open/deliveries")
    return {row["message_id"] for table in tables for row in of(made, table, name)}


def stored_ids(lake: Path) -> set[int]:
    return {
        identifier
        for file in files(lake, "messages")
        for identifier in pq.ParquetFile(file).read(["id"])["id"].to_pylist()
    }


def test_what_is_newer_than_the_ledger_is_unknown(made: Made, lakes: dict[str, Path]) -> None:
    name = "newest-ledger"
    assert ids_of(made, "clean") & stored_ids(lakes[name]) <= ids_of(made, name)
    rows = of(made, "gold/deliveries", name)
    assert {row["reason"] for row in rows if row["outcome"] == "unknown"} == {
        "the ledger ends before it"
    }


def test_a_payload_that_was_changed_in_the_lake(made: Made) -> None:
    damaged = {
        name: {
            row["message_id"]
            for table in ("gold/deliveries", "open/deliveries")
            for row in of(made, table, name)
            if row["intact"] is False
        }
        for name in FAULTS
    }
    assert [name for name in FAULTS if damaged[name]] == ["payload-in-lake"]
    assert made.summary.findings["damaged"] >= len(damaged["payload-in-lake"])


def test_an_answer_that_was_changed_in_the_lake(made: Made) -> None:
    rows = of(made, "gold/reconciliation", "answer-in-lake")
    damaged = [row for row in rows if row["intact"] is False and row["way"] == "in"]
    assert [row["kind"] for row in damaged] == ["response"]
    assert made.summary.findings["damaged answers"] == 1


def test_a_payload_that_was_changed_on_the_wire(made: Made) -> None:
    rows = made.rows("gold/reconciliation")
    others = Counter(row["node"] for row in rows if row["same_payload"] is False)
    assert others["payload-on-wire"] > others["clean"]
    assert all(others[name] <= others["clean"] for name in FAULTS if name != "payload-on-wire")
    assert made.summary.findings["other payload"] == others.total()


@pytest.mark.parametrize("table", ["ledger", "messages", "wire"])
def test_a_flipped_bit_ends_the_run(
    spark: SparkSession, lake: Path, tmp_path: Path, table: str
) -> None:
    """Its page no longer has its checksum."""
    shutil.copytree(lake, tmp_path / "lake")
    found = files(tmp_path / "lake", table)
    file = found[len(found) // 2]
    content = bytearray(file.read_bytes())
    content[first_page(file)] ^= 1
    file.write_bytes(content)
    tables = frozenset({"deliveries", "reconciliation"})
    batch = BatchJob(find_inputs([str(tmp_path)]), str(tmp_path / "out"), tables=tables)
    with pytest.raises(PipelineError):
        run_batch(spark, batch, quiet=True)


def first_page(file: Path) -> int:
    """An octet within the first data page of the column `id`, `data` or `reason`."""
    metadata = pq.read_metadata(file)
    names = metadata.schema.names
    name = next(name for name in ("id", "data", "reason") if name in names)
    column = metadata.row_group(0).column(names.index(name))
    return int(column.data_page_offset + column.total_compressed_size - 4)


def with_gap(lake: Path, target: Path) -> Path:
    """A lake with a hole in its wire that the hub has recorded; the file of gaps/."""
    rename(lake, target, "n")
    file = middle(target, "wire")
    numbers = pq.ParquetFile(file).read(["seq"])["seq"].to_pylist()
    file.unlink()
    values = {"node": "n", "seq": 1, "table": "wire", "time": 0, "reason": "disk full"}
    values |= {"first": numbers[0], "last": numbers[-1]}
    row = {field.name: values[field.name] for field in SCHEMAS["gaps"]}
    write(target, "gaps", pa.Table.from_pylist([row], SCHEMAS["gaps"]))
    (found,) = files(target, "gaps")
    return found


def test_a_recorded_gap_has_its_reason(lake: Path, tmp_path: Path) -> None:
    file = with_gap(lake, tmp_path / "lake")
    (hole,) = inspect_lake(find_inputs([str(tmp_path / "lake")])).missing
    assert (hole.table, hole.recorded) == ("wire", "disk full")
    file.unlink()
    (hole,) = inspect_lake(find_inputs([str(tmp_path / "lake")])).missing
    assert (hole.table, hole.recorded) == ("wire", "")


@pytest.mark.parametrize("kind", [copied, stray, cut, thinned])
def test_a_file_of_gaps_that_can_not_be_trusted(
    lake: Path, tmp_path: Path, kind: Callable[[str], Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gap(lake, tmp_path / "lake")
    monkeypatch.setattr(f"{__name__}.middle", lambda lake, table: files(lake, table)[0])
    kind("gaps")(tmp_path / "lake")
    inputs = find_inputs([str(tmp_path / "lake")])
    with pytest.raises(InvalidInput, match="--skip-damaged"):
        inspect_lake(inputs)
    # What is left out accuses nobody: the hole is there, with or without a reason.
    (hole,) = inspect_lake(inputs, skip_damaged=True).missing
    assert hole.table == "wire"


def test_a_flipped_bit_in_gaps_is_found(lake: Path, tmp_path: Path) -> None:
    file = with_gap(lake, tmp_path / "lake")
    content = bytearray(file.read_bytes())
    content[first_page(file)] ^= 1
    file.write_bytes(content)
    inputs = find_inputs([str(tmp_path / "lake")])
    with pytest.raises(InvalidInput, match=r"gaps.*--skip-damaged"):
        inspect_lake(inputs)
    (hole,) = inspect_lake(inputs, skip_damaged=True).missing
    assert hole.recorded == ""


@pytest.mark.parametrize("name", REFUSED)
def test_input_that_is_given_by_url_is_checked_too(
    spark: SparkSession, lakes: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folders = [f"file://{lakes[name]}/{table}" for table in TABLES]
    batch = BatchJob(find_inputs(folders), str(tmp_path / "out"))
    with pytest.raises(InvalidInput, match="--skip-damaged"):
        run_batch(spark, batch, quiet=True)


def test_holes_are_found_by_url_too(
    spark: SparkSession, lakes: dict[str, Path], made: Made, tmp_path: Path
) -> None:
    name = "ledger-thinned"
    folders = [f"file://{lakes[name]}/{table}" for table in TABLES]
    batch = BatchJob(
        find_inputs(folders),
        str(tmp_path / "out"),
        tables=frozenset({"reconciliation"}),
        late_us=600_000_000,
        skip_damaged=True,
    )
    found = Made(tmp_path / "out", run_batch(spark, batch, quiet=True))
    assert verdicts(found, name) == verdicts(made, name)
    (note,) = (note for note in found.summary.notes if f"of node {name}," in note)
    assert note in made.summary.notes
