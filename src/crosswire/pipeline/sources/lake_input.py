"""What there is of a hub's lake, looked at before any table is made of it.

Rows are numbered node by node, and a file's name has its node, its first and its last number. So
names alone show rows that are there twice and rows that are missing; the footer of each file shows
whether it holds what its name promises, where pyarrow knows the file system. Tables that are made
of doubled or unknown rows would accuse the hub of what somebody did to its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from crosswire.errors import InvalidInput
from crosswire.lake.files import LakeFile, date_of, parse_name
from crosswire.lake.schemas import SCHEMAS
from crosswire.lake.terms import TermGap, counted, outside_gaps
from crosswire.pipeline.sources.inputs import Inputs
from crosswire.pipeline.tables.missing_rows import ALWAYS_US, MissingLakeRows

__all__ = [
    "LakeInput",
    "SkippedFile",
    "check_contents",
    "foreign_name",
    "hole_before",
    "inspect_lake",
]

_FOLDERS: Final = {"wire": "taps", "messages": "messages", "ledger": "ledgers", "gaps": "gaps"}
"""The tables of a lake, and the fields of Inputs with their folders."""
_READERS: Final = 8
_DATED: Final = "date="
_PARQUET: Final = ".parquet"
_NO_TABLE: Final = -1

Listing = Callable[[str], Iterable[str]]
"""The paths of the files two levels below a folder that is not in the local file system."""


@dataclass(frozen=True)
class SkippedFile:
    """A file that is not read, and why."""

    table: str
    path: str
    reason: str


@dataclass(frozen=True)
class LakeInput:
    """The lake's part of the input.

    inputs    what to read: folders, or the files of a folder in which some are skipped
    missing   rows that should be there and are not
    skipped   files that are not read
    """

    inputs: Inputs
    missing: tuple[MissingLakeRows, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()

    @property
    def notes(self) -> list[str]:
        """A line for each hole and each skipped file."""
        skipped = [f"skipped {each.path}: {each.reason}" for each in self.skipped]
        return [each.note for each in self.missing] + skipped


@dataclass
class _TableFiles:
    """The files of one table by folder, what is wrong with them, and those that don't count,
    because a later leader of the hub has written theirs."""

    table: str
    by_folder: dict[str, list[LakeFile]] = field(default_factory=dict)
    faults: list[SkippedFile] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)

    def skip(self, path: str, reason: str) -> None:
        self.faults.append(SkippedFile(self.table, path, reason))

    @property
    def files(self) -> list[LakeFile]:
        """All that are to be read, by node and number."""
        skipped = {fault.path for fault in self.faults} | self.replaced
        found = [each for each in chain(*self.by_folder.values()) if str(each.path) not in skipped]
        return sorted(found, key=lambda each: (each.node, each.first, -each.last))


def inspect_lake(
    inputs: Inputs,
    *,
    since_us: int = 0,
    skip_damaged: bool = False,
    listing: Listing | None = None,
) -> LakeInput:
    """Check every file of the lakes in `inputs`, from the date of `since_us` on.

    Raises InvalidInput for files that hold rows which others have too, whose names are not those of
    a lake, or that don't hold what their names promise. With `skip_damaged` such files are left out
    and reported instead; files that share only a part of their rows are an error even then.
    """
    since = date_of(since_us) if since_us else ""
    tables = {}
    for table, name in _FOLDERS.items():
        found = _TableFiles(table)
        for folder in getattr(inputs, name):
            _list(found, folder, since, listing)
        tables[table] = found
    _leave_replaced(tables)
    for found in tables.values():
        _check_contents(found)
        _check_overlaps(found)
    faults = [fault for found in tables.values() for fault in found.faults]
    if faults and not skip_damaged:
        others = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise InvalidInput(
            f"{faults[0].path} {faults[0].reason}{others}; remove what does not belong there, or "
            "use --skip-damaged, which leaves it out and calls uncertain what depends on it"
        )
    chosen = {name: _paths(tables[table]) for table, name in _FOLDERS.items()}
    narrowed = Inputs(captures=inputs.captures, **chosen)
    return LakeInput(narrowed, tuple(_missing(tables)), tuple(faults))


def _paths(found: _TableFiles) -> tuple[str, ...]:
    """Folders as they are; of one with skipped files, the other files."""
    faulty = {fault.path for fault in found.faults} | found.replaced
    paths: list[str] = []
    for folder, files in found.by_folder.items():
        is_whole = not any(path == folder or path.startswith(f"{folder}/") for path in faulty)
        rest = [str(each.path) for each in files if str(each.path) not in faulty]
        paths += [folder] if is_whole else rest
    return tuple(paths)


# ----------------------------------------------------------------------------------------- listing


def _list(found: _TableFiles, folder: str, since: str, listing: Listing | None) -> None:
    files = found.by_folder.setdefault(folder, [])
    for name in _names(folder, listing):
        # Path would damage a URL (`s3://`): only its last two parts are looked at.
        day, _, last = name.rpartition("/")
        date = day.rpartition("/")[2]
        if last.startswith((".", "_")):
            continue
        is_alone = name == folder
        file = parse_name(found.table, date.removeprefix(_DATED), Path(last))
        if file is None or not (is_alone or date.startswith(_DATED)):
            found.skip(name, foreign_name(found.table))
        elif is_alone or file.date >= since:
            files.append(file._replace(path=name))  # type: ignore[arg-type]


def foreign_name(table: str) -> str:
    """What is wrong with a file whose name is not that of a lake's file."""
    return f"has no name of a file of {table}/: its rows are unknown"


