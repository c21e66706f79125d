"""Every exception of Crosswire.

CrosswireError
├── LocalProtocolError          our side asked for what the protocol does not allow now
├── RemoteProtocolError         the peer broke the protocol
│   ├── FrameError              … in bytes that can be pointed at
│   │   ├── MalformedFrame      not laid out as the protocol asks
│   │   ├── UnknownFrame        a type or an enumeration value that nobody defined
│   │   └── FrameTooLarge       announces more than a limit allows
│   ├── UnexpectedFrame         well formed, but not allowed in this state
│   ├── UnsupportedVersion      speaks a version that we do not
│   ├── InvalidIdentifier       answers what was never asked
│   ├── InvalidRequest          asks in a way that ends the connection
│   ├── PeerTimeout             was silent for too long
│   └── PeerError               said goodbye with an error of its own
├── ServiceUnavailable          the hub is draining or has no room for the connection
├── DecoderStateError           saved decoder state that is damaged or of another version
├── UnknownProtocol             a protocol name that is not one of ours
└── ClientError                 what a caller of `crosswire.clients` sees
    ├── ConnectFailed           nobody answered, or the handshake failed
    ├── ConnectionLost          the connection ended while something was under way
    ├── RequestTimeout          no response in time
    └── RequestFailed           the other side answered with a failure
"""

__all__ = [
    "ClientError",
    "ConnectFailed",
    "ConnectionLost",
    "CrosswireError",
    "DecoderStateError",
    "FrameError",
    "FrameTooLarge",
    "InvalidIdentifier",
    "InvalidRequest",
    "LocalProtocolError",
    "MalformedFrame",
    "PeerError",
    "PeerTimeout",
    "RemoteProtocolError",
    "RequestFailed",
    "RequestTimeout",
    "ServiceUnavailable",
    "UnexpectedFrame",
    "UnknownFrame",
    "UnknownProtocol",
    "UnsupportedVersion",
]


class CrosswireError(Exception):
    """Root of all that Crosswire raises on purpose."""


class LocalProtocolError(CrosswireError):
    """Our side asked for what the protocol does not allow now; nothing was sent."""


class RemoteProtocolError(CrosswireError):
    """The peer broke the protocol; `reason` says how."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FrameError(RemoteProtocolError):
    """A violation in the bytes [offset, offset + length) of one direction.

    `resumable` says that the frame's end is known, so that a decoder can go on behind it. Where it
    is not, `length` counts what had been read when the violation showed.
    """

    code = "frame"

    def __init__(
        self, reason: str, *, offset: int = 0, length: int = 0, resumable: bool = False
    ) -> None:
        super().__init__(reason)
        self.offset = offset
        self.length = length
        self.resumable = resumable

    def __str__(self) -> str:
        return f"{self.reason} (at byte {self.offset})"


class MalformedFrame(FrameError):
    """Not laid out as the protocol asks."""

    code = "malformed"


class UnknownFrame(FrameError):
    """A type or an enumeration value that the protocol does not define."""

    code = "unknown"


class FrameTooLarge(FrameError):
    """Announces more than a limit allows; refused before any of it is kept."""

    code = "limit"


class UnexpectedFrame(RemoteProtocolError):
    """A well-formed frame that the state of the connection does not allow."""


class UnsupportedVersion(RemoteProtocolError):
    """The peer speaks a version of the protocol that we do not."""


class InvalidIdentifier(RemoteProtocolError):
    """A response that answers no request, or not the one whose turn it is."""


class InvalidRequest(RemoteProtocolError):
    """A request that cannot be answered, only refused by ending the connection."""


class PeerTimeout(RemoteProtocolError):
    """The peer did not do in time what the protocol asks of it."""


class PeerError(RemoteProtocolError):
    """The peer ended the connection with an error message of its own."""

    def __init__(self, reason: str, *, code: int | str = 0) -> None:
        super().__init__(reason)
        self.code = code


class ServiceUnavailable(CrosswireError):
    """The hub is draining, or has no room for another connection."""


class DecoderStateError(CrosswireError):
    """Saved decoder state that is damaged, or was written by another version."""


class UnknownProtocol(CrosswireError):
    """A protocol name that is not one of ours."""


class ClientError(CrosswireError):
    """What a caller of `crosswire.clients` has to expect."""


class ConnectFailed(ClientError):
    """Nobody answered, or the handshake failed; the cause is chained."""


class ConnectionLost(ClientError):
    """The connection ended while something was under way: it may or may not have been done."""


class RequestTimeout(ClientError):
    """No response came in time: the request may or may not have been carried out."""


class RequestFailed(ClientError):
    """The other side answered with a failure; `code` is the one it gave, `data` its JSON."""

    def __init__(self, code: str, description: str, *, data: bytes = b"{}") -> None:
        super().__init__(f"{code}: {description}" if code else description)
        self.code = code
        self.description = description
        self.data = data
