"""Print the frames of a capture, or of a file with the raw bytes of one direction."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from crosswire.cli.parsers import add_examples
from crosswire.cli.table import harmless, in_short, print_row
from crosswire.errors import CrosswireError
from crosswire.plurals import plural
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Decoder, Row

__all__ = ["configure", "run"]

_CHUNK_BYTES = 1 << 20
_WIDTHS = (-10, -8, 24, 0)
_RAW = ("direction", "hex", "late", "peer")
_CAPTURES = (
    "only_protocol",
    "connection",
    "frame",
    "destination",
    "text",
    "violations",
    "port",
)


def configure(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options. Those of a protocol depend on which one `argv` names: Relink's decoder needs
    sizes that only the other direction has."""
    parser.add_argument(
        "protocol",
        nargs="?",
        choices=PROTOCOL_NAMES,
        metavar="PROTOCOL",
        help=f"the protocol of raw bytes: {', '.join(PROTOCOL_NAMES)}",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a capture (pcap or pcapng, also compressed by gzip or zstd); after PROTOCOL: the raw "
        "bytes of one direction, - for standard input",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    raw = parser.add_argument_group("raw bytes")
    raw.add_argument(
        "--direction",
        metavar="D",
        help="the sender: a role, or SENDER->RECEIVER (default: the side that opens connections)",
    )
    raw.add_argument("--hex", action="store_true", help="the file is hex text")
    raw.add_argument("--late", action="store_true", help="the bytes begin inside a connection")
    raw.add_argument("--peer", metavar="FILE", help="the raw bytes of the other direction")
    captures = parser.add_argument_group("captures")
    captures.add_argument(
        "--protocol",
        dest="only_protocol",
        choices=PROTOCOL_NAMES,
        metavar="P",
        help="only frames of this protocol",
    )
    captures.add_argument("--connection", type=int, metavar="N", help="only those of connection N")
    captures.add_argument("--frame", metavar="NAME", help="only frames with this name")
    captures.add_argument(
        "--destination", metavar="TEXT", help="only frames whose destination contains TEXT"
    )
    captures.add_argument(
        "--text", metavar="TEXT", help="only frames whose fields or bytes contain TEXT, in any case"
    )
    captures.add_argument("--violations", action="store_true", help="only violations")
    captures.add_argument(
        "--port",
        action="append",
        metavar="PORT=PROTOCOL",
        help="the protocol of a port that is not the default one; may be repeated",
    )
    add_examples(
        parser,
        "crosswire decode traffic.pcap",
        "crosswire decode traffic.pcapng.gz --destination queue/orders --json",
        "crosswire decode traffic.pcap --violations",
        "crosswire decode emp client.bin --json",
        "crosswire decode relink listener.bin --direction listener --peer connector.bin",
        "echo 00000008 00000000 01000000 | crosswire decode emp - --hex",
    )
    for name in PROTOCOL_NAMES:
        if name in argv:
            for hint in protocol(name).hints:
                parser.add_argument(
                    _flag(hint.name),
                    dest=f"hint_{hint.name}",
                    type=int,
                    metavar="N",
                    help=hint.help,
                )
            return


def run(options: argparse.Namespace) -> int:
    """Print a line per frame, then the totals to standard error; 1 if there are violations."""
    of_raw = [name for name in _RAW if getattr(options, name)]
    of_captures = [name for name in _CAPTURES if getattr(options, name)]
    if options.protocol is None:
        _refuse(of_raw, "is for raw bytes: name their PROTOCOL before FILE")
        # Imported here: it loads all protocols.
        from crosswire.cli.captured_frames import print_capture

        return print_capture(options)
    _refuse(of_captures, "is for captures, not for raw bytes")
    decoder = _decoder(options)
    frames = violations = total = 0
    if not options.json:
        print_row(("offset", "length", "frame", "fields"), _WIDTHS)
    for row in _rows(decoder, _chunks(options.file, is_hex=options.hex)):
        # Frames of upper layers are inside those of layer 0: their bytes would count twice.
        total += row.length if row.layer == 0 else 0
        frames += row.error is None
        violations += row.error is not None
        _print(row, as_json=options.json)
    print(
        f"{plural(frames, 'frame')}, {plural(violations, 'violation')}, "
        f"{plural(decoder.pending, 'byte')} of an unfinished frame, "
        f"{plural(total + decoder.pending, 'byte')} in total",
        file=sys.stderr,
    )
    return 1 if violations else 0


def _refuse(names: Sequence[str], reason: str) -> None:
    """Exit with 2 if an option was given that is of no use here."""
    if names:
        flag = _flag(names[0].removeprefix("only_"))
        print(f"crosswire decode: {flag} {reason}", file=sys.stderr)
        raise SystemExit(2)


def _decoder(options: argparse.Namespace) -> Decoder:
    entry = protocol(options.protocol)
    sender = _sender(options.direction, entry.roles)
    hints = {
        hint.name: value
        for hint in entry.hints
        if (value := getattr(options, f"hint_{hint.name}", None)) is not None
    }
    peer = None
    if options.peer is not None:
        other = entry.roles[0] if sender == entry.roles[-1] else entry.roles[-1]
        # Fed completely first: the decoder of this direction asks it for what its side announced.
        peer = entry.decoder(other)
        for chunk in _chunks(options.peer, is_hex=options.hex):
            peer.feed(chunk)
    try:
        return entry.decoder(sender, late=options.late, peer=peer, hints=hints)
    except ValueError as error:
        reason = str(error)
        for hint in entry.hints:
            reason = reason.replace(hint.name, _flag(hint.name))
        print(f"crosswire decode: {reason}", file=sys.stderr)
        raise SystemExit(2) from None


def _flag(hint: str) -> str:
    return "--" + hint.replace("_", "-")


def _sender(direction: str | None, roles: tuple[str, ...]) -> str:
    if direction is None:
        return roles[0]
    sender = direction.split("->")[0].strip().lower()
    if sender not in roles:
        print(
            f"crosswire decode: --direction {direction!r}: the sender is one of {', '.join(roles)}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return sender


def _chunks(name: str, *, is_hex: bool) -> Iterator[bytes]:
    try:
        if name == "-":
            yield from _read(sys.stdin.buffer, is_hex=is_hex)
        else:
            with Path(name).open("rb") as file:
                yield from _read(file, is_hex=is_hex)
    except OSError as error:
        raise CrosswireError(f"can't read {name}: {error.strerror}") from error


def _read(file: BinaryIO, *, is_hex: bool) -> Iterator[bytes]:
    offset = 0
    digits = b""
    while chunk := file.read(_CHUNK_BYTES):
        if not is_hex:
            yield chunk
            continue
        digits += b"".join(chunk.split())
        whole = len(digits) & ~1
        try:
            yield bytes.fromhex(digits[:whole].decode("ascii"))
        except ValueError:
            raise CrosswireError(
                f"no hex text, in the {_CHUNK_BYTES} bytes from byte {offset} on"
            ) from None
        digits = digits[whole:]
        offset += len(chunk)
    if digits:
        raise CrosswireError("the hex text has an odd number of digits: its last byte is cut")


def _rows(decoder: Decoder, chunks: Iterator[bytes]) -> Iterator[Row]:
    """The rows of all chunks. An error after which nothing can be read is held back until the end
    of the file, since its length reaches to there."""
    last: Row | None = None
    for chunk in chunks:
        rows = decoder.rows(chunk)
        if decoder.lost and last is None:
            last = rows.pop()
        yield from rows
    if last is not None:
        yield msgspec.structs.replace(last, length=last.length + decoder.unread)


def _print(row: Row, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(row.public()).decode())
    elif row.error is None:
        name = "  " * row.layer + str(row.frame)
        print_row((row.offset, row.length, name, in_short(row.fields or {})), _WIDTHS)
    else:
        text = harmless(str(row.reason))
        print_row((row.offset, row.length, f"! {row.error}", text), _WIDTHS)
