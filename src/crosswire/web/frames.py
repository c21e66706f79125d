"""Decoded frames of a live connection over HTTP, with secrets masked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from crosswire.analyzer.conversations import Conversations
from crosswire.analyzer.decoded_frames import AnnotatedFrame, FrameReader
from crosswire.analyzer.frame_filter import summarize
from crosswire.gateways.context import ConnectedPeer
from crosswire.hub.turns import QUANTUM_S, TurnShare
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
_WAITING_BYTES: Final = 1 << 20
_PART_BYTES: Final = 512
"""Decoded before it is checked whether others have to be served: dozens of the smallest frames,
which take longest for their size."""


def watch_frames(ask: OperationRequest) -> Chunks:
    """Server-sent events: `frame` for each frame in either direction, decoded, from now on, with
    the same members as a frame of a capture; bytes and ranges of frames up to 4 KiB. `end` has the
    reason of the end and, if that was a violation, the clause. Secrets are masked. Only
    administrators may see frames, and users those of their own connections. Raises Forbidden,
    UnknownMessage, ServiceUnavailable."""
    gateway = find_connection(ask, ask.path["id"])
    buffer = EventBuffer(ask.streams)

    def check() -> None:
        is_own = bool(ask.principal) and gateway.principal == ask.principal
        if not is_own:
            ask.require_administrator()

    def begin() -> Callable[[], None]:
        watch = _FrameTap(ask, gateway, buffer)
        return watch.stop

    return stream_events(ask, buffer, check, begin)


class _TappedBytes(NamedTuple):
    """What a session has read or written; without `data`, bytes that are not to be decoded."""

    reader: FrameReader
    time_s: float
    data: memoryview
    left_out: int = 0


class _FrameTap:
    """Decodes what a session reads and writes, beside the tap that it has.

    To show a frame takes far longer than to process it. So this is no part of the session's work:
    bytes wait for turns of their own. More than a MiB of them, or in a second, is left out.
    """

    def __init__(self, ask: OperationRequest, gateway: ConnectedPeer, buffer: EventBuffer) -> None:
        name, roles = gateway.protocol, protocol(gateway.protocol).roles
        # It joins late: where a frame begins is found by the frames themselves.
        self._forward = FrameReader(name, _role(gateway, roles), late=True, kept_bytes=_HEX_BYTES)
        self._backward = FrameReader(
            name, roles[-1], late=True, peer=self._forward, kept_bytes=_HEX_BYTES
        )
        self._subjects = Conversations()
        self._number = 0
        self._gateway = gateway
        self._ask = ask
        self._buffer = buffer
        self._session = gateway.session
        self._other: Tap | None = self._session.tap
        self._is_on = True
        self._second = self._second_bytes = 0
        self._waiting: deque[_TappedBytes] = deque()
        self._waiting_bytes = 0
        self._has_ended = False
        self._share = TurnShare(ask.hub.turns, self._work)
        self._session.tap = self

    def stop(self) -> None:
        """End it, and give the session back the tap that it had, unless another was put around
        this one since: then it only passes on."""
        self._is_on = False
        self._share.close()
        self._waiting.clear()
        if self._session.tap is self:
            self._session.tap = self._other

    def received(self, data: bytes) -> None:
        """These bytes were read from the socket."""
        if self._other is not None:
            self._other.received(data)
        self._take(self._forward, bytes(data))

    def sent(self, chunks: Sequence[bytes | memoryview]) -> None:
        """These bytes were given to the socket."""
        if self._other is not None:
            self._other.sent(chunks)
        if self._is_on:
            self._take(self._backward, b"".join(chunks))

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
        self._has_ended = True
        self._share.later()

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

    def _take(self, reader: FrameReader, data: bytes) -> None:
        """Have these bytes decoded later, unless there are too many."""
        if not self._is_on:
            return
        now = self._ask.now()
        if int(now) != self._second:
            self._second, self._second_bytes = int(now), 0
        self._second_bytes += len(data)
        if (
            self._second_bytes > _BYTES_PER_S
            or self._waiting_bytes > _WAITING_BYTES
            or self._buffer.is_full
        ):
            self._waiting.append(_TappedBytes(reader, now, memoryview(b""), len(data)))
        else:
            self._waiting.append(_TappedBytes(reader, now, memoryview(data)))
            self._waiting_bytes += len(data)
        self._share.later()

    def _work(self) -> None:
        if self._ask.hub.callbacks.run("tap", self._decode) is not None:
            # As with any tap: a recording with a hole is of no use.
            self.stop()
            self._buffer.end("end", {"reason": "internal error"})

    def _decode(self) -> None:
        """Decode some of what waits, in a turn."""
        clock = self._ask.hub.turns.thread_clock
        ends_at = clock() + QUANTUM_S
        while self._waiting and clock() < ends_at:
            reader, time_s, data, left_out = self._waiting.popleft()
            if left_out:
                reader.skip(left_out)
                self._subjects.interrupt()
                self._buffer.lose()
                continue
            part, rest = bytes(data[:_PART_BYTES]), data[_PART_BYTES:]
            self._waiting_bytes -= len(part)
            if rest:
                self._waiting.appendleft(_TappedBytes(reader, time_s, rest))
            for decoded in reader.feed(part):
                self._put(reader, decoded, time_s)
        if self._waiting:
            self._share.later()
        elif self._has_ended:
            self._buffer.end("end", self._end())

    def _put(self, reader: FrameReader, decoded: AnnotatedFrame, time_s: float) -> None:
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
                time=at_s(self._ask.hub.wall.at(time_s)),
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
        example_event=(
            "id: 1\nevent: frame\n"
            'data: {"number":1,"connection":"emp-1-2f","protocol":"emp","direction":"forward",'
            '"sender":"client","offset":12,"length":8,"frame":"ping","violation":null,'
            '"fields":{},"hex":"0000000402000000","masked":false,"ranges":[]}\n\n'
        ),
        needs="principal",
    ),
)
