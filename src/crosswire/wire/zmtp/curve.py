"""ZMTP's mechanism CURVE (RFC 25, 26): authentication by keys, and sealed traffic.

    client                                   server
    HELLO     C', Box[0…](C'→S)         ──▶
                                        ◀──  WELCOME   Box[S', cookie](S→C')
    INITIATE  cookie, Box[C, vouch,     ──▶
              metadata](C'→S')
                                        ◀──  READY     Box[metadata](S'→C')
    MESSAGE   Box[flags, body]          ◀─▶  MESSAGE

Capitals are public keys: C and S last, C' and S' are made for one connection; the vouch,
Box[C', S](C→S'), proves that the client has C's other half. A box's nonce is a text for its purpose
and either 16 random bytes or a number that only grows. PyNaCl does the arithmetic and is imported
when a connection begins; it comes with the extra `curve`. Randomness is the owner's: `random(n)`
gives n bytes that nobody can guess.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import ClassVar, Final

import msgspec

from crosswire.errors import ConnectionRejected, MalformedFrame
from crosswire.wire.zmtp.frames import Command, parse_metadata, serialize_command
from crosswire.wire.zmtp.layout import (
    COMMAND_HELLO,
    COMMAND_INITIATE,
    COMMAND_READY,
    COMMAND_WELCOME,
    COOKIE_SIZE,
    CURVE_VERSION,
    HELLO_BOX_OFFSET,
    HELLO_KEY_OFFSET,
    HELLO_NONCE_OFFSET,
    HELLO_PROOF_SIZE,
    HELLO_SIZE,
    HELLO_ZEROS_SIZE,
    INITIATE_BOX_OFFSET,
    INITIATE_NONCE_OFFSET,
    KEY_SIZE,
    LONG_NONCE_SIZE,
    MECHANISM_CURVE,
    READY_BOX_OFFSET,
    SEALED_FLAG_COMMAND,
    SEALED_FLAG_MORE,
    SEALED_FLAGS_SIZE,
    SHORT_NONCE_SIZE,
    VOUCH_SIZE,
    WELCOME_BOX_OFFSET,
    WELCOME_SIZE,
)
from crosswire.wire.zmtp.mechanisms import MechanismHandshake, Sealer, expect

__all__ = ["CurveClient", "CurveServer", "decode_key", "encode_key", "public_key_of"]


class CurveClient(msgspec.Struct, frozen=True):
    """Knows the server by `server_key`; says who it is with its own pair of keys."""

    name: ClassVar[str] = MECHANISM_CURVE
    as_server: ClassVar[bool] = False
    server_key: bytes
    secret_key: bytes
    random: Callable[[int], bytes]

    def __post_init__(self) -> None:
        _require_key(self.server_key)
        _require_key(self.secret_key)

    def begin(self, metadata: bytes) -> MechanismHandshake:
        return _CurveClientHandshake(self, metadata)


class CurveServer(msgspec.Struct, frozen=True):
    """`accept(public_key)` decides which client may come in."""

    name: ClassVar[str] = MECHANISM_CURVE
    as_server: ClassVar[bool] = True
    secret_key: bytes
    random: Callable[[int], bytes]
    accept: Callable[[bytes], bool]

    def __post_init__(self) -> None:
        _require_key(self.secret_key)

    def begin(self, metadata: bytes) -> MechanismHandshake:
        return _CurveServerHandshake(self, metadata)


class _CurveHandshake(MechanismHandshake, Sealer):
    """What both sides have: a key pair for this connection, and boxes once they agree."""

    _ours: ClassVar[bytes]
    _theirs: ClassVar[bytes]

    def __init__(self, metadata: bytes, random: Callable[[int], bytes]) -> None:
        super().__init__()
        self.sealer = self
        self._nacl = _bindings()
        self._failure: type[Exception] = import_module("nacl.exceptions").CryptoError
        self._random = random
        self._metadata = metadata
        self._short_secret = random(KEY_SIZE)
        self._short_public: bytes = self._nacl.crypto_scalarmult_base(self._short_secret)
        self._shared = b""
        self._sent = 0
        self._received = 0

    def seal(self, body: bytes, *, more: bool = False, command: bool = False) -> bytes:
        flags = bytes((more * SEALED_FLAG_MORE | command * SEALED_FLAG_COMMAND,))
        nonce = self._next_nonce()
        box: bytes = self._nacl.crypto_box_afternm(flags + body, self._ours + nonce, self._shared)
        return nonce + box

    def unseal(self, sealed: bytes) -> tuple[bytes, bool, bool]:
        clear = self._open(
            self._theirs, self._take_nonce(sealed[:SHORT_NONCE_SIZE]), sealed[SHORT_NONCE_SIZE:]
        )
        if not clear:
            raise MalformedFrame("a sealed frame without flags")
        flags, body = clear[0], clear[SEALED_FLAGS_SIZE:]
        return body, bool(flags & SEALED_FLAG_MORE), bool(flags & SEALED_FLAG_COMMAND)

    def _open(self, purpose: bytes, nonce: bytes, box: bytes) -> bytes:
        """Open a box between the keys of this connection. Raises MalformedFrame."""
        return self._try(self._nacl.crypto_box_open_afternm, box, purpose + nonce, self._shared)

    def _open_with(
        self, purpose: bytes, nonce: bytes, box: bytes, public: bytes, secret: bytes
    ) -> bytes:
        """Open a box between any two keys. Raises MalformedFrame."""
        return self._try(self._nacl.crypto_box_open, box, purpose + nonce, public, secret)

    def _try(self, opener: Callable[..., bytes], *arguments: bytes) -> bytes:
        try:
            return opener(*arguments)
        except self._failure:
            raise MalformedFrame("a box that does not open with the agreed keys") from None

    def _agree(self, peer: bytes) -> None:
        """From here on boxes are between both sides' keys of this connection."""
        self._shared = self._try(self._nacl.crypto_box_beforenm, peer, self._short_secret)

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(SHORT_NONCE_SIZE)

    def _take_nonce(self, nonce: bytes) -> bytes:
        """Numbers only grow, so that nothing can be repeated."""
        number = int.from_bytes(nonce)
        if number <= self._received:
            raise MalformedFrame("a nonce that was used before")
        self._received = number
        return nonce


