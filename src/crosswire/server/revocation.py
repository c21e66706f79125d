"""Ends what connected peers have, and may no longer have after a reload."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from crosswire.access import ANONYMOUS, Access
from crosswire.gateways.context import ConnectedPeer, GatewayContext
from crosswire.gateways.gateway import Gateway
from crosswire.hub.subscribers import Subscriber
from crosswire.logs import log_event

__all__ = ["revoke"]

_log = logging.getLogger("crosswire.gateways")


def revoke(context: GatewayContext, before: Access, gateways: Iterable[type[Gateway]]) -> int:
    """Disconnect the peers that lost what they use; `context.access` has the new users.

    Each gets its protocol's goodbye. A client that connects again gets its protocol's refusal for
    what it may not have, and the rest. Returns how many were disconnected.
    """
    access = context.access
    if access.open:
        return 0
    # Certificates that are no longer accepted: their names, or their authorities.
    shut_out = {
        gateway.id
        for gateway in context.gateways.values()
        if gateway.certificate is not None
        and context.by_certificate(gateway.certificate) != gateway.principal
    }

    def has_lost(principal: str) -> bool:
        return principal != ANONYMOUS and access.has_lost_credentials(principal, before)

    def is_revoked(principal: str, connection: str) -> bool:
        return connection in shut_out or has_lost(principal)

    for kind in gateways:
        # First what outlives connections: a link whose connection ends would be kept for a while.
        context.hub.callbacks.run("revoke", kind.forget_revoked, context, is_revoked)
    count = 0
    for gateway in list(context.gateways.values()):
        # Without users all had all rights: who did not have to identify itself has to now.
        is_unknown = before.open and gateway.principal == ANONYMOUS
        if (
            is_unknown
            or is_revoked(gateway.principal, gateway.id)
            or not _may_keep_all(gateway, access)
        ):
            count += 1
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
    return count


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
