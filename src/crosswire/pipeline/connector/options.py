"""Options of the source `crosswire`, with Kafka's names, checked before anything is read."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from crosswire.envelope import MICROSECONDS, parse_pattern
from crosswire.errors import ClientError, InvalidDestination, InvalidInput
from crosswire.pipeline.connector.address import DEFAULT_HUB, PATIENCE_S, HubAddress
from crosswire.pipeline.connector.columns import COLUMNS, HEADERS

__all__ = [
    "EARLIEST",
    "LATEST",
    "OTHERS",
    "Offsets",
    "ReadOptions",
    "address_of",
    "check_names",
    "known_columns",
    "read_options",
]

EARLIEST: Final = -2
LATEST: Final = -1
OTHERS: Final = "*"
"""Stands for every destination that offsets don't name."""

Offsets = dict[str, dict[str, int]]
"""Destination → node → id, as Kafka has topic → partition → offset."""

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_KNOWN: Final = (
    "columns",
    "endingOffsets",
    "failOnDataLoss",
    "hub",
    "includeHeaders",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "patienceS",
    "startingOffsets",
    "startingTimestamp",
    "subscribe",
    "subscribePattern",
    "token",
)
_NOT_IN_BATCHES: Final = ("maxOffsetsPerTrigger",)
_NOT_IN_STREAMS: Final = ("endingOffsets",)


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options as values. `starts` and `ends` are EARLIEST or LATEST for all destinations, or
    offsets by destination."""

    address: HubAddress
    destinations: tuple[str, ...]
    pattern: str
    columns: tuple[str, ...]
    starts: int | Offsets
    ends: int | Offsets
    since_us: int | None
    limit: int
    parts: int
    strict: bool


def read_options(given: Mapping[str, str], *, stream: bool) -> ReadOptions:
    """The options of a read. Raises InvalidInput with the option that is wrong."""
    columns = known_columns(given)
    for name in _NOT_IN_STREAMS if stream else _NOT_IN_BATCHES:
        if given.get(name) is not None:
            raise InvalidInput(f"{name} is an option for {'batches' if stream else 'streams'} only")
    destinations, pattern = _subscription(given)
    starts = _offsets(given, "startingOffsets", LATEST if stream else EARLIEST)
    ends = _offsets(given, "endingOffsets", LATEST)
    if not stream and starts == LATEST:
        raise InvalidInput("startingOffsets can't be latest in a batch: it would be empty")
    if ends == EARLIEST:
        raise InvalidInput("endingOffsets can't be earliest: the batch would be empty")
    for offsets in (starts, ends):
        if isinstance(offsets, dict) and destinations:
            _subscribed(offsets, destinations)
    return ReadOptions(
        address=address_of(given),
        destinations=destinations,
        pattern=pattern,
        columns=columns,
        starts=starts,
        ends=ends,
        since_us=_moment(given),
        limit=_count(given, "maxOffsetsPerTrigger"),
        parts=_count(given, "minPartitions") or 1,
        strict=_flag(given, "failOnDataLoss", True),
    )


def known_columns(given: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of the option `columns`, else all, headers only with `includeHeaders`.

    Raises InvalidInput for unknown columns and unknown options.
    """
    check_names(given, _KNOWN, of="source")
    chosen = given.get("columns")
    if chosen is None:
        has_headers = _flag(given, "includeHeaders", False)
        return tuple(name for name in COLUMNS if name != HEADERS or has_headers)
    names = tuple(name.strip() for name in chosen.split(","))
    for name in names:
        if name not in COLUMNS:
            raise InvalidInput(f"there is no column {name!r}; there are {', '.join(COLUMNS)}")
    if len(set(names)) < len(names):
        raise InvalidInput("a column is named twice in `columns`")
    return names


def address_of(given: Mapping[str, str]) -> HubAddress:
    """The hub's address and token: from the options, else from the environment, else the default.
    Raises InvalidInput for what is no URL."""
    url = given.get("hub") or os.environ.get("CROSSWIRE_HUB") or DEFAULT_HUB
    token = given.get("token") or os.environ.get("CROSSWIRE_TOKEN") or ""
    patience = given.get("patienceS")
    try:
        patience_s = PATIENCE_S if patience is None else float(patience)
    except ValueError:
        raise InvalidInput(f"patienceS is a number of seconds, not {patience!r}") from None
    address = HubAddress(url, token, patience_s)
    try:
        address.check()
    except ClientError as error:
        raise InvalidInput(f"hub: {error}") from None
    return address


def check_names(given: Mapping[str, str], names: Sequence[str], *, of: str) -> None:
    """Raises InvalidInput for an option that the source or the sink does not have."""
    known = {name.lower(): name for name in names}
    for name in given:
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, 1)
            hint = f"; did you mean {known[near[0]]}?" if near else f"; it has {', '.join(names)}"
            raise InvalidInput(f"the {of} crosswire has no option {name!r}{hint}")


def _subscription(given: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    names, pattern = given.get("subscribe"), given.get("subscribePattern")
    if (names is None) == (pattern is None):
        raise InvalidInput(
            "give either the option subscribe (destinations) or subscribePattern (a regular"
            " expression)"
        )
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidInput(f"subscribePattern is no regular expression: {error}") from None
        return (), pattern
    destinations = tuple(name.strip() for name in (names or "").split(","))
    for destination in destinations:
        try:
            parse_pattern(destination)
        except InvalidDestination as error:
            raise InvalidInput(f"subscribe: {error}") from None
    return destinations, ""


def _offsets(given: Mapping[str, str], name: str, default: int) -> int | Offsets:
    text = given.get(name)
    if text is None:
        return default
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return word
    try:
        offsets = msgspec.json.decode(text, type=Offsets)
    except msgspec.MsgspecError as error:
        raise InvalidInput(
            f'{name} is `earliest`, `latest` or JSON like {{"queue/orders": {{"NODE": 17}}}}, '
            f"not {text!r}: {error}"
        ) from None
    for destination, positions in offsets.items():
        if not positions or any(offset < EARLIEST for offset in positions.values()):
            raise InvalidInput(
                f"{name}: {destination} needs an id for a node, or -2 (earliest) or -1 (latest)"
            )
    return offsets


def _subscribed(offsets: Offsets, destinations: tuple[str, ...]) -> None:
    # What a wildcard matches is known to the hub only.
    if any("+" in each or "#" in each for each in destinations):
        return
    for name in offsets:
        if name != OTHERS and name not in destinations:
            raise InvalidInput(f"offsets are given for {name}, which subscribe does not have")


def _moment(given: Mapping[str, str]) -> int | None:
    """`startingTimestamp` in µs: milliseconds since 1970, as in Kafka, or ISO 8601."""
    text = given.get("startingTimestamp")
    if text is None:
        return None
    if re.fullmatch(r"\d{1,15}", text.strip()):
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(
            "startingTimestamp is in milliseconds since 1970, or like 2026-11-15T08:00:00Z, "
            f"not {text!r}"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * MICROSECONDS)


def _count(given: Mapping[str, str], name: str) -> int:
    """A whole number above 0; 0 if the option is not given."""
    text = given.get(name)
    if text is None:
        return 0
    if not re.fullmatch(r"[1-9]\d{0,17}", text.strip()):
        raise InvalidInput(f"{name} is a whole number above 0, not {text!r}")
    return int(text)


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    text: Any = given.get(name)
    if text is None:
        return default
    value = {"true": True, "false": False}.get(text.strip().lower())
    if value is None:
        raise InvalidInput(f"{name} is true or false, not {text!r}")
    return value
