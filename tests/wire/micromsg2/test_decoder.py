"""What a decoder follows over frames: handshakes, sequence, continuation, extension numbers."""

from __future__ import annotations

import pytest
from hypothesis import given

from crosswire.errors import DecoderStateError
from crosswire.wire.contract import Frame, Gap, Row, Unsynchronized
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.frames import (
    Command,
    Error,
    Extension,
    ExtensionFrame,
    Handshake,
    Message,
    serialize,
)
from tests.wire.micromsg2.strategies import frames

HINT = {"next_sequence": 1}
JSON = (Extension("json", {}),)


def message(sequence: int, destination: str = "q", *, continued: bool = False) -> Message:
    return Message(sequence, destination, b"", b"x", continued)


def wire(*sent: Frame) -> bytes:
    return b"".join(map(serialize, sent))


def outcomes(rows: list[Row]) -> list[str | None]:
    return [row.reason if row.error else row.frame for row in rows]


@pytest.mark.parametrize(
    ("numbers", "reasons"),
    [
        ([1, 2, 3], {}),
        ([2, 3], {0: "sequence number 2 where 1 was due"}),
        ([1, 3, 4], {1: "sequence number 3 where 2 was due"}),
        ([1, 1, 2], {1: "sequence number 1 where 2 was due"}),
        ([1, 0, 2], {1: "sequence number 0"}),
    ],
)
def test_a_gap_is_reported_once(numbers: list[int], reasons: dict[int, str]) -> None:
    decoder = MicroMsg2Decoder("client", hints=HINT)
    rows = decoder.rows(wire(*map(message, numbers)))
    assert outcomes(rows) == [reasons.get(at, "message") for at in range(len(numbers))]


def test_the_wrap() -> None:
    decoder = MicroMsg2Decoder("client", hints={"next_sequence": 65534})
    rows = decoder.rows(wire(*map(message, [65534, 65535, 1, 2])))
    assert outcomes(rows) == ["message"] * 4


def test_zero_does_not_follow_65535() -> None:
    decoder = MicroMsg2Decoder("client", hints={"next_sequence": 65535})
    assert outcomes(decoder.rows(wire(message(65535), message(0), message(1)))) == [
        "message",
        "sequence number 0",
        "message",
    ]


class TestContinuation:
    def test_other_frames_may_come_between(self) -> None:
        decoder = MicroMsg2Decoder("client", hints=HINT)
        rows = decoder.rows(
            wire(
                message(1, continued=True),
                Command("subscribe", {}),
                ExtensionFrame(1, b""),
                Error("internal", {}),
                message(2, ""),
                message(3),
            )
        )
        assert [row.error for row in rows] == [None] * 6

    def test_another_message_may_not(self) -> None:
        decoder = MicroMsg2Decoder("client", hints=HINT)
        rows = decoder.rows(wire(message(1, continued=True), message(2), message(3)))
        assert outcomes(rows) == ["message", "a message between the frames of another", "message"]

    def test_a_first_frame_has_a_destination(self) -> None:
        decoder = MicroMsg2Decoder("client", hints=HINT)
        rows = decoder.rows(wire(message(1, "", continued=True), message(2, ""), message(3)))
        assert outcomes(rows) == ["a message without a destination", "message", "message"]

    def test_an_only_frame_has_one_too(self) -> None:
        decoder = MicroMsg2Decoder("client", hints=HINT)
        rows = decoder.rows(wire(Message(1, "", b"", b"long enough"), message(2)))
        assert outcomes(rows) == ["a message without a destination", "message"]


class TestHandshakes:
    def test_a_client_sends_two(self) -> None:
        sent = Handshake(1, 0, 0, "c")
        rows = MicroMsg2Decoder("client").rows(wire(sent, sent, message(1)))
        assert outcomes(rows) == ["handshake", "handshake", "message"]

    def test_a_server_sends_one(self) -> None:
        rows = MicroMsg2Decoder("server").rows(wire(Handshake(1, 0, 0, "s"), message(1)))
        assert outcomes(rows) == ["handshake", "message"]

    def test_any_other_octet_than_4_and_12_is_a_version(self) -> None:
        for major in set(range(256)) - {4, 12}:
            (row,) = MicroMsg2Decoder("server").rows(wire(Handshake(major, 0, 0, "s")))
            assert row.frame == "handshake"

    def test_a_large_error_may_replace_it(self) -> None:
        (row,) = MicroMsg2Decoder("server").rows(wire(Error("version", {"description": "x" * 300})))
        assert row.frame == "error"

    def test_one_that_is_malformed_counts(self) -> None:
        bad = bytes.fromhex("0100000000023b3b0000")
        rows = MicroMsg2Decoder("server").rows(bad + wire(message(1)))
        assert [row.error for row in rows] == ["malformed", None]


