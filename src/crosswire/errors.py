"""Every exception of Crosswire.

CrosswireError
├── LocalProtocolError          our side asked for what the protocol does not allow now
│   ├── IdentifiersExhausted    … for one more conversation than the connection can number
│   └── TooLargeToSend          … for a message larger than the peer may be expected to take
├── RemoteProtocolError         the peer broke the protocol
│   ├── FrameError              … in bytes that can be pointed at
│   │   ├── MalformedFrame      not laid out as the protocol asks
│   │   │   └── ErrorInError    … in the peer's own goodbye
│   │   ├── UnknownFrame        a type or an enumeration value that nobody defined
│   │   ├── UnsupportedFrame    well formed, but of a kind that we don't serve
│   │   └── FrameTooLarge       announces more than a limit allows
│   ├── UnexpectedFrame         well formed, but not allowed in this state
│   ├── UnsupportedVersion      speaks a version that we do not
│   ├── IncompatiblePeer        is of a kind that ours does not go with
│   ├── InvalidHandshake        says in the handshake what can't be accepted
│   ├── LimitExceeded           has more under way than was agreed
│   ├── InvalidIdentifier       answers what was never asked
│   ├── InvalidRequest          asks in a way that ends the connection
│   ├── PeerTimeout             was silent for too long
│   └── PeerError               said goodbye with an error of its own
├── ConnectionRejected          we don't want this peer
├── ServiceUnavailable          the hub is draining or has no room for the connection
├── InternalError               something of ours failed: the connection ends with its goodbye
├── DecoderStateError           saved decoder state that is damaged or of another version
├── LinkStateError              a saved Relink link that is damaged or of another version
├── UnknownProtocol             a protocol name that is not one of ours
├── ConfigError                 settings that can't be used
├── BondError                   what `crosswire.bond` cannot read or write
│   ├── BondSyntaxError         … in a .bond file, at a line and column
│   ├── BondSchemaError         … in a schema: an unknown name, a contradiction
│   ├── BondDecodeError         … in bytes or JSON that somebody sent
│   └── BondEncodeError         … in a value that its schema does not allow
├── HubError                    what `crosswire.hub` and `crosswire.store` refuse or lose
│   ├── Forbidden               the peer may not do this with this destination
│   ├── InvalidDestination      a name that is no destination, or not one for this
│   ├── InvalidEnvelope         an envelope that can't be accepted
│   ├── InvalidFilter           a filter that can't be read
│   ├── InvalidSchedule         no interval and no cron expression that can be kept
│   ├── DestinationFull         a queue's or a service's limit is reached
│   ├── ClockJumped             the system's clock was set; what the hub made of it
│   ├── SubscriptionConflict    a subscription's name is in use with another pattern or filter
│   ├── UnknownMessage          an id, a schedule or a subscription that is not there
│   ├── HistoryMissing          messages that were there once, and that retention took
│   ├── StagingFull             no room for another staged attempt, or its turn has not come
│   ├── AttemptLost             a staged attempt that a commit counts on is not there, or not whole
│   ├── BatchConflict           a batch that does not go with what its producer committed before
│   ├── CallError               what became of a call that got no answer
│   │   ├── NoProvider          nobody serves it
│   │   ├── ProviderLost        its provider left before it answered
│   │   ├── ProviderFailed      its provider answered with a failure
│   │   ├── CallTimeout         no answer before its deadline
│   │   └── CallCancelled       the caller left, or no longer wants an answer
│   └── StoreError              the disk
│       ├── StoreFull           no room: producers wait, consumers go on
│       ├── StoreFailed         a group could not be written, or the store is closed
│       └── RecordDamaged       bytes on disk that are not what was written
├── LakeError                   no lake, or one that is damaged
├── PipelineError               what `crosswire pipeline` can't do
│   ├── InvalidInput            … with this input: none, unreadable, not what it should be
│   └── BytesMissing            … because the tables don't account for every byte
└── ClientError                 what a caller of `crosswire.client.native` sees
    ├── ConnectFailed           nobody answered, or the handshake failed
    ├── ConnectionLost          the connection ended while something was under way
    │   └── LinkLost            … and so did the Relink link, with what was not acknowledged
    ├── RequestTimeout          no response in time
    └── RequestFailed           the other side answered with a failure
        └── CallFailed          … which is a bond.comm.Error
"""

