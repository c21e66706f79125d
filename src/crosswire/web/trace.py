"""What happened to a message, over HTTP: its steps, its content, and what it is linked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from crosswire.access import (
    parse_subscription_label,
    subscription_dead_letters,
    subscription_label,
)
from crosswire.envelope import Envelope
from crosswire.errors import UnknownMessage
from crosswire.hub.dead import origin_of, sent_again_as
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerRow
from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.lake.wire_history import RecordedConnection, read_connection
from crosswire.server.frame_search import CarryingFrame, find_frame
from crosswire.server.ledger_search import FoundSteps
from crosswire.server.log_selection import LogSelection
from crosswire.server.log_snapshot import ids_of
from crosswire.server.message_search import (
    ENVELOPE_COLUMNS,
    MessageCriteria,
    MessageSearch,
    envelope_of,
)
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.messages import JsonMessage, shown_to
from crosswire.web.search import find_steps, log_of
from crosswire.web.times import Moment, at_us
from crosswire.wire.registry import PROTOCOL_NAMES

__all__ = ["TRACE_OPERATIONS"]

_STEPS_S: Final = 3.0
_LINKS_S: Final = 1.0
_SAME_TIME: Final = 1_000
_MOST_BYTES: Final = 64 << 20
_FRAMES_S: Final = 2.0
_MOST_FRAMES: Final = 10
_RECORDED_BYTES: Final = 4 << 20
_HEX_BYTES: Final = 64 << 10
_DIRECTIONS: Final = {"accepted": FORWARD, "delivered": BACKWARD}


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a message."""

    seq: int
    """The number of the step in the hub's ledger; 0 until it is on disk."""
    time: Moment
    step: str
    """`accepted`, `delivered`, `settled`, `refused`, `returned`, `expired`, `dead`, `answered`,
    `failed`, `dropped`, `damaged` or `replayed`."""
    destination: str
    protocol: str
    connection: str
    """The connection that produced or got it; empty for steps of the hub."""
    attempt: int
    """Of a delivery: 1 for the first."""
    detail: str
    """The reason, or more about the step."""
    count: int
    """How many deliveries the step stands for."""
    subscription: str
    """The named subscription whose step it is."""


class MessageLink(msgspec.Struct, frozen=True, kw_only=True):
    """Another message that this one became, or came from."""

    relation: Literal["origin", "dead_letter", "sent_again_as", "sent_again_from"]
    """`origin`: what this dead letter was before; `dead_letter`: what this one became;
    `sent_again_as` and `sent_again_from`: a replay or a move."""
    id: int
    destination: str
    """Where it is, or was; empty if that is not known."""


class FrameRow(msgspec.Struct, frozen=True, kw_only=True):
    """A frame that carried the message, as the tap recorded it."""

    step: str
    """The step that it belongs to: `accepted` or `delivered`."""
    connection: str
    protocol: str
    direction: str
    """`forward` from the peer to the hub, or `backward`."""
    time: Moment
    """When its last byte passed."""
    offset: int
    """Of its first byte, in this direction of the connection."""
    length: int
    """How many bytes it has."""
    frame: str
    """The name of the frame, as `crosswire decode` has it."""
    hex: str
    """Its bytes, the first 64 KiB at most."""
    has_payload: bool
    """Whether it has the payload as it is. If not, it is the frame that is nearest in time."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a message, in order, the message itself, and what it is linked to."""

    id: int
    steps: list[StepRow]
    message: JsonMessage | None
    """Null if neither the store nor the lake has it any more."""
    found_in: Literal["", "store", "lake"]
    """Where the message was found."""
    links: list[MessageLink]
    """Messages that it became or came from."""
    frames: list[FrameRow]
    """Frames that carried it, where the tap recorded its connections, and the user may read it."""
    is_complete: bool
    """False if there was no time to search everything: request it again."""


