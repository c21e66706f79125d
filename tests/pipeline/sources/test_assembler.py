"""The compiled reassembly against the plain one: the same rows, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from crosswire.capture import tcp
from crosswire.capture.classify import PortMap
from crosswire.capture.reassembly import LINGER_NS, Segment
from crosswire.pipeline.decode.arrow_batches import BATCH_BYTES, BATCH_ROWS
from crosswire.pipeline.sources.assembler import Assembler
from crosswire.pipeline.sources.flow_rows import FlowRows
from crosswire.pipeline.sources.flow_shares import OrderedSegments
from crosswire.pipeline.sources.packet_kernels import PACKET

PORTS = PortMap({9000: "emqp"})
Flows = list[tuple[bytes, list[Segment]]]

MISHAPS = ("lost", "doubled", "delayed", "longer", "cut", "empty", "far", "reset")
FIRST_BYTES = (b"\x16\x03\x01\x00\x05\x01hello", b"\xff" + bytes(8) + b"\x7f\x03", b"", b"x" * 300)
"""Of protocols that can be recognized by them, and of others."""


def key(number: int, port: int) -> bytes:
    """Every third is of IPv6."""
    prefix = b"\xfd" + bytes(11) if number % 3 == 2 else bytes(10) + b"\xff\xff"
    address = prefix + bytes([10, 0, 0, number])
    return address + (40_000 + number).to_bytes(2) + address[:-1] + b"\xff" + port.to_bytes(2)


def talk(random: Random, time: int) -> Iterator[Segment]:
    """A connection as it should be."""
    opener = random.random() < 0.5
    sent = {True: random.choice((5, 2**31 - 40, 2**32 - 60)), False: random.randrange(2**32)}

    def segment(forward: bool, flags: int, payload: bytes = b"") -> Segment:
        nonlocal time
        time += random.choice((1, 1000, 10**6, 3 * 10**8))
        made = Segment(
            forward, time, sent[forward], sent[not forward], flags, len(payload), payload
        )
        counted = len(payload) + bool(flags & (tcp.SYN | tcp.FIN))
        sent[forward] = (sent[forward] + counted) % 2**32
        return made

    yield segment(opener, tcp.SYN, b"early" if random.random() < 0.1 else b"")
    yield segment(not opener, tcp.SYN | tcp.ACK)
    yield segment(opener, tcp.ACK, random.choice(FIRST_BYTES) or b"?")
    for _ in range(random.randrange(12)):
        yield segment(random.random() < 0.6, tcp.ACK, random.randbytes(random.randrange(1, 30)))
    if random.random() < 0.2:
        yield segment(random.random() < 0.5, tcp.RST, random.choice((b"", b"bang")))
    if random.random() < 0.8:
        yield segment(opener, tcp.FIN | tcp.ACK, random.choice((b"", b"last")))
        yield segment(not opener, tcp.FIN | tcp.ACK)


def disturbed(random: Random, segments: list[Segment], often: float) -> Iterator[Segment]:
    """Lost, doubled, delayed, overlapping and cut segments, and such of another connection."""
    delayed: list[Segment] = []
    for segment in segments:
        what = random.choice(MISHAPS)
        if random.random() >= often:
            what = ""
        if what == "lost":
            continue
        if what == "delayed":
            delayed.append(segment)
            continue
        if what == "longer" and segment.payload:
            before = random.randrange(40)
            segment = segment._replace(
                number=(segment.number - before) % 2**32,
                payload=random.randbytes(before) + segment.payload + b"more",
                length=segment.length + before + 4,
            )
        elif what in ("cut", "empty"):
            segment = segment._replace(payload=segment.payload[: 3 if what == "cut" else 0])
        elif what == "far":
            segment = segment._replace(number=(segment.number + (1 << 31) - 9) % 2**32)
        elif what == "reset":
            segment = segment._replace(flags=segment.flags | tcp.RST)
        yield segment
        if what == "doubled":
            yield segment
        if delayed and random.random() < 0.5:
            yield delayed.pop()._replace(time_ns=segment.time_ns)
    yield from (segment._replace(time_ns=segments[-1].time_ns) for segment in delayed)


def flows_of(random: Random, often: float) -> Flows:
    made: Flows = []
    for number in range(random.randrange(1, 5)):
        segments: list[Segment] = []
        time = 10**9
        for _ in range(random.randrange(1, 4)):
            connection = list(talk(random, time))
            if random.random() < 0.2:
                connection = connection[random.randrange(len(connection)) :]
            segments += disturbed(random, connection, often) if connection else []
            last = max((segment.time_ns for segment in segments), default=time)
            time = last + random.choice((0, LINGER_NS - 10**9, LINGER_NS + 10**9))
        segments.sort(key=lambda segment: segment.time_ns)
        if segments:
            made.append((key(number, random.choice((5040, 9000, 9999))), segments))
    return made


def ordered(flows: Flows, shuffle: Random | None = None) -> OrderedSegments:
    """In columns; the order may be given as indexes instead."""
    rows = [(number, segment) for number, (_, own) in enumerate(flows) for segment in own]
    indexes = list(range(len(rows)))
    if shuffle is not None:
        shuffle.shuffle(indexes)
    shown = [rows[index] for index in indexes]
    packets = np.zeros(len(shown), PACKET)
    packets["flow"] = [number for number, _ in shown]
    packets["size"] = [len(segment.payload) for _, segment in shown]
    packets["start"] = np.cumsum(packets["size"], dtype=np.int64) - packets["size"]
    for name in ("forward", "time_ns", "number", "acknowledgement", "flags", "length"):
        packets[name] = [getattr(segment, name) for _, segment in shown]
    return OrderedSegments(
        np.argsort(np.array(indexes, np.int64)).astype(np.int32),
        np.frombuffer(b"".join(key for key, _ in flows), np.uint8).reshape(-1, 36),
        [np.frombuffer(b"".join(segment.payload for _, segment in shown), np.uint8)],
        packets,
    )


def plainly(flows: Flows, reorder_bytes: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for flow, segments in flows:
        rows = FlowRows(flow, PORTS, reorder_bytes=reorder_bytes)
        for segment in segments:
            found += rows.add(segment)
        found += rows.finish()
    return found


def in_pieces(random: Random, flows: Flows) -> Iterator[Flows]:
    """Cut anywhere, inside flows too."""
    rows = [(flow, segment) for flow, own in flows for segment in own]
    while rows:
        some, rows = rows[: (count := random.randrange(1, len(rows) + 1))], rows[count:]
        piece: Flows = []
        for flow, segment in some:
            if not piece or piece[-1][0] != flow:
                piece.append((flow, []))
            piece[-1][1].append(segment)
        yield piece


def assembled(assembler: Assembler, pieces: list[OrderedSegments]) -> list[tuple[Any, ...]]:
    batches = [batch for piece in pieces for batch in assembler.feed(piece)]
    batches += assembler.finish()
    for batch in batches:
        batch.validate(full=True)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@settings(max_examples=200, phases=(Phase.explicit, Phase.generate))
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.05, 0.4]),
    st.sampled_from([1 << 20, 40]),
)
def test_the_same_rows_as_segment_by_segment(
    random: Random, often: float, reorder_bytes: int
) -> None:
    flows = flows_of(random, often)
    expected = plainly(flows, reorder_bytes)
    whole = Assembler(PORTS, reorder_bytes=reorder_bytes)
    assert assembled(whole, [ordered(flows, random)]) == expected
    cut = Assembler(PORTS, reorder_bytes=reorder_bytes)
    assert assembled(cut, [ordered(piece) for piece in in_pieces(random, flows)]) == expected


def test_a_hole_that_is_filled_by_many_segments_at_once() -> None:
    """More rows come out of one segment than a batch has room for."""
    flow = key(1, 5040)
    segments = [Segment(True, 1, 7, 0, tcp.SYN, 0, b"")]
    count = BATCH_ROWS + 100
    segments += [Segment(True, 2 + n, 9 + n, 0, 0, 1, b"x") for n in range(count)]
    segments.append(Segment(True, 10**6, 8, 0, 0, 1, b"!"))
    segments.append(Segment(True, 10**6 + 1, 9 + count, 0, 0, 1, b"z"))
    flows = [(flow, segments)]
    assert assembled(Assembler(PORTS), [ordered(flows)]) == plainly(flows, 1 << 20)


def test_batches_are_of_a_bounded_size() -> None:
    payload = bytes(60_000)
    segments = [Segment(True, n, n * len(payload), 0, 0, 60_000, payload) for n in range(400)]
    assembler = Assembler(PORTS)
    batches = [*assembler.feed(ordered([(key(1, 5040), segments)])), *assembler.finish()]
    assert sum(batch.num_rows for batch in batches) == 400
    assert max(batch.nbytes for batch in batches) < BATCH_BYTES + 2 * len(payload)


def test_much_waits_for_holes() -> None:
    """In any order, in both directions, more than once, up to the end of a batch's room."""
    random = Random(3)
    segments = [Segment(True, 1, 7, 0, tcp.SYN, 0, b""), Segment(False, 2, 3, 8, 18, 0, b"")]
    time = 10
    sent = {True: 8, False: 4}
    for _ in range(6):
        for forward in (True, False):
            pieces = []
            for _ in range(random.choice((10, 3000))):
                payload = random.randbytes(random.randrange(1, 4))
                pieces.append((sent[forward], payload))
                sent[forward] += len(payload)
            first, *rest = pieces
            if random.random() < 0.5:
                rest.reverse()
            for number, payload in (*rest, first):
                time += 1
                acknowledged = sent[not forward]
                head = (forward, time, number, acknowledged, tcp.ACK)
                segments.append(Segment(*head, len(payload), payload))
    flows = [(key(1, 5040), segments)]
    assert assembled(Assembler(PORTS), [ordered(flows)]) == plainly(flows, 1 << 20)
