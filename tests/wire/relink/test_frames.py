"""Relink's handshake messages and packets against recorded bytes, and round trips."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import FrameTooLarge, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Frame, Row, Unsynchronized
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.frames import (
    ChannelOperation,
    Message,
    Ping,
    RelinkLimits,
    Zeros,
    scan,
    serialize,
)
from crosswire.wire.relink.handshake import ConnectorHello, serialize_handshake
from crosswire.wire.relink.layout import packet_layout
from tests.wire.relink.strategies import (
    connector_start,
    hellos,
    hints_of,
    id_sizes,
    listener_start,
    packets,
    written,
)
from tests.wire.vectors import load

VECTORS = load("relink")
ROUTES = ["connector", "listener"]

# What has more bytes than needed, or unused bits set, is written in the shortest form.
WRITTEN_OTHERWISE = {
    "relink-006": "0000000000000000046162636401010000000000000000000000000000000000",
    "relink-008": "0000000000000000046162636401010000000000000000000000000000000000",
    "relink-035": "0000000000000000046162636401010000000000000000000000000000000000",
    "relink-034": "130100000100000001000100000000006100000000000000",
}


class Reading:
    """A vector's bytes, after the handshake that its context describes."""

    def __init__(self, vector: dict[str, Any]) -> None:
        context = vector["context"]
        self.sender = vector["direction"]
        self.sizes = (context.get("connector_id_size", 1), context.get("listener_id_size", 1))
        self.wire = bytes.fromhex(vector["wire"])
        self.start = b""
        if context["phase"] == "packets":
            connector = self.sender == "connector"
            self.start = connector_start(self.sizes) if connector else listener_start()
        self.expected = [
            (item["offset"], item["length"], item["frame"], item["fields"])
            for item in vector["frames"]
        ]
        self.error = vector.get("error", {}).get("offset")
        if "connector_id_size" not in context:
            decoder = self.decoder()
            decoder.feed(self.wire)
            self.sizes = decoder.id_sizes or (1, 1)

    def decoder(self) -> RelinkDecoder:
        hints = hints_of(self.sizes) if self.sender == "listener" else None
        decoder = RelinkDecoder(self.sender, hints=hints)
        decoder.feed(self.start)
        return decoder

    @property
    def is_cut_short(self) -> bool:
        placed = sum(length for _, length, _, _ in self.expected)
        return self.error is None and placed < len(self.wire)

    @property
    def is_needlessly_big(self) -> bool:
        """All long and large messages among the vectors could be short and small."""
        return bool(self.start) and self.wire[0] & 0x1D == 0x11 and bool(self.wire[0] & 0x60)

    def frames(self, wire: bytes) -> list[Frame]:
        return [item for _, _, item in self.decoder().feed(wire) if isinstance(item, Frame)]

    def check(self, rows: list[Row]) -> None:
        base = len(self.start)
        found = [
            (row.offset - base, row.length, row.frame, json.loads(msgspec.json.encode(row.fields)))
            for row in rows
            if not row.error
        ]
        errors = [row.offset - base for row in rows if row.error]
        assert found == self.expected
        assert errors == ([] if self.error is None else [self.error])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
class TestVectors:
    def test_whole(self, vector: dict[str, Any]) -> None:
        reading = Reading(vector)
        reading.check(reading.decoder().rows(reading.wire))

    def test_byte_by_byte(self, vector: dict[str, Any]) -> None:
        reading = Reading(vector)
        decoder = reading.decoder()
        reading.check([row for octet in reading.wire for row in decoder.rows(bytes([octet]))])

    def test_with_bytes_after_it(self, vector: dict[str, Any]) -> None:
        reading = Reading(vector)
        if reading.is_cut_short:
            return
        decoder = reading.decoder()
        reading.check(decoder.rows(reading.wire + b"\x11"))
        assert decoder.pending + decoder.unread >= 1

    def test_serialized(self, vector: dict[str, Any]) -> None:
        reading = Reading(vector)
        frames = reading.frames(reading.wire)
        again = b"".join(bytes_of(frame, reading) for frame in frames)
        assert reading.frames(again) == frames
        if not reading.is_needlessly_big:
            length = sum(item["length"] for item in vector["frames"])
            default = reading.wire[:length].hex()
            assert again.hex() == WRITTEN_OTHERWISE.get(vector["name"], default)


