"""Relink: what a message is follows from the endpoint that the connector asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, Final, get_args

import msgspec

from crosswire.errors import FrameError
from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    REQUEST,
    RESPONSE,
    Described,
    Reading,
    Rows,
    json_text,
    kind_of_destination,
)
from crosswire.wire.contract import Frame, Placed
from crosswire.wire.relink.frames import (
    DEFAULTS,
    Acknowledgement,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Operation,
    Ping,
    Pong,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
    layout,
    scan,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ListenerHello,
    parse_hello,
    parse_version,
)

__all__ = ["READING"]

_MOST_LISTED: Final = 16
_BINARY: Final = "application/octet-stream"

# What the scanner calls frames, and the order of its slices.
_OF_CHANNELS: Final = (5, 6, 7, 8)
_MESSAGE: Final = 9
_VERSIONS: Final = (10, 11)
_HELLOS: Final = (12, 13)
_SIZES: Final = 3
_LARGE, _MULTICAST = 2, 8
_OPERATION: Final = (CONTROL, "operation", get_args(Operation))
_ACKNOWLEDGED: Final = (ACKNOWLEDGEMENT, "acknowledgement", get_args(Acknowledgement))
_GENERAL: Final = (
    Described("{}", HEARTBEAT),
    Described("{}", HEARTBEAT),
    Described("{}", HEARTBEAT),
    Described("{}", CONTROL),
    Described("{}", GOODBYE),
)
"""nop, ping, pong, resume, shutdown"""
_ABOUT: Final = (_OPERATION, _ACKNOWLEDGED, _OPERATION, _ACKNOWLEDGED)
_PROPERTIES: Final = msgspec.json.Decoder(dict[str, bool | int | float | str])


class RelinkReading(Reading):
    """Messages don't carry their sequence number: it is counted, channel by channel, where the link
    is new; on a link that was resumed it is not known.

    The n-th message on a listener's channel answers the n-th on the connector's channel of the same
    number, or the other way round where the connector serves: their identifier is `channel:n`.
    """

    def __init__(self) -> None:
        self._destination: str | None = None
        self._serves = False
        self._asked_for = 0
        self._id_sizes = (1, 1)
        self._counted = False
        self._next: dict[tuple[bool, int], int] = defaultdict(int)

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message():
                return self._message(forward, frame)
            case ChannelAcknowledgement() | SequenceAcknowledgement():
                return Described(
                    json_text(frame.fields()),
                    ACKNOWLEDGEMENT,
                    _listed(frame.channels),
                    self._destination,
                    frame.acknowledgement,
                    getattr(frame, "sequence", None),
                )
            case ChannelOperation() | SequenceOperation():
                if frame.operation == "close":
                    for channel in frame.channels:
                        self._next.pop((forward, channel), None)
                return Described(
                    json_text(frame.fields()),
                    CONTROL,
                    _listed(frame.channels),
                    self._destination,
                    frame.operation,
                    getattr(frame, "sequence", None),
                )
            case ConnectorHello():
                self._destination, _, query = frame.endpoint.partition("?")
                self._serves = "serve" in query.split("&")
                self._asked_for = frame.link
                self._id_sizes = frame.connector_id_size, frame.listener_id_size
                return Described(
                    json_text(frame.fields()), HANDSHAKE, destination=self._destination
                )
            case ListenerHello():
                self._counted = frame.link != 0 and frame.link != self._asked_for
                session = f"{frame.epoch:x}/{frame.link:x}" if frame.link else None
                return Described(json_text(frame.fields()), HANDSHAKE, session, self._destination)
            case Ping() | Pong() | Nop():
                return Described(json_text(frame.fields()), HEARTBEAT)
            case Shutdown():
                return Described(json_text(frame.fields()), GOODBYE)
        kind = HANDSHAKE if frame.frame_name.endswith("-version") else CONTROL
        return Described(json_text(frame.fields()), kind)

    def describe_rows(self, rows: Rows, start: int, stop: int) -> Iterator[Described | FrameError]:
        data, payloads, numbers, details = rows.data, rows.payloads, rows.number, rows.detail
        (payload_at, payload_size), (property_at, property_size) = rows.slices[:2]
        sizes_size = rows.slices[_SIZES][1]
        following, destination, counted = self._next, self._destination, self._counted
        kinds = self._kind(False), self._kind(True)
        span = slice(start, stop)
        for index, forward, frame in zip(
            range(start, stop), rows.forward[span], rows.frame[span], strict=True
        ):
            detail = details[index]
            if frame in _OF_CHANNELS and not detail & _MULTICAST:
                yield self._about_channel(rows, index, forward, frame)
                continue
            if frame < len(_GENERAL):
                yield _GENERAL[frame]
                continue
            parts = sizes_size[index] >> (3 if detail & _LARGE else 1)
            if frame != _MESSAGE or detail & _MULTICAST or parts > 2:
                yield self._in_full(rows, index, forward, frame)
                if frame in _HELLOS:
                    destination, counted = self._destination, self._counted
                    kinds = self._kind(False), self._kind(True)
                continue
            channel, size = numbers[index], payload_size[index]
            number = following[forward, channel]
            following[forward, channel] = number + 1
            at, properties, sizes = payload_at[index], None, f"{size}" if parts else ""
            if parts == 2:
                begin, long = property_at[index], property_size[index]
                properties = _properties(data[begin : begin + long])
                sizes = f"{long},{size}"
            yield Described(
                f'{{"channels":[{channel}],"multicast":false,"part_sizes":[{sizes}]}}',
                kinds[forward],
                f"{channel}:{number}",
                destination,
                None,
                number if counted else None,
                size,
                -size & 7,
                data[at : at + size] if payloads else None,
                _BINARY,
                properties,
            )

    def _in_full(self, rows: Rows, index: int, forward: bool, code: int) -> Described:
        """What there is less of."""
        offset, length = rows.offset[index], rows.length[index]
        sender = "connector" if forward else "listener"
        at = rows.position[index]
        whole = rows.data[at : at + length]
        frame: Any
        if code in _VERSIONS:
            return _version(sender, whole[:1])
        if code in _HELLOS:
            frame, _ = parse_hello(sender, whole, 0, offset)
        else:
            placed: list[Placed] = []
            scan(whole, 0, offset, layout(sender, *self._id_sizes), DEFAULTS, placed)
            frame = placed[0][2]
        return self.describe(forward, frame, offset, length)

    def _about_channel(self, rows: Rows, index: int, forward: bool, code: int) -> Described:
        channel, detail, sequence = rows.number[index], rows.detail[index], rows.sequence[index]
        kind, what, values = _ABOUT[code - _OF_CHANNELS[0]]
        value = values[detail]
        if value == "close":
            self._next.pop((forward, channel), None)
        numbered = f'"sequence":{sequence},' if sequence >= 0 else ""
        return Described(
            f'{{"{what}":"{value}","channels":[{channel}],{numbered}"multicast":false}}',
            kind,
            str(channel),
            self._destination,
            value,
            sequence if sequence >= 0 else None,
        )

    def interrupt(self, forward: bool) -> None:  # noqa: ARG002
        """What was missed may have been messages."""
        self._counted = False

    def _save(self) -> Any:
        numbers = [(*key, number) for key, number in self._next.items()]
        hello = self._destination, self._serves, self._asked_for, self._id_sizes
        return hello, self._counted, numbers

    def _restore(self, own: Any) -> None:
        hello, self._counted, numbers = own
        self._destination, self._serves, self._asked_for, (here, there) = hello
        self._id_sizes = here, there
        self._next = defaultdict(int)
        for forward, channel, number in numbers:
            self._next[forward, channel] = number

    def _message(self, forward: bool, frame: Message) -> Described:
        numbers = []
        for channel in frame.channels:
            numbers.append(self._next[forward, channel])
            self._next[forward, channel] += 1
        identifier = _listed(
            f"{channel}:{number}" for channel, number in zip(frame.channels, numbers, strict=True)
        )
        fields: dict[str, Any] = {
            "channels": list(frame.channels),
            "multicast": frame.multicast,
            "part_sizes": [len(part) for part in frame.parts],
        }
        properties, payload, size, end = _content(frame)
        return Described(
            json_text(fields),
            self._kind(forward),
            identifier,
            self._destination,
            sequence=numbers[0] if numbers and self._counted else None,
            payload_size=size,
            payload_end=end,
            payload=payload,
            content_type=_BINARY,
            properties=properties,
        )

    def _kind(self, forward: bool) -> str:
        kind = kind_of_destination(self._destination or "")
        if kind == REQUEST and forward is self._serves:
            return RESPONSE
        return kind


def _listed(items: Iterable[object]) -> str:
    """A multicast may have 65,536 targets: `fields` has them all, this the first few."""
    first = list(islice(map(str, items), _MOST_LISTED + 1))
    if len(first) > _MOST_LISTED:
        first[-1] = "…"
    return ",".join(first)


def _content(frame: Message) -> tuple[str | None, bytes, int, int]:
    """Properties, payload, how many bytes it takes on the wire, how many stand behind it.

    One part is the payload, two are properties and payload (DESIGN, section 4); more are taken as
    they stand, padding included.
    """
    parts = frame.parts
    if not parts:
        return None, b"", 0, 0
    padding = -len(parts[-1]) % 8
    if len(parts) <= 2:
        properties = _properties(bytes(parts[0])) if len(parts) == 2 else None
        return properties, bytes(parts[-1]), len(parts[-1]), padding
    whole = b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    whole = whole[: len(whole) - padding] if padding else whole
    return None, whole, len(whole), padding


@lru_cache(maxsize=256)
def _version(sender: str, number: bytes) -> Described:
    frame, _ = parse_version(sender, number + bytes(7), 0)
    assert frame is not None
    return Described(json_text(frame.fields()), HANDSHAKE)


@lru_cache(maxsize=256)
def _properties(part: bytes) -> str | None:
    try:
        return json_text(_PROPERTIES.decode(part))
    except msgspec.MsgspecError:
        return None  # two parts that are somebody's own business


READING = RelinkReading
