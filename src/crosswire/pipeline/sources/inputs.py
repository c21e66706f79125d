"""Input paths: which of them are capture files, and which are tables of a hub's lake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from crosswire.capture.headers import is_capture
from crosswire.errors import InvalidInput
from crosswire.lake.schemas import SCHEMAS
from crosswire.pipeline.stores import local_path, open_store

__all__ = ["Inputs", "find_inputs", "search"]


_LAKE: Final = {"wire": "taps", "messages": "messages", "ledger": "ledgers", "gaps": "gaps"}
"""Tables of a lake, and the fields of Inputs for them."""
_CAPTURE: Final = re.compile(r"\.(?:pcap|pcapng|cap)\d*(?:\.gz|\.zst)?$", re.IGNORECASE)
"""Names of captures in stores in which looking into every file would take too long."""


@dataclass(frozen=True)
class Inputs:
    """Paths by kind. `captures` are files; `taps`, `messages` and `ledgers` are folders of lakes
    (`wire/`, `messages/`, `ledger/`) or single files of these; `gaps` is what hubs recorded as
    missing in them."""

    captures: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    ledgers: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()


def find_inputs(paths: Iterable[str]) -> Inputs:
    """Sort paths by what they hold. Raises InvalidInput for a path that can't be read, or if
    nothing is found.

    A file is a capture, or one of a lake. A folder is a lake (or has one in `lake/`), or one table
    of it, or is searched for capture files, by their content. A URL is that of a capture file, by
    its name, or of a folder that has some; a lake; or the folder of a table of one: `messages`,
    `ledger`, or else its wire.
    """
    paths = list(paths)
    found = search(paths)
    if replace(found, gaps=()) == Inputs():
        raise InvalidInput(
            f"there is nothing to read in {', '.join(paths)}: no capture file, and no lake with "
            "wire/, messages/ or ledger/"
        )
    return found


def search(paths: Iterable[str]) -> Inputs:
    """Like `find_inputs`, but nothing found is no error: a stream waits for input."""
    found: dict[str, dict[str, None]] = {name: {} for name in ("captures", *_LAKE.values())}
    for name in paths:
        if "://" in name:
            for where, url in _sort_url(name.rstrip("/")):
                found[where][url] = None
            continue
        try:
            for where, path in _sort(Path(name)):
                found[where][str(path.resolve())] = None
        except OSError as error:
            raise InvalidInput(f"can't read {error.filename}: {error.strerror}") from error
    return Inputs(**{name: tuple(each) for name, each in found.items()})


def _sort(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        if is_capture(path):
            yield "captures", path
        elif (table := _table_of(path)) is not None:
            yield _LAKE[table], path
        else:
            raise InvalidInput(
                f"{path} is neither a capture file (pcap, pcapng) nor a file of a lake"
            )
        return
    if not path.is_dir():
        raise InvalidInput(f"{path} does not exist")
    lake = next((each for each in (path, path / "lake") if _is_lake(each)), None)
    if lake is not None:
        for name, where in _LAKE.items():
            if _first_file(lake / name) is not None:
                yield where, lake / name
        return
    first = _first_file(path)
    if first is not None:
        table = _table_of(first)
        if table is None:
            raise InvalidInput(f"{first} is no file of a lake's wire/, messages/ or ledger/")
        yield _LAKE[table], path
        return
    for file in sorted(path.rglob("*")):
        if _may_be_capture(file):
            yield "captures", file


def _sort_url(url: str) -> Iterator[tuple[str, str]]:
    last = url.rpartition("/")[2]
    if last in _LAKE:
        yield _LAKE[last], url
    elif _CAPTURE.search(last):
        yield "captures", local_path(url)
    else:
        names = open_store(url).names("")
        captures = [name for name in names if _CAPTURE.search(name)]
        for name in captures:
            yield "captures", local_path(f"{url}/{name}")
        for name in _LAKE:
            if name in names:
                yield _LAKE[name], f"{url}/{name}"
        if not captures and not set(names) & set(_LAKE):
            yield "taps", url  # the folder of a table under another name


def _is_lake(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in _LAKE)


def _first_file(table: Path) -> Path | None:
    """Any file of a table's folder."""
    return next(table.glob("date=*/*.parquet"), None)


def _table_of(file: Path) -> str | None:
    """The table of a lake whose columns a file has; None if it is none of them."""
    if file.suffix != ".parquet":
        return None
    try:
        names = pq.read_schema(file).names
    except pa.ArrowException as error:
        raise InvalidInput(f"{file} is damaged: {error}") from error
    return next((table for table in _LAKE if SCHEMAS[table].names == names), None)


def _may_be_capture(file: Path) -> bool:
    try:
        return file.is_file() and not file.name.startswith(".") and is_capture(file)
    except FileNotFoundError:
        return False  # removed since the folder was listed
