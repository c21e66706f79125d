"""Extensions: what each side offers, what comes of it, and a vendor's own.

1. The client says what it requires and suggests          `Offer.proposal`
2. The server says what it requires and suggests          `answer`
3. The client repeats its own with all that will be used  `conclude`
   … and from that list both know the numbers             `agree`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Final

import msgspec

from crosswire.errors import IncompatiblePeer
from crosswire.wire.contract import Event
from crosswire.wire.micromsg2.frames import Handshake
from crosswire.wire.micromsg2.layout import (
    MAX_EXTENSIONS_SIZE,
    MAX_IDENTITY_SIZE,
    MAX_WINDOW,
    VERSION,
)
from crosswire.wire.micromsg2.values import Extension, is_field, serialize_extensions

__all__ = [
    "ACK",
    "AUTH",
    "BATCH_ACK",
    "DOTNET",
    "JSON",
    "KNOWN",
    "PUB_SUB",
    "Agreement",
    "Offer",
    "VendorExtension",
    "agree",
    "answer",
    "batch_ack",
    "conclude",
    "token",
]

ACK: Final = "ack"
BATCH_ACK: Final = "batch-ack"
JSON: Final = "json"
DOTNET: Final = "dotnet"
PUB_SUB: Final = "pub-sub"
AUTH: Final = "x-auth"

KNOWN: Final = frozenset({ACK, BATCH_ACK, JSON, DOTNET, PUB_SUB, AUTH})
"""What this connection implements by itself."""

_DEFAULT_COUNT: Final = 10


class VendorExtension(ABC):
    """A vendor's extension at work on one connection. It owns the frames of its number.

    Derive from it, give it a `name` that starts with `x-`, and list the class in `Offer.vendor`.
    It is made when both sides have agreed on it, with the properties of the final handshake; `send`
    queues a frame. No clock, socket or log in here either: give such things to the owner as events.
    """

    name: ClassVar[str]

    def __init__(self, properties: Mapping[str, str], send: Callable[[bytes], None]) -> None:
        self.properties = properties
        self.send = send

    @abstractmethod
    def receive(self, payload: bytes) -> Iterable[Event]:
        """What the owner is told of a frame. Raise RemoteProtocolError to end the connection."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one side brings into the handshake.

    `required` and `optional` are what it says; `supported` are the names that it goes along with
    when only the peer asks. What it says itself, and its vendor extensions, it supports as well.
    """

    identity: str = "crosswire"
    required: tuple[Extension, ...] = ()
    optional: tuple[Extension, ...] = ()
    supported: frozenset[str] = KNOWN
    vendor: tuple[type[VendorExtension], ...] = ()

    def __post_init__(self) -> None:
        if not self.identity.isascii() or len(self.identity) > MAX_IDENTITY_SIZE:
            raise ValueError(
                f"an identity has at most {MAX_IDENTITY_SIZE} characters, all of them ASCII"
            )
        for extension in (*self.required, *self.optional):
            if not all(map(is_field, (extension.name, *extension.properties))):
                raise ValueError(f"{extension!r}: names have lower-case letters, digits and -")
            _count(extension)
        for listed in (self.required, self.optional):
            if len(serialize_extensions(listed)) > MAX_EXTENSIONS_SIZE:
                raise ValueError(f"extensions that take more than {MAX_EXTENSIONS_SIZE} bytes")
        for kind in self.vendor:
            if not kind.name.startswith("x-") or not is_field(kind.name):
                raise ValueError(f"a vendor's extension is named x-…, not {kind.name!r}")

    def supports(self, name: str) -> bool:
        name = name.lower()
        names = [extension.name for extension in (*self.required, *self.optional)]
        return name in self.supported or name in names or name in [own.name for own in self.vendor]

    def proposal(self) -> Handshake:
        return Handshake(*VERSION, 0, self.identity, self.required, self.optional)


class Agreement(msgspec.Struct, frozen=True):
    """What both sides use: `extensions[0]` has number 1."""

    extensions: tuple[Extension, ...] = ()
    window: int | None = None

    def numbers(self) -> dict[str, int]:
        """By name; where one is named twice, its first number."""
        numbers: dict[str, int] = {}
        for number, extension in enumerate(self.extensions, 1):
            numbers.setdefault(extension.name.lower(), number)
        return numbers


def batch_ack(max_count: int) -> Extension:
    """Acknowledgements with a window of so many frames."""
    return Extension(BATCH_ACK, {"max-count": str(max_count)})


def token(text: str) -> Extension:
    """Who we are, for a peer that asks."""
    return Extension(AUTH, {"token": text})


# ----------------------------------------------------------------------------------- negotiation


def answer(offer: Offer, request: Handshake) -> Handshake:
    """The server's reply to a client. Raises IncompatiblePeer."""
    _require_support(offer, request.required)
    _check_counts(request.optional)
    required = {extension.name for extension in offer.required}
    own = _by_name(offer.optional)
    asked = _by_name(request.required)
    suggested: dict[str, Extension] = {}
    for extension in request.optional:
        name = extension.name.lower()
        if offer.supports(name) and name not in required:
            suggested[name] = _echo(_merged(extension, own.get(name)))
    for name, extension in own.items():
        if name not in suggested and name not in required and name not in asked:
            suggested[name] = extension
    if BATCH_ACK in own and BATCH_ACK in asked:
        # The client will have it; all that can still be said is that its window is too wide.
        suggested[BATCH_ACK] = _merged(asked[BATCH_ACK], own[BATCH_ACK])
    return Handshake(*VERSION, 0, offer.identity, offer.required, tuple(suggested.values()))


