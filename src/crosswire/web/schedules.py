"""Schedules over HTTP: list, add, pause, fire, remove and preview them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from crosswire.envelope import LARGEST_INTEGER, Envelope, Property, check_properties, message_kind
from crosswire.errors import InvalidSchedule, UnknownMessage
from crosswire.gateways.payloads import JsonPayload, from_body
from crosswire.hub.schedules import Schedule, check_interval
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.messages import JsonMessage, show_message
from crosswire.web.paging import NameQuery, SortKey, page_of
from crosswire.web.state import Removed
from crosswire.web.times import Moment, at_s

__all__ = ["SCHEDULE_OPERATIONS"]

_NEVER_S: Final = 1e15
"""After every due time; infinity would not fit into a cursor."""

Some = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule and its next fire times."""

    id: str
    destination: str
    interval_s: float
    """The time between two fires; 0 with a cron expression."""
    cron: str
    """A cron expression, in UTC; empty with an interval."""
    run_count: int
    """It ends after this many fires; 0 for never."""
    fired: int
    """How often it has fired."""
    missed: str
    """Due times while the hub was down: `skip`, `once` for one message, or `all`."""
    nohaste: bool
    """Whether the first fire is after one interval, not at once."""
    paused: bool
    """Whether it does not fire. Due times that pass meanwhile are left out."""
    next_due: Moment | None
    """When it fires next; null while it is paused."""
    message: JsonMessage
    preview: list[Moment]
    """The next fire times."""


class ScheduleRows(msgspec.Struct, frozen=True):
    """A page of schedules."""

    schedules: list[ScheduleRow]
    next: str
    """The cursor of the next page; empty after the last."""


class SchedulesQuery(NameQuery, frozen=True, kw_only=True):
    """A page of schedules, in order of ids; those that fire next, or fired most often, first."""

    destination: str = ""
    """Only schedules that send there."""
    state: Literal["", "active", "paused"] = ""
    """Only schedules that are paused, or that are not."""
    sort: Literal["id", "due", "fired"] = "id"
    """By what the list is sorted: `due` is the next fire time, paused ones come last."""


class ScheduleChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of a schedule."""

    paused: bool
    """Whether it does not fire."""


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """The message that was sent."""

    id: int
    """Of the message."""
    destination: str


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schedule, which replaces one with the same `id`. Give exactly one of `interval_s` and
    `cron`, and exactly one of `json`, `text` and `base64`."""

    destination: str
    """A queue or a topic."""
    id: str = ""
    """By default the hub chooses one."""
    interval_s: float = 0.0
    cron: str = ""
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    properties: dict[str, Property] = {}
    run_count: Count = 0
    missed: Literal["skip", "once", "all"] = "once"
    nohaste: bool = False


class PreviewQuery(msgspec.Struct, frozen=True, kw_only=True):
    """How many fire times to compute."""

    count: Some = 10
    """How many fire times the response has at most."""


class PreviewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An interval or a cron expression, as if it were added now."""

    interval_s: float = 0.0
    cron: str = ""
    nohaste: bool = False
    count: Some = 10


class Preview(msgspec.Struct, frozen=True):
    """Fire times."""

    times: list[Moment]


async def list_schedules(ask: OperationRequest) -> ScheduleRows:
    """A page of schedules, each with its next fire time: of all for observers, their own for
    others."""
    query: SchedulesQuery = ask.query

    def key(schedule: Schedule) -> SortKey | None:
        if (
            query.contains not in schedule.id
            or query.destination not in ("", schedule.envelope.destination)
            or not _is_visible(ask, schedule)
            or (query.state and schedule.paused != (query.state == "paused"))
        ):
            return None
        return _SORTS[query.sort](schedule), schedule.id

    async with ask.work.turn() as turn:
        page, following = await page_of(ask.hub.schedules.all(), key, query, turn)
        rows = []
        for each in page:
            rows.append(_row(ask, each, 1))
            await turn.pause()
    return ScheduleRows(rows, following)


_SORTS: Final[dict[str, Callable[[Schedule], float]]] = {
    "id": lambda _schedule: 0.0,
    "due": lambda schedule: _NEVER_S if schedule.paused else schedule.next_due,
    "fired": lambda schedule: -schedule.fired,
}


def show_schedule(ask: OperationRequest) -> ScheduleRow:
    """A schedule with its next fire times. Raises UnknownMessage, also for one that the principal
    may not see."""
    schedule = ask.hub.schedules.get(ask.path["id"])
    if schedule is None or not _is_visible(ask, schedule):
        raise UnknownMessage(f"there is no schedule {ask.path['id']!r}")
    return _row(ask, schedule, ask.query.count)


def _is_visible(ask: OperationRequest, schedule: Schedule) -> bool:
    may_manage = ask.server.context.access.may_manage
    return ask.is_observer or may_manage(ask.principal, schedule.envelope.principal)


def _row(ask: OperationRequest, schedule: Schedule, preview: int) -> ScheduleRow:
    return ScheduleRow(
        id=schedule.id,
        destination=schedule.envelope.destination,
        interval_s=schedule.interval_s,
        cron=schedule.cron,
        run_count=schedule.run_count,
        fired=schedule.fired,
        missed=schedule.missed,
        nohaste=schedule.nohaste,
        paused=schedule.paused,
        next_due=None if schedule.paused else at_s(schedule.next_due),
        message=show_message(schedule.envelope, hidden=not _may_read(ask, schedule.envelope)),
        preview=[] if schedule.paused else _times(ask, schedule, preview),
    )


def _times(ask: OperationRequest, schedule: Schedule, count: int) -> list[datetime]:
    return [at_s(each) for each in schedule.preview(count, ask.hub.wall.at(ask.now()))]


def _may_read(ask: OperationRequest, envelope: Envelope) -> bool:
    is_own = bool(envelope.principal) and envelope.principal == ask.principal
    return is_own or ask.may_read(envelope.destination)


async def add_schedule(ask: OperationRequest) -> ScheduleRow:
    """Add or replace a schedule; answered after the commit.

    Raises InvalidSchedule and InvalidEnvelope.
    """
    asked: NewSchedule = ask.body
    payload, content_type = from_body(JsonPayload(asked.json, asked.text, asked.base64))
    envelope = Envelope(
        destination=asked.destination,
        kind=message_kind(asked.destination),
        payload=payload,
        content_type=content_type,
        protocol="http",
        connection=ask.connection,
        principal=ask.principal,
        properties=check_properties(asked.properties),
        crc=zlib.crc32(payload),
    )
    schedule = Schedule(
        id=asked.id or f"http/{ask.hub.store.reserve_in_group(1)}",
        envelope=envelope,
        interval_s=asked.interval_s,
        cron=asked.cron,
        run_count=asked.run_count,
        missed=asked.missed,
        nohaste=asked.nohaste,
    )
    kept = ask.hub.schedules.add(schedule, ask.now())
    await ask.hub.committed()
    return _row(ask, kept, 10)


async def remove_schedule(ask: OperationRequest) -> Removed:
    """Remove a schedule; answered after the commit. Raises UnknownMessage."""
    name: str = ask.path["id"]
    ask.hub.schedules.remove(name)
    await ask.hub.committed()
    return Removed(name)


async def change_schedule(ask: OperationRequest) -> ScheduleRow:
    """Pause or resume a schedule; answered after the commit. Raises UnknownMessage."""
    asked: ScheduleChange = ask.body
    schedule = ask.hub.schedules.pause(ask.path["id"], asked.paused, ask.now())
    await ask.hub.committed()
    return _row(ask, schedule, 10)


async def fire_schedule(ask: OperationRequest) -> Fired:
    """Send its message now; answered after the commit. Its due times, and how often it has fired,
    stay as they are. Raises UnknownMessage."""
    name: str = ask.path["id"]
    sent = ask.hub.schedules.fire(name, ask.now())
    schedule = ask.hub.schedules.get(name)
    destination = "" if schedule is None else schedule.envelope.destination
    await ask.hub.committed()
    return Fired(id=sent, destination=destination)


def preview_schedule(ask: OperationRequest) -> Preview:
    """The fire times of an interval or a cron expression. Raises InvalidSchedule."""
    asked: PreviewRequest = ask.body
    if bool(asked.cron) == bool(asked.interval_s):
        raise InvalidSchedule("a schedule needs either an interval or a cron expression")
    if not asked.cron:
        check_interval(asked.interval_s)
    schedule = Schedule(
        id="",
        envelope=Envelope(destination="", kind="send"),
        interval_s=asked.interval_s,
        cron=asked.cron,
        nohaste=asked.nohaste,
    )
    return Preview(_times(ask, schedule, asked.count))


SCHEDULE_OPERATIONS: Final = (
    Operation(
        name="list_schedules",
        tag="schedules",
        method="GET",
        path="/v1/schedules",
        summary="Schedules and their next fire times",
        handler=list_schedules,
        query=SchedulesQuery,
        answer=ScheduleRows,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="show_schedule",
        tag="schedules",
        method="GET",
        path="/v1/schedules/{id:path}",
        summary="A schedule and its next fire times",
        handler=show_schedule,
        query=PreviewQuery,
        answer=ScheduleRow,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="add_schedule",
        tag="schedules",
        method="POST",
        path="/v1/schedules",
        summary="Add or replace a schedule",
        handler=add_schedule,
        body=NewSchedule,
        answer=ScheduleRow,
        body_bytes=None,
    ),
    Operation(
        name="preview_schedule",
        tag="schedules",
        method="POST",
        path="/v1/schedules/preview",
        summary="Fire times of an interval or a cron expression",
        handler=preview_schedule,
        body=PreviewRequest,
        answer=Preview,
        needs="principal",
    ),
    Operation(
        name="change_schedule",
        tag="schedules",
        method="PATCH",
        path="/v1/schedules/{id:path}",
        summary="Pause a schedule, or resume it",
        handler=change_schedule,
        body=ScheduleChange,
        answer=ScheduleRow,
    ),
    Operation(
        name="fire_schedule",
        tag="schedules",
        method="POST",
        path="/v1/schedules/{id:path}/fire",
        summary="Send the message of a schedule now, beside its due times",
        handler=fire_schedule,
        answer=Fired,
    ),
    Operation(
        name="remove_schedule",
        tag="schedules",
        method="DELETE",
        path="/v1/schedules/{id:path}",
        summary="Remove a schedule",
        handler=remove_schedule,
        answer=Removed,
    ),
)
