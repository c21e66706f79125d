"""Every exception of Crosswire.

Two classes separate whose fault a protocol error is: LocalProtocolError is raised to the caller,
and nothing was sent; RemoteProtocolError is the peer's, and ends its connection.

CrosswireError
├── LocalProtocolError          the caller asked for what the protocol does not allow now
│   ├── IdentifiersExhausted    no conversation id is left on this connection
│   └── TooLargeToSend          a message exceeds the limit that peers can be expected to have
├── RemoteProtocolError         the peer violated the protocol
│   ├── FrameError              a violation at known byte offsets
│   │   ├── MalformedFrame      the layout is wrong
│   │   │   └── ErrorInError    the layout of the peer's own error message is wrong
│   │   ├── UnknownFrame        a type or an enumeration value that is not defined
│   │   ├── UnsupportedFrame    well formed, but of a kind that is not supported
│   │   └── FrameTooLarge       the announced size exceeds a limit
│   ├── UnexpectedFrame         well formed, but not allowed in this state
│   ├── UnsupportedVersion      a protocol version that is not supported
│   ├── IncompatiblePeer        socket type or security mechanism don't match
│   ├── InvalidHandshake        the handshake contains what can't be accepted
│   ├── LimitExceeded           more messages, channels or bytes than agreed
│   ├── InvalidIdentifier       a response that belongs to no request
│   ├── InvalidRequest          a request that can't be answered with an error
│   ├── PeerTimeout             the peer did not respond in time
│   └── PeerError               the peer ended the connection with an error message
├── ConnectionRejected          authentication failed, or the application rejected the peer
├── ServiceUnavailable          the hub is draining or has no room for the connection
├── InternalError               a fault in Crosswire
├── DecoderStateError           saved decoder state is damaged or of another version
├── LinkStateError              a saved Relink link is damaged or of another version
├── UnknownProtocol             no protocol has this name
├── ConfigError                 invalid settings
├── BondError                   errors of `crosswire.bond`
│   ├── BondSyntaxError         in a .bond file, at a line and column
│   ├── BondSchemaError         in a schema: an unknown name, a contradiction
│   ├── BondDecodeError         in bytes or JSON that were received
│   └── BondEncodeError         in a value that its schema does not allow
├── HubError                    what a hub refuses, loses or doesn't find; clients raise it, too
│   ├── BadRequest              a client's request that the hub can't act on
│   ├── Forbidden               the principal lacks the right for this destination
│   ├── InvalidDestination      not a destination, or not one for this operation
│   ├── InvalidEnvelope         a message that can't be accepted
│   ├── InvalidFilter           a filter that can't be parsed
│   ├── InvalidSchedule         an invalid interval, cron expression, id or destination
│   ├── DestinationFull         the limit of a queue or a service is reached
│   │   └── QuotaExceeded       too many destinations, subscriptions or schedules
│   ├── DestinationInUse        a queue or topic that can't be deleted now
│   ├── ClockJumped             the system's clock was set
│   ├── SubscriptionConflict    a subscription's name is in use with another pattern or filter
│   ├── UnknownMessage          no message, schedule or subscription has this id or name
│   ├── HistoryMissing          messages that were removed by retention
│   ├── StagingFull             no room for another staged attempt now
│   ├── AttemptLost             a staged attempt is missing or incomplete
│   ├── BatchConflict           a batch contradicts what its producer committed before
│   ├── CallError               a call without a response
│   │   ├── NoProvider          no provider serves this service
│   │   ├── ProviderLost        the provider disconnected before it responded
│   │   ├── ProviderFailed      the provider responded with a failure
│   │   ├── CallTimeout         no response before the deadline
│   │   └── CallCancelled       the caller disconnected or cancelled
│   ├── NotLeading              this hub is a standby: another replica serves
│   └── StoreError              errors of the disk
│       ├── StoreFull           no space: producers wait, consumers continue
│       ├── StoreFailed         a commit group could not be written, or the store is closed
│       │   └── StoreDamaged    files of the store are missing or unreadable
│       └── RecordDamaged       the bytes of a record are not those that were written
│           └── RecordUnreadable    a record can't be read from the disk
├── LogError                    errors of a replicated commit log
│   ├── LogUnavailable          it can't be reached now, or does not answer
│   │   └── LogRefused          it refuses us: password, rights, a read-only database
│   ├── LogForeign              it is the log of another hub, or was made anew
│   ├── LogUnsafe               its settings don't keep what it confirms
│   ├── LogTooNew               its records have a format that this version can't read
│   ├── LogConflict             another writer's record is where ours was to be
│   ├── LogTrimmed              records that are needed were removed
│   ├── LogDamaged              records are missing or are not those that were written
│   └── LogNameTaken            another replica reports under the same name
├── LakeError                   no lake, or one that is damaged
├── PipelineError               errors of `crosswire pipeline`
│   ├── InvalidInput            input that is missing, unreadable or of the wrong kind
│   └── BytesMissing            the tables don't account for every captured byte
└── ClientError                 errors of `crosswire.client`
    ├── Unsupported             the protocol has no word for this
    ├── ConnectFailed           connecting or the handshake failed
    │   └── HandshakeFailed     the peer was reached, but the handshake failed
    │       ├── TlsFailed       a certificate is missing or not accepted, on either side
    │       └── WrongProtocol   what answered speaks another protocol
    ├── ConnectionLost          the connection ended before the result was known
    │   ├── DeliveryLost        a message was settled after its connection had ended
    │   └── LinkLost            the Relink link ended, too
    ├── RequestTimeout          no response in time
    └── RequestFailed           the peer responded with a failure
        └── CallFailed          the failure is a bond.comm.Error
"""

