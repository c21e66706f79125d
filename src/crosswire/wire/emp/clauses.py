"""The clauses of EMP's specification that violations break, by their reasons."""

from __future__ import annotations

from typing import Final

from crosswire.wire.clauses import ClauseTable, is_a

__all__ = ["CLAUSES"]

CLAUSES: Final[ClauseTable] = (
    (r"a message of \d+ bytes, more than", is_a("emp.frame_bytes")),
    (r"a message of \d+ bytes has no header", "EMP, Header"),
    (r"no room for an identifier", "EMP, Request and Response"),
    (r"hello has a body", "EMP, Hello"),
    (r"error has no room|a description of \d+ bytes", "EMP, Error"),
    (r"a description is not UTF-8", "EMP, Character strings"),
    (r"message type \d+ is not defined", "EMP, Message types"),
    (
        r"application data is|a failure without a description|nested too deep",
        "EMP, Application data",
    ),
    (r"unsupported version|unexpected message", "EMP, Handshake"),
    (r"invalid request", "EMP, Requests and responses"),
    (r"no hello in time", is_a("emp.handshake_s")),
    (r"ping timeout", "EMP, Ping-pong"),
)