def bytes_of(frame: Frame, reading: Reading) -> bytes:
    if frame.frame_name.startswith(("connector-", "listener-")):
        return serialize_handshake(frame)
    return b"".join(serialize(frame, packet_layout(reading.sender, *reading.sizes)))


def test_the_long_and_large_form_is_written_where_it_must_be() -> None:
    at = packet_layout("connector", 1, 1)
    assert serialize(Message((7,), False, (b"x",) * 256), at)[0][0] == 0x31
    assert serialize(Message((7,), False, (bytes(65536),)), at)[0][0] == 0x51


@pytest.mark.parametrize("sender", ROUTES)
@settings(max_examples=150)
@given(data=st.data(), sizes=id_sizes)
def test_round_trip(sender: str, data: st.DataObject, sizes: tuple[int, int]) -> None:
    sent = data.draw(st.lists(packets(sender, sizes), max_size=6))
    wire = written(sent, sender, sizes)
    placed: list[Any] = []
    assert scan(wire, 0, 0, packet_layout(sender, *sizes), RelinkLimits(), placed) == (len(wire), 8)
    assert [item for _, _, item in placed] == sent
    assert all(offset % 8 == 0 and length % 8 == 0 for offset, length, _ in placed)


@given(hellos)
def test_round_trip_of_the_hello(hello: ConnectorHello) -> None:
    decoder = RelinkDecoder("connector")
    placed = decoder.feed(bytes(8) + serialize_handshake(hello))
    assert [item for _, _, item in placed][1:] == [hello]
    assert decoder.id_sizes == (hello.connector_id_size, hello.listener_id_size)


# ---------------------------------------------------------------------------------------- limits


def refused(wire: bytes, *, sizes: tuple[int, int] = (1, 1), limits: RelinkLimits) -> Any:
    decoder = RelinkDecoder("connector", limits=limits)
    decoder.feed(connector_start(sizes))
    placed = decoder.feed(wire)
    return placed[-1][2] if placed else None


def test_a_packet_of_exactly_the_limit_passes_and_eight_bytes_more_do_not() -> None:
    limits = RelinkLimits(frame_bytes=4096)
    exact = bytes.fromhex("1101070008100000")[:4] + (4096 - 8).to_bytes(2, "little") + bytes(4090)
    assert isinstance(refused(exact, limits=limits), Message)
    over = bytes.fromhex("11010700") + (4096 - 7).to_bytes(2, "little") + bytes(2)
    assert isinstance(refused(over, limits=limits), FrameTooLarge)


def test_64_mib_is_the_default_limit() -> None:
    head = bytes.fromhex("5101070000000000")
    most = 64 * 1024 * 1024 - 16
    assert refused(head + most.to_bytes(8, "little"), limits=RelinkLimits()) is None
    error = refused(head + (most + 1).to_bytes(8, "little"), limits=RelinkLimits())
    assert isinstance(error, FrameTooLarge)


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ("1301000001000100", "65537 channels"),
        ("3100070001000100", "65537 parts"),
        ("0300000001000100", "65537 channels"),
        ("4f000000ffffffff", "4294967295 channels"),
        ("510207000000000000000000000000800000000000000080", "18446744073709551640 bytes"),
        ("7100070000000100ffffffffffffffff", None),
    ],
)
def test_what_is_announced_is_checked_before_it_is_there(wire: str, words: str | None) -> None:
    tracemalloc.start()
    try:
        error = refused(bytes.fromhex(wire), limits=RelinkLimits())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000
    if words is None:
        assert error is None  # 65,536 parts are allowed, and their sizes are still to come
    else:
        assert isinstance(error, FrameTooLarge) and words in error.reason