__all__ = [
    "AttemptLost",
    "BatchConflict",
    "BondDecodeError",
    "BondEncodeError",
    "BondError",
    "BondSchemaError",
    "BondSyntaxError",
    "BytesMissing",
    "CallCancelled",
    "CallError",
    "CallFailed",
    "CallTimeout",
    "ClientError",
    "ClockJumped",
    "ConfigError",
    "ConnectFailed",
    "ConnectionLost",
    "ConnectionRejected",
    "CrosswireError",
    "DecoderStateError",
    "DestinationFull",
    "ErrorInError",
    "Forbidden",
    "FrameError",
    "FrameTooLarge",
    "HistoryMissing",
    "HubError",
    "IdentifiersExhausted",
    "IncompatiblePeer",
    "InternalError",
    "InvalidDestination",
    "InvalidEnvelope",
    "InvalidFilter",
    "InvalidHandshake",
    "InvalidIdentifier",
    "InvalidInput",
    "InvalidRequest",
    "InvalidSchedule",
    "LakeError",
    "LimitExceeded",
    "LinkLost",
    "LinkStateError",
    "LocalProtocolError",
    "MalformedFrame",
    "NoProvider",
    "PeerError",
    "PeerTimeout",
    "PipelineError",
    "ProviderFailed",
    "ProviderLost",
    "RecordDamaged",
    "RecordUnreadable",
    "RemoteProtocolError",
    "RequestFailed",
    "RequestTimeout",
    "ServiceUnavailable",
    "StagingFull",
    "StoreDamaged",
    "StoreError",
    "StoreFailed",
    "StoreFull",
    "SubscriptionConflict",
    "TooLargeToSend",
    "UnexpectedFrame",
    "UnknownFrame",
    "UnknownMessage",
    "UnknownProtocol",
    "UnsupportedFrame",
    "UnsupportedVersion",
]


class CrosswireError(Exception):
    """Root of all that Crosswire raises on purpose."""


class LocalProtocolError(CrosswireError):
    """Our side asked for what the protocol does not allow now; nothing was sent."""


class IdentifiersExhausted(LocalProtocolError):
    """The connection has no number left for another conversation: a new one starts afresh."""


class TooLargeToSend(LocalProtocolError):
    """It takes a frame or a message beyond our own limit: a peer that has the same one would end
    the connection, and again each time that it came back."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes can't be sent, {limit_bytes} are allowed")


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


class ErrorInError(MalformedFrame):
    """The peer's own error message, but unreadable; like any other it is not answered."""


class UnknownFrame(FrameError):
    """A type or an enumeration value that the protocol does not define."""

    code = "unknown"


class UnsupportedFrame(FrameError):
    """Well formed, but of a kind that we don't serve."""

    code = "unsupported"


class FrameTooLarge(FrameError):
    """Announces more than a limit allows; refused before any of it is kept."""

    code = "limit"


class UnexpectedFrame(RemoteProtocolError):
    """A well-formed frame that the state of the connection does not allow."""


class UnsupportedVersion(RemoteProtocolError):
    """The peer speaks a version of the protocol that we do not."""


class IncompatiblePeer(RemoteProtocolError):
    """The peer speaks our protocol, but in a part or with a security that ours does not go with."""


class InvalidHandshake(RemoteProtocolError):
    """The peer said in the handshake what can't be accepted."""


class LimitExceeded(RemoteProtocolError):
    """The peer has more under way, or in one piece, than was agreed."""


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


class ConnectionRejected(CrosswireError):
    """We don't want this peer: it could not say who it is, or the application said no."""


class ServiceUnavailable(CrosswireError):
    """The hub is draining, or has no room for another connection."""


class InternalError(CrosswireError):
    """Something of ours failed that nobody but us can be blamed for."""


class DecoderStateError(CrosswireError):
    """Saved decoder state that is damaged, or was written by another version."""


class LinkStateError(CrosswireError):
    """A saved Relink link that is damaged, or was written by another version."""


class UnknownProtocol(CrosswireError):
    """A protocol name that is not one of ours."""


class BondError(CrosswireError):
    """Bond data, a schema or a .bond file that cannot be read or written."""


