"""eMQP's commands as envelopes, and envelopes as jobs; what headers ask for, worked out once."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Final

import msgspec

from crosswire.envelope import Envelope, Property
from crosswire.errors import CallTimeout, CrosswireError, NoProvider, ProviderLost
from crosswire.gateways.failures import code_of
from crosswire.gateways.payloads import BYTES, JSON
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
    "failure",
    "failure_of_call",
    "foreign_headers",
    "is_timeout",
    "read_terms",
]

MSGID: Final = "emqp.msgid"
HEADERS: Final = "emqp.headers"
IDENTITY: Final = "emqp.identity"
QUEUE: Final = "emqp.queue"
"""Native keys. The queue's frame is kept where it is not the name of the hub's queue."""

DONE: Final = b'{"value":true}'
"""What a client hears of a request that was done by somebody who gives no results."""

_CONTENT_TYPE: Final = "content-type"
_CACHED_CHARACTERS: Final = 512

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder().encode


class RequestOptions(msgspec.Struct, frozen=True):
    """What a request's headers ask for.

    `holds`: the outcome matters, so the message is settled by the worker's REPLY and not by being
    handed over. `for_worker` is the text that the worker is given: the client's own, unless we must
    learn the outcome and the client did not ask for it.
    """

    text: str
    answers: bool
    guarantee: bool
    holds: bool
    retry_count: int
    timeout_s: float | None
    for_worker: str
    properties: dict[str, Property]
    content_type: str
    headers: Headers


def read_terms(text: str) -> RequestOptions:
    return _read_cached(text) if len(text) <= _CACHED_CHARACTERS else _read(text)


def _read(text: str) -> RequestOptions:
    headers = Headers.parse(text)
    answers, guarantee = headers.reply_requested, headers.guarantee
    retry_count, timeout_s = headers.retry_count, headers.timeout_s
    holds = guarantee or retry_count > 0 or timeout_s is not None
    for_worker = text
    if holds and not answers:
        for_worker = str(headers.without("reply-requested").having("reply-requested"))
    properties = headers.properties()
    content_type = properties.pop(_CONTENT_TYPE, "")
    return RequestOptions(
        text,
        answers,
        guarantee,
        holds,
        retry_count,
        timeout_s,
        for_worker,
        properties,
        content_type if isinstance(content_type, str) else "",
        headers,
    )


_read_cached = lru_cache(maxsize=4096)(_read)


def content_type_of(payload: bytes, declared: str = "") -> str:
    """As the header `content-type` has it. What is deployed writes JSON arrays and objects and says
    nothing about it, so these are recognized; other bytes are bytes."""
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
    """Headers for a job that did not come as a REQUEST: the worker's REPLY settles it."""
    return str(Headers.of(reply_requested=True, properties=_with_content_type(envelope)))


def call_headers(envelope: Envelope, seconds_left: float) -> str:
    """Headers for a call from another protocol. The deployed worker reads whole seconds only."""
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
    return {**envelope.properties, _CONTENT_TYPE: envelope.content_type}


def is_timeout(result: bytes) -> bool:
    """Does a worker report that the job took too long? Any other REPLY is success."""
    if b"TimeoutError" not in result:
        return False
    try:
        return bool(value_of(result) == TIMEOUT)
    except ValueError:
        return False


def failure(error: str, attempts: int) -> bytes:
    """What a client is told of a request that nobody could do."""
    return _encode({"error": error, "attempts": attempts})


def failure_of_call(error: CrosswireError, attempts: int) -> bytes:
    named = isinstance(error, NoProvider | CallTimeout | ProviderLost)
    return failure(code_of(error) if named else str(error), attempts)
