"""Which frames people want to see, and a line about each."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from crosswire.analyzer.analysis import AnalyzedFrame
from crosswire.analyzer.decoded_frames import Violation

__all__ = ["FrameFilter", "summarize"]

_SUMMARY: Final = 160
_VALUE: Final = 48


class FrameFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames a list has; an empty text, 0 and False mean all."""

    connection: int = 0
    protocol: str = ""
    frame: str = ""
    destination: str = ""
    """A part of it."""
    conversation: str = ""
    text: str = ""
    """In the frame's summary or bytes, in any case."""
    violations: bool = False

    def has(self, frame: AnalyzedFrame) -> bool:
        """Whether it is one of them."""
        decoded, subject = frame.decoded, frame.subject
        return (
            self.connection in (0, frame.connection.number)
            and self.protocol in ("", frame.connection.protocol)
            and self.frame in ("", decoded.frame)
            and self.destination in subject.destination
            and self.conversation in ("", subject.conversation)
            and (not self.violations or decoded.violation is not None)
            and self._has_text(frame)
        )

    def _has_text(self, frame: AnalyzedFrame) -> bool:
        if not self.text:
            return True
        decoded, text = frame.decoded, self.text.lower()
        return (
            text in summarize(decoded.fields, decoded.violation).lower()
            or text in decoded.frame
            or text.encode() in decoded.data.lower()
        )


def summarize(fields: dict[str, Any], violation: Violation | None) -> str:
    """The first fields in a line."""
    if violation is not None:
        return violation.reason[:_SUMMARY]
    text = ""
    for name, value in fields.items():
        if isinstance(value, str):
            shown = value
        else:
            shown = msgspec.json.encode(value)[: 4 * _VALUE].decode(errors="replace")
        shown = shown if len(shown) <= _VALUE else shown[: _VALUE - 1] + "…"
        text += f"{'  ' if text else ''}{name}={shown}"
        if len(text) > _SUMMARY:
            return text[: _SUMMARY - 1] + "…"
    return text
