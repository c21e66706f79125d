"""Payloads and properties as options of commands, and messages as lines of output."""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import msgspec

from crosswire.cli.table import harmless, in_short
from crosswire.envelope import Property
from crosswire.errors import CrosswireError

__all__ = [
    "add_payload_options",
    "as_body",
    "content_type_of",
    "filter_of",
    "payload_of",
    "properties_of",
    "shown_body",
]


def add_payload_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add `payload`, `--file` and `--property`; `optional` if there may be no payload at all."""
    given = parser.add_mutually_exclusive_group(required=False)
    given.add_argument(
        "payload",
        nargs="?",
        help="the payload as text" + ("" if optional else " (default: standard input)"),
    )
    given.add_argument(
        "--file", metavar="FILE", help="a file with the payload; - for standard input"
    )
    parser.add_argument(
        "--property",
        metavar="K=V",
        action="append",
        default=[],
        type=_property,
        help="a property: a number, true, false, else text; K=text:V is always text",
    )


def _property(text: str) -> tuple[str, Property]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return key, _value(value)


def _value(text: str) -> Property:
    if text.startswith("text:"):
        return text.removeprefix("text:")
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def properties_of(options: argparse.Namespace) -> dict[str, Property]:
    """Values of `--property`; of several with the same key, the last."""
    return dict(options.property)


def filter_of(options: argparse.Namespace) -> str:
    """`--filter` in the form that the hub reads. Raises InvalidFilter."""
    if not options.filter:
        return ""
    # Here: it takes the client library with it, which most calls don't need.
    from crosswire.filter_text import wire_filter

    return wire_filter(options.filter)


def payload_of(options: argparse.Namespace) -> bytes | None:
    """The bytes of `payload` or `--file`, None without either.

    Raises CrosswireError for a file that can't be read.
    """
    if options.payload is not None:
        # Bytes that are not UTF-8 arrive as surrogates: they are sent as they were typed.
        return str(options.payload).encode(errors="surrogateescape")
    if options.file is None:
        return None
    if options.file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(options.file).read_bytes()
    except OSError as error:
        raise CrosswireError(f"can't read {options.file}: {error.strerror}") from None


def content_type_of(payload: bytes) -> str:
    """`application/json`, `text/plain` or `application/octet-stream`, detected from the bytes."""
    try:
        msgspec.json.decode(payload)
        return "application/json"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        payload.decode()
        return "text/plain"
    except UnicodeDecodeError:
        return "application/octet-stream"


def as_body(payload: bytes, content_type: str | None = None) -> dict[str, Any]:
    """The payload as a field of a JSON body: one of `json`, `text`, `base64`."""
    kind = content_type or content_type_of(payload)
    if kind == "application/json":
        return {"json": msgspec.Raw(payload)}
    if kind.startswith("text/"):
        try:
            return {"text": payload.decode()}
        except UnicodeDecodeError:
            pass
    return {"base64": base64.b64encode(payload).decode()}


def shown_body(message: dict[str, Any]) -> str:
    """A message's payload and properties on one line, without control characters."""
    if "json" in message:
        text = msgspec.json.encode(message["json"]).decode()
    elif message.get("text") is not None:
        text = str(message["text"])
    else:
        text = f"base64:{message.get('base64') or ''}"
    properties = message.get("properties") or {}
    marks = f"  [{in_short(properties)}]" if properties else ""
    return harmless(text) + ("…" if message.get("truncated") else "") + marks
