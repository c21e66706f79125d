"""Schedules over HTTP: list, add, remove and preview them."""

from __future__ import annotations

import zlib
from typing import Annotated, Literal

import msgspec

from crosswire.envelope import LARGEST_INTEGER, Envelope, Property, check_properties, message_kind
from crosswire.errors import InvalidSchedule, UnknownMessage
from crosswire.gateways.payloads import JsonPayload, from_body
from crosswire.hub.schedules import Schedule, check_interval
from crosswire.web.contract import OperationRequest
from crosswire.web.messages import JsonMessage, show_message
from crosswire.web.state import Removed

__all__ = [
    "add_schedule",
    "list_schedules",
    "preview_schedule",
    "remove_schedule",
    "show_schedule",
]

Some = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule; `next_due` and `preview` are in seconds since 1970."""

    id: str
    destination: str
    interval_s: float
    cron: str
    run_count: int
    fired: int
    missed: str
    nohaste: bool
    next_due: float
    message: JsonMessage
    preview: list[float]


class ScheduleRows(msgspec.Struct, frozen=True):
    """All schedules."""

    schedules: list[ScheduleRow]


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, which replaces one with the same `id`. Give exactly one of `interval_s` and
    `cron`, and exactly one of `json`, `text` and `base64`."""

    destination: str
    id: str = ""
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


class PreviewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An interval or a cron expression, as if it were added now."""

    interval_s: float = 0.0
    cron: str = ""
    nohaste: bool = False
    count: Some = 10


class Preview(msgspec.Struct, frozen=True):
    """Fire times in seconds since 1970."""

    times: list[float]


async def list_schedules(ask: OperationRequest) -> ScheduleRows:
    """Schedules, each with its next fire time: all of them for observers, those that send to where
    they may for others."""
    rows = []
    async with ask.work.turn() as turn:
        for each in list(ask.hub.schedules.all()):
            if _is_visible(ask, each):
                rows.append(_row(ask, each, 1))
            await turn.pause()
    return ScheduleRows(rows)


def show_schedule(ask: OperationRequest) -> ScheduleRow:
    """A schedule with its next fire times. Raises UnknownMessage, also for one that the principal
    may not see."""
    schedule = ask.hub.schedules.get(ask.path["id"])
    if schedule is None or not _is_visible(ask, schedule):
        raise UnknownMessage(f"there is no schedule {ask.path['id']!r}")
    return _row(ask, schedule, ask.query.count)


def _is_visible(ask: OperationRequest, schedule: Schedule) -> bool:
    may = ask.server.context.access.may
    return ask.is_observer or may(ask.principal, "produce", schedule.envelope.destination)


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
        next_due=schedule.next_due,
        message=show_message(schedule.envelope, hidden=not _may_read(ask, schedule.envelope)),
        preview=schedule.preview(preview, ask.hub.wall.at(ask.now())),
    )


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
        principal=ask.principal,
        properties=check_properties(asked.properties),
        crc=zlib.crc32(payload),
    )
    schedule = Schedule(
        id=asked.id or f"http/{ask.hub.store.reserve(1)}",
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
    return Preview(schedule.preview(asked.count, ask.hub.wall.at(ask.now())))
