"""Consumers as responses show them, and the rates of what they consume."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any, Final

import msgspec

from crosswire.hub.attachment import Attachment, Consumer
from crosswire.hub.ledger import Step
from crosswire.server.activity import Activity
from crosswire.web.contract import OperationRequest

__all__ = [
    "SHOWN_WITH_ROW",
    "ConsumerRow",
    "FlowRates",
    "consumer_row",
    "consumer_rows",
    "flow_of",
    "is_own_or_observed",
]

SHOWN_WITH_ROW: Final = 20
"""How many of what a queue, service or connection has are shown with it, in each row of a list:
peers may have thousands. Lists of their own have all."""
_IN = (Step.ACCEPTED,)
_OUT = (Step.DELIVERED,)
_SETTLED = (Step.SETTLED,)
_FAILED = (Step.REFUSED, Step.RETURNED)


class ConsumerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a connection consumes."""

    connection: str
    protocol: str
    principal: str
    destination: str
    """The queue, or the pattern of topics."""
    held: int
    """Messages that it got and has not settled."""
    free: int
    """How many more it takes."""
    weight: int
    """Consumers with a higher weight get messages before others."""


class FlowRates(msgspec.Struct, frozen=True, kw_only=True):
    """Messages per second, over the last five to ten seconds."""

    accepted: float = 0.0
    delivered: float = 0.0
    settled: float = 0.0
    failed: float = 0.0
    """Deliveries that were refused, or returned because the consumer left or its lease ran out."""
    redelivered: float = 0.0
    """Deliveries that were not the first of their message."""
    dead: float = 0.0
    """Messages that became dead letters."""


_NO_FLOW = FlowRates()


def flow_of(ask: OperationRequest, name: str) -> FlowRates:
    """The rates at a destination, or of a named subscription by its label in the ledger."""
    activity = ask.metrics.destinations.get(name)
    return _NO_FLOW if activity is None else rates_of(activity, ask.now())


def rates_of(activity: Activity, now: float) -> FlowRates:
    """The rates of an activity."""
    return FlowRates(
        accepted=round(activity.rate(now, *_IN), 3),
        delivered=round(activity.rate(now, *_OUT), 3),
        settled=round(activity.rate(now, *_SETTLED), 3),
        failed=round(activity.rate(now, *_FAILED), 3),
        redelivered=round(activity.redelivery_rate(now), 3),
        dead=round(activity.rate(now, Step.DEAD), 3),
    )


def consumer_rows(attachments: Collection[Attachment]) -> list[ConsumerRow]:
    """Some of them, for a response about something else."""
    return [consumer_row(each) for each in islice(attachments, SHOWN_WITH_ROW)]


def consumer_row(attachment: Attachment) -> ConsumerRow:
    """A consumer with what it holds."""
    held: Any = attachment.held if isinstance(attachment, Consumer) else ()
    return ConsumerRow(
        connection=attachment.peer.connection,
        protocol=attachment.peer.protocol,
        principal=attachment.peer.principal,
        destination=attachment.destination,
        held=len(held),
        free=max(attachment.window.free, 0),
        weight=attachment.weight,
    )


def is_own_or_observed(ask: OperationRequest, principal: str) -> bool:
    """Whether the principal may see what this one has: its own, or as an observer."""
    return principal == ask.principal or ask.is_observer
