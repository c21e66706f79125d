"""The command `crosswire decode`, run as a program."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosswire.testing.traffic import SampleTraffic, packets, write_pcap

CROSSWIRE = Path(sys.executable).parent / "crosswire"
HELLO, PING, BYE = "000000080000000001000000", "0000000402000000", "0000000401000000"


def crosswire(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([CROSSWIRE, *arguments], input=stdin, capture_output=True)


def decode(hex_text: str, *options: str) -> tuple[int, list[Any], str]:
    done = crosswire("decode", "emp", "-", "--hex", "--json", *options, stdin=hex_text.encode())
    return (
        done.returncode,
        [json.loads(row) for row in done.stdout.splitlines()],
        done.stderr.decode(),
    )


def test_a_line_per_frame() -> None:
    code, rows, summary = decode(HELLO + PING)
    assert (code, rows) == (
        0,
        [
            {"offset": 0, "length": 12, "frame": "hello", "fields": {"version": 1}},
            {"offset": 12, "length": 8, "frame": "ping", "fields": {}},
        ],
    )
    assert summary == "2 frames, 0 violations, 0 bytes of an unfinished frame, 20 bytes in total\n"


@pytest.mark.parametrize(
    ("kind", "body", "fields"),
    [
        (5, {"op": "x"}, {"op": "x"}),
        (5, {"op": "x", "data": {}}, {"op": "x", "data": {}}),
        (6, {"status": "success"}, {"status": "success"}),
        (6, {"status": "success", "data": {}}, {"status": "success", "data": {}}),
        (
            6,
            {"status": "failure", "description": "d"},
            {"status": "failure", "description": "d"},
        ),
    ],
)
def test_a_field_that_is_not_written_is_left_out(kind: int, body: Any, fields: Any) -> None:
    for text in (json.dumps(body), json.dumps(body, separators=(",", ":"))):
        frame = bytes([kind, 0, 0, 0]) + (7).to_bytes(8) + text.encode()
        _, rows, _ = decode((len(frame).to_bytes(4) + frame).hex())
        assert rows[0]["fields"] == {"id": 7, **fields}


def test_continues_after_a_violation_and_fails() -> None:
    code, rows, _ = decode(HELLO + "0000000407000000" + BYE)
    assert code == 1
    assert [row.get("frame", row.get("error")) for row in rows] == ["hello", "unknown", "bye"]


def test_a_violation_without_an_end_reaches_to_the_end_of_the_file() -> None:
    code, rows, summary = decode(HELLO + "ffffffff" + "00" * 3_000_000)
    assert (code, rows[1]["offset"], rows[1]["length"]) == (1, 12, 3_000_004)
    assert summary.endswith("3,000,016 bytes in total\n")


def test_an_unfinished_frame_is_neither_a_frame_nor_an_error() -> None:
    code, rows, summary = decode(HELLO + PING[:10])
    assert (code, len(rows)) == (0, 1)
    assert "5 bytes of an unfinished frame" in summary


def test_raw_bytes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "capture"
    file.write_bytes(bytes.fromhex(HELLO))
    done = crosswire("decode", "emp", str(file), "--direction", "server->client")
    assert done.stdout.decode().split() == [
        *("offset", "length", "frame", "fields"),
        *("0", "12", "hello", "version=1"),
    ]


def test_late() -> None:
    code, rows, _ = decode("ffee" + PING + BYE, "--late")
    assert code == 0
    assert [(row["offset"], row["frame"]) for row in rows] == [
        (0, "unsynchronized"),
        (2, "ping"),
        (10, "bye"),
    ]


def test_control_characters_do_not_reach_a_terminal() -> None:
    body = b'{"op":"\\u001b[2J"}'
    wire = (12 + len(body)).to_bytes(4) + bytes.fromhex("050000000000000000000001") + body
    done = crosswire("decode", "emp", "-", stdin=wire)
    assert b"\x1b" not in done.stdout and b"op=\\x1b[2J" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "COMMAND"),
        (("nope",), 2, "invalid choice: 'nope'"),
        (("decode", "nope", "-"), 2, "invalid choice: 'nope'"),
        (("decode", "emp", "-", "--direction", "nobody"), 2, "one of client, server"),
        (("decode", "emp", "/does/not/exist"), 1, "can't read /does/not/exist: No such file"),
        (("decode", "emp", "/"), 1, "can't read /: Is a directory"),
        (("decode",), 2, "FILE"),
        (("decode", "/does/not/exist.pcap"), 1, "can't read /does/not/exist.pcap: No such file"),
        (("decode", __file__), 1, "is no capture: for the raw bytes of one direction, name"),
        (("decode", __file__, "--hex"), 2, "--hex is for raw bytes: name their PROTOCOL"),
        (("decode", "emp", "-", "--protocol", "emp"), 2, "--protocol is for captures"),
        (("decode", "emp", "-", "--port", "7=emp"), 2, "--port is for captures"),
        (("decode", "relink", "-", "--connector-id-size", "1"), 2, "--listener-id-size must be"),
        (
            ("decode", "relink", "-", "--connector-id-size", "9", "--listener-id-size", "1"),
            2,
            "channel ids have 0 to 8 bytes, not 9",
        ),
    ],
)
def test_wrong_usage_is_explained(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = crosswire(*arguments)
    assert done.returncode == code
    assert message in done.stderr.decode() and "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize("text", ["0000000x", "000"])
def test_no_hex_is_reported(text: str) -> None:
    code, _, message = decode(text)
    assert code == 1 and "hex" in message


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "capture"
    file.write_bytes(bytes.fromhex(PING) * 100_000)
    done = subprocess.run(
        f"{CROSSWIRE} decode emp {file} --json | head -1", shell=True, capture_output=True
    )
    assert (done.stdout.count(b"\n"), done.stderr) == (1, b"")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("decode", "emp", "-"), ("decode", "/dev/null/x.pcap")]
)
def test_only_what_a_command_needs_is_imported(arguments: tuple[str, ...]) -> None:
    """Start-up time is imports; the heavy ones stay out."""
    program = (
        "import sys; from crosswire.cli.main import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True
    )
    loaded = set(done.stderr.decode().split())
    assert "crosswire.cli.main" in loaded
    assert not loaded & {
        "asyncio",
        "pyspark",
        "numba",
        "numpy",
        "pyarrow",
        "starlette",
        "rocksdict",
    }


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of all protocols, the last of which breaks off with a violation."""
    file = tmp_path_factory.mktemp("captures") / "all.pcap"
    talks = list(SampleTraffic(connections=5, messages=10).conversations())
    times = [time for time, _, _ in talks[0].chunks]
    bad = (times[-1] + 1, True, bytes.fromhex("0000000463000000"))
    talks[0] = replace(talks[0], chunks=(*talks[0].chunks, bad))
    write_pcap(file, [each for talk in talks for each in packets(talk)])
    return file


