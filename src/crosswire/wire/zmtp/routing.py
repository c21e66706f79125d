"""Which peers a message goes to: a ROUTER's identities and a publisher's subscriptions.

Both hold handles, whatever their owner uses for a connection, and know nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["PrefixSubscriptions", "Router"]

H = TypeVar("H", bound=Hashable)


class Router(Generic[H]):
    """Identity → connection, as a ROUTER socket addresses its peers.

    A peer without an identity gets one from `make_identity`, which gives bytes that nobody can
    guess; a zero is put in front of them. Such identities are ours alone: a peer that calls itself
    by one counts as nameless, so that nobody can take another's place by guessing.
    """

    def __init__(self, make_identity: Callable[[], bytes]) -> None:
        self._make_identity = make_identity
        self._handles: dict[bytes, H] = {}
        self._identities: dict[H, bytes] = {}

    def join(self, handle: H, identity: bytes) -> tuple[bytes, H | None]:
        """The identity under which the peer can be reached from now on, and the connection that had
        it until now, which the caller ends: a peer that comes back replaces its old self."""
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
        """The connection has ended. Gives the identity that nobody has now; None if it was replaced
        before, or never joined."""
        identity = self._identities.pop(handle, None)
        if identity is not None:
            del self._handles[identity]
        return identity

    def get(self, identity: bytes) -> H | None:
        """The connection of a peer; None if there is none, and then a ROUTER drops the message."""
        return self._handles.get(identity)

    def identity(self, handle: H) -> bytes | None:
        return self._identities.get(handle)

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._handles)


class PrefixSubscriptions(Generic[H]):
    """Who wants what begins with which bytes.

    A topic is looked up once for every length that subscriptions have, however many there are.
    """

    def __init__(self) -> None:
        self._by_topic: dict[bytes, dict[H, None]] = {}
        self._by_handle: dict[H, set[bytes]] = {}
        self._lengths: dict[int, int] = {}

    def add(self, handle: H, topic: bytes) -> None:
        """Idempotent; a connection counts repeated subscriptions itself."""
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
        """Harmless if there is no such subscription."""
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
        """Everyone with a subscription that `topic` begins with, each once."""
        size = len(topic)
        found: dict[H, None] = {}
        for length in self._lengths:
            if length <= size:
                handles = self._by_topic.get(topic[:length])
                if handles:
                    found |= handles
        return list(found)

    def topics(self, handle: H) -> frozenset[bytes]:
        return frozenset(self._by_handle.get(handle, ()))

    def __len__(self) -> int:
        """Different topics that somebody wants."""
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
