"""Users, how they authenticate, and their rights to destinations."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import quote, unquote

import msgspec

__all__ = [
    "ANONYMOUS",
    "Access",
    "Right",
    "User",
    "covers",
    "parse_subscription_dead_letters",
    "subscription_dead_letters",
    "subscription_label",
]

Right = Literal["produce", "consume", "call", "serve"]

ANONYMOUS: Final = ""


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A user, its credentials (at least one) and the destinations it has rights to.

    `certificate` is the common name in a client certificate, `curve_key` a CURVE public key in Z85.
    Patterns are destinations with MQTT's wildcards: `queue/orders`, `topic/ticks/+`, `service/#`.
    They don't cover names that start with `@`, such as the dead letters of a subscription: those
    are its owner's and the administrators'.
    Raises ValueError without a name or credentials, or for a short token.
    """

    name: str
    token: str | None = None
    certificate: str | None = None
    curve_key: str | None = None
    produce: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    administer: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a user needs a name")
        if self.token is None and self.certificate is None and self.curve_key is None:
            raise ValueError(f"{self.name} needs a token, a certificate or a curve_key")
        if self.token is not None and len(self.token) < 16:
            raise ValueError(f"the token of {self.name} is too short: use 16 characters or more")


class Access:
    """The users of a hub. Without users, every peer may do everything, anonymously: see `open`.

    A principal is a user's name, or ANONYMOUS for a peer that did not authenticate.
    """

    def __init__(self, users: Sequence[User] = ()) -> None:
        self._users = {user.name: user for user in users}
        self._certificates = {user.certificate: user.name for user in users if user.certificate}
        self._curve_keys = {user.curve_key: user.name for user in users if user.curve_key}
        # Asked for every message. Bounded, since peers choose the destinations.
        self._decide = lru_cache(maxsize=65536)(self._may)

    @property
    def open(self) -> bool:
        """No user is configured: every peer that can connect may do everything."""
        return not self._users

    def knows(self, name: str) -> bool:
        """Whether there is a user of this name."""
        return name in self._users

    def has_lost_credentials(self, name: str, before: Access) -> bool:
        """Whether a user is gone, or one of the credentials that it had before is."""
        old, new = before._users.get(name), self._users.get(name)
        if old is None or new is None:
            return new is None
        return any(
            given is not None and given != now
            for given, now in (
                (old.token, new.token),
                (old.certificate, new.certificate),
                (old.curve_key, new.curve_key),
            )
        )

    def by_token(self, token: str) -> str | None:
        """The name of the user with this token, or None."""
        found = None
        # All tokens are compared, in constant time each: how long it takes reveals nothing.
        for user in self._users.values():
            if user.token is not None and hmac.compare_digest(user.token.encode(), token.encode()):
                found = user.name
        return found

    def by_certificate(self, common_name: str) -> str | None:
        """The name of the user whose client certificate has this common name, or None."""
        return self._certificates.get(common_name)

    def by_curve_key(self, key: str) -> str | None:
        """The name of the user with this CURVE public key (Z85), or None."""
        return self._curve_keys.get(key)

    def may(self, principal: str, right: Right, destination: str) -> bool:
        """Whether the principal has this right to a destination or to a whole pattern."""
        return not self._users or self._decide(principal, right, destination)

    def may_anywhere(self, principal: str, right: Right) -> bool:
        """Whether the principal has this right to any destination at all."""
        user = self._users.get(principal)
        return not self._users or (user is not None and bool(getattr(user, right)))

    def may_administer(self, principal: str) -> bool:
        """Whether the principal may use the administrative operations of the HTTP API."""
        user = self._users.get(principal)
        return not self._users or (user is not None and user.administer)

    def _may(self, principal: str, right: Right, destination: str) -> bool:
        user = self._users.get(principal)
        if user is not None and destination.partition("/")[2].startswith("@"):
            # The hub's own names: no pattern covers them, and no peer sends to them.
            found = parse_subscription_dead_letters(destination)
            is_owner = found is not None and found[0] == principal
            return right == "consume" and (is_owner or user.administer)
        return user is not None and any(
            covers(pattern, destination) for pattern in getattr(user, right)
        )


def covers(pattern: str, destination: str) -> bool:
    """Whether the pattern matches all that the destination, which may be a pattern, matches.

    `+` stands for one level; a final `#` for any number of levels, including none.
    """
    levels = destination.split("/")
    for position, level in enumerate(allowed := pattern.split("/")):
        if level == "#":
            return position == len(allowed) - 1
        if position == len(levels) or levels[position] == "#":
            return False
        if level != levels[position] and level != "+":
            return False
    return len(levels) == len(allowed)


def subscription_label(owner: str, name: str) -> str:
    """What the ledger calls a named subscription: NAME, with users PRINCIPAL.NAME.

    Both are encoded, dots and slashes included: no two subscriptions have the same label.
    """
    return ".".join(quote(each, safe="").replace(".", "%2E") for each in (owner, name) if each)


def subscription_dead_letters(owner: str, name: str) -> str:
    """The queue for the dead letters of a named subscription; `owner` is empty without users.

    No two subscriptions have the same queue, and no queue of a peer has such a name.
    """
    return f"queue/@{subscription_label(owner, name)}/dead"


def parse_subscription_dead_letters(destination: str) -> tuple[str, str] | None:
    """Owner and name of the subscription whose dead letters are in this queue; None if it is
    another queue."""
    if not destination.startswith("queue/@") or not destination.endswith("/dead"):
        return None
    owner, _, name = destination[len("queue/@") : -len("/dead")].rpartition(".")
    return unquote(owner), unquote(name)
