"""The index that finds the patterns which match a topic's name.

A pattern with `+` may be one of thousands that all match a name, each by other levels. A tree would
be walked along all of them, a step for each pattern and level. So they are columns of bits: a block
has up to a thousand patterns, and knows for each level which of them have `+` there, and which have
a certain name. One `and` of two integers for each level leaves those that match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, compress, islice
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["PatternIndex", "pattern_test"]

_CHANGES: Final = 64
"""Changes of an index after which what was matched before is brought up to date one by one."""
_BLOCK_PATTERNS: Final = 1024
"""More would take fewer steps, but more memory where each pattern has names of its own: a bit for
each pattern of the block, for each of these names."""
_AS_BITS: Final = bytes.maketrans(b"01", b"\0\1")

T = TypeVar("T")


class _Level:
    """Which patterns of a block have `+` at this level, and which have a certain name."""

    __slots__ = ("any_name", "by_name")

    def __init__(self) -> None:
        self.any_name = 0
        self.by_name: dict[str, int] = {}


class _PatternBlock(Generic[T]):
    """Patterns with `+`; the number of a pattern is its bit."""

    __slots__ = ("_ends", "_free", "_levels", "_rests", "entries")

    def __init__(self) -> None:
        self.entries: list[list[T]] = []
        self._free: list[int] = []
        self._levels: list[_Level] = []
        # By number of levels, which patterns end there, and of which any number may follow.
        self._ends: list[int] = [0]
        self._rests: list[int] = [0]

    @property
    def has_room(self) -> bool:
        return bool(self._free) or len(self.entries) < _BLOCK_PATTERNS

    @property
    def is_empty(self) -> bool:
        return len(self._free) == len(self.entries)

    def add(self, levels: list[str], *, in_rest: bool) -> int:
        """Gives the pattern's number."""
        if self._free:
            number = self._free.pop()
        else:
            number = len(self.entries)
            self.entries.append([])
        bit = 1 << number
        while len(self._levels) < len(levels):
            self._levels.append(_Level())
            self._ends.append(0)
            self._rests.append(0)
        for level, name in zip(self._levels, levels, strict=False):
            if name == "+":
                level.any_name |= bit
            else:
                level.by_name[name] = level.by_name.get(name, 0) | bit
        (self._rests if in_rest else self._ends)[len(levels)] |= bit
        return number

    def remove(self, number: int, levels: list[str], *, in_rest: bool) -> None:
        bit = 1 << number
        for level, name in zip(self._levels, levels, strict=False):
            if name == "+":
                level.any_name ^= bit
            elif level.by_name[name] == bit:
                del level.by_name[name]
            else:
                level.by_name[name] ^= bit
        (self._rests if in_rest else self._ends)[len(levels)] ^= bit
        self._free.append(number)

    def match(self, levels: list[str], found: list[T]) -> None:
        """Add the entries of the patterns that match a name to those that were found."""
        left = (1 << len(self.entries)) - 1
        matching = 0
        for depth, (level, name) in enumerate(zip(self._levels, levels, strict=False)):
            matching |= left & self._rests[depth]
            # Nothing stands for a first level with `$`.
            is_hidden = depth == 0 and name.startswith("$")
            left &= level.by_name.get(name, 0) | (0 if is_hidden else level.any_name)
            if not left:
                break
        else:
            depth = len(levels)
            if depth < len(self._rests):
                matching |= left & (self._rests[depth] | self._ends[depth])
            else:
                matching |= left & self._rests[-1]
        if matching:
            bits = f"{matching:b}".encode().translate(_AS_BITS)
            for entries in compress(self.entries, reversed(bits)):
                found += entries


class _PatternNumber(NamedTuple, Generic[T]):
    block: _PatternBlock[T]
    number: int


