"""The far end of a connection, whatever its protocol."""

from __future__ import annotations

from crosswire.client.native.remote import RemotePeer
from crosswire.wire.contract import Event


class Peer(RemotePeer):
    def handle_events(self, events: list[Event]) -> None:
        raise NotImplementedError


async def test_a_handshake_that_ends_after_the_caller_gave_up_is_no_error() -> None:
    peer = Peer()
    peer.opened.cancel()
    peer.open()
    assert peer.opened.cancelled()


async def test_a_handshake_opens_a_peer() -> None:
    peer = Peer()
    peer.open()
    assert await peer.opened is None
