"""Epoxy's frames against recorded bytes, limits, and round trips."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.bond import fast, marshal
from crosswire.bond.dialect import Dialect
from crosswire.errors import (
    BondDecodeError,
    ErrorInError,
    FrameError,
    FrameTooLarge,
    MalformedFrame,
    UnknownFrame,
    UnsupportedFrame,
)
from crosswire.wire.contract import Frame, Row, Unsynchronized
from crosswire.wire.epoxy import PROTOCOL, comm
from crosswire.wire.epoxy import frames as module
from crosswire.wire.epoxy.comm import Error, ErrorCode
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.frames import (
    ConfigFrame,
    EpoxyLimits,
    Message,
    MessageType,
    ProtocolError,
    scan,
    serialize,
)
from tests.wire.epoxy.strategies import (
    conversation_ids,
    frames,
    int32s,
    messages,
    names,
    protocol_errors,
)
from tests.wire.vectors import load

VECTORS = load("epoxy")
VALID = [vector for vector in VECTORS if "frame" in vector or "frames" in vector]
CUT_SHORT = "handshake-eof-mid-frame"
REFUSED = [vector for vector in VECTORS if vector not in VALID and vector["name"] != CUT_SHORT]
WRITTEN_OTHERWISE = {
    "handshake-config-with-stop-base": bytes.fromhex("010043470100000000"),
    "case-headers-conversation-id-as-uint32": bytes.fromhex(
        "020048523600000006000001000000000000001001000100000009020012"
        "6578616d706c65732e63616c632e43616c630903000943616c63756c617465"
        "00504409000000434201003002500400"
    ),
}
MEANT = {
    "protocol-violated": UnknownFrame,
    "malformed-data": MalformedFrame,
    "limit-exceeded": FrameTooLarge,
    "not-supported": UnsupportedFrame,
}
ERROR_IN_VECTOR = re.compile(r"ErrorDataCB v1 \{0:int32=(-?\d+), 1:string='([^']*)'")
ANSWERED_WITH_AN_ERROR = [vector for vector in VALID if re.search("^live-.*error", vector["name"])]
CALCULATE = "examples.calc.Calc", "Calculate"


def expected(vector: dict[str, Any]) -> list[tuple[str, Any]]:
    listed = vector.get("frames") or [vector]
    return [(item["frame"], item["fields"]) for item in listed]


def plain(rows: list[Row]) -> list[tuple[str | None, Any]]:
    return [(row.frame, row.fields) for row in rows]


def decoded(wire: bytes, limits: EpoxyLimits | None = None) -> list[Any]:
    return [item for _, _, item in EpoxyDecoder("client", limits=limits).feed(wire)]


def framelet(kind: str, content: bytes) -> bytes:
    return kind.encode() + len(content).to_bytes(4, "little") + content


def frame(*framelets: bytes) -> bytes:
    return len(framelets).to_bytes(2, "little") + b"".join(framelets)


HEADERS = framelet("HR", bytes.fromhex("06000001000000000000001001000100000000"))
PAYLOAD = framelet("PD", bytes.fromhex("4342010000"))


@pytest.mark.parametrize("vector", VALID, ids=lambda vector: vector["name"])
class TestVectors:
    def test_whole(self, vector: dict[str, Any]) -> None:
        wire = bytes.fromhex(vector["wire"])
        assert plain(EpoxyDecoder("client").rows(wire)) == expected(vector)

    def test_byte_by_byte(self, vector: dict[str, Any]) -> None:
        decoder = EpoxyDecoder("client")
        wire = bytes.fromhex(vector["wire"])
        rows = [row for octet in wire for row in decoder.rows(bytes([octet]))]
        assert plain(rows) == expected(vector)

    def test_with_bytes_after_it(self, vector: dict[str, Any]) -> None:
        decoder = EpoxyDecoder("client")
        rows = decoder.rows(bytes.fromhex(vector["wire"]) + bytes.fromhex("0200485236000000 0600"))
        assert (plain(rows), decoder.pending) == (expected(vector), 10)

    def test_serialized(self, vector: dict[str, Any]) -> None:
        wire = bytes.fromhex(vector["wire"])
        written = WRITTEN_OTHERWISE.get(vector["name"], wire)
        assert b"".join(map(serialize, decoded(wire))) == written


@pytest.mark.parametrize("vector", REFUSED, ids=lambda vector: vector["name"])
class TestRefusedVectors:
    def test_is_an_error_at_its_first_byte(self, vector: dict[str, Any]) -> None:
        row = EpoxyDecoder("client").rows(bytes.fromhex(vector["wire"]))[0]
        assert row.error and row.reason and row.offset == 0

    def test_is_the_same_error_byte_by_byte(self, vector: dict[str, Any]) -> None:
        wire = bytes.fromhex(vector["wire"])
        decoder = EpoxyDecoder("client")
        rows = [row for octet in wire for row in decoder.rows(bytes([octet]))]
        assert rows == EpoxyDecoder("client").rows(wire)

    def test_is_the_fault_that_it_means(self, vector: dict[str, Any]) -> None:
        means = vector["means"].replace("_", "-").lower()
        (error,) = decoded(bytes.fromhex(vector["wire"]))
        meant = [kind for word, kind in MEANT.items() if word in means.rpartition("ours:")[2]]
        if vector["wire"].startswith("01004552") or vector["wire"].startswith("02004552"):
            meant = [ErrorInError]
        elif vector["name"] == "handshake-http-garbage":
            meant = [FrameTooLarge]
        assert [type(error)] == meant


def test_a_frame_that_is_cut_short_is_waited_for() -> None:
    (vector,) = (vector for vector in VECTORS if vector["name"] == CUT_SHORT)
    decoder = EpoxyDecoder("client")
    assert (decoder.feed(bytes.fromhex(vector["wire"])), decoder.pending) == ([], 3)


@given(st.lists(frames, max_size=6))
def test_round_trip(sent: list[Frame]) -> None:
    assert decoded(b"".join(map(serialize, sent))) == sent


class TestFramingErrors:
    """Framing errors: before the content is there."""

    @pytest.mark.parametrize(
        ("wire", "error", "length"),
        [
            ("0000", UnknownFrame, 2),
            ("1100", FrameTooLarge, 2),
            ("ffff", FrameTooLarge, 2),
            ("01005a5a", UnknownFrame, 4),
            ("01004743", UnknownFrame, 4),
            ("0100504401000002", FrameTooLarge, 8),
            ("01004347ffffffff", FrameTooLarge, 8),
            ("02004347010000000000005a", UnknownFrame, 11),
            ("01004552ffffffff", ErrorInError, 8),
            ("0200455201000000005a5a", ErrorInError, 11),
        ],
    )
    def test_of_the_header_alone(self, wire: str, error: type[FrameError], length: int) -> None:
        ((offset, seen, item),) = EpoxyDecoder("client").feed(bytes.fromhex(wire))
        assert isinstance(item, FrameError)
        assert (type(item), offset, seen, item.resumable) == (error, 0, length, False)

    @pytest.mark.parametrize(
        "wire",
        [
            frame(PAYLOAD),
            frame(HEADERS),
            frame(PAYLOAD, HEADERS),
            frame(HEADERS, PAYLOAD, PAYLOAD),
            frame(HEADERS, PAYLOAD, framelet("LY", b"x")),
            frame(HEADERS, framelet("CG", b"\0")),
            frame(framelet("CG", b"\0"), framelet("CG", b"\0")),
            frame(*[PAYLOAD] * 16),
            frame(HEADERS, framelet("PD", b"")),
            frame(HEADERS, framelet("LY", b""), PAYLOAD),
            frame(framelet("HR", b""), PAYLOAD),
            frame(framelet("CG", b"")),
            frame(framelet("CG", b"\x10\x00")),
            frame(framelet("HR", b"\x00"), PAYLOAD),
            frame(framelet("HR", b"\xff\xff"), PAYLOAD),
            frame(framelet("HR", bytes.fromhex("060000010000000000000010010001000000")), PAYLOAD),
            frame(framelet("HR", bytes.fromhex("0900000178 1001000100000000")), PAYLOAD),
            frame(framelet("HR", bytes.fromhex("10010001000000 09020001ff00")), PAYLOAD),
        ],
        ids=bytes.hex,
    )
    def test_malformed_frames_are_passed_over(self, wire: bytes) -> None:
        ((offset, length, item), (_, _, after)) = EpoxyDecoder("client").feed(
            wire + serialize(ConfigFrame())
        )
        assert (type(item), offset, length) == (MalformedFrame, 0, len(wire))
        assert after == ConfigFrame()

    @pytest.mark.parametrize("kind", [0, 4, -1, 2**31 - 1])
    def test_a_message_type_that_nobody_defined(self, kind: int) -> None:
        content = b"\x10\x01\x00" + kind.to_bytes(4, "little", signed=True) + b"\0"
        (item,) = decoded(frame(framelet("HR", content), PAYLOAD))
        assert type(item) is UnsupportedFrame

    @pytest.mark.parametrize(
        "wire",
        [
            frame(framelet("ER", b"")),
            frame(framelet("ER", b"\x10\x00")),
            frame(framelet("ER", b"\0"), framelet("ER", b"\0")),
        ],
        ids=bytes.hex,
    )
    def test_a_bad_protocol_error_is_an_error_in_error(self, wire: bytes) -> None:
        assert [type(item) for item in decoded(wire)] == [ErrorInError]


class TestLimits:
    LIMITS = EpoxyLimits(framelets=4, framelet_bytes=1500, frame_bytes=2048)

    @pytest.mark.parametrize(
        "values", [{"framelets": 3}, {"framelet_bytes": 511}, {"frame_bytes": 2047}]
    )
    def test_below_what_everybody_must_support(self, values: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="at least"):
            EpoxyLimits(**values)  # type: ignore[arg-type]

    def test_exactly_a_framelets_limit_passes(self) -> None:
        message = Message(1, MessageType.REQUEST, payload=b"x" * 1500)
        assert decoded(serialize(message), self.LIMITS) == [message]

    def test_one_byte_more_is_refused_by_its_header(self) -> None:
        message = Message(1, MessageType.REQUEST, payload=b"x" * 1501)
        (item,) = decoded(serialize(message)[:-1501], self.LIMITS)
        assert type(item) is FrameTooLarge

    def test_exactly_a_frames_limit_passes(self) -> None:
        message = Message(1, MessageType.EVENT, "", "", b"x" * 1000, b"x" * 1009)
        assert len(serialize(message)) == 2048
        assert decoded(serialize(message), self.LIMITS) == [message]

    def test_one_byte_more_is_refused_by_the_header_of_the_last_framelet(self) -> None:
        wire = serialize(Message(1, MessageType.EVENT, "", "", b"x" * 1000, b"x" * 1010))
        assert decoded(wire[:-1011], self.LIMITS) == []
        (item,) = decoded(wire[:-1010], self.LIMITS)
        assert type(item) is FrameTooLarge

    def test_too_many_framelets_are_refused_by_their_count(self) -> None:
        assert type(decoded(b"\x05\x00", self.LIMITS)[0]) is FrameTooLarge


class TestHeaders:
    @given(conversation_ids, st.integers(0, 4), names, names)
    def test_what_is_read_in_line_is_what_bond_reads(
        self, conversation: int, kind: int, service: str, method: str
    ) -> None:
        struct = comm.struct("epoxy.EpoxyHeaders")
        content = fast.encode(
            struct.python_class(
                conversation_id=conversation,
                message_type=kind,
                service_name=service,
                method_name=method,
            ),
            struct,
        )
        assert module._read_headers(content) == (conversation, kind, service, method)
        assert comm.decode_headers(content) == (conversation, kind, service, method)

    @given(messages)
    def test_what_is_written_is_what_bond_writes(self, message: Message) -> None:
        struct = comm.struct("epoxy.EpoxyHeaders")
        content = fast.encode(
            struct.python_class(
                conversation_id=message.conversation_id,
                message_type=message.message_type,
                service_name=message.service_name,
                method_name=message.method_name,
            ),
            struct,
        )
        assert serialize(message)[2:].startswith(framelet("HR", content))

    @given(messages, st.data())
    def test_damaged_headers_read_alike_too(self, message: Message, data: st.DataObject) -> None:
        struct = comm.struct("epoxy.EpoxyHeaders")
        content = bytearray(
            fast.encode(
                struct.python_class(
                    conversation_id=message.conversation_id,
                    message_type=message.message_type,
                    service_name=message.service_name,
                    method_name=message.method_name,
                ),
                struct,
            )
        )
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
        assert _outcome(module._read_headers, bytes(content)) == _outcome(
            comm.decode_headers, bytes(content)
        )

    @pytest.mark.parametrize(
        ("content", "read"),
        [
            ("1001000100000000", (0, 1, "", "")),
            ("0500000100000010010001000000 00", (1, 1, "", "")),
            ("0300000710010002000000 00", (7, 2, "", "")),
            ("10010003000000 0963000178 00", (0, 3, "", "")),
            ("10010003000000 0a63000b00000a0200 0000 00", (0, 3, "", "")),
            ("10010003000000 0903000178 00", (0, 3, "", "x")),
            ("10010003000000 01 0902000178 00", (0, 3, "", "")),
        ],
    )
    def test_what_other_peers_may_write(
        self, content: str, read: tuple[int, int, str, str]
    ) -> None:
        assert module._read_headers(bytes.fromhex(content)) == read

    def test_what_only_keeps_us_busy_is_refused(self) -> None:
        unknown = bytes.fromhex("0b63000a") + b"\xa0\x8d\x06" + b"\0" * 100_000
        content = bytes.fromhex("10010001000000") + unknown + b"\0"
        (item,) = decoded(frame(framelet("HR", content), PAYLOAD))
        assert type(item) is MalformedFrame

    def test_long_names_are_read_in_line(self) -> None:
        message = Message(1, MessageType.REQUEST, "s" * 200_000, "é" * 500, payload=b"x")
        before = len(module._names)
        assert decoded(serialize(message)) == [message]
        assert len(module._names) == before

    @pytest.mark.parametrize("trailing", ["", "ff", "0010"])
    def test_bytes_after_the_headers_are_ignored(self, trailing: str) -> None:
        content = bytes.fromhex("10010001000000 0902000178 00" + trailing)
        (item,) = decoded(frame(framelet("HR", content), PAYLOAD))
        assert item.service_name == "x"

    def test_names_that_are_remembered_stay_few(self) -> None:
        for number in range(2000):
            message = Message(1, MessageType.REQUEST, f"service{number}", "m", payload=b"x")
            assert decoded(serialize(message)) == [message]
        assert len(module._names) <= 1024


def _outcome(read: Any, content: bytes) -> Any:
    try:
        return read(content)
    except BondDecodeError:
        return "refused"


class TestProtocolErrors:
    @given(protocol_errors)
    def test_fields_are_ready_for_json(self, error: ProtocolError) -> None:
        assert isinstance(error.fields()["error_code"], str)

    def test_inner_errors(self) -> None:
        error = ProtocolError(3, Error(1, "outer", Error(2, "inner")))
        (item,) = decoded(serialize(error))
        assert item.fields() == {
            "error_code": "protocol-violated",
            "details": {
                "error_code": 1,
                "message": "outer",
                "inner_error": {"error_code": 2, "message": "inner"},
            },
        }

    def test_a_code_that_nobody_defined_is_a_number(self) -> None:
        assert ProtocolError(99).fields() == {"error_code": "99"}

    def test_details_of_a_derived_type_are_read_as_far_as_they_are_an_error(self) -> None:
        content = "1000000b0000000b01000a011000000000bda0090100016d0109000001750901000273740000"
        (item,) = decoded(frame(framelet("ER", bytes.fromhex(content))))
        assert item == ProtocolError(11, Error(ErrorCode.INTERNAL_SERVER_ERROR, "m"))

    def test_errors_within_errors_without_end_are_refused(self) -> None:
        opening = bytes.fromhex("10000001000000 0b02000a01")
        content = bytes.fromhex("0b01000a01") + opening * 100_000
        (item,) = decoded(frame(framelet("ER", content)))
        assert type(item) is ErrorInError


class TestErrorData:
    @pytest.mark.parametrize("vector", ANSWERED_WITH_AN_ERROR, ids=lambda vector: vector["name"])
    def test_of_real_peers(self, vector: dict[str, Any]) -> None:
        found = ERROR_IN_VECTOR.search(vector["means"])
        assert found is not None
        error = comm.unmarshal_error(bytes.fromhex(vector["fields"]["error"]))
        assert (str(error.error_code), error.message) == found.groups()

    @given(int32s, names, names)
    def test_round_trip(self, code: int, message: str, inner: str) -> None:
        error = Error(code, message, Error(5, inner))
        assert comm.unmarshal_error(comm.marshal_error(error)) == error

    def test_an_internal_server_error_has_a_unique_id(self) -> None:
        error = Error(ErrorCode.INTERNAL_SERVER_ERROR, "oops", unique_id="u")
        assert comm.unmarshal_error(comm.marshal_error(error)) == error

    @pytest.mark.parametrize(
        "code", [ErrorCode.INTERNAL_SERVER_ERROR, ErrorCode.MULTIPLE_ERRORS_OCCURRED]
    )
    def test_a_code_decides_the_struct(self, code: ErrorCode) -> None:
        """Real peers read these codes as the derived struct, whatever it holds."""
        derived = comm.struct(comm._DERIVED[code])
        error = marshal.unmarshal(comm.marshal_error(Error(code, "why")), derived)
        assert (error.error_code, error.message) == (code, "why")
        tree = marshal.unmarshal_tree(comm.marshal_error(Error(code, "why")))
        assert len(tree.levels) == 2

    def test_several_errors_in_one(self) -> None:
        error = Error(
            ErrorCode.MULTIPLE_ERRORS_OCCURRED, "many", inner_errors=(Error(1, "a"), Error(2))
        )
        assert comm.unmarshal_error(comm.marshal_error(error)) == error

    def test_codes_are_those_of_bond(self) -> None:
        assert [code & 0xFFFFFFFF for code in ErrorCode] == [0xA0BD0000 + n for n in range(7)]


class TestCredentials:
    @pytest.mark.parametrize("encoding", [marshal.FAST_V1, marshal.COMPACT_V1, marshal.COMPACT_V2])
    def test_are_found_in_any_encoding(self, encoding: Dialect) -> None:
        layer = marshal.transcode(comm.marshal_credentials("s3cret"), protocol=encoding)
        assert comm.find_credentials(layer) == "s3cret"

    @pytest.mark.parametrize(
        "layer",
        [
            b"",
            b"s3cret",
            comm.marshal_credentials(""),
            comm.marshal_credentials("s3cret") + b"\0",
            comm.marshal_error(Error(1, "other")),
            b"CB\x01\x00" + bytes.fromhex("09016129016200"),
            b"CB\x01\x00" + bytes.fromhex("0901ff00"),
        ],
        ids=["nothing", "text", "empty", "trailing", "other", "more", "not-utf-8"],
    )
    def test_are_nothing_else(self, layer: bytes) -> None:
        assert comm.find_credentials(layer) is None


@given(st.binary(max_size=200))
def test_scanning_never_raises_anything_else(data: bytes) -> None:
    placed: list[Any] = []
    try:
        position, need = scan(data, 0, 0, EpoxyLimits(), placed)
    except FrameError as error:
        assert error.offset == sum(length for _, length, _ in placed)
    else:
        assert position <= len(data) < position + need


def test_a_decoder_that_joins_late_finds_its_feet() -> None:
    message = Message(7, MessageType.REQUEST, *CALCULATE, payload=b"0" * 100)
    wire = serialize(message)
    decoder = EpoxyDecoder("client", late=True)
    placed = decoder.feed(wire[40:] + wire * 3)
    assert placed[0] == (0, len(wire) - 40, Unsynchronized("joined late"))
    assert [item for _, _, item in placed[1:]] == [message] * 3


class TestSniffing:
    @pytest.mark.parametrize(
        ("data", "answer"),
        [
            (b"", "MORE"),
            (b"\x01\x00C", "MORE"),
            (b"\x01\x00CG\x01\x00\x00", "MORE"),
            (b"\x01\x00CG\x01\x00\x00\x00", "YES"),
            (b"\x01\x00CG\x02\x00\x00\x00\x01\x00", "YES"),
            (b"\x01\x00ER\x08\x00\x00\x00", "YES"),
            (b"\x01\x00CG\xff\xff\xff\xff", "NO"),
            (b"\x02\x00HR\x01\x00\x00\x00", "NO"),
            (b"GET / HTTP/1.1", "NO"),
        ],
    )
    def test_first_bytes(self, data: bytes, answer: str) -> None:
        assert PROTOCOL.sniff(data).name == answer
