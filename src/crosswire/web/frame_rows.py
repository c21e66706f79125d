"""Frames in responses: of uploaded captures and of live connections alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from crosswire.analyzer.decoded_frames import Violation
from crosswire.web.times import Moment

__all__ = [
    "FieldRangeRow",
    "FrameDetail",
    "FrameSummary",
    "ViolationRow",
    "range_row",
    "violation_row",
]


class ViolationRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with bytes, and which rule they break."""

    error: str
    """The kind: `malformed`, `unknown`, `unsupported` or `limit`."""
    reason: str
    clause: str
    """The clause of the protocol's specification, or the hub's limit or ruling."""
    page: str
    """The page of the documentation that has the clause."""


class FrameSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A frame, or bytes that are none."""

    number: int
    """Its number in the analysis or in the stream, from 1."""
    connection: str
    """The number of the connection in the analysis; the id of a live one."""
    protocol: str
    time: Moment | None
    """When its last byte was captured or passed; null for raw bytes."""
    direction: str
    """`forward` from the side that connected, `backward` from the other."""
    sender: str
    """The sender's role in the protocol."""
    offset: int
    """Of its first byte in the direction."""
    length: int
    """In bytes."""
    layer: int
    """1 for a frame inside frames of another protocol: eMQP on ZMTP."""
    frame: str
    """Its name; empty for a violation."""
    destination: str
    """The destination that it is about; empty if it names none."""
    conversation: str
    """The same for a request and its answers; empty where there is none."""
    violation: ViolationRow | None
    """Null for a valid frame."""
    summary: str
    """Its first fields in a line."""


class FieldRangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Which bytes of a frame hold a field."""

    path: list[str | int]
    """From `fields` to the value: names, and indexes in lists."""
    start: int
    """The first byte, counted from the begin of the frame."""
    end: int
    """The byte after the last."""
    field: bool
    """False for bytes that are no field: lengths, types, padding."""


class FrameDetail(FrameSummary, frozen=True, kw_only=True):
    """A frame with its fields and bytes."""

    fields: dict[str, Any]
    """As the protocol defines them; bytes are hex."""
    hex: str
    """Its bytes, at most the first 65,536; secrets are masked by asterisks. Empty if they were not
    kept."""
    masked: bool
    """Whether secrets are masked."""
    ranges: list[FieldRangeRow]
    """Where its fields are, at most 1,000."""


def violation_row(violation: Violation) -> ViolationRow:
    """A violation as responses have it."""
    return ViolationRow(
        error=violation.error,
        reason=violation.reason,
        clause=violation.clause,
        page=violation.page,
    )


def range_row(path: Sequence[str | int], start: int, end: int, is_field: bool) -> FieldRangeRow:
    """A range as responses have it."""
    return FieldRangeRow(path=list(path), start=start, end=end, field=is_field)
