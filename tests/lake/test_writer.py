"""Messages and ledger as tables, and files that appear in two steps."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.envelope import Envelope
from crosswire.hub.ledger import LedgerPeer, LedgerRun, Step, parse_columns, serialize_block
from crosswire.lake.schemas import LEDGER, MESSAGES
from crosswire.lake.writer import LakeBatch, LakeWriter, MissingRows, ledger_table, messages_table

STEPS = {int(step): step.name.lower() for step in Step}


def envelope(number: int, **fields: object) -> Envelope:
    return Envelope(
        destination="queue/q",
        kind="send",
        id=number,
        time=1_790_000_000_000_000 + number,
        payload=b"%d" % number,
        crc=(1 << 32) - 1,
        **fields,  # type: ignore[arg-type]
    )


def writer(lake: Path) -> LakeWriter:
    return LakeWriter(lake, "n1", STEPS, pause=lambda _: None)


def test_a_message_keeps_every_field() -> None:
    whole = envelope(
        7,
        protocol="emp",
        connection="emp-1-1",
        principal="ann",
        key="k",
        correlation="c",
        reply_to="queue/r",
        durable=False,
        expires=5,
        properties={"n": 1, "f": 0.5, "b": True, "s": "é"},
        native={"emp.x": b"\xff"},
        content_type="text/plain",
    )
    (row,) = messages_table("n1", 3, [whole]).to_pylist()
    expected = msgspec.structs.asdict(whole) | {"node": "n1", "seq": 3}
    row["native"] = dict(row["native"])
    row["properties"] = msgspec.json.decode(row["properties"])
    assert row == expected


def test_slices_with_one_value_and_with_many_are_alike() -> None:
    same = [envelope(number) for number in range(4)]
    other = [each.replace(native={"a": b"b"}, principal=str(each.id)) for each in same]
    tables = [messages_table("n1", 1, [each]) for each in same + other]
    joined = [messages_table("n1", 1, same), messages_table("n1", 1, other)]
    assert all(table.schema == MESSAGES for table in tables + joined)
    assert [row["id"] for table in joined for row in table.to_pylist()] == [0, 1, 2, 3] * 2
    assert joined[1]["native"].to_pylist() == [[("a", b"b")]] * 4


def test_a_time_too_far_away_is_as_far_as_can_be() -> None:
    table = messages_table("n1", 1, [envelope(1, expires=(1 << 64) - 1), envelope(2)])
    assert table["expires"].to_pylist() == [(1 << 63) - 1, 0]


runs = st.builds(
    LedgerRun,
    st.just(0),
    st.integers(0, 1 << 60),
    st.sampled_from(Step),
    st.sampled_from(("queue/a", "topic/b", "queue/é")),
    st.builds(LedgerPeer, st.sampled_from(("emp", "")), st.text(max_size=3), st.text(max_size=3)),
    st.integers(0, 9),
    st.text(max_size=3),
    st.lists(st.integers(1, 1 << 62), max_size=5).map(lambda ids: array("q", ids)),
    st.booleans().map(lambda counted: array("q") if counted else None),
)


@settings(max_examples=100)
@given(st.lists(runs, min_size=1, max_size=6))
def test_a_block_spread_over_columns_has_the_rows_of_its_runs(made: list[LedgerRun]) -> None:
    made = [
        run
        if run.counts is None
        else msgspec.structs.replace(run, counts=array("q", range(len(run.ids))))
        for run in made
    ]
    block = parse_columns(serialize_block(made))
    table = ledger_table("n1", [(10, block)], STEPS)
    rows = [(run, row) for run in made for row in run.rows()]
    assert table.schema == LEDGER
    assert table.to_pylist() == [
        {
            "node": "n1",
            "seq": 10 + index,
            "id": row.id,
            "time": row.time,
            "step": row.step,
            "destination": row.destination,
            "protocol": row.protocol,
            "connection": row.connection,
            "principal": run.peer.principal,
            "attempt": row.attempt,
            "detail": row.detail,
            "count": row.count,
            "subscription": row.subscription,
        }
        for index, (run, row) in enumerate(rows)
    ]


def test_prepared_files_are_seen_when_they_are_published(tmp_path: Path) -> None:
    one = writer(tmp_path)
    gap = MissingRows("ledger", 5, 6, 1_790_000_000_000_000, "full")
    parts = one.prepare(
        LakeBatch(first_seq=4, messages=[envelope(1), envelope(2)], first_gap=2, gaps=[gap])
    )
    assert not list(tmp_path.rglob("*.parquet"))
    one.publish(parts)
    one.publish(parts)
    names = sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.parquet"))
    assert names == ["gaps", "messages"]
    assert one.has("messages", 4, 5)
    assert not one.has("messages", 4, 6)
    assert pq.read_table(parts[1].file, partitioning=None)["reason"].to_pylist() == ["full"]


def test_what_an_earlier_life_prepared_is_thrown_away(tmp_path: Path) -> None:
    writer(tmp_path).prepare(LakeBatch(messages=[envelope(1)]))
    writer(tmp_path).clear()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_prepared_file_that_is_gone_is_not_passed_over(tmp_path: Path) -> None:
    one = writer(tmp_path)
    parts = one.prepare(LakeBatch(messages=[envelope(1)]))
    one.discard(parts)
    with pytest.raises(FileNotFoundError):
        one.publish(parts)


def test_clearing_removes_unpublished_files_of_its_own_tables_only(tmp_path: Path) -> None:
    wire = tmp_path / ".parts" / "wire-n1-1-2.parquet.part"
    wire.parent.mkdir()
    wire.touch()
    writer(tmp_path).clear()
    assert wire.exists()


def test_a_failed_preparation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        writer(tmp_path).prepare(LakeBatch(messages=[envelope(1)]))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_writing_needs_no_pandas(tmp_path: Path) -> None:
    """Where it is installed, Arrow would import it: half a second in a running hub."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from crosswire.envelope import Envelope\n"
        "from crosswire.lake.tap_spool import Peers, Spool, WireRow\n"
        "from crosswire.lake.writer import LakeBatch, LakeWriter, MissingRows\n"
        f"lake = Path({str(tmp_path)!r})\n"
        "message = Envelope(destination='queue/q', kind='send', native={'a': b'b'})\n"
        "batch = LakeBatch(messages=[message], gaps=[MissingRows('wire', 1, 2, 3, 'why')])\n"
        "writer = LakeWriter(lake, 'n1', {})\n"
        "writer.publish(writer.prepare(batch))\n"
        "spool = Spool(lake, 'n1', memory_bytes=1000)\n"
        "spool.add([WireRow(Peers('c', '', ''), 'forward', 'open', 0, 0, 1)], 1)\n"
        "spool.close(1)\n"
        "sys.exit('pandas' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
