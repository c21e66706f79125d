"""The content of deployed EventMQ's messages: the call of a Python callable, in JSON.

    ["run", {"callable": NAME, "path": MODULE or MODULE:CLASS, "args": […], "kwargs": {…},
             "class_args": […], "class_kwargs": {…}}]

and its result: `{"value": …}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha1
from typing import Any, Final

import msgspec

__all__ = [
    "TIMEOUT",
    "Job",
    "failure_of",
    "parse_job",
    "schedule_identity",
    "serialize_job",
    "serialize_value",
    "value_of",
]

TIMEOUT: Final = "TimeoutError"
"""The value that a worker returns for a job that exceeded its timeout."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The call of a function, or of a method of an object that is made for it."""

    callable: str
    path: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    class_args: list[Any] = []
    class_kwargs: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The full name of the callable, as in a worker's allow-list."""
        return f"{self.path}.{self.callable}"


_BODY: Final = msgspec.json.Decoder(tuple[str, Job])


def parse_job(message: bytes) -> Job | None:
    """The call in a message; None if it contains none."""
    try:
        verb, job = _BODY.decode(message)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return job if verb == "run" else None


def serialize_job(
    name: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    class_args: Sequence[Any] = (),
    class_kwargs: Mapping[str, Any] | None = None,
) -> bytes:
    """A message that calls `module.function` or `module:Class.method`.

    Raises ValueError for a name without a module.
    """
    path, _, called = name.rpartition(".")
    if not path or not called:
        raise ValueError(f"{name!r} is not the full name of a callable")
    return msgspec.json.encode(
        [
            "run",
            {
                "callable": called,
                "path": path,
                "args": list(args),
                "kwargs": dict(kwargs or {}),
                "class_args": list(class_args),
                "class_kwargs": dict(class_kwargs or {}),
            },
        ]
    )


def serialize_value(value: Any) -> bytes:
    """A worker's result. Raises TypeError for a value that JSON can't represent."""
    return msgspec.json.encode({"value": value})


_VALUE: Final = msgspec.json.Decoder(dict[str, Any])


def value_of(message: bytes) -> Any:
    """The value in a worker's result. Raises ValueError for another message."""
    try:
        return _VALUE.decode(message)["value"]
    except (msgspec.MsgspecError, RecursionError, KeyError) as error:
        raise ValueError("not a worker's result") from error


class _JobFailure(msgspec.Struct, frozen=True):
    error: str
    attempts: int


_FAILURE: Final = msgspec.json.Decoder(_JobFailure)


def failure_of(message: bytes) -> tuple[str, int] | None:
    """The error and the number of attempts, if this is the broker's result of a failed request."""
    if not message.startswith(b"{"):
        return None
    try:
        failure = _FAILURE.decode(message)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return failure.error, failure.attempts


def schedule_identity(message: bytes) -> str:
    """Identifies a schedule, exactly as the deployed scheduler computes it.

    For a call, the hash of the callable and its arguments; for other messages, of their bytes.
    """
    job = parse_job(message)
    if job is None:
        return sha1(message, usedforsecurity=False).hexdigest()
    try:
        call = json.loads(message)[1]
        text = json.dumps({name: call[name] for name in _IDENTIFYING}, sort_keys=True)
    except (ValueError, KeyError, RecursionError):
        return sha1(message, usedforsecurity=False).hexdigest()
    return sha1(text.encode(), usedforsecurity=False).hexdigest()


_IDENTIFYING: Final = ("args", "kwargs", "class_args", "class_kwargs", "path", "callable")