@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        *[(f"{value << 5:02x}", UnknownFrame) for value in (5, 6, 7)],
        *[(f"{1 | value << 2:02x}", UnknownFrame) for value in (5, 6, 7)],
        *[(f"{1 | value << 5:02x}", UnknownFrame) for value in (3, 4, 5, 6, 7)],
        *[(f"{5 | value << 5:02x}", UnknownFrame) for value in (5, 6, 7)],
        *[(f"{9 | value << 5:02x}", UnknownFrame) for value in (2, 3, 4, 5, 6, 7)],
        *[(f"{13 | value << 5:02x}", UnknownFrame) for value in (4, 5, 6, 7)],
    ],
)
def test_an_undefined_enumeration_value_is_refused(wire: str, kind: type[Exception]) -> None:
    assert isinstance(refused(bytes.fromhex(wire) + bytes(15), limits=RelinkLimits()), kind)


@given(st.binary(min_size=7, max_size=7), st.integers(0, 15), st.integers(0, 4))
def test_what_is_unused_is_ignored(rest: bytes, unused: int, value: int) -> None:
    decoder = RelinkDecoder("connector")
    decoder.feed(connector_start((0, 0)))
    general, operation = decoder.feed(
        bytes([value << 5 | unused << 1]) + rest + bytes([0x41]) + rest
    )
    assert general[2].frame_name == ["nop", "ping", "pong", "resume", "shutdown"][value]  # type: ignore[union-attr]
    assert operation[2] == ChannelOperation("close", (0,))


def test_a_channel_that_does_not_fit_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="channel 256"):
        serialize(Message((256,), False, ()), packet_layout("connector", 1, 8))


def test_65536_times_no_bytes_take_no_room() -> None:
    many = bytes.fromhex("4300000000000100") * 4096
    tracemalloc.start()
    try:
        decoder = RelinkDecoder("connector")
        placed = decoder.feed(connector_start((0, 0)) + many)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    last = placed[-1][2]
    assert isinstance(last, ChannelOperation) and last.channels == (0,) * 65536
    assert last.channels != (0,) * 65535 + (1,) and last.channels[5:7] == (0, 0)
    assert last.fields()["channels"] == [0] * 65536
    assert b"".join(serialize(last, packet_layout("connector", 0, 0))) == many[:8]


# ------------------------------------------------------------------------------------- zero-copy


