"""The part of the log that a reader selects: destinations, and a range of ids in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from crosswire.access import covers
from crosswire.envelope import parse_pattern
from crosswire.errors import InvalidDestination

__all__ = [
    "EARLIEST",
    "LATEST",
    "MOST_DESTINATIONS",
    "MOST_PATTERNS",
    "OTHERS",
    "LogSelection",
]

EARLIEST: Final = -2
LATEST: Final = -1
MOST_DESTINATIONS: Final = 1_000
MOST_PATTERNS: Final = 100
"""Each is compared with every destination of the hub."""
_CHECKED: Final = 256
OTHERS: Final = "*"
"""Stands for every destination that is not named itself."""


class LogSelection:
    """Destinations, some of them patterns; `starts` and `ends` (exclusive) are ids by name.

    `service/NAME` means all its methods. `may` is asked about each destination that is found, too:
    who has the right to a pattern need not have it to all that the pattern selects, such as dead
    letters of others' subscriptions. Raises InvalidDestination.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        starts: Mapping[str, int] | None = None,
        ends: Mapping[str, int] | None = None,
        *,
        may: Callable[[str], bool],
    ) -> None:
        if len(patterns) > MOST_DESTINATIONS:
            raise InvalidDestination(
                f"one reads at most {MOST_DESTINATIONS} destinations at once, not {len(patterns)}"
            )
        for pattern in patterns:
            parse_pattern(pattern)
        self._exact = frozenset(patterns)
        self._patterns = [each for each in patterns if "+" in each or "#" in each]
        if len(self._patterns) > MOST_PATTERNS:
            raise InvalidDestination(
                f"one reads at most {MOST_PATTERNS} patterns at once, not {len(self._patterns)}"
            )
        self._services = any(each.startswith("service/") for each in patterns)
        self._known: dict[str, bool] = {}
        self._may = may
        self.starts = {OTHERS: EARLIEST, **(starts or {})}
        self.ends = {OTHERS: LATEST, **(ends or {})}

    def wants(self, destination: str) -> bool:
        """Is the destination selected, and may it be read?"""
        known = self._known.get(destination)
        if known is None:
            known = self._known[destination] = self._decide(destination)
        return known and self._may(destination)

    def _decide(self, destination: str) -> bool:
        return any(True for _ in self.selecting(destination))

    def selecting(self, destination: str) -> Iterator[str]:
        """Those of what is asked for that select it."""
        if destination in self._exact:
            yield destination
        service = _service_of(destination)
        if service != destination and service in self._exact:
            yield service
        for pattern in self._patterns:
            if covers(pattern, destination):
                yield pattern

    def takes(self, destination: str, identifier: int) -> bool:
        """Is the message selected?"""
        return self.wants(destination) and (
            self.start(destination) <= identifier < self.end(destination)
        )

    def logs(
        self, numbers: Mapping[str, int], go_on: Callable[[], None] = lambda: None
    ) -> dict[str, int]:
        """Which of the store's logs may have some of it. Calls of a service are in its own,
        whatever the method, or in that of the method.

        `go_on` is called now and then: with many destinations and patterns it takes long, and ends
        with what that raises.
        """
        if self._patterns or self._services:
            found = {}
            for position, (name, number) in enumerate(numbers.items()):
                if not position % _CHECKED:
                    go_on()
                if self.wants(name) or (self._services and name.startswith("service/")):
                    found[name] = number
            return found
        return {name: numbers[name] for name in sorted(self._exact) if name in numbers}

    def start(self, destination: str) -> int:
        """The first id that is selected of a destination."""
        return _named(self.starts, destination)

    def end(self, destination: str) -> int:
        """The id after the last one that is selected of a destination."""
        return _named(self.ends, destination)

    def mask(self, destinations: pa.Array, ids: Any) -> Any:
        """Which rows are wanted: an array of truth values."""
        coded = destinations.dictionary_encode()
        names = coded.dictionary.to_pylist()
        wanted = np.array([self.wants(name) for name in names], bool)
        codes = np.frombuffer(
            coded.indices.buffers()[1], np.int32, len(coded), 4 * coded.indices.offset
        )
        chosen = wanted[codes] if len(names) else np.zeros(0, bool)
        if len(self.starts) == 1 and len(self.ends) == 1:
            return chosen & (ids >= self.starts[OTHERS]) & (ids < self.ends[OTHERS])
        starts = np.array([self.start(name) for name in names], np.int64)
        ends = np.array([self.end(name) for name in names], np.int64)
        return chosen & (ids >= starts[codes]) & (ids < ends[codes])


def _service_of(destination: str) -> str:
    return "/".join(destination.split("/")[:2]) if destination.startswith("service/") else ""


def _named(positions: Mapping[str, int], destination: str) -> int:
    position = positions.get(destination)
    if position is None:
        position = positions.get(_service_of(destination))
    return positions[OTHERS] if position is None else position
