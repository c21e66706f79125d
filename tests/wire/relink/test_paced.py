"""A multicast to many channels is processed in parts, if the owner can call again."""

from __future__ import annotations

import pytest

from crosswire.wire.contract import ConnectionFailed, Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import HandshakeReceived, MessageReceived
from crosswire.wire.relink.frames import RelinkLimits
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link

CHANNELS = 5000


def open_pair(
    limits: RelinkLimits | None = None, id_size: int = 2
) -> tuple[RelinkConnection, RelinkConnection]:
    terms = LinkTerms(endpoint="queue/q", connector_id_size=id_size)
    connector = RelinkConnection("connector", 0.0, link=Link("connector", terms))
    listener = RelinkConnection("listener", 0.0, limits=limits)
    for _ in range(3):
        listener.receive_data(b"".join(connector.data_to_send()), 0.0)
        for event in listener.events():
            if isinstance(event, HandshakeReceived):
                link = Link("listener", terms, limits=limits or listener.limits)
                link.epoch, link.id = 1, 1
                listener.accept(link)
        connector.receive_data(b"".join(listener.data_to_send()), 0.0)
        connector.events()
    return connector, listener


def send(connector: RelinkConnection, channels: list[int]) -> bytes:
    connector.send_message(1, b"before")
    connector.send_multicast(channels, b"x")
    connector.send_message(2, b"after")
    return b"".join(connector.data_to_send())


def received(listener: RelinkConnection, data: bytes) -> tuple[list[Event], list[int]]:
    """All events, and how many came with each call."""
    listener.receive_data(data, 0.0)
    events = listener.events()
    counts = [len(events)]
    while listener.has_backlog:
        listener.catch_up(0.0)
        more = listener.events()
        counts.append(len(more))
        events += more
    return events, counts


def test_parts_are_all_of_it_in_order() -> None:
    channels = list(range(CHANNELS))
    found = []
    for paced in (False, True):
        connector, listener = open_pair()
        listener.paced = paced
        found.append(received(listener, send(connector, channels)))
    (at_once, _), (in_parts, counts) = found
    assert in_parts == at_once
    assert len(counts) > CHANNELS // 1024 and max(counts) <= 1024 + 2
    messages = [event for event in in_parts if isinstance(event, MessageReceived)]
    assert [bytes(each.parts[0]) for each in messages] == [b"before", *[b"x"] * CHANNELS, b"after"]


def test_what_arrives_meanwhile_comes_after_it() -> None:
    connector, listener = open_pair()
    listener.paced = True
    listener.receive_data(send(connector, list(range(CHANNELS))), 0.0)
    connector.send_message(3, b"later")
    listener.receive_data(b"".join(connector.data_to_send()), 0.0)
    events = listener.events()
    while listener.has_backlog:
        listener.catch_up(0.0)
        events += listener.events()
    parts = [bytes(each.parts[0]) for each in events if isinstance(each, MessageReceived)]
    assert parts == [b"before", *[b"x"] * CHANNELS, b"after", b"later"]


def test_the_memory_of_all_copies_counts_before_the_first() -> None:
    connector, listener = open_pair(RelinkLimits(unconsumed_bytes=1 << 20))
    listener.paced = True
    events, _ = received(listener, send(connector, list(range(CHANNELS))))
    assert isinstance(events[-1], ConnectionFailed)
    assert not [e for e in events if isinstance(e, MessageReceived) and bytes(e.parts[0]) == b"x"]
    assert not listener.has_backlog


@pytest.mark.parametrize("id_size", [1, 2, 3, 4, 5, 8])
def test_ids_of_every_size(id_size: int) -> None:
    connector, listener = open_pair(id_size=id_size)
    channels = [1, 255, 7, *([65_535, 256] if id_size > 1 else [])]
    connector.send_multicast(channels, b"x")
    events, _ = received(listener, b"".join(connector.data_to_send()))
    assert [each.channel for each in events if isinstance(each, MessageReceived)] == channels