class PatternIndex(Generic[T]):
    """Patterns as MQTT has them: `+` is one level, a final `#` is any number, its parent too.

    Neither stands for a first level that starts with `$`. `version` grows with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._names: dict[str, list[T]] = {}
        """By patterns that are names."""
        self._rests: dict[str, list[T]] = {}
        """By patterns with a final `#` after names."""
        self._numbers: dict[str, _PatternNumber[T]] = {}
        """By patterns with `+`."""
        self._blocks: dict[_PatternBlock[T], None] = {}
        self._with_room: dict[_PatternBlock[T], None] = {}
        self._changes: deque[tuple[str, T, bool]] = deque(maxlen=_CHANGES)
        """The latest ones, and whether each was an addition."""

    def add(self, pattern: str, entry: T) -> None:
        """Have `match` find this entry; it may be added several times."""
        levels, in_rest = _split(pattern)
        if "+" in levels:
            block, number = self._numbers.get(pattern) or self._number(pattern, levels, in_rest)
            block.entries[number].append(entry)
        else:
            (self._rests if in_rest else self._names).setdefault(pattern, []).append(entry)
        self._changes.append((pattern, entry, True))
        self.version += 1

    def _number(self, pattern: str, levels: list[str], in_rest: bool) -> _PatternNumber[T]:
        if not self._with_room:
            block: _PatternBlock[T] = _PatternBlock()
            self._blocks[block] = self._with_room[block] = None
        block = next(iter(self._with_room))
        numbered = _PatternNumber(block, block.add(levels, in_rest=in_rest))
        self._numbers[pattern] = numbered
        if not block.has_room:
            del self._with_room[block]
        return numbered

    def remove(self, pattern: str, entry: T) -> None:
        """Undo one `add`. Raises KeyError or ValueError if there was none."""
        levels, in_rest = _split(pattern)
        if "+" in levels:
            block, number = self._numbers[pattern]
            block.entries[number].remove(entry)
            if not block.entries[number]:
                del self._numbers[pattern]
                block.remove(number, levels, in_rest=in_rest)
                self._with_room[block] = None
                if block.is_empty:
                    del self._blocks[block], self._with_room[block]
        else:
            plain = self._rests if in_rest else self._names
            plain[pattern].remove(entry)
            if not plain[pattern]:
                del plain[pattern]
        self._changes.append((pattern, entry, False))
        self.version += 1

    def renew(self) -> None:
        """What entries want beyond their patterns has changed: all is matched again."""
        self._changes.clear()
        self.version += 1

    def __iter__(self) -> Iterator[T]:
        """Every entry, in no particular order."""
        of_blocks = (each.entries for each in self._blocks)
        plain = (self._names.values(), self._rests.values())
        for entries in chain(*plain, *of_blocks):
            yield from entries

    def match(self, name: str) -> list[T]:
        """The entries of every pattern that matches the name."""
        found = list(self._names.get(name, ()))
        levels = name.split("/")
        if self._rests:
            if not name.startswith("$"):
                found += self._rests.get("#", ())
            start = ""
            for level in levels:
                start += level + "/"
                found += self._rests.get(start + "#", ())
        for block in self._blocks:
            block.match(levels, found)
        return found

    def update(
        self, found: list[T], version: int, name: str, wants: Callable[[T], bool]
    ) -> list[T] | None:
        """The entries of `match` that `wants` selects, from those of an earlier version. None if
        too much has changed since.

        With thousands of patterns that match a name, a peer that subscribes before each publication
        would have all of them matched each time.
        """
        count = self.version - version
        if count > len(self._changes):
            return None
        updated = found
        for pattern, entry, is_added in islice(self._changes, len(self._changes) - count, None):
            if pattern_test(pattern)(name):
                # A copy: who publishes right now has the old list.
                updated = list(found) if updated is found else updated
                if not is_added:
                    with suppress(ValueError):  # it was there, but not wanted
                        updated.remove(entry)
                elif wants(entry):
                    updated.append(entry)
        return updated


def _split(pattern: str) -> tuple[list[str], bool]:
    """The levels of a pattern without a final `#`, and whether it has one."""
    levels = pattern.split("/")
    if levels[-1] == "#":
        return levels[:-1], True
    return levels, False


def pattern_test(pattern: str) -> Callable[[str], bool]:
    """A function that gives whether this one pattern matches a name."""
    wanted, in_rest = _split(pattern)
    count, plain = len(wanted), [(depth, each) for depth, each in enumerate(wanted) if each != "+"]
    begins_with_any = pattern.partition("/")[0] in ("+", "#")

    def is_match(name: str) -> bool:
        levels = name.split("/")
        if len(levels) < count or (len(levels) > count and not in_rest):
            return False
        if begins_with_any and name.startswith("$"):
            return False
        return all(levels[depth] == each for depth, each in plain)

    return is_match
