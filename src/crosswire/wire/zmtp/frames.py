"""ZMTP's greeting, commands and messages, parsed and serialized.

The greeting, 64 bytes (RFC 37, 3.1):

    signature    10   ff, eight bytes of padding, 7f
    version       2   major, minor
    mechanism    20   its name, filled up with zeros
    as-server     1   0 or 1
    filler       31   sent as zero, ignored

Everything behind it is frames:

    flags         1   MORE 1, LONG 2, COMMAND 4; the other bits are zero
    size        1|8   big-endian; eight bytes with LONG
    body          …   a command opens with the length of its name and its name

A message is all its frames, from the first one's flags to the end of the one without MORE. Its
parts are taken out as they come, so that a long message in small steps is never read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from struct import Struct
from typing import Any, ClassVar, Final, TypeAlias

from crosswire.errors import FrameError, FrameTooLarge, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Encrypted, Frame, Limits, Placed

__all__ = [
    "COMMAND",
    "DEFAULTS",
    "GREETING_BYTES",
    "LONG",
    "MORE",
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
GREETING_BYTES: Final = 64

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

_MESSAGE_NAME: Final = b"\x07MESSAGE"
_SEALED_LEAST: Final = len(_MESSAGE_NAME) + 8 + 16 + 1
"""A sealed message: its name, a nonce, the box's seal, and at least the flags in it."""


class ZmtpLimits(Limits, frozen=True, kw_only=True):
    """`frame_bytes` bounds a whole message, with all its parts and their headers.

    A subscription counts with the size of its topic and 64 bytes more. With a `ping_interval_s` a
    peer of version 3.1 is sent a PING that often, and must give a sign of life within
    `ping_timeout_s`; the PING carries `ping_ttl_s`, after which the peer may take us for dead. Like
    libzmq we send none unless told to.
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
    """`padding` is the number in the signature, where libzmq has its identity's length and 1."""

    frame_name: ClassVar[str] = "zmtp-greeting"
    mechanism: str
    as_server: bool = False
    version: str = VERSION
    padding: int = 1

    def fields(self) -> dict[str, Any]:
        return {"version": self.version, "mechanism": self.mechanism, "as_server": self.as_server}


class Command(Frame, frozen=True, gc=False):
    """`body` is what follows the name. `sealed`: only the two peers can read it (CURVE)."""

    frame_name: ClassVar[str] = "zmtp-command"
    name: str
    body: bytes = b""
    sealed: bool = False

    def properties(self) -> dict[str, bytes]:
        """READY's metadata, nothing for others. Raises MalformedFrame."""
        return parse_metadata(self.body) if self.name == "READY" and not self.sealed else {}

    def fields(self) -> dict[str, Any]:
        properties = {name: value.hex() for name, value in self.properties().items()}
        return {"name": self.name, "properties": properties}


class NestedCommand(Command, frozen=True, gc=False):
    """A command between two frames of a message, inside of which its bytes are counted.

    The grammar has no such thing, but libzmq's heartbeats come whenever their time has come.
    """

    layer: ClassVar[int] = 1


class Message(Frame, frozen=True, gc=False):
    frame_name: ClassVar[str] = "zmtp-message"
    parts: tuple[bytes, ...]

    def fields(self) -> dict[str, Any]:
        return {"parts": [part.hex() for part in self.parts]}


class Sealed(Encrypted, frozen=True, gc=False):
    """A frame of CURVE traffic; `body` is nonce and box."""

    body: bytes

    def fields(self) -> dict[str, Any]:
        return {}


# -------------------------------------------------------------------------------------- greeting


def parse_greeting(buffer: bytes, position: int, base: int) -> Greeting | None:
    """The greeting at `position`, None while it isn't whole. Raises FrameError at the first byte
    that can't be in one; `buffer[0]` stands at `base`."""
    head = buffer[position : position + GREETING_BYTES]
    offset = base + position
    if head[:1] not in (b"\xff", b""):
        raise MalformedFrame("not a greeting of ZeroMQ", offset=offset, length=1)
    if head[9:10] not in (b"\x7f", b""):
        raise MalformedFrame("not a greeting of ZeroMQ", offset=offset, length=10)
    if len(head) > 10 and head[10] < 3:
        raise UnknownFrame("a version before ZMTP 3", offset=offset, length=11)
    if len(head) < GREETING_BYTES:
        return None
    name = head[12:32].rstrip(b"\0")
    if not name or not name.isascii() or not name.decode().isprintable():
        raise MalformedFrame(
            "the name of the mechanism is not a text", offset=offset, length=GREETING_BYTES
        )
    return Greeting(
        mechanism=name.decode(),
        as_server=head[32] != 0,
        version=f"{head[10]}.{head[11]}",
        padding=int.from_bytes(head[1:9]),
    )


def _serialize_greeting(greeting: Greeting) -> bytes:
    major, minor = greeting.version.split(".")
    return b"".join(
        (
            b"\xff",
            greeting.padding.to_bytes(8),
            b"\x7f",
            bytes((int(major), int(minor))),
            greeting.mechanism.encode("ascii").ljust(20, b"\0"),
            bytes((greeting.as_server,)),
            bytes(31),
        )
    )


