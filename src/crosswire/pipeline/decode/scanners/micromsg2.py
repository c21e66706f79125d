"""MicroMsg2's columnar scanner for captures: handshakes, then frames, their sequence and slices."""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.pipeline.decode.scanners.scanner import (
    NONE,
    ODD,
    OFFSET,
    OPENED,
    OWN,
    TAIL,
    BulkScanner,
    Bytes,
    Numbers,
    big,
    compiled,
    has_room,
    has_run,
    kernel,
    octet_at,
    point,
    put,
    stopped,
    valid_utf8,
    valid_utf8_escaped,
)
from crosswire.wire.contract import Decoder, Limits, one_of
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.frames import (
    DEFAULTS,
    Command,
    Error,
    ExtensionFrame,
    Handshake,
    Message,
)
from crosswire.wire.micromsg2.layout import LAST_SEQUENCE

__all__ = ["MicroMsg2Scanner"]

# Slots of the state; NONE where the decoder has None.
_CLIENT: Final = OWN
_HANDSHAKES: Final = OWN + 1
_SEQUENCE: Final = OWN + 2
_CONTINUED: Final = OWN + 3
_AGREED: Final = OWN + 4
"""How many extensions are in use."""

_HANDSHAKE, _MESSAGE, _COMMAND, _EXTENSION, _ERROR = range(5)
_PAYLOAD, _DESTINATION, _PROPERTIES = range(3)

# Frame flags.
_TYPES: Final = 7
_LARGE: Final = 8
_IS_CONTINUED: Final = 16


# ------------------------------------------------------------------------------------------- text


@compiled
def _find(data: Bytes, start: int, end: int, octet: int) -> int:
    """Where it is, or the end."""
    for index in range(start, end):
        if data[index] == octet:
            return index
    return end


@compiled
def _is_name(data: Bytes, start: int, end: int) -> bool:
    for index in range(start, end):
        octet = data[index]
        letter = 97 <= octet | 32 <= 122
        if not (letter or 48 <= octet <= 57 or octet == 45 or octet == 95):
            return False
    return start < end


@compiled
def _are_arguments(data: Bytes, start: int, end: int, or_colons: bool) -> bool:
    """Pairs between commas, of a name, `=`, and text with escapes."""
    if start == end:
        return True
    at = start
    while at <= end:
        stop = _find(data, at, end, 44)
        key_end = _find(data, at, stop, 61)
        if or_colons:
            key_end = min(key_end, _find(data, at, stop, 58))
        if key_end == stop or not _is_name(data, at, key_end):
            return False
        if not valid_utf8_escaped(data, key_end + 1, stop):
            return False
        at = stop + 1
    return True


@compiled
def _is_call(data: Bytes, start: int, end: int) -> bool:
    """A COMMAND's or ERROR's name and arguments."""
    stop = _find(data, start, end, 59)
    return (
        valid_utf8(data, start, end)
        and _is_name(data, start, stop)
        and _are_arguments(data, min(stop + 1, end), end, False)
    )


@compiled
def _count_extensions(data: Bytes, start: int, end: int) -> int:
    """How many a handshake's list has, ODD if it is not one."""
    if not valid_utf8(data, start, end):
        return ODD
    if end > start and data[end - 1] == 59:
        end -= 1
    count = 0
    at = start
    while at <= end and start < end:
        stop = _find(data, at, end, 59)
        name_end = _find(data, at, stop, 58)
        if not _is_name(data, at, name_end):
            return ODD
        if not _are_arguments(data, min(name_end + 1, stop), stop, True):
            return ODD
        count += 1
        at = stop + 1
    return count


# ----------------------------------------------------------------------------------------- frames