def _names(folder: str, listing: Listing | None) -> Iterator[str]:
    if "://" in folder:
        if folder.endswith(_PARQUET):
            yield folder
        else:
            yield from () if listing is None else listing(folder)
        return
    path = Path(folder)
    if path.is_file():
        yield folder
        return
    for each in path.iterdir():
        if each.name.startswith((".", "_")):
            continue
        if each.is_dir() and each.name.startswith(_DATED):
            yield from (str(file) for file in each.iterdir())
        else:
            yield str(each)


def _leave_replaced(tables: Mapping[str, _TableFiles]) -> None:
    """Leave out what a later leader has written again, or has given up."""
    for found in tables.values():
        files = found.files
        found.replaced |= {str(each.path) for each in files} - {
            str(each.path) for each in counted(files)
        }
    if not any(each.term for each in tables["gaps"].files):
        return
    gaps = [
        TermGap(row["table"], row["node"], row["first"], row["last"], file.term)
        for file in tables["gaps"].files
        for row in _gap_rows(file)
    ]
    for table in ("messages", "ledger"):
        files = tables[table].files
        tables[table].replaced |= {str(each.path) for each in files} - {
            str(each.path) for each in outside_gaps(files, gaps, _ids_in)
        }


def _ids_in(file: LakeFile) -> tuple[int, int] | None:
    try:
        opened = _open(file.path)
        if opened is None:
            return None
        with opened:
            return _range(opened.metadata, "id")
    except (OSError, pa.ArrowException):
        return None


# ---------------------------------------------------------------------------------------- contents


def _check_contents(found: _TableFiles) -> None:
    for file, reason in check_contents(found.files):
        found.skip(str(file.path), reason)


def check_contents(files: Sequence[LakeFile]) -> Iterator[tuple[LakeFile, str]]:
    """The files that don't hold what their names promise, by their footers, and why."""
    with ThreadPoolExecutor(_READERS) as pool:
        for file, reason in zip(files, pool.map(_fault_of, files), strict=True):
            if reason is not None:
                yield file, reason


def _fault_of(file: LakeFile) -> str | None:
    try:
        opened = _open(file.path)
        if opened is None:
            return None  # Spark reads it by other means; its name was checked
        with opened:
            footer = opened.metadata
            if file.table == "gaps":
                opened.read()  # small, and read here: a flipped bit shows only now
    except FileNotFoundError:
        return None  # compacted, or removed by retention, since it was listed
    except (OSError, pa.ArrowException) as error:
        return f"is damaged: {' '.join(str(error).split())}"
    if footer.schema.to_arrow_schema().names != SCHEMAS[file.table].names:
        return f"has not the columns of {file.table}/"
    nodes, numbers = _range(footer, "node"), _range(footer, "seq")
    due = file.last - file.first + 1
    if footer.num_rows != due or (numbers is not None and numbers != (file.first, file.last)):
        return f"holds {footer.num_rows} rows {_shown(numbers)}, its name promises {due}"
    if nodes is not None and nodes != (file.node, file.node):
        return "holds rows of another node than that of its name"
    return None


