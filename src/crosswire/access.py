"""Users, how they authenticate, and their rights to destinations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal
from urllib.parse import quote, unquote

import msgspec

from crosswire.tokens import SHORTEST_TOKEN, TokenHash, Tokens

__all__ = [
    "ANONYMOUS",
    "Access",
    "Right",
    "User",
    "covers",
    "parse_subscription_dead_letters",
    "parse_subscription_label",
    "subscription_dead_letters",
    "subscription_label",
]

Right = Literal["produce", "consume", "call", "serve"]

ANONYMOUS: Final = ""

_DECISIONS_BYTES: Final = 8 * 1024 * 1024
"""What remembered decisions may take in memory."""
_DECISION_BYTES: Final = 256
_CHARACTER_BYTES: Final = 4
"""What a decision takes beside its destination, and a character of that at most."""
_CERTIFICATE_NAMES: Final = ("cn", "dns", "uri", "email")


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A user, its credentials (at least one) and the destinations it has rights to.

    `token` is given itself, or as the hash that `crosswire user hash` prints (`token_hash`), or is
    the first line of a file (`token_file`) or an environment variable (`token_env`).
    `certificate` is a name in a client certificate: the common name, or with `dns:`, `uri:` or
    `email:` in front an alternative name. `curve_key` is a CURVE public key in Z85.
    Patterns are destinations with MQTT's wildcards: `queue/orders`, `topic/ticks/+`, `service/#`.
    They don't cover names that start with `@`, such as the dead letters of a subscription: those
    are its owner's and the administrators'.
    Raises ValueError without a name or credentials, and for a token that is short or given twice.
    """

    name: str
    token: str | None = None
    token_hash: str | None = None
    token_file: str | None = None
    token_env: str | None = None
    certificate: str | None = None
    curve_key: str | None = None
    produce: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    observe: bool = False
    administer: bool = False
    replicate: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a user needs a name")
        if not self.has_token and self.certificate is None and self.curve_key is None:
            raise ValueError(f"{self.name} needs a token, a certificate or a curve_key")
        # A token that was read from a file or a variable is set beside their name.
        ways = (self.token_hash, self.token_file, self.token_env)
        given = sum(each is not None for each in ways)
        if given > 1 or (self.token_hash is not None and self.token is not None):
            raise ValueError(
                f"{self.name} needs one of token, token_hash, token_file and token_env"
            )
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise ValueError(
                f"the token of {self.name} is too short: use {SHORTEST_TOKEN} characters or more"
            )
        if self.token is not None and self.token.startswith("$scrypt$"):
            # Taken for a token, every reader of the file could use it.
            raise ValueError(f"the token of {self.name} is a hash: name it token_hash")
        if self.token_hash is not None:
            TokenHash.parse(self.token_hash)

    @property
    def has_token(self) -> bool:
        """Whether it can identify itself by a token, however that is configured."""
        ways = (self.token, self.token_hash, self.token_file, self.token_env)
        return any(each is not None for each in ways)


