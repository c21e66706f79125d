"""Epoxy for hypothesis: frames, streams, and two ends that have shaken hands."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.wire.contract import Connection, Frame
from crosswire.wire.epoxy.comm import Error
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.frames import (
    ConfigFrame,
    Message,
    MessageType,
    ProtocolError,
    ProtocolErrorCode,
    serialize,
)
from tests.wire.stream import Stream, pump

conversation_ids = st.integers(0, 2**64 - 1) | st.integers(0, 9)
int32s = st.integers(-(2**31), 2**31 - 1)
names = st.text(st.characters(codec="utf-8"), max_size=20) | st.text("ab.", min_size=100)
contents = st.binary(min_size=1, max_size=60)


def _message(
    conversation: int,
    kind: MessageType,
    service: str,
    method: str,
    layer_data: bytes | None,
    content: bytes,
    fails: bool,
) -> Message:
    if fails:
        return Message(conversation, kind, service, method, layer_data, error=content)
    return Message(conversation, kind, service, method, layer_data, payload=content)


messages = st.builds(
    _message,
    conversation_ids,
    st.sampled_from(MessageType),
    names,
    names,
    st.none() | contents,
    contents,
    st.booleans(),
)
errors = st.recursive(
    st.builds(Error, int32s, names),
    lambda inner: st.builds(Error, int32s, names, inner),
    max_leaves=3,
)
protocol_errors = st.builds(
    ProtocolError, st.sampled_from(ProtocolErrorCode).map(int) | int32s, st.none() | errors
)
frames: SearchStrategy[Frame] = st.one_of(st.just(ConfigFrame()), messages, protocol_errors)


def streams(sender: str) -> SearchStrategy[Stream]:
    """What a peer may send after its config, as far as a decoder checks it."""
    return st.lists(frames, max_size=8).map(
        lambda sent: Stream(b"".join(map(serialize, [ConfigFrame(), *sent])))
    )


def open_pair() -> tuple[Connection, Connection]:
    client, server = EpoxyConnection("client", 0.0), EpoxyConnection("server", 0.0)
    pump(client, server)
    client.events()
    server.events()
    return client, server
