"""Every row of Epoxy's error table, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from crosswire.client.native.dial import Backoff
from crosswire.client.native.epoxy import EpoxyClient, EpoxyServer, IncomingCall
from crosswire.errors import ConnectFailed, ConnectionLost, IdentifiersExhausted
from crosswire.wire.epoxy.comm import Error, ErrorCode, marshal_error, unmarshal_error
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.frames import (
    ConfigFrame,
    EpoxyLimits,
    Message,
    MessageType,
    ProtocolError,
    ProtocolErrorCode,
    serialize,
)

CONFIG = serialize(ConfigFrame())
EMPTY = bytes.fromhex("4342010000")
PAYLOAD = b"PD\5\0\0\0" + EMPTY
HEADERS = bytes.fromhex("4852 13000000 060000 0100000000000000 100100 01000000 00")
REQUEST = Message(1, MessageType.REQUEST, "test.Echo", "Echo", payload=EMPTY)
SOON = Backoff(0.01, 0.02)


async def echo(call: IncomingCall) -> bytes:
    return call.payload


async def crash(call: IncomingCall) -> bytes:
    raise ZeroDivisionError


async def no_answer(call: IncomingCall) -> None:
    """What an event's handler reports."""


HANDLERS = {
    ("test.Echo", "Echo"): echo,
    ("test.Echo", "Crash"): crash,
    ("test.Echo", "Note"): no_answer,
}


@pytest.fixture
async def server() -> AsyncIterator[EpoxyServer]:
    server = EpoxyServer(HANDLERS, limits=EpoxyLimits(goodbye_s=0.2))
    await server.listen()
    yield server
    await server.close()