def test_a_large_part_is_a_view_of_what_came_and_leaves_as_it_is() -> None:
    part = bytes(16 * 1024 * 1024)
    at = packet_layout("connector", 1, 1)
    pieces = serialize(Message((7,), False, (b"small", part, b"tail")), at)
    assert any(piece is part for piece in pieces)
    wire = b"".join(pieces)
    decoder = RelinkDecoder("connector")
    decoder.feed(connector_start((1, 1)))
    chunks = [wire[at : at + 262144] for at in range(0, len(wire), 262144)]
    tracemalloc.start()
    try:
        placed = [item for chunk in chunks for item in decoder.feed(chunk)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (message,) = [item for _, _, item in placed]
    assert isinstance(message, Message) and isinstance(message.parts[1], memoryview)
    assert message.parts == (b"small", part, b"tail")
    assert peak < 16.5 * 1024 * 1024


# --------------------------------------------------------------------------------------- decoder


def test_the_listener_is_read_with_the_sizes_of_the_connectors_hello() -> None:
    sizes = (3, 5)
    sent: list[Frame] = [Message((1 << 39,), False, (b"x",)), Ping()]
    peer = RelinkDecoder("connector")
    decoder = RelinkDecoder("listener", peer=peer)
    decoder.feed(listener_start())
    peer.feed(connector_start(sizes))
    assert [item for _, _, item in decoder.feed(written(sent, "listener", sizes))] == sent


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_without_sizes_it_reports_that_instead_of_guessing(late: bool, size: int) -> None:
    sent: list[Frame] = [Ping(), Message((1,), False, (b"x",)), Ping()]
    wire = (b"" if late else listener_start()) + written(sent, "listener", (1, 1))
    decoder = RelinkDecoder("listener", late=late)
    items = [
        item for at in range(0, len(wire), size) for item in decoder.feed(wire[at : at + size])
    ]
    offset, length, last = items[-1]
    assert isinstance(last, Unsynchronized) and "sizes of channel ids" in last.reason
    assert (offset, length) == ((0, 8) if late else (32, 8))
    assert sum(length for _, length, _ in items) + decoder.unread == len(wire)


@settings(max_examples=100)
@given(
    st.lists(
        packets("listener", (1, 2)).filter(lambda frame: frame.frame_name != "nop"), min_size=6
    ),
    st.binary(max_size=30),
)
def test_a_late_decoder_accounts_for_every_byte(sent: list[Frame], before: bytes) -> None:
    wire = written(sent, "listener", (1, 2))
    decoder = RelinkDecoder("listener", late=True, hints=hints_of((1, 2)))
    placed = decoder.feed(before + wire)
    assert not placed or isinstance(placed[0][2], Unsynchronized)
    assert not placed or placed[0][0] == 0
    total = sum(length for _, length, _ in placed) + decoder.pending + decoder.unread
    assert total == len(before + wire)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_late_decoder_finds_its_feet(cut: int) -> None:
    """It joins anywhere in the first two messages, and reads the rest as if it had seen them."""
    sent: list[Frame] = [Message((7,), False, (b"text %d" % n, b"x" * 9)) for n in range(8)]
    wire = written(sent, "listener", (1, 2))
    length = len(wire) // len(sent)
    decoder = RelinkDecoder("listener", late=True, hints=hints_of((1, 2)))
    (_, skipped, first), *rest = decoder.feed(wire[cut:])
    whole = -(-cut // length)
    assert isinstance(first, Unsynchronized) and skipped == whole * length - cut
    assert [item for _, _, item in rest] == sent[whole:]


def test_after_a_gap_only_aligned_offsets_are_searched() -> None:
    sizes = (1, 1)
    sent: list[Frame] = [Message((7,), False, (b"q" * 50,)) for _ in range(8)]
    wire = connector_start(sizes) + written(sent, "connector", sizes)
    decoder = RelinkDecoder("connector")
    first = decoder.feed(wire[:30])
    assert len(first) == 1
    decoder = RelinkDecoder("connector")
    rows = decoder.rows(wire[:40])
    rows += [decoder.describe(*item) for item in decoder.skip(11)]
    rows += decoder.rows(wire[51:])
    frames = [row.frame for row in rows]
    assert frames.count("message") >= 6 and frames.count("gap") == 1
    assert all(row.offset % 8 == 0 for row in rows if row.frame == "message")


@pytest.mark.parametrize("hints", [{"connector_id_size": 1}, hints_of((9, 0)), hints_of((0, -1))])
def test_hints_are_checked(hints: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        RelinkDecoder("listener", hints=hints)


@pytest.mark.parametrize("wire", ["ff" * 8, "80" + "00" * 7])
def test_a_link_id_has_no_bit_63(wire: str) -> None:
    decoder = RelinkDecoder("listener")
    link = bytes.fromhex(wire)[::-1]
    error = decoder.feed(bytes(16) + link)[-1][2]
    assert isinstance(error, MalformedFrame)


def test_ids_without_bytes_are_not_written_one_by_one() -> None:
    # Eight bytes announce as many of them as a peer likes: four billion would take minutes.
    multicast = ChannelOperation("close", Zeros(2**32 - 1), True)
    wire = b"".join(serialize(multicast, packet_layout("connector", 0, 0)))
    assert wire == b"".join(
        serialize(ChannelOperation("close", Zeros(1), True), packet_layout("connector", 0, 0))
    ).replace(b"\1\0\0\0", b"\xff" * 4)
