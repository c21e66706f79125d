"""The configuration as a whole: it is documented, and its defaults are its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from crosswire.config import Address, Config, ProtocolLimits, check, load
from crosswire.errors import ConfigError

_PAGE = Path(__file__).parents[1] / "docs" / "operating.md"


def settings(kind: Any) -> set[str]:
    """The names of all settings, those of protocols' limits left out: they have their own pages."""
    found: set[str] = set()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind is ProtocolLimits:
            return found
        for name, inner in get_type_hints(kind).items():
            found |= {name} | settings(inner)
    for inner in get_args(kind):
        found |= settings(inner)
    return found


def test_every_setting_is_documented() -> None:
    page = _PAGE.read_text()
    written = set(re.findall(r"`([a-z_0-9]+)`", page)) | set(re.findall(r"^\[+(\w+)", page, re.M))
    written |= {name for table in re.findall(r"`\[+([a-z.]+)", page) for name in table.split(".")}
    assert settings(Config) - written == set()


def test_the_example_of_the_page_is_right() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", _PAGE.read_text(), re.S)
    config, mistakes = check(example)
    assert (mistakes, config is not None) == ([], True)


def test_an_empty_file_is_the_defaults() -> None:
    assert check("") == (Config(), [])


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:80", "hub.example.org:0"])
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", ":80", "host", "host:", "host:x", "host:65536"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("hub", False)],
)
def test_which_addresses_are_this_machines_own(host: str, is_loopback: bool) -> None:
    assert Address(host, 0).is_loopback == is_loopback


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    for name in ("nothing.toml", "bytes.toml"):
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("when", "mistake"),
    [
        ("interval_s = 0.05", "an interval is 0.1 s to 10 years, not 0.05 s"),
        ("interval_s = 1e12", "an interval is"),
        ("interval_s = nan", "an interval is"),
        ("interval_s = -1", "interval_s"),
        ("interval_s = 0.1", ""),
        ('cron = "0 0 30 2 *"', "has no time after"),
        ('cron = "0 0 1 1 * 0 2031"', ""),
        (f'cron = "{"1," * 100_000}1 * * * *"', "at most 256 bytes"),
        ('cron = "\u0661 * * * *"', "other than ASCII"),
    ],
)
def test_when_a_schedule_may_fire(when: str, mistake: str) -> None:
    text = f'[[schedules]]\nid = "s"\ndestination = "queue/q"\ntext = "x"\n{when}\n'
    _, mistakes = check(text)
    assert any(mistake in str(each) for each in mistakes) == bool(mistake)


@pytest.mark.parametrize("name", ["", r"a\nb", r"a\u0000", "x" * 256])
def test_a_schedule_s_id_is_short_and_printable(name: str) -> None:
    text = f'[[schedules]]\nid = "{name}"\ndestination = "queue/q"\ntext = "x"\ninterval_s = 1\n'
    _, mistakes = check(text)
    assert any("printable" in str(each) for each in mistakes)


@pytest.mark.parametrize(
    "setting",
    [
        "drain_s = nan",
        "drain_s = inf",
        "drain_s = 1e300",
        "drain_s = 99999999999999999999",
        "[queues.q]\nttl_s = 1e18",
        "[queues.q]\nmax_length = 99999999999999999999",
        "[store]\nbuffer_bytes = 99999999999999999999",
        '[[schedules]]\nid = "s"\ndestination = "queue/q"\ninterval_s = 0.05',
        '[[schedules]]\nid = "s"\ndestination = "queue/q"\ninterval_s = 1e9',
        '[[schedules]]\nid = "s"\ndestination = "queue/q"\ninterval_s = nan',
        '[[schedules]]\nid = "s"\ndestination = "queue/@q"\ninterval_s = 60',
        '[[schedules]]\nid = "s"\ndestination = "queue/q"\ninterval_s = 60\nproperties.n = inf',
        '[[schedules]]\nid = "s"\ndestination = "queue/q"\ninterval_s = 60\n'
        "properties.n = 9223372036854775808",
        '[[schedules]]\nid = "s"\ndestination = "queue/q"\ninterval_s = 60\n'
        "run_count = 9223372036854775808",
        '[queues."a//b"]\nmax_length = 1',
    ],
)
def test_numbers_and_names_that_can_not_be_used_are_mistakes(setting: str) -> None:
    config, mistakes = check(setting)
    assert config is None
    assert mistakes


@pytest.mark.parametrize(("name", "least"), [("buffer_bytes", 65536), ("destinations", 1)])
def test_a_store_without_room_for_anything_is_a_mistake(name: str, least: int) -> None:
    ((mistake),) = check(f"[store]\n{name} = 0\n")[1]
    assert str(mistake).startswith(f"line 2: store.{name}: 0 is too small")
    assert check(f"[store]\n{name} = {least}\n")[1] == []
