"""Schedules of the configuration: added, replaced and removed as it changes."""

from __future__ import annotations

import hashlib
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
_read_definitions: Callable[[bytes], dict[str, str]] = reader(
    dict[str, str], "the configured schedules"
)


def follow_schedules(hub: Hub, entries: Sequence[ScheduleEntry], now: float) -> None:
    """Add, replace and remove schedules so that they match the configuration.

    Schedules that peers or users added are not touched: the store has the ids of the configured
    ones. One that the configuration did not change keeps its next fire time and its count. One with
    a `run_count` is gone after its last fire: the digest of its definition, which is stored with
    its id, shows that it is not a new one.
    """
    schedules, store = hub.schedules, hub.store
    stored = store.get(_CONFIGURED, b"schedules")
    before: dict[str, str] = {}
    if stored is not None:
        try:
            before = _read_definitions(stored)
        except RecordDamaged as error:
            hub.damage.set_aside_state(_CONFIGURED, b"schedules", stored, error)
    definitions: dict[str, str] = {}
    for entry in entries:
        schedule = _schedule(entry)
        known = schedules.get(entry.id)
        definitions[entry.id] = digest = _digest(entry)
        if known is None and entry.run_count and before.get(entry.id) == digest:
            continue  # it has fired as often as it should
        if known is None or not known.is_equivalent(schedule):
            try:
                schedules.add(schedule, now)
            except HubError as error:
                # Such as a cron expression whose last year has passed: the hub runs without it.
                definitions[entry.id] = ""
                hub.damage.report(InvalidSchedule(f"schedule {entry.id} is left out: {error}"))
                log_event(
                    _log,
                    logging.WARNING,
                    "a configured schedule is left out",
                    schedule=entry.id,
                    reason=str(error),
                )
    for name in before:
        if name not in definitions and schedules.get(name) is not None:
            try:
                schedules.remove(name)
            except HubError as error:
                # It stays with the stored ones, and is removed when the configuration is applied
                # again.
                definitions[name] = ""
                log_event(
                    _log,
                    logging.WARNING,
                    "a schedule that is no longer configured is not removed yet",
                    schedule=name,
                    reason=str(error),
                )
    if definitions != before:
        store.save(_CONFIGURED, b"schedules", msgspec.msgpack.encode(definitions))
        hub.commits.request()


def _digest(entry: ScheduleEntry) -> str:
    return hashlib.sha256(msgspec.json.encode(entry, order="deterministic")).hexdigest()


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
