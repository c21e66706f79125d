"""MicroMsg2's columnar scanner: handshakes, then frames, their sequence and slices."""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.ascii_codes import (
    HYPHEN,
    LOWER,
    LOWER_A,
    LOWER_Z,
    NINE,
    NOT_ASCII,
    UNDERSCORE,
    ZERO,
)
from crosswire.pipeline.decode.kernels import subroutine
from crosswire.pipeline.decode.scanners.octets import (
    big_endian,
    find_octet,
    octet_at,
    valid_utf8,
    valid_utf8_escaped,
)
from crosswire.pipeline.decode.scanners.scanner import (
    HANDSHAKE_END,
    INCOMPLETE,
    PROTOCOL_STATE,
    UNSURE,
    BulkScanner,
    FrameColumns,
    add_row,
    scan_kernel,
    set_slice,
)
from crosswire.wire.contract import Decoder, Frame, Limits, one_of
from crosswire.wire.micromsg2 import layout
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.frames import (
    DEFAULTS,
    Command,
    Error,
    ExtensionFrame,
    Handshake,
    Message,
)
from crosswire.wire.micromsg2.values import MAX_CALL_BYTES, MAX_ITEMS

__all__ = [
    "COMMAND",
    "DESTINATION",
    "ERROR",
    "EXTENSION",
    "HANDSHAKE",
    "MESSAGE",
    "PAYLOAD",
    "PROPERTIES",
    "SCANNER",
    "MicroMsg2Scanner",
]

HANDSHAKE, MESSAGE, COMMAND, EXTENSION, ERROR = range(5)
"""Codes of frames."""
PAYLOAD, DESTINATION, PROPERTIES = range(3)
"""Slices."""

# What is remembered of a direction; NONE where the decoder has None.
_IS_CLIENT: Final = PROTOCOL_STATE
_HANDSHAKES: Final = PROTOCOL_STATE + 1
"""How many are still to come."""
_SEQUENCE: Final = PROTOCOL_STATE + 2
"""The number that the next message must have."""
_CONTINUED: Final = PROTOCOL_STATE + 3
"""Whether the last frame's message continues in the next."""
_EXTENSIONS: Final = PROTOCOL_STATE + 4
"""How many extensions were agreed on."""

_FRAME_BYTES: Final = 0
"""Of the limits."""


# ------------------------------------------------------------------------------------------- text


@subroutine
def _is_name(data: Bytes, start: int, end: int) -> bool:
    for index in range(start, end):
        octet = data[index]
        is_letter = LOWER_A <= octet | LOWER <= LOWER_Z
        is_mark = (octet == HYPHEN) | (octet == UNDERSCORE)
        if not (is_letter or ZERO <= octet <= NINE or is_mark):
            return False
    return start < end


@subroutine
def _are_arguments(data: Bytes, start: int, end: int, or_colons: bool) -> bool:
    """Pairs between commas, of a name, `=`, and text with escapes. A handshake may have a colon
    for the `=`."""
    if start == end:
        return True
    at = start
    while at <= end:
        stop = find_octet(data, at, end, layout.ARGUMENT_SEPARATOR)
        key_end = find_octet(data, at, stop, layout.ARGUMENT_VALUE_SEPARATOR)
        if or_colons:
            key_end = min(key_end, find_octet(data, at, stop, layout.VALUE_SEPARATOR))
        if key_end == stop or not _is_name(data, at, key_end):
            return False
        if not valid_utf8_escaped(data, key_end + 1, stop):
            return False
        at = stop + 1
    return True


@subroutine
def _is_list(data: Bytes, start: int, end: int, separator: int) -> bool:
    """Not more items than the decoder accepts."""
    count = 0
    for index in range(start, end):
        if data[index] == separator:
            count += 1
    return count <= MAX_ITEMS


@subroutine
def _is_call(data: Bytes, start: int, end: int) -> bool:
    """A COMMAND's or ERROR's name and arguments."""
    if end - start > MAX_CALL_BYTES or not _is_list(data, start, end, layout.ARGUMENT_SEPARATOR):
        return False
    stop = find_octet(data, start, end, layout.ITEM_SEPARATOR)
    return (
        valid_utf8(data, start, end)
        and _is_name(data, start, stop)
        and _are_arguments(data, min(stop + 1, end), end, False)
    )


@subroutine
def _count_extensions(data: Bytes, start: int, end: int) -> int:
    """How many extensions a handshake's list has, UNSURE if it is not one."""
    if not valid_utf8(data, start, end):
        return UNSURE
    if not _is_list(data, start, end, layout.ITEM_SEPARATOR):
        return UNSURE
    if not _is_list(data, start, end, layout.ARGUMENT_SEPARATOR):
        return UNSURE
    # The last item may have a separator after it.
    if end > start and data[end - 1] == layout.ITEM_SEPARATOR:
        end -= 1
    count = 0
    at = start
    while at <= end and start < end:
        stop = find_octet(data, at, end, layout.ITEM_SEPARATOR)
        name_end = find_octet(data, at, stop, layout.VALUE_SEPARATOR)
        if not _is_name(data, at, name_end):
            return UNSURE
        if not _are_arguments(data, min(name_end + 1, stop), stop, True):
            return UNSURE
        count += 1
        at = stop + 1
    return count


