"""What a stopping hub waits for, in words."""

from __future__ import annotations

from collections.abc import Iterable

from crosswire.gateways.context import ConnectedPeer
from crosswire.hub.attachment import Consumer
from crosswire.plurals import plural

__all__ = ["describe_waits"]


def describe_waits(peers: Iterable[ConnectedPeer]) -> list[str]:
    """A text for each peer that has work under way."""
    return [f"{peer.id} ({peer.address}): {_work_of(peer)}" for peer in list(peers) if peer.is_busy]


def _work_of(peer: ConnectedPeer) -> str:
    held = sum(len(each.held) for each in peer.attachments if isinstance(each, Consumer))
    served = sum(len(each.calls) for each in peer.providers)
    counted = (
        (held, f"{plural(held, 'message')} to settle"),
        (served, f"{plural(served, 'call')} to answer"),
        (len(peer.calls), f"{plural(len(peer.calls), 'response')} to receive"),
    )
    return ", ".join(text for count, text in counted if count) or "something to finish"
