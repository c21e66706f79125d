"""Rotated captures: their order, and a clock that is set back from one file to the next."""

from __future__ import annotations

from pathlib import Path

from crosswire.capture.classify import PortMap
from crosswire.capture.packet_counts import CLOCK_STEP
from crosswire.pipeline.sources.capture_reader import Split, plain_file
from crosswire.pipeline.sources.flow_shares import survey
from crosswire.pipeline.sources.pcap import wire_of_share
from crosswire.pipeline.sources.rotation import in_rotation, rotations
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from tests.pipeline.captures import Packets

STEP_NS = 3_600_000_000_000


def test_numbers_are_numbers() -> None:
    names = ["b.pcap", "a.pcap", *(f"a.pcap{number}" for number in range(1, 12))]
    assert in_rotation(sorted(names)) == [*names[1:], "b.pcap"]


def test_files_of_one_program_belong_together() -> None:
    paths = in_rotation(
        [
            *("t/a.pcap", "t/a.pcap1.gz", "t/a.pcap2"),
            *("t/d_00001_20261117083000.pcap", "t/d_00003_20261117073000.pcap"),
            *("u/a.pcap1", "u/a.pcap2"),  # with -W: nobody knows which of them is older
            *("host1.pcap", "host2.pcap", "what-else"),
        ]
    )
    found = dict(zip(paths, rotations(paths), strict=True))
    assert found["t/a.pcap"] == found["t/a.pcap1.gz"] == found["t/a.pcap2"]
    assert found["t/d_00001_20261117083000.pcap"] == found["t/d_00003_20261117073000.pcap"]
    assert len(set(found.values())) == 7


def cut_in_two(step_ns: int) -> tuple[Packets, Packets]:
    """Traffic in two halves, the clock set back in between."""
    made = sorted(
        packet
        for talk in SampleTraffic(connections=6, messages=10, payload_bytes=64).conversations()
        for packet in packets(talk, segment_bytes=50)
    )
    half = len(made) // 2
    return made[:half], [(time - step_ns, frame) for time, frame in made[half:]]


def written(folder: Path, *names: str, step_ns: int = STEP_NS) -> list[Split]:
    found = []
    for name, own in zip(names, cut_in_two(step_ns), strict=True):
        write_pcap(folder / name, own)
        file = plain_file(str(folder / name))
        assert file is not None
        found.append(file)
    return found


def wire(files: list[Split]) -> list[tuple[str, str, bytes]]:
    (share,) = survey(files).shares(1)
    return sorted(
        (row["connection"].split("@")[0], row["direction"], row["data"] or b"")
        for batch in wire_of_share(files, share, PortMap(), 0)
        for row in batch.to_pylist()
    )


def test_a_clock_that_is_set_back_between_two_files(tmp_path: Path) -> None:
    """It is counted once, and connections go on in the next file."""
    steady = written(tmp_path, "a.pcap", "a.pcap1", step_ns=0)
    assert survey(steady).counts.packets[CLOCK_STEP] == 0
    expected = wire(steady)
    files = written(tmp_path, "a.pcap", "a.pcap1")
    assert survey(files).counts.packets[CLOCK_STEP] == 1
    assert wire(files) == expected


def test_files_that_are_no_rotation_are_sorted_by_time(tmp_path: Path) -> None:
    files = written(tmp_path, "host1.pcap", "host2.pcap")
    assert survey(files).counts.packets[CLOCK_STEP] == 0
