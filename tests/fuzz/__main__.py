"""Fuzz every protocol, one process each, for a given time in all: `python -m tests.fuzz`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from crosswire.wire import PROTOCOL_NAMES, protocol
from tests.wire.vectors import load


def targets() -> list[tuple[str, str]]:
    """Who opens a connection and who accepts it, of every protocol."""
    return [
        (name, role)
        for name in PROTOCOL_NAMES
        for role in (protocol(name).roles[0], protocol(name).roles[-1])
    ]


def seed(folder: Path, name: str) -> None:
    """Recorded bytes to start from, as a capture and as what a peer sends."""
    recorded = load("zmtp" if name == "emqp" else name)
    for number, vector in enumerate(recorded):
        for how in (0, 1, 2, 3):
            seed_file = folder / f"{number}-{how}"
            seed_file.write_bytes(bytes([how]) + bytes.fromhex(vector["wire"])[:4096])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="time in all (default 300)")
    options = parser.parse_args()
    chosen = targets()
    if options.seconds < len(chosen):
        chosen = chosen[1::2]  # no second for each: those who accept connections, as a hub does
    each = max(1, round(options.seconds / len(chosen)))
    failed = []
    for name, role in chosen:
        with tempfile.TemporaryDirectory() as folder:
            seed(Path(folder), name)
            command = [sys.executable, "-m", "tests.fuzz.target", name, role]
            flags = [f"-max_total_time={each}", "-verbosity=0", f"-artifact_prefix={folder}/"]
            done = subprocess.run([*command, *flags, folder], capture_output=True, text=True)
            print(f"{name} {role}: {'ok' if done.returncode == 0 else 'FAILED'}, {each} s")
            if done.returncode:
                failed.append(f"{name} {role}")
                print(done.stderr[-3000:], file=sys.stderr)
                for crash in Path(folder).glob("crash-*"):
                    print(f"input: {crash.read_bytes().hex()}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
