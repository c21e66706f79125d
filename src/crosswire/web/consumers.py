"""Consumers of a queue or a named subscription, and rates, as lists show them."""

from __future__ import annotations

import msgspec

from crosswire.hub.attachment import Consumer
from crosswire.hub.ledger import Step
from crosswire.server.activity import Activity
from crosswire.web.contract import OperationRequest

__all__ = ["ConsumerRow", "FlowRates", "consumer_row", "flow_of", "is_own_or_observed"]

_IN = (Step.ACCEPTED,)
_OUT = (Step.DELIVERED,)
_SETTLED = (Step.SETTLED,)
_FAILED = (Step.REFUSED, Step.RETURNED)


class ConsumerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer of a queue or of a named subscription."""

    connection: str
    protocol: str
    principal: str
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


def consumer_row(consumer: Consumer) -> ConsumerRow:
    """A consumer with what it holds."""
    return ConsumerRow(
        connection=consumer.peer.connection,
        protocol=consumer.peer.protocol,
        principal=consumer.peer.principal,
        held=len(consumer.held),
        free=max(consumer.window.free, 0),
        weight=consumer.weight,
    )


def is_own_or_observed(ask: OperationRequest, principal: str) -> bool:
    """Whether the principal may see what this one has: its own, or as an observer."""
    return principal == ask.principal or ask.is_observer
