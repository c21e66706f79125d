"""Which peers a message is sent to: a ROUTER's identities and a publisher's subscriptions.

Both store handles, which are any hashable objects that their owner uses for connections.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["PrefixSubscriptions", "Router"]

H = TypeVar("H", bound=Hashable)


class Router(Generic[H]):
    """Identity → connection, as a ROUTER socket addresses its peers.

    A peer without an identity gets one: a zero byte and what `make_identity` returns, which must
    not be predictable. Peers can't choose identities that begin with zero; one that does gets
    another, so that nobody can receive a peer's messages by guessing its identity.
    """

    def __init__(self, make_identity: Callable[[], bytes]) -> None:
        self._make_identity = make_identity
        self._handles: dict[bytes, H] = {}
        self._identities: dict[H, bytes] = {}

    def join(self, handle: H, identity: bytes) -> tuple[bytes, H | None]:
        """The identity of the peer from now on, and the connection that had it until now, which the
        caller ends: a peer that reconnects replaces its previous connection."""
        if not identity or identity[0] == 0:
            identity = b"\0" + self._make_identity()
            while identity in self._handles:
                identity = b"\0" + self._make_identity()
        self.leave(handle)
        replaced = self._handles.get(identity)
        if replaced is not None:
            del self._identities[replaced]
        self._handles[identity] = handle
        self._identities[handle] = identity
        return identity, replaced

    def leave(self, handle: H) -> bytes | None:
        """The connection has ended. Returns the identity that is free now; None if it was replaced
        before, or never joined."""
        identity = self._identities.pop(handle, None)
        if identity is not None:
            del self._handles[identity]
        return identity

    def get(self, identity: bytes) -> H | None:
        """The connection of a peer; None if there is none: a ROUTER then drops the message."""
        return self._handles.get(identity)

    def identity(self, handle: H) -> bytes | None:
        """The identity of a connection; None if it has not joined or was replaced."""
        return self._identities.get(handle)

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._handles)


class PrefixSubscriptions(Generic[H]):
    """Subscriptions to all topics with a prefix.

    Matching takes one lookup per different length of prefixes, however many there are.
    """

    def __init__(self) -> None:
        self._by_topic: dict[bytes, dict[H, None]] = {}
        self._by_handle: dict[H, set[bytes]] = {}
        self._lengths: dict[int, int] = {}

    def add(self, handle: H, topic: bytes) -> None:
        """Subscribe. Idempotent: a connection counts repeated subscriptions itself."""
        topics = self._by_handle.setdefault(handle, set())
        if topic in topics:
            return
        topics.add(topic)
        handles = self._by_topic.get(topic)
        if handles is None:
            handles = self._by_topic[topic] = {}
            self._lengths[len(topic)] = self._lengths.get(len(topic), 0) + 1
        handles[handle] = None

    def remove(self, handle: H, topic: bytes) -> None:
        """Unsubscribe. No effect if there is no such subscription."""
        topics = self._by_handle.get(handle)
        if topics is None or topic not in topics:
            return
        topics.remove(topic)
        if not topics:
            del self._by_handle[handle]
        self._forget(handle, topic)

    def leave(self, handle: H) -> None:
        """The connection has ended."""
        for topic in self._by_handle.pop(handle, ()):
            self._forget(handle, topic)

    def match(self, topic: bytes) -> list[H]:
        """All connections with a prefix of `topic`, each once."""
        size = len(topic)
        found: dict[H, None] = {}
        for length in self._lengths:
            if length <= size:
                handles = self._by_topic.get(topic[:length])
                if handles:
                    found |= handles
        return list(found)

    def topics(self, handle: H) -> frozenset[bytes]:
        """The prefixes that a connection subscribed to."""
        return frozenset(self._by_handle.get(handle, ()))

    def __len__(self) -> int:
        """The number of different prefixes."""
        return len(self._by_topic)

    def _forget(self, handle: H, topic: bytes) -> None:
        handles = self._by_topic[topic]
        del handles[handle]
        if handles:
            return
        del self._by_topic[topic]
        self._lengths[len(topic)] -= 1
        if not self._lengths[len(topic)]:
            del self._lengths[len(topic)]