# -------------------------------------------------------------------------------------- commands


def parse_command(body: bytes) -> Command:
    """The command in a command frame's body. Raises MalformedFrame.

    libzmq 4.3's PLAIN has a slip of the pen in its ERROR (observed), which is read as it is meant.
    """
    if body.startswith(b"^RROR") and len(body) < 1 + ord("^"):
        return Command("ERROR", body[5:])
    size = body[0] if body else 0
    name = body[1 : 1 + size]
    if not size or len(name) < size:
        raise MalformedFrame("a command without a whole name")
    if not name.isascii():
        raise MalformedFrame("a command's name is not ASCII")
    return Command(name.decode(), body[1 + size :])


def parse_metadata(data: bytes) -> dict[str, bytes]:
    """Names and values of READY, and of other mechanisms' metadata. Raises MalformedFrame."""
    properties: dict[str, bytes] = {}
    position, end = 0, len(data)
    while position < end:
        value = position + 1 + data[position] + 4
        name = data[position + 1 : value - 4]
        position = value + int.from_bytes(data[value - 4 : value])
        if value > end or position > end:
            raise MalformedFrame("metadata that is cut short")
        if not name or not name.isascii():
            raise MalformedFrame("the name of a property is not a text")
        properties[name.decode()] = data[value:position]
    return properties


def serialize_metadata(properties: Mapping[str, bytes]) -> bytes:
    chunks: list[bytes] = []
    for name, value in properties.items():
        chunks += (bytes((len(name),)), name.encode("ascii"), len(value).to_bytes(4), value)
    return b"".join(chunks)


def serialize_command(name: str, body: bytes = b"") -> bytes:
    """A command with its frame."""
    size = 1 + len(name) + len(body)
    head = bytes((COMMAND, size)) if size < 256 else _LONG_HEAD.pack(COMMAND | LONG, size)
    return b"".join((head, bytes((len(name),)), name.encode("ascii"), body))


# -------------------------------------------------------------------------------------- messages

_LONG_HEAD: Final = Struct(">BQ")
_MORE_HEADS: Final = [bytes((MORE, size)) for size in range(256)]
_LAST_HEADS: Final = [bytes((0, size)) for size in range(256)]


def serialize_part(part: bytes, *, more: bool) -> bytes:
    """One frame of a message: for who puts messages together that have frames in common."""
    return part_head(len(part), more=more) + part


_SEALED_HEAD_BYTES: Final = 33
"""What CURVE puts before a part: the command's name, a nonce, the box's own bytes and flags."""


def part_head(size: int, *, more: bool) -> bytes:
    """What stands before a part of so many bytes."""
    if size < 256:
        return (_MORE_HEADS if more else _LAST_HEADS)[size]
    return _LONG_HEAD.pack(MORE | LONG if more else LONG, size)


def message_bytes(sizes: Iterable[int], *, sealed: bool = False) -> int:
    """How many bytes a message takes whose parts have these sizes."""
    heads = _SEALED_HEAD_BYTES if sealed else 0
    return sum([size + heads + (2 if size + heads < 256 else 9) for size in sizes])


def serialize_message(parts: Sequence[bytes]) -> bytes:
    """A message of at least one part, with all its frames."""
    chunks: list[bytes] = []
    for part in parts:
        size = len(part)
        chunks.append(_MORE_HEADS[size] if size < 256 else _LONG_HEAD.pack(MORE | LONG, size))
        chunks.append(part)
    size = len(chunks[-1])
    chunks[-2] = _LAST_HEADS[size] if size < 256 else _LONG_HEAD.pack(LONG, size)
    return b"".join(chunks)


def serialize_sealed(body: bytes) -> bytes:
    """A frame of CURVE traffic. As libzmq has it, it is not marked as a command."""
    size = len(_MESSAGE_NAME) + len(body)
    head = _LAST_HEADS[size] if size < 256 else _LONG_HEAD.pack(LONG, size)
    return b"".join((head, _MESSAGE_NAME, body))


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
    """The beginning of a message whose end has not come: its parts, where it started, and how many
    bytes its frames took.

    `heads` is what messages of this direction often begin with, and the parts that it stands for:
    a peer has few words, and says them again and again.
    """

    __slots__ = ("heads", "parts", "start", "used")

    def __init__(self, parts: Iterable[bytes] = (), start: int = 0, used: int = 0) -> None:
        self.parts = list(parts)
        self.start = start
        self.used = used
        self.heads: list[tuple[bytes, list[bytes]]] = []

    def take(self) -> tuple[list[bytes], int, int]:
        """Everything, leaving nothing behind."""
        taken = self.parts, self.start, self.used
        self.parts, self.used = [], 0
        return taken

    def keep(self, parts: list[bytes], start: int, used: int) -> None:
        self.parts, self.start, self.used = parts, start, used

    def learn(self, parts: list[bytes]) -> None:
        """Take up how this message begins."""
        first = parts[:_HEAD_PARTS]
        if len(parts) > _HEAD_PARTS and sum(map(len, first)) <= _HEAD_BYTES:
            head = b"".join([serialize_part(part, more=True) for part in first])
            self.heads.append((head, first))