__all__ = [
    "AttemptLost",
    "BadRequest",
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
    "DeliveryLost",
    "DestinationFull",
    "DestinationInUse",
    "ErrorInError",
    "Forbidden",
    "FrameError",
    "FrameTooLarge",
    "HandshakeFailed",
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
    "LogConflict",
    "LogDamaged",
    "LogError",
    "LogForeign",
    "LogNameTaken",
    "LogRefused",
    "LogTooNew",
    "LogTrimmed",
    "LogUnavailable",
    "LogUnsafe",
    "MalformedFrame",
    "NoProvider",
    "NotLeading",
    "PeerError",
    "PeerTimeout",
    "PipelineError",
    "ProviderFailed",
    "ProviderLost",
    "QuotaExceeded",
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
    "TlsFailed",
    "TooLargeToSend",
    "UnexpectedFrame",
    "UnknownFrame",
    "UnknownMessage",
    "UnknownProtocol",
    "Unsupported",
    "UnsupportedFrame",
    "UnsupportedVersion",
    "WrongProtocol",
]


class CrosswireError(Exception):
    """Base of all exceptions that Crosswire raises deliberately."""


class LocalProtocolError(CrosswireError):
    """The caller asked for what the protocol does not allow now; nothing was sent."""


class IdentifiersExhausted(LocalProtocolError):
    """No conversation id is left on this connection; a new connection starts again at the first."""


class TooLargeToSend(LocalProtocolError):
    """A message exceeds our own limit.

    A peer with the same limit would close the connection, and again after each redelivery.
    """

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes can't be sent, {limit_bytes} are allowed")


class RemoteProtocolError(CrosswireError):
    """The peer violated the protocol; `reason` describes how."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FrameError(RemoteProtocolError):
    """A violation in the bytes [offset, offset + length) of one direction.

    If `resumable`, the end of the frame is known, and a decoder can continue after it. If not,
    `length` counts the bytes that were read until the violation was found. `code` is the kind of
    violation in the pipeline's tables.
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
    """The layout is not the one that the protocol defines."""

    code = "malformed"


class ErrorInError(MalformedFrame):
    """The peer's own error message is malformed; like any error message it is not answered."""


class UnknownFrame(FrameError):
    """A type or an enumeration value that the protocol does not define."""

    code = "unknown"


class UnsupportedFrame(FrameError):
    """Well formed, but of a kind that is not supported."""

    code = "unsupported"


class FrameTooLarge(FrameError):
    """The announced size exceeds a limit; refused before any of it is buffered."""

    code = "limit"


class UnexpectedFrame(RemoteProtocolError):
    """A well-formed frame that the state of the connection does not allow."""


class UnsupportedVersion(RemoteProtocolError):
    """The peer offers a protocol version that is not supported."""


class IncompatiblePeer(RemoteProtocolError):
    """The protocol is the same, but the socket type or the security mechanism does not match."""


class InvalidHandshake(RemoteProtocolError):
    """The peer's handshake contains what can't be accepted."""


class LimitExceeded(RemoteProtocolError):
    """The peer sent more messages, channels or bytes than the limits or its window allow."""


class InvalidIdentifier(RemoteProtocolError):
    """A response that belongs to no request, or not to the next one in order."""


class InvalidRequest(RemoteProtocolError):
    """A request that can't be answered with an error: the connection ends instead."""


class PeerTimeout(RemoteProtocolError):
    """The peer did not send what the protocol requires before the deadline."""


class PeerError(RemoteProtocolError):
    """The peer ended the connection with an error message; `code` is the protocol's own code."""

    def __init__(self, reason: str, *, code: int | str = 0) -> None:
        super().__init__(reason)
        self.code = code


class ConnectionRejected(CrosswireError):
    """Authentication failed, or the application rejected the peer."""


