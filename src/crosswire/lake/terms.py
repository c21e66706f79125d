"""Files of several leaders: which of them count where they overlap.

The replicas of a hub write to one lake, one after the other. A leader that stands still between the
commit of a seal and the renaming of its files may go on when another one leads, has published the
same rows, and somebody has compacted them. So files carry the term of their leader in their names,
and a leader first commits the last seal again under its own term. Of two files that overlap the one
of the higher term counts, and the other one is not there; the same holds for a file and a gap.

A hub without replicas has term 0, which its files don't show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

__all__ = ["LakeFile", "TermGap", "counted", "outside_gaps"]


class LakeFile(NamedTuple):
    """What a file's path reveals of it: no file has to be opened to find rows by their seq."""

    table: str
    date: str
    node: str
    first: int
    last: int
    path: Path
    term: int = 0


class TermGap(NamedTuple):
    """A gap that a leader recorded: rows of the ledger by number, messages by id."""

    table: str
    node: str
    first: int
    last: int
    term: int


def counted(files: Sequence[LakeFile]) -> list[LakeFile]:
    """Those of a table's files that count, in the order of `files`: none overlaps one of a higher
    term of the same node. Files of one term are not compared."""
    if not _overlap(files):
        return list(files)
    chosen: set[LakeFile] = set()
    nodes = groupby(sorted(files, key=lambda each: each.node), key=lambda each: each.node)
    for _, own in nodes:
        taken: list[tuple[int, int]] = []
        by_term = sorted(own, key=lambda each: -each.term)
        for _, of_term in groupby(by_term, key=lambda each: each.term):
            fitting = [each for each in of_term if not _meets(taken, each.first, each.last)]
            chosen.update(fitting)
            taken = _joined([*taken, *((each.first, each.last) for each in fitting)])
    return [each for each in files if each in chosen]


def outside_gaps(
    files: Sequence[LakeFile],
    gaps: Iterable[TermGap],
    ids_of: Callable[[LakeFile], tuple[int, int] | None],
) -> list[LakeFile]:
    """Those of a table's files that no leader of a later term gave up: their rows are in none of
    its gaps. `ids_of` gives the first and the last message of a file, None where it can't."""
    found = list(gaps)
    if not found:
        return list(files)
    return [each for each in files if not any(_is_given_up(each, gap, ids_of) for gap in found)]


def _is_given_up(
    file: LakeFile, gap: TermGap, ids_of: Callable[[LakeFile], tuple[int, int] | None]
) -> bool:
    if (gap.table, gap.node) != (file.table, file.node) or gap.term <= file.term:
        return False
    own: tuple[int, int] | None = (file.first, file.last)
    if file.table == "messages":
        own = ids_of(file)
    return own is not None and own[0] <= gap.last and own[1] >= gap.first


def _overlap(files: Sequence[LakeFile]) -> bool:
    """Are there rows in files of two terms? Mostly not, and then nothing else has to be done."""
    ordered = sorted((each.node, each.first, each.last) for each in files)
    return any(
        one[0] == other[0] and other[1] <= one[2] for one, other in pairwise(ordered)
    ) and any(each.term != files[0].term for each in files)


def _meets(taken: list[tuple[int, int]], first: int, last: int) -> bool:
    """Does a range meet one of these, which are in order and apart from each other?"""
    index = bisect_right(taken, (last, 1 << 64)) - 1
    return index >= 0 and taken[index][1] >= first


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined
