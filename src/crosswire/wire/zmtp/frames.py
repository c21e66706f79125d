"""ZMTP's greeting, commands and messages, parsed and serialized; `layout.py` has their bytes.

A message consists of the frames up to the first one without the flag MORE. Its parts are taken
from the buffer as they are received, so that a long message in small reads is never scanned twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, Final, TypeAlias

from crosswire.errors import FrameError, FrameTooLarge, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Encrypted, Frame, Limits, Placed
from crosswire.wire.zmtp.layout import (
    AS_SERVER_OFFSET,
    COMMAND_ERROR,
    COMMAND_READY,
    FILLER_SIZE,
    FLAG_COMMAND,
    FLAG_LONG,
    FLAG_MORE,
    FLAGS_OFFSET,
    GREETING_SIZE,
    LAST_FLAGS,
    LAST_MESSAGE_FLAGS,
    LONG_HEADER_SIZE,
    LONG_HEADER_STRUCT,
    MAJOR_OFFSET,
    MAX_SHORT_SIZE,
    MECHANISM_OFFSET,
    MECHANISM_SIZE,
    MIN_MAJOR,
    MINOR_OFFSET,
    MISSPELLED_ERROR,
    NAME_LENGTH_SIZE,
    PADDING_OFFSET,
    PADDING_SIZE,
    PROPERTY_NAME_LENGTH_SIZE,
    PROPERTY_VALUE_LENGTH_SIZE,
    SEALED_OVERHEAD,
    SEALED_PREFIX,
    SHORT_HEADER_SIZE,
    SIGNATURE_END,
    SIGNATURE_END_OFFSET,
    SIGNATURE_START,
    SIZE_OFFSET,
)

__all__ = [
    "DEFAULTS",
    "VERSION",
    "Command",
    "Greeting",
    "Message",
    "NestedCommand",
    "Partial",
    "Sealed",
    "Taker",
    "ZmtpLimits",
    "is_sealed",
    "message_bytes",
    "parse_command",
    "parse_greeting",
    "parse_metadata",
    "part_head",
    "read_header",
    "scan_command",
    "scan_messages",
    "scan_sealed",
    "serialize",
    "serialize_command",
    "serialize_message",
    "serialize_metadata",
    "serialize_part",
    "serialize_sealed",
]

VERSION: Final = "3.1"


class ZmtpLimits(Limits, frozen=True, kw_only=True):
    """`frame_bytes` limits a whole message, with all its parts and their headers.

    A subscription counts with the size of its topic and 64 bytes more. If `ping_interval_s` is not
    0, a peer of version 3.1 is sent a PING at this interval, and must send anything within
    `ping_timeout_s`; the PING carries `ping_ttl_s`, after which the peer may close the connection.
    By default no PING is sent, as in libzmq.
    """

    parts: int = 65536
    command_bytes: int = 65536
    subscription_bytes: int = 4 * 1024 * 1024
    ping_interval_s: float = 0.0
    ping_timeout_s: float = 10.0
    ping_ttl_s: float = 0.0


DEFAULTS: Final = ZmtpLimits()


# ---------------------------------------------------------------------------------------- frames


class Greeting(Frame, frozen=True, gc=False):
    """`padding` is the number in the signature, where libzmq sends its identity's length plus 1."""

    frame_name: ClassVar[str] = "zmtp-greeting"
    mechanism: str
    as_server: bool = False
    version: str = VERSION
    padding: int = 1

    def fields(self) -> dict[str, Any]:
        """Without the padding, which is ignored when it is received."""
        return {"version": self.version, "mechanism": self.mechanism, "as_server": self.as_server}


class Command(Frame, frozen=True, gc=False):
    """`body` is what follows the name; `sealed` if it is encrypted (CURVE)."""

    frame_name: ClassVar[str] = "zmtp-command"
    name: str
    body: bytes = b""
    sealed: bool = False

    def properties(self) -> dict[str, bytes]:
        """READY's metadata, empty for other commands. Raises MalformedFrame."""
        return parse_metadata(self.body) if self.name == COMMAND_READY and not self.sealed else {}

    def fields(self) -> dict[str, Any]:
        """Name and metadata. Raises MalformedFrame."""
        properties = {name: value.hex() for name, value in self.properties().items()}
        return {"name": self.name, "properties": properties}


class NestedCommand(Command, frozen=True, gc=False):
    """A command between two frames of a message; its bytes are counted as the message's.

    The RFC's grammar does not allow it, but libzmq sends heartbeats regardless of messages.
    """

    layer: ClassVar[int] = 1