class ServiceUnavailable(CrosswireError):
    """The hub is draining, or has no room for another connection."""


class InternalError(CrosswireError):
    """A fault in Crosswire, not in what a peer or a caller did."""


class DecoderStateError(CrosswireError):
    """Saved decoder state that is damaged, or was written by another version."""


class LinkStateError(CrosswireError):
    """A saved Relink link that is damaged, or was written by another version."""


class UnknownProtocol(CrosswireError):
    """No protocol has this name."""


class BondError(CrosswireError):
    """Bond data, a schema or a .bond file that cannot be read or written."""


class BondSyntaxError(BondError):
    """A .bond file that is not Bond; `expected` names what should be there instead, if known."""

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
    """A schema that refers to an unknown name, or contradicts itself."""


class BondDecodeError(BondError):
    """Bytes or JSON that don't match encoding or schema; `offset` is the byte, -1 if unknown."""

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
    """Base of what a hub and its store refuse, lose or don't find.

    `crosswire.connect` raises the same classes for what the hub at the far end answered.
    """


class BadRequest(HubError):
    """A client's request that the hub can't act on: an invalid destination, filter, schedule, id
    or message. Repeating it does not help."""


class Forbidden(HubError):
    """The principal lacks the right for this destination, or is not authenticated."""


class InvalidDestination(HubError):
    """A name that is not a destination, or not one for this operation."""


class InvalidEnvelope(HubError):
    """A message that can't be accepted."""


