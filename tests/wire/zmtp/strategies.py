"""ZMTP for hypothesis: frames, streams, and two ends that have shaken hands."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.wire.contract import Frame
from crosswire.wire.zmtp import Command, Greeting, Mechanism, Message, ZmtpConnection, serialize
from crosswire.wire.zmtp.curve import CurveClient, CurveServer, public_key_of
from crosswire.wire.zmtp.frames import serialize_metadata
from tests.wire.stream import Stream, pump

names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
sizes = st.sampled_from([0, 1, 2, 254, 255, 256, 300])
bodies = st.binary(max_size=20) | st.builds(lambda size: b"x" * size, sizes)
messages = st.builds(Message, st.lists(bodies, min_size=1, max_size=8).map(tuple))
metadata = st.dictionaries(names, bodies, max_size=3).map(serialize_metadata)
commands = st.one_of(
    st.builds(Command, st.sampled_from(["PING", "PONG", "SUBSCRIBE", "CANCEL", "JOIN"]), bodies),
    st.builds(Command, st.just("READY"), metadata),
)
greetings = st.builds(
    Greeting,
    names,
    st.booleans(),
    st.builds("{}.{}".format, st.integers(3, 255), st.integers(0, 255)),
    st.integers(0, 2**64 - 1),
)
traffic: SearchStrategy[Frame] = messages | commands

READY = Command("READY", serialize_metadata({"Socket-Type": b"DEALER", "Identity": b"me"}))


def wire(*frames: Frame) -> bytes:
    return b"".join(map(serialize, frames))


def streams(sender: str) -> SearchStrategy[Stream]:
    """What a peer might send after its READY, as far as a decoder can check."""
    return st.lists(traffic, max_size=8).map(
        lambda sent: Stream(wire(Greeting("NULL"), READY, *sent))
    )


def pair(
    connector: str = "DEALER",
    binder: str = "ROUTER",
    *,
    client: Mechanism | None = None,
    server: Mechanism | None = None,
    **options: Any,
) -> tuple[ZmtpConnection, ZmtpConnection]:
    """Two ends that have sent nothing yet."""
    return (
        ZmtpConnection("connector", 0.0, socket_type=connector, mechanism=client, **options),
        ZmtpConnection("binder", 0.0, socket_type=binder, mechanism=server, **options),
    )


def open_pair(
    connector: str = "DEALER", binder: str = "ROUTER", **options: Any
) -> tuple[ZmtpConnection, ZmtpConnection]:
    ends = pair(connector, binder, **options)
    pump(*ends)
    for end in ends:
        end.events()
    return ends


class Predictable:
    """Random bytes for tests: never the same, always the same."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def __call__(self, size: int) -> bytes:
        return next(self._numbers).to_bytes(4) * (size // 4)


SERVER_SECRET = b"the server's very secret key ..!"
CLIENT_SECRET = b"the client's very secret key ..!"


def curve(**options: Any) -> dict[str, Any]:
    """Both sides' mechanisms, as `pair` takes them."""
    server_secret = options.get("server_secret", SERVER_SECRET)
    accept = options.get("accept", lambda key: True)
    return {
        "client": CurveClient(public_key_of(SERVER_SECRET), CLIENT_SECRET, Predictable()),
        "server": CurveServer(server_secret, Predictable(), accept),
    }