class Message(Frame, frozen=True, gc=False):
    """A complete message: at least one part."""

    frame_name: ClassVar[str] = "zmtp-message"
    parts: tuple[bytes, ...]

    def fields(self) -> dict[str, Any]:
        """All parts as hex."""
        return {"parts": [part.hex() for part in self.parts]}


class Sealed(Encrypted, frozen=True, gc=False):
    """A frame of CURVE's traffic; `body` is nonce and box."""

    body: bytes

    def fields(self) -> dict[str, Any]:
        """None: all of it is encrypted."""
        return {}


# -------------------------------------------------------------------------------------- greeting


def parse_greeting(buffer: bytes, position: int, base: int) -> Greeting | None:
    """The greeting at `position`, None while it is incomplete. `buffer[0]` is at `base`.

    Raises FrameError as soon as a byte can't be a greeting's: a peer with another protocol may
    never send 64 bytes.
    """
    head = buffer[position : position + GREETING_SIZE]
    size, offset = len(head), base + position
    if size and head[0] != SIGNATURE_START:
        raise MalformedFrame("not a greeting of ZeroMQ", offset=offset, length=1)
    if size > SIGNATURE_END_OFFSET and head[SIGNATURE_END_OFFSET] != SIGNATURE_END:
        length = SIGNATURE_END_OFFSET + 1
        raise MalformedFrame("not a greeting of ZeroMQ", offset=offset, length=length)
    if size > MAJOR_OFFSET and head[MAJOR_OFFSET] < MIN_MAJOR:
        raise UnknownFrame("a version before ZMTP 3", offset=offset, length=MAJOR_OFFSET + 1)
    if size < GREETING_SIZE:
        return None
    name = head[MECHANISM_OFFSET : MECHANISM_OFFSET + MECHANISM_SIZE].rstrip(b"\0")
    if not name or not name.isascii() or not name.decode().isprintable():
        raise MalformedFrame(
            "the name of the mechanism is not a text", offset=offset, length=GREETING_SIZE
        )
    return Greeting(
        mechanism=name.decode(),
        as_server=head[AS_SERVER_OFFSET] != 0,
        version=f"{head[MAJOR_OFFSET]}.{head[MINOR_OFFSET]}",
        padding=int.from_bytes(head[PADDING_OFFSET:SIGNATURE_END_OFFSET]),
    )


def _serialize_greeting(greeting: Greeting) -> bytes:
    major, minor = greeting.version.split(".")
    return b"".join(
        (
            bytes((SIGNATURE_START,)),
            greeting.padding.to_bytes(PADDING_SIZE),
            bytes((SIGNATURE_END, int(major), int(minor))),
            greeting.mechanism.encode("ascii").ljust(MECHANISM_SIZE, b"\0"),
            bytes((greeting.as_server,)),
            bytes(FILLER_SIZE),
        )
    )


# -------------------------------------------------------------------------------------- commands


def parse_command(body: bytes) -> Command:
    """The command in a command frame's body. Raises MalformedFrame.

    The misspelled ERROR of libzmq's PLAIN is read as it is meant, unless its first byte can be the
    length of a name.
    """
    if body.startswith(MISSPELLED_ERROR) and len(body) < NAME_LENGTH_SIZE + MISSPELLED_ERROR[0]:
        return Command(COMMAND_ERROR, body[len(MISSPELLED_ERROR) :])
    size = body[0] if body else 0
    end = NAME_LENGTH_SIZE + size
    name = body[NAME_LENGTH_SIZE:end]
    if not size or len(name) < size:
        raise MalformedFrame("a command without a whole name")
    if not name.isascii():
        raise MalformedFrame("a command's name is not ASCII")
    return Command(name.decode(), body[end:])


def parse_metadata(data: bytes) -> dict[str, bytes]:
    """Names and values of the metadata in READY or INITIATE. Raises MalformedFrame."""
    properties: dict[str, bytes] = {}
    position, end = 0, len(data)
    while position < end:
        name_start = position + PROPERTY_NAME_LENGTH_SIZE
        name_end = name_start + data[position]
        value = name_end + PROPERTY_VALUE_LENGTH_SIZE
        # Slices beyond the end are short or empty, so that both lengths are checked afterwards.
        name = data[name_start:name_end]
        position = value + int.from_bytes(data[name_end:value])
        if value > end or position > end:
            raise MalformedFrame("metadata that is cut short")
        if not name or not name.isascii():
            raise MalformedFrame("the name of a property is not a text")
        properties[name.decode()] = data[value:position]
    return properties


