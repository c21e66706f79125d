"""ZMTP's mechanism CURVE (RFC 25, RFC 26): authentication by keys, and encrypted traffic.

    client                                   server
    HELLO     C', Box[0…](C'→S)         ──▶
                                        ◀──  WELCOME   Box[S', cookie](S→C')
    INITIATE  cookie, Box[C, vouch,     ──▶
              metadata](C'→S')
                                        ◀──  READY     Box[metadata](S'→C')
    MESSAGE   Box[flags, body]          ◀─▶  MESSAGE

C and S are the permanent public keys of client and server; C' and S' are made for one connection.
Box[x](A→B) is x encrypted and authenticated with A's secret and B's public key (NaCl's crypto_box):
only the owners of A and B can make or open it.

- HELLO proves that the client knows S and owns C': its box opens with C' and the server's secret.
- WELCOME proves that the server owns S, and introduces S'.
- INITIATE carries C inside a box, so that an eavesdropper does not learn who connects. The vouch,
  Box[C', S](C→S'), proves that the client owns C and means this connection (C') to this server (S):
  a malicious server can't pass it on to another.
- All boxes from INITIATE on use C' and S' only. Both secrets are dropped with the connection, so a
  permanent secret that is stolen later does not decrypt recorded traffic.

A box's nonce is its purpose, a constant text, and either 16 random bytes or a number that only
grows. PyNaCl does the arithmetic and is imported when a connection begins; it comes with the extra
`curve`. The owner provides randomness: `random(n)` returns n unpredictable bytes.
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
    PURPOSE_CLIENT_MESSAGE,
    PURPOSE_HELLO,
    PURPOSE_INITIATE,
    PURPOSE_READY,
    PURPOSE_SERVER_MESSAGE,
    PURPOSE_VOUCH,
    PURPOSE_WELCOME,
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
    """Connects only to the owner of `server_key`, and authenticates with its own pair of keys."""

    name: ClassVar[str] = MECHANISM_CURVE
    as_server: ClassVar[bool] = False
    server_key: bytes
    secret_key: bytes
    random: Callable[[int], bytes]

    def __post_init__(self) -> None:
        _require_key(self.server_key)
        _require_key(self.secret_key)

    def begin(self, metadata: bytes) -> MechanismHandshake:
        """Makes the handshake of one connection. Raises ImportError without PyNaCl."""
        return _CurveClientHandshake(self, metadata)


class CurveServer(msgspec.Struct, frozen=True):
    """Accepts clients by `accept(public_key)`, asked after the client has proven the key."""

    name: ClassVar[str] = MECHANISM_CURVE
    as_server: ClassVar[bool] = True
    secret_key: bytes
    random: Callable[[int], bytes]
    accept: Callable[[bytes], bool]

    def __post_init__(self) -> None:
        _require_key(self.secret_key)

    def begin(self, metadata: bytes) -> MechanismHandshake:
        """Makes the handshake of one connection. Raises ImportError without PyNaCl."""
        return _CurveServerHandshake(self, metadata)


class _CurveHandshake(MechanismHandshake, Sealer):
    """Common to both sides: a key pair for this connection, nonces, and boxes.

    It is the connection's sealer, too: messages use the keys of the handshake and continue its
    nonces.
    """

    _sent_purpose: ClassVar[bytes]
    _received_purpose: ClassVar[bytes]

    def __init__(self, metadata: bytes, random: Callable[[int], bytes]) -> None:
        super().__init__()
        self.sealer = self
        self._nacl = _bindings()
        self._failure: type[Exception] = import_module("nacl.exceptions").CryptoError
        self._random = random
        self._metadata = metadata
        self._short_secret = random(KEY_SIZE)
        self._short_public: bytes = self._nacl.crypto_scalarmult_base(self._short_secret)
        # Computed once from C' and S', since each box would need this curve multiplication again.
        self._shared = b""
        # The numbers in the last nonces; both directions have their own.
        self._sent = 0
        self._received = 0

    def seal(self, body: bytes, *, more: bool = False, command: bool = False) -> bytes:
        # The flags are in the box: an eavesdropper can't distinguish parts, messages and commands.
        flags = bytes((more * SEALED_FLAG_MORE | command * SEALED_FLAG_COMMAND,))
        nonce = self._next_nonce()
        full_nonce = self._sent_purpose + nonce
        box: bytes = self._nacl.crypto_box_afternm(flags + body, full_nonce, self._shared)
        return nonce + box

    def unseal(self, sealed: bytes) -> tuple[bytes, bool, bool]:
        nonce = self._take_nonce(sealed[:SHORT_NONCE_SIZE])
        clear = self._open(self._received_purpose, nonce, sealed[SHORT_NONCE_SIZE:])
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
        # One message for all failures: which check failed is nobody's business outside.
        try:
            return opener(*arguments)
        except self._failure:
            raise MalformedFrame("a box that does not open with the agreed keys") from None

    def _agree(self, peer: bytes) -> None:
        """From here on boxes are between the keys of this connection, C' and S'."""
        self._shared = self._try(self._nacl.crypto_box_beforenm, peer, self._short_secret)

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(SHORT_NONCE_SIZE)

    def _take_nonce(self, nonce: bytes) -> bytes:
        """Raises MalformedFrame unless the number has grown: a recorded frame can't be repeated.

        It is stored before the box is opened. That is safe, since a box that does not open ends the
        connection.
        """
        number = int.from_bytes(nonce)
        if number <= self._received:
            raise MalformedFrame("a nonce that was used before")
        self._received = number
        return nonce


class _CurveClientHandshake(_CurveHandshake):
    _sent_purpose: ClassVar[bytes] = PURPOSE_CLIENT_MESSAGE
    _received_purpose: ClassVar[bytes] = PURPOSE_SERVER_MESSAGE

    def __init__(self, mechanism: CurveClient, metadata: bytes) -> None:
        super().__init__(metadata, mechanism.random)
        self._server_key = mechanism.server_key
        self._secret_key = mechanism.secret_key
        nonce = self._next_nonce()
        proof = self._nacl.crypto_box(
            bytes(HELLO_PROOF_SIZE),
            PURPOSE_HELLO + nonce,
            self._server_key,
            self._short_secret,
        )
        # The zeros make HELLO longer than WELCOME, so that a server can't be used to amplify
        # traffic to a forged address (RFC 26).
        body = CURVE_VERSION + bytes(HELLO_ZEROS_SIZE) + self._short_public + nonce + proof
        self.opening = serialize_command(COMMAND_HELLO, body)

    def receive(self, command: Command) -> bytes:
        if not self._shared:
            # Without a shared key only WELCOME can be next.
            expect(command, COMMAND_WELCOME)
            return self._on_welcome(command.body)
        expect(command, COMMAND_READY)
        nonce = self._take_nonce(command.body[:READY_BOX_OFFSET])
        clear = self._open(PURPOSE_READY, nonce, command.body[READY_BOX_OFFSET:])
        self.properties = parse_metadata(clear)
        return b""

    def _on_welcome(self, body: bytes) -> bytes:
        if len(body) != WELCOME_SIZE:
            raise MalformedFrame(f"WELCOME of {len(body)} bytes, not {WELCOME_SIZE}")
        nonce, box = body[:WELCOME_BOX_OFFSET], body[WELCOME_BOX_OFFSET:]
        # It opens only if the owner of `server_key` made it, for our C'.
        clear = self._open_with(PURPOSE_WELCOME, nonce, box, self._server_key, self._short_secret)
        server_short, cookie = clear[:KEY_SIZE], clear[KEY_SIZE:]
        self._agree(server_short)
        vouch_nonce = self._random(LONG_NONCE_SIZE)
        vouch = self._nacl.crypto_box(
            self._short_public + self._server_key,
            PURPOSE_VOUCH + vouch_nonce,
            server_short,
            self._secret_key,
        )
        public_key = self._nacl.crypto_scalarmult_base(self._secret_key)
        nonce = self._next_nonce()
        box = self._nacl.crypto_box_afternm(
            public_key + vouch_nonce + vouch + self._metadata,
            PURPOSE_INITIATE + nonce,
            self._shared,
        )
        # The cookie is the server's; we only return it.
        return serialize_command(COMMAND_INITIATE, cookie + nonce + box)


class _CurveServerHandshake(_CurveHandshake):
    _sent_purpose: ClassVar[bytes] = PURPOSE_SERVER_MESSAGE
    _received_purpose: ClassVar[bytes] = PURPOSE_CLIENT_MESSAGE

    def __init__(self, mechanism: CurveServer, metadata: bytes) -> None:
        super().__init__(metadata, mechanism.random)
        self._accept = mechanism.accept
        self._secret_key = mechanism.secret_key
        self._public_key = self._nacl.crypto_scalarmult_base(self._secret_key)
        self._client_short = b""
        # RFC 26 lets a server keep no state before INITIATE: it encrypts C' and its own secret into
        # the cookie and forgets them. We have a TCP connection to remember anyway, so our cookie is
        # random bytes, and only has to be the same in INITIATE.
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
        # The 64 zeros in it don't matter: that it opens is the proof.
        self._open_with(PURPOSE_HELLO, nonce, proof, client_short, self._secret_key)
        self._client_short = client_short
        # Random, not a number: the permanent key S makes boxes on many connections, whose numbers
        # would repeat.
        long_nonce = self._random(LONG_NONCE_SIZE)
        box = self._nacl.crypto_box(
            self._short_public + self._cookie,
            PURPOSE_WELCOME + long_nonce,
            client_short,
            self._secret_key,
        )
        return serialize_command(COMMAND_WELCOME, long_nonce + box)

    def _on_initiate(self, body: bytes) -> bytes:
        if body[:COOKIE_SIZE] != self._cookie:
            raise MalformedFrame("INITIATE with a cookie that is not ours")
        self._agree(self._client_short)
        nonce = self._take_nonce(body[INITIATE_NONCE_OFFSET:INITIATE_BOX_OFFSET])
        clear = self._open(PURPOSE_INITIATE, nonce, body[INITIATE_BOX_OFFSET:])
        metadata_at = KEY_SIZE + VOUCH_SIZE
        if len(clear) < metadata_at:
            raise MalformedFrame("INITIATE without a key and a vouch")
        client_key, vouch = clear[:KEY_SIZE], clear[KEY_SIZE:metadata_at]
        vouch_nonce, vouch_box = vouch[:LONG_NONCE_SIZE], vouch[LONG_NONCE_SIZE:]
        vouched = self._open_with(
            PURPOSE_VOUCH, vouch_nonce, vouch_box, client_key, self._short_secret
        )
        # C must vouch for the C' of this connection and for our S (see above).
        if vouched != self._client_short + self._public_key:
            raise MalformedFrame("a vouch for other keys")
        if not self._accept(client_key):
            raise ConnectionRejected(f"the key {encode_key(client_key)} may not come in")
        self.public_key = client_key
        self.properties = parse_metadata(clear[metadata_at:])
        nonce = self._next_nonce()
        box = self._nacl.crypto_box_afternm(self._metadata, PURPOSE_READY + nonce, self._shared)
        return serialize_command(COMMAND_READY, nonce + box)


# ------------------------------------------------------------------------------------------ keys


def public_key_of(secret_key: bytes) -> bytes:
    """The public key that belongs to a secret key. Raises ValueError, ImportError."""
    _require_key(secret_key)
    public: bytes = _bindings().crypto_scalarmult_base(secret_key)
    return public


_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
# Four bytes are five digits to the base of 85.
_WORD_SIZE: Final = 4
_WORD_CHARACTERS: Final = 5
_KEY_CHARACTERS: Final = KEY_SIZE // _WORD_SIZE * _WORD_CHARACTERS


def encode_key(key: bytes) -> str:
    """A key as text: 40 characters of Z85 (RFC 32), as ZeroMQ's tools print it."""
    _require_key(key)
    text = []
    base, powers = len(_Z85), range(_WORD_CHARACTERS - 1, -1, -1)
    for start in range(0, KEY_SIZE, _WORD_SIZE):
        word = int.from_bytes(key[start : start + _WORD_SIZE])
        text += [_Z85[word // base**power % base] for power in powers]
    return "".join(text)


def decode_key(text: str) -> bytes:
    """The key of a text that `encode_key` made. Raises ValueError."""
    if len(text) != _KEY_CHARACTERS:
        raise ValueError(f"a key is written with {_KEY_CHARACTERS} characters, not {len(text)}")
    key = b""
    for start in range(0, _KEY_CHARACTERS, _WORD_CHARACTERS):
        word = 0
        for character in text[start : start + _WORD_CHARACTERS]:
            digit = _Z85.find(character)
            if digit < 0:
                raise ValueError(f"{character!r} does not occur in a key")
            word = word * len(_Z85) + digit
        if word >> 8 * _WORD_SIZE:
            raise ValueError("five characters of a key that mean more than four bytes")
        key += word.to_bytes(_WORD_SIZE)
    return key


def _require_key(key: bytes) -> None:
    if len(key) != KEY_SIZE:
        raise ValueError(f"a key has {KEY_SIZE} bytes, not {len(key)}; see decode_key")


def _bindings() -> ModuleType:
    try:
        return import_module("nacl.bindings")
    except ImportError as error:
        raise ImportError("CURVE needs PyNaCl: pip install 'crosswire[curve]'") from error