def decode_capture(file: Path, *options: str) -> tuple[int, list[Any], str]:
    done = crosswire("decode", str(file), "--json", *options)
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    return done.returncode, rows, done.stderr.decode()


def test_a_capture(captured: Path) -> None:
    code, rows, summary = decode_capture(captured)
    assert code == 1
    assert {row["protocol"] for row in rows} == {"emp", "emqp", "relink", "epoxy", "micromsg2"}
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    (violation,) = [row for row in rows if "error" in row]
    assert (violation["clause"], violation["connection"]) == ("EMP, Message types", 1)
    first = rows[0]
    assert (first["frame"], first["fields"], first["sender"]) == ("hello", {"version": 1}, "client")
    assert first["name"].startswith("10.0.0.0:40000-10.1.0.1:5040@")
    assert first["time"] == "2026-09-21T14:13:20.001160Z"
    assert (
        "1 violation in 5 connections" in summary and "3: 10.0.0.2:40002-10.1.0.1:7350" in summary
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--protocol", "epoxy"), lambda row: row["protocol"] == "epoxy"),
        (("--connection", "2"), lambda row: row["connection"] == 2),
        (("--frame", "request"), lambda row: row.get("frame") == "request"),
        (("--destination", "jobs"), lambda row: row.get("destination") == "queue/jobs"),
        (("--text", "GUARANTEE"), lambda row: row["protocol"] == "emqp"),
        (("--violations",), lambda row: row["error"] == "unknown"),
    ],
)
def test_frames_of_a_capture_are_filtered(
    captured: Path, options: tuple[str, ...], expected: Callable[[Any], bool]
) -> None:
    _, rows, summary = decode_capture(captured, *options)
    assert rows and all(expected(row) for row in rows)
    assert summary.endswith(f"; {len(rows)} shown\n")


def test_a_capture_for_people(captured: Path) -> None:
    done = crosswire("decode", str(captured), "--connection", "1")
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["time", "conn", "offset", "length", "frame", "fields"]
    assert lines[1].split()[:6] == ["14:13:20.001160", "1", ">", "0", "12", "hello"]
    assert "! unknown" in lines[-1] and "(EMP, Message types)" in lines[-1]


def test_compressed_captures_and_those_that_end_in_the_middle(
    captured: Path, tmp_path: Path
) -> None:
    file = tmp_path / "packed.pcap.gz"
    file.write_bytes(gzip.compress(captured.read_bytes()[:-7]))
    code, rows, summary = decode_capture(file)
    assert code == 1 and rows and "in the middle of a record" in summary


def test_a_capture_on_another_port(captured: Path, tmp_path: Path) -> None:
    file = tmp_path / "moved.pcap"
    talk = replace(SampleTraffic(messages=20).conversation(0, "emp"), port=7000)
    write_pcap(file, list(packets(talk))[8:])
    assert decode_capture(file)[1] == []
    assert len(decode_capture(file, "--port", "7000=emp")[1]) > 10
    done = crosswire("decode", str(captured), "--port", "7000")
    assert done.returncode == 2 and b"is not PORT=PROTOCOL" in done.stderr
