"""Contexts: hubs with their credentials, by name, for their user alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from crosswire.cli.known_hubs import KnownHub, fill_in, load_hubs
from crosswire.cli.main import main
from crosswire.cli.parsers import options_last, parser_of
from crosswire.errors import ConfigError


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HUB", "TOKEN", "CONTEXT", "CURVE_SECRET"):
        monkeypatch.delenv(f"CROSSWIRE_{name}", raising=False)
    path = tmp_path / "settings" / "contexts.json"
    monkeypatch.setenv("CROSSWIRE_CONTEXTS", str(path))
    return path


def filled(*words: str) -> argparse.Namespace:
    """The options of a command, completed."""
    parser = parser_of(words[0], words[1:])
    options = parser.parse_args(options_last(parser, words[1:]))
    fill_in(options)
    return options


def add(name: str, *words: str) -> None:
    assert main(["context", "add", name, *words]) == 0


def test_without_any_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    options = filled("pub", "q", "x")
    assert (options.via, options.host, options.port, options.token) == (
        "emp",
        "127.0.0.1",
        None,
        None,
    )
    assert filled("queue", "list").hub == "http://127.0.0.1:7380"
    monkeypatch.setenv("CROSSWIRE_HUB", "http://other:1")
    monkeypatch.setenv("CROSSWIRE_TOKEN", "from-the-environment")
    options = filled("queue", "list")
    assert (options.hub, options.token) == ("http://other:1", "from-the-environment")


def test_the_file_is_readable_by_its_user_only(file: Path) -> None:
    add("live", "--hub", "https://live:7381", "--token", "the-secret-of-anna")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users may read"):
        load_hubs()


def test_the_chosen_one_is_used_and_options_override_it() -> None:
    add("live", "--hub", "https://live:7381", "--token", "t", "--via", "relink", "--port", "99")
    assert filled("queue", "list").hub == "http://127.0.0.1:7380"
    assert main(["context", "use", "live"]) == 0
    options = filled("queue", "list")
    assert (options.hub, options.token) == ("https://live:7381", "t")
    options = filled("pub", "q", "x")
    assert (options.via, options.host, options.port) == ("relink", "live", 99)
    options = filled("pub", "q", "x", "--via", "emp", "--token", "mine")
    assert (options.via, options.host, options.port, options.token) == ("emp", "live", None, "mine")


def test_a_token_goes_to_its_own_hub_only(monkeypatch: pytest.MonkeyPatch) -> None:
    add("live", "--hub", "https://live:7381", "--token", "t", "--use")
    assert filled("queue", "list", "--hub", "http://other").token is None
    assert filled("pub", "q", "x", "--host", "other").token is None
    monkeypatch.setenv("CROSSWIRE_HUB", "http://other")
    assert filled("queue", "list").token is None
    with pytest.raises(SystemExit):
        filled("queue", "list", "--hub", "http://other", "--context", "live")


def test_one_is_named_by_an_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    add("a", "--hub", "http://a", "--use")
    add("b", "--hub", "http://b")
    add("c", "--host", "c")
    assert filled("queue", "list", "--context", "b").hub == "http://b"
    monkeypatch.setenv("CROSSWIRE_CONTEXT", "c")
    assert filled("pub", "q", "x").host == "c"
    with pytest.raises(ConfigError, match="no context 'd'; there are: a, b, c"):
        filled("queue", "list", "--context", "d")


def test_secrets_are_not_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-secret-of-anna\n")
    add("live", "--hub", "http://live", "--token-file", str(token), "--curve-secret", "hush")
    assert load_hubs().contexts["live"].token == "the-secret-of-anna"
    assert main(["context", "list"]) == 0
    assert main(["context", "list", "--json"]) == 0
    shown = capsys.readouterr()
    assert "the-secret" not in shown.out + shown.err and "hush" not in shown.out + shown.err
    listed: dict[str, Any] = json.loads(shown.out.splitlines()[-1])
    assert listed["contexts"]["live"]["token"] is True


def test_files_keep_their_meaning_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add("live", "--hub", "https://live", "--ca", "ca.pem")
    assert load_hubs().contexts["live"].ca == str(tmp_path / "ca.pem")


def test_the_last_one_can_be_removed(capsys: pytest.CaptureFixture[str]) -> None:
    add("live", "--hub", "http://live", "--use")
    assert main(["context", "remove", "live"]) == 0
    assert (load_hubs().current, load_hubs().contexts) == ("", {})
    assert main(["context", "remove", "live"]) == 1
    capsys.readouterr()
    assert main(["context", "list"]) == 0
    assert capsys.readouterr().err == "No contexts.\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no file of contexts"),
        ('{"version": 9}', "written by another version"),
        ('{"contexts": {"a": {"port": "x"}}}', "is no file of contexts"),
    ],
)
def test_a_file_that_is_no_such_file(file: Path, content: str, message: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        load_hubs()


def test_every_setting_of_a_context_has_an_option() -> None:
    options = {**vars(filled("pub", "q", "x")), **vars(filled("queue", "list"))}
    assert set(KnownHub.__struct_fields__) <= options.keys()
