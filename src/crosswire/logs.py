"""Structured logging: one JSON object a line, or on a terminal a line for people.

Messages are not logged: one line per message would cost more than the message.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

__all__ = [
    "JsonLines",
    "PeerWarnings",
    "PlainLines",
    "fields_of",
    "log_event",
    "send_to_stderr",
    "set_level",
]

_FIELDS: Final = "crosswire_fields"
_ABOUT_PEERS: Final = ("crosswire.gateways", "crosswire.web")
_BURST: Final = 200
_RATE: Final = 20.0
"""Warnings about peers: how many at once, and how many a second."""


def log_event(log: logging.Logger, level: int, what: str, **fields: object) -> None:
    """Log an event; `fields` become members of its JSON object."""
    if log.isEnabledFor(level):
        log.log(level, what, extra={_FIELDS: fields})


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields of a record that `log_event` made."""
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


class PeerWarnings(logging.Filter):
    """Limits warnings about peers: any peer could fill the disk with them, or stop a hub whose log
    nobody reads. The next line has the number of those that were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._room = float(_BURST)
        self._at = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        if record.levelno != logging.WARNING or not record.name.startswith(_ABOUT_PEERS):
            return True
        passed_s = max(record.created - self._at, 0.0)
        self._room = min(self._room + passed_s * _RATE, _BURST)
        self._at = record.created
        if self._room < 1:
            self._left_out += 1
            return False
        self._room -= 1
        if self._left_out:
            setattr(record, _FIELDS, {**fields_of(record), "left_out": self._left_out})
            self._left_out = 0
        return True


class JsonLines(logging.Formatter):
    """Formats a record as JSON: `time`, `level`, `logger`, `event`, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The JSON object, on one line: line breaks in text from peers are escaped."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class PlainLines(logging.Formatter):
    """Formats a record for people: time, level, what happened, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; control characters in text from peers are escaped. A traceback follows it."""
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        shown = "".join(f"  {name}={_plain(each)}" for name, each in fields_of(record).items())
        line = f"{clock} {record.levelname.lower():<7} {_printable(record.getMessage())}{shown}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(_printable(str(each)) for each in value) or "-"
    return _printable(str(value)) or "-"


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def send_to_stderr(level: str, form: str = "auto") -> None:
    """Write all logs of this process from `level` on to stderr; other handlers are removed.

    `form` is `json`, `text`, or `auto`: text on a terminal.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_plain = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(PlainLines() if is_plain else JsonLines())
    handler.addFilter(PeerWarnings())
    logging.getLogger().handlers = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Change the least level that is logged: debug, info, warning, error."""
    logging.getLogger().setLevel(level.upper())
