"""Who takes part in the hub's tests: receivers that remember, and a hub with time in its hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

from crosswire.envelope import Envelope
from crosswire.errors import StoreFull
from crosswire.hub.attachment import Attachment, Delivery, Notice
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig
from crosswire.hub.services import Answer, Call, Provider
from crosswire.store.contract import StoreLimits
from crosswire.store.memory import MemoryDisk, MemoryStore

__all__ = ["Bench", "Caller", "Recorder", "Server", "no_ids", "publish", "send"]


class Recorder:
    """Remembers what it was given; `settles` it at once if told so."""

    def __init__(self, *, settles: bool = False) -> None:
        self.settles = settles
        self.deliveries: list[Delivery] = []
        self.notices: list[Notice] = []
        self.errors: list[Exception] = []
        self.calls = 0

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        self.calls += 1
        self.deliveries += deliveries
        if self.settles:
            attachment.settle([each.id for each in deliveries], 0.0)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        self.notices.append(notice)

    def broken(self, error: Exception) -> None:
        self.errors.append(error)

    @property
    def payloads(self) -> list[bytes]:
        return [each.envelope.payload for each in self.deliveries]

    @property
    def ids(self) -> list[int]:
        return [each.id for each in self.deliveries]

    def take(self) -> list[bytes]:
        """The payloads since the last time."""
        payloads = self.payloads
        self.deliveries.clear()
        return payloads


class Server:
    """A provider's receiver: remembers requests and cancellations."""

    def __init__(self) -> None:
        self.requests: list[Delivery] = []
        self.cancelled: list[int] = []
        self.errors: list[Exception] = []

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        self.requests += requests

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        self.cancelled += ids

    def broken(self, error: Exception) -> None:
        self.errors.append(error)


class Caller:
    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def __call__(self, call: Call, answer: Answer) -> None:
        self.answers.append(answer)


class Bench:
    """A hub on a memory store, a clock that stands still, and the way to kill it.

    `ahead` is how far the wall clock is ahead of the hub's time.
    """

    def __init__(
        self,
        config: HubConfig | None = None,
        *,
        now: float = 1_000_000.0,
        limits: StoreLimits | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.now = now
        self.ahead = 0.0
        self.disk = MemoryDisk()
        self.random = Random(7)
        self.start()

    def start(self) -> None:
        self.store = MemoryStore(self.disk, self.limits)
        self.now, self.ahead = self.now + self.ahead, 0.0
        self.hub = Hub(self.store, self.config, now=self.now, random=self.random)

    def kill(self, *, power: bool = False) -> None:
        """What was not committed is gone; what was not synced, too, if the power went."""
        if power:
            self.disk.cut_power()
        self.start()

    def commit(self) -> None:
        """The open group is written, and synced if something in it asks for that."""
        self.hub.commits.commit_now()

    def produce(self, *envelopes: Envelope) -> list[int]:
        receipt = self.hub.produce(envelopes, self.now)
        self.commit()
        assert receipt.done and receipt.error is None, receipt.error
        return receipt.ids

    def wait(self, seconds: float) -> None:
        """Let time pass, stopping at every deadline on the way."""
        until = self.now + seconds
        while (due := self.hub.next_deadline()) is not None and due <= until:
            self.now = max(due, self.now)
            self.look()
            self.hub.handle_deadline(self.now)
        self.now = until
        self.look()

    def look(self) -> None:
        """The hub sees what the wall clock shows."""
        self.hub.follow_wall(self.now + self.ahead, self.now)

    def set_clock(self, seconds: float) -> None:
        """The wall clock is set forward or back."""
        self.ahead += seconds
        self.look()

    def consume(self, queue: str, receiver: Recorder, *, who: str = "c", **options: object):  # type: ignore[no-untyped-def]
        return self.hub.consume(
            queue,
            receiver,
            self.now,
            peer=LedgerPeer("test", who),
            **options,  # type: ignore[arg-type]
        )

    def subscribe(self, pattern: str, receiver: Recorder, *, who: str = "s", **options: object):  # type: ignore[no-untyped-def]
        return self.hub.subscribe(
            pattern,
            receiver,
            self.now,
            peer=LedgerPeer("test", who),
            **options,  # type: ignore[arg-type]
        )


def send(payload: bytes = b"", queue: str = "queue/q", **fields: object) -> Envelope:
    return Envelope(
        destination=queue,
        kind="send",
        payload=payload,
        protocol="test",
        connection="p",
        **fields,  # type: ignore[arg-type]
    )


def publish(payload: bytes = b"", topic: str = "topic/t", **fields: object) -> Envelope:
    return Envelope(
        destination=topic,
        kind="publish",
        payload=payload,
        protocol="test",
        connection="p",
        **fields,  # type: ignore[arg-type]
    )


@contextmanager
def no_ids(bench: Bench) -> Iterator[None]:
    """All ids of the block are given out, and there is no room to reserve others."""
    store = bench.hub.store
    full = StoreFull("there is no room on the disk")
    with mock.patch.object(store, "_save_copies", side_effect=full):
        store._reserved_id = store._next_id
        yield
