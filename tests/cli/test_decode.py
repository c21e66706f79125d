"""The command `crosswire decode`, run as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("arguments", [("--help",), ("decode", "emp", "-")])
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
