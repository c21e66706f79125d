"""Ends what connected peers have, and may no longer have after a reload.

There may be thousands of them, each with a goodbye, a line in the log and what it held: all at
once that is a turn of the event loop of some tenths of a second. So it is done in parts, one in
each turn until it is done, whatever else the hub has to do. A right to send is gone with the first
part, since each message is checked by the rights of now; the reload is confirmed after the last
one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from crosswire.access import ANONYMOUS, Access
from crosswire.gateways.context import ConnectedPeer, GatewayContext
from crosswire.gateways.gateway import Gateway
from crosswire.hub.subscribers import Subscriber
from crosswire.logs import log_event

__all__ = ["Revocations"]

_log = logging.getLogger("crosswire.gateways")

_PART_S: Final = 0.004
_EXAMINED: Final = 64
"""Peers that are looked at before the clock is."""


class Revocations:
    """The reloads whose revocations are not done yet, in order."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._under_way: deque[Iterator[None]] = deque()
        self._waiting: list[Callable[[], None]] = []

    def begin(self, before: Access, gateways: Iterable[type[Gateway]]) -> None:
        """Disconnect the peers that lost what they use: some now, the others in the next turns.
        `before` are the users until now, `context.access` has the new ones.

        Each gets its protocol's goodbye. A client that connects again gets its protocol's refusal
        for what it may not have, and the rest.
        """
        context, gateways = self._context, list(gateways)
        # A standby has neither peers nor a hub.
        if context.access.open or not (gateways or context.gateways):
            return
        # Who connects from now on is judged by the new users, even if other reloads come first.
        peers = list(context.gateways.values())
        self._under_way.append(_revoke(context, before, context.access, peers, gateways))
        if len(self._under_way) == 1:
            self._continue()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have it called when nobody has anything any more that a reload has taken away."""
        if self._under_way:
            self._waiting.append(callback)
        else:
            callback()

    def _continue(self) -> None:
        turns = self._context.hub.turns
        turns.enter()
        ends_at = turns.thread_clock() + _PART_S
        while self._under_way and turns.thread_clock() < ends_at:
            # What raises in there is logged, and ends this reload's part, not that of others.
            callbacks = self._context.hub.callbacks
            if callbacks.run("revoke", self._step):
                self._under_way.popleft()
        if self._under_way:
            asyncio.get_running_loop().call_soon(self._continue)
            return
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def _step(self) -> None:
        try:
            next(self._under_way[0])
        except StopIteration:
            self._under_way.popleft()


def _revoke(
    context: GatewayContext,
    before: Access,
    after: Access,
    peers: list[ConnectedPeer],
    gateways: list[type[Gateway]],
) -> Iterator[None]:
    """Credentials are compared before and after this reload. Rights are those of now: what the next
    reload gives, it gives at once, and what it takes away is revoked after this."""
    known = {gateway.id for gateway in peers}
    shut_out: set[str] = set()
    for index, gateway in enumerate(peers):
        # Certificates that are no longer accepted: their names, or their authorities.
        if (
            gateway.certificate is not None
            and context.by_certificate(gateway.certificate) != gateway.principal
        ):
            shut_out.add(gateway.id)
        if index % _EXAMINED == 0:
            yield

    def is_revoked(principal: str, connection: str) -> bool:
        if connection and connection not in known:
            return False
        return connection in shut_out or (
            principal != ANONYMOUS and after.has_lost_credentials(principal, before)
        )

    for kind in gateways:
        # First what outlives connections: a link whose connection ends would be kept for a while.
        for step in kind.revocations(context, is_revoked):
            context.hub.callbacks.run("revoke", step)
            yield
    for index, gateway in enumerate(peers):
        if context.gateways.get(gateway.id) is not gateway:
            continue
        # Without users all had all rights: who did not have to identify itself has to now.
        is_unknown = before.open and gateway.principal == ANONYMOUS
        if (
            is_unknown
            or is_revoked(gateway.principal, gateway.id)
            or not _may_keep_all(gateway, context.access)
        ):
            context.count("revoked", gateway.protocol)
            log_event(
                _log,
                logging.WARNING,
                "revoked",
                connection=gateway.id,
                protocol=gateway.protocol,
                principal=gateway.principal,
            )
            context.hub.callbacks.run("revoke", gateway.disconnect, "its rights were taken away")
            yield
        elif gateway.attachments or gateway.providers or index % _EXAMINED == 0:
            yield


def _may_keep_all(gateway: ConnectedPeer, access: Access) -> bool:
    """Whether it still has the rights to all that it consumes and serves."""
    principal = gateway.principal
    for attachment in gateway.attachments:
        if isinstance(attachment, Subscriber) and attachment.names is not None:
            # It chooses among all topics by its rights: topics ask it again.
            attachment.renew()
        elif not access.may(principal, "consume", attachment.destination):
            return False
    return all(
        access.may(principal, "serve", name)
        for provider in gateway.providers
        for name in provider.names
    )
