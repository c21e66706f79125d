"""`crosswire lake`: list, verify, compact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosswire.cli.main import main
from crosswire.config import PLAIN_LISTENERS, Config, LakeSettings
from crosswire.envelope import Envelope
from crosswire.lake.files import find
from crosswire.server.server import Server
from tests.lake.ledger_files import fill


@pytest.fixture
def data(tmp_path: Path) -> Path:
    fill(tmp_path / "lake", (1, 10), (11, 15))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["lake", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_shows_a_table(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "--data", str(data))
    assert code == 0
    head, row = out.splitlines()
    assert head.split() == ["table", "node", "files", "rows", "size", "seq", "from", "to"]
    assert row.split()[:4] == ["ledger", "n1", "2", "15"]
    assert "1–15" in row and "1970-01-01" in row


def test_list_as_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "list", "--lake", str(data / "lake"), "--json")
    (table,) = json.loads(out)["tables"]
    assert (table["table"], table["rows"], table["first_time"]) == ("ledger", 15, 5)


def test_verify_is_content_with_a_whole_lake(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "verify", "--data", str(data))
    assert (code, out) == (0, "")
    assert err == "2 files, 15 rows: no faults.\n"


def test_verify_reports_what_is_wrong(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data / "lake", (20, 21))
    code, out, err = run(capsys, "verify", "--data", str(data))
    assert code == 1
    assert out.splitlines()[1].split()[:5] == ["gap", "ledger", "n1", "16", "19"]
    assert "1 fault." in err
    code, out, _ = run(capsys, "verify", "--data", str(data), "--json")
    answer = json.loads(out)
    assert (code, answer["ok"], answer["faults"][0]["kind"]) == (1, False, "gap")


async def test_verify_misses_the_newest_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a hub has sealed and nobody finds any more."""
    listen = dict.fromkeys(PLAIN_LISTENERS, "off")
    server = Server(Config(data=str(tmp_path), listen=listen, lake=LakeSettings(seal_s=0.01)))
    await server.start()
    envelope = Envelope(destination="queue/q", kind="send", payload=b"x")
    await server.hub.produce([envelope], server.context.now())
    await server.stop()
    code, _, err = run(capsys, "verify", "--data", str(tmp_path))
    assert (code, "no faults" in err) == (0, True)
    for table in ("ledger", "messages"):
        max(find(tmp_path / "lake", (table,)), key=lambda file: file.last).path.unlink()
    code, out, _ = run(capsys, "verify", "--data", str(tmp_path), "--json")
    found = {(fault["table"], fault["kind"]) for fault in json.loads(out)["faults"]}
    assert (code, found) == (1, {("ledger", "gap"), ("messages", "gap")})


def test_compact_joins_files(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compact", "--data", str(data), "--json")
    assert code == 0
    (done,) = json.loads(out)["compacted"]
    assert (done["files_before"], done["files_after"]) == (2, 1)
    assert len(list(find(data / "lake"))) == 1
    _, _, err = run(capsys, "compact", "--data", str(data), "--before", "1970-01-01")
    assert err == "There is nothing to compact before 1970-01-01.\n"


def test_no_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "list", "--data", str(tmp_path))
    assert code == 1
    assert "there is no lake in" in err


@pytest.mark.parametrize("wrong", [["--before", "soon"], ["--target", "0"]])
def test_wrong_usage(data: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lake", "compact", "--data", str(data), *wrong])
    assert caught.value.code == 2
