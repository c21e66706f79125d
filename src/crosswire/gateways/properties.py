"""Names of properties that mean the same in protocols without fields of their own for these."""

from __future__ import annotations

from typing import Final

__all__ = ["CONTENT_TYPE", "CORRELATION", "DESCRIPTION", "ERROR", "REPLY_TO", "TIMEOUT"]

CONTENT_TYPE: Final = "content-type"
CORRELATION: Final = "correlation-id"
REPLY_TO: Final = "reply-to"
TIMEOUT: Final = "timeout"
"""Of a call: how long it may take, in seconds."""
ERROR: Final = "error"
"""Of an answer that is a failure: its code."""
DESCRIPTION: Final = "description"
"""Of an answer that is a failure: what went wrong."""