class InvalidFilter(HubError):
    """A filter that can't be parsed; `position` is the index of the first wrong character."""

    def __init__(self, reason: str, *, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position

    def __str__(self) -> str:
        return f"{self.reason} (at character {self.position + 1} of the filter)"


class InvalidSchedule(HubError):
    """A schedule whose interval, cron expression, run count, id or destination is invalid."""


class DestinationFull(HubError):
    """The limit of a queue or a service is reached; retry when its consumers have caught up."""


class QuotaExceeded(DestinationFull):
    """There are too many destinations, named subscriptions or schedules, in all or of one user:
    something has to be removed first."""


class DestinationInUse(HubError):
    """A queue or topic has messages or consumers, or is configured: it can't be deleted."""


class ClockJumped(HubError):
    """The system's clock was set, forward or back; the message describes the consequences."""


class SubscriptionConflict(HubError):
    """A subscription's name is in use by a consumer with another pattern or filter."""


class UnknownMessage(HubError):
    """A message, a schedule or a subscription that does not exist, or no longer."""


class HistoryMissing(HubError):
    """Requested messages were removed by retention, or belong to another hub."""


class StagingFull(HubError):
    """Staged batches use all the space they may, or a commit is in progress; retry later."""


class AttemptLost(HubError):
    """Staged messages are missing: the batch has to be written again."""


class BatchConflict(HubError):
    """A producer's batch does not continue what it committed before, or is committed already."""


class CallError(HubError):
    """A call without a response; `code` is the `error` property of the answer sent instead."""

    code = "internal"


class NoProvider(CallError):
    """No provider serves this service."""

    code = "unknown_op"


class ProviderLost(CallError):
    """The provider disconnected before it responded: the call may have been carried out."""

    code = "provider_lost"


class ProviderFailed(CallError):
    """The provider responded with a failure; `code` and `data` are the provider's."""

    def __init__(self, code: str, description: str, *, data: bytes = b"") -> None:
        super().__init__(f"{code}: {description}" if code else description)
        self.code = code
        self.description = description
        self.data = data


class CallTimeout(CallError):
    """No response before the deadline: the call may have been carried out."""

    code = "timeout"


class CallCancelled(CallError):
    """The caller disconnected or cancelled the call."""

    code = "cancelled"


class NotLeading(HubError):
    """This hub is a standby: another replica serves, or none does at the moment."""


class StoreError(HubError):
    """Base of errors of the disk."""


class StoreFull(StoreError):
    """No space on the disk: producers have to wait, consumers continue."""


class StoreFailed(StoreError):
    """A commit group could not be written, or the store is closed; the cause is chained."""


class RecordDamaged(StoreError):
    """The bytes of a record are not those that were written."""


class RecordUnreadable(RecordDamaged):
    """A record can't be read from the disk. It may exist: this is not the same as no record."""


class StoreDamaged(StoreFailed):
    """Files of the store are missing or unreadable; continuing could serve wrong data."""


class LogError(CrosswireError):
    """Base of errors of a replicated commit log; `reason` is the text without the advice."""

    advice = ""
    """What an operator can do."""

    def __init__(self, reason: str) -> None:
        self.reason = reason.rstrip(".")
        super().__init__(f"{self.reason}. {self.advice}" if self.advice else self.reason)


class LogUnavailable(LogError):
    """The log can't be reached now, or does not answer. Trying again may help; nothing is lost."""

    advice = (
        "It is tried again. Check that the servers of the log run, that one of them accepts "
        "writes, and that this machine reaches it"
    )


class LogRefused(LogUnavailable):
    """The log's server refuses us, and will until somebody changes a password, a right or a
    setting."""

    advice = (
        "Check the role's name, its password (PGPASSWORD or the file of passfile=), its rights "
        "(`crosswire replication init` grants them) and that the database is not read-only"
    )


class LogForeign(LogError):
    """The log belongs to another hub, is in another database system, or was made anew."""

    advice = (
        "Nothing was read or written. Check the address of the log. If this hub is to leave its "
        "log for good, run `crosswire replication leave` on its data directory first"
    )


class LogUnsafe(LogError):
    """The settings of the log's servers don't keep what they confirm: nothing is acknowledged."""

    advice = (
        "Nothing is acknowledged until that is corrected. On managed servers that hide their "
        'settings, and only if they replicate synchronously, set durability = "trust"'
    )


class LogTooNew(LogError):
    """The log has records of a format that this version can't read."""

    advice = (
        "Nothing was applied. Install the version of Crosswire that the other replicas run, and "
        "start this one again"
    )


class LogConflict(LogError):
    """Another writer's record is where ours was to be, or on top of it: we lead no more.

    Nothing may be acknowledged after this. What became of our record is found by reading.
    """


class LogTrimmed(LogError):
    """Records that this replica needs next were removed from the log."""

    advice = (
        "This replica was away for too long: remove its data directory and start it again, it "
        "fetches a checkpoint from another replica"
    )


class LogDamaged(LogError):
    """Records are missing, or are not those that were written; none is ever skipped.

    Where acknowledged records are missing, the log's servers have lost what they confirmed.
    """

    advice = (
        "All replicas stop; their data directories are unchanged. Restore the log's database to "
        "a state that has these records, or start a new log from the replica that has most: "
        "`crosswire replication leave`, then `crosswire replication init` on it"
    )


class LogNameTaken(LogError):
    """Another running replica reports under the same name."""

    advice = (
        "Give each replica a name of its own ([replication] name). If this one was only "
        "restarted, try again in a few seconds"
    )


class LakeError(CrosswireError):
    """There is no lake, or its files are damaged or can't be written."""


class PipelineError(CrosswireError):
    """Base of errors of the pipeline."""


class InvalidInput(PipelineError):
    """The input is missing, unreadable or of the wrong kind."""


class BytesMissing(PipelineError):
    """The tables don't account for every captured byte: a fault in the pipeline."""


class ConfigError(CrosswireError):
    """Invalid settings; the message names them and suggests a correction."""


class ClientError(CrosswireError):
    """Base of errors that a client has by itself: of its connection, or of what was asked of it."""


class Unsupported(ClientError):
    """The protocol has no word for what was asked; another of the five may have one."""


class ConnectFailed(ClientError):
    """Connecting or the handshake failed; the cause is chained."""


class HandshakeFailed(ConnectFailed):
    """The peer was reached, but the handshake failed: it refuses us, or is something else."""


class TlsFailed(HandshakeFailed):
    """TLS was not agreed on: a certificate is missing or not accepted, on either side."""


class WrongProtocol(HandshakeFailed):
    """What answered speaks another protocol; `found` is its name, or "TLS" or "HTTP"."""

    def __init__(self, reason: str, *, found: str = "") -> None:
        super().__init__(reason)
        self.found = found


class ConnectionLost(ClientError):
    """The connection ended before the result was known: it may have been carried out."""


class DeliveryLost(ConnectionLost):
    """A message's connection ended before it was settled: the hub delivers it again."""


class LinkLost(ConnectionLost):
    """The peer no longer has the Relink link: messages it did not acknowledge may be lost."""


class RequestTimeout(ClientError):
    """No response in time: the request may have been carried out."""


class RequestFailed(ClientError):
    """The peer responded with a failure; `code` is the peer's, `data` its JSON."""

    def __init__(self, code: str, description: str, *, data: bytes = b"{}") -> None:
        super().__init__(f"{code}: {description}" if code else description)
        self.code = code
        self.description = description
        self.data = data


class CallFailed(RequestFailed):
    """A service responded with a bond.comm.Error, or a handler raises it to respond with one.

    `error_code` is its number, `code` the name of that number if it has one, `data` the marshalled
    error if a peer sent it.
    """

    def __init__(
        self, error_code: int, description: str = "", *, code: str = "", data: bytes = b""
    ) -> None:
        super().__init__(code or str(error_code), description, data=data)
        self.error_code = error_code