class _CurveClientHandshake(_CurveHandshake):
    _ours: ClassVar[bytes] = b"CurveZMQMESSAGEC"
    _theirs: ClassVar[bytes] = b"CurveZMQMESSAGES"

    def __init__(self, mechanism: CurveClient, metadata: bytes) -> None:
        super().__init__(metadata, mechanism.random)
        self._server_key = mechanism.server_key
        self._secret_key = mechanism.secret_key
        nonce = self._next_nonce()
        proof = self._nacl.crypto_box(
            bytes(HELLO_PROOF_SIZE),
            b"CurveZMQHELLO---" + nonce,
            self._server_key,
            self._short_secret,
        )
        # The 72 zeros make HELLO longer than its answer: nothing to gain from a forged address.
        body = CURVE_VERSION + bytes(HELLO_ZEROS_SIZE) + self._short_public + nonce + proof
        self.opening = serialize_command(COMMAND_HELLO, body)

    def receive(self, command: Command) -> bytes:
        if not self._shared:
            expect(command, COMMAND_WELCOME)
            return self._on_welcome(command.body)
        expect(command, COMMAND_READY)
        nonce = self._take_nonce(command.body[:READY_BOX_OFFSET])
        clear = self._open(b"CurveZMQREADY---", nonce, command.body[READY_BOX_OFFSET:])
        self.properties = parse_metadata(clear)
        return b""

    def _on_welcome(self, body: bytes) -> bytes:
        if len(body) != WELCOME_SIZE:
            raise MalformedFrame(f"WELCOME of {len(body)} bytes, not {WELCOME_SIZE}")
        nonce, box = body[:WELCOME_BOX_OFFSET], body[WELCOME_BOX_OFFSET:]
        clear = self._open_with(b"WELCOME-", nonce, box, self._server_key, self._short_secret)
        server_short, cookie = clear[:KEY_SIZE], clear[KEY_SIZE:]
        self._agree(server_short)
        vouch_nonce = self._random(LONG_NONCE_SIZE)
        vouch = self._nacl.crypto_box(
            self._short_public + self._server_key,
            b"VOUCH---" + vouch_nonce,
            server_short,
            self._secret_key,
        )
        public_key = self._nacl.crypto_scalarmult_base(self._secret_key)
        nonce = self._next_nonce()
        box = self._nacl.crypto_box_afternm(
            public_key + vouch_nonce + vouch + self._metadata,
            b"CurveZMQINITIATE" + nonce,
            self._shared,
        )
        return serialize_command(COMMAND_INITIATE, cookie + nonce + box)


