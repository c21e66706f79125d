"""`crosswire check`: every mistake, with its line and a hint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from crosswire.cli.main import main
from crosswire.config import load
from tests.cli.conftest import crosswire

GOOD = """
data = "./somewhere"

[listen]
emp = "127.0.0.1:0"
http = "off"

[queues.orders]
max_length = 10

[[users]]
name = "anna"
token = "a-secret-of-anna"
produce = ["queue/#"]

[[schedules]]
id = "nightly"
destination = "queue/jobs"
cron = "0 3 * * *"
text = "go"
"""


Explain = Callable[[str], list[str]]


@pytest.fixture
def mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    """What is said about a text, without the name of the file."""
    file = tmp_path / "crosswire.toml"

    def explain(text: str) -> list[str]:
        file.write_text(text)
        file.chmod(0o644)
        code = main(["check", str(file)])
        lines = [line.removeprefix(f"{file}: ") for line in capsys.readouterr().out.splitlines()]
        assert code == (1 if lines else 0)
        return lines

    return explain


def test_nothing_is_wrong(mistakes: Explain) -> None:
    assert mistakes(GOOD) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data = = 1", "line 1: not TOML: Invalid value"),
        ("[listen]\nnope = '127.0.0.1:1'", "line 2: listen.nope: there is no such listener"),
        ("[listen]\nemp-tls = '127.0.0.1:1'", "line 2: listen.emp-tls: needs a certificate"),
        ("[listen]\nemp = 'x'", "line 2: listen.emp: 'x' is not HOST:PORT"),
        (
            "[listen]\nemp = '127.0.0.1:9'\nhttp = '127.0.0.1:9'",
            "line 3: listen.http: 127.0.0.1:9 is the address of emp too",
        ),
        (
            "[listen]\nemp = '0.0.0.0:9'",
            "line 2: listen.emp: on 0.0.0.0:9 anyone who can connect would have all rights",
        ),
        (
            "[[users]]\nname = 'a'\ntoken = '0123456789abcdef'\n"
            "[[users]]\nname = 'b'\ntoken = '0123456789abcdef'",
            "line 6: users[2].token: the token of b is used twice",
        ),
        ("[[users]]\nname = 'a'", "line 1: users[1]: a needs a token"),
        (
            "[[schedules]]\nid = 'a'\ndestination = 'queue/q'",
            "line 1: schedules[1]: needs either interval_s or cron",
        ),
        (
            "[[schedules]]\nid = 'a'\ndestination = 'q'\ninterval_s = 1",
            "line 3: schedules[1].destination: 'q' does not start with",
        ),
        (
            "[[schedules]]\nid = 'a'\ndestination = 'queue/q'\ncron = 'never'",
            "line 4: schedules[1].cron: 'never' is no cron expression",
        ),
        ("[topics.'a/+']\ndurable = false", "line 1: topics.a/+: 'topic/a/+': wildcards are for"),
        ("[tls]\ncertificate = 'no.pem'\nkey = 'no.pem'", "line 1: tls: [tls] can't be used"),
        ("[bond]\nfiles = ['no.bond']", "line 2: bond.files[1]: "),
        (
            "[emqp]\ncurve_secret_key = 'short'",
            "line 2: emqp.curve_secret_key: a key is written with 40 characters",
        ),
        ("[queues.q]\nmax_length = -1", "line 2: queues.q.max_length: -1 is below 0"),
        ("log = 'loud'", "line 1: log: Invalid enum value 'loud' (one of debug, info"),
    ],
)
def test_a_mistake_is_explained(mistakes: Explain, text: str, expected: str) -> None:
    (told,) = mistakes(text)
    assert told.startswith(expected)


def test_all_mistakes_are_reported_at_once(mistakes: Explain) -> None:
    told = mistakes(
        "log = 'loud'\n"
        "[listen]\nemp = 'x'\n"
        "[queues.'a/#']\nmax_length = 1\n"
        "[tls]\ncertificate = 'no.pem'\nkey = 3\n"
        "[bond]\nfiles = ['no.bond']\n"
        "[[schedules]]\nid = 'a'\ndestination = 'queue/q'\ncron = 'never'\n"
        "[[users]]\nname = 'a'\ntoken_file = 'none'\n"
    )
    lines = [int(each.removeprefix("line ").partition(":")[0]) for each in told]
    assert lines == [1, 3, 4, 8, 10, 14, 17]


def test_a_table_that_is_wrong_causes_no_other_mistakes(mistakes: Explain) -> None:
    (told,) = mistakes("[listen]\nemp-tls = '127.0.0.1:1'\n[tls]\ncertificate = 3\nkey = 'k'\n")
    assert told.startswith("line 4: tls.certificate")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "types.bond").write_text("namespace a struct S { 0: int32 x; }")
    (folder / "token").write_text("a-secret-of-anna\n")
    (folder / "token").chmod(0o600)
    file = folder / "crosswire.toml"
    file.write_text(
        "data = 'data'\n[lake]\ndirectory = '../lake'\n[bond]\nfiles = ['types.bond']\n"
        "[tls]\ncertificate = 'c.pem'\nkey = '/k.pem'\nclient_ca = 'ca.pem'\n"
        "[[users]]\nname = 'anna'\ntoken_file = 'token'\n"
    )
    config = load(file)
    assert config.tls is not None
    assert (config.data, config.lake.directory) == (str(folder / "data"), f"{folder}/../lake")
    assert (config.tls.certificate, config.tls.key, config.tls.client_ca) == (
        str(folder / "c.pem"),
        "/k.pem",
        str(folder / "ca.pem"),
    )
    assert config.bond.files == (str(folder / "types.bond"),)
    assert config.users[0].token == "a-secret-of-anna"
    file.write_text("")
    assert load(file).data == "./crosswire-data"


EXPOSED = """
[listen]
emp = "0.0.0.0:0"

[[users]]
name = "anna"
token = "a-secret-of-anna"
"""


def test_exposed_tokens_are_named(mistakes: Explain) -> None:
    file, *listeners = mistakes(EXPOSED)
    assert file.startswith("it has tokens or keys, and other users of this machine may read it")
    assert [each.partition(" tokens")[0] for each in listeners] == [
        "line 3: listen.emp: on 0.0.0.0:0"
    ]


def test_insecure_and_loopback_make_them_warnings(tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("insecure = true\n" + EXPOSED)
    file.chmod(0o644)
    done = crosswire("check", str(file))
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.count(b": warning: ") == 3
    file.write_text(GOOD)
    done = crosswire("check", str(file))
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"warning: it has tokens or keys" in done.stderr
    assert b"loopback only: emp, epoxy, micromsg2" in done.stderr


def test_the_secret_is_not_told(mistakes: Explain) -> None:
    user = "[[users]]\nname = 'a'\ntoken = '0123456789abcdef'\n"
    assert "0123456789abcdef" not in "".join(mistakes(user + user))


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("drain_s = -1\nlisten = 3\n")
    done = crosswire("check", str(file), "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["line"], row["where"]) for row in rows] == [(1, "drain_s"), (2, "listen")]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = crosswire("check", str(tmp_path / "nothing.toml"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"can't read" in done.stderr