async def trace(ask: OperationRequest) -> Trace:
    """The steps of a message: in memory, in the store's journal and in the lake. With the whole
    message if the user may read it, and its dead letter, origin and replays. Raises UnknownMessage,
    LakeError, ServiceUnavailable."""
    identifier: int = ask.path["id"]
    if not 0 < identifier <= ask.hub.store.newest_id:
        # For others with the text of a message that they may not know of: how far ids are given
        # out shows how much everybody sends.
        if ask.is_observer:
            raise UnknownMessage(f"there is no message {identifier} yet")
        raise _unknown(identifier)
    async with log_of(ask).slots.search(ask.holder):
        found = await find_steps(ask, {identifier}, _STEPS_S)
        # Without a trace of what the principal may not know of, as if there was nothing.
        rows = [row for row in found.rows[identifier] if _is_visible(ask, row)]
        envelope, found_in = await _message(ask, identifier, rows)
        if not rows and envelope is None:
            raise _unknown(identifier)
        links = await _links(ask, identifier, rows, envelope, found)
        frames, has_all_frames = await _frames(ask, rows, envelope)
    shown = None
    if envelope is not None:
        shown = shown_to(ask, envelope, most_bytes=None)
    return Trace(
        id=identifier,
        steps=[step_row(each) for each in rows],
        message=shown,
        found_in=found_in,
        links=links,
        frames=frames,
        is_complete=found.is_complete and has_all_frames,
    )


def _unknown(identifier: int) -> UnknownMessage:
    return UnknownMessage(f"message {identifier} is neither in the ledger nor stored")


def step_row(row: LedgerRow) -> StepRow:
    """A row of the ledger."""
    return StepRow(
        seq=row.seq,
        time=at_us(row.time),
        step=row.step,
        destination=row.destination,
        protocol=row.protocol,
        connection=row.connection,
        attempt=row.attempt,
        detail=row.detail,
        count=row.count,
        subscription=row.subscription,
    )


def _is_visible(ask: OperationRequest, row: LedgerRow) -> bool:
    """Observers see every step, others those at destinations that they have a right to, without
    the named subscriptions of other users."""
    if ask.is_observer:
        return True
    is_own = not row.subscription or row.subscription.startswith(
        f"{subscription_label(ask.principal, '')}."
    )
    return is_own and ask.may_see(row.destination)


# The message.


async def _message(
    ask: OperationRequest, identifier: int, rows: list[LedgerRow]
) -> tuple[Envelope | None, Literal["", "store", "lake"]]:
    for destination in dict.fromkeys(row.destination for row in rows):
        envelope = _stored(ask.hub, destination, identifier)
        if envelope is not None:
            return envelope, "store"
    log = log_of(ask)
    moment = log.moment()

    def read() -> Envelope | None:
        log.snapshot(moment, LogSelection([], may=ask.may_read), {})
        for batch, _ in log.history.read(identifier, identifier, ENVELOPE_COLUMNS):
            if batch is not None:
                for row in (ids_of(batch) == identifier).nonzero()[0].tolist():
                    return envelope_of(batch, row)
        return None

    envelope = await log.with_files(read)
    if envelope is None or not ask.may_see(envelope.destination):
        return None, ""
    return envelope, "lake"


def _stored(hub: Hub, destination: str, identifier: int) -> Envelope | None:
    """The message if it is stored; calls are stored under the service's name without the method."""
    candidates = [destination]
    if destination.startswith("service/"):
        candidates.append("/".join(destination.split("/")[:2]))
    for candidate in candidates:
        if candidate in hub.store.destinations():
            (envelope,) = hub.fetch(candidate, [identifier])
            if envelope is not None:
                return envelope
    return None


# Links.


async def _links(
    ask: OperationRequest,
    identifier: int,
    rows: list[LedgerRow],
    envelope: Envelope | None,
    found: FoundSteps,
) -> list[MessageLink]:
    links: list[MessageLink] = []
    origin = None if envelope is None else origin_of(envelope)
    if origin is not None:
        links.append(MessageLink(relation="origin", id=origin[0], destination=origin[1]))
    before = found.sent_again.get(identifier)
    if before is not None and _is_visible(ask, before):
        links.append(
            MessageLink(relation="sent_again_from", id=before.id, destination=before.destination)
        )
    for row in rows:
        sent = sent_again_as(row.detail) if row.step == "replayed" else None
        if sent is not None:
            links.append(MessageLink(relation="sent_again_as", id=sent, destination=""))
    for letters, time_us in _burials(rows):
        if ask.may_see(letters) or ask.may_read(letters):
            for each in await _dead_letters(ask, letters, time_us, identifier):
                links.append(MessageLink(relation="dead_letter", id=each.id, destination=letters))
    return links


