"""eMQP, the protocol of EventMQ: jobs, schedules and publications, on ZeroMQ."""

from __future__ import annotations

from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.decoder import EmqpDecoder
from crosswire.wire.emqp.frames import DEFAULTS
from crosswire.wire.emqp.states import LISTENERS, ROLES
from crosswire.wire.registry import Protocol
from crosswire.wire.zmtp import sniff

__all__ = ["PROTOCOL"]

PROTOCOL = Protocol(
    name="emqp",
    title="eMQP",
    roles=ROLES,
    ports=LISTENERS,
    limits=DEFAULTS,
    connection=EmqpConnection,
    decoder=EmqpDecoder,
    sniff=sniff,
)