def serialize_metadata(properties: Mapping[str, bytes]) -> bytes:
    """The metadata in READY or INITIATE."""
    chunks: list[bytes] = []
    for name, value in properties.items():
        chunks += (
            len(name).to_bytes(PROPERTY_NAME_LENGTH_SIZE),
            name.encode("ascii"),
            len(value).to_bytes(PROPERTY_VALUE_LENGTH_SIZE),
            value,
        )
    return b"".join(chunks)


def serialize_command(name: str, body: bytes = b"") -> bytes:
    """A command's frame."""
    size = NAME_LENGTH_SIZE + len(name) + len(body)
    if size <= MAX_SHORT_SIZE:
        head = bytes((FLAG_COMMAND, size))
    else:
        head = LONG_HEADER_STRUCT.pack(FLAG_COMMAND | FLAG_LONG, size)
    return b"".join((head, len(name).to_bytes(NAME_LENGTH_SIZE), name.encode("ascii"), body))


# -------------------------------------------------------------------------------------- messages

_MORE_HEADS: Final = [bytes((FLAG_MORE, size)) for size in range(MAX_SHORT_SIZE + 1)]
_LAST_HEADS: Final = [bytes((0, size)) for size in range(MAX_SHORT_SIZE + 1)]


def serialize_part(part: bytes, *, more: bool) -> bytes:
    """One frame of a message, for callers that build many messages from common frames."""
    return part_head(len(part), more=more) + part


def part_head(size: int, *, more: bool) -> bytes:
    """The header of a part of `size` bytes."""
    if size <= MAX_SHORT_SIZE:
        return (_MORE_HEADS if more else _LAST_HEADS)[size]
    return LONG_HEADER_STRUCT.pack(FLAG_MORE | FLAG_LONG if more else FLAG_LONG, size)


def message_bytes(sizes: Iterable[int], *, sealed: bool = False) -> int:
    """The size on the wire of a message whose parts have these sizes; `sealed` by CURVE."""
    added = SEALED_OVERHEAD if sealed else 0
    return sum(
        size + (SHORT_HEADER_SIZE if size <= MAX_SHORT_SIZE else LONG_HEADER_SIZE)
        for size in [size + added for size in sizes]
    )


def serialize_message(parts: Sequence[bytes]) -> bytes:
    """The frames of a message of at least one part."""
    chunks: list[bytes] = []
    for part in parts:
        size = len(part)
        chunks.append(
            _MORE_HEADS[size]
            if size <= MAX_SHORT_SIZE
            else LONG_HEADER_STRUCT.pack(FLAG_MORE | FLAG_LONG, size)
        )
        chunks.append(part)
    size = len(chunks[-1])
    chunks[-2] = (
        _LAST_HEADS[size] if size <= MAX_SHORT_SIZE else LONG_HEADER_STRUCT.pack(FLAG_LONG, size)
    )
    return b"".join(chunks)


def serialize_sealed(body: bytes) -> bytes:
    """A frame of CURVE's traffic. It is not marked as a command although it has a name: RFC 26
    calls MESSAGE a command, libzmq sends and expects it like this."""
    size = len(SEALED_PREFIX) + len(body)
    head = _LAST_HEADS[size] if size <= MAX_SHORT_SIZE else LONG_HEADER_STRUCT.pack(FLAG_LONG, size)
    return b"".join((head, SEALED_PREFIX, body))


def serialize(frame: Frame) -> bytes:
    """The bytes of a frame."""
    match frame:
        case Message(parts=parts):
            return serialize_message(parts)
        case Command(name=name, body=body):
            return serialize_command(name, body)
        case Greeting():
            return _serialize_greeting(frame)
        case Sealed(body=body):
            return serialize_sealed(body)
    raise TypeError(f"{type(frame).__name__} is not a frame of ZMTP")


# ------------------------------------------------------------------------------------------ scan


_HEADS: Final = 4
_HEAD_PARTS: Final = 3
_HEAD_BYTES: Final = 64


