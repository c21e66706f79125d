"""Relink for hypothesis: packets, streams, links, and two ends that have shaken hands."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.wire.contract import Connection, Frame
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import HandshakeReceived
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Ping,
    Pong,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
    serialize,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    LinkTerms,
    ListenerHello,
    ListenerVersion,
    serialize_handshake,
)
from crosswire.wire.relink.layout import PacketLayout, packet_layout
from crosswire.wire.relink.link import Link
from tests.wire.stream import Stream, pump

EPOCH = 1_700_000_000_000_000

id_sizes = st.tuples(st.integers(0, 8), st.integers(0, 8))
links = st.integers(0, 2**63 - 1)
numbers = st.integers(0, 2**64 - 1)
sequences = st.integers(0, 2**32 - 1)
endpoints = st.text(st.characters(codec="utf-8"), max_size=60)
part_sizes = st.one_of(st.integers(0, 20), st.sampled_from([65535, 65536, 70001]))
parts = st.builds(lambda size, fill: bytes([fill]) * size, part_sizes, st.integers(0, 255))
part_lists = st.one_of(
    st.lists(parts, max_size=4), st.just([b"x"] * 255), st.just([b"yz"] * 256)
).map(tuple)

hellos = st.builds(
    ConnectorHello,
    endpoint=endpoints,
    connector_id_size=st.integers(0, 8),
    listener_id_size=st.integers(0, 8),
    connector_transactions=st.booleans(),
    listener_transactions=st.booleans(),
    require_old_link=st.booleans(),
    epoch=numbers,
    link=links,
)


def packets(sender: str, sizes: tuple[int, int]) -> SearchStrategy[Frame]:
    """Any packet that `sender` might send where channel ids have these sizes."""
    own, other = sizes if sender == "connector" else sizes[::-1]

    def targets(size: int) -> SearchStrategy[tuple[tuple[int, ...], bool]]:
        channel = st.integers(0, 256**size - 1)
        return st.one_of(
            st.tuples(st.tuples(channel), st.just(False)),
            st.tuples(st.lists(channel, max_size=5).map(tuple), st.just(True)),
        )

    ours, theirs = targets(own), targets(other)
    operations = st.sampled_from(["commit", "rollback"])
    marks = st.sampled_from(["received", "consumed", "committed", "uncommitted"])
    return st.one_of(
        st.sampled_from([Nop(), Ping(), Pong(), Resume(), Shutdown()]),
        st.builds(
            lambda what, to: ChannelOperation(what, *to), operations | st.just("close"), ours
        ),
        st.builds(
            lambda what, to: ChannelAcknowledgement(what, *to), marks | st.just("closed"), theirs
        ),
        st.builds(
            lambda what, to, at: SequenceOperation(what, to[0], at, to[1]),
            operations,
            ours,
            sequences,
        ),
        st.builds(
            lambda what, to, at: SequenceAcknowledgement(what, to[0], at, to[1]),
            marks,
            theirs,
            sequences,
        ),
        st.builds(lambda to, content: Message(*to, content), ours, part_lists),
    )


def layout_of(sender: str, sizes: tuple[int, int]) -> PacketLayout:
    return packet_layout(sender, *sizes)


def written(sent: list[Frame], sender: str, sizes: tuple[int, int]) -> bytes:
    pieces = [piece for packet in sent for piece in serialize(packet, layout_of(sender, sizes))]
    return b"".join(pieces)


def hints_of(sizes: tuple[int, int]) -> dict[str, int]:
    return {"connector_id_size": sizes[0], "listener_id_size": sizes[1]}


def connector_start(sizes: tuple[int, int], endpoint: str = "e") -> bytes:
    hello = ConnectorHello(endpoint=endpoint, **hints_of(sizes))
    return serialize_handshake(ConnectorVersion(0)) + serialize_handshake(hello)


def listener_start() -> bytes:
    return serialize_handshake(ListenerVersion(0)) + serialize_handshake(ListenerHello(EPOCH, 7))


@st.composite
def streams(draw: st.DrawFn, sender: str) -> Stream:
    """The listener's direction gets the sizes from hints, or from the connector's bytes."""
    sizes = draw(id_sizes)
    sent = draw(st.lists(packets(sender, sizes), max_size=6))
    if sender == "connector":
        start = connector_start(sizes, draw(endpoints))
        return Stream(start + written(sent, sender, sizes), hints=hints_of(sizes))
    data = listener_start() + written(sent, sender, sizes)
    if draw(st.booleans()):
        return Stream(data, hints=hints_of(sizes))
    return Stream(data, peer=connector_start(sizes))


@dataclass
class Ends:
    """Both ends of a link, and how to connect them."""

    connector: Link
    listener: Link

    @classmethod
    def fresh(cls, *, start: int = 0, **terms: int | bool | str) -> Ends:
        agreed = LinkTerms(**{"endpoint": "e", **terms})  # type: ignore[arg-type]
        return cls(
            Link("connector", agreed, start=start),
            Link("listener", agreed, epoch=EPOCH, id=7, start=start),
        )

    def connect(self, now: float = 0.0) -> tuple[RelinkConnection, RelinkConnection]:
        """Two connections; the handshake is done, and its events are left to be read."""
        connector = RelinkConnection("connector", now, link=self.connector)
        listener = RelinkConnection("listener", now)
        pump(connector, listener, now)
        (asked,) = listener.events()
        assert isinstance(asked, HandshakeReceived)
        listener.accept(self.listener)
        pump(connector, listener, now)
        return connector, listener


def open_ends(**terms: int | bool | str) -> tuple[RelinkConnection, RelinkConnection]:
    """Two ends of a new link that have shaken hands, their events drained."""
    connector, listener = Ends.fresh(**terms).connect()
    connector.events()
    listener.events()
    return connector, listener


def open_pair() -> tuple[Connection, Connection]:
    return open_ends()
