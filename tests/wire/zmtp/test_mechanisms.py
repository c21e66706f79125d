"""PLAIN and CURVE: who comes in, and what an attacker can't do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings

from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    FrameTooLarge,
    MalformedFrame,
    PeerError,
    RemoteProtocolError,
    UnexpectedFrame,
)
from crosswire.wire.contract import ConnectionFailed, Frame
from crosswire.wire.zmtp import (
    Command,
    Greeting,
    Message,
    MessageReceived,
    PeerReady,
    PlainClient,
    PlainServer,
    PongReceived,
    Subscribed,
    Unsubscribed,
    ZmtpConnection,
    ZmtpDecoder,
    ZmtpLimits,
)
from crosswire.wire.zmtp.curve import CurveClient, decode_key, encode_key, public_key_of
from tests.wire.stream import pump
from tests.wire.zmtp.strategies import (
    CLIENT_SECRET,
    SERVER_SECRET,
    Predictable,
    curve,
    messages,
    open_pair,
    pair,
    wire,
)


def error_of(connection: ZmtpConnection) -> CrosswireError:
    event = connection.events()[-1]
    assert isinstance(event, ConnectionFailed)
    return event.error


def plain(password: str = "secret") -> dict[str, Any]:
    return {
        "client": PlainClient("user", password),
        "server": PlainServer(lambda *given: given == ("user", "secret")),
    }


class TestPlain:
    def test_the_right_password_opens(self) -> None:
        client, server = pair(**plain())
        pump(client, server)
        (event,) = server.events()
        assert isinstance(event, PeerReady)
        assert (event.user, event.public_key) == ("user", None)
        (event,) = client.events()
        assert isinstance(event, PeerReady) and event.user is None

    def test_the_wrong_one_does_not(self) -> None:
        client, server = pair(**plain("wrong"))
        pump(client, server)
        assert isinstance(error_of(server), ConnectionRejected)
        received = error_of(client)
        assert isinstance(received, PeerError) and received.reason == "400"

    def test_messages_follow(self) -> None:
        client, server = open_pair(**plain())
        client.send_message((b"a", b"b"))
        pump(client, server)
        assert server.events() == [MessageReceived((b"a", b"b"))]

    @pytest.mark.parametrize(
        "body", [b"", b"\x04", b"\x04user", b"\x04user\x03no", b"\x00\x00x", b"\x01\xff\x00"]
    )
    def test_a_malformed_hello_is_refused(self, body: bytes) -> None:
        _, server = pair(**plain())
        server.receive_data(wire(Greeting("PLAIN"), Command("HELLO", body)), 0.0)
        assert isinstance(error_of(server), MalformedFrame)

    @pytest.mark.parametrize("name", ["READY", "INITIATE", "WELCOME"])
    def test_nobody_gets_in_without_a_hello(self, name: str) -> None:
        _, server = pair(**plain())
        server.receive_data(wire(Greeting("PLAIN"), Command(name)), 0.0)
        assert isinstance(error_of(server), RemoteProtocolError)

    def test_a_name_that_does_not_fit_is_our_fault(self) -> None:
        with pytest.raises(ValueError, match="255"):
            pair(client=PlainClient("u" * 256, ""))


class Wire:
    """Moves bytes between two ends and keeps what each sent."""

    def __init__(self, client: ZmtpConnection, server: ZmtpConnection) -> None:
        self.ends = client, server
        self.sent = [b"", b""]
        self.pump()

    def pump(self) -> None:
        moved = True
        while moved:
            moved = False
            for number in (0, 1):
                data = b"".join(self.ends[number].data_to_send())
                self.sent[number] += data
                self.ends[1 - number].receive_data(data, 0.0)
                moved = moved or bool(data)


class TestCurve:
    def test_the_owner_learns_the_key(self) -> None:
        asked: list[bytes] = []
        client, server = pair(**curve(accept=lambda key: not asked.append(key)))
        pump(client, server)
        (event,) = server.events()
        assert isinstance(event, PeerReady)
        assert event.socket_type == "DEALER"
        assert [event.public_key] == asked == [public_key_of(CLIENT_SECRET)]

    def test_a_key_can_be_refused(self) -> None:
        client, server = pair(**curve(accept=lambda key: False))
        pump(client, server)
        assert isinstance(error_of(server), ConnectionRejected)
        received = error_of(client)
        assert isinstance(received, PeerError) and received.reason == "400"

    def test_another_server_is_found_out(self) -> None:
        client, server = pair(**curve(server_secret=b"somebody else's key, of 32 bytes"))
        pump(client, server)
        assert isinstance(error_of(server), MalformedFrame)
        assert client.closed

    @given(messages)
    @settings(max_examples=25)
    def test_messages_go_both_ways(self, message: Message) -> None:
        client, server = open_pair(**curve())
        for sender, receiver in ((client, server), (server, client)):
            sender.send_message(message.parts)
            pump(client, server)
            assert receiver.events() == [MessageReceived(message.parts)]

    def test_subscriptions_and_heartbeats_are_sealed_too(self) -> None:
        subscriber, publisher = open_pair("SUB", "PUB", **curve())
        subscriber.send_subscribe(b"topic")
        subscriber.send_cancel(b"topic")
        subscriber.send_ping(0.0, b"context")
        data = b"".join(subscriber.data_to_send())
        assert b"topic" not in data and b"context" not in data
        publisher.receive_data(data, 0.0)
        assert publisher.events() == [Subscribed(b"topic"), Unsubscribed(b"topic")]
        pump(subscriber, publisher)
        assert subscriber.events() == [PongReceived(b"context")]

    def test_a_key_is_nothing_without_its_other_half(self) -> None:
        client, server = pair(**curve())
        victim = public_key_of(b"the secret key of somebody else.")

        class Liar:
            crypto_scalarmult_base = staticmethod(lambda secret: victim)

            def __getattr__(self, name: str) -> Any:
                return getattr(bindings, name)

        client._handshake._nacl = Liar()  # type: ignore[attr-defined]
        pump(client, server)
        assert isinstance(error_of(server), MalformedFrame)

    def test_a_vouch_is_good_for_one_connection_only(self) -> None:
        client, server = pair(**curve())
        client._handshake._short_public = bytes(32)  # type: ignore[attr-defined]
        pump(client, server)
        assert isinstance(error_of(server), MalformedFrame)

    def test_nothing_can_be_repeated(self) -> None:
        client, server = open_pair(**curve())
        client.send_message((b"x",))
        data = b"".join(client.data_to_send())
        server.receive_data(data, 0.0)
        assert server.events() == [MessageReceived((b"x",))]
        server.receive_data(data, 0.0)
        assert isinstance(error_of(server), MalformedFrame)

    @given(st.integers(0, 10_000), st.integers(1, 255))
    @settings(max_examples=100)
    def test_nothing_can_be_changed(self, index: int, change: int) -> None:
        """Neither in the handshake nor in the traffic does a changed byte pass as another text."""
        link = Wire(*pair(**curve()))
        link.ends[0].send_message((b"pay", b"10"))
        link.pump()
        data = bytearray(link.sent[0])
        index %= len(data)
        data[index] ^= change
        _, server = pair(**curve())
        server.receive_data(bytes(data), 0.0)
        received = [event for event in server.events() if isinstance(event, MessageReceived)]
        assert received in ([], [MessageReceived((b"pay", b"10"))])

    @given(st.sampled_from(["HELLO", "WELCOME", "INITIATE", "READY"]), st.binary(max_size=260))
    @settings(max_examples=100)
    def test_garbage_in_the_handshake_never_raises(self, name: str, body: bytes) -> None:
        link = Wire(*pair(**curve()))
        hello, welcome = link.sent[0][:266], link.sent[1][:234]
        for end, opening in ((1, b""), (1, hello), (0, welcome)):
            connection = pair(**curve())[end]
            opening = opening or wire(Greeting("CURVE"))
            connection.receive_data(opening + wire(Command(name, body)), 0.0)
            assert connection.closed

    @pytest.mark.parametrize(
        "frame", [Message((b"x",)), Command("SUBSCRIBE", b"x"), Command("PING", bytes(2))]
    )
    def test_clear_text_is_refused(self, frame: Frame) -> None:
        _, server = open_pair("SUB", "PUB", **curve())
        server.receive_data(wire(frame), 0.0)
        assert isinstance(error_of(server), MalformedFrame | UnexpectedFrame)
        assert server.data_to_send() == []

    def test_what_was_sealed_is_limited_too(self) -> None:
        limits = ZmtpLimits(parts=3, frame_bytes=200)
        for parts in ((b"",) * 4, (bytes(90),) * 3):
            client, server = open_pair(limits=limits, **curve())
            client.send_message(parts)
            pump(client, server)
            assert isinstance(error_of(server), FrameTooLarge)

    @pytest.mark.parametrize("sender", [0, 1], ids=["client", "server"])
    def test_a_capture_shows_that_it_is_encrypted(self, sender: int) -> None:
        link = Wire(*pair(**curve()))
        for end in link.ends:
            end.send_message((b"secret", bytes(300)))
        link.pump()
        rows = ZmtpDecoder("connector").rows(link.sent[sender])
        assert [row.frame for row in rows] == [
            "zmtp-greeting",
            "zmtp-command",
            "zmtp-command",
            "encrypted",
            "encrypted",
        ]
        assert all(
            row.fields == {"name": row.fields["name"], "properties": {}}
            for row in rows[1:3]
            if row.fields
        )
        assert [row.fields for row in rows[3:]] == [{}, {}]
        assert sum(row.length for row in rows) == len(link.sent[sender])


class TestKeys:
    def test_as_the_specification_writes_them(self) -> None:
        """RFC 32 has this example."""
        binary = bytes.fromhex("864fd26fb559f75b") * 4
        assert encode_key(binary) == "HelloWorld" * 4
        assert decode_key("HelloWorld" * 4) == binary

    @given(st.binary(min_size=32, max_size=32))
    def test_round_trip(self, key: bytes) -> None:
        assert decode_key(encode_key(key)) == key

    @pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "~" * 40, "#" * 40])
    def test_what_is_no_key(self, text: str) -> None:
        with pytest.raises(ValueError, match="key"):
            decode_key(text)

    def test_a_key_of_another_size_is_our_fault(self) -> None:
        with pytest.raises(ValueError, match="32 bytes"):
            CurveClient(b"short", SERVER_SECRET, Predictable())
