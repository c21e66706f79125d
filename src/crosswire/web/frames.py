"""Decoded frames of a live connection over HTTP, with secrets masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from crosswire.analyzer.conversations import Conversations
from crosswire.analyzer.decoded_frames import AnnotatedFrame, FrameReader
from crosswire.analyzer.frame_filter import summarize
from crosswire.gateways.context import ConnectedPeer
from crosswire.session import Tap
from crosswire.web.connections import find_connection
from crosswire.web.contract import EVENT_STREAM, Chunks, Operation, OperationRequest
from crosswire.web.event_stream import EventBuffer, stream_events
from crosswire.web.frame_rows import FrameDetail, range_row, violation_row
from crosswire.web.times import at_s
from crosswire.wire.clauses import clause_of
from crosswire.wire.registry import protocol

__all__ = ["FRAME_OPERATIONS"]

_HEX_BYTES: Final = 4096
_BYTES_PER_S: Final = 1 << 20


def watch_frames(ask: OperationRequest) -> Chunks:
    """Server-sent events: `frame` for each frame in either direction, decoded, from now on, with
    the same members as a frame of a capture; bytes and ranges of frames up to 4 KiB. `end` has the
    reason of the end and, if that was a violation, the clause. Secrets are masked. Only
    administrators may see frames, and users those of their own connections. Raises Forbidden,
    UnknownMessage, ServiceUnavailable."""
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


class _FrameTap:
    """Decodes what a session reads and writes, beside the tap that it has."""

    def __init__(self, ask: OperationRequest, gateway: ConnectedPeer, buffer: EventBuffer) -> None:
        name, roles = gateway.protocol, protocol(gateway.protocol).roles
        # It joins late: where a frame begins is found by the frames themselves.
        self._forward = FrameReader(name, _role(gateway, roles), late=True)
        self._backward = FrameReader(name, roles[-1], late=True, peer=self._forward)
        self._subjects = Conversations()
        self._number = 0
        self._gateway = gateway
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
        self._buffer.end("end", self._end())

    def _end(self) -> dict[str, str]:
        """Why the connection ended and, if that was a violation, which clause it broke."""
        gateway = self._gateway
        for closed in reversed(self._ask.server.context.closed):
            if closed.id == gateway.id:
                clause = clause_of(gateway.protocol, closed.reason)
                found = {"reason": f"the connection is closed: {closed.reason}"}
                if clause is not None:
                    found |= {"clause": clause.title, "page": clause.page}
                return found
        return {"reason": "the connection is closed"}

    def _show(self, reader: FrameReader, data: bytes) -> None:
        if not self._is_on:
            return
        ask = self._ask
        second = int(ask.now())
        if second != self._second:
            self._second, self._decoded_bytes = second, 0
        self._decoded_bytes += len(data)
        if self._decoded_bytes > _BYTES_PER_S:
            # Decoding is done on the event loop: a busy connection must not take twice its time.
            reader.skip(len(data))
            self._subjects.interrupt()
            self._buffer.lose()
            return
        for decoded in reader.feed(data):
            self._put(reader, decoded)

    def _put(self, reader: FrameReader, decoded: AnnotatedFrame) -> None:
        self._number += 1
        is_forward = reader is self._forward
        subject = self._subjects.subject(decoded.item, is_forward)
        violation, is_whole = decoded.violation, decoded.length <= _HEX_BYTES
        self._buffer.put(
            "frame",
            FrameDetail(
                number=self._number,
                connection=self._gateway.id,
                protocol=self._gateway.protocol,
                time=at_s(self._ask.hub.wall.at(self._ask.now())),
                direction="forward" if is_forward else "backward",
                sender=reader.decoder.sender,
                offset=decoded.offset,
                length=decoded.length,
                layer=decoded.layer,
                frame=decoded.frame,
                destination=subject.destination,
                conversation=subject.conversation,
                violation=None if violation is None else violation_row(violation),
                summary=summarize(decoded.fields, violation),
                fields=decoded.fields,
                hex=decoded.data.hex() if is_whole else "",
                masked=decoded.is_masked,
                ranges=[range_row(*each) for each in decoded.ranges] if is_whole else [],
            ),
        )


def _role(gateway: ConnectedPeer, roles: tuple[str, ...]) -> str:
    """The role of the peer; eMQP has a listener for each."""
    named = gateway.listener.removeprefix("emqp-").removesuffix("s")
    return named if named in roles else roles[0]


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
