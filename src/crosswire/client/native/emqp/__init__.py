"""eMQP for asyncio programs: request jobs, publish, subscribe, schedule."""

from crosswire.client.native.emqp.client import EmqpClient
from crosswire.client.native.emqp.peer import EmqpPeer, connect_peer
from crosswire.client.native.emqp.subscriber import EmqpSubscriber, Publication

__all__ = [
    "EmqpClient",
    "EmqpPeer",
    "EmqpSubscriber",
    "Publication",
    "connect_peer",
]
