"""Subscriptions of an Epoxy peer, and which messages it may settle."""

from __future__ import annotations

from collections.abc import Container, Iterable

from crosswire.hub.attachment import Attachment, Consumer, Delivery

__all__ = ["PeerSubscription"]


class PeerSubscription:
    """A subscription of one connection: its number, and what the peer has and has not settled.

    `settling` collects the ids that the peer settles in one read.
    """

    __slots__ = ("_given", "attachment", "number", "settling")

    def __init__(self, number: int, attachment: Attachment) -> None:
        self.number = number
        self.attachment = attachment
        self.settling: dict[int, None] = {}
        self._given: set[int] = set()

    def give(self, deliveries: list[Delivery]) -> None:
        """Note what the peer is sent.

        A consumer knows what it holds. An unnamed subscriber doesn't, and would free room for any
        id that it is given: the ids are kept here.
        """
        if not isinstance(self.attachment, Consumer):
            self._given.update([delivery.envelope.id for delivery in deliveries])

    def take(self, ids: Iterable[int]) -> list[int]:
        """Those of the ids that the peer has and has not settled, each once."""
        held: Container[int] = self._given
        if isinstance(self.attachment, Consumer):
            held = self.attachment.held
        settling = self.settling
        taken = [each for each in dict.fromkeys(ids) if each in held and each not in settling]
        self._given.difference_update(taken)
        return taken
