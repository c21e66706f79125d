"""eMQP for asyncio programs: request jobs, publish, subscribe, schedule; `worker` does jobs."""

from crosswire.client.native.emqp.client import (
    EmqpClient,
    EmqpPeer,
    EmqpSubscriber,
    Publication,
    connect_peer,
)

__all__ = [
    "EmqpClient",
    "EmqpPeer",
    "EmqpSubscriber",
    "Publication",
    "connect_peer",
]
