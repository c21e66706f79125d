"""ZMTP's frames in columns: greetings, and commands with the metadata of a handshake."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.contract import FrameRows
from crosswire.pipeline.decode.kernels import INT, INTS, OCTETS, OUT_TABLE, kernel
from crosswire.pipeline.decode.meanings.contract import Described, json_text
from crosswire.pipeline.decode.meanings.emqp import MESSAGE, describe_below
from crosswire.pipeline.decode.scanners.emqp import (
    ABOUT,
    NAME,
    NESTED_COMMAND,
    ZMTP_COMMAND,
    ZMTP_GREETING,
    ZMTP_MESSAGE,
)
from crosswire.pipeline.decode.scanners.octets import big_endian, octet_at
from crosswire.pipeline.decode.text import (
    Coded,
    Fixed,
    Hexadecimal,
    Quoted,
    Raw,
    TextPart,
    binary,
    by_code,
    distinct,
    octets_of,
)
from crosswire.wire.contract import Frame
from crosswire.wire.zmtp import layout
from crosswire.wire.zmtp.frames import Command, Greeting, parse_greeting, parse_metadata

__all__ = ["ZmtpDescription", "below"]

_LEAST_PROPERTY_BYTES: Final = (
    layout.PROPERTY_NAME_LENGTH_SIZE + 1 + layout.PROPERTY_VALUE_LENGTH_SIZE
)
"""A name of one letter, and an empty value."""


class ZmtpDescription(NamedTuple):
    """Descriptions of frames on layer 0: by row a code, NONE for other frames; by code the
    description; and the parts of their `fields`."""

    code: Numbers
    described: list[Described]
    fields: list[TextPart]


def below(rows: FrameRows) -> ZmtpDescription:
    """Describe frames of ZMTP. Of a message, the command in it is described."""
    code = np.where(rows.frame == ZMTP_MESSAGE, 0, NONE)
    greetings = rows.frame == ZMTP_GREETING
    commands = (rows.frame == ZMTP_COMMAND) | (rows.frame == NESTED_COMMAND)
    if not (commands.any() or greetings.any()):
        return ZmtpDescription(code, [MESSAGE], [Coded(code, [MESSAGE.fields])])
    found, frames = _distinct_kinds(rows, commands, greetings)
    code = np.where(found == NONE, code, found + 1)
    described = [describe_below(frame) for frame in frames]
    # The fields of a command end with its properties, which of those that the scanner has read
    # follow as a part of their own.
    commands &= rows.position != NONE
    whole = by_code(found, [isinstance(frame, Greeting) for frame in frames], False)
    whole |= rows.position == NONE
    closed = set(found[whole].tolist())
    opening = [
        each.fields if index in closed else each.fields.removesuffix("}}")
        for index, each in enumerate(described)
    ]
    ready = commands & by_code(found, [frame == Command("READY") for frame in frames], False)
    fields = [Coded(code, [MESSAGE.fields, *opening]), *_metadata(rows, ready)]
    return ZmtpDescription(code, [MESSAGE, *described], [*fields, Fixed("}}", commands)])


def _distinct_kinds(
    rows: FrameRows, commands: Flags, greetings: Flags
) -> tuple[Numbers, list[Greeting | Command]]:
    """Most greetings are equal, and commands of one name differ in their bodies only."""
    names, name_bytes = rows.slices[NAME]
    location = (
        np.where(greetings, rows.position, names),
        np.where(greetings, rows.length, name_bytes),
    )

    def read(row: int) -> Greeting | Command:
        frame: Frame | None = rows.decoded.get(row)
        if frame is None and greetings[row]:
            frame = parse_greeting(rows.whole(row), 0, 0)
        if frame is None:
            frame = Command(rows.part(row, NAME).decode())
        assert isinstance(frame, Greeting | Command)
        return frame

    return rows.distinct(commands | greetings, location, rows.frame, read)


@kernel(OCTETS, INTS, INTS, OUT_TABLE, returns=INT)
def _split(octets: Bytes, starts: Numbers, lengths: Numbers, properties: Numbers) -> int:
    """Write a column for each property: row, whether another is before it, start and length of
    name and value. The scanner has checked that lengths are within the metadata."""
    found = 0
    for row in range(len(starts)):
        at = starts[row]
        while at < starts[row] + lengths[row]:
            name, name_bytes = at + layout.PROPERTY_NAME_LENGTH_SIZE, octet_at(octets, at)
            name_end = name + name_bytes
            value = name_end + layout.PROPERTY_VALUE_LENGTH_SIZE
            value_bytes = big_endian(octets, name_end, layout.PROPERTY_VALUE_LENGTH_SIZE)
            properties[0, found], properties[1, found] = row, at > starts[row]
            properties[2, found], properties[3, found] = name, name_bytes
            properties[4, found], properties[5, found] = value, value_bytes
            found += 1
            at = value + value_bytes
    return found


def _metadata(rows: FrameRows, chosen: Flags) -> list[TextPart]:
    """The properties as members of a JSON object, values in hexadecimal since they are any bytes.

    The texts of all properties are written to one buffer first, in which those of a row follow one
    another: a slice of it is the part of a row.
    """
    starts, lengths = rows.slices[ABOUT]
    lengths = np.where(chosen, lengths, NONE)
    room = int(np.maximum(lengths, 0).sum()) // _LEAST_PROPERTY_BYTES
    properties = np.empty((6, room), np.int64)
    found = _split(rows.octets, starts, lengths, properties)
    row, follows, names, name_bytes, values, value_bytes = properties[:, :found].copy()
    fields = binary(
        found,
        Coded(follows, ["", ","]),
        Quoted(rows.octets, names, name_bytes),
        Fixed(':"', np.ones(found, np.bool_)),
        Hexadecimal(rows.octets, values, value_bytes),
        Fixed('"', np.ones(found, np.bool_)),
    )
    octets, at, _ = octets_of(fields)
    begins = np.flatnonzero(follows == 0)
    cuts = np.append(at, len(octets))
    stops = np.append(begins[1:], found)
    starts, lengths = np.zeros(len(rows), np.int64), np.full(len(rows), NONE)
    starts[row[begins]] = cuts[begins]
    lengths[row[begins]] = cuts[stops] - cuts[begins]
    parts: list[TextPart] = []
    firsts = distinct(rows.octets, names, name_bytes, row)[1]
    if len(firsts) < found:
        # A name that occurs again counts once, as in a dictionary: such rows are read in Python.
        again = np.unique(np.delete(row, firsts))
        lengths[again] = NONE
        code = np.full(len(rows), NONE)
        code[again] = np.arange(len(again))
        parts.append(Coded(code, [_read(rows.part(each, ABOUT)) for each in again.tolist()]))
    return [*parts, Raw(octets, starts, lengths)]


def _read(metadata: bytes) -> str:
    properties = {name: value.hex() for name, value in parse_metadata(metadata).items()}
    return json_text(properties)[1:-1]
