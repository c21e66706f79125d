"""What every command has: help, examples that are right, options in any place, completion."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from crosswire.cli.hub import add_hub_options
from crosswire.cli.main import main
from crosswire.cli.parsers import (
    _LEADING,
    COMMANDS,
    leaves,
    options_last,
    parser_of,
    split_command,
    whole_parser,
)
from crosswire.cli.protocol_options import add_protocol_options
from tests.cli.conftest import crosswire


def parsers() -> list[argparse.ArgumentParser]:
    return [each for command in COMMANDS for each in leaves(parser_of(command))]


def examples(parser: argparse.ArgumentParser) -> list[str]:
    assert parser.epilog is not None and parser.epilog.startswith("examples:\n"), parser.prog
    return [line.strip() for line in parser.epilog.splitlines()[1:]]


def commands_of(line: str) -> Iterator[list[str]]:
    """The arguments of each `crosswire` in a line of a shell, without redirections."""
    words = shlex.split(line.replace("|", " | "))
    while words:
        end = words.index("|") if "|" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        if command[0] == "crosswire":
            cut = [command.index(each) for each in ("<", ">") if each in command]
            yield command[1 : min(cut, default=None)]


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.prog)
def test_every_parser_has_examples_that_parse(parser: argparse.ArgumentParser) -> None:
    for line in examples(parser):
        found = list(commands_of(line))
        assert found, line
        for words in found:
            command, arguments = split_command(words)
            own = parser_of(command, arguments)
            own.parse_args(options_last(own, arguments))
        assert line.count(parser.prog) == 1, f"{line!r} is no example of {parser.prog}"


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.prog)
def test_every_argument_and_parser_is_described(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    missing = [each.dest for each in parser._actions if not each.help]
    assert not missing


def test_every_command_but_those_without_results_prints_json() -> None:
    # What these print is a text for a program, or for people.
    without = {"crosswire completion", "crosswire help", "crosswire pipeline views"}
    for parser in parsers():
        has_json = "--json" in parser._option_string_actions
        assert has_json or parser.prog in without, parser.prog


def test_shared_options_may_precede_the_command() -> None:
    shared: dict[str, int] = {}
    for add in (add_hub_options, add_protocol_options):
        parser = argparse.ArgumentParser(add_help=False)
        add(parser)
        for action in parser._actions:
            shared.update(dict.fromkeys(action.option_strings, 0 if action.nargs == 0 else 1))
    assert shared == _LEADING


@pytest.mark.parametrize(
    "words",
    [
        "--hub http://h --json queue list --limit 3",
        "--json queue --hub=http://h --limit 3 list",
        "queue --limit 3 list --json --hub http://h",
        "queue list --hub http://h --limit=3 --json",
    ],
)
def test_options_stand_before_and_after_the_command_and_its_action(words: str) -> None:
    command, arguments = split_command(words.split())
    parser = parser_of(command, arguments)
    options = parser.parse_args(options_last(parser, arguments))
    assert (command, options.action) == ("queue", "list")
    assert (options.hub, options.limit, options.json) == ("http://h", 3, True)


@pytest.mark.parametrize(
    "words", ["--hub queue", "--hub", "queue --limit list", "--frob queue list"]
)
def test_an_option_without_its_value_is_wrong_usage(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2


def test_a_value_that_is_the_name_of_a_command() -> None:
    assert split_command(["--token", "queue", "pub", "q"]) == ("pub", ["--token", "queue", "q"])


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ([], "usage: crosswire [-h]"),
        (["pub"], "usage: crosswire pub"),
        (["queue"], "usage: crosswire queue [-h] ACTION"),
        (["queue", "purge"], "usage: crosswire queue purge"),
    ],
)
def test_help_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str], words: list[str], begins: str
) -> None:
    try:
        code = main(["help", *words])
    except SystemExit as ended:
        assert ended.code == 0
        code = 0
    assert code == 0
    assert capsys.readouterr().out.startswith(begins)


@pytest.mark.parametrize("words", [["frob"], ["queue", "frob"]])
def test_help_for_what_does_not_exist_is_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", *words])
    assert ended.value.code == 2


def test_the_whole_parser_has_every_command() -> None:
    (commands,) = [
        each for each in whole_parser()._actions if isinstance(each, argparse._SubParsersAction)
    ]
    assert list(commands.choices) == list(COMMANDS)


def completions(script: bytes, line: str) -> set[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(shlex.quote(each) for each in words)
    program = (
        "complete() { :; }\nsource /dev/stdin\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        '_shtab_crosswire\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", program], input=script, capture_output=True, check=True)
    return set(done.stdout.decode().split())


def test_bash_completes_commands_actions_and_options() -> None:
    done = crosswire("completion", "bash")
    assert (done.returncode, done.stderr) == (0, b"")
    assert {"pub", "pipeline"} <= completions(done.stdout, "crosswire p")
    assert completions(done.stdout, "crosswire queue pur") == {"purge"}
    assert completions(done.stdout, "crosswire queue purge --dry") == {"--dry-run"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "crosswire" in capsys.readouterr().out
