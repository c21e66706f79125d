"""MicroMsg2 for hypothesis: frames, streams, and two ends that have shaken hands."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.wire.contract import Connection, Frame
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.extensions import Offer, batch_ack
from crosswire.wire.micromsg2.frames import (
    Command,
    Error,
    Extension,
    ExtensionFrame,
    Handshake,
    Message,
    following,
    serialize,
)
from crosswire.wire.micromsg2.values import serialize_properties
from tests.wire.stream import Stream, pump

names = st.text("abcxyz019-", min_size=1, max_size=8)
text = st.text(st.characters(codec="utf-8"), max_size=12)
destinations = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=12
)
arguments = st.dictionaries(names, text, max_size=3)
values = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | text
properties = st.dictionaries(names, values, max_size=3)
raw_properties = properties.map(serialize_properties)
payloads = st.binary(max_size=20) | st.binary(min_size=250, max_size=300)
extensions = st.lists(st.builds(Extension, names, arguments), max_size=3).map(tuple)
handshakes = st.builds(
    Handshake,
    st.integers(0, 255).filter(lambda major: major not in (4, 12)),
    st.integers(0, 255),
    st.integers(0, 255),
    st.text(st.characters(codec="ascii"), max_size=8),
    extensions,
    extensions,
)
errors = st.builds(Error, names, arguments)
others: SearchStrategy[Frame] = st.one_of(
    st.builds(Command, names, arguments),
    st.builds(ExtensionFrame, st.integers(1, 255), payloads),
    errors,
)


@st.composite
def frames(draw: st.DrawFn, first: int = 1, *, max_size: int = 8) -> list[Frame]:
    """Frames as they may follow one another, messages whole or continued."""
    drawn: list[Frame] = []
    sequence, continued = first, False
    for _ in range(draw(st.integers(0, max_size))):
        if draw(st.booleans()):
            drawn.append(draw(others))
            continue
        head = ("", b"") if continued else (draw(destinations), draw(raw_properties))
        continued = draw(st.booleans())
        drawn.append(Message(sequence, *head, draw(payloads), continued))
        sequence = following(sequence)
    return drawn


def numbered(sent: list[Frame], count: int) -> list[Frame]:
    """The same, extension frames with numbers that `count` agreed extensions allow."""
    return [
        ExtensionFrame((frame.id - 1) % count + 1, frame.payload)
        if isinstance(frame, ExtensionFrame)
        else frame
        for frame in sent
    ]


@st.composite
def streams(draw: st.DrawFn, sender: str) -> Stream:
    """A direction from its handshake on, as far as a decoder can check."""
    identity = draw(st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=8))
    sent: list[Frame] = [Handshake(1, 0, 0, identity, draw(extensions), draw(extensions))]
    follow = draw(frames())
    if sender == "client":
        required = (Extension("x-test", {}), *draw(extensions))
        sent.append(Handshake(1, 0, 0, identity, required, draw(extensions)))
        follow = numbered(follow, len(required))
    return Stream(b"".join(map(serialize, sent + follow)))


def pair(
    client_offer: Offer | None = None, server_offer: Offer | None = None
) -> tuple[MicroMsg2Connection, MicroMsg2Connection]:
    """Two ends that have shaken hands, their events taken."""
    client = MicroMsg2Connection("client", 0.0, offer=client_offer)
    server = MicroMsg2Connection("server", 0.0, offer=server_offer)
    pump(client, server)
    client.events()
    server.events()
    return client, server


def open_pair() -> tuple[Connection, Connection]:
    wanted = (batch_ack(100), Extension("pub-sub", {}))
    return pair(Offer(identity="client", optional=wanted), Offer(identity="server"))
