"""What a report says, as numbers: nothing here grows with the traffic that it is about."""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = [
    "MISSING",
    "Accounts",
    "Calls",
    "Deliveries",
    "Facts",
    "Latencies",
    "LatencyRow",
    "Reconciliation",
    "Sessions",
    "Suspect",
    "TimeBuckets",
    "Topology",
    "Traffic",
    "Violations",
]

Row = dict[str, Any]

MISSING: Final = ("missing on the wire", "missing in the ledger")
"""The verdicts of gold.reconciliation that nothing explains."""


class TimeBuckets(msgspec.Struct, frozen=True):
    """Equal pieces of time, from the first thing seen to the last."""

    first_us: int
    last_us: int
    start_us: int
    width_us: int
    count: int


class Traffic(msgspec.Struct, frozen=True):
    """`messages`, `bytes` and `errors`: protocol → a number for each piece of time."""

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
        return sum(map(sum, self.messages.values()))

    @property
    def total_bytes(self) -> int:
        return sum(map(sum, self.bytes.values()))

    @property
    def total_errors(self) -> int:
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
    """`over_time` has None where nothing was asked; `counts` is protocol → bucket → count."""

    all: LatencyRow
    by_protocol: dict[str | None, LatencyRow]
    by_destination: dict[tuple[str | None, str | None], LatencyRow]
    over_time: list[LatencyRow | None]
    counts: dict[str | None, dict[int, int]]


class Calls(msgspec.Struct, frozen=True):
    """Requests and what became of them."""

    answered: int
    failed: int
    unanswered: int
    waiting: int
    outcomes: list[Row]
    troubled: list[Row]
    slowest: list[Row]

    @property
    def total(self) -> int:
        return self.answered + self.unanswered + self.waiting


class Sessions(msgspec.Struct, frozen=True):
    """`endings`: protocol → how they ended → how many. `open_at`: at each piece of time."""

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
        return sum(row["sessions"] for row in self.by_protocol)


class Topology(msgspec.Struct, frozen=True):
    """`links`: host, door, protocol; `uses`: door, protocol, destination; `edges`: whole rows."""

    links: list[Row]
    uses: list[Row]
    edges: list[Row]
    more_edges: int


class Accounts(msgspec.Struct, frozen=True):
    """`by_protocol` has a sum for each part; `worst` are the directions least understood."""

    by_protocol: list[Row]
    worst: list[Row]

    def total(self, part: str) -> int:
        return sum(row[part] for row in self.by_protocol)


class Violations(msgspec.Struct, frozen=True):
    """`reasons` are summed up, `examples` the first ones, `hosts` who sent them."""

    total: int
    reasons: list[Row]
    more_reasons: int
    examples: list[Row]
    hosts: list[Row]


class Deliveries(msgspec.Struct, frozen=True):
    """What reached whom. `damaged`: the payload is not what was accepted. `took` is from being
    accepted to being settled or answered, of all and of each of the `destinations`; `examples` are
    late, lost or doubled."""

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
    """What the wire shows against what the hub recorded. `examples` are what one of them lacks."""

    verdicts: dict[str, int]
    by_protocol: dict[str | None, dict[str, int]]
    examples: list[Row]

    @property
    def total(self) -> int:
        return sum(self.verdicts.values())

    @property
    def missing(self) -> int:
        return sum(self.verdicts.get(verdict, 0) for verdict in MISSING)


class Suspect(msgspec.Struct, frozen=True):
    """Somebody or something that the trouble points to; `protocol` if it is of one alone."""

    party: str | None
    role: str
    charge: str
    count: int
    protocol: str | None
    where: str


class Facts(msgspec.Struct, frozen=True):
    """All of it; None for what can't be said because its table is not there."""

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
    suspects: list[Suspect]
    damaged_payloads: int | None
