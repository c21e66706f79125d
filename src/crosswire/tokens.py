"""Tokens of users: kept as hashes, and found by what a peer presents.

A hash is scrypt's, in the usual notation: `$scrypt$ln=11,r=8,p=1$SALT$HASH`. All hashes of one
configuration should have the same salt: then a sign-in takes one computation, however many users
there are, and the salt still makes tables of other hubs' hashes worthless.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

__all__ = [
    "MOST_WORK",
    "SHORTEST_TOKEN",
    "TokenHash",
    "Tokens",
    "distinct_salts",
    "hash_token",
]

T = TypeVar("T")

SHORTEST_TOKEN: Final = 16
MOST_WORK: Final = 1 << 13
"""The sum of the costs of all different salts: about 20 ms for a token that nobody has."""

_COST: Final = 11
"""Of new hashes: 2 MiB of memory and about 5 ms."""
_COSTS: Final = range(10, 14)
_BLOCK: Final = 8
_SALT_BYTES: Final = 16
_HASH_BYTES: Final = 32
_MEMORY_BYTES: Final = 32 << 20
_VERIFIED: Final = 65_536
_UNKNOWN: Final = 4_096
_FORM: Final = re.compile(
    r"\$scrypt\$ln=(\d{1,2}),r=8,p=1\$([A-Za-z0-9+/]{4,64})\$([A-Za-z0-9+/]{43})"
)

_KEY: Final = secrets.token_bytes(32)
"""Of this process: presented tokens are remembered as digests that nobody else can compute."""
_verified: OrderedDict[bytes, str] = OrderedDict()
"""The hash that a presented token matches, by its digest. It outlives reloads: clients that all
reconnect after one cost nothing."""


class TokenHash(msgspec.Struct, frozen=True):
    """A hash of a token, in its parts."""

    cost: int
    salt: bytes
    digest: bytes

    @classmethod
    def parse(cls, text: str) -> TokenHash:
        """Raises ValueError. The text is not in its message, since it may be a token."""
        found = _FORM.fullmatch(text)
        try:
            if found is None or int(found[1]) not in _COSTS:
                raise ValueError
            return cls(int(found[1]), _decoded(found[2]), _decoded(found[3]))
        except (ValueError, binascii.Error):
            raise ValueError("not the hash of a token: `crosswire user hash` prints one") from None

    def __str__(self) -> str:
        return f"$scrypt$ln={self.cost},r=8,p=1${_encoded(self.salt)}${_encoded(self.digest)}"


def hash_token(token: str, like: TokenHash | None = None) -> TokenHash:
    """The hash of a token, with the salt and cost of another one or with a new salt."""
    cost, salt = (
        (_COST, secrets.token_bytes(_SALT_BYTES)) if like is None else (like.cost, like.salt)
    )
    digest = hashlib.scrypt(
        _bytes(token),
        salt=salt,
        n=1 << cost,
        r=_BLOCK,
        p=1,
        maxmem=_MEMORY_BYTES,
        dklen=_HASH_BYTES,
    )
    return TokenHash(cost, salt, digest)


class Tokens:
    """Finds the user of a token, among users with tokens and users with hashes.

    Every step compares digests that a peer can't choose: how long it takes reveals nothing of other
    tokens. What matched a hash once costs nothing again, and neither does what matched none.
    """

    def __init__(self, tokens: Mapping[str, str], hashes: Mapping[str, str]) -> None:
        """Both have users by name. Raises ValueError for what is no hash."""
        self._by_digest = {_presented(token): name for name, token in tokens.items()}
        self._by_hash = {str(TokenHash.parse(text)): name for name, text in hashes.items()}
        self._salts = distinct_salts(hashes.values())
        self._unknown: OrderedDict[bytes, None] = OrderedDict()

    def find(self, token: str, may_compare: Callable[[], bool] = lambda: True) -> str | None:
        """The name of the user with this token, or None. `may_compare` is asked before it is
        compared with hashes, and may raise."""
        digest = _presented(token)
        name = self._by_digest.get(digest)
        if name is not None or not self._salts:
            return name
        matched = _verified.get(digest)
        if matched in self._by_hash:
            _verified.move_to_end(digest)
            return self._by_hash[matched]
        if digest in self._unknown or not may_compare():
            return None
        for like in self._salts:
            text = str(hash_token(token, like))
            if text in self._by_hash:
                _remember(_verified, digest, text, _VERIFIED)
                return self._by_hash[text]
        _remember(self._unknown, digest, None, _UNKNOWN)
        return None


def distinct_salts(hashes: Iterable[str]) -> list[TokenHash]:
    """A hash of each salt and cost. Raises ValueError for what is no hash."""
    found = {(each.cost, each.salt): each for each in map(TokenHash.parse, hashes)}
    return list(found.values())


def _remember(known: OrderedDict[bytes, T], digest: bytes, value: T, most: int) -> None:
    known[digest] = value
    if len(known) > most:
        known.popitem(last=False)


def _presented(token: str) -> bytes:
    return hashlib.blake2b(_bytes(token), key=_KEY, digest_size=32).digest()


def _bytes(token: str) -> bytes:
    # Any text that a peer can send, half surrogates included.
    return token.encode(errors="surrogatepass")


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
