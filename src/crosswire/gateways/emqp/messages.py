"""eMQP's commands as envelopes, envelopes as jobs, and the options in headers, parsed once."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Final

import msgspec

from crosswire.envelope import Envelope, Property
from crosswire.error_texts import public_text
from crosswire.errors import CallError, CallTimeout, CrosswireError, NoProvider, ProviderLost
from crosswire.gateways.failures import code_of
from crosswire.gateways.payloads import BYTES, JSON
from crosswire.gateways.properties import CONTENT_TYPE
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import TIMEOUT, value_of

__all__ = [
    "DONE",
    "HEADERS",
    "IDENTITY",
    "MSGID",
    "QUEUE",
    "RequestOptions",
    "call_headers",
    "content_type_of",
    "encode",
    "failure",
    "failure_of_call",
    "foreign_headers",
    "is_timeout",
    "read_options",
    "without_times",
]

MSGID: Final = "emqp.msgid"
HEADERS: Final = "emqp.headers"
IDENTITY: Final = "emqp.identity"
QUEUE: Final = "emqp.queue"
"""Native keys. The queue's frame is kept where it is not the name of the hub's queue."""

DONE: Final = b'{"value":true}'
"""The result of a request that was done by a consumer of a protocol without results."""

_CACHED_CHARACTERS: Final = 512
"""Longer headers are not cached: a few thousand of any length would fill the memory."""
_ONLY_FOR_SCHEDULES: Final = ("nohaste", "run_count", "interval", "cron")

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
encode: Final = msgspec.json.Encoder().encode
"""JSON of a result or a status report."""


class RequestOptions(msgspec.Struct, frozen=True):
    """What a request's headers ask for; `text` is the headers as the client sent them.

    `wants_reply`: the client waits for the result. `awaits_outcome`: with guarantee, retry-count or
    timeout the message is settled by the worker's REPLY; without any of these, by being handed
    over. `for_worker` is the text that the worker gets: the client's own, with `reply-requested`
    added where we must learn the outcome and the client did not ask for it.
    """

    text: str
    wants_reply: bool
    guarantee: bool
    awaits_outcome: bool
    retry_count: int
    timeout_s: float | None
    for_worker: str
    properties: dict[str, Property]
    content_type: str
    headers: Headers


def read_options(text: str) -> RequestOptions:
    """What these headers ask for. Clients repeat the same text, so it is parsed once."""
    return _read_cached(text) if len(text) <= _CACHED_CHARACTERS else _read(text)


def _read(text: str) -> RequestOptions:
    headers = Headers.parse(text)
    wants_reply, guarantee = headers.reply_requested, headers.guarantee
    retry_count, timeout_s = headers.retry_count, headers.timeout_s
    awaits_outcome = guarantee or retry_count > 0 or timeout_s is not None
    for_worker = text
    if awaits_outcome and not wants_reply:
        for_worker = str(headers.without("reply-requested").having("reply-requested"))
    properties = headers.properties()
    content_type = properties.pop(CONTENT_TYPE, "")
    return RequestOptions(
        text,
        wants_reply,
        guarantee,
        awaits_outcome,
        retry_count,
        timeout_s,
        for_worker,
        properties,
        content_type if isinstance(content_type, str) else "",
        headers,
    )


_read_cached = lru_cache(maxsize=4096)(_read)


def content_type_of(payload: bytes, declared: str = "") -> str:
    """The header `content-type`, or a guess: deployed clients send JSON arrays and objects without
    such a header, so these are recognized; anything else is bytes."""
    if declared:
        return declared
    if payload[:1] not in (b"[", b"{"):
        return BYTES
    try:
        _check_json(payload)
    except (msgspec.MsgspecError, RecursionError):
        return BYTES
    return JSON


def foreign_headers(envelope: Envelope) -> str:
    """Headers for a job of another protocol; the worker's REPLY settles it."""
    return str(Headers.of(reply_requested=True, properties=_with_content_type(envelope)))


def call_headers(envelope: Envelope, seconds_left: float) -> str:
    """Headers for a call of another protocol. Deployed workers read whole seconds only."""
    return str(
        Headers.of(
            reply_requested=True,
            timeout_s=max(ceil(seconds_left), 1),
            properties=_with_content_type(envelope),
        )
    )


def _with_content_type(envelope: Envelope) -> dict[str, Property]:
    if envelope.content_type in (BYTES, ""):
        return envelope.properties
    return {**envelope.properties, CONTENT_TYPE: envelope.content_type}


def is_timeout(result: bytes) -> bool:
    """Whether a worker reports a timeout.

    Any other REPLY is success: a deployed job manager reports an exception like a result.
    """
    if b"TimeoutError" not in result:
        return False
    try:
        return bool(value_of(result) == TIMEOUT)
    except ValueError:
        return False


def failure(error: str, attempts: int) -> bytes:
    """The result that a client gets when its request failed for good."""
    return encode({"error": error, "attempts": attempts})


def failure_of_call(error: CrosswireError, attempts: int) -> bytes:
    """The result for a failed call: the code alone where that is enough, else with a text."""
    if isinstance(error, NoProvider | CallTimeout | ProviderLost):
        return failure(code_of(error), attempts)
    # The text of a provider's failure begins with the code that the provider gave it.
    own = "" if isinstance(error, CallError) else f"{code_of(error)}: "
    return failure(own + public_text(error), attempts)


def without_times(headers: str) -> str:
    """A schedule's headers without those about the schedule: the headers of its requests."""
    parsed = Headers.parse(headers)
    return str(parsed.without(*_ONLY_FOR_SCHEDULES)) if parsed.items else ""
