"""How fast captures become silver.frames, as ratios that one run measures on one machine.

    python benchmarks/pipeline.py [--megabytes 8] [--only decode pcap scaling small]

    decode    by protocol, from the files of a tap: frames against a `mapInArrow` that gives its
              input back unchanged, and against a row-by-row UDF around the same decoder
    pcap      from capture file to frames, against a script on dpkt that walks the packets of the
              same file in one process and splits EMP's frames
    scaling   twice the input; and the most memory that a Python worker took
    small     the same bytes in connections of 1 KB and in ten

What is compared takes turns, after a round that warms up; a figure is the best of three. Beside the
ratio of the times, in brackets, that of the processor's seconds in Java and Python together, which
says more where others use the machine too.
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dpkt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from traffic import Traffic, packets, write_pcap

from crosswire.pipeline.decode import decode_captures, decode_tap
from crosswire.pipeline.session import start
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import from_tap
from crosswire.pipeline.tables.frames import frames
from crosswire.wire import PROTOCOL_NAMES, protocol

PARTS = ("decode", "pcap", "scaling", "small")
MESSAGE_BYTES = 560


class Cost(NamedTuple):
    """What a piece of work took: seconds by the clock, and of all processors."""

    clock: float
    processor: float

    def __call__(self, other: Cost) -> str:
        """How many times as much as the other's this is."""
        return f"{self.clock / other.clock:5.2f} ({self.processor / other.processor:5.2f}) x"


def costs(*works: Callable[[], object]) -> list[Cost]:
    found: list[list[Cost]] = [[] for _ in works]
    for _ in range(4):
        for work, taken in zip(works, found, strict=True):
            clock, processor = time.perf_counter(), processor_s()
            work()
            taken.append(Cost(time.perf_counter() - clock, processor_s() - processor))
    return [
        Cost(min(cost.clock for cost in taken[1:]), min(cost.processor for cost in taken[1:]))
        for taken in found
    ]


def processor_s() -> float:
    """Of this process and all below it."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            told = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        process = int(stat.parent.name)
        parents[process], ticks[process] = int(told[1]), sum(map(int, told[11:15]))
    ours = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(process, 0) for process in ours) / os.sysconf("SC_CLK_TCK")


def write_line(name: str, *told: str) -> None:
    print(f"  {name:<12}", *told, sep="  ", flush=True)


def drain(rows: DataFrame) -> None:
    """Make every row, and keep none."""
    rows.write.format("noop").mode("overwrite").save()


def traffic(megabytes: float, names: tuple[str, ...], connections: int = 10) -> Traffic:
    each = max(round(megabytes * 1e6 / MESSAGE_BYTES / connections), 1)
    return Traffic(protocols=names, connections=connections, messages=each)


def identity(wire: DataFrame) -> DataFrame:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return wire.mapInArrow(same, wire.schema)


def row_by_row(wire: DataFrame) -> DataFrame:
    """What one would write first: a function of a row that keeps a decoder for each direction."""
    decoders: dict[tuple[str, str], Any] = {}

    def split(name: str, connection: str, direction: str, data: bytes) -> list[tuple[Any, ...]]:
        key = (connection, direction)
        if key not in decoders:
            entry = protocol(name)
            peer = decoders.get((connection, "forward"))
            role = entry.roles[0 if direction == "forward" else -1]
            decoders[key] = entry.decoder(role, peer=peer)
        return [
            (row.offset, row.length, row.frame, str(row.fields)) for row in decoders[key].rows(data)
        ]

    kind = "array<struct<offset: bigint, length: bigint, frame: string, fields: string>>"
    told = F.udf(split, kind)("protocol", "connection", "direction", "data")
    ordered = wire.where("kind = 'data'").repartition("connection")
    ordered = ordered.sortWithinPartitions("connection", "seq")
    return ordered.select("connection", "direction", F.explode(told).alias("row"))


def from_lake(spark: SparkSession, lake: Path) -> DataFrame:
    """silver.frames, as a run without payloads makes it."""
    return frames(decode_tap(spark, [str(lake / "wire")], payloads=False))


def measure_decode(spark: SparkSession, folder: Path, megabytes: float) -> None:
    print(f"\nframes of {megabytes:g} MB in ten connections")
    for name in PROTOCOL_NAMES:
        lake = folder / name
        size = traffic(megabytes, (name,)).write_tap(lake)
        wire = from_tap(spark, [str(lake / "wire")])
        ways = (from_lake(spark, lake), identity(wire), row_by_row(wire))
        made, same, plain = costs(*(partial(drain, way) for way in ways))
        write_line(
            name,
            f"{size / made.clock / 1e6:7.1f} MB/s",
            f"{same(made)} unchanged",
            f"{plain(made)} row by row",
        )


def walk(file: Path) -> int:
    """EMP's frames in a capture file: what a script on dpkt would do."""
    waiting: dict[tuple[bytes, int, bytes, int], bytes] = {}
    found = 0
    with file.open("rb") as opened:
        for _, packet in dpkt.pcap.Reader(opened):
            ip = dpkt.ethernet.Ethernet(packet).data
            segment = ip.data
            if not segment.data:
                continue
            key = (ip.src, segment.sport, ip.dst, segment.dport)
            data = waiting.get(key, b"") + segment.data
            at = 0
            while len(data) - at >= 4:
                size = struct.unpack_from(">I", data, at)[0] + 4
                if len(data) - at < size:
                    break
                found += 1
                at += size
            waiting[key] = data[at:]
    return found