class Partial:
    """An incomplete message: its parts, the offset of its start, the bytes of its frames so far.

    `heads` caches what messages of this direction begin with, as bytes and as parts: in eMQP the
    first three parts of nearly all messages are the same, and are not parsed again.
    """

    __slots__ = ("heads", "parts", "start", "used")

    def __init__(self, parts: Iterable[bytes] = (), start: int = 0, used: int = 0) -> None:
        self.parts = list(parts)
        self.start = start
        self.used = used
        self.heads: list[tuple[bytes, list[bytes]]] = []

    def take(self) -> tuple[list[bytes], int, int]:
        """Parts, start and bytes; this is empty afterwards."""
        taken = self.parts, self.start, self.used
        self.parts, self.used = [], 0
        return taken

    def keep(self, parts: list[bytes], start: int, used: int) -> None:
        """Store an incomplete message."""
        self.parts, self.start, self.used = parts, start, used

    def learn(self, parts: list[bytes]) -> None:
        """Cache the first parts of this message, if they are short and others follow."""
        first = parts[:_HEAD_PARTS]
        if len(parts) > _HEAD_PARTS and sum(map(len, first)) <= _HEAD_BYTES:
            head = b"".join([serialize_part(part, more=True) for part in first])
            self.heads.append((head, first))


Taker: TypeAlias = Callable[[bytes, int], tuple[int, Frame | None]]
"""Takes a buffer and the position of a message in it. Returns the position after the messages that
it could read at once, and one frame that stands for all of them; or the same position and None."""


def scan_messages(
    buffer: bytes,
    position: int,
    base: int,
    limits: ZmtpLimits,
    partial: Partial,
    placed: list[Placed],
    take: Taker | None = None,
) -> tuple[int, int]:
    """The messages and commands from `position` on, as specified for `Decoder._scan`, continuing
    `partial`; `buffer[0]` is at `base`. At the start of a message, `take` is tried first.

    Nearly all frames are short, and no function is called for them. Checking the limits adds
    nothing to the inner loop: `bound` is both the end of the buffer and of the bytes allowed, and
    the loop ends with the last part that is allowed.
    """
    end = len(buffer)
    parts, start, used = partial.take()
    limit, most = limits.frame_bytes, limits.parts
    # Locals: in this loop the lookups of globals could be measured.
    header, size_at, last_flags = SHORT_HEADER_SIZE, SIZE_OFFSET, LAST_MESSAGE_FLAGS
    # With few parts allowed, the cached parts could already be too many.
    heads = partial.heads if most > _HEAD_PARTS and take is None else ()
    while True:
        if not parts:
            if take is not None:
                stop, run = take(buffer, position)
                if run is not None:
                    placed.append((base + position, stop - position, run))
                    position = stop
            start, used = base + position, 0
        # From here on `position - turn` bytes are added to `used`.
        turn = position
        bound = min(end, turn + limit - used)
        flags = 0
        known = True
        if not parts:
            for head, first in heads:
                if buffer.startswith(head, position) and position + len(head) <= bound:
                    parts = first.copy()
                    position += len(head)
                    break
            else:
                known = len(heads) >= _HEADS or take is not None
        try:
            for _ in repeat(None, most - len(parts)):
                flags = buffer[position]
                body = position + header
                stop = body + buffer[position + size_at]
                if flags > FLAG_MORE:
                    if flags > last_flags:
                        # A command, or undefined flags: read after this loop.
                        break
                    body = position + LONG_HEADER_SIZE
                    stop = body + int.from_bytes(buffer[position + size_at : body])
                    if body > end:
                        partial.keep(parts, start, used + position - turn)
                        return position, LONG_HEADER_SIZE
                if stop > bound:
                    # Either not all of the part is there, or it is more than allowed.
                    used += position - turn
                    if used + stop - position > limit:
                        raise _too_large("message", limit, start, base + body - start)
                    partial.keep(parts, start, used)
                    return position, stop - position
                parts.append(buffer[body:stop])
                position = stop
                if flags & FLAG_MORE:
                    continue
                placed.append((start, base + position - start, Message(tuple(parts))))
                if not known:
                    partial.learn(parts)
                parts = []
                break
            else:
                # The last part that is allowed had the flag MORE.
                raise FrameTooLarge(
                    f"a message of more than the {most} parts allowed",
                    offset=start,
                    length=base + position - start,
                )
        except IndexError:
            # The buffer ends within a header: cheaper than a check in each turn of the loop.
            partial.keep(parts, start, used + position - turn)
            return position, header
        if flags > last_flags:
            used += position - turn
            stop, need = _scan_nested(buffer, position, base, limits, start, parts, placed)
            if need:
                partial.keep(parts, start, used)
                return position, need
            position = stop


