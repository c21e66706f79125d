"""The sections of the page in their order: each says in words what it is about, then shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from crosswire.pipeline.report.about_bytes import accounting, violations
from crosswire.pipeline.report.about_hub import deliveries, reconciliation
from crosswire.pipeline.report.about_messages import (
    destinations,
    errors,
    latency,
    slowest,
    traffic,
)
from crosswire.pipeline.report.about_peers import blame, sessions, topology
from crosswire.pipeline.report.facts import Facts

__all__ = ["SECTIONS", "Section"]


class Section(msgspec.Struct, frozen=True):
    """`body` gives HTML, or nothing if its tables are not there."""

    name: str
    title: str
    why: str
    body: Callable[[Facts], str]


SECTIONS: Final = (
    Section(
        "traffic",
        "Traffic over time",
        "How much was said, and when. A queue hands each message to one consumer (a send), a topic "
        "hands it to all who subscribed (a publish), a service answers it (a request and its "
        "response).",
        traffic,
    ),
    Section(
        "destinations",
        "Destinations",
        "What the messages were for, the busiest first; the times are those between a request and "
        "its response. Click on a column's title to sort by it.",
        destinations,
    ),
    Section(
        "latency",
        "Latency",
        "How long requests waited for their responses, as seen where the traffic was recorded. "
        "p99 is the time within which 99 of 100 were answered: what the unlucky ones feel.",
        latency,
    ),
    Section(
        "errors",
        "Errors",
        "What became of the requests, and what went wrong: responses that report a failure, "
        "requests that nobody answered before the connection ended, sessions that an error ended, "
        "and bytes that broke the protocol.",
        errors,
    ),
    Section(
        "blame",
        "Who is to blame",
        "What the trouble points to. A peer that broke the protocol is known by its address; a "
        "destination that fails or keeps silent is the fault of whoever serves it. Gaps are "
        "nobody's fault but the recording's.",
        blame,
    ),
    Section(
        "slowest",
        "Slowest conversations",
        "The requests that waited longest for their response. Connection and correlation are what "
        "to look for in the tables gold.conversations and silver.frames.",
        slowest,
    ),
    Section(
        "deliveries",
        "Deliveries",
        "What the hub accepted, and whether it reached those that it was for. Lost: nobody will "
        "ever have it, and nobody wanted that. Doubled: somebody may have done it twice. Late: it "
        "took, or has been waiting, longer than it should.",
        deliveries,
    ),
    Section(
        "reconciliation",
        "Wire and hub compared",
        "The same messages, seen twice: in the bytes on the wire and in the hub's own ledger. "
        "What only one of them has got lost in between, or was not recorded.",
        reconciliation,
    ),
    Section(
        "sessions",
        "Sessions",
        "Connections from their opening to their end. The good ends are a goodbye in the protocol, "
        "or at least a connection closed in order by both sides.",
        sessions,
    ),
    Section(
        "topology",
        "Who talks to whom",
        "On the left who opened connections, in the middle the addresses and ports that accepted "
        "them, on the right what the messages were for. The thicker, the more messages. Point at "
        "something to see only what belongs to it.",
        topology,
    ),
    Section(
        "accounting",
        "Byte accounting",
        "What became of every byte that was recorded. If it can't be read it is still counted, and "
        "the sum is checked: nothing is passed over in silence.",
        accounting,
    ),
    Section(
        "violations",
        "Protocol violations",
        "Bytes that the rules of their protocol do not allow: what is wrong with them, and where "
        "they are.",
        violations,
    ),
)
