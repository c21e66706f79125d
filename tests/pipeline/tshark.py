"""What tshark makes of captures: the bytes of both directions of every connection.

    python -m tests.pipeline.tshark

writes its results for the captures of `test_captures` to `tshark.json`, so that the tests can
compare with them where it is not installed. Needed again when these captures change.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

RECORDED: Final = Path(__file__).with_suffix(".json")

Way = tuple[str, str]
"""Who sends, and who receives: addresses with ports."""


def program() -> str:
    """The path of tshark."""
    found = shutil.which("tshark")
    assert found is not None, "apt-get install tshark, or `make tshark`: there is nothing to ask"
    return found


def bytes_by_tshark(file: Path) -> dict[Way, bytes]:
    """The bytes of each direction that has some, as tshark puts them together."""
    return {way: data for way, data in _followed(program(), file) if data}


def _followed(tshark: str, file: Path) -> Iterator[tuple[Way, bytes]]:
    listed = subprocess.run(
        [tshark, "-r", file, "-T", "fields", "-e", "tcp.stream"], capture_output=True, check=True
    )
    streams = {int(line.split(b",")[-1]) for line in listed.stdout.split(b"\n") if line.strip()}
    asked = [argument for each in sorted(streams) for argument in ("-z", f"follow,tcp,raw,{each}")]
    shown = subprocess.run([tshark, "-q", "-r", file, *asked], capture_output=True, check=True)
    for part in shown.stdout.decode().split("=" * 67):
        lines = part.strip().splitlines()
        nodes = [line.split(": ", 1)[1] for line in lines if line.startswith("Node ")]
        if len(nodes) != 2:
            continue
        sent = {False: bytearray(), True: bytearray()}
        for line in lines[lines.index(next(x for x in lines if x.startswith("Node 1"))) + 1 :]:
            # What node 1 sends is indented by a tab, which `splitlines` leaves.
            sent[line.startswith("\t")] += bytes.fromhex(line.strip())
        yield (nodes[0], nodes[1]), bytes(sent[False])
        yield (nodes[1], nodes[0]), bytes(sent[True])


def digests(found: Mapping[Way, bytes]) -> dict[str, Any]:
    """Of each direction, how many bytes it has, and their checksum."""
    return {
        f"{sender} > {receiver}": [len(data), hashlib.sha256(data).hexdigest()]
        for (sender, receiver), data in sorted(found.items())
    }


def checksum(data: bytes) -> str:
    """Of a capture: recorded results count for that one only."""
    return hashlib.sha256(data).hexdigest()


def record() -> None:
    """Ask tshark about all captures, and write down what it answers."""
    from tests.pipeline.test_captures import ASKED, capture

    version = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True)
    captures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ASKED:
            file = Path(folder) / f"{name}.pcap"
            file.write_bytes(capture(name))
            found = digests(bytes_by_tshark(file))
            captures[name] = {"sha256": checksum(file.read_bytes()), "directions": found}
    made_by = next(line for line in version.stdout.splitlines() if line.startswith("TShark"))
    written = {"made by": made_by, "captures": captures}
    RECORDED.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    record()