def _scan_nested(
    buffer: bytes,
    position: int,
    base: int,
    limits: ZmtpLimits,
    start: int,
    parts: list[bytes],
    placed: list[Placed],
) -> tuple[int, int]:
    """A command of the traffic, possibly between the frames of a message that began at `start`."""
    if not parts:
        return scan_command(buffer, position, base, limits, placed)
    inside: list[Placed] = []
    try:
        stop, need = scan_command(buffer, position, base, limits, inside)
    except FrameError as error:
        # The error covers the message so far, whose bytes are in no other item.
        error.length += error.offset - start
        error.offset = start
        error.resumable = False
        raise
    for offset, length, frame in inside:
        assert isinstance(frame, Command)
        placed.append((offset, length, NestedCommand(frame.name, frame.body)))
    return stop, need


def scan_command(
    buffer: bytes,
    position: int,
    base: int,
    limits: ZmtpLimits,
    placed: list[Placed],
    *,
    sealed: bool = False,
) -> tuple[int, int]:
    """One command at `position`. Returns the position after it and 0; while it is incomplete, its
    own position and the bytes needed."""
    flags, body, stop = read_header(buffer, position, base, limits.command_bytes, "command")
    if not body or stop > len(buffer):
        return position, stop - position
    offset, length = base + position, stop - position
    if not flags & FLAG_COMMAND:
        raise MalformedFrame(
            "a message during the handshake", offset=offset, length=length, resumable=True
        )
    try:
        command = parse_command(buffer[body:stop])
    except MalformedFrame as error:
        raise MalformedFrame(error.reason, offset=offset, length=length, resumable=True) from None
    if sealed:
        command = Command(command.name, command.body, sealed=True)
    placed.append((offset, length, command))
    return stop, 0


def scan_sealed(
    buffer: bytes, position: int, base: int, limits: ZmtpLimits, placed: list[Placed]
) -> tuple[int, int]:
    """CURVE's traffic from `position` on, as specified for `Decoder._scan`."""
    end = len(buffer)
    while True:
        flags, body, stop = read_header(buffer, position, base, limits.frame_bytes, "message")
        if not body or stop > end:
            return position, stop - position
        offset, length = base + position, stop - position
        if is_sealed(buffer, body, stop):
            placed.append((offset, length, Sealed(buffer[body + len(SEALED_PREFIX) : stop])))
        elif flags & FLAG_COMMAND:
            scan_command(buffer, position, base, limits, placed, sealed=True)
        else:
            raise MalformedFrame(
                "clear text in a CURVE connection", offset=offset, length=length, resumable=True
            )
        position = stop


def is_sealed(buffer: bytes, body: int, stop: int) -> bool:
    """Whether the body of a frame has the form of CURVE's traffic."""
    return stop - body >= SEALED_OVERHEAD and buffer.startswith(SEALED_PREFIX, body)


def read_header(
    buffer: bytes, position: int, base: int, limit: int, what: str
) -> tuple[int, int, int]:
    """Flags, and start and end of the body of the frame at `position`. While the header is
    incomplete, 0 for the start, and for the end the position up to which bytes are needed.

    Raises MalformedFrame for undefined flags, FrameTooLarge before any of the body is buffered.
    """
    head = buffer[position : position + LONG_HEADER_SIZE]
    if len(head) < SHORT_HEADER_SIZE:
        return 0, 0, position + SHORT_HEADER_SIZE
    flags = head[FLAGS_OFFSET]
    if flags > LAST_FLAGS or flags == FLAG_COMMAND | FLAG_MORE:
        raise MalformedFrame(
            f"flags that nobody defined: {flags:#04x}", offset=base + position, length=1
        )
    if flags & FLAG_LONG:
        if len(head) < LONG_HEADER_SIZE:
            return 0, 0, position + LONG_HEADER_SIZE
        body, size = position + LONG_HEADER_SIZE, int.from_bytes(head[SIZE_OFFSET:])
    else:
        body, size = position + SHORT_HEADER_SIZE, head[SIZE_OFFSET]
    stop = body + size
    if stop - position > limit:
        raise _too_large(what, limit, base + position, body - position)
    return flags, body, stop


def _too_large(what: str, limit: int, offset: int, length: int) -> FrameTooLarge:
    return FrameTooLarge(
        f"a {what} of more than the {limit} bytes allowed", offset=offset, length=length
    )
