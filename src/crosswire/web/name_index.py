"""The names of all destinations in order, so that a page of a long list is found without sorting.

A hub may have a hundred thousand queues. Sorting their names takes a tenth of a second, in which
nobody else is served, and would be repeated for each page. Here they stay sorted, in blocks, and
only what was created or removed since the last request is looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final, Literal

from crosswire.hub.hub import Hub
from crosswire.store.contract import Store
from crosswire.web.turn import Turn

__all__ = ["NAME_KINDS", "NameIndex", "NameKind", "SortedNames"]

_BLOCK: Final = 1_000
_AT_ONCE: Final = 200
"""Names that are added or checked before it is looked whether the turn is over."""

NameKind = Literal["queue", "dead", "topic", "service"]
NAME_KINDS: Final[tuple[NameKind, ...]] = ("queue", "dead", "topic", "service")


class SortedNames:
    """Names in order, in blocks of limited length: adding one moves a few others only."""

    def __init__(self) -> None:
        self._blocks: list[list[str]] = []
        self._firsts: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, name: str) -> None:
        """No effect if it is there."""
        if not self._blocks:
            self._blocks, self._firsts, self._count = [[name]], [name], 1
            return
        number = max(bisect_right(self._firsts, name) - 1, 0)
        block = self._blocks[number]
        index = bisect_left(block, name)
        if index < len(block) and block[index] == name:
            return
        insort(block, name)
        self._count += 1
        self._firsts[number] = block[0]
        if len(block) > 2 * _BLOCK:
            self._blocks[number : number + 1] = [block[:_BLOCK], block[_BLOCK:]]
            self._firsts[number : number + 1] = [block[0], block[_BLOCK]]

    def discard(self, name: str) -> None:
        """No effect if it is not there."""
        number = bisect_right(self._firsts, name) - 1
        if number < 0:
            return
        block = self._blocks[number]
        index = bisect_left(block, name)
        if index == len(block) or block[index] != name:
            return
        del block[index]
        self._count -= 1
        if block:
            self._firsts[number] = block[0]
        else:
            del self._blocks[number], self._firsts[number]

    def after(self, name: str, most: int) -> list[str]:
        """Some of the names after this one, in order, at most `most`; none after the last. An empty
        name is before all others."""
        number = max(bisect_right(self._firsts, name) - 1, 0)
        for block in self._blocks[number : number + 2]:
            index = bisect_right(block, name)
            if index < len(block):
                return block[index : index + most]
        return []


class NameIndex:
    """The names of a store's destinations, by kind. Queues of dead letters are a kind of their own.

    New destinations have larger numbers than all before them, and are the last ones of the store's
    names: what is new is found from the end. What is missing shows in how many there are.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._newest = -1
        self._names: dict[NameKind, SortedNames] = {}

    async def names(self, hub: Hub, kind: NameKind, turn: Turn) -> SortedNames:
        """Those of a kind, as of now. What is created or removed meanwhile may be in there or not:
        the caller looks up each."""
        if self._store is not hub.store:
            # On a standby, which reads another moment each time.
            self._store, self._newest = hub.store, -1
            self._names = {each: SortedNames() for each in NAME_KINDS}
        # Another request may begin with another store at each pause.
        store, names = hub.store, self._names
        await self._add_new(store, names, turn)
        if sum(map(len, names.values())) != len(store.destinations()):
            await self._drop_removed(store, names, turn)
        return names[kind]

    async def _add_new(self, store: Store, names: dict[NameKind, SortedNames], turn: Turn) -> None:
        numbers = store.destinations()
        if self._newest < 0:
            # Read from disk, they are not in order of their numbers.
            new = list(numbers)
        else:
            new = []
            for name in reversed(numbers):
                if numbers[name] <= self._newest:
                    break
                new.append(name)
        newest = max((numbers[name] for name in new), default=self._newest)
        for start in range(0, len(new), _AT_ONCE):
            for name in new[start : start + _AT_ONCE]:
                names[kind_of(name)].add(name)
            await turn.pause()
        if names is self._names:
            # At last: a request that comes meanwhile adds the same names, to no effect.
            self._newest = max(self._newest, newest)

    @staticmethod
    async def _drop_removed(store: Store, names: dict[NameKind, SortedNames], turn: Turn) -> None:
        for some in names.values():
            name = ""
            while batch := some.after(name, _AT_ONCE):
                name = batch[-1]
                numbers = store.destinations()
                for each in batch:
                    if each not in numbers:
                        some.discard(each)
                await turn.pause()


def kind_of(destination: str) -> NameKind:
    """What the index has it as."""
    if destination.startswith("queue/"):
        return "dead" if destination.endswith("/dead") else "queue"
    return "topic" if destination.startswith("topic/") else "service"