@compiled
def _handshake(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    if end - position < 4:
        return TAIL
    identity_end = position + 4 + octet_at(data, position + 3)
    required = identity_end + 2
    if required > end:
        return TAIL
    required_end = required + big(data, identity_end, 2)
    optional = required_end + 2
    if optional > end:
        return TAIL
    stop = optional + big(data, required_end, 2)
    if stop > end:
        return TAIL
    for index in range(position + 4, identity_end):
        if data[index] >= 0x80:
            return ODD
    first = _count_extensions(data, required, required_end)
    second = _count_extensions(data, optional, stop)
    if first < 0 or second < 0:
        return ODD
    state[_HANDSHAKES] -= 1
    if state[_HANDSHAKES] == 0:
        state[OPENED] = stop + shift
        if state[_CLIENT]:
            state[_AGREED] = min(first + second, 255)
    offset, number = position + shift, big(data, position, 3)
    row = put(rows, progress, offset, stop - position, _HANDSHAKE, number, NONE, NONE)
    point(rows, row, _DESTINATION, position + 4, identity_end)
    point(rows, row, _PAYLOAD, identity_end, stop)
    return stop


@compiled
def _message(
    data: Bytes,
    position: int,
    payload: int,
    stop: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """A whole one, whose payload stands from `payload` to `stop`."""
    flags = data[position]
    sequence = big(data, position + 1, 2)
    due, within = state[_SEQUENCE], state[_CONTINUED]
    name_end = position + 4 + octet_at(data, position + 3)
    properties = name_end + 2
    properties_end = payload - (4 if flags & _LARGE else 1)
    is_first = name_end > position + 4
    if not sequence or due not in (NONE, sequence):
        return ODD
    between = within == 1 and (is_first or properties < properties_end)
    nameless = within == 0 and not is_first
    if between or nameless:
        return ODD
    if not valid_utf8(data, position + 4, name_end):
        return ODD
    continued = 1 if flags & _IS_CONTINUED else 0
    state[_SEQUENCE] = 1 if sequence == LAST_SEQUENCE else sequence + 1
    state[_CONTINUED] = continued
    offset = position + shift
    row = put(rows, progress, offset, stop - position, _MESSAGE, 0, continued, sequence)
    point(rows, row, _DESTINATION, position + 4, name_end)
    point(rows, row, _PROPERTIES, properties, properties_end)
    point(rows, row, _PAYLOAD, payload, stop)
    return stop


@compiled
def _frame(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position behind the frame, or why there is none to be had."""
    flags = octet_at(data, position)
    if state[_HANDSHAKES] > 0 and flags not in (4, 12):
        return _handshake(data, position, end, shift, state, rows, progress)
    kind = flags & _TYPES
    if flags > 31 or kind & (kind - 1) or (kind and flags & _IS_CONTINUED):
        return ODD
    if kind == 0:
        if end - position < 4:
            return TAIL
        at = position + 4 + octet_at(data, position + 3) + 2
        if at > end:
            return TAIL
        at += big(data, at - 2, 2)
    else:
        at = position + (2 if kind == 2 else 1)
    wide = 4 if flags & _LARGE else 1
    payload = at + wide
    if payload > end:
        return TAIL
    size = big(data, at, wide)
    if size > limits[0]:
        return ODD
    stop = payload + size
    if stop > end:
        return TAIL
    if kind == 0:
        return _message(data, position, payload, stop, shift, state, rows, progress)
    number, frame = 0, _EXTENSION
    if kind == 2:
        number = octet_at(data, position + 1)
        if number == 0 or (state[_AGREED] != NONE and number > state[_AGREED]):
            return ODD
    else:
        frame = _COMMAND if kind == 1 else _ERROR
        if not _is_call(data, payload, stop):
            return ODD
    row = put(rows, progress, position + shift, stop - position, frame, number, NONE, NONE)
    point(rows, row, _PAYLOAD, payload, stop)
    return stop


@kernel
def _scan(
    data: Bytes,
    at: Numbers,
    ends: Numbers,
    states: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> bool:
    while has_run(states, progress):
        run = progress[0]
        position, end, state = at[run], ends[run], states[run]
        shift = state[OFFSET] - position
        after = position
        while position < end and has_room(rows, progress):
            after = _frame(data, position, end, shift, state, limits, rows, progress)
            if after < 0:
                break
            position = after
        if not stopped(at, ends, states, progress, position, after):
            return False
    return True


class MicroMsg2Scanner(BulkScanner):
    """`sequence` is a message's; `detail` is 1 for a message that is continued, else 0; `number` is
    an extension frame's. `payload` is what follows its length: of a COMMAND or ERROR the name with
    its arguments, of a handshake all behind its identity. A handshake's `destination` is the
    identity, its `number` version and flags as they stand. What is in `properties` is a second
    step's to check.
    """

    frame_names: ClassVar[tuple[str, ...]] = tuple(
        frame.frame_name for frame in (Handshake, Message, Command, ExtensionFrame, Error)
    )
    frame_layers: ClassVar[tuple[int, ...]] = (0,) * len(frame_names)
    slice_names: ClassVar[tuple[str, ...]] = ("payload", "destination", "properties")
    own_slots: ClassVar[int] = 5
    has_handshake: ClassVar[bool] = True

    _kernel = staticmethod(_scan)

    def share(self, states: Numbers, peers: Numbers) -> None:
        states[:, _AGREED] = peers[:, _AGREED]

    def _limited(self, limits: Limits | None) -> list[int]:
        return [one_of(limits, DEFAULTS).frame_bytes]

    def _begin(self, sender: str) -> list[int]:
        return [1, 2, 1, 0, NONE] if sender == "client" else [0, 1, 1, 0, NONE]

    def _read_state(self, decoder: Decoder) -> tuple[bool, list[int]] | None:
        assert isinstance(decoder, MicroMsg2Decoder)
        sequence, continued, agreed = decoder._sequence, decoder._continued, decoder.agreed
        return not decoder._handshakes, [
            decoder.sender == "client",
            decoder._handshakes,
            NONE if sequence is None else sequence,
            NONE if continued is None else continued,
            NONE if agreed is None else len(agreed),
        ]

    def _write_state(self, decoder: Decoder, state: Numbers) -> None:
        assert isinstance(decoder, MicroMsg2Decoder)
        sequence, continued = int(state[_SEQUENCE]), int(state[_CONTINUED])
        decoder._sequence = None if sequence == NONE else sequence
        decoder._continued = None if continued == NONE else bool(continued)
