"""The figures of a report. Their size is bounded: it does not grow with the traffic."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from crosswire.pipeline.tables.names import MISSING_IN_LEDGER, MISSING_ON_WIRE

__all__ = [
    "MISSING",
    "Accounts",
    "Calls",
    "Deliveries",
    "Facts",
    "Failure",
    "Interruption",
    "Latencies",
    "LatencyRow",
    "MessageKey",
    "Reconciliation",
    "Sessions",
    "TimeBuckets",
    "Topology",
    "Traffic",
    "Violations",
]

Row = dict[str, Any]

MessageKey = tuple[str | None, int]
"""A message on the page: the node, and its id there."""

MISSING: Final = (MISSING_ON_WIRE, MISSING_IN_LEDGER)
"""The verdicts of gold.reconciliation that are faults: nothing explains the difference."""


class Interruption(msgspec.Struct, frozen=True):
    """A time in which the hub was not there (`killed`, `restarted`) or something was not recorded
    (`gap`: bytes; `missing records`: rows of the hub's ledger).

    `end_us` is None where it is not known, `node` where it holds for all. `sessions` were open when
    the hub was killed; `reason` is text of the tables.
    """

    kind: str
    node: str | None
    start_us: int
    end_us: int | None
    sessions: int
    bytes: int
    reason: str | None


class TimeBuckets(msgspec.Struct, frozen=True):
    """Equal intervals of time, from the first message or session to the last; `interruptions` are
    marked in every plot."""

    first_us: int
    last_us: int
    start_us: int
    width_us: int
    count: int
    interruptions: tuple[Interruption, ...] = ()


class Traffic(msgspec.Struct, frozen=True):
    """`messages`, `bytes` and `errors`: protocol → a number for each interval of time.

    `is_fine`: counted from messages instead of minutes.
    """

    messages: dict[str | None, list[int]]
    bytes: dict[str | None, list[int]]
    errors: dict[str | None, list[int]]
    kinds: dict[str, int]
    destinations: list[Row]
    more_destinations: int
    destination_count: int
    is_fine: bool

    @property
    def total_messages(self) -> int:
        """Messages of all protocols."""
        return sum(map(sum, self.messages.values()))

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all protocols."""
        return sum(map(sum, self.bytes.values()))

    @property
    def total_errors(self) -> int:
        """Responses with an error, of all protocols."""
        return sum(map(sum, self.errors.values()))


class LatencyRow(msgspec.Struct, frozen=True):
    """Upper bounds from a histogram; `longest` is exact."""

    count: int
    p50: int
    p90: int
    p95: int
    p99: int
    longest: int | None


class Latencies(msgspec.Struct, frozen=True):
    """Response times. `over_time` has None for intervals without requests; `counts` is protocol →
    bucket → count."""

    all: LatencyRow
    by_protocol: dict[str | None, LatencyRow]
    by_destination: dict[tuple[str | None, str | None], LatencyRow]
    over_time: list[LatencyRow | None]
    counts: dict[str | None, dict[int, int]]


class Calls(msgspec.Struct, frozen=True):
    """Requests and their outcomes. `failures`: by protocol, destination and outcome; `slowest` has
    each conversation once, with `message_id` where it is known."""

    answered: int
    failed: int
    unanswered: int
    waiting: int
    outcomes: list[Row]
    failures: list[Row]
    troubled: list[Row]
    slowest: list[Row]

    @property
    def total(self) -> int:
        """Requests that were answered, never answered, or still open."""
        return self.answered + self.unanswered + self.waiting


class Sessions(msgspec.Struct, frozen=True):
    """`endings`: protocol → how they ended → number of sessions. `open_at`: open sessions in each
    interval of time."""

    by_protocol: list[Row]
    endings: dict[str | None, dict[str, int]]
    errors: list[Row]
    troubled: list[Row]
    troubled_count: int
    largest: list[Row]
    open_at: list[int]
    acceptors: frozenset[str]

    @property
    def total(self) -> int:
        """Sessions of all protocols, open ones included."""
        return sum(row["sessions"] for row in self.by_protocol)


class Topology(msgspec.Struct, frozen=True):
    """`links`: host, listener, protocol; `uses`: listener, protocol, destination; `edges`: whole
    rows of gold.topology."""

    links: list[Row]
    uses: list[Row]
    edges: list[Row]
    more_edges: int


class Accounts(msgspec.Struct, frozen=True):
    """`by_protocol` has a sum for each part; `worst` are the directions with the most bytes that
    were not decoded."""

    by_protocol: list[Row]
    worst: list[Row]

    def total(self, part: str) -> int:
        """Bytes of a part, of all protocols."""
        return sum(row[part] for row in self.by_protocol)


class Violations(msgspec.Struct, frozen=True):
    """`reasons` are counted, `examples` are the first violations, `hosts` the senders by reason."""

    total: int
    reasons: list[Row]
    more_reasons: int
    examples: list[Row]
    hosts: list[Row]


class Deliveries(msgspec.Struct, frozen=True):
    """Deliveries and their faults. `damaged`: the payload is not what was accepted. `took` is the
    time from accepted to settled or answered, of all and of each of the `destinations`; `examples`
    are late, lost or doubled."""

    total: int
    faulty: int
    late: int
    lost: int
    doubled: int
    damaged: int
    took: LatencyRow | None
    outcomes: dict[str, int]
    destinations: list[Row]
    examples: list[Row]


class Reconciliation(msgspec.Struct, frozen=True):
    """What the wire shows against what the hub recorded. `examples` are missing in one of them."""

    verdicts: dict[str, int]
    by_protocol: dict[str | None, dict[str, int]]
    examples: list[Row]

    @property
    def total(self) -> int:
        """Passages that were compared."""
        return sum(self.verdicts.values())

    @property
    def missing(self) -> int:
        """Passages that only one side has, without explanation."""
        return sum(self.verdicts.get(verdict, 0) for verdict in MISSING)


class Failure(msgspec.Struct, frozen=True):
    """Failures of one kind and cause at one destination, or of one peer.

    `party` is the destination, or the peer's address; `name` is what `crosswire dead` calls the
    queue or subscription of dead letters. `message_id` is the newest message, `letter_id` its dead
    letter. `where` is the section with the details.
    """

    kind: str
    party: str | None
    protocol: str | None
    cause: str | None
    count: int
    where: str
    first_us: int | None = None
    last_us: int | None = None
    node: str | None = None
    message_id: int | None = None
    letter_id: int | None = None
    name: str | None = None


class Facts(msgspec.Struct, frozen=True):
    """All figures; None where the table for them does not exist."""

    tables: dict[str, int]
    clock: TimeBuckets | None
    traffic: Traffic | None
    latencies: Latencies | None
    calls: Calls | None
    sessions: Sessions | None
    topology: Topology | None
    accounts: Accounts | None
    violations: Violations | None
    deliveries: Deliveries | None
    reconciliation: Reconciliation | None
    failures: list[Failure]
    interruptions: list[Interruption]
    steps: dict[MessageKey, list[Row]]
    """Steps of the messages that the page names, in order, from gold.steps."""
    damaged_payloads: int | None
