"""ZMTP's security mechanisms NULL and PLAIN, and the interface of all mechanisms.

A `Mechanism` is a setting: immutable, and shared by all connections that use it. `begin` makes the
`MechanismHandshake` of one connection, which takes commands and returns the bytes to send. It is
done when the peer's metadata is known; then messages pass through its `sealer`, if it has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec

from crosswire.errors import ConnectionRejected, MalformedFrame, UnexpectedFrame
from crosswire.wire.zmtp.frames import Command, parse_metadata, serialize_command
from crosswire.wire.zmtp.layout import (
    COMMAND_HELLO,
    COMMAND_INITIATE,
    COMMAND_READY,
    COMMAND_WELCOME,
    CREDENTIAL_LENGTH_SIZE,
    MAX_CREDENTIAL_SIZE,
    MECHANISM_NULL,
    MECHANISM_PLAIN,
)

__all__ = [
    "Mechanism",
    "MechanismHandshake",
    "NullMechanism",
    "PlainClient",
    "PlainServer",
    "Sealer",
]


class Mechanism(Protocol):
    """How two peers authenticate one another. `as_server` is the side that accepts or rejects."""

    name: ClassVar[str]
    as_server: ClassVar[bool]

    def begin(self, metadata: bytes) -> MechanismHandshake:
        """A new connection's handshake, which sends our `metadata`."""


class Sealer(ABC):
    """Encrypts and decrypts the frames of one connection."""

    @abstractmethod
    def seal(self, body: bytes, *, more: bool = False, command: bool = False) -> bytes:
        """The nonce and box of a frame, with its flags encrypted."""

    @abstractmethod
    def unseal(self, sealed: bytes) -> tuple[bytes, bool, bool]:
        """The body, whether more parts follow, whether it is a command. Raises MalformedFrame."""


class MechanismHandshake(ABC):
    """The mechanism's commands on one connection. `opening` is sent after both greetings."""

    opening: bytes = b""
    sealer: Sealer | None = None
    user: str | None = None
    public_key: bytes | None = None

    def __init__(self) -> None:
        self.properties: dict[str, bytes] | None = None

    @property
    def done(self) -> bool:
        """The peer's metadata is known; the last result of `receive` must still be sent."""
        return self.properties is not None

    @abstractmethod
    def receive(self, command: Command) -> bytes:
        """The bytes to answer with. Raises RemoteProtocolError for a violation, ConnectionRejected
        for a peer that is not accepted."""


def expect(command: Command, name: str) -> None:
    """Raises UnexpectedFrame for a command of another name."""
    if command.name != name:
        raise UnexpectedFrame(f"the command {command.name!r}, where {name} must come")


# ------------------------------------------------------------------------------------------ NULL


class NullMechanism(msgspec.Struct, frozen=True):
    """No security: both sides send READY."""

    name: ClassVar[str] = MECHANISM_NULL
    as_server: ClassVar[bool] = False

    def begin(self, metadata: bytes) -> MechanismHandshake:
        """Makes the handshake of one connection."""
        return _NullHandshake(metadata)


class _NullHandshake(MechanismHandshake):
    def __init__(self, metadata: bytes) -> None:
        super().__init__()
        self.opening = serialize_command(COMMAND_READY, metadata)

    def receive(self, command: Command) -> bytes:
        expect(command, COMMAND_READY)
        self.properties = parse_metadata(command.body)
        return b""


# ----------------------------------------------------------------------------------------- PLAIN


class PlainClient(msgspec.Struct, frozen=True):
    """Sends name and password in clear text (RFC 24): HELLO, WELCOME, INITIATE, READY."""

    name: ClassVar[str] = MECHANISM_PLAIN
    as_server: ClassVar[bool] = False
    username: str
    password: str

    def begin(self, metadata: bytes) -> MechanismHandshake:
        """Makes the handshake of one connection."""
        return _PlainClientHandshake(self, metadata)


class PlainServer(msgspec.Struct, frozen=True):
    """Accepts clients by `accept(username, password)`."""

    name: ClassVar[str] = MECHANISM_PLAIN
    as_server: ClassVar[bool] = True
    accept: Callable[[str, str], bool]

    def begin(self, metadata: bytes) -> MechanismHandshake:
        """Makes the handshake of one connection."""
        return _PlainServerHandshake(self, metadata)


class _PlainClientHandshake(MechanismHandshake):
    def __init__(self, mechanism: PlainClient, metadata: bytes) -> None:
        super().__init__()
        texts = [text.encode() for text in (mechanism.username, mechanism.password)]
        if any(len(text) > MAX_CREDENTIAL_SIZE for text in texts):
            raise ValueError(
                f"PLAIN carries names and passwords of up to {MAX_CREDENTIAL_SIZE} bytes"
            )
        self.opening = serialize_command(
            COMMAND_HELLO,
            b"".join(len(text).to_bytes(CREDENTIAL_LENGTH_SIZE) + text for text in texts),
        )
        self._metadata = metadata
        self._welcome = False

    def receive(self, command: Command) -> bytes:
        if not self._welcome:
            expect(command, COMMAND_WELCOME)
            self._welcome = True
            return serialize_command(COMMAND_INITIATE, self._metadata)
        expect(command, COMMAND_READY)
        self.properties = parse_metadata(command.body)
        return b""


class _PlainServerHandshake(MechanismHandshake):
    def __init__(self, mechanism: PlainServer, metadata: bytes) -> None:
        super().__init__()
        self._accept = mechanism.accept
        self._metadata = metadata

    def receive(self, command: Command) -> bytes:
        if self.user is None:
            expect(command, COMMAND_HELLO)
            user, password = self._read_hello(command.body)
            if not self._accept(user, password):
                raise ConnectionRejected(f"the user {user!r} is unknown or has another password")
            self.user = user
            return serialize_command(COMMAND_WELCOME)
        expect(command, COMMAND_INITIATE)
        self.properties = parse_metadata(command.body)
        return serialize_command(COMMAND_READY, self._metadata)

    @staticmethod
    def _read_hello(body: bytes) -> tuple[str, str]:
        head = CREDENTIAL_LENGTH_SIZE
        user_end = head + body[0] if body else 0
        user, rest = body[head:user_end], body[user_end:]
        if not body or not rest or len(rest) != head + rest[0]:
            raise MalformedFrame("HELLO does not hold a name and a password")
        try:
            return user.decode(), rest[head:].decode()
        except UnicodeDecodeError:
            raise MalformedFrame("a name or password that is not UTF-8") from None
