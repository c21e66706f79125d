"""Frames for people: names, fields, the bytes of each field, and what a violation breaks.

A `FrameReader` reads one direction, of a live connection or a capture, with the protocol's decoder.
It keeps the bytes of what is not decoded yet, so that each frame comes with its own, masked.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from crosswire.errors import FrameError
from crosswire.wire.clauses import clause_of
from crosswire.wire.contract import Decoder, Frame, Placed, Unsynchronized
from crosswire.wire.field_ranges import FieldRange, field_ranges
from crosswire.wire.frame_masking import mask_frame
from crosswire.wire.registry import protocol

__all__ = ["AnnotatedFrame", "FrameReader", "Violation"]

_MOST_LISTED: Final = 1000
"""Of a list in `fields`: a few bytes may announce 65,536 channels."""
_SHORT: Final = 255
"""Characters of a text in `fields` that is shown although the frame's bytes are not kept."""


class Violation(msgspec.Struct, frozen=True):
    """Bytes that are not what the protocol allows."""

    error: str
    """Its kind: `malformed`, `unknown`, `unsupported` or `limit`."""
    reason: str
    clause: str
    """The clause of the specification that it breaks, or the hub's limit or ruling."""
    page: str
    """The page of the documentation that has the clause."""


class AnnotatedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A frame or a violation, and its bytes. `frame` is empty for a violation.

    `item` is what the decoder made of it. `data` has asterisks where secrets are, and is empty if
    the bytes are not kept.
    """

    offset: int
    length: int
    layer: int
    frame: str
    fields: dict[str, Any]
    violation: Violation | None
    item: Frame | FrameError
    data: bytes
    is_masked: bool
    ranges: list[FieldRange]


class FrameReader:
    """One direction of a connection.

    Of an incomplete frame at most `kept_bytes` are kept. Of a larger one neither the bytes are
    shown, nor the fields that may have a secret in them, which only the bytes would show.
    """

    def __init__(
        self,
        name: str,
        sender: str,
        *,
        late: bool = False,
        peer: FrameReader | None = None,
        kept_bytes: int = 1 << 20,
    ) -> None:
        other = None if peer is None else peer.decoder
        self.protocol = name
        self.decoder: Decoder = protocol(name).decoder(sender, late=late, peer=other)
        self._kept_bytes = kept_bytes
        self._kept = bytearray()
        self._kept_at = 0
        self._end = 0

    def feed(self, data: bytes) -> list[AnnotatedFrame]:
        """The frames and violations that these bytes complete."""
        if not self.decoder.lost:
            self._kept += data
        self._end += len(data)
        return self._show(self.decoder.feed(data))

    def skip(self, count: int) -> list[AnnotatedFrame]:
        """These bytes are missing, or not to be decoded: continue where frames begin again."""
        placed = self.decoder.skip(count)
        self._end += count
        shown = self._show(placed)
        self._kept.clear()
        self._kept_at = self._end
        return shown

    def _show(self, placed: list[Placed]) -> list[AnnotatedFrame]:
        shown = [self._decoded(*each) for each in placed]
        # What comes next begins with the first byte that is in no item.
        first = self._end - (0 if self.decoder.lost else self.decoder.pending)
        first = max(first, self._end - self._kept_bytes)
        if first > self._kept_at:
            del self._kept[: first - self._kept_at]
            self._kept_at = first
        return shown

    def _decoded(self, offset: int, length: int, item: Frame | FrameError) -> AnnotatedFrame:
        start = offset - self._kept_at
        raw = bytes(self._kept[start : start + length]) if start >= 0 else b""
        if len(raw) < length:
            raw = b""
        data = mask_frame(self.protocol, item, raw, self.decoder)
        row = self.decoder.describe(offset, length, item)
        if data != raw and row.fields:
            row = msgspec.structs.replace(row, fields=self._masked_fields(item, row.fields, data))
        elif not raw and length and row.fields:
            row = msgspec.structs.replace(row, fields=_harmless(row.fields))
        violation = None
        if row.error is not None:
            violation = _violation(self.protocol, row.error, row.reason or "")
        ranges: list[FieldRange] = []
        if data and violation is None and isinstance(item, Frame):
            ranges = field_ranges(self.protocol, item, data, self.decoder)
        return AnnotatedFrame(
            offset=offset,
            length=length,
            layer=row.layer,
            frame=row.frame or "",
            fields=_bounded(row.fields or {}),
            violation=violation,
            item=item,
            data=data,
            is_masked=data != raw,
            ranges=ranges,
        )

    def _masked_fields(
        self, item: Frame | FrameError, fields: dict[str, Any], data: bytes
    ) -> dict[str, Any]:
        """The fields in masked bytes. A command of ZMTP, and bytes that were skipped, show nothing
        of what is masked."""
        if self.protocol == "emqp" or isinstance(item, Unsynchronized):
            return fields
        for _, _, again in protocol(self.protocol).decoder(self.decoder.sender).feed(data):
            if isinstance(again, Frame) and type(again) is type(item):
                try:
                    return again.fields()
                except FrameError:
                    break
        return {}


def _violation(name: str, error: str, reason: str) -> Violation:
    """A violation in this protocol, with its clause."""
    clause = clause_of(name, reason, is_content=True)
    title, page = ("", "") if clause is None else clause
    return Violation(error, reason, title, page)


def _harmless(fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers and short texts: secrets are in layer data, and in what is nested, JSON and
    extensions."""
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, int | float)
        or (isinstance(value, str) and len(value) <= _SHORT and name != "layer_data")
    }


def _bounded(fields: dict[str, Any]) -> dict[str, Any]:
    """With lists that are cut where they are very long."""
    for name, value in fields.items():
        if isinstance(value, list) and len(value) > _MOST_LISTED:
            fields[name] = [*value[:_MOST_LISTED], f"… {len(value) - _MOST_LISTED} more"]
    return fields
