"""Which row answers which: what `PendingRequests` does, for many connections at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.contract import FrameRows, Memories
from crosswire.pipeline.decode.kernels import INT, INTS, OUT_INTS, kernel
from crosswire.pipeline.decode.meanings.contract import MOST_ASKED, PendingRequests, ProtocolMemory
from crosswire.pipeline.decode.text import distinct

__all__ = ["GET", "PASS", "PUT", "TAKE", "Matching"]

# What a row does with the requests that are pending: nothing, add one, remove one, look one up.
PASS: Final = 0
PUT: Final = 1
TAKE: Final = 2
GET: Final = 3

_NO_OCTETS: Final = np.empty(0, np.uint8)


@kernel(INTS, INTS, INTS, INTS, INT, INT, OUT_INTS, OUT_INTS, returns=INT)
def _match(
    owners: Numbers,
    keys: Numbers,
    answers: Numbers,
    steps: Numbers,
    count: int,
    most: int,
    partners: Numbers,
    left: Numbers,
) -> int:
    """Set `partners`, and write the rows of requests that are still pending to `left`.

    Owners ascend, so that one list of requests serves all connections: `asked` has their rows in
    order, those of the current connection from `begin` on, NONE where one was removed. By key,
    `where` is the index in that list, valid only if `whose` is the current owner: so nothing has to
    be cleared between connections. `keys` are below `count`. Returns how many are left.
    """
    where, whose = np.full(count, NONE, np.int64), np.full(count, NONE, np.int64)
    asked, asked_key = np.empty(len(owners), np.int64), np.empty(len(owners), np.int64)
    begin, end, oldest, held, kept = 0, 0, 0, 0, 0
    owner = NONE
    for row in range(len(owners) + 1):
        if row == len(owners) or owners[row] != owner:
            for index in range(begin, end):
                if asked[index] != NONE:
                    left[kept] = asked[index]
                    kept += 1
            if row == len(owners):
                break
            owner, begin, oldest, held = owners[row], end, end, 0
        step = steps[row]
        if step == PASS:
            continue
        key = keys[row]
        known = whose[key] == owner and where[key] != NONE
        if step == PUT:
            answer = answers[row]
            if answer != NONE and whose[answer] == owner and where[answer] != NONE:
                partners[row] = asked[where[answer]]
                continue
            if known:
                asked[where[key]] = row
                continue
            whose[key], where[key] = owner, end
            asked[end], asked_key[end] = row, key
            end += 1
            held += 1
            # As `PendingRequests` does it, the oldest request is given up for the newest.
            if held > most:
                while asked[oldest] == NONE:
                    oldest += 1
                asked[oldest] = NONE
                where[asked_key[oldest]] = NONE
                held -= 1
        elif known:
            partners[row] = asked[where[key]]
            if step == TAKE:
                asked[where[key]] = NONE
                where[key] = NONE
                held -= 1
    return kept


V = TypeVar("V")
M = TypeVar("M", bound=ProtocolMemory)


class Matching(Generic[M, V]):
    """Matches requests with the responses of the other side, which have the same key.

    Requests that are pending from earlier batches take part as if they were rows after the last:
    `keys` and `values` are theirs, in order, for the caller to number and look up like those of the
    rows.
    """

    def __init__(
        self, rows: FrameRows, memories: Memories[M], pending: Callable[[M], PendingRequests[V]]
    ) -> None:
        self._rows, self._memories, self._pending = rows, memories, pending
        self._owners: list[int] = []
        self.keys: list[Any] = []
        self.values: list[V] = []
        for owner, memory in memories.known.items():
            for key, value in pending(memory).items():
                self._owners.append(owner)
                self.keys.append(key)
                self.values.append(value)
        self._left: Numbers = np.empty(0, np.int64)

    def numbered(self, numbers: NDArray[np.uint64]) -> Numbers:
        """Codes of keys that are numbers: of the rows, then of the earlier requests."""
        before = np.array([key[1] for key in self.keys], np.uint64)
        tags = np.append(numbers, before).view(np.int64)
        zeros = np.zeros(len(tags), np.int64)
        return distinct(_NO_OCTETS, zeros, zeros, tags)[0]

    def texts(
        self,
        octets: Bytes,
        starts: Numbers,
        lengths: Numbers,
        written: Callable[[Any], bytes] = lambda key: key[1].encode(),
    ) -> Numbers:
        """Codes of keys that are texts: of the rows, NONE for a length of NONE, then of the earlier
        requests, whose keys `written` gives as octets."""
        if not self.keys:
            return distinct(octets, starts, lengths)[0]
        before = [written(key) for key in self.keys]
        sizes = np.array([len(each) for each in before], np.int64)
        return distinct(
            np.append(octets, np.frombuffer(b"".join(before), np.uint8)),
            np.append(starts, len(octets) + np.cumsum(sizes) - sizes),
            np.append(lengths, sizes),
        )[0]

    def partners(self, keys: Numbers, steps: Numbers, answers: Numbers | None = None) -> Numbers:
        """By row: the row of the request that it takes or gets, NONE if there is none. A row after
        the last is an earlier request.

        `keys` are the codes of the rows, then of the earlier requests: they distinguish requests of
        one side. `answers` are a second key of rows that put: if there is a request with that key,
        they get it instead.
        """
        before, count = len(self._owners), len(self._rows)
        owners = self._rows.owner
        asked_by = [key[0] for key in self.keys]
        asker = np.append(self._rows.forward ^ (steps > PUT), np.array(asked_by, np.bool_))
        # The two sides of a connection choose their keys independently.
        keys = 2 * keys + asker
        gets = np.full(len(keys), NONE)
        if answers is not None:
            gets[:count] = np.where(answers == NONE, NONE, 2 * answers + ~self._rows.forward)
        if before:
            # The earlier requests of a connection come before its rows.
            owners = np.append(owners, self._owners)
            steps = np.append(steps, np.full(before, PUT))
            turn = np.lexsort((np.arange(len(owners)) < count, owners))
            owners, keys, gets, steps = owners[turn], keys[turn], gets[turn], steps[turn]
        partners = np.full(len(owners), NONE)
        left = np.empty(len(owners), np.int64)
        most_key = int(max(keys.max(initial=NONE), gets.max(initial=NONE)))
        kept = _match(owners, keys, gets, steps, most_key + 1, MOST_ASKED, partners, left)
        self._left = left[:kept]
        if not before:
            return partners
        self._left = turn[self._left]
        found = np.full(len(owners), NONE)
        found[turn] = np.where(partners == NONE, NONE, turn[partners])
        return found[:count]

    def remember(self, entry_of: Callable[[int], tuple[Any, V]]) -> None:
        """Write the requests that are still pending into the memories of the connections that
        stay. `entry_of` gives key and value of a row."""
        count, stays = len(self._rows), self._memories.stays
        owners = np.append(self._rows.owner, np.array(self._owners, np.int64))[self._left]
        left, owners = self._left[stays[owners]], owners[stays[owners]]
        entries: dict[int, list[tuple[Any, V]]] = {
            owner: [] for owner in self._memories.known if stays[owner]
        }
        for owner, row in zip(owners.tolist(), left.tolist(), strict=True):
            before = row - count
            entry = entry_of(row) if before < 0 else (self.keys[before], self.values[before])
            entries.setdefault(owner, []).append(entry)
        for owner, remembered in entries.items():
            self._pending(self._memories.of(owner)).renew(remembered)
