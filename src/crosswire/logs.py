"""Structured logging: one JSON object a line, about connections and the process.

Messages are not logged: one line per message would cost more than the message.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

__all__ = ["JsonLines", "log_event", "send_to_stderr", "set_level"]

_FIELDS: Final = "crosswire_fields"


def log_event(log: logging.Logger, level: int, what: str, **fields: object) -> None:
    """Log an event; `fields` become members of its JSON object."""
    if log.isEnabledFor(level):
        log.log(level, what, extra={_FIELDS: fields})


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


def send_to_stderr(level: str) -> None:
    """Write all logs of this process from `level` on to stderr; other handlers are removed."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Change the least level that is logged: debug, info, warning, error."""
    logging.getLogger().setLevel(level.upper())