def conclude(offer: Offer, reply: Handshake) -> Handshake:
    """The client's last word: all that will be used. Raises IncompatiblePeer."""
    _require_support(offer, reply.required)
    _check_counts(reply.optional)
    own = _by_name((*offer.optional, *offer.required))
    theirs = _by_name((*reply.optional, *reply.required))
    required: dict[str, Extension] = {}
    for extension in (*offer.required, *reply.required):
        name = extension.name.lower()
        required[name] = _merged(own.get(name, extension), theirs.get(name))
    optional: dict[str, Extension] = {}
    for extension in (*offer.optional, *reply.optional):
        name = extension.name.lower()
        if name in theirs and name not in required and offer.supports(name):
            optional[name] = _merged(own.get(name, extension), theirs[name])
    final = tuple(required.values()), tuple(optional.values())
    return Handshake(*VERSION, 0, offer.identity, *final)


def agree(offer: Offer, final: Handshake) -> Agreement:
    """What the final client handshake says. Raises IncompatiblePeer if that can't be used."""
    extensions = (*final.required, *final.optional)
    _require_support(offer, extensions)
    named = _by_name(extensions)
    missing = [item.name for item in offer.required if item.name not in named]
    if missing:
        raise IncompatiblePeer(f"required but left out: {', '.join(missing)}")
    window = None
    if BATCH_ACK in named:
        window = _count(named[BATCH_ACK]) or _DEFAULT_COUNT
    elif ACK in named:
        window = 1
    return Agreement(extensions, window)


def _by_name(extensions: Iterable[Extension]) -> dict[str, Extension]:
    return {extension.name.lower(): extension for extension in extensions}


def _require_support(offer: Offer, extensions: Iterable[Extension]) -> None:
    extensions = tuple(extensions)
    missing = [item.name for item in extensions if not offer.supports(item.name)]
    if missing:
        raise IncompatiblePeer(f"not supported: {', '.join(missing)}")
    _check_counts(extensions)


def _check_counts(extensions: Iterable[Extension]) -> None:
    for extension in extensions:
        try:
            _count(extension)
        except ValueError as error:
            raise IncompatiblePeer(str(error)) from None


def _count(extension: Extension) -> int | None:
    """batch-ack's window, if it says one; `count` is read as well.

    Raises ValueError.
    """
    if extension.name.lower() != BATCH_ACK:
        return None
    for key, value in extension.properties.items():
        if key.lower() in ("max-count", "count"):
            digits = value.isascii() and value.isdigit() and len(value) < 10
            if not digits or not 1 <= int(value) <= MAX_WINDOW:
                raise ValueError(f"batch-ack's max-count is 1 to {MAX_WINDOW}")
            return int(value)
    return None


def _merged(extension: Extension, other: Extension | None) -> Extension:
    """The first, with the narrower of two windows where both say one."""
    if other is None or extension.name.lower() != BATCH_ACK:
        return extension
    counts = [count for item in (extension, other) if (count := _count(item))]
    return batch_ack(min(counts)) if counts else extension


def _echo(extension: Extension) -> Extension:
    """A token is not said back."""
    return Extension(extension.name) if extension.name.lower() == AUTH else extension
