"""Extensions: how both sides negotiate them, and the base of a vendor's own.

1. The client lists what it requires and suggests         `Offer.proposal`
2. The server lists what it requires and suggests         `answer`
3. The client repeats its own with all that will be used  `conclude`
   … and the order of that list gives the numbers         `agree`

(specification, "Handshake", "Handshake completed")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Final

import msgspec

from crosswire.errors import IncompatiblePeer, MalformedFrame
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
    "REFUSE",
    "Agreement",
    "Offer",
    "VendorExtension",
    "agree",
    "answer",
    "batch_ack",
    "conclude",
    "json_fault",
    "parse_refusal",
    "refusal",
    "token",
]

ACK: Final = "ack"
BATCH_ACK: Final = "batch-ack"
JSON: Final = "json"
DOTNET: Final = "dotnet"
PUB_SUB: Final = "pub-sub"
AUTH: Final = "x-auth"
REFUSE: Final = "x-refuse"
"""Crosswire's own: a frame names a message, by its sequence number, that is refused and why. The
acknowledgement that covers it then refuses it instead of settling it."""

KNOWN: Final = frozenset({ACK, BATCH_ACK, JSON, DOTNET, PUB_SUB, AUTH})
"""The extensions that a connection implements."""

_REASON_CHARACTERS: Final = 1000
_DEFAULT_WINDOW: Final = 10
"""Of batch-ack without a count (specification, "batch-ack")."""


class VendorExtension(ABC):
    """A vendor's extension on one connection. It receives the frames with its number.

    Derive from it, set a `name` that starts with `x-`, and list the class in `Offer.vendor`. It is
    created when both sides have agreed on it, with the properties of the final handshake; `send`
    queues a frame. It has no clock, socket or log either: report such things as events.
    """

    name: ClassVar[str]

    def __init__(self, properties: Mapping[str, str], send: Callable[[bytes], None]) -> None:
        self.properties = properties
        self.send = send

    @abstractmethod
    def receive(self, payload: bytes) -> Iterable[Event]:
        """The events of a received frame. Raise RemoteProtocolError to end the connection."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One side's part in the handshake.

    It lists `required` and `optional`; `supported` are the names that it accepts if only the peer
    lists them. Those it lists, and its vendor extensions, are supported as well.
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
        """Whether an extension of this name can be used, in any case of letters."""
        name = name.lower()
        names = [extension.name for extension in (*self.required, *self.optional)]
        return name in self.supported or name in names or name in [own.name for own in self.vendor]

    def proposal(self) -> Handshake:
        """The client's first handshake."""
        return Handshake(*VERSION, 0, self.identity, self.required, self.optional)


class Agreement(msgspec.Struct, frozen=True):
    """The extensions that both sides use, of which `extensions[0]` has number 1; the window."""

    extensions: tuple[Extension, ...] = ()
    window: int | None = None

    def numbers(self) -> dict[str, int]:
        """Numbers by name; of a name that is listed twice, the first."""
        numbers: dict[str, int] = {}
        for number, extension in enumerate(self.extensions, 1):
            numbers.setdefault(extension.name.lower(), number)
        return numbers


def refusal(sequence: int, reason: str) -> bytes:
    """The payload of a frame of `x-refuse`: the sequence number, and the reason as UTF-8."""
    return sequence.to_bytes(2) + reason[:_REASON_CHARACTERS].encode()


def parse_refusal(payload: bytes) -> tuple[int, str]:
    """Sequence number and reason. Raises MalformedFrame."""
    if len(payload) < 2:
        raise MalformedFrame(f"a refusal of {len(payload)} bytes")
    reason = payload[2:].decode(errors="replace")
    return int.from_bytes(payload[:2]), reason[:_REASON_CHARACTERS]


def batch_ack(max_count: int) -> Extension:
    """The extension for acknowledgements with a window of `max_count` frames."""
    return Extension(BATCH_ACK, {"max-count": str(max_count)})


def token(text: str) -> Extension:
    """The extension that carries a credential."""
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
        # The client requires it; suggesting it too is the only way to ask for a smaller window.
        suggested[BATCH_ACK] = _merged(asked[BATCH_ACK], own[BATCH_ACK])
    return Handshake(*VERSION, 0, offer.identity, offer.required, tuple(suggested.values()))


def conclude(offer: Offer, reply: Handshake) -> Handshake:
    """The client's final handshake: all that will be used. Raises IncompatiblePeer."""
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
    """The agreement in the client's final handshake. Raises IncompatiblePeer."""
    extensions = (*final.required, *final.optional)
    _require_support(offer, extensions)
    named = _by_name(extensions)
    missing = [item.name for item in offer.required if item.name not in named]
    if missing:
        raise IncompatiblePeer(f"required but left out: {', '.join(missing)}")
    window = None
    if BATCH_ACK in named:
        window = _count(named[BATCH_ACK]) or _DEFAULT_WINDOW
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
    """batch-ack's window; None if it has none. The name `count` is read as well.

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
    """The first, with the smaller of two windows if both have one."""
    if other is None or extension.name.lower() != BATCH_ACK:
        return extension
    counts = [count for item in (extension, other) if (count := _count(item))]
    return batch_ack(min(counts)) if counts else extension


def _echo(extension: Extension) -> Extension:
    """A credential is not sent back."""
    return Extension(extension.name) if extension.name.lower() == AUTH else extension


# ------------------------------------------------------------------------------------------ json


def json_fault(payload: bytes) -> str:
    """Why a payload is not JSON, "" if it is. It is checked without building objects."""
    try:
        if not payload.isascii():
            payload.decode()
        msgspec.json.decode(payload, type=msgspec.Raw)
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason}"
    except msgspec.MsgspecError as error:
        return str(error)
    except RecursionError:
        return "nested too deep"
    return ""
