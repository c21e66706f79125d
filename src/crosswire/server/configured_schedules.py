"""Schedules of the configuration: added, replaced and removed as it changes."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from crosswire.config import ScheduleEntry
from crosswire.envelope import Envelope, message_kind
from crosswire.errors import HubError, InvalidSchedule, RecordDamaged
from crosswire.gateways.payloads import JSON, TEXT
from crosswire.hub.hub import Hub
from crosswire.hub.schedules import Schedule
from crosswire.logs import log_event
from crosswire.store.records import reader

__all__ = ["follow_schedules"]

_log = logging.getLogger("crosswire.server")

_CONFIGURED: Final = "configured"
_read_names: Callable[[bytes], list[str]] = reader(list[str], "the configured schedules")


def follow_schedules(hub: Hub, entries: Sequence[ScheduleEntry], now: float) -> None:
    """Add, replace and remove schedules so that they match the configuration.

    Schedules that peers or users added are not touched: the store has the ids of the configured
    ones. One that the configuration did not change keeps its next fire time and its count.
    """
    schedules, store = hub.schedules, hub.store
    stored = store.get(_CONFIGURED, b"schedules")
    before: list[str] = []
    if stored is not None:
        try:
            before = _read_names(stored)
        except RecordDamaged as error:
            hub.damage.set_aside_state(_CONFIGURED, b"schedules", stored, error)
    for entry in entries:
        schedule = _schedule(entry)
        known = schedules.get(entry.id)
        if known is None or not known.is_equivalent(schedule):
            try:
                schedules.add(schedule, now)
            except HubError as error:
                # Such as a cron expression whose last year has passed: the hub runs without it.
                hub.damage.report(InvalidSchedule(f"schedule {entry.id} is left out: {error}"))
                log_event(
                    _log,
                    logging.WARNING,
                    "a configured schedule is left out",
                    schedule=entry.id,
                    reason=str(error),
                )
    names = [entry.id for entry in entries]
    for name in before:
        if name not in names and schedules.get(name) is not None:
            try:
                schedules.remove(name)
            except HubError as error:
                # It stays in the stored list, and is removed when the configuration is applied
                # again.
                names.append(name)
                log_event(
                    _log,
                    logging.WARNING,
                    "a schedule that is no longer configured is not removed yet",
                    schedule=name,
                    reason=str(error),
                )
    if names != before:
        store.save(_CONFIGURED, b"schedules", msgspec.msgpack.encode(names))
        hub.commits.request()


def _schedule(entry: ScheduleEntry) -> Schedule:
    payload, content_type = (entry.text or "").encode(), TEXT
    if entry.text is None:
        payload, content_type = msgspec.json.encode(entry.json), JSON
    return Schedule(
        id=entry.id,
        envelope=Envelope(
            destination=entry.destination,
            kind=message_kind(entry.destination),
            payload=payload,
            content_type=content_type,
            properties=entry.properties,
            crc=zlib.crc32(payload),
        ),
        interval_s=entry.interval_s,
        cron=entry.cron,
        run_count=entry.run_count,
        missed=entry.missed,
        nohaste=entry.nohaste,
    )
