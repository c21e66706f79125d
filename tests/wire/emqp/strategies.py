"""eMQP for hypothesis: commands, streams, and two ends that have shaken hands."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.wire.contract import Connection, Frame
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import PeerInformed
from crosswire.wire.emqp.frames import (
    Ack,
    Admin,
    DeliveryFrame,
    Disconnect,
    EmqpLimits,
    Heartbeat,
    Inform,
    Kbai,
    Publish,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
    serialize,
)
from crosswire.wire.emqp.layout import ADMIN_COMMANDS
from crosswire.wire.zmtp.frames import (
    Command,
    Greeting,
    serialize_command,
    serialize_message,
    serialize_metadata,
)
from crosswire.wire.zmtp.frames import serialize as serialize_zmtp
from tests.wire.stream import Stream, pump

text = st.text(st.characters(codec="utf-8"), max_size=12)
bodies = st.binary(max_size=20) | st.just(b"x" * 300)
timed = st.tuples(text, bodies, text) | st.tuples(st.none(), bodies, st.none())
commands: SearchStrategy[Frame] = st.one_of(
    st.builds(Ack, text, text),
    st.builds(Reply, text, bodies, st.none() | text),
    st.builds(Heartbeat, text, text),
    st.builds(Disconnect, text),
    st.builds(Kbai, text, st.sampled_from(["KBAI", "KBYE"])),
    st.builds(Ready, text),
    st.builds(Request, text, text, text, bodies),
    st.builds(Publish, text, text, st.none() | text, bodies),
    st.builds(lambda a, b, c, d: ScheduleFrame(a, b, c, *d), text, text, text, timed),
    st.builds(lambda a, b, c, d: UnscheduleFrame(a, b, c, *d), text, text, text, timed),
    st.builds(Inform, text, text, text),
    st.builds(Admin, text, st.sampled_from(ADMIN_COMMANDS).map(bytes.decode)),
)
deliveries = st.builds(DeliveryFrame, text, bodies)


def wire(frame: Frame) -> bytes:
    """A command as it stands in the stream."""
    return serialize_message(serialize(frame))


def handshake(socket_type: str, identity: bytes = b"") -> bytes:
    """What a NULL peer opens with."""
    metadata = {"Socket-Type": socket_type.encode(), "Identity": identity}
    return serialize_zmtp(Greeting("NULL")) + serialize_zmtp(
        Command("READY", serialize_metadata(metadata))
    )


subscriptions = st.builds(
    lambda topic, how: (
        serialize_command("SUBSCRIBE", topic)
        if how == 0
        else serialize_command("CANCEL", topic)
        if how == 1
        else serialize_message([bytes((how - 2,)) + topic])
    ),
    st.binary(max_size=12),
    st.integers(0, 3),
)


def streams(sender: str) -> SearchStrategy[Stream]:
    """What a peer might send after its handshake, as far as a decoder can check."""
    if sender == "subscriber":
        return _streams("SUB", subscriptions)
    if sender == "broker":
        return _streams("ROUTER", commands.map(wire)) | _streams("PUB", deliveries.map(wire))
    return _streams("DEALER", commands.map(wire))


def _streams(socket_type: str, sent: SearchStrategy[bytes]) -> SearchStrategy[Stream]:
    return st.lists(sent, max_size=8).map(
        lambda frames: Stream(handshake(socket_type, b"me") + b"".join(frames))
    )


def open_pair() -> tuple[Connection, Connection]:
    return opened("client", "emqp-clients")


def opened(
    role: str, listener: str, *, limits: EmqpLimits | None = None
) -> tuple[EmqpConnection, EmqpConnection]:
    """A peer and the broker at one of its doors; a worker or scheduler is registered."""
    peer = EmqpConnection(
        role, 0.0, identity=role.encode(), queues=((10, "default"),), limits=limits
    )
    broker = EmqpConnection("broker", 0.0, listener=listener, limits=limits)
    pump(peer, broker)
    for event in broker.events():
        if isinstance(event, PeerInformed):
            broker.send_ack(event.msgid)
    pump(peer, broker)
    peer.events()
    broker.events()
    return peer, broker
