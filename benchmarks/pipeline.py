"""How fast captures become silver.frames, as ratios that one run measures on one machine.

    python benchmarks/pipeline.py [--only decode pcap scaling small] [--protocols emp …]
    python benchmarks/pipeline.py --megabytes 8

    decode    by protocol, from the files of a tap: frames against a `mapInArrow` that gives its
              input back unchanged, and against a row-by-row UDF around the same decoder which
              gives the same rows
    pcap      from capture file to frames, against a script on dpkt that walks the packets of the
              same file in one process and splits EMP's frames
    scaling   twice the input; and the most memory that a Python worker took
    small     the same bytes in connections of 1 KB and in ten

Compared runs alternate, after a warm-up round; a figure is the best of three. The ratio of CPU
times of Java and Python together is in brackets: it is more reliable on a machine with other
programs.

Spark's fixed cost of a job is on both sides of a ratio, and short runs vary. So the input is large,
and the whole benchmark takes half an hour; with fewer `--megabytes` it is quick, and the ratios are
lower.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dpkt
import pyarrow as pa
from from_tests import ConnectionRows
from measure import Cost, Memory, costs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StructType

from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS
from crosswire.pipeline.decode.row_schema import ARROW, COLUMNS, FRAME_COLUMNS
from crosswire.pipeline.sources.decoded import decode_captures, decode_tap
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import from_tap
from crosswire.pipeline.spark import start
from crosswire.pipeline.tables.frames import frames
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from crosswire.wire import PROTOCOL_NAMES

MEGABYTES = {"decode": 384.0, "pcap": 64.0, "scaling": 192.0, "small": 64.0}
MESSAGE_BYTES = 560


def write_line(name: str, *cells: str) -> None:
    print(f"  {name:<12}", *cells, sep="  ", flush=True)


def drain(rows: DataFrame) -> None:
    """Compute every row, and keep none."""
    rows.write.format("noop").mode("overwrite").save()


def traffic(megabytes: float, names: tuple[str, ...], connections: int = 10) -> SampleTraffic:
    each = max(round(megabytes * 1e6 / MESSAGE_BYTES / connections), 1)
    return SampleTraffic(protocols=names, connections=connections, messages=each)


def identity(wire: DataFrame) -> DataFrame:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return wire.mapInArrow(same, wire.schema)


def row_by_row(wire: DataFrame) -> DataFrame:
    """The obvious implementation: a row-by-row UDF that keeps a decoder per connection and returns
    the rows of silver.frames that are complete."""
    collected = Batches(ARROW)
    connections: dict[str, ConnectionRows] = {}

    def split(*row: Any) -> list[tuple[Any, ...]]:
        name = row[WIRE_COLUMNS.index("connection")]
        if name not in connections:
            connections[name] = ConnectionRows(row, collected, payloads=False)
        connections[name].add(row)
        made, collected.rows = collected.rows, []
        return [each[1 : 1 + len(FRAME_COLUMNS)] for each in made]

    kind = ArrayType(StructType(COLUMNS.fields[1 : 1 + len(FRAME_COLUMNS)]))
    ordered = wire.repartition("connection").sortWithinPartitions("connection", "seq")
    decoded = F.explode(F.udf(split, kind)(*WIRE_COLUMNS)).alias("row")
    return ordered.select(decoded).select("row.*")


def from_lake(spark: SparkSession, lake: Path) -> DataFrame:
    """silver.frames, as a run without payloads makes it."""
    return frames(decode_tap(spark, [str(lake / "wire")], payloads=False))


def measure_decode(
    spark: SparkSession, folder: Path, megabytes: float, names: tuple[str, ...]
) -> None:
    print(f"\nframes of {megabytes:g} MB in ten connections")
    for name in names:
        lake = folder / name
        size = traffic(megabytes, (name,)).write_tap(lake)
        wire = from_tap(spark, [str(lake / "wire")])
        plans = (from_lake(spark, lake), identity(wire), row_by_row(wire))
        made, same, plain = costs(*(partial(drain, plan) for plan in plans))
        write_line(
            name,
            f"{size / made.clock / 1e6:7.1f} MB/s",
            f"{same(made)} unchanged",
            f"{plain(made)} row by row",
        )


def walk(file: Path) -> int:
    """The number of EMP's frames in a capture file, as a script with dpkt counts them."""
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


def measure_pcap(spark: SparkSession, folder: Path, megabytes: float, _: object) -> None:
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


def measure_scaling(
    spark: SparkSession, folder: Path, megabytes: float, names: tuple[str, ...]
) -> None:
    print(f"\ntwice the input, all protocols: {megabytes:g} and {2 * megabytes:g} MB")
    lakes = [folder / "once", folder / "twice"]
    for times, lake in enumerate(lakes, 1):
        traffic(megabytes * times, names, 20).write_tap(lake)
    with Memory() as memory:
        once, twice = costs(*(partial(drain, from_lake(spark, lake)) for lake in lakes))
    write_line("time", twice(once))
    write_line("worker", f"{memory.worker / 1e6:7.0f} MB at most")


def measure_small(
    spark: SparkSession, folder: Path, megabytes: float, names: tuple[str, ...]
) -> None:
    print("\nthe same bytes in connections of 1 KB, and in ten")
    many = SampleTraffic(protocols=names, connections=round(megabytes * 1e3), messages=1)
    lakes = [folder / "many", folder / "ten"]
    sizes = [
        each.write_tap(lake)
        for each, lake in zip((many, traffic(megabytes, names)), lakes, strict=True)
    ]
    taken = costs(*(partial(drain, from_lake(spark, lake)) for lake in lakes))
    each, ten = (
        Cost(cost.clock / size, cost.processor / size)
        for cost, size in zip(taken, sizes, strict=True)
    )
    write_line("time", each(ten))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--megabytes", type=float, help="approximate size of the input of every part"
    )
    parser.add_argument("--only", nargs="+", choices=MEGABYTES, default=tuple(MEGABYTES))
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOL_NAMES, default=PROTOCOL_NAMES)
    options = parser.parse_args()
    spark = start("local[*]", {"spark.sql.adaptive.enabled": "false"}, name="benchmark")
    measures = (measure_decode, measure_pcap, measure_scaling, measure_small)
    try:
        for (name, enough), measure in zip(MEGABYTES.items(), measures, strict=True):
            if name in options.only:
                with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as folder:
                    size = options.megabytes or enough
                    measure(spark, Path(folder), size, tuple(options.protocols))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