Taker: TypeAlias = Callable[[bytes, int], tuple[int, Frame | None]]
"""Given a buffer and where a message begins in it: the end of the messages that it read at once,
and one frame that stands for all of them; or nothing."""


def scan_messages(
    buffer: bytes,
    position: int,
    base: int,
    limits: ZmtpLimits,
    partial: Partial,
    placed: list[Placed],
    take: Taker | None = None,
) -> tuple[int, int]:
    """The messages and commands from `position` on, as `Decoder._scan` has it, and `partial` before
    them; `buffer[0]` stands at `base`. Where a message begins, `take` is asked first.

    Nearly all frames are short and are read in line; both limits cost the loop nothing: `bound`
    stands for the end of what is there and of what is allowed, and the loop ends with the last part
    that may come.
    """
    end = len(buffer)
    parts, start, used = partial.take()
    limit, most = limits.frame_bytes, limits.parts
    heads = partial.heads if most > _HEAD_PARTS and take is None else ()
    while True:
        if not parts:
            if take is not None:
                stop, run = take(buffer, position)
                if run is not None:
                    placed.append((base + position, stop - position, run))
                    position = stop
            start, used = base + position, 0
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
                body = position + 2
                stop = body + buffer[position + 1]
                if flags > 1:
                    if flags > 3:
                        break
                    body = position + 9
                    stop = body + int.from_bytes(buffer[position + 1 : body])
                    if body > end:
                        partial.keep(parts, start, used + position - turn)
                        return position, 9
                if stop > bound:
                    used += position - turn
                    if used + stop - position > limit:
                        raise _too_large("message", limit, start, base + body - start)
                    partial.keep(parts, start, used)
                    return position, stop - position
                parts.append(buffer[body:stop])
                position = stop
                if flags & MORE:
                    continue
                placed.append((start, base + position - start, Message(tuple(parts))))
                if not known:
                    partial.learn(parts)
                parts = []
                break
            else:
                raise FrameTooLarge(
                    f"a message of more than the {most} parts allowed",
                    offset=start,
                    length=base + position - start,
                )
        except IndexError:
            partial.keep(parts, start, used + position - turn)
            return position, 2
        if flags > 3:
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
    """A command of the traffic, which may stand inside a message that began at `start`."""
    if not parts:
        return scan_command(buffer, position, base, limits, placed)
    inside: list[Placed] = []
    try:
        stop, need = scan_command(buffer, position, base, limits, inside)
    except FrameError as error:
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
    """One command at `position`: the position behind it and 0, or its own and what it needs."""
    flags, body, stop = read_header(buffer, position, base, limits.command_bytes, "command")
    if not body or stop > len(buffer):
        return position, stop - position
    offset, length = base + position, stop - position
    if not flags & COMMAND:
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
    """CURVE's traffic from `position` on, as `Decoder._scan` has it."""
    end = len(buffer)
    while True:
        flags, body, stop = read_header(buffer, position, base, limits.frame_bytes, "message")
        if not body or stop > end:
            return position, stop - position
        offset, length = base + position, stop - position
        if is_sealed(buffer, body, stop):
            placed.append((offset, length, Sealed(buffer[body + len(_MESSAGE_NAME) : stop])))
        elif flags & COMMAND:
            scan_command(buffer, position, base, limits, placed, sealed=True)
        else:
            raise MalformedFrame(
                "clear text in a CURVE connection", offset=offset, length=length, resumable=True
            )
        position = stop


def is_sealed(buffer: bytes, body: int, stop: int) -> bool:
    """Whether the body of a frame looks like CURVE's traffic."""
    return stop - body >= _SEALED_LEAST and buffer.startswith(_MESSAGE_NAME, body)


def read_header(
    buffer: bytes, position: int, base: int, limit: int, what: str
) -> tuple[int, int, int]:
    """Flags, start and end of the body at `position`. While the header isn't whole, 0 is given for
    its start, and for its end how far it must reach to know more."""
    head = buffer[position : position + 9]
    if len(head) < 2:
        return 0, 0, position + 2
    flags = head[0]
    if flags > 6 or flags == COMMAND | MORE:
        raise MalformedFrame(
            f"flags that nobody defined: {flags:#04x}", offset=base + position, length=1
        )
    if flags & LONG:
        if len(head) < 9:
            return 0, 0, position + 9
        body, size = position + 9, int.from_bytes(head[1:])
    else:
        body, size = position + 2, head[1]
    stop = body + size
    if stop - position > limit:
        raise _too_large(what, limit, base + position, body - position)
    return flags, body, stop


def _too_large(what: str, limit: int, offset: int, length: int) -> FrameTooLarge:
    return FrameTooLarge(
        f"a {what} of more than the {limit} bytes allowed", offset=offset, length=length
    )