# ----------------------------------------------------------------------------------------- frames


@subroutine
def _handshake(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    if end - position < layout.HANDSHAKE_HEADER_SIZE:
        return INCOMPLETE
    # All lengths are of one or two bytes: no sum of them needs a limit.
    identity = position + layout.IDENTITY_OFFSET
    identity_end = identity + octet_at(data, position + layout.IDENTITY_LENGTH_OFFSET)
    length_bytes = layout.EXTENSIONS_LENGTH_SIZE
    required = identity_end + length_bytes
    if required > end:
        return INCOMPLETE
    required_end = required + big_endian(data, identity_end, length_bytes)
    optional = required_end + length_bytes
    if optional > end:
        return INCOMPLETE
    stop = optional + big_endian(data, required_end, length_bytes)
    if stop > end:
        return INCOMPLETE
    for index in range(identity, identity_end):
        if data[index] >= NOT_ASCII:
            return UNSURE
    first = _count_extensions(data, required, required_end)
    second = _count_extensions(data, optional, stop)
    if first < 0 or second < 0:
        return UNSURE
    state[_HANDSHAKES] -= 1
    if state[_HANDSHAKES] == 0:
        state[HANDSHAKE_END] = stop + shift
        # The client's second handshake names what both will use.
        if state[_IS_CLIENT]:
            state[_EXTENSIONS] = min(first + second, layout.LAST_EXTENSION)
    number = big_endian(data, position, layout.IDENTITY_LENGTH_OFFSET)
    row = add_row(rows, progress, position + shift, stop - position, HANDSHAKE, number, NONE, NONE)
    set_slice(rows, row, DESTINATION, identity, identity_end)
    set_slice(rows, row, PAYLOAD, identity_end, stop)
    return stop


@subroutine
def _length_size(flags: int) -> int:
    """In how many bytes a frame has the length of its payload."""
    return layout.LARGE_LENGTH_SIZE if flags & layout.FLAG_LARGE else layout.SHORT_LENGTH_SIZE


@subroutine
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
    """A whole frame of a message, whose payload is data[payload:stop]."""
    flags = octet_at(data, position)
    sequence = big_endian(data, position + layout.SEQUENCE_OFFSET, layout.SEQUENCE_SIZE)
    due, within = state[_SEQUENCE], state[_CONTINUED]
    name = position + layout.DESTINATION_OFFSET
    name_end = name + octet_at(data, position + layout.DESTINATION_LENGTH_OFFSET)
    properties = name_end + layout.PROPERTIES_LENGTH_SIZE
    properties_end = payload - _length_size(flags)
    is_first = name_end > name
    # A violation of the sequence is the Decoder's to report, and so is what continues it.
    if not sequence or due not in (NONE, sequence):
        return UNSURE
    # Only the first frame of a message has a destination and properties.
    between = within == 1 and (is_first or properties < properties_end)
    nameless = within == 0 and not is_first
    if between or nameless:
        return UNSURE
    if not valid_utf8(data, name, name_end):
        return UNSURE
    continued = 1 if flags & layout.FLAG_CONTINUED else 0
    is_last = sequence == layout.LAST_SEQUENCE
    state[_SEQUENCE] = layout.FIRST_SEQUENCE if is_last else sequence + 1
    state[_CONTINUED] = continued
    row = add_row(
        rows, progress, position + shift, stop - position, MESSAGE, 0, continued, sequence
    )
    set_slice(rows, row, DESTINATION, name, name_end)
    set_slice(rows, row, PROPERTIES, properties, properties_end)
    set_slice(rows, row, PAYLOAD, payload, stop)
    return stop


@subroutine
def _step(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position after the handshake or frame, or why there is none."""
    flags = octet_at(data, position + layout.FLAGS_OFFSET)
    kind = flags & layout.TYPE_MASK
    # A peer may refuse with an ERROR where a handshake is due; no version begins like one.
    is_error = flags == layout.TYPE_ERROR or flags == layout.TYPE_ERROR | layout.FLAG_LARGE
    if state[_HANDSHAKES] > 0 and not is_error:
        return _handshake(data, position, end, shift, state, rows, progress)
    # Types exclude one another: no two of their bits are set. Only messages continue.
    if flags > layout.LAST_FLAGS or kind & (kind - 1) or (kind and flags & layout.FLAG_CONTINUED):
        return UNSURE
    if kind == layout.TYPE_MESSAGE:
        if end - position < layout.MESSAGE_HEADER_SIZE:
            return INCOMPLETE
        name_end = position + layout.DESTINATION_OFFSET
        name_end += octet_at(data, position + layout.DESTINATION_LENGTH_OFFSET)
        at = name_end + layout.PROPERTIES_LENGTH_SIZE
        if at > end:
            return INCOMPLETE
        at += big_endian(data, name_end, layout.PROPERTIES_LENGTH_SIZE)
    elif kind == layout.TYPE_EXTENSION:
        at = position + layout.EXTENSION_HEADER_SIZE
    else:
        at = position + layout.HEADER_SIZE
    length_size = _length_size(flags)
    payload = at + length_size
    if payload > end:
        return INCOMPLETE
    size = big_endian(data, at, length_size)
    if size > limits[_FRAME_BYTES]:
        return UNSURE
    stop = payload + size
    if stop > end:
        return INCOMPLETE
    if kind == layout.TYPE_MESSAGE:
        return _message(data, position, payload, stop, shift, state, rows, progress)
    number, frame = 0, EXTENSION
    if kind == layout.TYPE_EXTENSION:
        number = octet_at(data, position + layout.EXTENSION_NUMBER_OFFSET)
        agreed = state[_EXTENSIONS]
        if number < layout.FIRST_EXTENSION or (agreed != NONE and number > agreed):
            return UNSURE
    else:
        frame = COMMAND if kind == layout.TYPE_COMMAND else ERROR
        if not _is_call(data, payload, stop):
            return UNSURE
    row = add_row(rows, progress, position + shift, stop - position, frame, number, NONE, NONE)
    set_slice(rows, row, PAYLOAD, payload, stop)
    return stop


class MicroMsg2Scanner(BulkScanner):
    """`sequence` is a message's; `detail` is 1 for a message that is continued, else 0; `number` is
    an extension frame's. `payload` is what follows its length: of a COMMAND or ERROR the name with
    its arguments, of a handshake all after its identity. A handshake's `destination` is the
    identity, its `number` version and flags as one number. What is in `properties` is not checked
    here.
    """

    frames: ClassVar[tuple[type[Frame], ...]] = (
        Handshake,
        Message,
        Command,
        ExtensionFrame,
        Error,
    )
    slice_names: ClassVar[tuple[str, ...]] = ("payload", "destination", "properties")
    state_slots: ClassVar[int] = 5
    has_handshake: ClassVar[bool] = True
    reads_peer_handshake: ClassVar[bool] = True
    kernel = staticmethod(scan_kernel("micromsg2", _step))

    def share_handshake(self, states: Numbers, peers: Numbers) -> None:
        """The client's second handshake concludes which extensions both use."""
        states[:, _EXTENSIONS] = peers[:, _EXTENSIONS]

    def columns_of(self, frame: Frame, length: int, below: Frame | None) -> FrameColumns:  # noqa: ARG002
        """Of messages and extension frames; the others are read from the frame itself. A handshake
        that `fields()` refuses is no handshake."""
        code = self.codes[type(frame)]
        match frame:
            case Message():
                slices = (frame.payload, frame.destination.encode(), frame.raw_properties)
                return FrameColumns(code, 0, int(frame.continued), frame.sequence, slices)
            case ExtensionFrame(number, payload):
                return FrameColumns(code, number, slices=(payload,))
            case Handshake():
                frame.fields()
        return FrameColumns(code)

    def _limit_values(self, limits: Limits | None) -> list[int]:
        return [one_of(limits, DEFAULTS).frame_bytes]

    def _initial_state(self, sender: str) -> list[int]:
        is_client = sender == "client"
        handshakes = layout.CLIENT_HANDSHAKES if is_client else layout.SERVER_HANDSHAKES
        return [is_client, handshakes, layout.FIRST_SEQUENCE, False, NONE]

    def _state_from(self, decoder: Decoder) -> tuple[bool, list[int]] | None:
        assert isinstance(decoder, MicroMsg2Decoder)
        sequence, continued, agreed = decoder.next_sequence, decoder.continued, decoder.agreed
        return not decoder.handshakes_due, [
            decoder.sender == "client",
            decoder.handshakes_due,
            NONE if sequence is None else sequence,
            NONE if continued is None else continued,
            NONE if agreed is None else len(agreed),
        ]

    def _restore(self, decoder: Decoder, state: Numbers) -> None:
        assert isinstance(decoder, MicroMsg2Decoder)
        sequence, continued = int(state[_SEQUENCE]), int(state[_CONTINUED])
        decoder.resume(
            next_sequence=None if sequence == NONE else sequence,
            continued=None if continued == NONE else bool(continued),
        )


SCANNER = MicroMsg2Scanner
