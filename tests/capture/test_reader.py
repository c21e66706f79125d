"""Captures in plain Python; tests of the pipeline compare it with the kernels on all formats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from crosswire.capture.flows import END_BYTES, end_of
from crosswire.capture.reader import CapturedPacket, read_packets, read_segments
from crosswire.capture.reassembly import Flow
from crosswire.errors import InvalidInput
from crosswire.wire.runs import DATA
from tests.pipeline.captures import RAW, classic, enhanced, interface, ipv4, section, simple, tcp

TIME = 1_700_000_000_123_456_000


def test_packets_with_their_times_and_link_types(tmp_path: Path) -> None:
    file = tmp_path / "a.pcapng"
    packets = [ipv4(tcp(b"hello")), b"no packet at all"]
    file.write_bytes(
        section() + interface(RAW) + enhanced(TIME // 1000, packets[0]) + simple(packets[1])
    )
    assert list(read_packets(str(file))) == [
        CapturedPacket(TIME, RAW, packets[0]),
        # A simple packet has no time: it gets the previous one's.
        CapturedPacket(TIME, RAW, packets[1]),
    ]


def test_segments_can_be_put_together(tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    parts = [tcp(b"wor", number=6), tcp(b"hello", number=1), tcp(b"ld", number=9)]
    file.write_bytes(classic([(TIME, ipv4(part)) for part in parts], RAW))
    flows = set()
    flow = Flow()
    data = []
    for key, segment in read_segments(str(file)):
        flows.add(key)
        data += [run.data for run in flow.add(segment) if run.kind == DATA]
    data += [run.data for run in flow.finish()]
    (key,) = flows
    assert b"".join(filter(None, data)) == b"helloworld"
    assert end_of(key[:END_BYTES]) <= end_of(key[END_BYTES:])


def test_no_capture(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"just a text, long enough for a header")
    with pytest.raises(InvalidInput, match="text is no capture file"):
        list(read_packets(str(file)))


def test_neither_numpy_nor_arrow_is_loaded() -> None:
    """`crosswire decode` and an analyzer start fast and run where neither is installed."""
    program = (
        "import sys, crosswire.capture.reader, crosswire.capture.classify\n"
        "loaded = {'numpy', 'numba', 'pyarrow', 'pyspark'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
