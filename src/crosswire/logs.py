"""Log lines: JSON objects on one line each, for what happens to connections, never to messages."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

__all__ = ["JsonLines", "log_event", "send_to_stderr", "set_level"]

_FIELDS: Final = "crosswire_fields"


def log_event(log: logging.Logger, level: int, what: str, **fields: object) -> None:
    """One line that says what happened, with what belongs to it as members of their own."""
    if log.isEnabledFor(level):
        log.log(level, what, extra={_FIELDS: fields})


class JsonLines(logging.Formatter):
    """`time`, `level`, `logger`, `event`, then what belongs to it; peers' text is escaped."""

    def format(self, record: logging.LogRecord) -> str:
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
    """All that is logged in this program, from a level up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers = [handler]
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
