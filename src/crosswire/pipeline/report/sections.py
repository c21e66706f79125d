"""The sections of the page in their order, each with an introduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from crosswire.pipeline.report.about_bytes import accounting, violations
from crosswire.pipeline.report.about_failures import failures, messages
from crosswire.pipeline.report.about_hub import deliveries, reconciliation
from crosswire.pipeline.report.about_messages import (
    destinations,
    errors,
    latency,
    slowest,
    traffic,
)
from crosswire.pipeline.report.about_peers import sessions, topology
from crosswire.pipeline.report.facts import Facts

__all__ = ["SECTIONS", "Section"]


class Section(msgspec.Struct, frozen=True):
    """`body` returns HTML, or an empty text if its tables don't exist or have no rows."""

    name: str
    title: str
    why: str
    body: Callable[[Facts], str]


SECTIONS: Final = (
    Section(
        "failures",
        "Failures",
        "Dead letters first, then what was lost, failed or was late, by cause. A destination is "
        "listed for what happened there: look at the program that serves it. A peer is listed for "
        "bytes that violate its protocol. The commands work against the hub that recorded the "
        "traffic, from a terminal that knows its address.",
        failures,
    ),
    Section(
        "traffic",
        "Traffic over time",
        "Messages and bytes over time. A queue delivers each message to one consumer (a send), a "
        "topic delivers it to all subscribers (a publish), a service answers it (a request and its "
        "response).",
        traffic,
    ),
    Section(
        "destinations",
        "Destinations",
        "Where messages were sent to, the busiest first; the times are those between a request and "
        "its response. Click on a column's title to sort by it.",
        destinations,
    ),
    Section(
        "latency",
        "Latency",
        "How long requests waited for their responses, as seen where the traffic was recorded. A "
        "call through the hub is counted once: on the leg of its caller or, where only providers "
        "were recorded, on theirs. "
        "p99 is the time within which 99 of 100 were answered.",
        latency,
    ),
    Section(
        "errors",
        "Errors",
        "Outcomes of requests, and errors: responses that report a failure, requests without a "
        "response when their connection ended, sessions that ended with an error, and bytes that "
        "violated the protocol.",
        errors,
    ),
    Section(
        "slowest",
        "Slowest conversations",
        "The requests that waited longest for their response, each once. The id leads to the "
        "message's steps; in the tables gold.conversations and silver.frames, search for "
        "connection and correlation.",
        slowest,
    ),
    Section(
        "deliveries",
        "Deliveries",
        "What the hub accepted, and whether it was delivered. Lost: it was never received, and "
        "nobody intended that. Doubled: it may have been processed twice. Late: it took, or has "
        "been waiting, longer than the limit.",
        deliveries,
    ),
    Section(
        "reconciliation",
        "Wire and hub compared",
        "The same messages, seen twice: in the bytes on the wire and in the hub's own ledger. "
        "What only one of them has was lost in between, or was not recorded.",
        reconciliation,
    ),
    Section(
        "sessions",
        "Sessions",
        "Connections from their opening to their end. A session should end with a goodbye of its "
        "protocol, or at least with a connection that both sides have closed.",
        sessions,
    ),
    Section(
        "topology",
        "Who talks to whom",
        "On the left the hosts that opened connections, in the middle the addresses and ports that "
        "accepted them, on the right the destinations of the messages. The thicker, the more "
        "messages. Point at a box to see only its lines.",
        topology,
    ),
    Section(
        "accounting",
        "Byte accounting",
        "The category of every byte that was recorded. Bytes that can't be decoded are counted as "
        "well, and the sum is checked.",
        accounting,
    ),
    Section(
        "violations",
        "Protocol violations",
        "Bytes that the rules of their protocol do not allow: the reason, and where they are.",
        violations,
    ),
    Section(
        "messages",
        "Messages",
        "Every step of the messages that are named above, as the hub recorded them.",
        messages,
    ),
)