def measure_pcap(spark: SparkSession, folder: Path, megabytes: float) -> None:
    file = folder / "emp.pcap"
    made = traffic(megabytes, ("emp",))
    records = [each for talk in made.conversations() for each in packets(talk)]
    records.sort(key=lambda record: record[0])
    size = write_pcap(file, records)
    del records
    framed = frames(decode_captures(Captures(spark, [str(file)]), payloads=False))
    script, ours = costs(lambda: walk(file), lambda: drain(framed))
    print("\nfrom capture file to frames")
    write_line("emp", f"{size / ours.clock / 1e6:7.1f} MB/s", f"{script(ours)} dpkt")


def measure_scaling(spark: SparkSession, folder: Path, megabytes: float) -> None:
    print(f"\ntwice the input, all protocols: {megabytes:g} and {2 * megabytes:g} MB")
    lakes = [folder / "once", folder / "twice"]
    for times, lake in enumerate(lakes, 1):
        traffic(megabytes * times, PROTOCOL_NAMES, 20).write_tap(lake)
    with Peak() as peak:
        once, twice = costs(*(partial(drain, from_lake(spark, lake)) for lake in lakes))
    write_line("time", twice(once))
    write_line("worker", f"{peak.bytes / 1e6:7.0f} MB at most")


def measure_small(spark: SparkSession, folder: Path, megabytes: float) -> None:
    print("\nthe same bytes in connections of 1 KB, and in ten")
    many = Traffic(protocols=PROTOCOL_NAMES, connections=round(megabytes * 1e3), messages=1)
    lakes = [folder / "many", folder / "ten"]
    sizes = [
        each.write_tap(lake)
        for each, lake in zip((many, traffic(megabytes, PROTOCOL_NAMES)), lakes, strict=True)
    ]
    taken = costs(*(partial(drain, from_lake(spark, lake)) for lake in lakes))
    each, ten = (
        Cost(cost.clock / size, cost.processor / size)
        for cost, size in zip(taken, sizes, strict=True)
    )
    write_line("time", each(ten))


class Peak:
    """The most memory that any Python worker of ours has held, looked at while it lives."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    if b"pyspark.daemon" in (status.parent / "cmdline").read_bytes():
                        told = status.read_text()
                        high = int(told.partition("VmHWM:")[2].split()[0]) * 1024
                        self.bytes = max(self.bytes, high)
                except (OSError, IndexError, ValueError):
                    continue  # it has ended meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    spark = start("local[*]", {"spark.sql.adaptive.enabled": "false"}, name="benchmark")
    measures = (measure_decode, measure_pcap, measure_scaling, measure_small)
    try:
        for name, measure in zip(PARTS, measures, strict=True):
            if name in options.only:
                with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as folder:
                    measure(spark, Path(folder), options.megabytes)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
