"""Prints the frames of a capture, connection by connection as they were captured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from crosswire.analyzer.analysis import AnalyzedConnection, AnalyzedFrame, CaptureAnalysis
from crosswire.analyzer.frame_filter import FrameFilter
from crosswire.capture.headers import is_capture
from crosswire.cli.table import harmless, in_short, print_row
from crosswire.errors import CrosswireError, InvalidInput
from crosswire.plurals import plural

__all__ = ["print_capture"]

_EPOCH = datetime.fromtimestamp(0, UTC)
_WIDTHS = (15, -4, 1, -10, -8, 24, 0)


def print_capture(options: argparse.Namespace) -> int:
    """Print a line per frame, then connections and totals to standard error; 1 if there are
    violations, or the capture can't be read to its end."""
    _check(options.file)
    analysis = CaptureAnalysis(_ports(options.port or ()))
    chosen = FrameFilter(
        connection=options.connection or 0,
        protocol=options.only_protocol or "",
        frame=options.frame or "",
        destination=options.destination or "",
        text=options.text or "",
        violations=options.violations,
    )
    if not options.json:
        print_row(("time", "conn", "", "offset", "length", "frame", "fields"), _WIDTHS)
    shown = 0
    for frame in analysis.frames(options.file):
        if chosen.has(frame):
            shown += 1
            _print(frame, as_json=options.json)
    _print_totals(analysis, shown)
    faults = analysis.counts.faults
    for fault in faults:
        print(f"crosswire decode: {harmless(fault)}", file=sys.stderr)
    return 1 if faults or any(each.violations for each in analysis.connections) else 0


def _check(file: str) -> None:
    try:
        is_ours = is_capture(Path(file))
    except OSError as error:
        raise CrosswireError(f"can't read {file}: {error.strerror}") from error
    if not is_ours:
        raise InvalidInput(
            f"{file} is no capture: for the raw bytes of one direction, name their PROTOCOL first"
        )


def _ports(given: Sequence[str]) -> dict[int, str]:
    ports = {}
    for text in given:
        port, _, name = text.partition("=")
        if not port.isdecimal() or not name:
            print(f"crosswire decode: --port {text!r} is not PORT=PROTOCOL", file=sys.stderr)
            raise SystemExit(2)
        ports[int(port)] = name
    return ports


def _print(frame: AnalyzedFrame, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(_public(frame)).decode())
        return
    decoded, violation = frame.decoded, frame.decoded.violation
    time = _time(frame).strftime("%H:%M:%S.%f")
    arrow = ">" if frame.is_forward else "<"
    if violation is None:
        name, text = "  " * decoded.layer + decoded.frame, in_short(decoded.fields)
    else:
        name, text = f"! {violation.error}", f"{violation.reason} ({violation.clause})"
    print_row(
        (time, frame.connection.number, arrow, decoded.offset, decoded.length, name, text), _WIDTHS
    )


def _time(frame: AnalyzedFrame) -> datetime:
    return _EPOCH + timedelta(microseconds=frame.time_us)


def _public(frame: AnalyzedFrame) -> dict[str, Any]:
    decoded, violation = frame.decoded, frame.decoded.violation
    public: dict[str, Any] = {
        "time": _time(frame),
        "connection": frame.connection.number,
        "name": frame.connection.name,
        "protocol": frame.connection.protocol,
        "direction": frame.direction,
        "sender": frame.sender,
        "offset": decoded.offset,
        "length": decoded.length,
        "layer": decoded.layer,
    }
    if violation is not None:
        return public | {
            "error": violation.error,
            "reason": violation.reason,
            "clause": violation.clause,
        }
    return public | {
        "frame": decoded.frame,
        "fields": decoded.fields,
        "destination": frame.subject.destination,
        "conversation": frame.subject.conversation,
    }


def _print_totals(analysis: CaptureAnalysis, shown: int) -> None:
    frames = violations = 0
    for connection in analysis.connections:
        frames += connection.frames
        violations += connection.violations
        print(_described(connection), file=sys.stderr)
    if analysis.ignored_connections:
        packets = plural(analysis.ignored_connections, "packet")
        print(f"{packets} left out: there are too many connections", file=sys.stderr)
    print(
        f"{plural(frames, 'frame')}, {plural(violations, 'violation')} in "
        f"{plural(len(analysis.connections), 'connection')}; {shown} shown",
        file=sys.stderr,
    )


def _described(connection: AnalyzedConnection) -> str:
    parts = [
        f"{connection.number}: {connection.name}",
        connection.protocol or "unknown protocol",
        plural(connection.frames, "frame"),
        plural(connection.forward_bytes + connection.backward_bytes, "byte"),
        connection.end,
    ]
    if connection.violations:
        parts.append(plural(connection.violations, "violation"))
    if connection.missing_bytes:
        parts.append(f"{plural(connection.missing_bytes, 'byte')} missing")
    if connection.unread_bytes:
        parts.append(f"{plural(connection.unread_bytes, 'byte')} unread")
    if connection.is_late:
        parts.append("captured late")
    return harmless(", ".join(parts))