def _open(path: Path | str) -> pq.ParquetFile | None:
    """A file by its path or URL; None in a file system that pyarrow does not know. Raises OSError
    or ArrowException if it is damaged."""
    name = str(path)
    if "://" not in name:
        return pq.ParquetFile(name, page_checksum_verification=True)
    try:
        # Listings have names as they are, and a URI has no spaces.
        system, inside = fs.FileSystem.from_uri(quote(name, safe="/:@="))
    except (OSError, pa.ArrowException):
        return None
    return pq.ParquetFile(inside, filesystem=system, page_checksum_verification=True)


def _shown(numbers: tuple[Any, Any] | None) -> str:
    return "" if numbers is None else f"({numbers[0]} to {numbers[1]})"


def _range(footer: Any, column: str) -> tuple[Any, Any] | None:
    """The lowest and highest value of a column by the footer; None if it does not have them."""
    index = footer.schema.names.index(column)
    groups = [footer.row_group(number).column(index) for number in range(footer.num_row_groups)]
    statistics = [group.statistics for group in groups]
    if not statistics or any(each is None or not each.has_min_max for each in statistics):
        return None
    return min(each.min for each in statistics), max(each.max for each in statistics)


def _check_overlaps(found: _TableFiles) -> None:
    """Skip files whose rows are in another file. Raises InvalidInput if only some of them are."""
    before: LakeFile | None = None
    for file in found.files:
        if before is None or before.node != file.node or file.first > before.last:
            before = file
        elif file.last <= before.last:
            found.skip(str(file.path), f"holds rows that are in {before.path} too")
        else:
            raise InvalidInput(
                f"{before.path} and {file.path} both hold rows {file.first} to {before.last}: "
                "remove the wrong one"
            )


# ------------------------------------------------------------------------------------------- holes


def _missing(tables: Mapping[str, _TableFiles]) -> Iterator[MissingLakeRows]:
    recorded = list(_recorded(tables["gaps"]))
    for table in ("ledger", "messages", "wire"):
        files = tables[table].files
        for before, after in pairwise(files):
            if before.node == after.node and after.first > before.last + 1:
                hole = hole_before(after, before.last, before)
                yield replace(hole, recorded=_recorded_reason(hole, recorded))
    yield from (each for each in recorded if each.by_id)
    if tables["ledger"].files and not tables["messages"].files:
        yield MissingLakeRows("messages", "", _NO_TABLE, _NO_TABLE)


def hole_before(file: LakeFile, reached: int, before: LakeFile | None = None) -> MissingLakeRows:
    """The rows that are missing between the row `reached`, which the file `before` ends with, if
    it is still there, and a file."""
    earlier = None if before is None else _times(before.path)
    later = _times(file.path)
    return MissingLakeRows(
        file.table,
        file.node,
        reached + 1,
        file.first - 1,
        after_us=0 if earlier is None else earlier[1],
        before_us=ALWAYS_US if later is None else later[0],
    )


def _recorded_reason(hole: MissingLakeRows, recorded: Sequence[MissingLakeRows]) -> str:
    """What the hub recorded about a hole; empty if nothing."""
    for each in recorded:
        is_same = (each.table, each.node) == (hole.table, hole.node)
        if is_same and each.first <= hole.last and each.last >= hole.first:
            return each.recorded
    return ""


def _times(path: Path | str) -> tuple[int, int] | None:
    """The lowest and the highest time in a file; None if it does not show them."""
    try:
        opened = _open(path)
        if opened is None:
            return None
        with opened:
            return _range(opened.metadata, "time")
    except (OSError, pa.ArrowException):
        return None


def _recorded(found: _TableFiles) -> Iterator[MissingLakeRows]:
    """Gaps that hubs recorded themselves."""
    for file in found.files:
        for row in _gap_rows(file):
            yield MissingLakeRows(
                row["table"],
                row["node"],
                row["first"],
                row["last"],
                recorded=row["reason"],
                by_id=row["table"] == "messages",
            )


def _gap_rows(file: LakeFile) -> list[dict[str, Any]]:
    """The rows of a file of `gaps`. Raises InvalidInput."""
    try:
        opened = _open(file.path)
        if opened is None:
            return []
        with opened:
            rows: list[dict[str, Any]] = opened.read().to_pylist()
            return rows
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput(f"can't read {file.path}: {error}") from error