class _CurveServerHandshake(_CurveHandshake):
    _ours: ClassVar[bytes] = b"CurveZMQMESSAGES"
    _theirs: ClassVar[bytes] = b"CurveZMQMESSAGEC"

    def __init__(self, mechanism: CurveServer, metadata: bytes) -> None:
        super().__init__(metadata, mechanism.random)
        self._accept = mechanism.accept
        self._secret_key = mechanism.secret_key
        self._public_key = self._nacl.crypto_scalarmult_base(self._secret_key)
        self._client_short = b""
        # The state is kept here and not in the cookie, which need only be one of a kind.
        self._cookie = self._random(COOKIE_SIZE)

    def receive(self, command: Command) -> bytes:
        if not self._client_short:
            expect(command, COMMAND_HELLO)
            return self._on_hello(command.body)
        expect(command, COMMAND_INITIATE)
        return self._on_initiate(command.body)

    def _on_hello(self, body: bytes) -> bytes:
        if len(body) != HELLO_SIZE:
            raise MalformedFrame(f"HELLO of {len(body)} bytes, not {HELLO_SIZE}")
        if not body.startswith(CURVE_VERSION):
            raise MalformedFrame(f"version {body[0]}.{body[1]} of CURVE, not 1.0")
        client_short = body[HELLO_KEY_OFFSET:HELLO_NONCE_OFFSET]
        nonce, proof = body[HELLO_NONCE_OFFSET:HELLO_BOX_OFFSET], body[HELLO_BOX_OFFSET:]
        self._take_nonce(nonce)
        self._open_with(b"CurveZMQHELLO---", nonce, proof, client_short, self._secret_key)
        self._client_short = client_short
        long_nonce = self._random(LONG_NONCE_SIZE)
        box = self._nacl.crypto_box(
            self._short_public + self._cookie,
            b"WELCOME-" + long_nonce,
            client_short,
            self._secret_key,
        )
        return serialize_command(COMMAND_WELCOME, long_nonce + box)

    def _on_initiate(self, body: bytes) -> bytes:
        if body[:COOKIE_SIZE] != self._cookie:
            raise MalformedFrame("INITIATE with a cookie that is not ours")
        self._agree(self._client_short)
        nonce = self._take_nonce(body[INITIATE_NONCE_OFFSET:INITIATE_BOX_OFFSET])
        clear = self._open(b"CurveZMQINITIATE", nonce, body[INITIATE_BOX_OFFSET:])
        metadata_at = KEY_SIZE + VOUCH_SIZE
        if len(clear) < metadata_at:
            raise MalformedFrame("INITIATE without a key and a vouch")
        client_key, vouch = clear[:KEY_SIZE], clear[KEY_SIZE:metadata_at]
        vouch_nonce, vouch_box = vouch[:LONG_NONCE_SIZE], vouch[LONG_NONCE_SIZE:]
        vouched = self._open_with(
            b"VOUCH---", vouch_nonce, vouch_box, client_key, self._short_secret
        )
        if vouched != self._client_short + self._public_key:
            raise MalformedFrame("a vouch for other keys")
        if not self._accept(client_key):
            raise ConnectionRejected(f"the key {encode_key(client_key)} may not come in")
        self.public_key = client_key
        self.properties = parse_metadata(clear[metadata_at:])
        nonce = self._next_nonce()
        box = self._nacl.crypto_box_afternm(
            self._metadata, b"CurveZMQREADY---" + nonce, self._shared
        )
        return serialize_command(COMMAND_READY, nonce + box)


# ------------------------------------------------------------------------------------------ keys


def public_key_of(secret_key: bytes) -> bytes:
    """The public half of a pair of keys."""
    _require_key(secret_key)
    public: bytes = _bindings().crypto_scalarmult_base(secret_key)
    return public


_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


def encode_key(key: bytes) -> str:
    """A key as ZeroMQ writes it down (Z85, RFC 32): 40 characters."""
    _require_key(key)
    text = []
    for start in range(0, KEY_SIZE, 4):
        word = int.from_bytes(key[start : start + 4])
        text += [_Z85[word // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)


def decode_key(text: str) -> bytes:
    """A key from its 40 characters. Raises ValueError."""
    if len(text) != 40:
        raise ValueError(f"a key is written with 40 characters, not {len(text)}")
    key = b""
    for start in range(0, 40, 5):
        word = 0
        for character in text[start : start + 5]:
            digit = _Z85.find(character)
            if digit < 0:
                raise ValueError(f"{character!r} does not occur in a key")
            word = word * 85 + digit
        if word >= 2**32:
            raise ValueError("five characters of a key that mean more than four bytes")
        key += word.to_bytes(4)
    return key


def _require_key(key: bytes) -> None:
    if len(key) != KEY_SIZE:
        raise ValueError(f"a key has {KEY_SIZE} bytes, not {len(key)}; see decode_key")


def _bindings() -> ModuleType:
    try:
        return import_module("nacl.bindings")
    except ImportError as error:
        raise ImportError("CURVE needs PyNaCl: pip install 'crosswire[curve]'") from error