class BondSyntaxError(BondError):
    """A .bond file that is not Bond; `expected` says what should have stood there, if known."""

    def __init__(
        self, reason: str, *, file: str, line: int, column: int, expected: str = ""
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.file = file
        self.line = line
        self.column = column
        self.expected = expected

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: {self.reason}"
        return f"{where} (expected {self.expected})" if self.expected else where


class BondSchemaError(BondError):
    """A schema that names what is not there, or contradicts itself."""


class BondDecodeError(BondError):
    """Bytes or JSON that are not what the encoding or the schema asks; `offset` is where."""

    def __init__(self, reason: str, *, offset: int = -1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = offset

    def __str__(self) -> str:
        return self.reason if self.offset < 0 else f"{self.reason} (at byte {self.offset})"


class BondEncodeError(BondError):
    """A value that its schema does not allow; `path` leads to it (`orders[3].price`)."""

    def __init__(self, reason: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason = reason
        self.path = path


class HubError(CrosswireError):
    """What the hub or its store refuses, loses or can't find."""


class Forbidden(HubError):
    """The peer may not do this with this destination, or has not said who it is."""


class InvalidDestination(HubError):
    """A name that is no destination, or not one for what was asked."""


class InvalidEnvelope(HubError):
    """An envelope that can't be accepted."""


class InvalidFilter(HubError):
    """A filter that can't be read; `position` is the character where reading stopped."""

    def __init__(self, reason: str, *, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position

    def __str__(self) -> str:
        return f"{self.reason} (at character {self.position + 1} of the filter)"


class InvalidSchedule(HubError):
    """No interval and no cron expression that can be kept."""


class DestinationFull(HubError):
    """A queue's or a service's limit is reached; try again when its consumers have caught up."""


class ClockJumped(HubError):
    """The system's clock was set, forward or back; says what follows from it."""


class SubscriptionConflict(HubError):
    """A subscription's name is in use, right now, with another pattern or filter."""


class UnknownMessage(HubError):
    """A message, a schedule or a subscription that is not there, or no longer."""


class HistoryMissing(HubError):
    """Messages that were asked for are gone, or are those of another hub."""


class StagingFull(HubError):
    """What is staged takes all the room there is for it; try again when some was committed."""


class AttemptLost(HubError):
    """What was staged is not there, or not all of it: the batch has to be written again."""


class BatchConflict(HubError):
    """The producer has committed a later batch, or this one for somebody else."""


class CallError(HubError):
    """A call that got no answer; `code` names the fault in an answer's `error` property."""

    code = "internal"


class NoProvider(CallError):
    """Nobody serves it."""

    code = "unknown_op"


class ProviderLost(CallError):
    """Its provider left before it answered: it may or may not have been carried out."""

    code = "provider_lost"


class ProviderFailed(CallError):
    """Its provider answered with a failure; `code` is the one it gave, `data` what came along."""

    def __init__(self, code: str, description: str, *, data: bytes = b"") -> None:
        super().__init__(f"{code}: {description}" if code else description)
        self.code = code
        self.description = description
        self.data = data


class CallTimeout(CallError):
    """No answer before its deadline: it may or may not have been carried out."""

    code = "timeout"


class CallCancelled(CallError):
    """The caller left, or no longer wants an answer."""

    code = "cancelled"


class StoreError(HubError):
    """The disk."""


class StoreFull(StoreError):
    """No room: producers have to wait, consumers go on."""


class StoreFailed(StoreError):
    """A group could not be written, or the store is closed; the cause is chained."""


class RecordDamaged(StoreError):
    """Bytes on disk that are not what was written."""


class RecordUnreadable(RecordDamaged):
    """Something is stored under a key, or may be, and can't be read: not the same as no record."""


class StoreDamaged(StoreFailed):
    """Files of the store are missing or unreadable, and to go on would be a guess."""


class LakeError(CrosswireError):
    """There is no lake, or its files are damaged or can't be written."""


class PipelineError(CrosswireError):
    """The pipeline can't do what was asked."""


class InvalidInput(PipelineError):
    """There is no input, or it can't be read, or it is not what it should be."""


class BytesMissing(PipelineError):
    """The tables don't account for every byte that was captured: never to be seen."""


class ConfigError(CrosswireError):
    """Settings that can't be used; says which, and what to do."""


class ClientError(CrosswireError):
    """What a caller of `crosswire.client.native` has to expect."""


class ConnectFailed(ClientError):
    """Nobody answered, or the handshake failed; the cause is chained."""


class ConnectionLost(ClientError):
    """The connection ended while something was under way: it may or may not have been done."""


class LinkLost(ConnectionLost):
    """The other side no longer knows the link: what it did not acknowledge may be lost."""


class RequestTimeout(ClientError):
    """No response came in time: the request may or may not have been carried out."""


class RequestFailed(ClientError):
    """The other side answered with a failure; `code` is the one it gave, `data` its JSON."""

    def __init__(self, code: str, description: str, *, data: bytes = b"{}") -> None:
        super().__init__(f"{code}: {description}" if code else description)
        self.code = code
        self.description = description
        self.data = data


class CallFailed(RequestFailed):
    """A service answered with a bond.comm.Error, or shall answer with one.

    `error_code` is its number, `code` that number's name if it has one, `data` the whole of it,
    marshalled, if it came from a peer.
    """

    def __init__(
        self, error_code: int, description: str = "", *, code: str = "", data: bytes = b""
    ) -> None:
        super().__init__(code or str(error_code), description, data=data)
        self.error_code = error_code
