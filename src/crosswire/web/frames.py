"""Decoded frames of a live connection over HTTP, with secrets masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from crosswire.gateways.context import ConnectedPeer
from crosswire.session import Tap
from crosswire.web.connections import find_connection
from crosswire.web.contract import EVENT_STREAM, Chunks, Operation, OperationRequest
from crosswire.web.event_stream import EventBuffer, stream_events
from crosswire.web.times import at_s
from crosswire.wire.contract import Decoder, Row
from crosswire.wire.registry import protocol

__all__ = ["FRAME_OPERATIONS"]

_HEX_BYTES: Final = 4096
_KEPT_BYTES: Final = 1 << 20
_BYTES_PER_S: Final = 1 << 20
_MASKED: Final = "(masked)"


def watch_frames(ask: OperationRequest) -> Chunks:
    """Server-sent events: `frame` for each frame in either direction, decoded, from now on. Secrets
    are masked. Only administrators may see frames, and users those of their own connections. Raises
    Forbidden, UnknownMessage, ServiceUnavailable."""
    gateway = find_connection(ask, ask.path["id"])
    buffer = EventBuffer()

    def check() -> None:
        is_own = bool(ask.principal) and gateway.principal == ask.principal
        if not is_own:
            ask.require_administrator()

    def begin() -> Callable[[], None]:
        watch = _FrameTap(ask, gateway, buffer)
        return watch.stop

    return stream_events(ask, buffer, check, begin)


class _FrameDirection:
    """One direction: its decoder, and the last bytes, for the frames' hex."""

    def __init__(self, name: str, decoder: Decoder) -> None:
        self.name = name
        self.decoder = decoder
        self._recent = bytearray()
        self._fed = 0
        self._recent_at = 0
        """The offset of the first of the recent bytes."""

    def feed(self, data: bytes) -> list[tuple[Row, str]]:
        """The frames that these bytes complete, and their bytes in hex; "" where there are too
        many."""
        self._recent += data
        rows = [(row, self._hex(row)) for row in self.decoder.rows(data)]
        self._fed += len(data)
        surplus = len(self._recent) - _KEPT_BYTES
        if surplus > 0:
            del self._recent[:surplus]
            self._recent_at += surplus
        return rows

    def skip(self, count: int) -> None:
        """These bytes are not decoded: it goes on where frames begin again."""
        self.decoder.skip(count)
        self._fed += count
        self._recent.clear()
        self._recent_at = self._fed

    def _hex(self, row: Row) -> str:
        start = row.offset - self._recent_at
        if row.length > _HEX_BYTES or start < 0:
            return ""
        return bytes(self._recent[start : start + row.length]).hex()


class _FrameTap:
    """Decodes what a session reads and writes, beside the tap that it has."""

    def __init__(self, ask: OperationRequest, gateway: ConnectedPeer, buffer: EventBuffer) -> None:
        entry = protocol(gateway.protocol)
        # It joins late: where a frame begins is found by the frames themselves.
        forward = entry.decoder(_role(gateway, entry.roles), late=True)
        backward = entry.decoder(entry.roles[-1], late=True, peer=forward)
        self._forward = _FrameDirection("forward", forward)
        self._backward = _FrameDirection("backward", backward)
        self._ask = ask
        self._buffer = buffer
        self._session = gateway.session
        self._other: Tap | None = self._session.tap
        self._is_on = True
        self._second = self._decoded_bytes = 0
        self._session.tap = self

    def stop(self) -> None:
        """End it, and give the session back the tap that it had, unless another was put around
        this one since: then it only passes on."""
        self._is_on = False
        if self._session.tap is self:
            self._session.tap = self._other

    def received(self, data: bytes) -> None:
        """These bytes were read from the socket."""
        if self._other is not None:
            self._other.received(data)
        self._show(self._forward, bytes(data))

    def sent(self, chunks: Sequence[bytes | memoryview]) -> None:
        """These bytes were given to the socket."""
        if self._other is not None:
            self._other.sent(chunks)
        if self._is_on:
            self._show(self._backward, b"".join(chunks))

    def peer_finished(self) -> None:
        """The peer sends no more."""
        if self._other is not None:
            self._other.peer_finished()

    def finished(self) -> None:
        """We send no more."""
        if self._other is not None:
            self._other.finished()

    def closed(self, error: Exception | None) -> None:
        """The socket is closed."""
        if self._other is not None:
            self._other.closed(error)
        self._buffer.end("end", {"reason": "the connection is closed"})

    def _show(self, direction: _FrameDirection, data: bytes) -> None:
        if not self._is_on:
            return
        ask = self._ask
        second = int(ask.now())
        if second != self._second:
            self._second, self._decoded_bytes = second, 0
        self._decoded_bytes += len(data)
        if self._decoded_bytes > _BYTES_PER_S:
            # Decoding is done on the event loop: a busy connection must not take twice its time.
            direction.skip(len(data))
            self._buffer.lose()
            return
        moment = at_s(ask.hub.wall.at(ask.now()))
        for row, text in direction.feed(data):
            fields, is_masked = mask(row)
            self._buffer.put(
                "frame",
                ShownFrame(
                    time=moment,
                    direction=direction.name,
                    offset=row.offset,
                    length=row.length,
                    layer=row.layer,
                    frame=row.frame,
                    fields=fields,
                    error=row.error,
                    reason=row.reason,
                    # Of what is no frame nobody knows whether there is a secret in it.
                    hex="" if is_masked or row.error is not None else text,
                ),
            )


class ShownFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frame, or what is none. Offsets are counted from the begin of the stream."""

    time: Any
    direction: str
    offset: int
    length: int
    layer: int = 0
    frame: str | None = None
    fields: dict[str, Any] | None = None
    error: str | None = None
    reason: str | None = None
    hex: str = ""


def _role(gateway: ConnectedPeer, roles: tuple[str, ...]) -> str:
    """The role of the peer; eMQP has a listener for each."""
    named = gateway.listener.removeprefix("emqp-").removesuffix("s")
    return named if named in roles else roles[0]


def mask(row: Row) -> tuple[dict[str, Any] | None, bool]:
    """The fields of a frame without secrets, and whether there may be any: then its bytes are not
    shown either. The same that the tap masks: tokens of EMP, MicroMsg2 and Epoxy, and ZMTP's
    handshake."""
    fields = row.fields
    if fields is None:
        return None, False
    if row.frame == "request" and fields.get("op") == "$authenticate":
        return {**fields, "data": _MASKED}, True
    if row.frame == "zmtp-command":
        return {**fields, "properties": _MASKED}, True
    if row.frame == "zmtp-message":
        return fields, False
    if row.frame == "handshake":
        return {
            name: [_without_secret(each) for each in value] if isinstance(value, list) else value
            for name, value in fields.items()
        }, True
    if "layer_data" in fields:
        return {**fields, "layer_data": _MASKED}, True
    return fields, False


def _without_secret(extension: Any) -> Any:
    if isinstance(extension, dict) and str(extension.get("name", "")).lower() == "x-auth":
        return {**extension, "properties": _MASKED}
    return extension


FRAME_OPERATIONS: Final = (
    Operation(
        name="watch_frames",
        tag="live",
        method="GET",
        path="/v1/connections/{id}/frames",
        summary="Frames of a connection as they pass, decoded, with secrets masked",
        handler=watch_frames,
        answer=None,
        streams=EVENT_STREAM,
        needs="principal",
    ),
)