class Access:
    """The users of a hub. Without users, every peer may do everything, anonymously: see `open`.

    A principal is a user's name, or ANONYMOUS for a peer that did not authenticate.
    """

    def __init__(self, users: Sequence[User] = ()) -> None:
        self.open = not users
        """No user is configured: every peer that can connect may do everything."""
        self._users = {user.name: user for user in users}
        self._certificates = {
            _certificate_name(user.certificate): user.name for user in users if user.certificate
        }
        self._tokens = Tokens(
            {user.name: user.token for user in users if user.token is not None},
            {user.name: user.token_hash for user in users if user.token_hash is not None},
        )
        self._curve_keys = {user.curve_key: user.name for user in users if user.curve_key}
        self._decisions: dict[tuple[str, Right, str], bool] = {}
        self._decisions_bytes = 0

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
                (old.token_hash, new.token_hash),
                (old.certificate, new.certificate),
                (old.curve_key, new.curve_key),
            )
        )

    def by_token(self, token: str, may_compare: Callable[[], bool] = lambda: True) -> str | None:
        """The name of the user with this token, or None; see `Tokens.find`."""
        return self._tokens.find(token, may_compare)

    def by_certificate(self, names: Collection[str]) -> str | None:
        """The name of the user whom a client certificate with these names (`cn:anna`) identifies;
        None if there is none, or more than one."""
        found = {self._certificates[name] for name in names if name in self._certificates}
        return found.pop() if len(found) == 1 else None

    def by_curve_key(self, key: str) -> str | None:
        """The name of the user with this CURVE public key (Z85), or None."""
        return self._curve_keys.get(key)

    def may(self, principal: str, right: Right, destination: str) -> bool:
        """Whether the principal has this right to a destination or to a whole pattern."""
        if not self._users:
            return True
        # Asked for every message.
        key = (principal, right, destination)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._may(principal, right, destination)
            self._remember(key, decision)
        return decision

    def _remember(self, key: tuple[str, Right, str], decision: bool) -> None:
        """Keep a decision. Limited by bytes, since peers choose the destinations; all are dropped
        at once, which is simple, and a decision takes a few microseconds."""
        size = len(key[2]) * _CHARACTER_BYTES + _DECISION_BYTES
        if self._decisions_bytes + size > _DECISIONS_BYTES:
            self._decisions.clear()
            self._decisions_bytes = 0
        self._decisions[key] = decision
        self._decisions_bytes += size

    def may_anywhere(self, principal: str, right: Right) -> bool:
        """Whether the principal has this right to any destination at all."""
        user = self._users.get(principal)
        return not self._users or (user is not None and bool(getattr(user, right)))

    def may_reach(self, principal: str, right: Right, service: str) -> bool:
        """Whether the principal has this right to a service, or to one of its methods."""
        user = self._users.get(principal)
        return not self._users or (
            user is not None and any(_reaches(each, service) for each in getattr(user, right))
        )

    def may_administer(self, principal: str) -> bool:
        """Whether the principal may use the administrative operations of the HTTP API."""
        user = self._users.get(principal)
        return not self._users or (user is not None and user.administer)

    def may_observe(self, principal: str) -> bool:
        """Whether the principal may see state, names, counts and metadata of everything: with the
        right to observe, or to administer."""
        user = self._users.get(principal)
        return not self._users or (user is not None and (user.observe or user.administer))

    def may_replicate(self, principal: str) -> bool:
        """Whether the principal may fetch checkpoints, which have everything: another replica, or
        an administrator."""
        user = self._users.get(principal)
        return not self._users or (user is not None and (user.replicate or user.administer))

    def may_manage(self, principal: str, owner: str) -> bool:
        """Whether the principal may see and remove what this owner made, such as a schedule: its
        own, or as an administrator. What was made without users is the administrators'."""
        return principal == owner or self.may_administer(principal)

    def may_any(self, principal: str, rights: Sequence[Right], destination: str) -> bool:
        """Whether the principal has one of these rights to a destination."""
        return any(self.may(principal, right, destination) for right in rights)

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

    def users(self) -> list[User]:
        """All users, in order of their names."""
        return [user for _, user in sorted(self._users.items())]

    def explain(
        self,
        principal: str,
        right: Right | Literal["observe", "replicate", "administer"],
        destination: str,
    ) -> tuple[bool, str]:
        """Whether the principal has a right, and the rule that decides it, for people.

        The rights to observe, replicate and administer are to the hub: they need no destination.
        """
        user = self._users.get(principal)
        if self.open:
            return True, "no user is configured: everybody may do everything"
        if user is None:
            return (
                False,
                "there is no such user" if principal else "peers without identity have none",
            )
        if right == "administer":
            return user.administer, f"administer = {str(user.administer).lower()}"
        if right == "observe" or right == "replicate":  # so that mypy narrows it
            if user.administer:
                return True, "administer = true"
            is_given: bool = getattr(user, right)
            return is_given, f"{right} = {str(is_given).lower()}"
        is_allowed = self.may(principal, right, destination)
        if destination.partition("/")[2].startswith("@"):
            return is_allowed, (
                "names that start with @ are the hub's own: the owner of the subscription and"
                " administrators may consume them, patterns don't cover them"
            )
        patterns = getattr(user, right)
        for pattern in patterns:
            if covers(pattern, destination):
                return is_allowed, f"{right} = {pattern!r}"
        if not patterns:
            return is_allowed, f"{principal} has no pattern for {right}"
        return is_allowed, f"no pattern covers it: {right} = {', '.join(map(repr, patterns))}"


def _certificate_name(text: str) -> str:
    """With its kind in front, as names in certificates have it; without one it is the common name.

    Kinds are kept apart: an authority that checks only common names, or only host names, may sign
    anything in the other.
    """
    kind, colon, value = text.partition(":")
    if not colon or kind not in _CERTIFICATE_NAMES:
        return f"cn:{text}"
    return f"dns:{value.lower()}" if kind == "dns" else text


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


def _reaches(pattern: str, destination: str) -> bool:
    """Whether the pattern matches the destination, or something below it."""
    levels = destination.split("/")
    for level, wanted in zip(allowed := pattern.split("/"), levels, strict=False):
        if level == "#":
            return True
        if level not in (wanted, "+"):
            return False
    return len(allowed) >= len(levels)


def subscription_label(owner: str, name: str) -> str:
    """What the ledger calls a named subscription: NAME, with users PRINCIPAL.NAME.

    Both are encoded, dots and slashes included: no two subscriptions have the same label.
    """
    return ".".join(quote(each, safe="").replace(".", "%2E") for each in (owner, name) if each)


def parse_subscription_label(label: str) -> tuple[str, str]:
    """Owner and name in a label; the owner is empty without users."""
    owner, _, name = label.rpartition(".")
    return unquote(owner), unquote(name)


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
    return parse_subscription_label(destination[len("queue/@") : -len("/dead")])