class TestExtensionNumbers:
    def test_those_that_were_not_agreed_are_known_from_the_clients_own_handshake(self) -> None:
        decoder = MicroMsg2Decoder("client")
        final = Handshake(1, 0, 0, "c", JSON, JSON)
        sent = [Handshake(1, 0, 0, "c"), final, *(ExtensionFrame(n, b"") for n in (1, 2, 3, 0))]
        assert [row.error for row in decoder.rows(wire(*sent))] == [
            *[None] * 4,
            "malformed",
            "malformed",
        ]
        assert decoder.agreed == ["json", "json"]

    def test_a_server_is_read_by_the_clients_handshake(self) -> None:
        client = MicroMsg2Decoder("client")
        server = MicroMsg2Decoder("server", peer=client)
        client.feed(wire(Handshake(1, 0, 0, "c"), Handshake(1, 0, 0, "c", JSON)))
        sent = wire(Handshake(1, 0, 0, "s"), ExtensionFrame(1, b""), ExtensionFrame(2, b""))
        assert [row.error for row in server.rows(sent)] == [None, None, "malformed"]

    def test_alone_a_server_is_believed(self) -> None:
        sent = wire(Handshake(1, 0, 0, "s"), ExtensionFrame(200, b""))
        assert [row.error for row in MicroMsg2Decoder("server").rows(sent)] == [None, None]


class TestJoiningLate:
    @pytest.mark.parametrize("cut", range(1, 16))
    def test_the_first_whole_frame_is_found(self, cut: int) -> None:
        first = Message(70, "queue/orders", b"price:N10;", b"\0\0\0\0\0\0\0\0")
        follow = [message(number, "queue/orders") for number in range(71, 76)]
        data = wire(first, *follow)
        rows = MicroMsg2Decoder("client", late=True).rows(data[cut:])
        assert outcomes(rows) == ["unsynchronized"] + ["message"] * 5
        assert rows[0].length == len(serialize(first)) - cut

    def test_acks_alone_are_enough(self) -> None:
        acks = wire(*(ExtensionFrame(1, number.to_bytes(2)) for number in range(250, 260)))
        for cut in range(1, 5):
            rows = MicroMsg2Decoder("client", late=True).rows(acks[cut:])
            assert outcomes(rows) == ["unsynchronized"] + ["extension"] * 9

    @pytest.mark.parametrize("flags", [0x19, 0x1A, 0x1C])
    def test_what_can_not_become_a_frame_is_not_waited_for(self, flags: int) -> None:
        """Only messages can be continued: not a COMMAND, EXTENSION or ERROR of 32 KiB."""
        never = bytes([flags]) + (0x8000).to_bytes(4) + b"a;" + b" " * 400
        follow = [message(number, "queue/orders") for number in range(71, 74)]
        rows = MicroMsg2Decoder("client", late=True).rows(never + wire(*follow))
        assert outcomes(rows) == ["unsynchronized"] + ["message"] * 3
        assert rows[0].length == len(never)

    @pytest.mark.parametrize("properties", [b"a:c\0\0", b"a:1;b:%00", b"", b"a:\xc3\xa9;"])
    def test_how_much_of_a_frame_has_arrived_makes_no_difference(self, properties: bytes) -> None:
        first = Message(70, "queue/orders", properties, b"x" * 8)
        data = wire(first, *(message(number, "queue/orders") for number in range(71, 76)))
        whole = MicroMsg2Decoder("client", late=True).rows(b"\0" + data)
        for cut in range(1, len(data)):
            decoder = MicroMsg2Decoder("client", late=True)
            rows = decoder.rows(b"\0" + data[:cut]) + decoder.rows(data[cut:])
            assert rows == whole, cut

    def test_after_a_gap_any_number_may_be_due(self) -> None:
        decoder = MicroMsg2Decoder("client", hints=HINT)
        decoder.feed(wire(message(1)))
        items = [item for _, _, item in decoder.skip(1000)]
        data = wire(*(message(number, "queue/q") for number in range(80, 85)))
        items += [item for _, _, item in decoder.feed(data)]
        assert [type(item) for item in items] == [Gap, Unsynchronized] + [Message] * 5


@given(frames())
def test_saved_and_restored_anywhere(sent: list[Frame]) -> None:
    data = wire(*sent)
    expected = MicroMsg2Decoder("client", hints=HINT).rows(data)
    for cut in range(0, len(data) + 1, max(1, len(data) // 10)):
        before, after = MicroMsg2Decoder("client", hints=HINT), MicroMsg2Decoder("client")
        rows = before.rows(data[:cut])
        after.load(before.dump())
        assert rows + after.rows(data[cut:]) == expected


def test_damaged_state_is_refused() -> None:
    good = MicroMsg2Decoder("client").dump()
    with pytest.raises(DecoderStateError):
        MicroMsg2Decoder("client").load(good[:-4] + b"\xc3\xc3\xc3\xc3")