async def exchange(server: EpoxyServer, sent: bytes, *, half_close: bool = False) -> list[Any]:
    """All that the server answers to these bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    if half_close:
        writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return [item for _, _, item in EpoxyDecoder("server").feed(answer)]


def message(content: str) -> bytes:
    headers = bytes.fromhex(content)
    return b"\2\0HR" + len(headers).to_bytes(4, "little") + headers + PAYLOAD


FRAMING_ERRORS = {
    "zero framelets": (b"\0\0", "protocol-violated"),
    "unknown type": (b"\1\0ZZ", "protocol-violated"),
    "type as the table prints it": (b"\1\0GC\1\0\0\0\0", "protocol-violated"),
    "unknown type after a known one": (b"\2\0" + HEADERS + b"ZZ", "protocol-violated"),
    "too many framelets": (b"\x11\0", "limit-exceeded"),
    "http": (b"GET / HTTP/1.1\r\n\r\n", "limit-exceeded"),
    "length above the limit": (b"\1\0CG\xff\xff\xff\xff", "limit-exceeded"),
    "length just above the limit": (b"\1\0HR\1\0\0\2", "limit-exceeded"),
    "frame above the limit": (b"\2\0" + HEADERS + b"PD\0\0\0\2", "limit-exceeded"),
    "payload first": (b"\1\0" + PAYLOAD, "malformed-data"),
    "headers only": (b"\1\0" + HEADERS, "malformed-data"),
    "trailing framelet": (b"\3\0" + HEADERS + PAYLOAD + PAYLOAD, "malformed-data"),
    "trailing framelet after a config": (b"\2\0" + CONFIG[2:] * 2, "malformed-data"),
    "two layer data": (b"\4\0" + HEADERS + b"LY\1\0\0\0x" * 2 + PAYLOAD, "malformed-data"),
    "undecodable headers": (message("4d460100"), "malformed-data"),
    "undecodable config": (b"\1\0CG\2\0\0\0\x10\0", "malformed-data"),
    "missing message type": (message("060000010000000000000000"), "malformed-data"),
    "zero-length headers": (message(""), "malformed-data"),
    "zero-length payload": (b"\2\0" + HEADERS + b"PD\0\0\0\0", "malformed-data"),
    "zero-length config": (b"\1\0CG\0\0\0\0", "malformed-data"),
    "message type 0": (message("1001000000000000"), "not-supported"),
    "message type 4": (message("1001000400000000"), "not-supported"),
}


@pytest.mark.parametrize(("sent", "expected"), FRAMING_ERRORS.values(), ids=FRAMING_ERRORS)
class TestFramingErrors:
    async def test_after_the_handshake(
        self, server: EpoxyServer, sent: bytes, expected: str
    ) -> None:
        config, error = await exchange(server, CONFIG + sent)
        assert (config, error.error_name) == (ConfigFrame(), expected)
        assert error.details.message

    async def test_in_the_handshake(self, server: EpoxyServer, sent: bytes, expected: str) -> None:
        (error,) = await exchange(server, sent)
        assert error.error_name == expected


class TestStateErrors:
    async def test_a_second_config(self, server: EpoxyServer) -> None:
        config, error = await exchange(server, CONFIG + CONFIG)
        assert (config, error.error_name) == (ConfigFrame(), "protocol-violated")

    async def test_nothing_within_the_handshake_timeout(self) -> None:
        server = EpoxyServer({}, limits=EpoxyLimits(handshake_s=0.05))
        await server.listen()
        (error,) = await exchange(server, b"\1\0C")
        assert error.error_name == "timeout"
        await server.close()

    async def test_a_message_before_the_config(self, server: EpoxyServer) -> None:
        (error,) = await exchange(server, serialize(REQUEST))
        assert error.error_name == "client-bad-handshake"

    @pytest.mark.parametrize("before", [b"", CONFIG], ids=["in the handshake", "after it"])
    @pytest.mark.parametrize(
        "received",
        [
            serialize(ProtocolError(3)),
            serialize(ProtocolError(11, Error(5, "nope"))),
            bytes.fromhex("01004552020000001000"),
            bytes.fromhex("02004552010000000045520100000000"),
            bytes.fromhex("0100455200000000"),
        ],
        ids=bytes.hex,
    )
    async def test_a_received_protocol_error_is_never_answered(
        self, server: EpoxyServer, before: bytes, received: bytes
    ) -> None:
        assert await exchange(server, before + received) == ([ConfigFrame()] if before else [])

    async def test_parity_when_strict(self) -> None:
        server = EpoxyServer({}, limits=EpoxyLimits(strict=True))
        await server.listen()
        even = Message(2, MessageType.REQUEST, "s", "m", payload=EMPTY)
        _, error = await exchange(server, CONFIG + serialize(even))
        assert error.error_name == "bad-conversation-id"
        await server.close()

    @pytest.mark.parametrize("refused_by", ["application", "limit"])
    async def test_rejection(self, refused_by: str) -> None:
        server = (
            EpoxyServer({}, refuse=lambda transport: "no certificate")
            if refused_by == "application"
            else EpoxyServer({}, most_peers=0)
        )
        await server.listen()
        (error,) = await exchange(server, CONFIG)
        assert error.error_name == "connection-rejected"
        assert error.details.message in ("no certificate", "no room for another connection")
        with pytest.raises(ConnectFailed, match="connection-rejected"):
            await EpoxyClient("127.0.0.1", server.port).__aenter__()
        await server.close()


class TestAnswers:
    """Errors to a caller."""

    async def answer(self, server: EpoxyServer, request: Message) -> Error:
        config, answer = await exchange(server, CONFIG + serialize(request), half_close=True)
        assert (config, answer.message_type) == (ConfigFrame(), MessageType.RESPONSE)
        return unmarshal_error(answer.error)

    async def test_an_unknown_method(self, server: EpoxyServer) -> None:
        request = Message(1, MessageType.REQUEST, "no.such", "Foo", payload=EMPTY)
        error = await self.answer(server, request)
        assert error.error_code == ErrorCode.METHOD_NOT_FOUND
        assert "no.such.Foo" in error.message

    async def test_a_service_that_fails(self, server: EpoxyServer) -> None:
        request = Message(1, MessageType.REQUEST, "test.Echo", "Crash", payload=EMPTY)
        error = await self.answer(server, request)
        assert error.error_code == ErrorCode.INTERNAL_SERVER_ERROR and error.unique_id

    async def test_error_data_in_a_request(self, server: EpoxyServer) -> None:
        data = marshal_error(Error(1))
        request = Message(1, MessageType.REQUEST, "test.Echo", "Echo", error=data)
        error = await self.answer(server, request)
        assert error.error_code == ErrorCode.INTERNAL_SERVER_ERROR

    @pytest.mark.parametrize(
        "sent",
        [
            Message(1, MessageType.EVENT, "test.Echo", "Note", error=EMPTY),
            Message(1, MessageType.EVENT, "test.Echo", "Crash", payload=EMPTY),
            Message(1, MessageType.EVENT, "no.such", "Foo", payload=EMPTY),
            Message(9, MessageType.RESPONSE, payload=EMPTY),
            Message(9, MessageType.RESPONSE, payload=b"XX"),
            Message(9, MessageType.RESPONSE, error=EMPTY),
        ],
        ids=["event with an error", "failing event", "unknown event", "a", "b", "c"],
    )
    async def test_what_is_dropped_without_an_answer(
        self, server: EpoxyServer, sent: Message
    ) -> None:
        both = CONFIG + serialize(sent) + serialize(REQUEST)
        config, answer = await exchange(server, both, half_close=True)
        assert (config, answer.payload) == (ConfigFrame(), EMPTY)

    async def test_layer_data_does_no_harm(self, server: EpoxyServer) -> None:
        request = Message(1, MessageType.REQUEST, "test.Echo", "Echo", b"layers", EMPTY)
        _, answer = await exchange(server, CONFIG + serialize(request), half_close=True)
        assert answer == Message(1, MessageType.RESPONSE, payload=EMPTY)


class TestHandshake:
    async def test_a_pipelined_request_is_answered(self, server: EpoxyServer) -> None:
        answers = await exchange(server, CONFIG + serialize(REQUEST), half_close=True)
        assert answers == [ConfigFrame(), Message(1, MessageType.RESPONSE, payload=EMPTY)]

    @pytest.mark.parametrize("content", ["0100", "00ffff", "0905000178 00"])
    async def test_a_config_may_hold_more(self, server: EpoxyServer, content: str) -> None:
        data = bytes.fromhex(content)
        config = b"\1\0CG" + len(data).to_bytes(4, "little") + data
        assert await exchange(server, config, half_close=True) == [ConfigFrame()]

    async def test_a_server_whose_first_frame_is_no_config(self) -> None:
        received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(serialize(Message(2, MessageType.EVENT, "s", "m", payload=EMPTY)))
            received.set_result(await reader.read())
            writer.close()

        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="no handshake"):
            await EpoxyClient("127.0.0.1", port).__aenter__()
        config, error = (item for _, _, item in EpoxyDecoder("client").feed(await received))
        assert (config, error.error_code) == (ConfigFrame(), ProtocolErrorCode.SERVER_BAD_HANDSHAKE)
        other.close()


class TestEnding:
    async def test_a_server_that_closes_waits_for_the_peer(self, server: EpoxyServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CONFIG)
        await reader.readexactly(len(CONFIG))
        closing = asyncio.create_task(server.close())
        assert await reader.read() == b""
        assert not closing.done()
        writer.close()
        await asyncio.wait_for(closing, 10)

    async def test_but_not_for_ever(self, server: EpoxyServer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CONFIG)
        await reader.readexactly(len(CONFIG))
        await asyncio.wait_for(server.close(), 10)
        assert not server.peers
        writer.close()

    async def test_a_large_answer_to_a_half_closed_peer_arrives_whole(
        self, server: EpoxyServer
    ) -> None:
        large = Message(1, MessageType.REQUEST, "test.Echo", "Echo", payload=b"x" * 4_000_000)
        _, answer = await exchange(server, CONFIG + serialize(large), half_close=True)
        assert answer.payload == large.payload

    async def test_conversation_ids_run_out(self, server: EpoxyServer) -> None:
        async with EpoxyClient("127.0.0.1", server.port, backoff=SOON) as client:
            await client.call_bytes("test.Echo", "Echo", EMPTY)
            (peer,) = server.peers
            peer.connection._next_id = 2**64
            with pytest.raises((IdentifiersExhausted, ConnectionLost), match="no conversation ids"):
                await peer.call_bytes("s", "m", EMPTY)
            await asyncio.wait([peer.ended])
            reply = await client.call_bytes("test.Echo", "Echo", EMPTY, timeout_s=10)
            assert reply.payload == EMPTY
