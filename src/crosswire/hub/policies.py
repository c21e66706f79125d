"""Policies of queues, topics, services and staged batches, as the configuration file sets them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["HubConfig", "QueuePolicy", "Retry", "ServicePolicy", "StagingLimits", "TopicPolicy"]

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often and when a delivery is retried; `max_attempts` 0 means without limit.

    `lease_s` is the default lease of consumers: a message that is not settled within it is
    returned to the queue. None: no lease.
    """

    max_attempts: int = 5
    first_delay_s: float = 0.1
    longest_delay_s: float = 60.0
    jitter: float = 0.2
    lease_s: float | None = None

    def delay_s(self, attempt: int, chance: float) -> float:
        """The delay after a failed attempt, doubled with every attempt up to the longest.

        `chance` in [0, 1) subtracts up to `jitter` of it, so that messages that failed together
        are not retried together.
        """
        # 2^40 times any delay is beyond every limit; a larger exponent would overflow one day.
        longest = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 40))
        return longest * (1.0 - self.jitter * chance)


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a queue. `window_*` bound what it keeps in memory; the rest is on disk only.

    With `drop-oldest` every message is accepted, and after its commit the oldest messages that no
    consumer holds are dropped until the limits are kept: of a batch longer than `max_length` the
    newest stay. Messages that consumers hold count, and are never dropped.
    """

    max_length: int = 0
    max_bytes: int = 0
    overflow: Literal["refuse", "drop-oldest"] = "refuse"
    ttl_s: float = 0.0
    retry: Retry = Retry()
    window_messages: int = 1024
    window_bytes: int = 16 * 1024 * 1024

    def takes(self, length: int, size_bytes: int) -> bool:
        """Whether the queue may hold this much, or older messages are dropped for it."""
        return self.overflow == "drop-oldest" or not (
            (self.max_length and length > self.max_length)
            or (self.max_bytes and size_bytes > self.max_bytes)
        )


class TopicPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Durability and retention of a topic.

    `slow` decides what happens to an unnamed subscriber whose window is full. `ledger` is for
    topics that are not durable: one row for each message, or one for each delivery.
    """

    durable: bool = True
    retention_s: float = 7 * 24 * 3600.0
    retention_bytes: int = 10 << 30
    slow: Literal["lag", "disconnect"] = "lag"
    ledger: Literal["counts", "rows"] = "counts"


class ServicePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`waiting` calls at most are queued for a service whose providers are all busy.

    With `journal`, requests and responses are stored for the retention time of topics.
    """

    deadline_s: float = 30.0
    waiting: int = 10_000
    journal: bool = True


class StagingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of staged batches: how much, and how long without activity until it is dropped.

    `part_bytes` limits one part of an attempt, `producers` how many are remembered.
    """

    staged_bytes: Positive = 4 * 1024 * 1024 * 1024
    staged_s: Annotated[float, msgspec.Meta(gt=0)] = 86_400.0
    attempts: Positive = 10_000
    producers: Positive = 10_000
    part_bytes: Positive = 16 * 1024 * 1024


class HubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Policies by destination name, each kind with a default for all others.

    With `lake`, nothing is reclaimed before the lake has sealed it. `ledger_rows` limits how much
    of the ledger the store keeps without a lake, `recent_rows` how much of it is in memory.
    `windows_bytes` limits what all queues and subscriptions together keep in memory. Queues and
    topics that are unused for `expire_s` are removed; 0 means never. There are at most this many
    named `subscriptions` and `schedules`, `schedules_bytes` of messages in these, and `calls_bytes`
    of calls in progress; `share` is the part of them, and of all other limits, that one user or
    address may have.
    """

    queue: QueuePolicy = QueuePolicy()
    queues: dict[str, QueuePolicy] = {}
    topic: TopicPolicy = TopicPolicy()
    topics: dict[str, TopicPolicy] = {}
    service: ServicePolicy = ServicePolicy()
    retry: Retry = Retry()
    staging: StagingLimits = StagingLimits()
    lake: bool = False
    ledger_rows: int = 5_000_000
    recent_rows: int = 200_000
    windows_bytes: int = 1 << 30
    expire_s: float = 86_400.0
    subscriptions: int = 10_000
    schedules: int = 10_000
    schedules_bytes: int = 512 << 20
    calls_bytes: int = 2 << 30
    share: float = 0.25