def _burials(rows: list[LedgerRow]) -> Iterator[tuple[str, int]]:
    """Queues of dead letters that it went to, and when."""
    for row in rows:
        if row.step == "dead" and row.subscription:
            yield subscription_dead_letters(*parse_subscription_label(row.subscription)), row.time
        elif row.step == "dead":
            yield f"{row.destination}/dead", row.time


async def _dead_letters(
    ask: OperationRequest, letters: str, time_us: int, identifier: int
) -> list[Envelope]:
    """Dead letters of a message, which are accepted at the time of its burial."""
    log, number = log_of(ask), ask.hub.store.destinations().get(letters)
    moment, next_row, committed = log.moment(), ask.hub.store.next_row, ask.hub.committed_id
    logs = {} if number is None else {letters: number}
    criteria = MessageCriteria(letters.__eq__, time_us, time_us + 1, "", None, "")

    def find() -> list[Envelope]:
        search = MessageSearch(
            log.snapshot(moment, LogSelection([], may=ask.may_read), logs),
            log.history,
            criteria,
            names={number: name for name, number in logs.items()},
            next_row=next_row,
            pause=log.pause,
        )
        ends_at = time.monotonic() + _LINKS_S
        found = search.find(
            identifier, committed, most=_SAME_TIME, most_bytes=_MOST_BYTES, ends_at=ends_at
        )
        return found.messages

    same = await log.with_files(find)
    return [each for each in same if (origin_of(each) or (0,))[0] == identifier]


# Frames.


async def _frames(
    ask: OperationRequest, rows: list[LedgerRow], envelope: Envelope | None
) -> tuple[list[FrameRow], bool]:
    """The frames of its acceptance and its deliveries, and whether there was time to look for all
    of them."""
    if envelope is None or not ask.may_read(envelope.destination):
        return [], True
    steps = [
        row
        for row in rows
        if row.step in _DIRECTIONS and row.connection and row.protocol in PROTOCOL_NAMES
    ][:_MOST_FRAMES]
    if not steps:
        return [], True
    log, lake, payload = log_of(ask), ask.server.lake_path, envelope.payload

    def find() -> tuple[list[FrameRow], bool]:
        ends_at = time.monotonic() + _FRAMES_S

        def is_over() -> bool:
            log.pause(0.0)
            return time.monotonic() >= ends_at

        found = []
        is_complete = True
        read: dict[str, RecordedConnection] = {}
        # The last step first: what is read of a connection up to it has the steps before it, too.
        for row in reversed(steps):
            frame = None
            # What is near the step is read first, and is mostly enough. Some decoders need the
            # connection from its beginning on, which may be long ago.
            for whole in (False, True):
                recorded = read.get(row.connection)
                if recorded is None or not (recorded.is_whole or _is_around(recorded, row.time)):
                    recorded = read[row.connection] = read_connection(
                        lake, row.connection, row.time, _RECORDED_BYTES, is_over, whole=whole
                    )
                is_complete = is_complete and recorded.is_complete
                direction = _DIRECTIONS[row.step]
                frame = find_frame(
                    recorded.runs, recorded.is_whole, row.protocol, direction, row.time, payload
                )
                if recorded.is_whole or (frame is not None and frame.has_payload):
                    break
                read.pop(row.connection)
            if frame is not None:
                found.append(_frame_row(row, frame))
        return found[::-1], is_complete

    return await log.in_thread(find)


def _is_around(recorded: RecordedConnection, time_us: int) -> bool:
    """Whether what was read of a connection begins before a time, and ends after it."""
    runs = recorded.runs
    return bool(runs) and runs[0].time < time_us <= runs[-1].time


def _frame_row(row: LedgerRow, frame: CarryingFrame) -> FrameRow:
    return FrameRow(
        step=row.step,
        connection=row.connection,
        protocol=row.protocol,
        direction=frame.direction,
        time=at_us(frame.time),
        offset=frame.offset,
        length=frame.row.length,
        frame=frame.row.frame or "",
        hex=frame.data[:_HEX_BYTES].hex(),
        has_payload=frame.has_payload,
    )


TRACE_OPERATIONS: Final = (
    Operation(
        name="trace",
        tag="messages",
        method="GET",
        path="/v1/messages/{id:id}",
        summary="What happened to a message, step by step",
        handler=trace,
        answer=Trace,
        needs="principal",
    ),
)
